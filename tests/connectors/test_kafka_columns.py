"""Messages of Kafka as columns, without a broker."""

from __future__ import annotations

import pyarrow as pa
import pytest
from confluent_kafka import Message

from stillframe.connectors.kafka_columns import Columns, Shape
from stillframe.connectors.kafka_reader import Room
from stillframe.errors import DataError
from stillframe.json_texts.rules import JsonRules

VIEWS = pa.schema([("app", pa.string()), ("views", pa.int64())])


def messages(*values, key=None):
    return [
        Message(topic="t", partition=0, offset=at, key=key, value=value, timestamp=(1, at))
        for at, value in enumerate(values)
    ]


def read(shape, columns, *values):
    of = Columns(shape, columns)
    return of.batch("t", 0, of.take(messages(*values))).to_pylist()


@pytest.mark.parametrize("values", [[b"a", b"", b"\xff" * 300], [b"a", None, b""], [None]])
def test_values_are_the_bytes_that_were_sent(values):
    assert read(Shape(), ["value"], *values) == [{"value": value} for value in values]


def test_offsets_are_those_of_the_messages_whatever_lies_between_them():
    columns = Columns(Shape("json", VIEWS, JsonRules(mode="FAILFAST")), ["offset", "app"])

    def taken(last):
        found = None
        for offsets in ([3, 4, 5], [7, 9, 10], [11]):  # a transaction's marker has an offset, too
            values = [last if at == 10 else b'{"app": "%d"}' % at for at in offsets]
            found = columns.take(
                [
                    Message(topic="t", partition=0, offset=at, value=value)
                    for at, value in zip(offsets, values, strict=True)
                ],
                found,
            )
        return found

    rows = columns.batch("t", 0, taken(b'{"app": "10"}')).to_pylist()
    assert rows == [{"offset": at, "app": f"{at}"} for at in (3, 4, 5, 7, 9, 10, 11)]
    assert taken(b"{}").next_offset == 12
    with pytest.raises(DataError, match="the value at offset 10 of partition 0 of topic t"):
        columns.batch("t", 0, taken(b"7"))


@pytest.mark.parametrize(("value_bytes", "records"), [(0, 32_000), (100, 32_000), (100_000, 167)])
def test_a_batch_holds_as_many_records_as_are_wanted_or_about_16_mb_of_them(value_bytes, records):
    room, taken = Room(), 1
    message = Message(topic="t", partition=0, value=bytes(value_bytes))
    room.fill([message])
    while asked := room.asked():
        room.fill([message] * asked)
        taken += asked

    assert taken == records


def test_a_value_that_does_not_fit_a_column_that_nobody_reads_harms_no_other():
    shape = Shape("json", VIEWS)
    texts = [b'{"app": "a", "views": "many"}', b'{"app": "b"}', b'[{"app": "c"}, {"app": "d"}]']

    assert [row["app"] for row in read(shape, ["app"], *texts)] == ["a", "b", "c", "d"]
    assert [row["app"] for row in read(shape, ["app", "views"], *texts)] == ["a", "b", "c", "d"]
    assert read(shape, ["offset"], *texts) == [{"offset": at} for at in (0, 1, 2, 2)]


def test_where_what_is_malformed_ends_the_job_every_column_is_looked_at():
    shape = Shape("json", VIEWS, JsonRules(mode="FAILFAST"))

    with pytest.raises(DataError, match="the value at offset 1 of partition 0 of topic t does not"):
        read(shape, ["app"], b'{"app": "a"}', b'{"app": "a", "views": "many"}')


def test_a_corrupt_record_is_kept_for_what_is_wrong_in_any_column():
    shape = Shape("json", VIEWS.append(pa.field("_corrupt_record", pa.string())))
    text = b'{"app": "a", "views": "many"}'

    assert read(shape, ["_corrupt_record"], text) == [{"_corrupt_record": text.decode()}]
