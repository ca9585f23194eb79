"""The operators of one subtask, called one after the other, and the edges that leave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import pyarrow as pa

from stillframe.graph.plan import PlannedOperator
from stillframe.runtime.elements import Marker
from stillframe.runtime.operators import RunningOperator, StatefulOperator
from stillframe.runtime.outputs import EdgeOutput


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

    def broadcast(self, marker: Marker) -> None:
        for output in self._outputs:
            output.broadcast(marker)

    def close(self) -> None:
        # Each gets its turn, also after one that raises: workers are reused.
        with ExitStack() as closing:
            for operator in self._operators:
                closing.callback(operator.close)

    def _process_at(self, position: int, batch: pa.RecordBatch) -> None:
        for made in self._operators[position].process(batch):
            if made.num_rows == 0:
                continue
            for output in self._outputs_of[position]:
                output.send(made)
            for follower in self._chained[position]:
                self._process_at(follower, made)
