"""Dropping duplicates beside the plain keyed count, which also keeps every key.

    python bench/duplicates.py [--keys N] [--rounds N]

Distinct 64-bit keys in batches of 32,768, on one core: what a record costs in the operator. Then
the same keys a second time, of which none passes, and keys that are forgotten as time goes on, so
that about 200,000 are remembered. The figures are medians of rounds that take turns, of this
thread's processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.state.aggregates import AggregateTable
from stillframe.state.duplicates import SeenKeys

BATCH_ROWS = 32_768
MAX_PARALLELISM = 128
KEPT_US = 200_000
SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
COUNT = [AggregateCall("count", None, "count", pa.int64())]


def batches(keys: int) -> list[pa.RecordBatch]:
    """A key for each microsecond, in no order of keys."""
    numbers = np.random.default_rng(1).permutation(keys).astype(np.int64)
    made = []
    for begin in range(0, keys, BATCH_ROWS):
        part = numbers[begin : begin + BATCH_ROWS]
        times = np.arange(begin, begin + len(part))
        columns = [pa.array(part), pa.array(times).view(SCHEMA.field("t").type)]
        made.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return made


def counted(records: list[pa.RecordBatch]) -> float:
    table = AggregateTable(SCHEMA, ["k"], COUNT, MAX_PARALLELISM)
    return seconds(lambda: [table.update(batch) for batch in records])


def sifted(records: list[pa.RecordBatch]) -> float:
    seen = SeenKeys(SCHEMA, ["k"], MAX_PARALLELISM)
    return seconds(lambda: [seen.sift(batch) for batch in records])


def sifted_again(records: list[pa.RecordBatch]) -> float:
    seen = SeenKeys(SCHEMA, ["k"], MAX_PARALLELISM)
    for batch in records:
        seen.sift(batch)
    return seconds(lambda: [seen.sift(batch) for batch in records])


def forgotten(records: list[pa.RecordBatch]) -> float:
    seen = SeenKeys(SCHEMA, ["k"], MAX_PARALLELISM, "t", KEPT_US)

    def run() -> None:
        for number, batch in enumerate(records, start=1):
            seen.sift(batch)
            seen.advance((number - 1) * BATCH_ROWS)

    spent = seconds(run)
    assert len(seen) < 4 * KEPT_US, "forgotten keys are freed"
    return spent


def seconds(action: Callable[[], object]) -> float:
    begin = time.thread_time()
    action()
    return time.thread_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    records = batches(given.keys)
    cases = {
        "plain count": counted,
        "duplicates, kept for ever": sifted,
        "duplicates, seen before": sifted_again,
        "duplicates, within a watermark": forgotten,
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(given.rounds):
        for name, action in cases.items():
            taken[name].append(action(records))
    plain = statistics.median(taken["plain count"])
    print(f"{given.keys:,} distinct keys")
    for name, spent in taken.items():
        median = statistics.median(spent)
        rate = given.keys / median / 1e6
        print(f"  {name:<32} {rate:6.1f} M records/s  {plain / median:5.2f} of the plain count's")


if __name__ == "__main__":
    main()
