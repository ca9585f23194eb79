"""Reducing state with a name on the heap: a place in the columns for each key's number.

Keys have their numbers from the backend, which keeps them once for all states of an operator. To
freeze is to take references (`columns`); which keys have a row is seen in the background.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from stillframe.api.processors import Reduction
from stillframe.key_groups import Positions, key_groups_of
from stillframe.state.aggregates import by_key_group
from stillframe.state.backends import VALUE, Declared
from stillframe.state.columns import Array, ChangingColumns, FrozenColumns
from stillframe.state.evolution import fitted_to
from stillframe.state.key_index import FrozenKeyIndex
from stillframe.state.reductions import ReducedColumns, Reductions
from stillframe.state.rows import Row


class Owner(Protocol):
    """What the state asks of the backend it belongs to."""

    key_schema: pa.Schema
    max_parallelism: int

    @property
    def numbers(self) -> int: ...

    def keys_of(self, columns: Sequence[pa.Array]) -> tuple[Positions, Sequence[int]]: ...

    def frozen_keys(self) -> FrozenKeyIndex: ...


class HeapReductions(ReducedColumns[int]):
    """The columns of one state."""

    def __init__(self, backend: Owner, declared: Declared, functions: Sequence[Reduction]) -> None:
        super().__init__(declared, functions)
        self._backend = backend
        self._columns = ChangingColumns(self.reductions.specs)
        self._kept_count = 0

    @property
    def occupied(self) -> int:
        """How many keys have a row, at most."""
        return self._kept_count + self.gathered_count

    def occupied_numbers(self) -> Iterator[int]:
        self.fold()
        return iter(self._present().tolist())

    def _present(self) -> Positions:
        return np.flatnonzero(self.arrays[-1][: len(self._columns)])

    # --- the columns

    @property
    def arrays(self) -> Sequence[Array]:
        return self._columns.arrays

    def kept(self, key: int) -> Row | None:
        if key >= len(self._columns):
            return None
        return self.reductions.read(self._columns.arrays, key)

    def places_to_change(self, keys: Sequence[int]) -> Positions:
        at = np.fromiter(keys, dtype=np.int64, count=len(keys))
        self._columns.extend_to(self._backend.numbers)
        self._columns.before_change(at)
        return at

    def before_emptied(self, at: Positions) -> None:
        self._kept_count -= int(np.count_nonzero(self.arrays[-1].take(at)))

    def before_filled(self, at: Positions) -> None:
        self._kept_count += len(at) - int(np.count_nonzero(self.arrays[-1].take(at)))

    # --- between batches, and to a checkpoint and back

    def sweep(self, now_ms: int, keys_max: int) -> None:
        self.fold_some()

    def renumber(self, renamed: dict[int, int]) -> None:
        self.fold()
        old = self._present()
        new = np.fromiter((renamed[number] for number in old.tolist()), np.int64, len(old))
        parts = [array.take(old) for array in self.arrays]
        # Others, not changed ones: what was frozen goes on with the old columns.
        self._columns = ChangingColumns(self.reductions.specs)
        self._columns.extend_to(self._backend.numbers)
        self.reductions.put(self.arrays, new, parts)

    def freeze(self, now_ms: int) -> FrozenReductions:
        self.fold()
        schema = self.declared.snapshot_schema(self._backend.key_schema)
        keys, columns = self._backend.frozen_keys(), self._columns.freeze()
        return FrozenReductions(
            self.reductions, schema, keys, columns, self._kept_count, self._backend.max_parallelism
        )

    def restore(self, batch: pa.RecordBatch) -> None:
        self.fold()
        batch = fitted_to(self.declared, batch, self._backend.key_schema)
        numbers, _ = self._backend.keys_of(batch.columns[: len(self._backend.key_schema)])
        at = self.places_to_change(numbers.tolist())
        self.before_filled(at)
        self.reductions.put(self.arrays, at, self.reductions.parts_of(batch.column(VALUE)))
        self._version += 1


class FrozenReductions:
    """The state as it was at the barrier. Read by one background thread, then released."""

    def __init__(
        self,
        reductions: Reductions,
        snapshot_schema: pa.Schema,
        keys: FrozenKeyIndex,
        columns: FrozenColumns,
        count: int,
        max_parallelism: int,
    ) -> None:
        self.snapshot_schema = snapshot_schema
        self._reductions = reductions
        self._keys = keys
        self._columns = columns
        self._count = count
        self._max_parallelism = max_parallelism

    def __len__(self) -> int:
        return self._count

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each key group that has any, in ascending order of key groups."""
        parts = self._columns.whole()
        numbers = np.flatnonzero(parts[-1])
        groups = key_groups_of(self._keys.hashes.take(numbers), self._max_parallelism)
        order, bounds = by_key_group(groups, self._max_parallelism)
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            at = numbers[order[bounds[group] : bounds[group + 1]]]
            columns = [column.take(at) for column in self._keys.columns]
            columns.append(self._reductions.rows_of([part.take(at) for part in parts]))
            yield group, pa.RecordBatch.from_arrays(columns, schema=self.snapshot_schema)

    def release(self) -> None:
        """Give the memory back. May be called twice."""
        self._columns.release()
        self._count = 0
