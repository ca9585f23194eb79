"""Records per second and freeze times of running aggregates, on one core.

    python bench/keyed_state.py [--batches N]

Each line is one table: how many keys of which kind, how fast batches of 65,536 records are counted
into it, what a freeze costs the loop, and what the first batch after the freeze costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.state.aggregates import AggregateTable

BATCH_ROWS = 65_536
MAX_PARALLELISM = 128
COUNT = AggregateCall("count", None, "count", pa.int64())
SUM = AggregateCall("sum", "v", "sum(v)", pa.int64())
AVG = AggregateCall("avg", "v", "avg(v)", pa.float64())
MAX = AggregateCall("max", "v", "max(v)", pa.int64())


def app_names(numbers: np.ndarray) -> pa.Array:
    return pa.array([f"app-{number:07d}" for number in numbers.tolist()])


def sparse_integers(numbers: np.ndarray) -> pa.Array:
    return pa.array(numbers * 7_919 + 13)


def batches(make_keys: Callable, keys: int, how_many: int) -> list[pa.RecordBatch]:
    random = np.random.default_rng(1)
    return [
        pa.record_batch(
            {
                "k": make_keys(random.integers(0, keys, BATCH_ROWS)),
                "v": random.integers(0, 1_000, BATCH_ROWS),
            }
        )
        for _ in range(how_many)
    ]


def all_keys(make_keys: Callable, keys: int) -> list[pa.RecordBatch]:
    numbers = np.random.default_rng(2).permutation(keys)
    return [
        pa.record_batch({"k": make_keys(part), "v": part})
        for part in np.array_split(numbers, max(1, keys // BATCH_ROWS))
    ]


def milliseconds(action: Callable) -> float:
    """Of this thread's processor time: what others do on the machine is not ours."""
    begin = time.thread_time()
    action()
    return (time.thread_time() - begin) * 1_000


def measure(title: str, make_keys: Callable, keys: int, calls: list, batch_count: int) -> None:
    filling = all_keys(make_keys, keys)
    table = AggregateTable(filling[0].schema, ["k"], calls, MAX_PARALLELISM)
    fill_ms = [milliseconds(lambda batch=batch: table.update(batch)) for batch in filling]
    steady = batches(make_keys, keys, 32)
    update_ms = [milliseconds(lambda i=i: table.update(steady[i % 32])) for i in range(batch_count)]
    frozen = []
    freeze_ms = milliseconds(lambda: frozen.append(table.freeze()))
    first_ms = milliseconds(lambda: table.update(steady[0]))
    sort_ms = milliseconds(lambda: list(frozen[0].batches_by_key_group()))
    frozen[0].release()
    rate = BATCH_ROWS / np.median(update_ms) / 1_000
    best = BATCH_ROWS / np.min(update_ms) / 1_000
    print(
        f"{title:34s} {rate:5.1f} M/s median, {best:5.1f} best | fill: slowest batch"
        f" {max(fill_ms):6.1f} ms | freeze {freeze_ms:6.3f} ms, next batch {first_ms:5.1f} ms,"
        f" sorted in {sort_ms:6.1f} ms | {table.state_bytes / 1e6:6.1f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200)
    batch_count = parser.parse_args().batches
    measure("1,000 strings, count", app_names, 1_000, [COUNT], batch_count)
    measure("1,000,000 int64, count", sparse_integers, 1_000_000, [COUNT], batch_count)
    measure("1,000 int64, count", sparse_integers, 1_000, [COUNT], batch_count)
    measure("1,000,000 strings, count", app_names, 1_000_000, [COUNT], batch_count)
    four = [COUNT, SUM, AVG, MAX]
    measure("1,000 strings, count sum avg max", app_names, 1_000, four, batch_count)
    measure("1,000,000 int64, count sum avg max", sparse_integers, 1_000_000, four, batch_count)


if __name__ == "__main__":
    main()
