"""A subtask that begins with a source: barriers come from the coordinator, not from inputs.

Theory of operation
-------------------
Mostly a source is polled and what it answers runs through the chain. Two checkpoint modes change
that. *Stop-the-world* does not poll between a checkpoint's trigger and its end, so that the job
drains and stands still. *At-most-once* emits nothing that a restart could read again: what was
polled waits until a checkpoint with the position behind it is complete. A restart begins at that
position and skips whatever the job had not got to.

Event time is told by split (`protocol.split_times`). Which split a batch is from, and what else the
reader was reading from then, stay with the batch until it is processed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from stillframe.api.sources import EndOfData, NothingYet
from stillframe.clock import Clock
from stillframe.config import CheckpointMode
from stillframe.graph.plan import SubtaskRef
from stillframe.ids import CheckpointId, Epoch
from stillframe.json_values import JsonObject
from stillframe.protocol.messages import AssignSplits, SourceLag
from stillframe.protocol.split_times import OpenSplits
from stillframe.runtime.chain import Chain
from stillframe.runtime.elements import Barrier, EndOfRecords, LatencyMarker
from stillframe.runtime.reading import ReaderAtWork, splits_of
from stillframe.runtime.source_operator import Reading
from stillframe.runtime.task import ChannelLog, Subtask, TaskEvents
from stillframe.runtime.time_shares import HELD, IDLE
from stillframe.texts import refuse_bad_text

_CLEAN_IT = (
    "clean it first (Spark has make_valid_utf8), or declare the column as binary and decode it in"
    " a function"
)
_RESERVED_BYTES_MAX = 64 * 1024 * 1024
_WITHOUT_SPLITS_SECONDS_MAX = 5.0
"""After which event time does not wait for a subtask that awaits splits and has none: there may be
fewer files than subtasks for ever."""


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """What a poll answered, and where it is from."""

    batch: pa.RecordBatch
    splits: OpenSplits | None = None
    """None: the reader does not tell."""


class Reserved:
    """Batches that were read and may not be emitted yet, because a restart could read them again.

    A checkpoint that is triggered now has the position behind all of them; when it is complete,
    or a later one, they may go.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[CheckpointId | None, ReadBatch]] = deque()
        self._free: deque[ReadBatch] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._free)

    def has_room(self) -> bool:
        return self._bytes < _RESERVED_BYTES_MAX

    def add(self, read: ReadBatch) -> None:
        self._waiting.append((None, read))
        self._bytes += read.batch.nbytes

    def on_trigger(self, checkpoint_id: CheckpointId) -> None:
        """A checkpoint takes the position behind all that was added until now."""
        self._waiting = deque((since or checkpoint_id, read) for since, read in self._waiting)

    def on_complete(self, checkpoint_id: CheckpointId) -> None:
        while self._waiting:
            since, read = self._waiting[0]
            if since is None or since > checkpoint_id:
                return
            self._waiting.popleft()
            self._free.append(read)

    def next_free(self) -> ReadBatch | None:
        """A batch that may be emitted now."""
        if not self._free:
            return None
        read = self._free.popleft()
        self._bytes -= read.batch.nbytes
        return read


class SourceSubtask(Subtask):
    """Polls a source and runs what it answers through the chain."""

    steps_per_turn = 1  # what is in the job is worked off first: barriers wait behind it

    def __init__(
        self,
        ref: SubtaskRef,
        name: str,
        chain: Chain,
        clock: Clock,
        events: TaskEvents,
        source: Reading,
        mode: CheckpointMode = "exactly-once",
        channel_log: ChannelLog | None = None,
        idle_timeout_seconds: float | None = None,
    ) -> None:
        super().__init__(ref, name, chain, clock, events, mode, channel_log)
        self._source = source
        self._idle_timeout_seconds = idle_timeout_seconds
        self._nothing_since_seconds: float | None = None
        self._is_idle = False
        self._has_ended = source.was_ended
        self._stops_at_end = False
        """Whether more may come when the job goes on, so that what has ended has not finished."""
        self._has_caught_up = False
        self._retry_seconds = 0.0
        self._last_triggered = CheckpointId(0)
        self._pauses = mode == "stop-the-world"
        self._paused_for: CheckpointId | None = None
        self._reserved = Reserved() if mode == "at-most-once" else None
        self._listened_seconds = 0.0
        self._listens_since_seconds: float | None = None
        self._gave_at_seconds = clock.monotonic_seconds()
        self._marker_due_ms: int | None = None
        source.times_of = self._times_of

    def _silent_ms(self) -> int | None:
        return round((self._clock.monotonic_seconds() - self._gave_at_seconds) * 1000)

    def step(self) -> bool:
        self._resume_time()
        self._hasten_barriers()
        self._retry_seconds = 1.0
        stands_still = self._paused_for is not None or self._held_by is not None
        if self._has_finished or stands_still or not self._chain.has_room():
            self._listens_since_seconds = None
            return False
        if self._marker_due_ms is not None:
            marker = LatencyMarker(self.ref.task, self._marker_due_ms)
            self._marker_due_ms = None
            self._chain.send_latency(marker)
        if self._reserved is not None:
            return self._step_reserved(self._reserved)
        read = None if self._has_ended else self._poll()
        if read is not None:
            self._process(read)
        elif self._has_ended:
            self._end()
        else:
            self._note_splits()
        return read is not None or self._has_finished

    def _step_reserved(self, reserved: Reserved) -> bool:
        free = reserved.next_free()
        if free is not None:
            self._process(free)
            return True
        read = None if self._has_ended or not reserved.has_room() else self._poll()
        if read is not None:
            reserved.add(read)
        elif not len(reserved):
            if self._has_ended:
                self._end()
            else:
                self._note_splits()
        return read is not None or self._has_finished

    @property
    def records_malformed(self) -> int:
        return self._source.records_malformed

    @property
    def awaits(self) -> str | None:
        return self._source.awaits or super().awaits

    @property
    def lag(self) -> SourceLag | None:
        return self._source.lag

    @property
    def reader_at_work(self) -> ReaderAtWork | None:
        return self._source.reader_at_work

    def _process(self, read: ReadBatch) -> None:
        splits = read.splits
        if splits is not None:
            self._chain.on_splits(splits)
        self._chain.process(read.batch)
        if splits is not None:  # the split may have ended with the batch
            self._chain.on_splits(replace(splits, polled=None))
        self._listens_since_seconds = self._clock.monotonic_seconds()

    def _resume_time(self) -> None:
        if not self._has_told_time:
            self._note_splits()
        super()._resume_time()

    def _note_splits(self) -> None:
        """What is read from may have changed without a record."""
        splits = self._source.open_splits(False, self._listened_seconds)
        if splits is not None:
            self._chain.on_splits(splits)

    def _times_of(self, split: str) -> JsonObject:
        times = {op.uid: op.time_of(split) for op in self._chain.watermarkings}
        return {uid: time_us for uid, time_us in times.items() if time_us is not None}

    def _listen(self) -> None:
        """Measure for how long the source could have given something, had it had something."""
        now = self._clock.monotonic_seconds()
        if self._listens_since_seconds is not None:
            self._listened_seconds += now - self._listens_since_seconds
        self._listens_since_seconds = now

    def _poll(self) -> ReadBatch | None:
        self._listen()
        polled = self._source.poll()
        match polled:
            case NothingYet(retry_seconds):
                self._retry_seconds = min(retry_seconds, self._until_idle_seconds())
            case EndOfData():
                self._has_ended = True
            case _:
                refuse_bad_text(polled, self._read_from(), _CLEAN_IT)
                self.counters.records_read += polled.num_rows
                self.counters.bytes_read += polled.nbytes
                self._nothing_since_seconds = None
                self._gave_at_seconds = self._clock.monotonic_seconds()
                self._is_idle = False
                splits = self._source.open_splits(True, self._listened_seconds)
                return ReadBatch(polled, splits)
        return None

    def _read_from(self) -> str:
        split = self._source.polled_split()
        return (
            f"source {self._source.uid}"
            if split is None
            else f"{split} (source {self._source.uid})"
        )

    def _until_idle_seconds(self) -> float:
        """How long until a source with nothing to say stops holding event time back."""
        timeout_seconds = self._idle_timeout_seconds
        if timeout_seconds is None and self._source.has_nothing_to_read:
            timeout_seconds = _WITHOUT_SPLITS_SECONDS_MAX
        if timeout_seconds is None or self._is_idle:
            self._nothing_since_seconds = None
            return 1.0
        now = self._clock.monotonic_seconds()
        if self._nothing_since_seconds is None:
            self._nothing_since_seconds = now
        left = self._nothing_since_seconds + timeout_seconds - now
        if left > 0:
            return left
        self._is_idle = True
        self._chain.become_idle()
        return 1.0

    def _origin(self, rows: range | None) -> str:
        if self._reserved is not None:  # what was polled last is not what is processed
            return "of a batch that was read before the last checkpoint"
        return self._source.polled_in_words()

    def _end(self) -> None:
        """All was read and has gone its way."""
        if not self._stops_at_end:
            self._finish()
        elif not self._has_caught_up:
            self._has_caught_up = True
            self._note_splits()
            self._chain.become_idle()  # event time has come as far as in all sources together
            self._events.caught_up(self.ref)

    def _finish(self) -> None:
        self._has_finished = True
        self._chain.end_time()
        self._chain.finish()
        self._chain.broadcast(EndOfRecords())
        self._events.drained(self.ref)

    def waits_for(self) -> int:
        waits = super().waits_for()
        return HELD if waits == IDLE and self._paused_for is not None else waits

    def idle_seconds_max(self) -> float:
        return min(self._retry_seconds, super().idle_seconds_max())

    def holdings(self) -> Iterator[tuple[CheckpointId | None, str]]:
        yield from super().holdings()
        if self._paused_for is not None:
            yield self._paused_for, "a pause"

    def on_splits(self, order: AssignSplits) -> None:
        if (order.uid, order.subtask) == (self._source.uid, self.ref.subtask):
            self._source.on_splits(splits_of(order.splits), order.is_last, order.stops)
            self._stops_at_end = order.stops

    def on_end_wanted(self) -> None:
        self._has_ended = self._source.was_ended = True
        self._stops_at_end = False

    def on_latency_wanted(self, now_ms: int) -> None:
        """A marker is due: it is sent when there is room, and one at a time waits for that."""
        if self._marker_due_ms is None:
            self._marker_due_ms = now_ms

    def on_trigger(self, barrier: Barrier) -> None:
        if barrier.checkpoint_id <= self._last_triggered:
            return  # the message came twice
        self._last_triggered = barrier.checkpoint_id
        self._resume_time()  # the snapshot says how far each split had come
        if self._reserved is not None:
            self._reserved.on_trigger(barrier.checkpoint_id)
        if self._pauses:
            self._paused_for = barrier.checkpoint_id
        delay_ms = self._clock.wall_ms() - barrier.triggered_at_ms
        self._take_snapshot(barrier, start_delay_ms=max(0, delay_ms), alignment_ms=0.0)

    def on_complete(self, checkpoint_id: CheckpointId, epoch: Epoch) -> None:
        super().on_complete(checkpoint_id, epoch)
        if self._reserved is not None:
            self._reserved.on_complete(checkpoint_id)
        self._go_on_after(checkpoint_id)

    def on_abort(self, checkpoint_id: CheckpointId) -> None:
        super().on_abort(checkpoint_id)
        self._go_on_after(checkpoint_id)

    def _go_on_after(self, checkpoint_id: CheckpointId) -> None:
        if self._paused_for is not None and self._paused_for <= checkpoint_id:
            self._paused_for = None
