"""Operators for which time itself is an input: something falls due, and fires a batch at a time.

A watermark may make a hundred thousand timers due at once. They are not fired within the step that
takes the watermark: the task fires them a batch per step, before it takes further records, and
sends the watermark on behind the last. Between two batches the operator is as good to be
snapshotted as between two records: what has not fired is in the snapshot, with the watermark that
made it due.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import pyarrow as pa

from stillframe.runtime.operators import StatefulOperator


class FiringOperator(StatefulOperator):
    """It stands at the head of its task."""

    @abstractmethod
    def is_due(self) -> bool:
        """Whether event time has passed something that has not fired yet. Asked at every step."""

    @abstractmethod
    def fire(self) -> Iterable[pa.RecordBatch]:
        """Fire the next of what is due, and not more than a batch of it."""

    @abstractmethod
    def due_in_seconds(self) -> float | None:
        """When the clock on the wall makes something due, 0 if it has; None: nothing waits."""

    @abstractmethod
    def fire_by_clock(self) -> Iterable[pa.RecordBatch]:
        """As `fire`, of what is due by the clock on the wall."""
