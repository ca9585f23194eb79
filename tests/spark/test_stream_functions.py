"""`StreamFunction`s on real local Spark: how they are built, and with a `kill -9` in the middle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructField, StructType

import stillframe
from stillframe.errors import BuildError
from stillframe.graph.logical import ProcessStream
from stillframe.spark.stream import Stream

pytestmark = pytest.mark.spark

ID = StructType([StructField("id", LongType())])


class Pairs(stillframe.StreamFunction):
    """Every two records that come to a subtask as one; the odd one is held until the next comes."""

    def __init__(self, size: int = 2) -> None:
        self.size = size

    def open(self, states: stillframe.SubtaskStates) -> None:
        self.held = states.list("held", ID)

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        ids = [row.id for row in self.held.get()] + batch["id"].to_pylist()
        whole = len(ids) - len(ids) % self.size
        self.held.put((each,) for each in ids[whole:])
        yield self._said(ids[:whole])

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield self._said([row.id for row in self.held.get()])

    def _said(self, ids: list[int]) -> pa.RecordBatch:
        groups = [ids[at : at + self.size] for at in range(0, len(ids), self.size)]
        return pa.record_batch([pa.array(groups, pa.list_(pa.int64()))], ["ids"])


SCHEMA = "ids array<bigint>"


@pytest.mark.slow
def test_a_function_that_holds_records_back_says_each_once_after_a_kill(
    clicks: Any, run_and_kill: Any
) -> None:
    rows = run_and_kill(clicks.stream().process(partial(Pairs, 3), SCHEMA).writeStream)

    sizes = Counter(len(row["ids"]) for row in rows)
    assert Counter(each for row in rows for each in row["ids"]) == Counter(range(clicks.records))
    assert sum(n for size, n in sizes.items() if size < 3) <= 2


# --- how it is built ----------------------------------------------------------------------------


@pytest.fixture
def numbers(spark: SparkSession) -> Stream:
    return stillframe.on(spark).stream(spark.range(10).toDF("id"))


def test_a_function_without_keys_stays_where_its_records_are(numbers: Stream) -> None:
    made = numbers.process(Pairs, SCHEMA).uid("pairs").parallelism(3)

    assert isinstance(made.node.operator, ProcessStream)
    assert (made.node.uid, made.node.parallelism) == ("pairs", 3)
    assert made.dtypes == [("ids", "array<bigint>")]


class Undone(stillframe.StreamFunction):
    pass


class Keyed(stillframe.KeyProcessor):
    def process(self, key: Any, rows: Any) -> None:
        return None


class WrongSchema(Pairs):
    def open(self, states: stillframe.SubtaskStates) -> None:
        states.list("held", "id lung")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Pairs(), "takes what makes a Pairs"),
        (Undone, "Undone does not say what to do in process"),
        (Keyed, "process takes a subclass of StreamFunction, not the class Keyed"),
        (lambda: 7, "made a int: process wants what makes a StreamFunction"),
        (WrongSchema, "WrongSchema, which is also made and opened here .*'LUNG'"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(numbers: Stream, make: Any, says: str) -> None:
    with pytest.raises(BuildError, match=says):
        numbers.process(make, SCHEMA)
