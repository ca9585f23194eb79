"""A subtask fed by channels: it waits for their barriers, or records what they overtake.

Theory of operation
-------------------
A step takes one element. Records go through the chain; barriers go to the aligner, whose
instructions are carried out here: a channel is held or released, recorded or not, or the snapshot
is taken. Before that, each step looks at barriers that still wait in the channels: one that
overtakes is pulled out of its place, and the batches in front of it, which it has overtaken, become
part of the checkpoint. Barriers in channels of a cycle are always pulled, and so is the barrier
that ends a recording.

Small batches that wait already are taken together, from all channels of an input, and go through
the chain as one: what a batch costs beside its rows is paid once. So batches are as small as they
come while there is little to do, and grow by themselves when it is more than can be done.

Timers that event time has made due fire one batch per step. Until the last has, no record is taken,
only barriers and what else may pass (see `firing`); so a snapshot may be taken in the middle.

At the head of a cycle, what comes back is taken out of the channel at once, even while there is no
room to process it: the cycle could otherwise fill up and wait for itself. When the other inputs
have ended, laps are sent round to find out when nothing circulates any more (see `protocol/laps`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from stillframe.clock import Clock
from stillframe.config import CheckpointMode
from stillframe.errors import UserCodeError
from stillframe.graph.plan import SubtaskRef
from stillframe.ids import ChannelIndex, CheckpointId, SubtaskIndex
from stillframe.protocol.alignment import (
    BarrierAligner,
    Hold,
    Instruction,
    Release,
    TakeSnapshot,
)
from stillframe.protocol.event_time import (
    AdvanceTime,
    BecomeIdle,
    EventTime,
    TimeInstruction,
)
from stillframe.protocol.laps import HeadLaps, PassingLaps, Returned, SendLap
from stillframe.protocol.measures import Aligning, ChannelMeasures
from stillframe.protocol.recording import Abandon, StopRecording
from stillframe.protocol.tracking import BarrierTracker
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import InputChannel
from stillframe.runtime.elements import (
    Barrier,
    CancelBarrier,
    EndOfRecords,
    Idle,
    Lap,
    LatencyMarker,
    Marker,
    Watermark,
)
from stillframe.runtime.inputs import ChannelPlace, Inputs
from stillframe.runtime.spilling import FeedbackInput
from stillframe.runtime.task import ChannelLog, ChannelName, OpenSnapshot, Subtask, TaskEvents
from stillframe.runtime.time_shares import HELD, IDLE

_PASSING = (Barrier, CancelBarrier, Watermark, EndOfRecords, LatencyMarker)
"""What is taken while timers fire. Records wait, and so does all that keeps a place behind them;
and a barrier with which the job rests: who reads what is there now, as every night, wants all that
is due by then."""
_PASSING_WHEN_HELD = (Barrier, CancelBarrier, LatencyMarker)


def _rests(element: object) -> bool:
    """Whether the job stands still behind this, and nothing but a checkpoint is made of it."""
    return isinstance(element, Barrier) and element.holds and element.savepoint is None


_STEPS_PER_TURN_MIN = 16
"""And as many as there are channels: each may bring a batch in a turn, and what is not worked off
in it waits in front of the next barrier. With 64 channels an aligned checkpoint took 440 ms with 16
steps, and 250 with 64."""
TOGETHER_ROWS_MAX = 4_096
_TOGETHER_BYTES_MAX = 256 * 1024
"""Batches are taken together up to here, so that no step is long because many were waiting."""

_MISSING_TOLD_MAX = 8
_LAP_PAUSE_SECONDS = 0.005
"""Between two laps, so that an idle cycle does not keep a core busy."""


@dataclass(slots=True)
class _Alignment:
    """When the barriers of a checkpoint began to arrive."""

    barrier: Barrier
    start_delay_ms: float
    began_at_seconds: float
    processed_bytes: int = 0
    """Of records that were taken since."""
    arrived: dict[ChannelName, float] = field(default_factory=dict)
    """Where a barrier has come, and when, in seconds; in that order."""

    def is_patience_over(self, now_seconds: float) -> bool:
        timeout_ms = self.barrier.alignment_timeout_ms
        return timeout_ms is not None and now_seconds >= self.began_at_seconds + timeout_ms / 1000


class _Together:
    """Small batches that go through the chain as one."""

    def __init__(self, first: pa.RecordBatch, rows_max: int) -> None:
        self._batches = [first]
        self._rows_left = rows_max - first.num_rows
        # Of what a slice was cut from all counts: that is too much, and quicker than `nbytes`.
        self._bytes_left = _TOGETHER_BYTES_MAX - first.get_total_buffer_size()

    def takes(self, element: object) -> bool:
        """Whether this one is taken too."""
        if self._rows_left <= 0 or not isinstance(element, pa.RecordBatch):
            return False
        # Records and partial aggregates, which are told apart by metadata, come on one channel.
        if not element.schema.equals(self._batches[0].schema, check_metadata=True):
            return False
        self._rows_left -= element.num_rows
        self._bytes_left -= element.get_total_buffer_size()
        if self._rows_left < 0 or self._bytes_left < 0:
            self._rows_left = 0  # it stays, and so do those behind it
            return False
        self._batches.append(element)
        return True

    def batch(self) -> pa.RecordBatch:
        return self._batches[0] if len(self._batches) == 1 else pa.concat_batches(self._batches)


class InnerSubtask(Subtask):
    """Takes elements from its channels and runs records through the chain."""

    def __init__(
        self,
        ref: SubtaskRef,
        name: str,
        chain: Chain,
        clock: Clock,
        events: TaskEvents,
        channels: Sequence[InputChannel],
        mode: CheckpointMode = "exactly-once",
        channel_log: ChannelLog | None = None,
        places: Sequence[ChannelPlace] | None = None,
        has_finished: bool = False,
        restored_time_us: int | None = None,
        together_rows_max: int = TOGETHER_ROWS_MAX,
        stream_of: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(ref, name, chain, clock, events, mode, channel_log)
        self.steps_per_turn = max(_STEPS_PER_TURN_MIN, len(channels))
        self._together_rows_max = 0 if chain.sees_batches else together_rows_max
        self._inputs = Inputs(channels, [0] * len(channels))
        self._places = places or [
            ChannelPlace(("", SubtaskIndex(index))) for index in range(len(channels))
        ]
        indices = [ChannelIndex(index) for index in range(len(channels))]
        feedback = [index for index in indices if self._places[index].is_feedback]
        kind = BarrierTracker if mode == "at-least-once" else BarrierAligner
        self._aligner: BarrierAligner | BarrierTracker = kind(indices, feedback)
        self._alignments: dict[CheckpointId, _Alignment] = {}
        self._recorded: dict[CheckpointId, set[ChannelIndex]] = {}
        self._unended = set(indices)
        self._feedback = frozenset(feedback)
        self._head_laps = HeadLaps(feedback) if feedback else None
        self._next_lap_at_seconds = 0.0
        self._passing_laps = self._lap_passages()
        self._is_restored_finished = has_finished
        self._at_work_input, self._at_work_rows = 0, 0
        """Of the batch that goes through the chain."""
        self._has_ended_time = False
        self._event_time = EventTime(
            (index for index in indices if index not in self._feedback),
            restored_time_us,
            stream_of,
        )

    # --- steps ---

    def step(self) -> bool:
        self._resume_time()
        self._hasten_barriers()
        progressed = self._take_back() if self._feedback else False
        progressed = self._pull_barriers() or progressed
        if not self._chain.has_room():
            return progressed
        if self._held_by is not None:
            return self._let_pass(_PASSING_WHEN_HELD) or progressed
        if self._chain.is_firing:
            return self._let_pass(_PASSING) or self._fire()
        progressed = self._chain.fire_by_clock() or progressed
        index = self._inputs.next_readable()
        if index is None:
            return self._go_round() or progressed
        element = self._inputs.channels[index].take()
        if isinstance(element, pa.RecordBatch):
            self._process(ChannelIndex(index), self._with_what_waits(index, element))
        else:
            self._on_marker(ChannelIndex(index), element)
        return True

    def _with_what_waits(self, index: int, first: pa.RecordBatch) -> pa.RecordBatch:
        """This batch, and behind it what of its kind waits in front of the channels."""
        self._note_records(ChannelIndex(index), first)
        if self._feedback:  # what comes back is told apart from what enters
            return first
        together = _Together(first, self._together_rows_max)
        for other, channel in enumerate(self._inputs.channels):
            if other in self._inputs.held or self._places[other].input != self._places[index].input:
                continue
            while not channel.is_empty() and together.takes(channel.peek()):
                batch = channel.take()
                self._note_records(ChannelIndex(other), batch)
        return together.batch()

    def _let_pass(self, passing: tuple[type[Marker], ...]) -> bool:
        """Take one of these that stands in front of its channel; whether there was any."""
        for index, channel in enumerate(self._inputs.channels):
            if index in self._inputs.held or channel.is_empty():
                continue
            first = channel.peek()
            if isinstance(first, passing) and not (_rests(first) and self._is_firing_now):
                self._on_marker(ChannelIndex(index), channel.take())
                return True
        return False

    @property
    def _is_firing_now(self) -> bool:
        return self._held_by is None and self._chain.is_firing

    def _fire(self) -> bool:
        self._chain.fire()
        self._finish_if_ended()
        return True

    def waits_for(self) -> int:
        waits = super().waits_for()
        return HELD if waits == IDLE and self._inputs.held else waits

    @property
    def bytes_in(self) -> int:
        return sum(channel.bytes_taken for channel in self._inputs.channels)

    @property
    def queued_bytes(self) -> int:
        return sum(channel.queued_bytes for channel in self._inputs.channels)

    def channel_measures(self) -> tuple[ChannelMeasures, ...]:
        """Of each channel. May be called by any thread."""
        return self._inputs.measures(self._places)

    def aligning(self) -> Aligning | None:
        # The loop may change them meanwhile, so that copies are looked at.
        for checkpoint_id, alignment in self._alignments.copy().items():
            arrived = set(alignment.arrived.copy())
            channels = [place.name for place in self._places if not place.is_feedback]
            missing = [name for name in channels if name not in arrived]
            if missing:
                ago_ms = (self._now() - alignment.began_at_seconds) * 1000
                return Aligning(
                    checkpoint_id,
                    len(channels) - len(missing),
                    len(channels),
                    self._clock.wall_ms() - round(ago_ms),
                    tuple(missing[:_MISSING_TOLD_MAX]),
                )
        return None

    def idle_seconds_max(self) -> float:
        wait = super().idle_seconds_max()
        due_seconds = None if self._held_by is not None else self._chain.due_in_seconds()
        if due_seconds is not None and self._chain.has_room():  # else its reader wakes us
            wait = min(wait, due_seconds)
        now = self._clock.monotonic_seconds()
        for alignment in self._alignments.values():
            timeout_ms = alignment.barrier.alignment_timeout_ms
            if timeout_ms is not None:
                until = alignment.began_at_seconds + timeout_ms / 1000
                wait = min(wait, until - now) if until > now else wait
        if self._is_lap_due():
            wait = min(wait, max(0.0, self._next_lap_at_seconds - now))
        return wait

    def holdings(self) -> Iterator[tuple[CheckpointId | None, str]]:
        yield from super().holdings()
        for checkpoint_id in self._alignments:
            yield checkpoint_id, "an alignment"
        for checkpoint_id in self._recorded:
            yield checkpoint_id, "a recording"
        if self._inputs.held and not self._alignments:
            yield None, "a channel held"

    def _note_records(self, index: ChannelIndex, batch: pa.RecordBatch) -> None:
        """A batch came on this channel."""
        place = self._places[index]
        self.counters.records_in += batch.num_rows
        self._inputs.records[index] += batch.num_rows
        self._event_time.on_active(index)
        for checkpoint_id, channels in self._recorded.items():
            if index in channels:
                self._record(checkpoint_id, place.name, [batch])
        if self._alignments or self._recorded:
            self._count_processed(batch.nbytes)
        if self._head_laps is not None and place.is_feedback:
            self._refuse_after_end()
            self._head_laps.on_record()

    def _count_processed(self, size_bytes: int) -> None:
        """For every checkpoint of which a barrier has come here and another has not."""
        for alignment in self._alignments.values():
            alignment.processed_bytes += size_bytes
        for checkpoint_id in self._recorded:
            snapshot = self._open.get(checkpoint_id)
            if snapshot is not None:
                snapshot.processed_bytes += size_bytes

    def _origin(self, rows: range | None) -> str:
        since, before = self._counted_from
        first = self.counters.records_in - before - self._at_work_rows
        span = range(self._at_work_rows) if rows is None else rows
        numbers = f"{first + span.start + 1}"
        if len(span) > 1:
            numbers = f"{numbers} to {first + span.stop}"
        return f"number {numbers} since {since}, on input {self._at_work_input}"

    def _process(self, index: ChannelIndex, batch: pa.RecordBatch) -> None:
        self._at_work_input, self._at_work_rows = self._places[index].input, batch.num_rows
        if self._at_work_input == 0:
            self._chain.process(batch)
        else:
            self._chain.process_second(batch)

    def _refuse_after_end(self) -> None:
        if self._has_finished:
            raise UserCodeError(
                f"{self.name} got records back after its cycle had run empty: a function within a"
                " cycle must not answer records in finish(), or to timers that the end fires"
            )

    def _take_back(self) -> bool:
        taken = [
            channel.take_all()
            for channel in self._inputs.channels
            if isinstance(channel, FeedbackInput)
        ]
        return any(taken)

    def _pull_barriers(self) -> bool:
        """Barriers that are to overtake what waits in front of them; whether there were any."""
        pulled = False
        for index, channel in enumerate(self._inputs.channels):
            if not channel.waiting_barriers():
                continue
            for barrier in tuple(channel.waiting_barriers()):
                self._note_arrival(ChannelIndex(index), barrier)
                if self._is_pulled(ChannelIndex(index), barrier):
                    overtaken = channel.pull(barrier.checkpoint_id)
                    self._on_barrier(ChannelIndex(index), barrier, overtaken)
                    pulled = True
        return self._lose_patience() or pulled

    def _is_pulled(self, index: ChannelIndex, barrier: Barrier) -> bool:
        checkpoint_id = barrier.checkpoint_id
        if barrier.is_overtaking or self._places[index].is_feedback:
            return True
        if self._aligner.is_recorded(index, checkpoint_id):
            return True
        alignment = self._alignments.get(checkpoint_id)
        return alignment is not None and alignment.is_patience_over(self._now())

    def _lose_patience(self) -> bool:
        if not self._alignments:  # as in nearly every step
            return False
        over = [
            checkpoint_id
            for checkpoint_id, alignment in self._alignments.items()
            if alignment.is_patience_over(self._now())
        ]
        instructions = [
            each for over_id in over for each in self._aligner.on_patience_over(over_id)
        ]
        self._carry_out(instructions)
        return bool(instructions)

    def _now(self) -> float:
        return self._clock.monotonic_seconds()

    # --- markers ---

    def on_abort(self, checkpoint_id: CheckpointId) -> None:
        super().on_abort(checkpoint_id)
        self._carry_out(self._aligner.on_cancel(checkpoint_id))

    def _on_marker(self, channel: ChannelIndex, marker: Marker) -> None:
        match marker:
            case Barrier():
                self._note_arrival(channel, marker)
                self._on_barrier(channel, marker, [] if marker.is_overtaking else None)
            case CancelBarrier(checkpoint_id):
                self._carry_out(self._aligner.on_cancel(checkpoint_id))
            case EndOfRecords():
                self._unended.discard(channel)
                # In a cycle time ends when nothing circulates any more; the last end is finishing.
                if self._unended and not self._feedback:
                    self._follow(self._event_time.on_change([channel], {}))
                self._finish_if_ended()
            case Lap():
                self._on_lap(channel, marker)
            case Watermark() | Idle():
                if channel not in self._feedback:
                    self._on_time(channel, marker)
            case LatencyMarker():
                self._chain.on_latency(marker, self._clock.wall_ms())

    def _on_time(self, channel: ChannelIndex, marker: Watermark | Idle) -> None:
        """What goes round a cycle does not hold its own time back."""
        if isinstance(marker, Watermark):
            self._follow(self._event_time.on_watermark(channel, marker.time_us))
        else:
            self._follow(self._event_time.on_idle(channel))

    def _follow(self, instructions: Sequence[TimeInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case AdvanceTime(time_us):
                    self._chain.advance(time_us)
                case BecomeIdle():
                    self._chain.become_idle()

    def _finish_if_ended(self) -> None:
        """Not while a barrier has come on some channels only: what followed it there is replayed
        after a restore, and must then find operators that have not finished. And not behind a
        barrier that holds the job."""
        is_between = self._aligner.is_between_barriers or self._held_by is not None
        if not self._unended and not is_between:
            self._finish()

    def _finish(self) -> None:
        if self._has_finished:
            return
        if not self._has_ended_time:
            self._has_ended_time = True
            self._chain.end_time()
        if self._chain.is_firing:
            return  # the last batch comes back here
        self._has_finished = True
        if not self._is_restored_finished:
            self._chain.finish()
        self._chain.broadcast(EndOfRecords())
        self._events.drained(self.ref)

    # --- barriers ---

    def _note_arrival(self, channel: ChannelIndex, barrier: Barrier) -> None:
        """Several checkpoints' barriers may be under way where no channel is held back."""
        checkpoint_id, name = barrier.checkpoint_id, self._places[channel].name
        aligning: _Alignment | OpenSnapshot | None = self._alignments.get(checkpoint_id)
        if aligning is None and self._aligner.is_awaited(checkpoint_id):
            delay_ms = max(0, self._clock.wall_ms() - barrier.triggered_at_ms)
            aligning = self._alignments[checkpoint_id] = _Alignment(barrier, delay_ms, self._now())
        aligning = aligning or self._open.get(checkpoint_id)
        if aligning is not None and name not in aligning.arrived:
            aligning.arrived[name] = self._now()

    def _on_barrier(
        self, channel: ChannelIndex, barrier: Barrier, overtaken: list[pa.RecordBatch] | None
    ) -> None:
        """A barrier came, in its place, or ahead of these batches in its channel."""
        checkpoint_id = barrier.checkpoint_id
        instructions = self._aligner.on_barrier(channel, checkpoint_id, overtaken is not None)
        self._carry_out(instructions, {self._places[channel].name: overtaken or []})

    def _carry_out(
        self,
        instructions: Sequence[Instruction],
        overtaken: dict[ChannelName, list[pa.RecordBatch]] | None = None,
    ) -> None:
        for instruction in instructions:
            match instruction:
                case Hold(channel):
                    self._inputs.held.add(channel)
                case Release(channels):
                    self._inputs.held.difference_update(channels)
                case TakeSnapshot():
                    self._snapshot(instruction, overtaken)
                case StopRecording(checkpoint_id, channel, is_last):
                    self._recorded.get(checkpoint_id, set()).discard(channel)
                    for name, batches in (overtaken or {}).items():
                        self._record(checkpoint_id, name, batches)
                    if is_last:
                        self._stop_recording(checkpoint_id)
                case Abandon(checkpoint_id):
                    self._abandon(checkpoint_id)
        self._forget_alignments()
        self._finish_if_ended()

    def _snapshot(
        self, take: TakeSnapshot, overtaken: dict[ChannelName, list[pa.RecordBatch]] | None
    ) -> None:
        alignment = self._alignments[take.checkpoint_id]
        if take.recorded:
            self._recorded[take.checkpoint_id] = set(take.recorded)
        barrier = alignment.barrier
        if take.overtakes:
            barrier = replace(barrier, alignment_timeout_ms=0)
        self._take_snapshot(
            barrier,
            alignment.start_delay_ms,
            (self._now() - alignment.began_at_seconds) * 1000,
            is_recording=bool(take.recorded),
            overtaken=overtaken,
            processed_bytes=alignment.processed_bytes,
            arrived=alignment.arrived,
        )

    def _forget_alignments(self) -> None:
        """Those of snapshots that were taken, or will never be."""
        over = [number for number in self._alignments if not self._aligner.is_awaited(number)]
        for checkpoint_id in over:
            del self._alignments[checkpoint_id]

    def _record(
        self, checkpoint_id: CheckpointId, name: ChannelName, batches: Sequence[pa.RecordBatch]
    ) -> None:
        snapshot = self._open.get(checkpoint_id)
        if snapshot is not None and batches:
            snapshot.received.setdefault(name, []).extend(batches)

    def _stop_recording(self, checkpoint_id: CheckpointId) -> None:
        self._recorded.pop(checkpoint_id, None)
        snapshot = self._open.get(checkpoint_id)
        if snapshot is not None:
            snapshot.is_recording = False
            self._write_channels_if_complete(checkpoint_id)

    def _abandon(self, checkpoint_id: CheckpointId) -> None:
        self._recorded.pop(checkpoint_id, None)
        self._chain.broadcast(CancelBarrier(checkpoint_id))
        self._decline(checkpoint_id, f"{self.name} gave up waiting for its barriers")

    # --- cycles ---

    def _lap_passages(self) -> dict[int, PassingLaps]:
        """For each cycle this subtask is on the way of, the channels its laps come on."""
        if self._feedback:
            return {}
        loops = {loop for place in self._places for loop in place.loops}
        return {
            loop: PassingLaps(
                ChannelIndex(index)
                for index, place in enumerate(self._places)
                if loop in place.loops
            )
            for loop in loops
        }

    def _on_lap(self, channel: ChannelIndex, lap: Lap) -> None:
        if self._head_laps is not None:
            returned = self._head_laps.on_lap(channel, lap.number, lap.is_quiet)
            if returned is Returned.QUIET:
                self._finish()
            return
        outside = {i for i in self._unended if lap.loop not in self._places[i].loops}
        onward = self._passing_laps[lap.loop].on_lap(channel, lap.number, lap.is_quiet, not outside)
        if onward is not None:
            self._send_lap(lap.loop, onward)

    def _is_lap_due(self) -> bool:
        return (
            self._head_laps is not None
            and not self._has_finished
            and not self._head_laps.is_under_way
            and self._held_by is None
            and not self._aligner.is_between_barriers
            and self._unended <= self._feedback
        )

    def _go_round(self) -> bool:
        """Send the next lap, if it is time for one."""
        if not self._is_lap_due() or self._now() < self._next_lap_at_seconds:
            return False
        assert self._head_laps is not None
        self._next_lap_at_seconds = self._now() + _LAP_PAUSE_SECONDS
        self._send_lap(self.ref.task, self._head_laps.next_lap())
        return True

    def _send_lap(self, loop: int, lap: SendLap) -> None:
        self._chain.send_lap(Lap(loop, lap.number, lap.is_quiet))
