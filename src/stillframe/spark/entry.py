"""What Spark calls on an executor: one barrier task becomes one slot."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
from pyspark import BarrierTaskContext

from stillframe.graph.launch import SlotLaunch
from stillframe.ids import SlotIndex
from stillframe.runtime.slot import run_slot

RESULT_SCHEMA = "slot int"
_RESULT = pa.schema([("slot", pa.int32())])


class SlotEntry:
    """The function given to `mapInArrow`: runs a slot to its end, then yields its number."""

    def __init__(self, launch: SlotLaunch, host: str | None, is_fed: bool) -> None:
        self._launch = launch
        self._host = host
        self._is_fed = is_fed

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = BarrierTaskContext.get()
        slot = SlotIndex(context.partitionId())
        host = self._host or context.getTaskInfos()[slot].address.rsplit(":", 1)[0]
        run_slot(self._launch, slot, host, os.getpid(), batches if self._is_fed else None)
        yield pa.record_batch([pa.array([slot], pa.int32())], schema=_RESULT)
