"""What has changed between two snapshots: keys that were added, changed or are gone, by state.

One key group after the other, so that no more than that of each snapshot is in memory. What both
snapshots share, as incremental ones do, is not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa

from stillframe.ids import OperatorUid
from stillframe.protocol.manifests import KeyedState, Manifest
from stillframe.runtime.stored_states import StatePart, batches_of, schema_of, state_parts
from stillframe.state.shapes import KEY, KEY_GROUP, LIST_INDEX, MAP_KEY, Shape
from stillframe.storage.store import Store

Row = Mapping[str, Any]
Snapshot = tuple[Store, Manifest]


@dataclass(slots=True)
class StateDifference:
    """One state of one operator; `key` in examples is the key, for a map with the map's own."""

    uid: OperatorUid
    operator: str
    state: str
    added: int = 0
    changed: int = 0
    gone: int = 0
    same: int = 0
    is_only_in: str | None = None
    """`A` or `B`, if the other has no such state."""
    examples: list[dict[str, Any]] = field(default_factory=list)
    """`{"change": "changed", "key": …, "before": …, "after": …}`, some of each kind."""

    @property
    def is_empty(self) -> bool:
        return not (self.added or self.changed or self.gone or self.is_only_in)


def differences(
    before: Snapshot,
    after: Snapshot,
    examples_max: int,
    is_wanted: Callable[[OperatorUid, str], bool] = lambda uid, state: True,
) -> Iterator[StateDifference]:
    """Of each state that either of them has, in the order of the operators."""
    described = {each.uid: each.name for side in (before, after) for each in side[1].operators}
    for uid, operator in described.items():
        of_before, of_after = (_parts(side, uid) for side in (before, after))
        for name in sorted(of_before | of_after):
            if is_wanted(uid, name):
                found = StateDifference(uid, operator, name)
                if name not in of_before or name not in of_after:
                    found.is_only_in = "A" if name in of_before else "B"
                _compare(
                    found,
                    _Side(before, of_before.get(name, ())),
                    _Side(after, of_after.get(name, ())),
                    examples_max,
                )
                yield found


def _parts(side: Snapshot, uid: OperatorUid) -> dict[str, list[StatePart]]:
    store, manifest = side
    return state_parts(store, manifest, uid)


class _Side:
    """One state in one of the snapshots."""

    def __init__(self, snapshot: Snapshot, parts: Sequence[StatePart]) -> None:
        self._store, self._manifest = snapshot
        self._parts = parts
        self.max_parallelism = self._manifest.max_parallelism

    @property
    def content(self) -> list[tuple[str, int, int]]:
        """What tells files of one content from others."""
        handles = [
            handle
            for part in self._parts
            for handle in (
                [part.stored.file]
                if isinstance(part.stored, KeyedState)
                else [each.file for each in part.stored.files]
            )
        ]
        return sorted((each.path, each.length_bytes, each.crc32) for each in handles)

    @property
    def is_in_files(self) -> bool:
        """Whether none of it is in the metadata, where a path says nothing."""
        return all(
            not isinstance(part.stored, KeyedState) or not part.stored.file.is_inline
            for part in self._parts
        )

    @property
    def address(self) -> str:
        return self._store.address

    def by_group(self, *, in_groups: bool) -> dict[int | None, list[pa.RecordBatch]]:
        found: dict[int | None, list[pa.RecordBatch]] = {}
        for part in self._parts:
            shape = Shape(schema_of(self._store, part))
            for group, batch in batches_of(self._store, part, self.max_parallelism):
                shown = shape.show(batch, group)
                found.setdefault(group if in_groups else None, []).append(shown)
        return found


def _compare(found: StateDifference, before: _Side, after: _Side, examples_max: int) -> None:
    is_shared = before.address == after.address and before.is_in_files and after.is_in_files
    if is_shared and before.content == after.content:
        return
    in_groups = before.max_parallelism == after.max_parallelism
    old, new = (side.by_group(in_groups=in_groups) for side in (before, after))
    examples: dict[str, list[dict[str, Any]]] = {"added": [], "changed": [], "gone": []}
    for group in sorted(old.keys() | new.keys(), key=lambda each: -1 if each is None else each):
        one, other = old.get(group, []), new.get(group, [])
        if _are_equal(one, other):
            found.same += sum(batch.num_rows for batch in one)
            continue
        _compare_rows(found, _rows(one), _rows(other), examples, examples_max)
    found.examples = [each for kind in examples.values() for each in kind]


def _are_equal(one: Sequence[pa.RecordBatch], other: Sequence[pa.RecordBatch]) -> bool:
    if len(one) != len(other):
        return False
    return all(a.equals(b) for a, b in zip(one, other, strict=True))


def _rows(batches: Sequence[pa.RecordBatch]) -> dict[str, tuple[Any, Any]]:
    """By what says which row it is: its key and its value, as people read them.

    Rows of one key, as those of a list, have only their places to be told by.
    """
    found: dict[str, tuple[Any, Any]] = {}
    places: Counter[str] = Counter()
    for batch in batches:
        for row in batch.to_pylist():
            for place_of_another_kind in (KEY_GROUP, LIST_INDEX):
                row.pop(place_of_another_kind, None)
            key = row.pop(KEY, None)
            if MAP_KEY in row:
                key = {KEY: key, MAP_KEY: row.pop(MAP_KEY)}
            name = repr(key)
            value = next(iter(row.values())) if len(row) == 1 else row
            found[f"{name} {places[name]}"] = key, value
            places[name] += 1
    return found


def _compare_rows(
    found: StateDifference,
    old: Mapping[str, tuple[Any, Any]],
    new: Mapping[str, tuple[Any, Any]],
    examples: Mapping[str, list[dict[str, Any]]],
    examples_max: int,
) -> None:
    added = [each for each in new if each not in old]
    gone = [each for each in old if each not in new]
    # As text: a number that is none is equal to itself here.
    changed = [each for each in old if each in new and repr(old[each][1]) != repr(new[each][1])]
    found.added += len(added)
    found.gone += len(gone)
    found.changed += len(changed)
    found.same += len(old) - len(gone) - len(changed)
    for kind, names in (("added", added), ("changed", changed), ("gone", gone)):
        for name in islice(names, max(0, examples_max - len(examples[kind]))):
            key = (old if kind == "gone" else new)[name][0]
            example: dict[str, Any] = {"change": kind, "key": key}
            if kind != "added":
                example["before"] = old[name][1]
            if kind != "gone":
                example["after"] = new[name][1]
            examples[kind].append(example)
