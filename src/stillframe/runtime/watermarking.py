"""`withWatermark` as an operator: looks at the event times that pass and says how far time is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from stillframe.graph.logical import WithWatermark
from stillframe.ids import CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import OperatorSnapshot
from stillframe.runtime.operators import Background, StatefulOperator


class Watermarking(StatefulOperator):
    """Passes records on; its watermark is the newest event time it has seen, less the delay."""

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        operator: WithWatermark,
        restored_us: int | None,
    ) -> None:
        self.watermark_us = restored_us
        self._uid = uid
        self._subtask = subtask
        self._operator = operator

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        newest_us = _newest_us(batch.column(self._operator.time))
        if newest_us is not None:
            reached_us = newest_us - self._operator.delay_us
            if self.watermark_us is None or reached_us > self.watermark_us:
                self.watermark_us = reached_us
        return (batch,)

    def snapshot(self, checkpoint_id: CheckpointId) -> Background:
        watermark_us = self.watermark_us
        return lambda: watermark_us

    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        return OperatorSnapshot(self._uid, self._subtask, watermark_us=written)


def _newest_us(times: pa.Array) -> int | None:
    """The newest of these event times; None if there is none."""
    newest = pc.max(times.cast(pa.timestamp("us"), safe=False)) if len(times) else pa.scalar(None)
    return cast("int | None", newest.cast(pa.int64()).as_py())
