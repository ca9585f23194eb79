"""Windowed counts and sessions beside the plain keyed count, and overlapping windows beside others.

    python bench/windows.py [--batches N] [--rounds N] [--windows N]

Everything a record costs between the exchange's two ends, on one core: batches of 32,768 records
of 1,000 string keys are combined as the sender does and merged as the receiver does, and windows
are closed as time goes on. Event time passes evenly, and the watermark is five seconds behind.

In update mode a batch changes up to 60 overlapping windows of each key it has, and says so: some 60
rows for one that windows side by side emit. What it costs only to make that many rows, of keys,
windows and counts that are there already, is said too.

Sessions have a gap of 2 seconds, or of 50 ms, with which there are many more of them in sparse
records than in dense ones.

The figures are medians of rounds that take turns, of this thread's processor time. At the end a
million windows are opened and closed, and the memory of the process is looked at on the way.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import SessionWindow, Window
from stillframe.state.aggregates import AggregateTable
from stillframe.state.panes import WindowedPartials
from stillframe.state.partials import PartialAggregates, is_partial
from stillframe.state.sessions import SessionPartials, SessionTable
from stillframe.state.windows import WindowTables

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


def rows_made(count: int) -> int:
    """As many rows as were emitted, made of columns that are there: the least they can cost."""
    names = pa.array([f"app-{number:07d}" for number in range(KEYS)])
    numbers = pa.array(np.arange(BATCH_ROWS) % KEYS)
    times = np.full(BATCH_ROWS, BEGIN_US)
    counts = np.zeros(BATCH_ROWS, dtype=np.int64)
    made = 0
    while made < count:
        bounds = [pa.array(times + size_us).view(SCHEMA.field("t").type) for size_us in (0, 1)]
        window = pa.StructArray.from_arrays(bounds, names=["start", "end"])
        columns = [window, names.take(numbers), pa.array(counts.copy())]
        made += pa.RecordBatch.from_arrays(columns, names=["window", "k", "count"]).num_rows
    return made


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def memory(windows: int) -> None:
    """Open and close so many windows, of ten records each, and say what the process holds."""
    width_us = SECOND_US // 100
    records = pa.array(np.arange(BATCH_ROWS) % KEYS).cast(pa.string())
    window = Window("t", width_us, width_us)
    tables = WindowTables(SCHEMA, ["k"], CALLS, window, MAX_PARALLELISM, emits_closed=True)
    begin_us, closed, held = BEGIN_US, 0, []
    while closed < windows:
        times = begin_us + np.arange(BATCH_ROWS) * width_us // 10
        batch = pa.RecordBatch.from_arrays(
            [records, pa.array(times).view(SCHEMA.field("t").type)], schema=SCHEMA
        )
        tables.add(batch, None)
        begin_us += BATCH_ROWS * width_us // 10
        opened = tables.pane_count
        for _ in tables.close(begin_us - DELAY_US):
            pass
        closed += opened - tables.pane_count
        if closed >= windows * (len(held) + 1) // 10:
            held.append(resident_bytes())
    print(f"memory: {closed:,} windows opened and closed, {tables.pane_count:,} open at the end")
    said = ", ".join(f"{each / 1e6:.0f}" for each in held)
    print(f"    resident after each tenth, MB: {said}; {held[-1] / held[0]:.2f} x the first")


def sessions(records: list[pa.RecordBatch], gap_us: int, step: int) -> int:
    window = SessionWindow("t", gap_us)
    combiner = SessionPartials(SCHEMA, ["k"], CALLS, window)
    table = SessionTable(SCHEMA, ["k"], CALLS, window, MAX_PARALLELISM)
    emitted, watermark_us = 0, None
    for index, batch in enumerate(records, start=1):
        assert not table.add(combiner.combine(batch), watermark_us).late_rows
        watermark_us = BEGIN_US + index * BATCH_ROWS * SECOND_US // step - DELAY_US
        combiner.on_watermark(watermark_us)
        emitted += sum(made.num_rows for made in table.close(watermark_us))
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
                f"sessions, {gap_us // 1000} ms",
                lambda gap_us=gap_us: sessions(records, gap_us, records_per_second),
            )
            for gap_us in (2 * SECOND_US, SECOND_US // 20)
        ),
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
    making: list[float] = []
    for _ in range(rounds):
        for case in cases:
            spent, emitted[case.title] = seconds(case.action)
            taken[case.title].append(spent)
        making.append(seconds(lambda: rows_made(emitted["sliding, update"]))[0])
    median = {name: statistics.median(values) for name, values in taken.items()}
    print(f"{title}: {how_many * BATCH_ROWS:,} records, {records_per_second:,} a second of time")
    for name, spent in median.items():
        rate = how_many * BATCH_ROWS / spent / 1e6
        beside = f"{median['plain count'] / spent:5.2f} of the plain count's speed"
        tumbling = median[name.replace("sliding", "tumbling")]
        cost = f"; {spent / tumbling:5.2f} x tumbling" if name.startswith("sliding") else ""
        print(f"    {name:18s} {rate:6.1f} M/s, {emitted[name]:>9,} rows emitted, {beside}{cost}")
    made = statistics.median(making)
    beside = f"{made / median['tumbling, update']:.2f} x tumbling"
    print(f"    to make the rows of the last, without any counting: {made:.2f} s, {beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=1_000_000)
    given = parser.parse_args()
    measure("dense", 1_000_000, given.batches, given.rounds)
    measure("even", 100_000, given.batches, given.rounds)
    measure("sparse", 10_000, given.batches // 5, given.rounds)
    memory(given.windows)


if __name__ == "__main__":
    main()
