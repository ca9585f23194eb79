"""`withWatermark` as an operator: looks at the event times that pass and says how far time is.

Behind a source it tells the splits apart (`protocol.split_times`), and how far each had come is
kept with the split in the source's snapshot. Behind an exchange nobody knows which split a record
is from: there the newest of all counts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from stillframe.clock import Clock
from stillframe.graph.logical import WithWatermark
from stillframe.ids import CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.event_time import END_OF_TIME_US, TimeInstruction
from stillframe.protocol.manifests import OperatorSnapshot
from stillframe.protocol.snapshots import EventTimes
from stillframe.protocol.split_times import OpenSplits, SplitTimes
from stillframe.runtime.operators import Background, StatefulOperator
from stillframe.state.reached import BEGINNING_US
from stillframe.storage.store import Store

_log = logging.getLogger(__name__)


class Watermarking(StatefulOperator):
    """Passes records on; its watermark is the newest event time it has seen, less the delay."""

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        operator: WithWatermark,
        clock: Clock,
        restored_us: int | None = None,
        restored_splits: Mapping[str, int] | None = None,
        idle_timeout_seconds: float | None = None,
        ahead_seconds_max: float = math.inf,
    ) -> None:
        self.uid = uid
        self.ahead_rows = 0
        """Rows so far in the future that they did not move event time."""
        self._subtask = subtask
        self._operator = operator
        self._clock = clock
        self._ahead_seconds_max = ahead_seconds_max
        known_us = None if restored_us == BEGINNING_US else restored_us
        self._times = SplitTimes(known_us, restored_splits, idle_timeout_seconds)
        self.watermark_us = known_us
        self._seen: EventTimes | None = None
        """Since the last barrier."""

    def event_times(self) -> EventTimes | None:
        """Of the rows since it was asked last."""
        seen, self._seen = self._seen, None
        return seen

    def on_splits(self, splits: OpenSplits) -> list[TimeInstruction]:
        """What the source reads from now; what follows from that for event time."""
        instructions = self._times.on_splits(splits)
        self.watermark_us = self._times.time_us
        return instructions

    def time_of(self, split: str) -> int | None:
        """How far event time has come for a split of the source, if it tells its splits."""
        return self._times.time_of(split)

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        column = batch.column(self._operator.time)
        times = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        newest_us = self._newest_us(times, self._note(times))
        if newest_us is not None:
            reached_us = newest_us - self._operator.delay_us
            # Both ends of what a watermark can say have a meaning of their own.
            self._times.on_time(min(max(reached_us, BEGINNING_US + 1), END_OF_TIME_US - 1))
            self.watermark_us = self._times.time_us
        return (batch,)

    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        # A subtask that knows nothing yet says so: the others' time must not become its own.
        watermark_us = BEGINNING_US if self.watermark_us is None else self.watermark_us
        return lambda: watermark_us

    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        return OperatorSnapshot(self.uid, self._subtask, watermark_us=written)

    def _note(self, times: pa.Array) -> int | None:
        """The newest of these event times; None if there is none."""
        rows = len(times) - times.null_count
        if not rows:
            return None
        ends = pc.min_max(times).as_py()
        # As floats, because the sum of some thousand such whole numbers is none of 64 bits.
        mean_us = pc.mean(times.cast(pa.float64(), safe=False)).as_py()
        seen = EventTimes(self.uid, rows, ends["min"], ends["max"], mean_us)
        self._seen = seen if self._seen is None else self._seen.plus(seen)
        return seen.latest_us

    def _newest_us(self, times: pa.Array, newest_us: int | None) -> int | None:
        """The newest of these event times that may move time; None if there is none."""
        if newest_us is None or self._ahead_seconds_max == math.inf:
            return newest_us
        latest_us = self._clock.wall_ms() * 1000 + round(self._ahead_seconds_max * 1e6)
        if newest_us <= latest_us:
            return newest_us
        near = times.filter(pc.less_equal(times, latest_us))
        self._note_ahead(newest_us, len(times) - times.null_count - len(near))
        return _max(near)

    def _note_ahead(self, newest_us: int, rows: int) -> None:
        if not self.ahead_rows:
            _log.warning(
                "subtask %d of withWatermark(%r) got a record with event time %s, which is more"
                " than %g days ahead of the clock: it is processed but does not move event time;"
                " correct the source, or set watermarkMaxAhead (said once)",
                self._subtask,
                self._operator.time,
                pa.scalar(newest_us, pa.timestamp("us")).cast(pa.string()).as_py(),
                self._ahead_seconds_max / 86_400,
            )
        self.ahead_rows += rows


def _max(times: pa.Array) -> int | None:
    return cast("int | None", pc.max(times).as_py()) if len(times) else None
