"""Aggregates beside Spark's own, of all types: running and in windows, on both backends."""

from __future__ import annotations

import datetime
import decimal
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stillframe.spark.session import Still

pytestmark = pytest.mark.spark

SCHEMA = "k string, n long, x double, m decimal(12, 2), w decimal(28, 3), y binary, at timestamp"
FIRST = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
AGGREGATES = [
    *(f"{name}({column})" for name in ("min", "max", "count") for column in "nxmwy"),
    *(f"{name}({column})" for name in ("sum", "avg") for column in "nmw"),
    *(f"{name}(n)" for name in ("variance", "var_pop", "stddev", "std", "stddev_pop")),
    "count(n, m, y)",
    "count(*) FILTER (WHERE n % 2 = 0)",
    "count(n) FILTER (WHERE x > 0)",
    "sum(m) FILTER (WHERE n > 10 OR y IS NULL)",
    "max(w) FILTER (WHERE k <> 'a')",
    "count_if(n > 3)",
    "bool_and(n > -90)",
    "every(n > 0)",
    "bool_or(n > 90)",
    "some(m < 0) FILTER (WHERE n > 0)",
    "sum(m * n)",
]


def rows() -> Iterator[tuple[Any, ...]]:
    draw = random.Random(7)

    def number(digits: int, scale: int) -> decimal.Decimal:
        return decimal.Decimal(draw.randrange(-(10**digits) + 1, 10**digits)).scaleb(-scale)

    with decimal.localcontext(prec=60):
        for second in range(900):
            given = (draw.randint(-99, 99), draw.uniform(-9, 9), number(12, 2), number(28, 3))
            yield (
                draw.choice("abcd"),
                *(None if draw.random() < 0.1 else each for each in given),
                None if draw.random() < 0.1 else draw.randbytes(2),
                FIRST + datetime.timedelta(seconds=second),
            )


def near(row: Any) -> list[Any]:
    """Sums of doubles may differ in their last digits."""
    return [
        f"{each:.9g}" if isinstance(each, float) and not math.isnan(each) else each for each in row
    ]


@pytest.mark.parametrize("backend", ["fs", "rocksdb"])
def test_aggregates_are_what_they_are_in_spark(
    spark: SparkSession, still: Still, tmp_path: Path, backend: str
) -> None:
    place = str(tmp_path / "rows")
    spark.createDataFrame(list(rows()), SCHEMA).repartition(3).write.parquet(place)
    chosen = ", ".join(f"{each} AS c{place}" for place, each in enumerate(AGGREGATES))
    asked = {
        "running": f"SELECT k, {chosen} FROM {{rows}} GROUP BY k",
        "sliding": f"SELECT window.end, k, {chosen} FROM {{rows}}"
        " GROUP BY window(at, '4 minutes', '2 minutes'), k",
    }
    writers = []
    for name, text in asked.items():
        os.symlink(place, f"{place}-{name}")  # one job has both, so each reads a place of its own
        stream = spark.readStream.schema(SCHEMA).parquet(f"{place}-{name}")
        writer = still.writeStream(spark.sql(text, rows=stream)).format("memory").queryName(name)
        writers.append(writer.outputMode("complete").trigger(availableNow=True).uid(name))
    query = still.start(
        "aggregates", *writers, checkpointLocation=str(tmp_path / "chk"), stateBackend=backend
    )
    assert query.awaitTermination(120)
    table = spark.read.parquet(place)
    for name, text in asked.items():
        truth, found = spark.sql(text, rows=table), spark.table(name)
        assert found.schema.simpleString() == truth.schema.simpleString()
        ours, theirs = (
            sorted(frame.collect(), key=lambda row: row[:2]) for frame in (found, truth)
        )
        assert len(theirs) >= 4
        for mine, its in zip(ours, theirs, strict=True):
            assert near(mine) == near(its), name
