"""The operators of one subtask, called one after the other, and the edges that leave them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import pyarrow as pa

from stillframe.graph.plan import PlannedOperator
from stillframe.ids import CheckpointId, SubtaskIndex
from stillframe.protocol.event_time import END_OF_TIME_US
from stillframe.runtime.connecting import TwoInputOperator
from stillframe.runtime.elements import Barrier, Idle, Lap, Marker, Watermark
from stillframe.runtime.operators import RunningOperator, StatefulOperator
from stillframe.runtime.outputs import EdgeOutput
from stillframe.runtime.watermarking import Watermarking

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
        self._chained = [operator.chained for operator in planned]
        self._outputs_of = [[outputs[edge] for edge in operator.edges] for operator in planned]
        self._outputs = list(outputs.values())

    @property
    def stateful(self) -> list[StatefulOperator]:
        return [op for op in self._operators if isinstance(op, StatefulOperator)]

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
        """Event time has come this far on the chain's input."""
        self._advance_at(0, time_us)

    def end_time(self) -> None:
        """The records have ended: so does event time, also where the chain itself tells it."""
        self._advance_at(0, END_OF_TIME_US)
        for position, operator in enumerate(self._operators):
            if isinstance(operator, Watermarking):
                self._advance_after(position, END_OF_TIME_US)

    def resume_time(self) -> None:
        """After a restore: say again how far event time had come."""
        for position, operator in enumerate(self._operators):
            if isinstance(operator, StatefulOperator) and operator.watermark_us is not None:
                self._advance_after(position, operator.watermark_us)

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

    def _process_at(self, position: int, batch: pa.RecordBatch) -> None:
        operator = self._operators[position]
        if not isinstance(operator, Watermarking):
            self._pass_on(position, operator.process(batch))
            return
        before_us = operator.watermark_us
        self._pass_on(position, operator.process(batch))
        if operator.watermark_us is not None and operator.watermark_us != before_us:
            self._advance_after(position, operator.watermark_us)

    def _advance_at(self, position: int, time_us: int) -> None:
        operator = self._operators[position]
        if isinstance(operator, Watermarking):
            return  # it tells the time itself
        self._pass_on(position, operator.on_watermark(time_us))
        self._advance_after(position, time_us)

    def _advance_after(self, position: int, time_us: int) -> None:
        if time_us != END_OF_TIME_US:  # the end of records says that too
            for output in self._outputs_of[position]:
                output.broadcast(Watermark(time_us))
        for follower in self._chained[position]:
            self._advance_at(follower, time_us)

    def _pass_on(self, position: int, batches: Iterable[pa.RecordBatch]) -> None:
        for made in batches:
            if made.num_rows == 0:
                continue
            for output in self._outputs_of[position]:
                output.send(made)
            for follower in self._chained[position]:
                self._process_at(follower, made)
