"""A DataFrame's rows as a source: counted, skipped on restore, never mixed up."""

from random import Random

import pyarrow as pa
import pytest

from stillframe.api.sources import SourceContext, Split
from stillframe.clock import SystemClock
from stillframe.connectors.frame import FrameSource
from stillframe.errors import DataError
from stillframe.ids import SubtaskIndex

SCHEMA = pa.schema([("n", pa.int64())])
SOURCE = FrameSource(SCHEMA, 2, "plan-1", "the DataFrame [n: bigint]")


def feed(rows, random):
    """The rows in batches as Spark may cut them, empty ones too."""
    start = 0
    while start < rows:
        stop = min(rows, start + random.randint(0, 40))
        yield pa.record_batch([pa.array(range(start, stop), pa.int64())], SCHEMA)
        start = stop


def read(splits, batches, subtask=0, source=SOURCE):
    context = SourceContext(SubtaskIndex(subtask), 2, SystemClock(), batches)
    reader = source.open(splits, context)
    yield from reader.read()
    reader.close()


def values(batches):
    return [value for batch in batches for value in batch["n"].to_pylist()]


@pytest.mark.parametrize("seed", range(30))
def test_wherever_it_stops_what_was_read_before_and_after_is_everything_once(seed):
    random = Random(seed)
    rows = random.randint(0, 500)
    split, batches = SOURCE.splits(2)[0], []
    for _ in range(3):
        for taken, (after, batch) in enumerate(read([split], feed(rows, random))):
            split = after
            batches.append(batch)
            if taken == random.randint(0, 8):
                break
    batches += [batch for _, batch in read([split], feed(rows, random))]

    assert values(batches) == list(range(rows))


def test_another_dataframe_than_the_checkpoint_s_is_refused():
    other = FrameSource(SCHEMA, 2, "plan-2", "another")
    with pytest.raises(DataError, match="is another one than the checkpoint was made with"):
        list(read([SOURCE.splits(2)[0]], iter(()), source=other))


def test_a_dataframe_that_gives_fewer_rows_than_before_is_refused():
    split = Split("partition-00000", {"rows": 10, "fingerprint": "plan-1"})
    with pytest.raises(DataError, match=r"gave 7 rows, .* already read 10"):
        list(read([split], feed(7, Random(0))))


def test_a_slot_reads_its_own_partition_only():
    first, second = SOURCE.splits(2)
    assert values(batch for _, batch in read([second], feed(3, Random(0)), subtask=1)) == [0, 1, 2]
    with pytest.raises(AssertionError, match="slot 1 must read"):
        list(read([first], iter(()), subtask=1))
    with pytest.raises(AssertionError, match="slot 1 must read"):
        list(read([], iter(()), subtask=1))


def test_a_slot_beyond_the_last_partition_ends_at_once():
    assert list(read([], None, subtask=2)) == []


def test_batches_get_the_declared_schema():
    batch = pa.record_batch({"n": pa.array([1], pa.int32())})
    ((_, fitted),) = read([SOURCE.splits(2)[0]], iter([batch]))
    assert fitted.schema == SCHEMA
