"""What comes too late for windows, and what stands behind them: as in Spark, also after a kill."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SCHEMA = pa.schema([("key", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
BATCHES, ROWS, SECONDS = 5, 40, 12
"""So many batches, of so many rows, each so much later than the one before."""
SEED = 20


def batches() -> list[list[dict[str, Any]]]:
    """Rows that go back by up to a minute, and one at the end that closes all windows of theirs."""
    random = Random(SEED)

    def row(second: float) -> dict[str, Any]:
        moment = f"2026-01-01T00:{int(second) // 60:02d}:{second % 60:09.6f}+00:00"
        return {"key": random.randrange(3), "at": moment}

    made = []
    for number in range(1, BATCHES):
        now = 60 + number * SECONDS
        made.append(
            [row(now - random.choice([0, 5, 20, 59]) * random.random()) for _ in range(ROWS)]
        )
    return [*made, [row(900)]]


def chained(rows: Any) -> Any:
    """Windows by key, of which equal counts at one moment are one, and windows of those."""
    per_key = (
        rows.withWatermark("at", "3 seconds")
        .groupBy(F.window("at", "10 seconds", "5 seconds"), "key")
        .agg(F.count("*").alias("n"), F.max("at").alias("newest"))
    )
    once = per_key.select("window", "n", "newest").dropDuplicates(["window", "n", "newest"])
    outer = once.groupBy(F.window(F.window_time("window"), "20 seconds"))
    totals = outer.agg(F.sum("n").alias("n"), F.count("*").alias("windows"))
    return totals.select("window.start", "n", "windows")


def test_rows_that_are_late_behind_windows_or_before_are_those_that_are_late_in_spark(
    batches_of: Callable[..., Any],
) -> None:
    both = batches_of(SCHEMA, batches())
    theirs = sorted(tuple(row) for row in both.of_spark(chained))
    ours = sorted(tuple(row.values()) for row in both.of_stillframe(chained))
    last = ours.pop()  # the end of all records has closed that too
    assert (last[1], last[2]) == (2, 2)
    assert [row[1:] for row in ours] == [row[1:] for row in theirs]
    taken = sum(row[1] for row in ours) / 2
    assert 0 < taken < (BATCHES - 1) * ROWS, "some were late, and not all"
