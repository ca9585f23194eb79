"""`dropDuplicates` as an operator: the keys it has seen as state, watermarks that forget them."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from stillframe.graph.logical import DropDuplicates
from stillframe.ids import Attempt, OperatorUid, SubtaskIndex
from stillframe.protocol.restore import SubtaskState
from stillframe.runtime.operators import TimedOperator
from stillframe.state.duplicates import SeenKeys
from stillframe.storage.store import Store


class Deduplicating(TimedOperator):
    """Passes the first record of each key, and knows how far event time has come."""

    STATE = "seen"

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        seen: SeenKeys,
        store: Store | None,
        watermark_us: int | None = None,
    ) -> None:
        super().__init__(uid, subtask, attempt, seen, store, watermark_us)
        self._seen = seen
        self._late: list[pa.RecordBatch] = []

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        sifted = self._seen.sift(batch)
        if not self.keeps_late:
            self.late_rows += sifted.late.num_rows
        elif sifted.late.num_rows:
            self._late.append(sifted.late)
        return (sifted.fresh,)

    def take_late(self) -> Iterable[pa.RecordBatch]:
        late, self._late = self._late, []
        return late

    def on_watermark(self, time_us: int) -> Iterable[pa.RecordBatch]:
        if self.watermark_us is None or time_us > self.watermark_us:
            self.watermark_us = time_us
            self._seen.advance(time_us)
        return ()


def seen_keys(
    input_schema: pa.Schema,
    operator: DropDuplicates,
    max_parallelism: int,
    state: SubtaskState,
    rows: Iterable[pa.RecordBatch],
) -> SeenKeys:
    """The keys that were known: `rows` are those of `state`."""
    seen = SeenKeys(input_schema, operator.keys, max_parallelism, operator.time, operator.keep_us)
    for batch in rows:
        seen.restore(batch)
    seen.resume(state.watermark_us, ((g.first, g.stop, g.watermark_us) for g in state.reached))
    return seen
