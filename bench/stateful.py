"""How many rows a second a PySpark `StatefulProcessor` takes on one core, in one subtask.

    python bench/stateful.py [--keys 1000] [--rows 65536] [--batches 40]

A counter per key, as PySpark's documentation has it: every row is looked at in Python, the count is
read from and written to value state once per key and batch, and comes out. No network and no JVM:
the operator is called as a subtask calls it, with batches as they come from a channel. The figures
are of this thread's processor time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from stillframe.clock import SystemClock
from stillframe.graph.logical import Transform
from stillframe.ids import Attempt, OperatorUid, SubtaskIndex
from stillframe.runtime.kept_states import StatesOnHeap
from stillframe.runtime.transforming import Transforming
from stillframe.spark.processors.programs import ProcessorProgram
from stillframe.state.heap import HeapBackend

INPUT = pa.schema(
    [("app_id", pa.string()), ("user", pa.int64()), ("at", pa.timestamp("us", "UTC"))]
)
OUTPUT = pa.schema([("app_id", pa.string()), ("count", pa.int64())])
KEY_GROUPS = 128


class Counter(StatefulProcessor):
    """Counts rows, one by one."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        found = self.count.get()
        count = 0 if found is None else found[0]
        for row in rows:
            if row.user >= 0:
                count += 1
        self.count.update((count,))
        yield Row(app_id=key[0], count=count)

    def close(self) -> None: ...


class EveryRow(Counter):
    """Reads and writes its state for every row, and says the count for every row."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        for _ in rows:
            found = self.count.get()
            count = 1 if found is None else found[0] + 1
            self.count.update((count,))
            yield Row(app_id=key[0], count=count)


class Frames(Counter):
    """Counts the rows of frames."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803
        found = self.count.get()
        count = 0 if found is None else found[0]
        for frame in rows:
            count += len(frame)
        self.count.update((count,))
        yield pd.DataFrame({"app_id": [key[0]], "count": [count]})


def operator_of(processor: StatefulProcessor, in_pandas: bool) -> Transforming:
    pickled = cloudpickle.dumps(processor)
    program = ProcessorProgram(pickled, "Counter", OUTPUT, "none", "UTC", in_pandas)
    transform = Transform(program, "Counter", ("app_id",))
    keys = pa.schema([INPUT.field("app_id")])
    place = (OperatorUid("count"), SubtaskIndex(0), Attempt(1))
    # Without a place for snapshots: none is taken here.
    kept = StatesOnHeap(*place, None, HeapBackend(keys, KEY_GROUPS))
    return Transforming(transform, INPUT, OUTPUT, kept, KEY_GROUPS, SystemClock())


def batches_of(keys: int, rows: int, batches: int) -> list[pa.RecordBatch]:
    chance = np.random.default_rng(1)
    names = pa.array([f"app-{n}" for n in range(keys)])
    made = []
    for _ in range(batches):
        apps = names.take(pa.array(chance.integers(0, keys, rows)))
        users = pa.array(chance.integers(0, 1 << 40, rows))
        times = pa.array(chance.integers(0, 1 << 50, rows)).cast(pa.timestamp("us", "UTC"))
        made.append(pa.RecordBatch.from_arrays([apps, users, times], schema=INPUT))
    return made


def rows_per_second(make: Callable[[], Transforming], batches: list[pa.RecordBatch]) -> float:
    operator = make()
    for batch in batches[:2]:
        for _ in operator.process(batch):
            pass
    began = time.thread_time()
    for batch in batches[2:]:
        for _ in operator.process(batch):
            pass
    return sum(batch.num_rows for batch in batches[2:]) / (time.thread_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--batches", type=int, default=40)
    given = parser.parse_args()
    batches = batches_of(given.keys, given.rows, given.batches)
    print(f"{given.keys:,} keys, batches of {given.rows:,} rows; rows a second on one core")
    cases: list[tuple[str, StatefulProcessor, bool]] = [
        ("transformWithState, state once per key and batch", Counter(), False),
        ("transformWithState, state and output for every row", EveryRow(), False),
        ("transformWithStateInPandas", Frames(), True),
    ]
    for name, processor, in_pandas in cases:
        speed = rows_per_second(lambda p=processor, i=in_pandas: operator_of(p, i), batches)  # type: ignore[misc]
        print(f"{speed:>12,.0f}  {name}")


if __name__ == "__main__":
    main()
