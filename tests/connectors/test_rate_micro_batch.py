"""Spark's rate-micro-batch: its rows, whoever reads them and how often, and their pace."""

import pickle

import pyarrow as pa
import pytest

from stillframe.api.sources import EndOfData, NothingYet, SourceContext
from stillframe.connectors.generate import RATE_SCHEMA
from stillframe.connectors.rate_micro_batch import (
    RateMicroBatchSource,
    rate_micro_batch_from_options,
)
from stillframe.errors import BuildError, UnknownOption
from stillframe.ids import SubtaskIndex
from stillframe.testing.clock import ManualClock


def opened(source, splits, clock=None):
    return source.open(splits, SourceContext(SubtaskIndex(0), 1, clock or ManualClock()))


def due_now(reader):
    """What the reader gives before it asks for patience, and how long it asks for."""
    batches = []
    while isinstance(polled := reader.poll(), pa.RecordBatch):
        batches.append(polled)
    rows = pa.Table.from_batches(batches, RATE_SCHEMA).sort_by("value")
    return rows, polled


def values_of(table):
    return table["value"].to_pylist()


@pytest.mark.parametrize("partitions", [1, 2, 3, 7])
def test_the_rows_of_each_batch_have_its_time_and_the_next_values(partitions):
    source = RateMicroBatchSource(5, partitions, 60_000, 250, interval_seconds=0, batches=4)

    rows, end = due_now(opened(source, source.splits(1)))

    assert end == EndOfData()
    assert rows.schema == RATE_SCHEMA
    assert values_of(rows) == list(range(20))
    times_us = rows["timestamp"].cast(pa.int64()).to_pylist()
    assert times_us == [60_000_000 + batch * 250_000 for batch in range(4) for _ in range(5)]


def test_a_batch_comes_whole_when_it_is_due_and_not_before():
    clock = ManualClock()
    source = RateMicroBatchSource(5, 2, interval_seconds=2)
    reader = opened(source, source.splits(1), clock)

    rows, waits = due_now(reader)
    assert values_of(rows) == list(range(5))
    assert waits == NothingYet(pytest.approx(2))
    clock.advance(1.5)
    rows, waits = due_now(reader)
    assert values_of(rows) == []
    assert waits == NothingYet(pytest.approx(0.5))
    clock.advance(4.6)
    rows, waits = due_now(reader)
    assert values_of(rows) == list(range(5, 20))
    assert waits == NothingYet(pytest.approx(1.9))


def test_a_reader_that_was_stopped_within_a_batch_goes_on_with_the_rest_of_it():
    clock = ManualClock()
    source = RateMicroBatchSource(100_000, 2, batches=3)
    whole, _ = due_now(
        opened(RateMicroBatchSource(100_000, 2, interval_seconds=0, batches=3), source.splits(1))
    )
    reader = opened(source, source.splits(1), clock)
    first = reader.poll()
    clock.advance(3600)
    reader = opened(source, reader.splits(), clock)

    rest, waits = due_now(reader)

    assert first.num_rows + rest.num_rows == 100_000, "of the first batch, not of an hour"
    assert waits == NothingYet(pytest.approx(1))
    clock.advance(2)
    last, end = due_now(reader)
    assert end == EndOfData()
    read = pa.concat_tables([pa.Table.from_batches([first]), rest, last])
    assert read.sort_by("value").equals(whole)


def test_a_reader_that_goes_on_in_a_later_batch_begins_with_that_one():
    clock = ManualClock()
    source = RateMicroBatchSource(4, interval_seconds=2)
    before = opened(source, source.splits(1), clock)
    clock.advance(20)
    due_now(before)
    clock.advance(3600)
    reader = opened(source, before.splits(), clock)

    rows, waits = due_now(reader)

    assert values_of(rows) == list(range(44, 48)), "the next one at once, and not an hour of them"
    assert waits == NothingYet(pytest.approx(2))


def test_its_splits_may_be_spread_over_readers():
    source = RateMicroBatchSource(3, 4, interval_seconds=0, batches=5)
    splits = source.splits(2)

    read = [
        due_now(opened(pickle.loads(pickle.dumps(source)), part))[0]
        for part in (splits[:1], splits[1:])
    ]

    assert sorted(values_of(pa.concat_tables(read))) == list(range(15))
    assert opened(source, []).poll() == EndOfData()


def test_a_split_is_open_until_its_last_row():
    source = RateMicroBatchSource(1, 2, interval_seconds=0, batches=1)
    reader = opened(source, source.splits(1))
    assert reader.open_splits() == {"partition-00000"}, "the other has no row"

    assert reader.poll().num_rows == 1
    assert reader.polled_split() == "partition-00000"
    assert reader.open_splits() == frozenset()


def test_options_are_those_of_spark_and_two_more():
    given = {
        "rowsPerBatch": "7",
        "numpartitions": "2",
        "startTimestamp": "1000",
        "advanceMillisPerBatch": "0",
        "batchInterval": "200 ms",
        "batches": "3",
    }
    assert rate_micro_batch_from_options(given) == RateMicroBatchSource(7, 2, 1000, 0, 0.2, 3)
    with pytest.raises(BuildError, match=r"rate-micro-batch needs the option rowsPerBatch"):
        rate_micro_batch_from_options({"numPartitions": "2"})
    with pytest.raises(UnknownOption, match="'rowsPerBatch'"):
        rate_micro_batch_from_options({"rowPerBatch": "1"})
    with pytest.raises(BuildError, match=r"rowsPerBatch .* not '?0"):
        rate_micro_batch_from_options({"rowsPerBatch": "0"})
