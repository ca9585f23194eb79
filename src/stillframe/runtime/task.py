"""What all subtasks do: run a chain, take its snapshots, acknowledge them, commit.

Theory of operation
-------------------
A subtask is stepped by the slot's loop. A step takes one element, and only if every output has
room, so that a slow reader downstream is felt all the way up to the source. Where elements come
from, and when a snapshot is due, is said in `source_task` and `inner_task`. A snapshot is: first
the synchronous part of every operator, then the barrier goes out behind the records it belongs to,
then the background part is handed to the slot's pool. Where the barrier overtook records, in
channels to or from this subtask, they are written too. When all is durable it is acknowledged.

A barrier may hold the job: whoever has taken its snapshot stands still from then on, and only
further barriers pass, until that checkpoint is given up. So what a job says that stops with a
savepoint, or rests, is what was before that barrier, in every subtask.

Rules of this file
------------------
1. No threads, sockets, files or sleeping: the simulator steps the same class.
2. Called by the loop thread only. Background work comes back as a call of `on_written`.
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import pyarrow as pa

from stillframe.clock import Clock
from stillframe.config import CheckpointMode
from stillframe.errors import UserCodeError
from stillframe.graph.plan import SubtaskRef
from stillframe.ids import NO_CHECKPOINT, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.protocol.commits import Commit
from stillframe.protocol.inline import refusal
from stillframe.protocol.manifests import (
    ChannelState,
    FileHandle,
    OperatorSnapshot,
    SubtaskTimings,
)
from stillframe.protocol.measures import Aligning, SubtaskMeasures
from stillframe.protocol.messages import (
    AbortCheckpoint,
    AssignSplits,
    CompleteCheckpoint,
    EndSources,
    SourceLag,
    StartSlot,
    TriggerCheckpoint,
)
from stillframe.protocol.snapshots import ARRIVALS_MAX, Arrival, EventTimes
from stillframe.runtime.chain import Chain, OutputLog
from stillframe.runtime.elements import Barrier
from stillframe.runtime.operators import Background, files_written
from stillframe.runtime.reading import ReaderAtWork
from stillframe.runtime.time_shares import BACKPRESSURED, HELD, IDLE, TURN, ShareClock
from stillframe.runtime.writing import Writing
from stillframe.state.channel_log import Overtaken, WrittenLog, WrittenRun
from stillframe.storage.store import Store

ChannelLog = Callable[[CheckpointId, Sequence[Overtaken], Store | None], Background]
"""What writes records under way, in the background; into the savepoint, if there is one."""


@dataclass(frozen=True, slots=True)
class SnapshotStarted:
    """The synchronous part is done; run these in the background, in order, then `on_written`."""

    checkpoint_id: CheckpointId
    writes: tuple[Background, ...]
    kept: tuple[bool, ...]
    """Of each: whether it is run to its end also if the checkpoint is given up, as what a sink
    prepares comes out with the next one."""
    started_at_seconds: float
    start_delay_ms: float
    alignment_ms: float
    sync_ms: float


class TaskEvents(ABC):
    """What a subtask tells the slot it runs in."""

    @abstractmethod
    def snapshot_started(self, subtask: SubtaskRef, started: SnapshotStarted) -> None:
        """Run the writes in the background."""

    @abstractmethod
    def channels_recorded(
        self, subtask: SubtaskRef, checkpoint_id: CheckpointId, write: Background
    ) -> None:
        """Run this in the background, then `on_channels_written`."""

    @abstractmethod
    def acknowledged(
        self,
        subtask: SubtaskRef,
        checkpoint_id: CheckpointId,
        operators: Sequence[OperatorSnapshot],
        timings: SubtaskTimings,
        channels: Sequence[ChannelState],
    ) -> None:
        """The subtask's part of the checkpoint is durable."""

    @abstractmethod
    def declined(self, subtask: SubtaskRef, checkpoint_id: CheckpointId, reason: str) -> None:
        """The subtask will not do its part of this checkpoint."""

    @abstractmethod
    def snapshot_unwanted(self, files: Sequence[FileHandle], savepoint: Store | None) -> None:
        """The checkpoint, or savepoint, failed while it wrote these: they may be deleted."""

    @abstractmethod
    def open_savepoint(self, address: str) -> Store:
        """Where the files of a savepoint go."""

    @abstractmethod
    def commit_wanted(
        self, subtask: SubtaskRef, sink: Writing, epoch: Epoch, commit: Commit
    ) -> None:
        """Commit in the background, in order, then `on_committed`."""

    @abstractmethod
    def committed(self, subtask: SubtaskRef, checkpoint_id: CheckpointId) -> None:
        """Every sink of the subtask has committed everything up to this checkpoint."""

    @abstractmethod
    def caught_up(self, subtask: SubtaskRef) -> None:
        """The subtask, a source, has read what was there, in a job that stops then."""

    @abstractmethod
    def drained(self, subtask: SubtaskRef) -> None:
        """The last record has been processed; barriers are still answered."""


@dataclass(slots=True)
class Counters:
    """What a subtask has done, for progress reports; written by the loop, read by anyone."""

    records_in: int = 0
    """Those that came over channels."""
    records_read: int = 0
    """Those that entered the job here, from a source."""
    bytes_read: int = 0


ChannelName = tuple[str, SubtaskIndex]
"""The edge by its name, and the sender."""


@dataclass(slots=True)
class OpenSnapshot:
    """A snapshot that was taken and is not acknowledged yet."""

    started: SnapshotStarted
    received: dict[ChannelName, list[pa.RecordBatch]]
    """What came on channels whose barrier it did not wait for."""
    sent: OutputLog
    """What its own barrier overtook."""
    is_recording: bool
    """Whether barriers are still to come that end the recording."""
    leaves_by_seconds: float | None
    """When its own barrier overtakes what it still waits behind; None: nothing to wait for."""
    is_finished: bool
    """Whether the records had ended before it was taken."""
    savepoint: Store | None
    """Where it goes; None: it is a checkpoint."""
    processed_bytes: int
    """Of records taken since its first barrier came; more while it is recorded."""
    arrived: dict[ChannelName, float]
    """When its barriers came, in seconds; more while it is recorded."""
    records_read: int
    """By a source here, before it."""
    event_times: tuple[EventTimes, ...] = ()
    """Of the rows since the barrier before."""
    operators: Sequence[OperatorSnapshot] | None = None
    channels: Sequence[ChannelState] | None = None


class Subtask(ABC):
    """What sources and inner subtasks have in common: the chain, its snapshots and its commits."""

    steps_per_turn: int
    """How often the loop steps it before the other subtasks and the mailbox have their turn."""

    def __init__(
        self,
        ref: SubtaskRef,
        name: str,
        chain: Chain,
        clock: Clock,
        events: TaskEvents,
        mode: CheckpointMode = "exactly-once",
        channel_log: ChannelLog | None = None,
    ) -> None:
        self.ref = ref
        self.name = name
        self.counters = Counters()
        self.restore_seconds = 0.0
        """How long it took to make it, with what was restored."""
        self.share_clock = ShareClock(time.perf_counter_ns())
        self._chain = chain
        self._clock = clock
        self._events = events
        self._writes_in_loop = mode == "stop-the-world"
        self._channel_log = channel_log
        self._has_finished = False
        self._has_told_time = False
        self._stateful = chain.stateful
        self._sinks = [op for op in self._stateful if isinstance(op, Writing)]
        self._uncommitted: dict[CheckpointId, int] = {}
        self._last_completed = NO_CHECKPOINT
        self._open: dict[CheckpointId, OpenSnapshot] = {}
        self._counted_from: tuple[str, int] = ("the start of the attempt", 0)
        """Since when records are counted for those who are told of one, and how many came before"""
        self._held_by: CheckpointId | None = None
        """The checkpoint behind whose barrier it stands still, because the job stops or rests."""
        self._unwritten: deque[tuple[CheckpointId, Store | None]] = deque()
        self._written: dict[CheckpointId, Sequence[object]] = {}
        self._state_size: tuple[int | None, int | None] = (None, None)
        """Rows and bytes of the last snapshot that was durable."""

    @property
    def is_firing(self) -> bool:
        """Whether timers are due that it fires one batch per step: it then does one per turn."""
        return self._chain.is_firing

    @abstractmethod
    def step(self) -> bool:
        """Do one piece of work; False if there is nothing to do or no room for its result."""

    def waits_for(self) -> int:
        """Why its last step did nothing."""
        if not self._chain.has_room():
            return BACKPRESSURED
        return HELD if self._held_by is not None else IDLE

    @property
    def bytes_in(self) -> int:
        """Of what came here."""
        return self.counters.bytes_read

    @property
    def queued_bytes(self) -> int:
        """What waits in front of it."""
        return 0

    def measures(self, now_ns: int) -> SubtaskMeasures:
        """What it has done so far. May be called by any thread."""
        lag = self.lag
        rows_out, bytes_out = self._chain.sent()
        times = (time_us for time_us in self.times_us().values() if time_us is not None)
        return SubtaskMeasures(
            *self.ref,
            self.counters.records_in + self.counters.records_read,
            rows_out + self.records_written,
            self.bytes_in,
            bytes_out + sum(sink.bytes_written for sink in self._sinks),
            self.share_clock.shares(now_ns),
            min(times, default=None),
            self.records_late,
            self.queued_bytes,
            *self._state_size,
            None if lag is None else lag.records,
            None if lag is None or lag.seconds is None else round(lag.seconds * 1000),
            self.records_written,
            self.aligning(),
            self._chain.latencies.told(),
            timers_fired=self._chain.timers_fired,
            restore_ms=round(self.restore_seconds * 1000),
            silent_ms=self._silent_ms(),
        )

    def _silent_ms(self) -> int | None:
        """Of a source: since it has given something. May be called by any thread."""
        return None

    def aligning(self) -> Aligning | None:
        """What barriers it waits for. May be called by any thread."""
        return None

    def idle_seconds_max(self) -> float:
        """How long the loop may wait before it must step this subtask again unasked."""
        if not self._open:
            return 1.0
        now = self._clock.monotonic_seconds()
        waits = (each.leaves_by_seconds for each in self._open.values())
        return min([1.0, *(max(0.0, until - now) for until in waits if until is not None)])

    @property
    def head_uid(self) -> OperatorUid:
        """Of the operator that takes what comes in, or reads it."""
        return self._chain.head_uid

    def locate(self, error: UserCodeError) -> None:
        """Say of the records that an error is about where they come from."""
        blame = error.blame
        if blame is not None and blame.rows is not None:
            in_batch = blame.rows if blame.operator == self._chain.head_uid else None
            error.blame = replace(blame, record=f"{blame.record}; {self._origin(in_batch)}")

    @abstractmethod
    def _origin(self, rows: range | None) -> str:
        """Of these rows of the batch at work, or of others that were made of it, in words."""

    @property
    def sinks(self) -> Sequence[Writing]:
        """Those of its chain."""
        return self._sinks

    @property
    def records_written(self) -> int:
        """How many records were handed to sinks here."""
        return sum(sink.records_written for sink in self._sinks)

    @property
    def records_late(self) -> int:
        """How many records came too late here and were dropped."""
        return self._chain.late_rows

    @property
    def records_malformed(self) -> int:
        """How many records of a source could not be read here as their schema declares them."""
        return 0

    @property
    def awaits(self) -> str | None:
        """What has to come back, in a sentence, before records are read or committed here again."""
        return next(filter(None, (sink.awaits for sink in self._sinks)), None)

    @property
    def lag(self) -> SourceLag | None:
        """How far a source is behind here, if it tells."""
        return None

    @property
    def reader_at_work(self) -> ReaderAtWork | None:
        """What a source's reader is doing in a thread of its own, if there is one."""
        return None

    def times_us(self) -> dict[OperatorUid, int | None]:
        """How far event time has come in each operator here; None: it knows of none."""
        return self._chain.times_us()

    def _resume_time(self) -> None:
        """Once, at the start: the watermark that was sent last may have been overtaken, or the
        task it was sent to does not remember it."""
        if not self._has_told_time:
            self._has_told_time = True
            self._chain.resume_time()

    def holdings(self) -> Iterator[tuple[CheckpointId | None, str]]:
        """What is kept here for checkpoints that are under way, in words, and for which.

        None: for one that nobody knows any more. What an attempt of its own still needs, such as
        epochs to be committed, is not meant.
        """
        for checkpoint_id in self._open:
            yield checkpoint_id, "an open snapshot"

    def on_trigger(self, barrier: Barrier) -> None:  # noqa: B027 - for sources
        """The coordinator begins a checkpoint; sources send its barrier."""

    def on_end_wanted(self) -> None:  # noqa: B027 - for sources
        """The coordinator ends the job: sources read nothing more."""

    def on_splits(self, order: AssignSplits) -> None:  # noqa: B027 - for sources
        """The coordinator has splits for a source; perhaps for this one."""

    def on_written(self, checkpoint_id: CheckpointId, results: Sequence[object]) -> None:
        """The background part is done; `results` holds, per operator, its answer or its error.

        Taken in the order in which the snapshots began, whichever was written first: what a sink
        prepared at an earlier barrier, of a checkpoint that failed meanwhile, must be part of the
        later one, or its records would never come out.
        """
        self._written[checkpoint_id] = results
        while self._unwritten and self._unwritten[0][0] in self._written:
            oldest, savepoint = self._unwritten.popleft()
            self._take_results(oldest, savepoint, self._written.pop(oldest))

    def _take_results(
        self, checkpoint_id: CheckpointId, savepoint: Store | None, results: Sequence[object]
    ) -> None:
        """Acknowledge, or say why not.

        A state that could not be written fails this checkpoint only. A sink that could not
        prepare has lost records of its epoch, so the attempt must go back to the last checkpoint.
        What a sink did prepare is kept in any case: it comes out with the next checkpoint.
        """
        written: list[OperatorSnapshot] = []
        failures: list[str] = []
        for operator, result in zip(self._stateful, results, strict=True):
            if not isinstance(result, Exception):
                written.append(operator.described(checkpoint_id, result))
            elif isinstance(operator, Writing):
                raise result
            else:
                failures.append(str(result))
        snapshot = self._open.get(checkpoint_id)
        if snapshot is None or failures:
            self._events.snapshot_unwanted(files_written(checkpoint_id, written), savepoint)
        if snapshot is None:
            return
        if failures:
            self._decline(checkpoint_id, failures[0])
            return
        snapshot.operators = [replace(op, finished=snapshot.is_finished) for op in written]
        self._acknowledge_if_complete(checkpoint_id, snapshot)

    def on_channels_written(self, checkpoint_id: CheckpointId, result: object) -> None:
        """What was under way is written; `result` is what the background part said, or raised."""
        snapshot = self._open.get(checkpoint_id)
        if isinstance(result, WrittenLog):
            channels = described_channels(result)
            if snapshot is None:
                self._events.snapshot_unwanted([channels[0].file], None)
                return
            snapshot.channels = channels
            self._acknowledge_if_complete(checkpoint_id, snapshot)
        elif snapshot is not None:
            self._decline(checkpoint_id, str(result))

    def _acknowledge_if_complete(self, checkpoint_id: CheckpointId, snapshot: OpenSnapshot) -> None:
        operators, channels = snapshot.operators, snapshot.channels
        if operators is None or channels is None:
            return
        refused = refusal(self.name, operators, channels)
        if refused is not None:
            self._decline(checkpoint_id, refused)
            return
        del self._open[checkpoint_id]
        timings = self._timings(snapshot, operators, channels)
        self._state_size = _rows_of(operators), timings.state_bytes
        self._events.acknowledged(self.ref, checkpoint_id, operators, timings, channels)

    def _decline(self, checkpoint_id: CheckpointId, reason: str) -> None:
        self._give_up(checkpoint_id)
        self._events.declined(self.ref, checkpoint_id, reason)

    def _give_up(self, checkpoint_id: CheckpointId) -> None:
        """Forget the snapshot; what of it is written already is of no use."""
        snapshot = self._open.pop(checkpoint_id, None)
        if snapshot is not None:
            files = files_written(checkpoint_id, snapshot.operators or ())
            channels = {channel.file for channel in snapshot.channels or ()}
            self._events.snapshot_unwanted([*files, *channels], snapshot.savepoint)

    def _timings(
        self,
        snapshot: OpenSnapshot,
        written: Sequence[OperatorSnapshot],
        channels: Sequence[ChannelState],
    ) -> SubtaskTimings:
        started = snapshot.started
        elapsed_ms = (self._clock.monotonic_seconds() - started.started_at_seconds) * 1000
        in_flight_bytes = sum(channel.length_bytes for channel in channels)
        state_bytes = in_flight_bytes + sum(
            file.length_bytes for op in written for file in op.files()
        )
        return SubtaskTimings(
            task=self.name,
            subtask=self.ref.subtask,
            start_delay_ms=round(started.start_delay_ms, 3),
            alignment_ms=round(started.alignment_ms, 3),
            sync_ms=round(started.sync_ms, 3),
            async_ms=round(elapsed_ms - started.sync_ms, 3),
            bytes_written=in_flight_bytes
            + sum(file.length_bytes for file in files_written(started.checkpoint_id, written)),
            state_bytes=state_bytes,
            in_flight_bytes=in_flight_bytes,
            processed_bytes=snapshot.processed_bytes,
            arrivals=_arrivals(snapshot),
            records_read=snapshot.records_read,
            event_times=snapshot.event_times,
        )

    def on_complete(self, checkpoint_id: CheckpointId, epoch: Epoch) -> None:
        """The checkpoint is complete: sinks may commit what it holds. Told twice: done once."""
        if checkpoint_id <= self._last_completed:
            return
        self._last_completed = checkpoint_id
        committing = [sink for sink in self._sinks if sink.commits_here]
        if committing:
            self._uncommitted[checkpoint_id] = len(committing)
        for sink in self._sinks:
            if sink.commits_here:
                self._events.commit_wanted(self.ref, sink, epoch, sink.on_complete(checkpoint_id))
            else:
                sink.on_committed(checkpoint_id)
        self._chain.completed(checkpoint_id)  # what the user's code raises keeps no sink waiting

    def on_committed(self, sink: Writing, checkpoint_id: CheckpointId) -> None:
        """The background commit is done."""
        sink.on_committed(checkpoint_id)
        self._uncommitted[checkpoint_id] -= 1
        if self._uncommitted[checkpoint_id] == 0:
            del self._uncommitted[checkpoint_id]
            self._events.committed(self.ref, checkpoint_id)

    def on_abort(self, checkpoint_id: CheckpointId) -> None:
        """The coordinator gave this checkpoint up."""
        for operator in self._stateful:
            operator.aborted(checkpoint_id)
        self._give_up(checkpoint_id)
        if checkpoint_id == self._held_by:
            self._held_by = None

    def close(self) -> None:
        self._chain.close()

    def _take_snapshot(
        self,
        barrier: Barrier,
        start_delay_ms: float,
        alignment_ms: float,
        is_recording: bool = False,
        overtaken: Mapping[ChannelName, list[pa.RecordBatch]] | None = None,
        processed_bytes: int = 0,
        arrived: dict[ChannelName, float] | None = None,
    ) -> None:
        """The synchronous part, and the barrier on its way, which has `overtaken` these already."""
        checkpoint_id = barrier.checkpoint_id
        self._counted_from = (f"checkpoint {checkpoint_id}", self.counters.records_in)
        savepoint = self._events.open_savepoint(barrier.savepoint) if barrier.savepoint else None
        began = self._clock.monotonic_seconds()
        self._chain.end_epoch()
        writes = self._chain.snapshot(checkpoint_id, savepoint)
        sent: OutputLog = {}
        if barrier.is_overtaking:
            sent = self._chain.overtake(barrier)
        else:
            self._chain.broadcast(barrier)
        sync_ms = (self._clock.monotonic_seconds() - began) * 1000
        kept = tuple(isinstance(operator, Writing) for operator in self._stateful)
        started = SnapshotStarted(
            checkpoint_id, writes, kept, began, start_delay_ms, alignment_ms, sync_ms
        )
        self._open[checkpoint_id] = OpenSnapshot(
            started,
            dict(overtaken or {}),
            sent,
            is_recording,
            self._leaves_by_seconds(barrier, began),
            self._has_finished,
            savepoint,
            processed_bytes,
            {} if arrived is None else arrived,
            self.counters.records_read,
            self._chain.event_times(),
        )
        if barrier.holds:
            self._held_by = checkpoint_id
        self._unwritten.append((checkpoint_id, savepoint))
        if self._writes_in_loop:
            self.on_written(checkpoint_id, [answer_or_error(write) for write in writes])
        else:
            self._events.snapshot_started(self.ref, started)
        self._write_channels_if_complete(checkpoint_id)

    def _leaves_by_seconds(self, barrier: Barrier, now_seconds: float) -> float | None:
        timeout_ms = barrier.alignment_timeout_ms
        if not timeout_ms or not self._chain.holds(barrier.checkpoint_id):
            return None
        return now_seconds + timeout_ms / 1000

    def _hasten_barriers(self) -> None:
        """A barrier that waits too long behind records on their way out overtakes them."""
        if not self._open:  # as in nearly every step
            return
        for checkpoint_id, snapshot in list(self._open.items()):
            if snapshot.leaves_by_seconds is None:
                continue
            if self._chain.holds(checkpoint_id):
                if self._clock.monotonic_seconds() < snapshot.leaves_by_seconds:
                    continue
                snapshot.sent = self._chain.hasten(checkpoint_id)
            snapshot.leaves_by_seconds = None
            self._write_channels_if_complete(checkpoint_id)

    def _write_channels_if_complete(self, checkpoint_id: CheckpointId) -> None:
        snapshot = self._open.get(checkpoint_id)
        if snapshot is None or snapshot.is_recording or snapshot.leaves_by_seconds is not None:
            return
        overtaken = self._overtaken(snapshot)
        if not overtaken:
            snapshot.channels = ()
            self._acknowledge_if_complete(checkpoint_id, snapshot)
            return
        assert self._channel_log is not None, "records under way have nowhere to be kept"
        write = self._channel_log(checkpoint_id, overtaken, snapshot.savepoint)
        if self._writes_in_loop:
            self.on_channels_written(checkpoint_id, answer_or_error(write))
        else:
            self._events.channels_recorded(self.ref, checkpoint_id, write)

    def _overtaken(self, snapshot: OpenSnapshot) -> list[Overtaken]:
        here = self.ref.subtask
        received = (
            Overtaken(edge, source, here, True, batches)
            for (edge, source), batches in snapshot.received.items()
        )
        sent = (
            Overtaken(edge, here, target, False, batches)
            for (edge, target), batches in snapshot.sent.items()
        )
        return [channel for channel in (*received, *sent) if channel.batches]


def _rows_of(operators: Sequence[OperatorSnapshot]) -> int | None:
    if any(operator.disk is not None for operator in operators):
        return None
    return sum(state.rows for operator in operators for state in operator.keyed)


def _arrivals(snapshot: OpenSnapshot) -> tuple[Arrival, ...]:
    """Of its barriers, in their order."""
    came = list(snapshot.arrived.items())
    if len(came) > ARRIVALS_MAX:
        came = [came[0], came[-1]]
    delay_ms, first = snapshot.started.start_delay_ms, came[0][1] if came else 0.0
    return tuple(
        (edge, source, round(delay_ms + (at - first) * 1000, 3)) for (edge, source), at in came
    )


def answer_or_error(background: Background) -> object:
    """What background work says; an error is judged in the loop, by whose work it was."""
    try:
        return cast(object, background())
    except Exception as error:
        return error


def described_channels(log: WrittenLog) -> list[ChannelState]:
    """What the acknowledgement says of records under way."""
    return [
        ChannelState(
            run.channel.edge,
            run.channel.source,
            run.channel.target,
            "input" if run.channel.is_input else "output",
            *_place_of(run, log),
            run.length_bytes,
            run.rows,
        )
        for run in log.runs
    ]


def _place_of(run: WrittenRun, log: WrittenLog) -> tuple[FileHandle, int]:
    """In which file it is and where there; what is kept without one is a file for itself.

    Otherwise every channel's state would hold the bytes of all of them.
    """
    if log.data is None:
        return FileHandle(log.path, log.length_bytes, log.crc32), run.offset_bytes
    data = log.data[run.offset_bytes : run.offset_bytes + run.length_bytes]
    return FileHandle(log.path, len(data), zlib.crc32(data), data), 0


class Turn:
    """What the loop is at, for others to look at. Written by the loop, which never waits for it."""

    __slots__ = ("is_working", "longest_ns", "steps", "subtask")

    def __init__(self) -> None:
        self.subtask: Subtask | None = None
        """Whose turn it is; None: nobody's. When a step has raised, whose it was."""
        self.steps = 0
        """Another number means that the loop has come on."""
        self.is_working = False
        """Whether it does something, and does not wait for something to do."""
        self.longest_ns = 0
        """The longest turn of a subtask since somebody set this to 0."""


def take_turn(subtasks: Sequence[Subtask], turn: Turn | None = None) -> bool:
    """Step each subtask, downstream ones first, as often as it may; whether any did something."""
    turn = turn or Turn()
    progressed = False
    now_ns = time.perf_counter_ns()
    for subtask in subtasks:
        turn.subtask = subtask
        clock, began_ns = subtask.share_clock, now_ns
        clock.begin_turn(now_ns)
        has_worked, waits = False, TURN
        for _ in range(subtask.steps_per_turn):
            turn.steps += 1
            if not subtask.step():
                waits = subtask.waits_for()
                break
            has_worked = True
            if subtask.is_firing:  # a barrier, also of a source here, waits for one batch only
                break
        now_ns = time.perf_counter_ns()
        clock.end_turn(now_ns, has_worked, waits)
        if has_worked:
            progressed = True
            turn.longest_ns = max(turn.longest_ns, now_ns - began_ns)
    turn.subtask = None
    return progressed


SubtaskOrder = TriggerCheckpoint | CompleteCheckpoint | AbortCheckpoint | AssignSplits | EndSources


def obey(subtasks: Iterable[Subtask], order: SubtaskOrder, turn: Turn | None = None) -> None:
    """Carry out what the coordinator says in all subtasks it concerns."""
    turn = turn or Turn()
    match order:
        case TriggerCheckpoint(checkpoint_id, triggered_at_ms, timeout_ms, savepoint, holds):
            barrier = Barrier(checkpoint_id, triggered_at_ms, timeout_ms, savepoint, holds)
            for subtask in subtasks:
                subtask.on_trigger(barrier)
        case EndSources():
            for subtask in subtasks:
                subtask.on_end_wanted()
        case CompleteCheckpoint(checkpoint_id, epoch):
            for subtask in subtasks:
                turn.subtask = subtask  # the user's functions are told
                subtask.on_complete(checkpoint_id, epoch)
            turn.subtask = None
        case AbortCheckpoint(checkpoint_id):
            for subtask in subtasks:
                subtask.on_abort(checkpoint_id)
        case AssignSplits():
            for subtask in subtasks:
                subtask.on_splits(order)


def complete_restored(
    subtasks: Iterable[Subtask], start: StartSlot, turn: Turn | None = None
) -> None:
    """What the restored checkpoint had prepared may be uncommitted, and sources and functions may
    not have been told of it: it is announced once more."""
    if start.restored_checkpoint is not None:
        assert start.restored_epoch is not None
        order = CompleteCheckpoint(start.restored_checkpoint, start.restored_epoch)
        obey(subtasks, order, turn)
