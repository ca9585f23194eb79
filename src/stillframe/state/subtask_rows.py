"""State without keys: lists and maps of one subtask, frozen by reference.

Theory of operation
-------------------
Rows are frozen tuples (`state/rows`), in a Python list or dict. What is handed to a snapshot is the
list itself and how many of its rows count: appending makes it longer, anything else begins another
list. A dict is copied before its first change after it was handed out.

Rules of this file
------------------
1. One thread changes; what was frozen is read by one background thread.
2. A list that was frozen is only ever appended to, a dict that was frozen is never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from stillframe.state.backends import USER_KEY, VALUE, Declared
from stillframe.state.evolution import fitted_to
from stillframe.state.rows import Row

_NO_KEYS = pa.schema([])
_BATCH_ROWS = 65_536


class FrozenSubtaskRows:
    """A state as it was at the barrier."""

    def __init__(self, declared: Declared, rows: Iterable[Any], count: int) -> None:
        self.snapshot_schema = declared.snapshot_schema(_NO_KEYS)
        self._declared = declared
        self._rows = rows
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """All in one key group, as there are no keys."""
        rows = islice(self._rows, self._count)
        while part := list(islice(rows, _BATCH_ROWS)):
            columns = self._columns(part)
            yield 0, pa.RecordBatch.from_arrays(columns, schema=self.snapshot_schema)

    def release(self) -> None:
        self._rows, self._count = (), 0

    def _columns(self, part: Sequence[Any]) -> list[pa.Array]:
        user_key, value = self._declared.user_key, self._declared.value
        if user_key is None:
            return [value.to_arrow(part)]
        keys, rows = zip(*part, strict=True)
        return [user_key.to_arrow(keys), value.to_arrow(rows)]


class SubtaskList:
    """Rows in their order."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self.version = 0
        self._what = f"list state {declared.name}"
        self._type = declared.value
        self._rows: list[Row] = []

    def get(self) -> list[Any]:
        return list(map(self._type.thawed, self._rows))

    def put(self, rows: Iterable[Any]) -> None:
        self._begin(self._frozen(rows))

    def append(self, row: Any) -> None:
        self.extend((row,))

    def extend(self, rows: Iterable[Any]) -> None:
        self._rows.extend(self._frozen(rows))
        self.version += 1

    def clear(self) -> None:
        self._begin([])

    def freeze(self) -> FrozenSubtaskRows:
        return FrozenSubtaskRows(self.declared, self._rows, len(self._rows))

    def restore(self, batch: pa.RecordBatch) -> None:
        fitted = fitted_to(self.declared, batch, _NO_KEYS)
        self._rows.extend(self._type.from_arrow(fitted.column(VALUE)))

    def _begin(self, rows: list[Row]) -> None:
        self._rows = rows
        self.version += 1

    def _frozen(self, rows: Iterable[Any]) -> list[Row]:
        """All of them before any is kept."""
        return [self._type.frozen(row, self._what) for row in rows]


class SubtaskMap:
    """Rows by keys, of which every subtask has the same copy."""

    def __init__(self, declared: Declared) -> None:
        assert declared.user_key is not None, "a map is found by keys"
        self.declared = declared
        self.version = 0
        self._what = f"broadcast state {declared.name}"
        self._key_type = declared.user_key
        self._type = declared.value
        self._rows: dict[Row, Row] = {}
        self._is_frozen = False

    def get(self, key: Any) -> Any:
        row = self._rows.get(self._found_by(key))
        return None if row is None else self._type.thawed(row)

    def contains(self, key: Any) -> bool:
        return self._found_by(key) in self._rows

    def put(self, key: Any, row: Any) -> None:
        found_by, frozen = self._found_by(key), self._type.frozen(row, self._what)
        self._own()[found_by] = frozen

    def remove(self, key: Any) -> None:
        found_by = self._found_by(key)
        if found_by in self._rows:
            del self._own()[found_by]

    def items(self) -> Iterator[tuple[Any, Any]]:
        thaw_key, thaw = self._key_type.thawed, self._type.thawed
        return ((thaw_key(key), thaw(row)) for key, row in list(self._rows.items()))

    def clear(self) -> None:
        self._rows, self._is_frozen = {}, False
        self.version += 1

    def freeze(self) -> FrozenSubtaskRows:
        self._is_frozen = True
        return FrozenSubtaskRows(self.declared, self._rows.items(), len(self._rows))

    def restore(self, batch: pa.RecordBatch) -> None:
        fitted = fitted_to(self.declared, batch, _NO_KEYS)
        keys = self._key_type.from_arrow(fitted.column(USER_KEY))
        rows = self._type.from_arrow(fitted.column(VALUE))
        self._rows.update(zip(keys, rows, strict=True))

    def _own(self) -> dict[Row, Row]:
        """The dict, of which no frozen state knows, about to be changed."""
        if self._is_frozen:
            self._rows, self._is_frozen = self._rows.copy(), False
        self.version += 1
        return self._rows

    def _found_by(self, key: Any) -> Row:
        return self._key_type.frozen(key, f"the key of {self._what}")
