"""Faults that no signal can make, read from a file while a job runs: a slow channel, a record that
a function cannot take, a full disk.

Theory of operation. A job is started with faults by wrapping its source and its sinks; one that is
not has nothing of this in it. Slots look at the file several times a second, wherever a fault could
be. It holds a JSON object with any of these:

    {"delay": {"source": 0, "target": 1, "seconds": 3.0}, "poison": 123456, "full_disk": true}

- `delay`: what subtask `source` sends to subtask `target` arrives so many seconds later.
- `poison`: the record with this `id` has another `app_id`, one that its readers do not expect.
- `full_disk`: sinks cannot prepare, as if their disk had no room left.

No file, or one that is being written, means what was read last; at first, no fault.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Sink,
    SinkContext,
    SinkGuarantee,
    SinkWriter,
)
from stillframe.api.sources import Polled, Source, SourceContext, SourceReader, Split
from stillframe.ids import CheckpointId, SubtaskIndex
from stillframe.runtime import assembly
from stillframe.runtime.channels import InputChannel, QueuedInput
from stillframe.runtime.elements import Barrier, Element

POISON = "nobody"
_LOOK_SECONDS = 0.05


class Faults:
    """What the file says now. Used by one slot, whose loop must not wait for it often."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read: Mapping[str, Any] = {}
        self._looked_seconds = float("-inf")

    def now(self) -> Mapping[str, Any]:
        if time.monotonic() >= self._looked_seconds + _LOOK_SECONDS:
            self._looked_seconds = time.monotonic()
            try:
                with open(self._path, encoding="utf-8") as file:
                    self._read = json.load(file)
            except (OSError, ValueError):
                pass  # written in a moment; what was read last stays true
        return self._read

    def delay_seconds(self, source: int, target: int) -> float:
        """Of the channel between these subtasks."""
        delay = self.now().get("delay") or {}
        if (delay.get("source"), delay.get("target")) != (source, target):
            return 0.0
        return float(delay.get("seconds", 0.0))


def write_faults(path: str, faults: Mapping[str, Any]) -> None:
    """Have these faults, and no others, from now on."""
    unnamed = f"{path}.new"
    with open(unnamed, "w", encoding="utf-8") as file:
        json.dump(faults, file)
    os.replace(unnamed, path)


class DelayedInput(QueuedInput):
    """A channel whose elements can be taken some time after they have arrived."""

    def __init__(
        self,
        channel: InputChannel,
        delay_seconds: Callable[[], float],
        now_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._channel = channel
        self._delay_seconds = delay_seconds
        self._now_seconds = now_seconds
        self._arrived_seconds: deque[float] = deque()

    @property
    def bytes_taken(self) -> int:  # type: ignore[override]
        return self._channel.bytes_taken

    def is_empty(self) -> bool:
        now = self._now_seconds()
        while not self._channel.is_empty():
            self._put(self._channel.take(), 0)
            self._arrived_seconds.append(now)
        if not self._arrived_seconds:
            return True
        return now < self._arrived_seconds[0] + self._delay_seconds()

    def waiting_barriers(self) -> Sequence[Barrier]:
        """Those that have come through: one that is still on its way is waited for."""
        if not self._barriers:
            return self._barriers
        due_seconds = self._now_seconds() - self._delay_seconds()
        there = sum(arrived <= due_seconds for arrived in self._arrived_seconds)
        come = [element for element, _ in itertools.islice(self._elements, there)]
        return [each for each in self._barriers if any(each is element for element in come)]

    def take(self) -> Element:
        self._arrived_seconds.popleft()
        return super().take()

    def pull(self, checkpoint_id: CheckpointId) -> list[pa.RecordBatch]:
        barrier = next(each for each in self._barriers if each.checkpoint_id == checkpoint_id)
        place = next(at for at, (each, _) in enumerate(self._elements) if each is barrier)
        del self._arrived_seconds[place]
        return super().pull(checkpoint_id)


@dataclass(frozen=True)
class FaultySource(Source):
    """Reads as `source` does, apart from what the file says; with it come the slow channels."""

    source: Source
    path: str

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema

    @property
    def is_unbounded(self) -> bool:
        return self.source.is_unbounded

    def splits(self, parallelism: int) -> list[Split]:
        return self.source.splits(parallelism)

    def open(self, splits: Sequence[Split], context: SourceContext) -> SourceReader:
        faults = Faults(self.path)

        def delayed(source: SubtaskIndex, target: SubtaskIndex, to: InputChannel) -> InputChannel:
            return DelayedInput(to, lambda: faults.delay_seconds(source, target))

        # Here, because sources are opened before the channels behind them are made.
        assembly.input_wrapper = delayed
        reader = self.source.open(splits, context)
        assert isinstance(reader, SourceReader), "a blocking reader cannot be wrapped"
        return _FaultyReader(reader, faults)

    def describe(self) -> str:
        return self.source.describe()


class _FaultyReader(SourceReader):
    def __init__(self, reader: SourceReader, faults: Faults) -> None:
        self._reader = reader
        self._faults = faults

    def poll(self) -> Polled:
        polled = self._reader.poll()
        poison = self._faults.now().get("poison")
        if poison is None or not isinstance(polled, pa.RecordBatch):
            return polled
        return poisoned(polled, poison)

    def splits(self) -> list[Split]:
        return self._reader.splits()

    def open_splits(self) -> frozenset[str] | None:
        return self._reader.open_splits()

    def polled_split(self) -> str | None:
        return self._reader.polled_split()

    def close(self) -> None:
        self._reader.close()


def poisoned(batch: pa.RecordBatch, number: int) -> pa.RecordBatch:
    """The same, but for the app of the record with this `id`."""
    names = batch.schema.names
    if "id" not in names or "app_id" not in names:
        return batch
    is_it = pc.equal(batch.column("id"), number)
    apps = pc.if_else(is_it, POISON, batch.column("app_id"))
    return batch.set_column(names.index("app_id"), batch.schema.field("app_id"), apps)


@dataclass(frozen=True)
class FaultySink(Sink):
    """Writes as `sink` does, while the disk has room."""

    sink: Sink
    path: str

    @property
    def guarantee(self) -> SinkGuarantee:  # type: ignore[override]
        return self.sink.guarantee

    @property
    def weakness(self) -> str | None:  # type: ignore[override]
        return self.sink.weakness

    @property
    def tied_to(self) -> str | None:
        return self.sink.tied_to

    def open_writer(self, context: SinkContext) -> SinkWriter:
        return _FaultyWriter(self.sink.open_writer(context), Faults(self.path))

    def open_committer(self, context: CommitterContext) -> Committer:
        return self.sink.open_committer(context)

    def describe(self) -> str:
        return self.sink.describe()


class _FaultyWriter(SinkWriter):
    def __init__(self, writer: SinkWriter, faults: Faults) -> None:
        self._writer = writer
        self._faults = faults

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write(batch)

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        prepare = self._writer.rotate(checkpoint_id)

        def prepare_with_room() -> Sequence[Committable]:
            if self._faults.now().get("full_disk"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return prepare()

        return prepare_with_room

    def close(self) -> None:
        self._writer.close()
