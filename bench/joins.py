"""A join of two streams on keys and a range of time, beside the plain keyed count of the same rows.

    python bench/joins.py [--batches N] [--rounds N]

What the operator costs, on one core, without the exchange: batches of both sides come in turns, and
the watermark follows them. Of the two cases one has a key for every pair, an order and its payment
within ten seconds; in the other a thousand string keys come again and again, and the condition
leaves about one match for each row.

The figures are medians of rounds that take turns, of this thread's processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.graph.expressions import Call, Column, Expression, Literal
from stillframe.graph.logical import Join, JoinSide
from stillframe.ids import Attempt, OperatorUid, SubtaskIndex
from stillframe.runtime.joining import Joining
from stillframe.state.aggregates import AggregateTable

BATCH_ROWS = 32_768
KEYS = 1_000
MAX_PARALLELISM = 128
SECOND_US = 1_000_000
DELAY_US = 2 * SECOND_US
RECORDS_PER_SECOND = 50_000
BEGIN_US = 1_700_000_000 * SECOND_US
UTC = pa.timestamp("us", "UTC")
COUNT = [AggregateCall("count", None, "count", pa.int64())]
Batches = list[pa.RecordBatch]


def schema_of(side: str, key: pa.DataType) -> pa.Schema:
    return pa.schema([(f"{side}_key", key), (f"{side}_at", UTC), (f"{side}_value", pa.int64())])


def batch_of(schema: pa.Schema, keys: pa.Array, times: np.ndarray) -> pa.RecordBatch:
    values = pa.array(np.arange(len(keys)))
    columns = [keys, pa.array(times.astype(np.int64)).view(UTC), values]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def times_of(index: int, random: np.random.Generator) -> np.ndarray:
    steps = (np.arange(BATCH_ROWS) + index * BATCH_ROWS) * (SECOND_US / RECORDS_PER_SECOND)
    return BEGIN_US + steps - random.integers(0, SECOND_US, BATCH_ROWS)


def pairs_with_keys_of_their_own(how_many: int) -> tuple[Batches, Batches]:
    """Left rows and, within a second after each, its right row."""
    random = np.random.default_rng(1)
    schemas = [schema_of(side, pa.int64()) for side in ("left", "right")]
    lefts, rights = [], []
    for index in range(how_many):
        ids = np.arange(BATCH_ROWS) + index * BATCH_ROWS
        times = times_of(index, random)
        lefts.append(batch_of(schemas[0], pa.array(ids), times))
        spread = random.permutation(ids)
        later = times[spread - index * BATCH_ROWS] + random.integers(0, SECOND_US, BATCH_ROWS)
        rights.append(batch_of(schemas[1], pa.array(spread), later))
    return lefts, rights


def repeated_keys(how_many: int) -> tuple[Batches, Batches]:
    random = np.random.default_rng(1)
    names = pa.array([f"app-{number:07d}" for number in range(KEYS)])
    made: tuple[Batches, Batches] = ([], [])
    for index in range(how_many):
        for side, batches in zip(("left", "right"), made, strict=True):
            keys = names.take(pa.array(random.integers(0, KEYS, BATCH_ROWS)))
            schema = schema_of(side, pa.string())
            batches.append(batch_of(schema, keys, times_of(index, random)))
    return made


def join_of(range_us: int) -> Join:
    interval = [Literal(pa.scalar(part, pa.int64())) for part in (0, 0, range_us)]
    left, right = Column("left_at", UTC), Column("right_at", UTC)
    end = Call("add_interval", (left, *interval, Literal(pa.scalar("UTC"))), UTC)
    condition: Expression = Call(
        "and",
        (
            Call("less_equal", (left, right), pa.bool_()),
            Call("less_equal", (right, end), pa.bool_()),
        ),
        pa.bool_(),
    )
    sides = [JoinSide((f"{side}_key",), f"{side}_at") for side in ("left", "right")]
    return Join("inner", *sides, 0, range_us, condition)


def joined(lefts: Batches, rights: Batches, range_us: int) -> tuple[int, int]:
    """How many pairs there were, and how many rows were kept at most."""
    schemas = (lefts[0].schema, rights[0].schema)
    place = (OperatorUid("join"), SubtaskIndex(0), Attempt(1))
    schema = pa.schema([*schemas[0], *schemas[1]])
    operator = Joining(*place, join_of(range_us), schemas, schema, None, MAX_PARALLELISM)
    emitted = kept = 0

    def count(batches: Iterator[pa.RecordBatch]) -> int:
        return sum(batch.num_rows for batch in batches)

    for index, (left, right) in enumerate(zip(lefts, rights, strict=True), start=1):
        emitted += count(operator.process(left)) + count(operator.process_second(right))
        kept = max(kept, operator.state_rows)
        seconds = index * BATCH_ROWS // RECORDS_PER_SECOND
        count(operator.on_watermark(BEGIN_US + seconds * SECOND_US - DELAY_US))
    return emitted, kept


def counted(lefts: Batches, rights: Batches) -> tuple[int, int]:
    emitted = 0
    for batches in (lefts, rights):
        schema = batches[0].schema
        table = AggregateTable(schema, [schema.names[0]], COUNT, MAX_PARALLELISM)
        emitted += sum(table.update(batch).num_rows for batch in batches)
    return emitted, 0


def seconds(action: Callable[[], tuple[int, int]]) -> tuple[float, tuple[int, int]]:
    begin = time.thread_time()
    answer = action()
    return time.thread_time() - begin, answer


def measure(title: str, sides: tuple[Batches, Batches], range_us: int, rounds: int) -> None:
    cases = {
        "keyed count": lambda: counted(*sides),
        "inner range join": lambda: joined(*sides, range_us),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    answers = {}
    for _ in range(rounds):
        for name, action in cases.items():
            spent, answers[name] = seconds(action)
            taken[name].append(spent)
    rows = sum(batch.num_rows for side in sides for batch in side)
    emitted, kept = answers["inner range join"]
    print(f"{title}: {rows:,} rows, {emitted:,} pairs, at most {kept:,} rows kept")
    median = {name: statistics.median(values) for name, values in taken.items()}
    for name, spent in median.items():
        beside = f"{median['keyed count'] / spent:5.2f} of the count's speed"
        print(f"  {name:18} {rows / spent / 1e6:6.2f} million rows a second, {beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    own = pairs_with_keys_of_their_own(given.batches)
    measure("a key for every pair", own, 10 * SECOND_US, given.rounds)
    again = repeated_keys(given.batches)
    measure("a thousand keys", again, SECOND_US // 50, given.rounds)


if __name__ == "__main__":
    main()
