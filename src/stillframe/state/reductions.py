"""Reducing state with a name, as columns: the sum, min or max of each field, for millions of keys.

Theory of operation
-------------------
What is kept of a key is a row of numpy columns, those of the engine's own aggregates
(`accumulators`): for each field its value and whether there has been one, and at the end whether
the key has a row at all. Which row is a key's is for each backend to say.

What a program adds is gathered, as one Python row for each key, and comes into the columns many
keys at a time. So `add` touches a dict only, and `get` puts what is kept and what was gathered
together. A key that was cleared is noted: what is kept of it is void from then on, and its row is
emptied with the next fold.

Rules of this file
------------------
1. The loop thread calls everything; what a backend freezes is folded before.
2. What is frozen holds no row of a key that is not there, and looks like a value state: a program
   may come to a reduction with a name from a function, or go back to one.
"""

from __future__ import annotations

import datetime
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.aggregates import AggregateCall
from stillframe.api.processors import Reduction
from stillframe.errors import DataError, UserCodeError
from stillframe.key_groups import Positions
from stillframe.state.accumulators import accumulators_of
from stillframe.state.backends import VALUE, Declared, Key, ReducingTable
from stillframe.state.columns import Array, ColumnSpec
from stillframe.state.rows import Row

PRESENT = "__present"
"""Whether a key has a row: the last column of those that are kept."""
_FOLDED_KEYS = 8_192
"""So many are gathered before they are folded: to fold few costs as much as to fold many."""
_INT64 = range(-(2**63), 2**63)
_EPOCH = datetime.datetime(1970, 1, 1)
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()

Both = Callable[[Any, Any], Any]
"""Makes one value of two, neither of them None."""


def reductions_of(
    name: str, schema: pa.Schema, reduce: str | Mapping[str, str]
) -> tuple[Reduction, ...]:
    """The reduction of each field, as a program names them; raises where one cannot be kept."""
    by_field = dict.fromkeys(schema.names, reduce) if isinstance(reduce, str) else reduce
    if set(by_field) != set(schema.names) or not by_field:
        raise UserCodeError(
            f"state {name} has the fields {', '.join(schema.names) or 'none'} and reductions of"
            f" {', '.join(map(str, by_field)) or 'none'}: name one for each field"
        )
    for field in schema:
        if reason := _unfit(by_field[field.name], field.type):
            raise UserCodeError(f"state {name} cannot reduce its field {field.name}: {reason}")
    return tuple(cast(Reduction, by_field[field.name]) for field in schema)


def _unfit(function: Any, type_: pa.DataType) -> str | None:
    if function not in get_args(Reduction):
        return f"there is no {function!r} among 'sum', 'min' and 'max', so give a function instead"
    if function == "sum" and not (pt.is_int64(type_) or pt.is_float64(type_)):
        return f"a sum is a long or a double, so declare it as one and not as {type_}"
    if not _is_kept(type_):
        return f"{function} is not made of {type_}, so give a function instead"
    return None


def _is_kept(type_: pa.DataType) -> bool:
    number = pt.is_signed_integer(type_) or pt.is_float32(type_) or pt.is_float64(type_)
    time = pt.is_date32(type_) or (pt.is_timestamp(type_) and type_.unit == "us")
    return bool(number or pt.is_boolean(type_) or time)


def stored_field(name: str) -> str:
    """What the column of a field is called beside those of the key."""
    return f"{VALUE}.{name}"


class Reductions:
    """How the rows of one state are reduced: as Python rows, and as columns."""

    def __init__(self, declared: Declared, functions: Sequence[Reduction]) -> None:
        self._row = declared.value
        fields = list(declared.value.schema)
        stored = [pa.field(stored_field(field.name), field.type) for field in fields]
        self.schema = pa.schema([*stored, pa.field(PRESENT, pa.bool_())])
        """Of what is folded; the key comes before it."""
        named = zip((*functions, "max"), self.schema, strict=True)
        self.calls = [AggregateCall(f, field.name, field.name, field.type) for f, field in named]
        self._accumulators = accumulators_of(self.schema, self.calls)
        self.specs: list[ColumnSpec] = [
            spec for each in self._accumulators for spec in each.columns
        ]
        """Two for each field, its value and whether there has been one; then those of PRESENT."""
        self._both = [
            _both_of(function, field, declared.name)
            for function, field in zip(functions, fields, strict=True)
        ]
        self._only = self._both[0] if len(fields) == 1 else None
        self._loads = [_load_of(field.type) for field in fields]
        self._overflow = f"state {declared.name} has left the range of a 64-bit integer"

    def both(self, kept: Row, more: Row) -> Row:
        """One row of two; what is null counts for nothing."""
        if self._only is not None:
            ours, theirs = kept[0], more[0]
            if theirs is None:
                return kept
            return more if ours is None else (self._only(ours, theirs),)
        return tuple(
            [
                (ours if theirs is None else theirs)
                if ours is None or theirs is None
                else both(ours, theirs)
                for both, ours, theirs in zip(self._both, kept, more, strict=True)
            ]
        )

    def read(self, arrays: Sequence[Array], at: int) -> Row | None:
        """The row in this place of the columns, if there is one."""
        if not arrays[-1].item(at):
            return None
        return tuple(
            [
                load(arrays[2 * n].item(at)) if arrays[2 * n + 1].item(at) else None
                for n, load in enumerate(self._loads)
            ]
        )

    def columns_of(self, rows: pa.StructArray) -> list[pa.Array]:
        """The columns of rows that are there."""
        present = pa.array(np.ones(len(rows), dtype=np.bool_))
        return [*rows.flatten(), present]

    def parts_of(self, rows: pa.StructArray) -> list[Array]:
        """The same, as they are kept."""
        columns = zip(self._accumulators, self.columns_of(rows), strict=True)
        return [part for each, column in columns for part in each.from_snapshot([column])]

    def rows_of(self, parts: Sequence[Array]) -> pa.StructArray:
        """The way back: rows that are all there."""
        fields = list(self._row.schema)
        columns = [
            each.result(parts[2 * n : 2 * n + 2])
            for n, each in enumerate(self._accumulators[: len(fields)])
        ]
        return pa.StructArray.from_arrays(columns, fields=fields)

    def fold(self, arrays: Sequence[Array], at: Positions, rows: Sequence[Row]) -> None:
        """Add rows to those in these places, each of which is here once."""
        others = self.parts_of(self._row.to_arrow(rows))
        kept = [array.take(at) for array in arrays]
        with np.errstate(all="ignore"):
            for n, each in enumerate(self._accumulators):
                pair = slice(2 * n, 2 * n + 2)
                try:
                    kept[pair] = each.combined(kept[pair], others[pair])
                except DataError:
                    raise _left_range(self._overflow) from None
        self.put(arrays, at, kept)

    def put(self, arrays: Sequence[Array], at: Positions, parts: Sequence[Array]) -> None:
        for array, part in zip(arrays, parts, strict=True):
            array[at] = part

    def empty(self, arrays: Sequence[Array], at: Positions) -> None:
        for array, spec in zip(arrays, self.specs, strict=True):
            array[at] = spec.initial


def _both_of(function: Reduction, field: pa.Field, state: str) -> Both:
    if function == "min":
        return _smaller
    if function == "max":
        return _larger
    if pt.is_floating(field.type):
        return _plus
    overflow = f"state {state} has left the range of a 64-bit integer"

    def sum_of(kept: int, more: int) -> int:
        total = kept + more
        if total in _INT64:
            return total
        raise _left_range(overflow)

    return sum_of


def _left_range(what: str) -> DataError:
    return DataError(f"{what}: declare the field as a double to sum more")


def _plus(kept: float, more: float) -> float:
    return kept + more


def _smaller(kept: Any, more: Any) -> Any:
    """NaN is larger than any other number, as in Spark."""
    return more if kept != kept or more < kept else kept


def _larger(kept: Any, more: Any) -> Any:
    return kept if kept != kept or kept >= more else more


def _load_of(type_: pa.DataType) -> Callable[[Any], Any]:
    """Makes a value of a row of what numpy keeps."""
    if pt.is_date32(type_):
        return lambda days: datetime.date.fromordinal(_EPOCH_DAY + days)
    if pt.is_timestamp(type_):
        epoch = _EPOCH.replace(tzinfo=datetime.UTC) if type_.tz else _EPOCH
        return lambda microseconds: epoch + datetime.timedelta(microseconds=microseconds)
    return _same


def _same(value: Any) -> Any:
    return value


class ReducedColumns(ReducingTable[Key]):
    """What the backends have in common: what is gathered, and how it is folded."""

    def __init__(self, declared: Declared, functions: Sequence[Reduction]) -> None:
        self.declared = declared
        self.reductions = Reductions(declared, functions)
        self._both = self.reductions.both
        self._gathered: dict[Key, Row] = {}
        self._cleared: set[Key] = set()
        """Keys of which what is kept is void; what was gathered came after that."""
        self._version = 0

    @property
    def version(self) -> int:
        return self._version + self.has_gathered

    @property
    def has_gathered(self) -> bool:
        return bool(self._gathered or self._cleared)

    @property
    def gathered_count(self) -> int:
        """How many keys will have a row with the next fold, at most."""
        return len(self._gathered)

    def add(self, key: Key, row: Row) -> None:
        gathered = self._gathered.get(key)
        self._gathered[key] = row if gathered is None else self._both(gathered, row)

    def get(self, key: Key) -> Row | None:
        kept = None if key in self._cleared else self.kept(key)
        gathered = self._gathered.get(key)
        if kept is None or gathered is None:
            return kept if gathered is None else gathered
        return self._both(kept, gathered)

    def clear(self, key: Key) -> None:
        self._gathered.pop(key, None)
        self._cleared.add(key)

    def fold_some(self) -> None:
        """Between two batches: take into the columns what was gathered, if that is worth it."""
        if len(self._gathered) + len(self._cleared) >= _FOLDED_KEYS:
            self.fold()

    def fold(self) -> None:
        """Take all that was gathered into the columns."""
        if not self.has_gathered:
            return
        gathered, cleared = self._gathered, self._cleared
        if cleared:
            at = self.places_to_change(list(cleared))
            self.before_emptied(at)
            self.reductions.empty(self.arrays, at)
        if gathered:
            at = self.places_to_change(list(gathered))
            self.before_filled(at)
            self.reductions.fold(self.arrays, at, list(gathered.values()))
        self._gathered, self._cleared = {}, set()
        self._version += 1

    @property
    @abstractmethod
    def arrays(self) -> Sequence[Array]:
        """The columns, as they are now."""

    @abstractmethod
    def kept(self, key: Key) -> Row | None:
        """What the columns have of this key."""

    @abstractmethod
    def places_to_change(self, keys: Sequence[Key]) -> Positions:
        """The place of each of these keys in the columns, where something may be changed now."""

    def before_emptied(self, at: Positions) -> None:
        """The rows in these places are given up."""

    def before_filled(self, at: Positions) -> None:
        """There will be rows in these places."""
