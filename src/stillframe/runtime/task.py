"""One subtask: takes elements from its inputs or its source, runs its chain, answers barriers.

Theory of operation
-------------------
A subtask is stepped by the slot's loop. A step takes one element, and only if every output has
room, so that a slow reader downstream is felt all the way up to the source. Records go through the
chain. Barriers go to the aligner, whose instructions are carried out here: a channel is held or
released, or the snapshot is taken: first the synchronous part of every operator, then the barrier
goes out behind the records it belongs to, then the background part is handed to the slot's pool.

Rules of this file
------------------
1. No threads, sockets, files or sleeping: the simulator steps the same class.
2. Called by the loop thread only. Background work comes back as a call of `on_written`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from stillframe.api.sources import EndOfData, NothingYet
from stillframe.clock import Clock
from stillframe.config import CheckpointMode
from stillframe.graph.plan import SubtaskRef
from stillframe.ids import ChannelIndex, CheckpointId, Epoch
from stillframe.protocol.alignment import (
    Abandon,
    BarrierAligner,
    Hold,
    Instruction,
    Release,
    TakeSnapshot,
)
from stillframe.protocol.commits import Commit
from stillframe.protocol.manifests import OperatorSnapshot, SubtaskTimings
from stillframe.protocol.tracking import BarrierTracker
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import InputChannel
from stillframe.runtime.elements import Barrier, CancelBarrier, EndOfRecords, Marker
from stillframe.runtime.operators import Background, Reading, Writing


@dataclass(frozen=True, slots=True)
class SnapshotStarted:
    """The synchronous part is done; run these in the background, in order, then `on_written`."""

    checkpoint_id: CheckpointId
    writes: tuple[Background, ...]
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
    def acknowledged(
        self,
        subtask: SubtaskRef,
        checkpoint_id: CheckpointId,
        operators: Sequence[OperatorSnapshot],
        timings: SubtaskTimings,
    ) -> None:
        """The subtask's part of the checkpoint is durable."""

    @abstractmethod
    def declined(self, subtask: SubtaskRef, checkpoint_id: CheckpointId, reason: str) -> None:
        """The subtask will not do its part of this checkpoint."""

    @abstractmethod
    def snapshot_unwanted(self, operators: Sequence[OperatorSnapshot]) -> None:
        """The checkpoint failed while these were written: their files may be deleted."""

    @abstractmethod
    def commit_wanted(
        self, subtask: SubtaskRef, sink: Writing, epoch: Epoch, commit: Commit
    ) -> None:
        """Commit in the background, in order, then `on_committed`."""

    @abstractmethod
    def committed(self, subtask: SubtaskRef, checkpoint_id: CheckpointId) -> None:
        """Every sink of the subtask has committed everything up to this checkpoint."""

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


class Subtask(ABC):
    """What sources and inner subtasks have in common: the chain, its snapshots and its commits."""

    steps_per_turn: ClassVar[int]
    """How often the loop steps it before the other subtasks and the mailbox have their turn."""

    def __init__(
        self, ref: SubtaskRef, name: str, chain: Chain, clock: Clock, events: TaskEvents
    ) -> None:
        self.ref = ref
        self.name = name
        self.counters = Counters()
        self._chain = chain
        self._clock = clock
        self._events = events
        self._stateful = chain.stateful
        self._sinks = [op for op in self._stateful if isinstance(op, Writing)]
        self._uncommitted: dict[CheckpointId, int] = {}
        self._started: dict[CheckpointId, SnapshotStarted] = {}
        self._unwritten: deque[CheckpointId] = deque()
        self._written: dict[CheckpointId, Sequence[object]] = {}

    @abstractmethod
    def step(self) -> bool:
        """Do one piece of work; False if there is nothing to do or no room for its result."""

    def idle_seconds_max(self) -> float:
        """How long the loop may wait before it must step this subtask again unasked."""
        return 1.0

    @property
    def records_written(self) -> int:
        """How many records were handed to sinks here."""
        return sum(sink.records_written for sink in self._sinks)

    def on_written(self, checkpoint_id: CheckpointId, results: Sequence[object]) -> None:
        """The background part is done; `results` holds, per operator, its answer or its error.

        Taken in the order in which the snapshots began, whichever was written first: what a sink
        prepared at an earlier barrier, of a checkpoint that failed meanwhile, must be part of the
        later one, or its records would never come out.
        """
        self._written[checkpoint_id] = results
        while self._unwritten and self._unwritten[0] in self._written:
            oldest = self._unwritten.popleft()
            self._take_results(oldest, self._written.pop(oldest))

    def _take_results(self, checkpoint_id: CheckpointId, results: Sequence[object]) -> None:
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
        started = self._started.pop(checkpoint_id, None)
        if started is None or failures:
            self._events.snapshot_unwanted(written)
        if started is None:
            return
        if failures:
            self._events.declined(self.ref, checkpoint_id, failures[0])
            return
        self._events.acknowledged(self.ref, checkpoint_id, written, self._timings(started, written))

    def _timings(
        self, started: SnapshotStarted, written: Sequence[OperatorSnapshot]
    ) -> SubtaskTimings:
        elapsed_ms = (self._clock.monotonic_seconds() - started.started_at_seconds) * 1000
        state_bytes = sum(state.file.length_bytes for op in written for state in op.keyed)
        return SubtaskTimings(
            task=self.name,
            subtask=self.ref.subtask,
            start_delay_ms=round(started.start_delay_ms, 3),
            alignment_ms=round(started.alignment_ms, 3),
            sync_ms=round(started.sync_ms, 3),
            async_ms=round(elapsed_ms - started.sync_ms, 3),
            bytes_written=state_bytes,
            state_bytes=state_bytes,
            in_flight_bytes=0,
        )

    def on_complete(self, checkpoint_id: CheckpointId, epoch: Epoch) -> None:
        """The checkpoint is complete: sinks may commit what it holds."""
        committing = [sink for sink in self._sinks if sink.commits_here]
        if committing:
            self._uncommitted[checkpoint_id] = len(committing)
        for sink in self._sinks:
            if sink.commits_here:
                self._events.commit_wanted(self.ref, sink, epoch, sink.on_complete(checkpoint_id))
            else:
                sink.on_committed(checkpoint_id)

    def on_committed(self, sink: Writing, checkpoint_id: CheckpointId) -> None:
        """The background commit is done."""
        sink.on_committed(checkpoint_id)
        self._uncommitted[checkpoint_id] -= 1
        if self._uncommitted[checkpoint_id] == 0:
            del self._uncommitted[checkpoint_id]
            self._events.committed(self.ref, checkpoint_id)

    def on_abort(self, checkpoint_id: CheckpointId) -> None:
        """The coordinator gave this checkpoint up."""
        self._started.pop(checkpoint_id, None)

    def close(self) -> None:
        self._chain.close()

    def _take_snapshot(self, barrier: Barrier, start_delay_ms: float, alignment_ms: float) -> None:
        began = self._clock.monotonic_seconds()
        writes = tuple(op.snapshot(barrier.checkpoint_id) for op in self._stateful)
        self._chain.broadcast(barrier)
        sync_ms = (self._clock.monotonic_seconds() - began) * 1000
        started = SnapshotStarted(
            barrier.checkpoint_id, writes, began, start_delay_ms, alignment_ms, sync_ms
        )
        self._started[barrier.checkpoint_id] = started
        self._unwritten.append(barrier.checkpoint_id)
        self._events.snapshot_started(self.ref, started)


def take_turn(subtasks: Sequence[Subtask]) -> bool:
    """Step each subtask, downstream ones first, as often as it may; whether any did something."""
    progressed = False
    for subtask in subtasks:
        for _ in range(subtask.steps_per_turn):
            if not subtask.step():
                break
            progressed = True
    return progressed


class SourceSubtask(Subtask):
    """A subtask that begins with a source: barriers come from the coordinator, not from inputs."""

    steps_per_turn = 1  # what is in the job is worked off first: barriers wait behind it

    def __init__(
        self,
        ref: SubtaskRef,
        name: str,
        chain: Chain,
        clock: Clock,
        events: TaskEvents,
        source: Reading,
    ) -> None:
        super().__init__(ref, name, chain, clock, events)
        self._source = source
        self._drained = False
        self._retry_seconds = 0.0

    def step(self) -> bool:
        if self._drained or not self._chain.has_room():
            self._retry_seconds = 1.0
            return False
        polled = self._source.poll()
        if isinstance(polled, NothingYet):
            self._retry_seconds = polled.retry_seconds
            return False
        if isinstance(polled, EndOfData):
            self._drained = True
            self._chain.broadcast(EndOfRecords())
            self._events.drained(self.ref)
            return True
        self.counters.records_read += polled.num_rows
        self._chain.process(polled)
        return True

    def idle_seconds_max(self) -> float:
        return self._retry_seconds

    def on_trigger(self, barrier: Barrier) -> None:
        """The coordinator begins a checkpoint here."""
        delay_ms = self._clock.wall_ms() - barrier.triggered_at_ms
        self._take_snapshot(barrier, start_delay_ms=max(0, delay_ms), alignment_ms=0.0)


@dataclass(slots=True)
class _Alignment:
    """When the barriers of the open checkpoint began to arrive."""

    barrier: Barrier
    start_delay_ms: float
    began_at_seconds: float


@dataclass(slots=True)
class Inputs:
    """The input channels of a subtask: which are held, and whose turn it is."""

    channels: Sequence[InputChannel]
    held: set[int] = field(default_factory=set)
    turn: int = 0

    def next_readable(self) -> int | None:
        count = len(self.channels)
        for offset in range(count):
            index = (self.turn + offset) % count
            if index not in self.held and not self.channels[index].is_empty():
                self.turn = (index + 1) % count
                return index
        return None


class InnerSubtask(Subtask):
    """A subtask fed by channels: it aligns their barriers."""

    steps_per_turn = 16

    def __init__(
        self,
        ref: SubtaskRef,
        name: str,
        chain: Chain,
        clock: Clock,
        events: TaskEvents,
        channels: Sequence[InputChannel],
        mode: CheckpointMode = "exactly-once",
    ) -> None:
        super().__init__(ref, name, chain, clock, events)
        self._inputs = Inputs(channels)
        indices = [ChannelIndex(i) for i in range(len(channels))]
        self._aligner: BarrierAligner | BarrierTracker
        if mode == "exactly-once":
            self._aligner = BarrierAligner(indices)
        else:
            self._aligner = BarrierTracker(indices)
        self._alignments: dict[CheckpointId, _Alignment] = {}
        self._unended = set(range(len(channels)))

    def step(self) -> bool:
        if not self._chain.has_room():
            return False
        index = self._inputs.next_readable()
        if index is None:
            return False
        element = self._inputs.channels[index].take()
        if isinstance(element, pa.RecordBatch):
            self.counters.records_in += element.num_rows
            self._chain.process(element)
        else:
            self._on_marker(ChannelIndex(index), element)
        return True

    def on_abort(self, checkpoint_id: CheckpointId) -> None:
        super().on_abort(checkpoint_id)
        self._carry_out(self._aligner.on_cancel(checkpoint_id))

    def _on_marker(self, channel: ChannelIndex, marker: Marker) -> None:
        match marker:
            case Barrier(checkpoint_id):
                self._note_arrival(marker)
                self._carry_out(self._aligner.on_barrier(channel, checkpoint_id))
            case CancelBarrier(checkpoint_id):
                self._carry_out(self._aligner.on_cancel(checkpoint_id))
            case EndOfRecords():
                self._unended.discard(channel)
                if not self._unended:
                    self._chain.broadcast(EndOfRecords())
                    self._events.drained(self.ref)
            case _:
                raise AssertionError(f"nobody sends {marker} yet")

    def _note_arrival(self, barrier: Barrier) -> None:
        """Several checkpoints' barriers may be under way where no channel is held back."""
        if barrier.checkpoint_id not in self._alignments:
            delay_ms = max(0, self._clock.wall_ms() - barrier.triggered_at_ms)
            self._alignments[barrier.checkpoint_id] = _Alignment(
                barrier, delay_ms, self._clock.monotonic_seconds()
            )

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Hold(channel):
                    self._inputs.held.add(channel)
                case Release(channels):
                    self._inputs.held.difference_update(channels)
                case TakeSnapshot(checkpoint_id):
                    alignment = self._alignments[checkpoint_id]
                    self._alignments = {
                        later: each
                        for later, each in self._alignments.items()
                        if later > checkpoint_id
                    }
                    waited = self._clock.monotonic_seconds() - alignment.began_at_seconds
                    self._take_snapshot(alignment.barrier, alignment.start_delay_ms, waited * 1000)
                case Abandon(checkpoint_id):
                    self._events.declined(
                        self.ref, checkpoint_id, f"{self.name} gave up waiting for its barriers"
                    )
