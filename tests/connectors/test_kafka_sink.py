"""Kafka as a sink, against a real broker: each row once for those who read what is committed."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from kafka_broker import PASSWORD, USER

from stillframe.api.sinks import CommitterContext, Prepared, SinkContext
from stillframe.connectors import kafka_target
from stillframe.connectors.kafka_client import Client
from stillframe.connectors.kafka_sink import sink_from_options
from stillframe.connectors.kafka_target import KafkaTarget
from stillframe.errors import (
    BuildError,
    DataError,
    SnapshotDamaged,
    StartRefused,
    StillframeError,
    StorageError,
    Unavailable,
)
from stillframe.ids import Mark, Writer
from stillframe.options import Options
from stillframe.storage.local import LocalStore
from stillframe.storage.staging import StagedFiles

pytestmark = pytest.mark.kafka

SCHEMA = pa.schema([("value", pa.string())])


def sink_of(address, topic, schema=SCHEMA, **options):
    given = {"kafka.bootstrap.servers": address, "topic": topic}
    given |= {name.replace("__", "."): text for name, text in options.items()}
    given = {name: text for name, text in given.items() if text is not None}
    return sink_from_options(Options("the sink kafka", given), schema)


class House:
    """A job's store, and a topic outside of it."""

    def __init__(self, directory, kafka):
        self.kafka = kafka
        self.topic = kafka.topic(2)
        self.staging = StagedFiles(LocalStore(directory / "job"))
        self.incarnation = f"i-{self.topic}"
        self.sink = sink_of(kafka.address, self.topic)

    def writer(self, sink=None, attempt=1, subtask=0):
        context = SinkContext("job", attempt, "rows", subtask, self.incarnation, self.staging)
        return (sink or self.sink).open_writer(context)

    def stage(self, checkpoint_id, *values, attempt=1, subtask=0, sink=None, batch=None):
        """One part, as the committer is given it."""
        with closing(self.writer(sink, attempt, subtask)) as writer:
            writer.write(batch or pa.record_batch([pa.array(values, pa.string())], SCHEMA))
            committables = writer.rotate(checkpoint_id)()
        return Prepared(self.mark(checkpoint_id, subtask), tuple(committables))

    def mark(self, checkpoint_id, subtask=0):
        return Mark(Writer(self.incarnation, "rows", subtask), checkpoint_id)

    def commit(self, *parts, sink=None, **context):
        """By another process each time, as far as Kafka can tell."""
        with self.committer(sink, **context) as committer:
            committer.commit(0, parts)

    def committer(self, sink=None, **context):
        context = CommitterContext("job", self.staging, **context)
        return closing((sink or self.sink).open_committer(context))

    def groups(self):
        return {each for each in self.kafka.groups() if self.incarnation in each}

    def target(self, **limits):
        return closing(KafkaTarget(self.sink.destination, self.topic, **limits))

    def visible(self):
        return sorted(value.decode() for value in self.kafka.values(self.topic))


@pytest.fixture
def house(tmp_path, kafka):
    return House(tmp_path, kafka)


def rows(*values):
    return iter([pa.record_batch([pa.array(values, pa.string())], SCHEMA)])


def refuse_nothing(batch, reason):
    raise AssertionError(reason)


# --- Exactly once ----------------------------------------------------------------------------


def test_what_is_staged_is_seen_when_it_is_committed_and_once(house):
    part = house.stage(1, "a", "b")
    assert house.visible() == []

    house.commit(part)
    house.commit(part)

    assert house.visible() == ["a", "b"]


def test_a_transaction_whose_receipt_was_never_noted_is_found_by_its_mark(house):
    part = house.stage(7, "a")
    with house.target() as target:
        assert target.begin(part.mark.writer) is None
        target.write(part.mark, rows("a"), refuse_nothing)

    house.commit(part)

    assert house.visible() == ["a"]


def test_a_later_checkpoint_is_written_and_its_mark_speaks_for_those_before(house):
    house.commit(house.stage(3, "a"), house.stage(5, "b"))

    with house.target() as target:
        assert target.begin(house.mark(5).writer) == 5
    assert house.visible() == ["a", "b"]


def test_parts_of_several_writers_are_committed_by_one(house):
    """As after a change of the parallelism."""
    house.commit(house.stage(3, "a"), house.stage(3, "b", subtask=1), house.stage(4, "c"))

    assert house.visible() == ["a", "b", "c"]


def test_an_older_committer_is_shut_out_in_the_middle_of_its_transaction(house):
    mark = house.mark(2)
    with house.target() as older, house.target() as newer:
        older.begin(mark.writer)

        def half_way():
            yield from rows("a")
            assert newer.begin(mark.writer) is None, "what is open there can never be done"

        with pytest.raises(StorageError, match="another committer of this job has taken over"):
            older.write(mark, half_way(), refuse_nothing)
        older.abandon()
        newer.write(mark, rows("a"), refuse_nothing)

    assert house.visible() == ["a"]


def test_one_who_has_looked_before_another_wrote_cannot_write_after_it(house):
    """The classic zombie: its look is from before the other's transaction."""
    mark = house.mark(2)
    with house.target() as older, house.target() as newer:
        assert older.begin(mark.writer) is None
        assert newer.begin(mark.writer) is None
        newer.write(mark, rows("a"), refuse_nothing)
        with pytest.raises(StorageError, match="taken over"):
            older.write(mark, rows("a"), refuse_nothing)
        older.abandon()

    assert house.visible() == ["a"]


def test_what_was_left_open_by_one_that_died_holds_readers_back_only_until_the_next_begins(house):
    mark = house.mark(2)
    dead = house.kafka.transaction(f"stillframe/{mark.writer}")
    dead.produce(house.topic, b"never", partition=0)
    dead.flush(30)

    with house.target() as target:
        assert target.begin(mark.writer) is None
    house.kafka.send(house.topic, [b"behind"])

    assert house.visible() == ["behind"]


def test_a_part_that_takes_too_long_for_one_transaction_is_written_in_several_and_nothing_twice(
    house,
):
    """One after the other dies: between two transactions, or in the middle of the next."""
    values = [f"{n}" for n in range(10)]
    mark, batches = house.mark(4), [values[at : at + 2] for at in range(0, 10, 2)]
    house.commit(house.stage(3, "before"))

    def dying_after(count):
        for each in batches[:count]:
            yield from rows(*each)
        raise KeyboardInterrupt

    for count, open_seconds_max in ((1, 0), (2, 0), (3, 60), (4, 0)):
        target = KafkaTarget(house.sink.destination, house.topic, open_seconds_max=open_seconds_max)
        assert target.begin(mark.writer) == 3
        with pytest.raises(KeyboardInterrupt):
            target.write(mark, dying_after(count), refuse_nothing)

    with house.target(open_seconds_max=0) as last:
        assert last.begin(mark.writer) == 3, "it is done when all of it is"
        last.write(mark, (batch for each in batches for batch in rows(*each)), refuse_nothing)
        assert last.begin(mark.writer) == 4
        last.write(house.mark(5), rows("after"), refuse_nothing)
    assert house.visible() == sorted(["before", *values, "after"])


def test_two_jobs_with_one_savepoint_do_not_see_each_others_marks(house):
    house.commit(house.stage(3, "a"))
    house.incarnation += "-again"

    house.commit(house.stage(3, "b"))

    assert house.visible() == ["a", "b"]


def test_keys_headers_topics_and_partitions_go_where_their_columns_say(house, kafka):
    other = kafka.topic(3)
    schema = pa.schema(
        [
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ]
    )
    written = [
        {"key": b"k", "value": b"v", "topic": other, "partition": 2,
         "headers": [{"key": "h", "value": b"1"}]},
        {"key": b"k", "value": None, "topic": house.topic, "partition": 1, "headers": None},
    ]  # fmt: skip
    sink = sink_of(kafka.address, None, schema, markTopic=house.topic)
    batch = pa.RecordBatch.from_pylist(written, schema)

    house.commit(house.stage(1, sink=sink, batch=batch), sink=sink)

    [message] = kafka.messages(other)
    assert (message.partition(), message.key(), message.value()) == (2, b"k", b"v")
    assert message.headers() == [("h", b"1")]
    [tombstone] = kafka.messages(house.topic)
    assert (tombstone.partition(), tombstone.value(), tombstone.headers()) == (1, None, None)


def test_a_key_goes_to_the_partition_that_javas_clients_would_choose(house, kafka):
    """So that streams written by Spark and by us can be joined partition by partition."""
    topic = kafka.topic(10)
    schema = pa.schema([("key", pa.string()), ("value", pa.string())])
    sink = sink_of(kafka.address, topic, schema)
    batch = pa.record_batch([["a", "foo", "user-17"], ["x", "x", "x"]], schema)

    house.commit(house.stage(1, sink=sink, batch=batch), sink=sink)

    found = {message.key(): message.partition() for message in kafka.messages(topic)}
    assert found == {key: murmur2(key) % 10 for key in (b"a", b"foo", b"user-17")}


def murmur2(key):
    """Kafka's, in Java's DefaultPartitioner: made positive by cutting the sign off."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = (0x9747B28C ^ len(key)) & mask
    whole = len(key) // 4 * 4
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    rest = key[whole:]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return (h ^ h >> 15) & 0x7FFFFFFF


def test_a_transaction_that_the_broker_never_ends_is_said_by_the_name_of_its_group(house):
    """As one of which it has lost the end, seen with 4.3.1."""
    part = house.stage(1, "a")
    group = f"stillframe/{part.mark.writer}"
    hanging = house.kafka.transaction()
    consumer = house.kafka.consumer(**{"group.id": group})
    offset = TopicPartition(house.topic, 0, 1)
    hanging.send_offsets_to_transaction([offset], consumer.consumer_group_metadata(), 30)

    with house.target(answer_seconds_max=3) as target, pytest.raises(Unavailable) as told:
        target.begin(part.mark.writer)
    assert f"has not ended a transaction with an offset of group {group}" in str(told.value)

    hanging.abort_transaction(30)
    consumer.close()
    house.commit(part)
    assert house.visible() == ["a"]


# --- A mark that is gone ---------------------------------------------------------------------


def committed_but_for_the_receipt(house, *values, checkpoint_id=7):
    """The transaction is done, and its committer died before it noted that."""
    part = house.stage(checkpoint_id, *values)
    house.commit(part)
    [receipt] = [each["receipt"] for each in part.committables]
    again = house.stage(checkpoint_id, *values)
    house.staging.delete(receipt)
    return again


@pytest.mark.parametrize("earlier", [[3], []], ids=["", "the first of its writer"])
def test_a_part_that_may_have_been_written_is_in_doubt_when_its_mark_is_gone(house, earlier):
    for checkpoint_id in earlier:
        house.commit(house.stage(checkpoint_id, "a"))
    part = committed_but_for_the_receipt(house, "b")
    house.kafka.delete_group(f"stillframe/{part.mark.writer}")
    before = house.visible()

    with pytest.raises(DataError) as told:
        house.commit(part, attempt=2)
    assert house.visible() == before, "neither lost nor doubled"
    said = str(told.value)
    assert "1 rows that kafka" in said
    assert f"offset of group stillframe/{part.mark.writer} in topic {house.topic}" in said

    option = said.rpartition("acceptMissingOutput=")[2]
    house.commit(part, attempt=2, accepts_missing=frozenset([option]))
    house.commit(house.stage(8, "c", attempt=2), attempt=2)
    assert house.visible() == sorted([*before, "c"])


def test_a_part_in_doubt_is_written_when_somebody_has_deleted_the_note(house):
    part = committed_but_for_the_receipt(house, "b")
    house.kafka.delete_group(f"stillframe/{part.mark.writer}")
    with pytest.raises(DataError) as told:
        house.commit(part, attempt=2)

    house.staging.delete(re.search(r"prepared/(\S+)", str(told.value))[1])
    house.commit(part, attempt=2)

    assert house.visible() == ["b", "b"], "as they wanted it"


def test_a_job_that_stood_still_until_its_marks_were_gone_goes_on(house):
    """Nobody can have written what it prepares now."""
    house.commit(house.stage(3, "a"))
    house.kafka.delete_group(f"stillframe/{house.mark(3).writer}")

    part = house.stage(4, "b", attempt=2)
    house.commit(part, attempt=2)
    house.commit(part, attempt=2)

    assert house.visible() == ["a", "b"]


def test_a_committer_that_dies_in_its_first_transaction_leaves_no_doubt(house):
    part = house.stage(1, "a")
    with pytest.raises(SnapshotDamaged):
        house.commit(replace(part, committables=torn(part)))

    house.commit(part, attempt=2)

    assert house.visible() == ["a"]


def torn(part):
    """Its rows cannot be read, in the middle of the transaction."""
    return tuple(
        {**each, "parts": [{**written, "crc32": 1} for written in each["parts"]]}
        for each in part.committables
    )


# --- What is left behind ---------------------------------------------------------------------


def test_of_writers_that_are_not_needed_any_more_neither_mark_nor_open_transaction_is_left(house):
    house.commit(house.stage(3, "a"), house.stage(3, "b", subtask=1))
    needed, former = (house.mark(3, subtask).writer for subtask in (0, 1))
    dead = house.kafka.transaction(f"stillframe/{former}")
    dead.produce(house.topic, b"never", partition=0)
    dead.flush(30)
    assert house.groups() == {f"stillframe/{needed}", f"stillframe/{former}"}

    with house.committer() as committer:
        committer.end_writers("rows", frozenset([needed]))
        committer.end_writers("rows", frozenset([needed]))  # that it was done is fine

    assert house.groups() == {f"stillframe/{needed}"}
    house.kafka.send(house.topic, [b"behind"])
    assert house.visible() == ["a", "b", "behind"]
    house.commit(house.stage(9, "c", attempt=2, subtask=1), attempt=2)
    assert house.visible() == ["a", "b", "behind", "c"], "it may write again, after a rescale"


def test_marks_of_another_incarnation_are_told_and_not_compared(house, caplog):
    incarnation = f"before-{house.incarnation}"
    before = replace(house.mark(50), writer=Writer(incarnation, "rows", 0))
    with closing(house.sink.open_target()) as target:
        target.begin(before.writer)
        target.write(before, iter([pa.record_batch([pa.array(["a"])], SCHEMA)]), None)

    house.commit(house.stage(3, "b"))
    with house.committer() as committer:
        committer.end_writers("rows", {house.mark(3).writer})

    assert house.visible() == ["a", "b"], "though 50 is above 3"
    [said] = [each for each in caplog.messages if "other incarnations of sink rows" in each]
    assert incarnation in said


def test_a_committer_reads_its_mark_once_and_knows_what_it_has_written_since(house, monkeypatch):
    asked = []
    group_offset = Client.group_offset
    monkeypatch.setattr(
        Client, "group_offset", lambda *given: asked.append(given[1]) or group_offset(*given)
    )
    with house.committer(attempt=1) as committer:
        for checkpoint_id in range(1, 6):
            committer.commit(0, [house.stage(checkpoint_id, str(checkpoint_id))])
        committer.commit(0, [house.stage(4, "4")])

    assert asked == [f"stillframe/{house.mark(1).writer}"]
    assert house.visible() == list("12345")


def test_what_cannot_be_removed_is_left_for_the_next_attempt(house, free_port, caplog):
    house.commit(house.stage(3, "a"))
    away = sink_of(f"127.0.0.1:{free_port}", house.topic)

    with house.committer(away) as committer:
        committer.end_writers("rows", frozenset())
    assert "is left where it is: Kafka at" in caplog.text

    with house.committer() as committer:
        committer.end_writers("rows", frozenset())
    assert house.groups() == set()


# --- At least once ---------------------------------------------------------------------------


def test_at_least_once_rows_are_there_when_the_barrier_has_passed(house):
    sink = sink_of(house.kafka.address, house.topic, deliveryGuarantee="at-least-once")
    assert sink.guarantee == "at-least-once"

    part = house.stage(1, "a", "b", sink=sink)

    assert part.committables == ()
    assert house.visible() == ["a", "b"]


def test_at_least_once_a_row_that_the_broker_refuses_ends_the_attempt_at_the_barrier(house):
    sink = sink_of(house.kafka.address, house.topic, deliveryGuarantee="at-least-once")
    with closing(house.writer(sink)) as writer:
        writer.write(next(rows("a")))
        house.kafka.set(house.topic, "max.message.bytes", "2000")
        writer.write(next(rows(random.randbytes(1500).hex())))
        with pytest.raises(DataError, match=r"refuses records .*too large"):
            writer.rotate(1)()


def test_at_least_once_rows_wait_for_a_broker_that_is_away(house, until, caplog, monkeypatch):
    monkeypatch.setattr(kafka_target, "_PATIENT_SECONDS", 0.2)
    sink = sink_of(house.kafka.address, house.topic, deliveryGuarantee="at-least-once")
    with closing(house.writer(sink)) as writer, ThreadPoolExecutor(1) as background:
        writer.write(next(rows("a")))
        house.kafka.kill()
        try:
            writer.write(next(rows("b")))
            prepared = background.submit(writer.rotate(1))
            until(lambda: "records within 0.2 s: the sink waits for it" in caplog.text)
        finally:
            house.kafka.start()
        assert prepared.result(60) == []
    assert house.visible() == ["a", "b"]


# --- What goes wrong -------------------------------------------------------------------------


def test_a_value_that_is_too_large_is_refused_when_it_is_written(house, kafka):
    small = kafka.topic(max_message_bytes="2000")
    sink = sink_of(kafka.address, small)

    with pytest.raises(DataError, match=f"is larger than the 2000 that topic {small} takes"):
        house.stage(1, "x" * 3000, sink=sink)
    noise = [random.randbytes(750).hex() for _ in range(10)]  # which cannot be compressed away
    house.commit(house.stage(2, *noise, sink=sink), sink=sink)

    assert len(kafka.values(small)) == 10, "together they are more, each of them is not"


def test_headers_count_too_when_a_record_is_too_large(house, kafka):
    small = kafka.topic(max_message_bytes="2000")
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    schema = pa.schema([("value", pa.string()), ("headers", headers)])
    sink = sink_of(kafka.address, small, schema)

    def row(*values):
        return {"value": "x", "headers": [{"key": "h", "value": each} for each in values]}

    few, large = row(b"1", None), row(b"1" * 1500, b"2" * 1500)
    batch = pa.RecordBatch.from_pylist([few, {"value": "y", "headers": None}, large], schema)
    with pytest.raises(DataError, match="a record of 3131 bytes is larger than the 2000"):
        house.stage(1, sink=sink, batch=batch)


def test_what_the_broker_refuses_after_all_ends_the_job_and_is_written_when_it_takes_it(
    house, kafka
):
    part = house.stage(1, "a", random.randbytes(1500).hex())
    kafka.set(house.topic, "max.message.bytes", "2000")

    with pytest.raises(DataError, match=f"kafka {house.topic} at .* refuses records .*too large"):
        house.commit(part)
    assert house.visible() == [], "not a part of it"

    kafka.set(house.topic, "max.message.bytes", "20000")
    house.commit(part)
    assert sorted(map(len, house.visible())) == [1, 3000]


def test_a_topic_that_was_deleted_before_the_commit_is_said_and_nothing_is_lost(house, kafka):
    part = house.stage(1, "a")
    kafka.delete(house.topic)

    with pytest.raises(DataError, match=f"topic {house.topic} does not exist in Kafka at"):
        house.commit(part)

    kafka.create(house.topic)
    house.commit(part)
    assert house.visible() == ["a"]


def test_a_value_larger_than_the_clients_usual_limit_passes_where_the_topic_takes_it(house, kafka):
    large = kafka.topic(max_message_bytes="5000000")
    sink = sink_of(kafka.address, large)

    house.commit(house.stage(1, "x" * 3_000_000, sink=sink), sink=sink)

    assert [len(value) for value in kafka.values(large)] == [3_000_000]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"value": "x", "topic": None, "partition": 0}, "a row has no topic"),
        ({"value": "x", "topic": "nowhere", "partition": 0}, "topic nowhere does not exist"),
        ({"value": "x", "topic": "TOPIC", "partition": 2}, "partition 2 of topic .* which has 2"),
        ({"value": "x", "topic": "TOPIC", "partition": -1}, "partition -1 of topic .*"),
    ],
)
def test_a_row_that_has_nowhere_to_go_is_refused_when_it_is_written(house, row, said):
    schema = pa.schema([("value", pa.string()), ("topic", pa.string()), ("partition", pa.int32())])
    sink = sink_of(house.kafka.address, None, schema, markTopic=house.topic)
    row["topic"] = house.topic if row["topic"] == "TOPIC" else row["topic"]

    with pytest.raises(DataError, match=said):
        house.stage(1, sink=sink, batch=pa.RecordBatch.from_pylist([row], schema))


def test_a_topic_that_does_not_exist_is_refused_before_the_start(kafka):
    with pytest.raises(StartRefused, match="topic nowhere does not exist in Kafka at"):
        sink_of(kafka.address, "nowhere").check_start()


def test_a_password_that_the_broker_refuses_is_told_and_rows_are_written_with_the_right_one(
    house, monkeypatch
):
    monkeypatch.setenv("KAFKA_PASSWORD", "wrong-" + PASSWORD)
    given = {
        "kafka__security__protocol": "SASL_PLAINTEXT",
        "kafka__sasl__mechanism": "PLAIN",
        "kafka__sasl__username": USER,
        "kafka__sasl__password": "env:KAFKA_PASSWORD",
    }
    sink = sink_of(house.kafka.sasl_address, house.topic, **given)
    part = house.stage(1, "a")

    with pytest.raises(StartRefused, match=f"{house.kafka.sasl_address} refuses this client"):
        sink.check_start()
    with pytest.raises(DataError, match=r"correct the kafka\.\* options for") as refused:
        house.commit(part, sink=sink)
    assert PASSWORD not in str(refused.value)
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    house.commit(part, sink=sink_of(house.kafka.sasl_address, house.topic, **given))

    assert house.visible() == ["a"]


def test_a_certificate_that_does_not_match_is_told_and_rows_are_written_when_it_does(house):
    trusted = {
        "kafka__security__protocol": "SSL",
        "kafka__ssl__ca__location": str(house.kafka.certificate),
        "kafka__broker__address__family": "v4",
    }
    by_number = house.kafka.tls_address.replace("localhost", "127.0.0.1")
    sink = sink_of(by_number, house.topic, **trusted)
    part = house.stage(1, "a")

    for attempt in (sink.check_start, lambda: house.commit(part, sink=sink)):
        with pytest.raises(StillframeError, match=f"certificate of Kafka at {by_number} is not"):
            attempt()
    house.commit(part, sink=sink_of(house.kafka.tls_address, house.topic, **trusted))

    assert house.visible() == ["a"]


def test_a_broker_that_is_away_is_told_within_seconds_before_the_start(free_port):
    began = time.monotonic()

    with pytest.raises(StartRefused, match=f"127.0.0.1:{free_port} cannot be reached .*: start it"):
        sink_of(f"127.0.0.1:{free_port}", "out").check_start()
    assert time.monotonic() - began < 8, "within seconds"


def test_a_broker_that_is_away_can_be_waited_for(free_port):
    sink = sink_of(f"127.0.0.1:{free_port}", "out")
    target = KafkaTarget(sink.destination, "out", answer_seconds_max=2)

    with closing(target), pytest.raises(Unavailable, match=f"127.0.0.1:{free_port} cannot be"):
        target.begin(Writer("i", "u", 0))


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        ([("n", pa.int64())], {}, "needs a column value, and the stream has n"),
        ([("value", pa.int64())], {}, "column value is int64, and the sink kafka wants a string"),
        ([("value", pa.string()), ("n", pa.int64())], {}, "does not take a column n"),
        ([("value", pa.string())], {"topic": None}, "needs the option topic, or a column topic"),
        (
            [("value", pa.string()), ("topic", pa.string())],
            {"topic": None},
            "option markTopic has to name one",
        ),
        (
            [("value", pa.string())],
            {"deliveryGuarantee": "twice"},
            "deliveryGuarantee is exactly-once or at-least-once, not 'twice'",
        ),
        (
            [("value", pa.string())],
            {"kafka__transactional__id": "x"},
            "kafka.transactional.id is not to be set",
        ),
    ],
)
def test_what_cannot_work_is_said_when_the_sink_is_described(schema, options, said):
    with pytest.raises(BuildError, match=said):
        sink_of("127.0.0.1:1", **{"topic": "out", **options}, schema=pa.schema(schema))
