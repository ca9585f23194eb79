"""Spark's evaluator as the operators of a slot have it: one JVM for all of their projections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from stillframe.evaluator.crossing import Crossing
from stillframe.evaluator.process import EvaluatorProcess, SparkHere
from stillframe.graph.expressions import SparkProjection


class Evaluator:
    """Of one slot. Made, used and closed by the thread that runs the slot."""

    def __init__(
        self, here: SparkHere, projections: Iterable[SparkProjection], memory_bytes: int
    ) -> None:
        """Starts the JVM, and answers before it has come up."""
        unique = {id(projection): projection for projection in projections}
        options = dict.fromkeys(each for p in unique.values() for each in p.java_options)
        self._process = EvaluatorProcess(here, list(options), memory_bytes)
        self._crossings = {
            place: Crossing(self._process, projection) for place, projection in unique.items()
        }

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self) -> None:
        """Wait until the first batch can come; raises if the JVM cannot be started."""
        for crossing in self._crossings.values():
            crossing.await_open()

    def columns(
        self, projection: SparkProjection, inputs: Sequence[pa.Array], rows: int
    ) -> list[pa.Array]:
        """What the projection, one of those it was made for, gives for at least one row.

        If the projection takes the time, that is the last input. Raises `RowRefused`, or
        `EvaluatorLost`, after which it is of no use.
        """
        return self._crossings[id(projection)].evaluate(list(inputs), rows)

    def close(self) -> None:
        self._process.kill()  # first: then nothing waits for its answers
        for crossing in self._crossings.values():
            crossing.close()
        self._process.close()
