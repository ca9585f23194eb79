"""The operators of one subtask, called one after the other, and the edges that leave them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import pyarrow as pa

from stillframe.graph.plan import PlannedOperator
from stillframe.ids import CheckpointId, SubtaskIndex
from stillframe.runtime.connecting import TwoInputOperator
from stillframe.runtime.elements import Barrier, Lap, Marker
from stillframe.runtime.operators import RunningOperator, StatefulOperator
from stillframe.runtime.outputs import EdgeOutput

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
        self._pass_on(position, self._operators[position].process(batch))

    def _pass_on(self, position: int, batches: Iterable[pa.RecordBatch]) -> None:
        for made in batches:
            if made.num_rows == 0:
                continue
            for output in self._outputs_of[position]:
                output.send(made)
            for follower in self._chained[position]:
                self._process_at(follower, made)
