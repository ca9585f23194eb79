"""Which columns of a state a job goes on with, if it keeps others than the snapshot holds.

Theory of operation
-------------------
A state with a column for each value is taken back by the names of its columns. An aggregate that
was added to a grouping, or a column that was added to the rows of a join, has nothing in the
snapshot: it begins empty, or with a value that a person gives. One that was taken out is left
behind. What makes a row what it is (its keys, its window, its event time) stays.

Rules of this file
------------------
1. Pure: names and types in, a change or a refusal out.
2. Columns of one aggregate come and go together.
3. Nothing is guessed: where what comes may be what goes, under another name, a person says which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stillframe.json_values import JsonValue


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Part:
    """Columns that come and go together: those of an aggregate, or one of a row."""

    name: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class StateColumns:
    """The columns of a state, as an operator keeps it now."""

    keys: tuple[str, ...]
    """In the order in which they are hashed."""
    lasting: tuple[str, ...]
    """Others without which a row means nothing."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """What becomes of a state whose columns are not those of the snapshot."""

    added: tuple[str, ...] = ()
    """By the names of parts."""
    dropped: tuple[str, ...] = ()
    """By the names of columns."""

    def in_words(self, given: Mapping[str, JsonValue]) -> str:
        """For people, without the name of the operator."""
        return "; ".join([*self._beginnings(given), *self._ends()])

    def _beginnings(self, given: Mapping[str, JsonValue]) -> Iterator[str]:
        for name in self.added:
            value = given.get(name)
            with_what = "empty" if value is None else f"with {value!r}"
            yield f"{name} is new and begins {with_what} for what was kept before"

    def _ends(self) -> Iterator[str]:
        if self.dropped:
            yield f"{', '.join(self.dropped)} is not kept any more and left behind"


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a state cannot go on with these columns, and what to do."""

    why: str
    remedy: str


def change_of(
    before: Sequence[Column],
    keys_before: Sequence[str],
    now: StateColumns,
    given: Collection[str] = (),
) -> Changed | Refused:
    """`before` are the columns of the snapshot; `given`: the parts for which a person has said what
    they begin with. Types of columns that stay are not looked at."""
    there = {column.name: column for column in before}
    if tuple(keys_before) != now.keys:
        return Refused(
            f"it is kept by {_listed(keys_before)} in the snapshot and by {_listed(now.keys)} in"
            " the job",
            "group by the same keys in the same order, or give the operator another uid",
        )
    for name in now.lasting:
        if name not in there:
            return Refused(
                f"it has no column {name} in the snapshot, which tells what a row belongs to",
                "keep it as before, or give the operator another uid",
            )
    added = [part for part in now.parts if not any(c.name in there for c in part.columns)]
    kept = {*now.keys, *now.lasting, *(c.name for p in now.parts for c in p.columns)}
    dropped = [column for column in before if column.name not in kept]
    refused = (
        _of_halves(now, there, added, dropped)
        or _of_numbered(before, dropped)
        or _of_renamed(added, dropped, given)
    )
    changed = Changed(tuple(part.name for part in added), tuple(c.name for c in dropped))
    return refused or changed


def _of_halves(
    now: StateColumns,
    there: Mapping[str, Column],
    added: Sequence[Part],
    dropped: Sequence[Column],
) -> Refused | None:
    """An aggregate that is kept in other columns than before."""
    for part in now.parts:
        is_partly = part not in added and any(c.name not in there for c in part.columns)
        was_otherwise = any(c.name.startswith(f"{part.name}.") for c in dropped)
        if is_partly or was_otherwise:
            return Refused(
                f"{part.name} is kept in other columns in the snapshot",
                "let it read a column of the type it had, or give the operator another uid",
            )
    return None


def _of_numbered(before: Sequence[Column], dropped: Sequence[Column]) -> Refused | None:
    """Two of one name have numbers: without the first, the second has its name."""
    names = {column.name for column in before}
    for column in dropped:
        whole, _, number = column.name.rpartition("_")
        if number.isdecimal() and whole in names:
            return Refused(
                f"{whole} and {column.name} cannot be told apart once one of them is gone",
                "keep both, or give the operator another uid",
            )
    return None


def _of_renamed(
    added: Sequence[Part], dropped: Sequence[Column], given: Collection[str]
) -> Refused | None:
    for part in added:
        if part.name in given or len(part.columns) > 1:
            continue
        for column in dropped:
            if column.type == part.columns[0].type:
                return Refused(
                    f"{part.name} is new and {column.name} is gone, which may be one and the same",
                    f"give the column the name it had, or say with stateDefaults what {part.name}"
                    f""" begins with, as in '{{"{part.name}": null}}'""",
                )
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no key"
