"""The operators of one subtask, called one after the other, and the edges that leave them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import pyarrow as pa

from stillframe.errors import UserCodeError
from stillframe.graph.logical import Late
from stillframe.graph.plan import PlannedOperator
from stillframe.ids import CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.event_time import (
    END_OF_TIME_US,
    AdvanceTime,
    BecomeIdle,
    TimeInstruction,
)
from stillframe.protocol.snapshots import EventTimes
from stillframe.protocol.split_times import OpenSplits
from stillframe.runtime.connecting import TwoInputOperator
from stillframe.runtime.elements import Barrier, Idle, Lap, LatencyMarker, Marker, Watermark
from stillframe.runtime.firing import FiringOperator
from stillframe.runtime.latencies import Latencies
from stillframe.runtime.operators import Background, RunningOperator, StatefulOperator
from stillframe.runtime.outputs import EdgeOutput
from stillframe.runtime.watermarking import Watermarking
from stillframe.storage.store import Store
from stillframe.user_code import add_to_blame

OutputLog = dict[tuple[str, SubtaskIndex], list[pa.RecordBatch]]
"""Batches that a barrier overtook on their way out, by the edge's name and the receiver."""


class Chain:
    """A tree of operators; its first one takes the input."""

    def __init__(
        self,
        planned: Sequence[PlannedOperator],
        operators: Sequence[RunningOperator],
        outputs: Mapping[int, EdgeOutput],
    ) -> None:
        self._operators = operators
        self._uids = [operator.uid for operator in planned]
        self._chained = [
            [at for at in operator.chained if not isinstance(planned[at].operator, Late)]
            for operator in planned
        ]
        self._late_readers = [
            [at for at in operator.chained if isinstance(planned[at].operator, Late)]
            for operator in planned
        ]
        for operator, readers in zip(operators, self._late_readers, strict=True):
            operator.keeps_late = bool(readers)
        self._outputs_of = [[outputs[edge] for edge in operator.edges] for operator in planned]
        self._outputs = list(outputs.values())
        self._onward = [output for output in self._outputs if not output.edge.is_feedback]
        self.latencies = Latencies()
        """Of markers that came here, from each source."""
        self._chance = random.Random(len(planned))
        head = operators[0]
        self._firing = head if isinstance(head, FiringOperator) else None
        self._untold_us: int | None = None
        """The watermark that goes on when all that it made due has fired."""
        assert not any(isinstance(operator, FiringOperator) for operator in operators[1:])

    @property
    def watermarkings(self) -> list[Watermarking]:
        return [op for op in self._operators if isinstance(op, Watermarking)]

    def event_times(self) -> tuple[EventTimes, ...]:
        """Of the rows since it was asked last."""
        told = (operator.event_times() for operator in self.watermarkings)
        return tuple(each for each in told if each is not None)

    @property
    def head_uid(self) -> OperatorUid:
        """Of the operator that takes the input."""
        return self._uids[0]

    @property
    def sees_batches(self) -> bool:
        return self._operators[0].sees_batches

    @property
    def stateful(self) -> list[StatefulOperator]:
        return [op for op in self._operators if isinstance(op, StatefulOperator)]

    def times_us(self) -> dict[OperatorUid, int | None]:
        """How far event time has come in each operator that may remember it."""
        return {
            uid: operator.watermark_us
            for uid, operator in zip(self._uids, self._operators, strict=True)
            if isinstance(operator, StatefulOperator)
        }

    def uid_at(self, position: int) -> OperatorUid:
        return self._uids[position]

    @property
    def late_rows(self) -> int:
        return sum(operator.late_rows for operator in self._operators)

    @property
    def timers_fired(self) -> int:
        return sum(operator.timers_fired for operator in self._operators)

    def sent(self) -> tuple[int, int]:
        """How many rows, and bytes, have gone to channels."""
        counts = [output.sent() for output in self._outputs]
        return sum(rows for rows, _ in counts), sum(size for _, size in counts)

    def has_room(self) -> bool:
        return all(output.has_room() for output in self._outputs)

    def process(self, batch: pa.RecordBatch) -> None:
        """Run the batch through the whole tree."""
        self._process_at(0, batch)

    def process_second(self, batch: pa.RecordBatch) -> None:
        """As `process`, for a batch of the second input."""
        head = self._operators[0]
        assert isinstance(head, TwoInputOperator), "this chain has one input"
        self._pass_on(0, head.process_second(batch))

    def finish(self) -> None:
        """The records have ended: let the operators say what is left, each before its followers."""
        for position in range(len(self._operators)):  # an operator stands before what it feeds
            self._pass_on(position, self._operators[position].finish())

    def advance(self, time_us: int) -> None:
        """Event time has come this far on the chain's input; what it makes due is for `fire`."""
        if self._firing is None:
            self._advance_at(0, time_us)
            return
        self._pass_on(0, self._firing.on_watermark(time_us))
        further_us = self._firing.watermark_us  # before a restore, perhaps
        self._untold_us = time_us if further_us is None else max(time_us, further_us)
        self._tell_if_fired()

    def end_time(self) -> None:
        """The records have ended: so does event time, also where the chain itself tells it."""
        if self._firing is not None:
            self.advance(END_OF_TIME_US)
        else:
            self._advance_at(0, END_OF_TIME_US)
            self._end_own_time()

    @property
    def is_firing(self) -> bool:
        """Whether something is due by event time: it fires before the next records."""
        return self._firing is not None and self._firing.is_due()

    def fire(self) -> None:
        """Fire one batch of what is due by event time; behind the last goes the watermark."""
        assert self._firing is not None
        self._pass_on(0, self._firing.fire())
        self._tell_if_fired()

    def fire_by_clock(self) -> bool:
        """Fire one batch of what is due by the clock on the wall; whether there was any."""
        if self._firing is None or self._firing.due_in_seconds() != 0:
            return False
        self._pass_on(0, self._firing.fire_by_clock())
        return True

    def due_in_seconds(self) -> float | None:
        """When the clock on the wall makes something due; None: nothing waits for it."""
        return None if self._firing is None else self._firing.due_in_seconds()

    def on_splits(self, splits: OpenSplits) -> None:
        """What the source at the head of this chain reads from now, which may move event time."""
        for position, operator in enumerate(self._operators):
            if isinstance(operator, Watermarking):
                for instruction in operator.on_splits(splits):
                    self._carry_out_after(position, instruction)

    def resume_time(self) -> None:
        """After a restore: say again how far event time had come."""
        for position, operator in enumerate(self._operators):
            if isinstance(operator, StatefulOperator) and operator.watermark_us is not None:
                if operator is self._firing:  # what it had not fired comes before
                    self._untold_us = operator.watermark_us
                    self._tell_if_fired()
                else:
                    time_us = operator.time_after(operator.watermark_us)
                    self._advance_after(position, time_us)

    def end_epoch(self) -> None:
        """A snapshot is about to be taken: what belongs before it goes on its way."""
        for position, operator in enumerate(self._operators):
            self._pass_on(position, operator.on_barrier())

    def snapshot(
        self, checkpoint_id: CheckpointId, savepoint: Store | None
    ) -> tuple[Background, ...]:
        """The synchronous part of every operator that has something to remember."""
        writes = []
        for position, operator in enumerate(self._operators):
            if isinstance(operator, StatefulOperator):
                with self._blaming(position):
                    writes.append(operator.snapshot(checkpoint_id, savepoint))
        return tuple(writes)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """This checkpoint is complete; at the start of an attempt, the one it was restored from."""
        for position, operator in enumerate(self._operators):
            if isinstance(operator, StatefulOperator):
                with self._blaming(position):
                    operator.completed(checkpoint_id)

    def become_idle(self) -> None:
        """Nothing comes for a while; what is behind the outputs does not wait for it."""
        self.broadcast(Idle())

    def broadcast(self, marker: Marker) -> None:
        for output in self._outputs:
            output.broadcast(marker)

    def send_lap(self, lap: Lap) -> None:
        """To where it can come back from."""
        for output in self._outputs:
            if lap.loop in output.edge.loops:
                output.broadcast(lap)

    def on_latency(self, marker: LatencyMarker, now_ms: int) -> None:
        self.latencies.add(marker.source_task, now_ms - marker.sent_at_ms)
        self.send_latency(marker)

    def send_latency(self, marker: LatencyMarker) -> None:
        """To one channel of one edge, by chance: to all, they would become more at every fork, and
        in turn some would always go the same way. Never round a cycle."""
        if self._onward:
            output = self._onward[self._chance.randrange(len(self._onward))]
            output.send_to(self._chance.randrange(1 << 16), marker)

    def overtake(self, barrier: Barrier) -> OutputLog:
        """Send the barrier ahead of all that has not left; what it overtook, by channel."""
        return {
            (output.edge.name, target): batches
            for output in self._outputs
            for target, batches in output.overtake(barrier)
        }

    def hasten(self, checkpoint_id: CheckpointId) -> OutputLog:
        """As `overtake`, for a barrier that was sent in its place and may not have left."""
        return {
            (output.edge.name, target): batches
            for output in self._outputs
            for target, batches in output.hasten(checkpoint_id)
        }

    def holds(self, checkpoint_id: CheckpointId) -> bool:
        """Whether a barrier of this checkpoint is still on its way out of this process."""
        return any(output.holds(checkpoint_id) for output in self._outputs)

    def close(self) -> None:
        # Each gets its turn, also after one that raises: workers are reused.
        with ExitStack() as closing:
            for operator in self._operators:
                closing.callback(operator.close)

    @contextmanager
    def _blaming(self, position: int) -> Iterator[None]:
        try:
            yield
        except UserCodeError as error:
            add_to_blame(error, operator=self._uids[position])
            raise

    def _process_at(self, position: int, batch: pa.RecordBatch) -> None:
        try:
            self._run_at(position, batch)
        except UserCodeError as error:
            add_to_blame(error, operator=self._uids[position])
            raise

    def _run_at(self, position: int, batch: pa.RecordBatch) -> None:
        operator = self._operators[position]
        if not isinstance(operator, Watermarking):
            self._pass_on(position, operator.process(batch))
            return
        before_us = operator.watermark_us
        self._pass_on(position, operator.process(batch))
        if operator.watermark_us is not None and operator.watermark_us != before_us:
            self._advance_after(position, operator.watermark_us)

    def _tell_if_fired(self) -> None:
        if self._untold_us is None or self.is_firing:
            return
        time_us, self._untold_us = self._untold_us, None
        self._advance_after(0, time_us)
        if time_us == END_OF_TIME_US:
            self._end_own_time()

    def _end_own_time(self) -> None:
        for position, operator in enumerate(self._operators):
            if isinstance(operator, Watermarking):
                self._advance_after(position, END_OF_TIME_US)

    def _advance_at(self, position: int, time_us: int) -> None:
        operator = self._operators[position]
        if isinstance(operator, Watermarking):
            return  # it tells the time itself
        self._pass_on(position, operator.on_watermark(time_us))
        self._advance_after(position, operator.time_after(time_us))

    def _advance_after(self, position: int, time_us: int) -> None:
        if time_us != END_OF_TIME_US:  # the end of records says that too
            for output in self._outputs_of[position]:
                output.broadcast(Watermark(time_us))
        for follower in self._chained[position]:
            self._advance_at(follower, time_us)
        if time_us == END_OF_TIME_US:  # any other has passed what comes too late already
            for reader in self._late_readers[position]:
                self._advance_at(reader, time_us)

    def _carry_out_after(self, position: int, instruction: TimeInstruction) -> None:
        match instruction:
            case AdvanceTime(time_us):
                self._advance_after(position, time_us)
            case BecomeIdle():
                self._become_idle_after(position)

    def _become_idle_after(self, position: int) -> None:
        for output in self._outputs_of[position]:
            output.broadcast(Idle())
        for follower in self._chained[position]:
            if not isinstance(self._operators[follower], Watermarking):  # it tells that itself
                self._become_idle_after(follower)

    def _pass_on(self, position: int, batches: Iterable[pa.RecordBatch]) -> None:
        try:
            self._hand_over(position, batches)
        except UserCodeError as error:
            add_to_blame(error, operator=self._uids[position])
            raise

    def _hand_over(self, position: int, batches: Iterable[pa.RecordBatch]) -> None:
        for made in batches:
            if made.num_rows == 0:
                continue
            for output in self._outputs_of[position]:
                output.send(made)
            for follower in self._chained[position]:
                self._process_at(follower, made)
        if self._late_readers[position]:
            self._pass_on_late(position)

    def _pass_on_late(self, position: int) -> None:
        for late in self._operators[position].take_late():
            for reader in self._late_readers[position]:
                self._process_at(reader, late)
