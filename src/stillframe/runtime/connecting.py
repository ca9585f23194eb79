"""The user's function over two streams, as an operator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

import pyarrow as pa

from stillframe.api.functions import TwoInputFunction
from stillframe.runtime.keyed_functions import FunctionOperator
from stillframe.runtime.operators import StatefulOperator


class TwoInputOperator(StatefulOperator):
    """An operator that is fed by two inputs; it stands at the head of its task."""

    @abstractmethod
    def process_second(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take one batch of the second input, answer what follows from it."""


class Connecting(FunctionOperator[TwoInputFunction], TwoInputOperator):
    """The user's function over two streams."""

    KIND = TwoInputFunction
    METHOD = "connect"

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        return self._called_with(self._function.process_first, batch)

    def process_second(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        return self._called_with(self._function.process_second, batch)
