"""A program of keyed states in a subtask of its own, without a job: fed, snapshotted, restored."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from stillframe.clock import Clock
from stillframe.graph.logical import Transform
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import KeyedState
from stillframe.runtime.disk import DiskRoom
from stillframe.runtime.kept_states import KeptStates, StatesOnDisk, StatesOnHeap
from stillframe.runtime.transforming import Transforming
from stillframe.state.disk import DiskMemory
from stillframe.state.disk_rows import DiskBackend
from stillframe.state.heap import HeapBackend
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.local import LocalStore

Files = list[tuple[KeyedState, bytes]]
"""The files of a snapshot, and their contents."""
_DATABASE_BYTES_MAX = 8 << 20
_BUFFER_BYTES_MAX = 1 << 20


class HandFed:
    """One operator of one subtask, that owns all key groups unless it is told otherwise."""

    backend: Literal["heap", "disk"] = "heap"

    def __init__(
        self,
        program: Transform,
        input_schema: pa.Schema,
        schema: pa.Schema,
        place: Path,
        key_groups: int,
        clock: Clock,
        index: int = 0,
    ) -> None:
        self.store = LocalStore(place)
        self._schema = input_schema
        self._key_groups = key_groups
        self._checkpoints = 0
        keys = pa.schema([input_schema.field(key) for key in program.keys])
        kept = self._kept(keys, place, SubtaskIndex(index))
        self.operator = Transforming(program, input_schema, schema, kept, key_groups, clock)

    def _kept(self, keys: pa.Schema, place: Path, index: SubtaskIndex) -> KeptStates:
        of = (OperatorUid("uid"), index, Attempt(1))
        if self.backend == "heap":
            return StatesOnHeap(*of, self.store, HeapBackend(keys, self._key_groups))
        memory = DiskMemory(_DATABASE_BYTES_MAX)
        working = place / f"working-{uuid.uuid4().hex[:8]}"
        room = DiskRoom(working, memory, _BUFFER_BYTES_MAX, is_incremental=False)
        owned = range(self._key_groups)
        directory, snapshots = room.open_database(*of, owned, self.store, ())
        disk = DiskBackend(keys, self._key_groups, directory, memory, _BUFFER_BYTES_MAX)
        return StatesOnDisk(*of, self.store, disk, snapshots)

    def process(self, *rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """What comes out of these; columns that a row leaves out at its end are null."""
        width = len(self._schema)
        columns = zip(*[(*row, *(None,) * (width - len(row))) for row in rows], strict=True)
        arrays = [pa.array(column, f.type) for column, f in zip(columns, self._schema, strict=True)]
        return plainly(
            self.operator.process(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        )

    def watermark(self, time_us: int) -> list[tuple[Any, ...]]:
        """What comes out when event time has come this far and all due timers have fired."""
        made = plainly(self.operator.on_watermark(time_us))
        while self.operator.is_due():
            made += plainly(self.operator.fire())
        return made

    def checkpoint(self) -> Files:
        """Take one, which completes at once."""
        self._checkpoints += 1
        number = CheckpointId(self._checkpoints)
        snapshot = self.operator.described(number, self.operator.snapshot(number)())
        self.operator.completed(number)
        return [(keyed, self.store.read(keyed.file.path)) for keyed in snapshot.keyed]

    def take_back(self, files: Files, owned: range | None = None) -> None:
        """Start with what these hold of the key groups."""
        wanted = range(self._key_groups) if owned is None else owned
        for keyed, data in files:
            for batch in read_keyed_snapshot(pa.py_buffer(data), keyed.key_groups, wanted):
                self.operator.restore(keyed.name, batch)


def plainly(batches: Iterable[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
