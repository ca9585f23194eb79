"""A join with the newest row of another stream, as an operator: the newest rows are its state."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from stillframe.graph.logical import Enrich
from stillframe.ids import Attempt, OperatorUid, SubtaskIndex
from stillframe.runtime.connecting import TwoInputOperator
from stillframe.runtime.operators import KeyedOperator
from stillframe.state.aggregates import plain
from stillframe.state.newest import NewestRows
from stillframe.storage.store import Store


class Enriching(KeyedOperator, TwoInputOperator):
    """Passes each record of the first input at once, beside what is newest of the second then."""

    STATE = "newest"

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        operator: Enrich,
        newest: NewestRows,
        schema: pa.Schema,
        store: Store | None,
    ) -> None:
        super().__init__(uid, subtask, attempt, newest, store)
        self._operator = operator
        self._newest = newest
        self._schema = schema

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        places = self._newest.find([batch.column(key) for key in self._operator.keys])
        if self._operator.how == "inner":
            found = np.flatnonzero(places >= 0)
            batch = batch.take(pa.array(found)) if len(found) < batch.num_rows else batch
            places = places.take(found)
        columns = [*batch.columns, *self._newest.take(places).columns]
        return (pa.RecordBatch.from_arrays(list(map(plain, columns)), schema=self._schema),)

    def process_second(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        self._newest.update(batch)
        return ()


def newest_rows(
    operator: Enrich,
    input_schema: pa.Schema,
    schema: pa.Schema,
    max_parallelism: int,
    rows: Iterable[pa.RecordBatch],
) -> NewestRows:
    """The newest rows as they were; `schema` is of what comes out, the second's columns last."""
    second = pa.schema(list(schema)[len(input_schema) :])
    newest = NewestRows(second, operator.newest_keys, operator.newest_time, max_parallelism)
    for batch in rows:
        newest.restore(batch)
    return newest
