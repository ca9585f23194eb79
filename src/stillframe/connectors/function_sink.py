"""A sink made of one function, which is given rows and a key by which it may know them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from stillframe.api.sinks import SinkGuarantee, Target
from stillframe.connectors.transactional import TransactionalSink
from stillframe.errors import BuildError
from stillframe.ids import CheckpointId, Mark, Writer

Deliver = Callable[[pa.RecordBatch, str], None]

_ROWS_MAX = 10_000


@dataclass(frozen=True)
class FunctionSink(TransactionalSink):
    """Calls `deliver(rows, key)` when the checkpoint of these rows is complete.

    The epoch is staged before. After a failure the same rows may come again with the same key, and
    never other rows with that key.
    """

    deliver: Deliver
    is_idempotent: bool = False
    rows_max: int = _ROWS_MAX

    @property
    def guarantee(self) -> SinkGuarantee:  # type: ignore[override]
        return "exactly-once" if self.is_idempotent else "at-least-once"

    @property
    def weakness(self) -> str | None:  # type: ignore[override]
        return None if self.is_idempotent else "may be called again with rows and a key it has seen"

    def open_target(self) -> Target:
        return _FunctionTarget(self.deliver, self.rows_max)

    def describe(self) -> str:
        name = getattr(self.deliver, "__qualname__", type(self.deliver).__qualname__)
        return f"function {name}"


class _FunctionTarget(Target):
    """Knows of no marks: who is given a key can tell by itself what it has seen."""

    def __init__(self, deliver: Deliver, rows_max: int) -> None:
        self._deliver = deliver
        self._rows_max = rows_max

    def begin(self, writer: Writer) -> CheckpointId | None:
        return None

    def write(
        self,
        mark: Mark,
        rows: Iterator[pa.RecordBatch],
        refuse: Callable[[pa.RecordBatch, str], None],
    ) -> None:
        # The staged batches are the same each time, so a part has the same rows each time.
        slices = (
            batch.slice(first, self._rows_max)
            for batch in rows
            for first in range(0, batch.num_rows, self._rows_max)
        )
        for number, part in enumerate(slices):
            self._deliver(part, f"{mark}/{number}")


def to_function(
    deliver: Deliver, *, idempotent: bool = False, rows_max: int = _ROWS_MAX
) -> FunctionSink:
    """A sink that calls `deliver(rows, key)` with Arrow rows of completed checkpoints.

    Called in the slots, in the background, with at most `rows_max` rows. It may be called again
    with the same rows and the same key after a failure; say `idempotent=True` if it ignores a key
    it has seen, and the job is exactly-once. Raise `stillframe.Unavailable`, a `ConnectionError` or
    a `TimeoutError` for what a later try may mend: it is tried again without a restart.
    """
    if not callable(deliver):
        raise BuildError(f"to_function takes a function of (rows, key), not {deliver!r}")
    if rows_max < 1:
        raise BuildError(f"rows_max is {rows_max}: give a number from 1 on")
    return FunctionSink(deliver, idempotent, rows_max)
