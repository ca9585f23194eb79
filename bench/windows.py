"""Windowed counts beside the plain keyed count, and overlapping windows beside those that do not.

    python bench/windows.py [--batches N] [--rounds N]

Everything a record costs between the exchange's two ends, on one core: batches of 32,768 records
of 1,000 string keys are combined as the sender does and merged as the receiver does, and windows
are closed as time goes on. Event time passes evenly, and the watermark is five seconds behind.

The figures are medians of rounds that take turns, of this thread's processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import Window
from stillframe.state.aggregates import AggregateTable
from stillframe.state.partials import PartialAggregates, is_partial
from stillframe.state.windows import WindowedPartials, WindowTables

BATCH_ROWS = 32_768
KEYS = 1_000
MAX_PARALLELISM = 128
SECOND_US = 1_000_000
DELAY_US = 5 * SECOND_US
BEGIN_US = 1_700_000_010 * SECOND_US  # ten seconds into a minute
SCHEMA = pa.schema([("k", pa.string()), ("t", pa.timestamp("us", "UTC"))])
CALLS = [AggregateCall("count", None, "count", pa.int64())]
TUMBLING = Window("t", 60 * SECOND_US, 60 * SECOND_US)
SLIDING = Window("t", 60 * SECOND_US, SECOND_US)


def batches(records_per_second: int, how_many: int) -> list[pa.RecordBatch]:
    random = np.random.default_rng(1)
    names = pa.array([f"app-{number:07d}" for number in range(KEYS)])
    step_us = SECOND_US / records_per_second
    made = []
    for index in range(how_many):
        times = BEGIN_US + (np.arange(BATCH_ROWS) + index * BATCH_ROWS) * step_us
        times = times - random.integers(0, 2 * SECOND_US, BATCH_ROWS)  # somewhat out of order
        columns = [
            names.take(pa.array(random.integers(0, KEYS, BATCH_ROWS))),
            pa.array(times.astype(np.int64)).view(SCHEMA.field("t").type),
        ]
        made.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return made


def plain(records: list[pa.RecordBatch]) -> int:
    """The keyed count without windows."""
    combiner = PartialAggregates(SCHEMA, ["k"], CALLS)
    table = AggregateTable(SCHEMA, ["k"], CALLS, MAX_PARALLELISM)
    emitted = 0
    for batch in records:
        combined = combiner.combine(batch)
        update = table.merge if is_partial(combined) else table.update
        emitted += update(combined).num_rows
    return emitted


def windowed(records: list[pa.RecordBatch], window: Window, emits_closed: bool, step: int) -> int:
    combiner = WindowedPartials(SCHEMA, ["k"], CALLS, window)
    tables = WindowTables(SCHEMA, ["k"], CALLS, window, MAX_PARALLELISM, emits_closed=emits_closed)
    emitted, watermark_us = 0, None
    for index, batch in enumerate(records, start=1):
        added = tables.add(combiner.combine(batch), watermark_us)
        assert not added.late_rows
        emitted += sum(made.num_rows for made in added.outputs)
        watermark_us = BEGIN_US + index * BATCH_ROWS * SECOND_US // step - DELAY_US
        emitted += sum(made.num_rows for made in tables.close(watermark_us))
    return emitted


def seconds(action: Callable[[], int]) -> tuple[float, int]:
    begin = time.thread_time()
    emitted = action()
    return time.thread_time() - begin, emitted


@dataclass
class Measured:
    title: str
    action: Callable[[], int]


def measure(title: str, records_per_second: int, how_many: int, rounds: int) -> None:
    records = batches(records_per_second, how_many)
    cases = [
        Measured("plain count", lambda: plain(records)),
        *(
            Measured(
                f"{name}, {mode}",
                lambda window=window, mode=mode: windowed(
                    records, window, mode == "append", records_per_second
                ),
            )
            for name, window in (("tumbling", TUMBLING), ("sliding", SLIDING))
            for mode in ("append", "update")
        ),
    ]
    taken: dict[str, list[float]] = {case.title: [] for case in cases}
    emitted = {}
    for _ in range(rounds):
        for case in cases:
            spent, emitted[case.title] = seconds(case.action)
            taken[case.title].append(spent)
    median = {name: statistics.median(values) for name, values in taken.items()}
    print(f"{title}: {how_many * BATCH_ROWS:,} records, {records_per_second:,} a second of time")
    for name, spent in median.items():
        rate = how_many * BATCH_ROWS / spent / 1e6
        beside = f"{median['plain count'] / spent:5.2f} of the plain count's speed"
        tumbling = median[name.replace("sliding", "tumbling")]
        cost = f"; {spent / tumbling:5.2f} x tumbling" if name.startswith("sliding") else ""
        print(f"    {name:18s} {rate:6.1f} M/s, {emitted[name]:>9,} rows emitted, {beside}{cost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    measure("dense", 1_000_000, given.batches, given.rounds)
    measure("even", 100_000, given.batches, given.rounds)
    measure("sparse", 10_000, given.batches // 5, given.rounds)


if __name__ == "__main__":
    main()
