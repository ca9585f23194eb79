"""A source from a Python generator on real local Spark, with a `kill -9` in the middle."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

import stillframe

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ORDERS = StructType([StructField("number", LongType()), StructField("shop", StringType())])
SHOPS, ROWS = ["east", "north", "west"], 3_000


def test_rows_of_a_generator_come_out_once_after_a_kill(still: Any, run_and_kill: Any) -> None:
    def orders(shop: str, position: int | None) -> Iterator[Any]:
        for number in range(position or 0, ROWS):
            yield {"number": number, "shop": shop}, number + 1
            if number % 10 == 0:
                threading.Event().wait(0.003)
                yield None

    source = stillframe.from_generator(orders, ORDERS, splits=SHOPS)
    rows = run_and_kill(still.stream(source).filter("number >= 10").writeStream.format("parquet"))

    truth = Counter((number, shop) for shop in SHOPS for number in range(10, ROWS))
    assert Counter((row["number"], row["shop"]) for row in rows) == truth
