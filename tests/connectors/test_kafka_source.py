"""Kafka as a source, against a real broker: where it begins, what it gives, where it ends."""

from __future__ import annotations

import re
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import closing, suppress

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from kafka_broker import PASSWORD, USER

from stillframe.api.sources import EndOfData, Lag, SourceContext, Split
from stillframe.clock import SystemClock
from stillframe.connectors.kafka_client import Client, refused
from stillframe.connectors.kafka_options import Settings
from stillframe.connectors.kafka_source import KafkaSource
from stillframe.errors import BuildError, DataError, StartRefused, Unavailable
from stillframe.options import Options
from stillframe.runtime.reading import ThreadedReader

pytestmark = pytest.mark.kafka

WAIT_SECONDS_MAX = 60.0


def source_of(kafka, topic=None, schema=None, **options):
    given = {"kafka.bootstrap.servers": kafka.address, "startingOffsets": "earliest"}
    if topic is not None:
        given["subscribe"] = topic
    given |= {name.replace("__", "."): str(value) for name, value in options.items()}
    return KafkaSource.from_options(Options("the source kafka", given), schema)


def found_by(source, state=None):
    """What its enumerator finds; at first also what the job begins with."""
    with closing(source.open_enumerator(state)) as enumerator:
        return enumerator.discover()


class Reading:
    """A reader as a slot has it, and all that it has given."""

    def __init__(self, source, splits, columns=None, until_now=True, has_all=True, clock=None):
        self.woken = threading.Event()
        context = SourceContext(0, 1, clock or SystemClock(), columns=columns)
        self.reader = ThreadedReader([], source.open([], context), self.woken.set)
        self.reader.add_splits(splits)
        if has_all:
            self.reader.no_more_splits(until_now=until_now)
        self.batches = []

    def read(self, rows=None):
        """Until the end, or until so many rows have come."""
        for _ in range(3_000):
            if rows is not None and sum(batch.num_rows for batch in self.batches) >= rows:
                return self.table()
            self.woken.clear()
            match self.reader.poll():
                case EndOfData():
                    return self.table()
                case pa.RecordBatch() as batch:
                    self.batches.append(batch)
                case _:
                    self.woken.wait(0.02)
        raise AssertionError(f"no end; {len(self.batches)} batches came")

    def table(self):
        return pa.Table.from_batches(self.batches) if self.batches else None

    def offsets(self):
        return {split.id: split.position["offset"] for split in self.reader.splits()}

    def lag(self, is_it, polls=False):
        for _ in range(1_000):
            if polls:
                assert not isinstance(self.reader.poll(), pa.RecordBatch)
            lag = self.reader.lag()
            if lag is not None and is_it(lag):
                return lag
            self.woken.wait(0.02)
            self.woken.clear()
        raise AssertionError(f"the lag stays {lag}")

    def close(self):
        self.reader.close()


def all_of(source, columns=None):
    """All that is there now, and where it ended."""
    with closing(Reading(source, source.splits(1), columns)) as reading:
        return reading.read(), reading.offsets()


# --- What it gives ---------------------------------------------------------------------------


def test_a_message_has_sparks_columns(kafka):
    topic = kafka.topic()
    headers = [("trace", b"7"), ("empty", None)]
    kafka.send(topic, [b"one", None], key=b"k", timestamp=1_700_000_000_123, headers=headers)
    kafka.send(topic, [b""], key=None, timestamp=1_700_000_000_124)

    table, offsets = all_of(source_of(kafka, topic, includeHeaders="true"))

    assert table.schema.names == [
        "key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers",
    ]  # fmt: skip
    first, tombstone, bare = table.to_pylist()
    assert (first["key"], first["value"], first["topic"]) == (b"k", b"one", topic)
    assert (first["partition"], first["offset"], first["timestampType"]) == (0, 0, 0)
    assert first["timestamp"].isoformat() == "2023-11-14T22:13:20.123000+00:00"
    assert first["headers"] == [{"key": "trace", "value": b"7"}, {"key": "empty", "value": None}]
    assert tombstone["value"] is None
    assert (bare["key"], bare["value"], bare["headers"]) == (None, b"", None)
    assert offsets == {f"{topic}-0": 3}


def test_only_columns_that_the_job_reads_are_made(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b"one"])

    table, _ = all_of(source_of(kafka, topic), columns=("offset", "topic"))

    assert table.to_pylist() == [{"offset": 0, "topic": topic}]


def test_values_of_json_become_typed_columns_in_front_of_kafkas_own(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b'{"app":"a","n":1}', b'{"app": "b",\n "n": 2}', None, b"", b" "], key=b"k")
    schema = pa.schema([("app", pa.string()), ("n", pa.int64()), ("timestamp", pa.string())])

    table, _ = all_of(source_of(kafka, topic, schema, valueFormat="json"))

    assert table.schema.names == [
        "app", "n", "timestamp", "key", "topic", "partition", "offset", "timestampType",
    ]  # fmt: skip
    assert table.schema.field("timestamp").type == pa.string(), "the value's own, not Kafka's"
    assert list(zip(table["app"].to_pylist(), table["n"].to_pylist(), strict=True)) == [
        ("a", 1), ("b", 2), (None, None), (None, None), (None, None),
    ]  # fmt: skip
    assert table["offset"].to_pylist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("mode", "offsets"), [("PERMISSIVE", [0, 1, 2]), ("DROPMALFORMED", [0, 2])]
)
def test_a_malformed_value_is_kept_or_dropped_as_the_mode_says(kafka, mode, offsets):
    topic = kafka.topic()
    kafka.send(topic, [b'{"n":1}', b'{"n":"x"}', b'{"n":3}'])
    schema = pa.schema([("n", pa.int64()), ("_corrupt_record", pa.string())])
    source = source_of(kafka, topic, schema, valueFormat="json", mode=mode)

    with closing(Reading(source, source.splits(1))) as reading:
        table = reading.read()

        assert table["offset"].to_pylist() == offsets
        assert reading.reader.records_malformed() == 1
    kept = dict(zip(offsets, table["_corrupt_record"].to_pylist(), strict=True))
    assert kept.get(1) == ('{"n":"x"}' if mode == "PERMISSIVE" else None)


def test_with_failfast_the_sentence_names_the_offset(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b'{"n":1}', b'{"n":"x"}'])
    source = source_of(
        kafka, topic, pa.schema([("n", pa.int64())]), valueFormat="json", mode="FAILFAST"
    )

    with pytest.raises(
        DataError, match=f"at offset 1 of partition 0 of topic {topic} does not fit"
    ):
        all_of(source)


AVRO = """{"type":"record","name":"view","fields":
    [{"name":"app","type":"string"},{"name":"n","type":["null","long"]}]}"""


def test_values_of_avro_become_typed_columns_and_what_is_malformed_fails_as_in_spark(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b"\x02a\x02\x06", None, b"\x02b\x00", b"\x02"], key=b"k")
    lenient = source_of(kafka, topic, valueFormat="avro", avroSchema=AVRO, mode="PERMISSIVE")
    with closing(Reading(lenient, lenient.splits(1))) as reading:
        table = reading.read()
        assert reading.reader.records_malformed() == 1

    assert table.schema.names[:3] == ["app", "n", "key"]
    assert table["app"].to_pylist() == ["a", None, "b", None]
    assert table["n"].to_pylist() == [3, None, None, None]
    assert table["offset"].to_pylist() == [0, 1, 2, 3]
    with pytest.raises(
        DataError, match=f"at offset 3 of partition 0 of topic {topic} does not fit"
    ):
        all_of(source_of(kafka, topic, valueFormat="avro", avroSchema=AVRO))


def test_what_is_said_of_avro_has_to_fit_together(kafka):
    for options, sentence in (
        ({"valueFormat": "avro"}, "set avroSchema to its JSON text"),
        ({"valueFormat": "avro", "avroSchema": AVRO, "mode": "DROPMALFORMED"}, "not 'DROPMAL"),
        ({"avroSchema": AVRO}, "set valueFormat to avro, or leave it out"),
    ):
        with pytest.raises(BuildError, match=sentence):
            source_of(kafka, "clicks", **options)
    schema = pa.schema([("n", pa.int64())])
    with pytest.raises(BuildError, match=r"leave .schema\(...\) out"):
        source_of(kafka, "clicks", schema, valueFormat="avro", avroSchema=AVRO)


def test_an_array_is_many_rows_with_the_columns_of_its_message(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b'[{"n":1},{"n":2}]', b'{"n":3}'])

    table, _ = all_of(source_of(kafka, topic, pa.schema([("n", pa.int64())]), valueFormat="json"))

    assert table["n"].to_pylist() == [1, 2, 3]
    assert table["offset"].to_pylist() == [0, 0, 1]


def test_values_may_be_strings(kafka):
    topic = kafka.topic()
    kafka.send(topic, ["schön".encode(), None])

    table, _ = all_of(source_of(kafka, topic, valueFormat="string"))

    assert table["value"].to_pylist() == ["schön", None]


# --- Where it begins -------------------------------------------------------------------------


def test_partitions_are_read_with_their_own_order_and_offsets(kafka):
    topic = kafka.topic(3)
    for partition in range(3):
        kafka.send(topic, [b"%d" % n for n in range(partition * 700)], partition)

    table, offsets = all_of(source_of(kafka, topic))

    assert offsets == {f"{topic}-{each}": each * 700 for each in range(3)}
    for partition in range(3):
        rows = table.filter(pa.compute.equal(table["partition"], partition))
        assert rows["offset"].to_pylist() == list(range(partition * 700))


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        ({"startingOffsets": "earliest"}, {0: 0, 1: 0}),
        ({"startingOffsets": "latest"}, {0: 10, 1: 10}),
        ({"startingOffsets": '{"TOPIC":{"0":4,"1":-1}}'}, {0: 4, 1: 10}),
        ({"startingOffsets": '{"TOPIC":{"0":-2,"1":7}}'}, {0: 0, 1: 7}),
        ({"startingTimestamp": "5000"}, {0: 4, 1: 4}),
        ({"startingOffsetsByTimestamp": '{"TOPIC":{"0":2000,"1":9000}}'}, {0: 1, 1: 8}),
    ],
)
def test_it_begins_where_the_options_say(kafka, options, begins):
    topic = kafka.topic(2)
    for partition in (0, 1):
        for number in range(10):
            kafka.send(topic, [b"x"], partition, timestamp=1000 + number * 1000)
    given = {name: text.replace("TOPIC", topic) for name, text in options.items()}

    splits = source_of(kafka, topic, **given).splits(1)

    assert {each.position["partition"]: each.position["offset"] for each in splits} == begins


def test_a_time_after_the_last_record_is_refused_unless_the_end_is_asked_for(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b"x"], timestamp=1000)

    with pytest.raises(DataError, match="no record at or after 9000 ms, which startingTimestamp"):
        source_of(kafka, topic, startingTimestamp=9000).splits(1)

    late = source_of(
        kafka, topic, startingTimestamp=9000, startingOffsetsByTimestampStrategy="latest"
    )
    assert late.splits(1)[0].position["offset"] == 1


def test_a_partition_that_the_offsets_leave_out_is_refused(kafka):
    topic = kafka.topic(2)
    source = source_of(kafka, topic, startingOffsets=f'{{"{topic}":{{"0":0}}}}')

    with pytest.raises(BuildError, match=f"says nothing of partition 1 of topic {topic}"):
        source.splits(1)


def test_partitions_and_topics_that_come_later_are_read_from_their_beginning(kafka):
    prefix = kafka.topic()
    source = source_of(kafka, subscribePattern=f"{prefix}.*", startingOffsets="latest")
    first = found_by(source)
    assert [split.id for split in first.splits] == [f"{prefix}-0"]

    kafka.grow(prefix, 2)
    kafka.create(f"{prefix}-more")
    kafka.send(f"{prefix}-more", [b"early"])
    second = found_by(source, first.state)

    places = {split.id: split.position["offset"] for split in second.splits}
    assert places == {f"{prefix}-1": 0, f"{prefix}-more-0": 0}
    assert found_by(source, second.state).splits == []


class NoLeaderYet:
    """What the client says in the first moments of a topic: seen of one in six."""

    def __init__(self, admin, code):
        self._admin, self._codes = admin, [code, code]

    def __getattr__(self, name):
        return getattr(self._admin, name)

    def list_offsets(self, asked, **more):
        if not self._codes:
            return self._admin.list_offsets(asked, **more)
        failed = Future()
        failed.set_exception(KafkaException(KafkaError(self._codes.pop())))
        return dict.fromkeys(asked, failed)


@pytest.mark.parametrize(
    "code",
    [KafkaError._NOENT, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_LEADER_EPOCH],
)
def test_a_topic_that_was_just_made_is_asked_again_until_it_has_a_leader(kafka, code):
    topic = kafka.topic()
    client = Client(source_of(kafka, topic).settings)
    client._admin = NoLeaderYet(client._admin, code)

    assert client.ends([(topic, 0)], is_committed=True) == {(topic, 0): 0}


def test_some_partitions_can_be_assigned(kafka):
    topic = kafka.topic(3)

    source = source_of(kafka, assign=f'{{"{topic}":[0,2]}}')

    assert [split.id for split in source.splits(1)] == [f"{topic}-0", f"{topic}-2"]
    assert found_by(source).is_last
    with pytest.raises(DataError, match="has no partition 7"):
        source_of(kafka, assign=f'{{"{topic}":[7]}}').splits(1)


def test_options_about_micro_batches_are_taken_and_said_to_have_no_effect(kafka, caplog):
    source_of(kafka, "clicks", maxOffsetsPerTrigger=1000)

    assert "option maxOffsetsPerTrigger has no effect" in caplog.text


# --- Where it ends ---------------------------------------------------------------------------


def test_the_end_may_be_a_transactions_marker(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b"plain"])
    transaction = kafka.transaction()
    transaction.produce(topic, b"committed")
    transaction.commit_transaction(30)
    aborted = kafka.transaction()
    aborted.produce(topic, b"aborted")
    aborted.flush(30)
    aborted.abort_transaction(30)

    table, offsets = all_of(source_of(kafka, topic))

    assert table["value"].to_pylist() == [b"plain", b"committed"]
    assert offsets == {f"{topic}-0": 5}, "behind both markers"


def test_what_an_open_transaction_holds_back_is_not_waited_for(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b"before"])
    transaction = kafka.transaction()
    transaction.produce(topic, b"open")
    transaction.flush(30)
    kafka.send(topic, [b"behind"])

    table, offsets = all_of(source_of(kafka, topic))

    assert table["value"].to_pylist() == [b"before"]
    assert offsets == {f"{topic}-0": 1}
    transaction.abort_transaction(30)
    uncommitted = source_of(kafka, topic, kafka__isolation__level="read_uncommitted")
    assert all_of(uncommitted)[0]["value"].to_pylist() == [b"before", b"open", b"behind"]


def test_ending_offsets_end_it(kafka):
    topic = kafka.topic(2)
    for partition in (0, 1):
        kafka.send(topic, [b"%d" % n for n in range(20)], partition)
    source = source_of(kafka, topic, endingOffsets=f'{{"{topic}":{{"0":7,"1":-1}}}}')
    splits = source.splits(1)
    assert found_by(source).is_last
    kafka.send(topic, [b"later"], 1)

    with closing(Reading(source, splits, until_now=False)) as reading:
        assert reading.read().num_rows == 27
        assert reading.offsets() == {f"{topic}-0": 7, f"{topic}-1": 20}


def test_a_reader_goes_on_from_positions_and_takes_more_partitions(kafka):
    topic = kafka.topic(2)
    kafka.send(topic, [b"%d" % n for n in range(10)])
    source = source_of(kafka, topic)
    first, second = source.splits(1)
    begun = Split(first.id, {**first.position, "offset": 6})

    with closing(Reading(source, [begun], has_all=False)) as reading:
        assert reading.read(rows=4)["offset"].to_pylist() == [6, 7, 8, 9]
        kafka.send(topic, [b"more"], 1)
        reading.reader.add_splits([second])
        assert reading.read(rows=5)["value"].to_pylist()[-1] == b"more"
        assert reading.offsets() == {f"{topic}-0": 10, f"{topic}-1": 1}


def test_the_lag_is_what_is_there_and_not_taken_and_at_a_transactions_marker_it_is_none(kafka):
    topic = kafka.topic(2)
    kafka.send(topic, [b"old"] * 10, timestamp=1_700_000_000_000)
    source = source_of(kafka, topic)
    with closing(Reading(source, source.splits(1), has_all=False)) as reading:
        behind = reading.lag(lambda lag: lag.seconds is not None)
        assert behind.records == 10, "none was taken yet"
        assert behind.seconds > 1_000_000, "since what was read was written"
        reading.read(rows=10)
        transaction = kafka.transaction()
        transaction.produce(topic, b"new", partition=0)
        transaction.flush(30)
        assert reading.lag(lambda lag: lag.records == 0) == Lag(0, 0.0), "it is held back"
        transaction.commit_transaction(30)
        assert reading.lag(lambda lag: lag.records > 0).records == 2, "with the marker"

        reading.read(rows=11)
        assert reading.lag(lambda lag: lag.records == 0, polls=True) == Lag(0, 0.0)


def test_group_offsets_are_committed_when_a_checkpoint_is_complete(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b"x"] * 10)
    group = f"watched-{topic}"
    source = source_of(kafka, topic, kafka__group__id=group)
    with closing(Reading(source, source.splits(1))) as reading:
        reading.read()
        [split] = reading.reader.splits()
        reading.reader.on_checkpoint_complete(3, [Split(split.id, {**split.position, "offset": 8})])

    assert kafka.committed(group, topic) == 8, "what the checkpoint says, not what was read"


def test_without_a_group_no_group_is_left_behind(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b"x"])
    before = kafka.groups()
    source = source_of(kafka, topic)
    with closing(Reading(source, source.splits(1))) as reading:
        reading.read()
        reading.reader.on_checkpoint_complete(3, reading.reader.splits())

    assert kafka.groups() == before


# --- What goes wrong -------------------------------------------------------------------------


def test_offsets_that_the_broker_has_deleted_are_an_error(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b"%d" % n for n in range(10)])
    splits = source_of(kafka, topic).splits(1)
    kafka.delete_before(topic, 0, 4)

    with (
        closing(Reading(source_of(kafka, topic), splits)) as reading,
        pytest.raises(DataError, match=r"from offset 0, but Kafka at .* only from offset 4 on"),
    ):
        reading.read()

    with closing(Reading(source_of(kafka, topic, failOnDataLoss="false"), splits)) as reading:
        assert reading.read()["offset"].to_pylist() == [4, 5, 6, 7, 8, 9]


def test_a_topic_that_was_made_again_is_another_one(kafka, until_absent):
    topic = kafka.topic()
    kafka.send(topic, [b"old"] * 3)
    source = source_of(kafka, topic)
    splits = [Split(each.id, {**each.position, "offset": 2}) for each in source.splits(1)]
    kafka.delete(topic)
    until_absent(topic)
    kafka.create(topic)
    kafka.send(topic, [b"new"] * 5)

    with (
        closing(Reading(source, splits)) as reading,
        pytest.raises(DataError, match=f"topic {topic} at .* was deleted and made again since"),
    ):
        reading.read()

    with closing(Reading(source_of(kafka, topic, failOnDataLoss="false"), splits)) as reading:
        assert reading.read()["value"].to_pylist() == [b"new"] * 5


@pytest.mark.parametrize("count", [5, 1])
def test_a_topic_that_is_made_again_while_it_is_read_gives_none_of_its_records_too_many(
    kafka, until_absent, count
):
    topic = kafka.topic()
    kafka.send(topic, [b"old"] * 3)
    strict, lenient = (source_of(kafka, topic, failOnDataLoss=each) for each in ("true", "false"))
    new = [b"new-%d" % number for number in range(count)]
    splits = strict.splits(1)
    with (
        closing(Reading(strict, splits, has_all=False)) as refusing,
        closing(Reading(lenient, splits, has_all=False)) as going_on,
    ):
        refusing.read(rows=3)
        going_on.read(rows=3)
        kafka.delete(topic)
        until_absent(topic)
        kafka.create(topic)
        kafka.send(topic, new)

        assert going_on.read(rows=3 + count)["value"].to_pylist() == [b"old"] * 3 + new
        with pytest.raises(DataError, match=f"topic {topic} at .* was deleted and made again"):
            refusing.read(rows=4)
        assert refusing.table().num_rows == 3


class Hurried(SystemClock):
    """A minute passes with every second."""

    def monotonic_seconds(self):
        return super().monotonic_seconds() * 60


def test_a_topic_that_was_deleted_is_an_error_or_left_where_it_was_read_up_to(
    kafka, until_absent, caplog
):
    stays, goes = kafka.topic(), kafka.topic()
    kafka.send(stays, [b"one"] * 3)
    source = source_of(kafka, f"{stays},{goes}")
    splits = source.splits(1)
    kafka.delete(goes)
    until_absent(goes)

    with (
        closing(Reading(source, splits, clock=Hurried())) as reading,
        pytest.raises(DataError, match=f"topic {goes} at .* was deleted"),
    ):
        reading.read()

    lenient = source_of(kafka, f"{stays},{goes}", failOnDataLoss="false")
    with closing(Reading(lenient, splits, clock=Hurried())) as reading:
        assert reading.read().num_rows == 3
        assert reading.offsets() == {f"{stays}-0": 3, f"{goes}-0": 0}
    assert f"topic {goes} at {kafka.address} was deleted" in caplog.text


@pytest.fixture
def until_absent(kafka):
    def wait(topic):
        client = Client(source_of(kafka, topic).settings)
        for _ in range(200):
            if not client.described([topic]):
                return
            threading.Event().wait(0.05)
        raise AssertionError("it is still there")

    return wait


def test_a_topic_that_does_not_exist_is_refused_before_the_start(kafka):
    with pytest.raises(
        StartRefused, match=r"topic nowhere does not exist in Kafka at 127\.0\.0\.1"
    ):
        source_of(kafka, "nowhere").check_start()


def test_a_broker_that_is_not_there_is_told_with_its_address(free_port):
    class Nobody:
        address = f"127.0.0.1:{free_port}"

    began = time.monotonic()
    with pytest.raises(StartRefused) as told:
        source_of(Nobody, "clicks").check_start()
    assert time.monotonic() - began < 8, "within seconds"
    assert str(told.value) == (
        f"Kafka at {Nobody.address} cannot be reached (Connect to ipv4#{Nobody.address} failed:"
        " Connection refused): start it, or correct kafka.bootstrap.servers"
    ), "the address where it belongs, and nothing of the client's states"
    with pytest.raises(Unavailable, match=f"Kafka at 127.0.0.1:{free_port} cannot be reached"):
        source_of(Nobody, "clicks").splits(1)


@pytest.mark.parametrize(
    ("code", "said", "why"),
    [
        (
            KafkaError._TRANSPORT,
            "ssl://a:9092/1: Disconnected (after 5ms in state UP, 1 identical error(s) suppressed)",
            "Disconnected",
        ),
        (KafkaError._RESOLVE, "b:9092/1: Failed to resolve 'b:9092': no", "b:9092/1: Failed to"),
        (KafkaError._ALL_BROKERS_DOWN, "0/2 brokers are down", "no broker answers"),
    ],
)
def test_why_a_broker_cannot_be_reached_is_said_without_the_states_of_the_client(code, said, why):
    told = str(refused(KafkaError(code, said), Settings("a:9092,c:9092")))

    assert told.startswith(f"Kafka at a:9092,c:9092 cannot be reached ({why}")
    assert "state UP" not in told


def test_a_file_of_the_settings_that_is_not_there_is_named(tmp_path):
    class Nobody:
        address = "127.0.0.1:1"

    missing = str(tmp_path / "ca.pem")
    source = source_of(
        Nobody, "clicks", kafka__security__protocol="SSL", kafka__ssl__ca__location=missing
    )
    with pytest.raises(BuildError, match=re.escape(f"kafka.ssl.ca.location is {missing!r}, and")):
        source.check_start()


# --- Who may read ----------------------------------------------------------------------------


def test_a_user_with_a_password_reads_and_a_wrong_one_is_refused_in_one_sentence(
    kafka, monkeypatch
):
    topic = kafka.topic()
    kafka.send(topic, [b"one"])
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    given = {
        "kafka__bootstrap__servers": kafka.sasl_address,
        "kafka__security__protocol": "SASL_PLAINTEXT",
        "kafka__sasl__mechanism": "PLAIN",
        "kafka__sasl__username": USER,
    }
    source = source_of(kafka, topic, **given, kafka__sasl__password="env:KAFKA_PASSWORD")

    assert all_of(source)[0]["value"].to_pylist() == [b"one"]
    assert PASSWORD not in repr(source)

    monkeypatch.setenv("KAFKA_PASSWORD", "wrong-" + PASSWORD)
    began = time.monotonic()
    with pytest.raises(StartRefused, match=f"Kafka at {kafka.sasl_address} refuses") as told:
        source.check_start()
    assert time.monotonic() - began < 8, "within seconds"
    assert PASSWORD not in str(told.value)


def test_a_certificate_is_checked_and_one_that_does_not_match_is_refused_in_one_sentence(kafka):
    topic = kafka.topic()
    kafka.send(topic, [b"one"])
    given = {"kafka__security__protocol": "SSL", "kafka__broker__address__family": "v4"}
    trusted = {**given, "kafka__ssl__ca__location": kafka.certificate}
    right = source_of(kafka, topic, **trusted, kafka__bootstrap__servers=kafka.tls_address)

    assert all_of(right)[0]["value"].to_pylist() == [b"one"]

    by_number = kafka.tls_address.replace("localhost", "127.0.0.1")
    unlike = source_of(kafka, topic, **trusted, kafka__bootstrap__servers=by_number)
    with pytest.raises(StartRefused) as told:
        unlike.check_start()
    assert re.fullmatch(
        rf"the certificate of Kafka at {by_number} is not accepted \([^()]+ verify failed\): set"
        r" kafka\.ssl\.ca\.location to the file of who has signed it, and name the broker as it is"
        r" named there",
        str(told.value),
    ), "with our advice only"
    unknown = source_of(kafka, topic, **given, kafka__bootstrap__servers=kafka.tls_address)
    with pytest.raises(StartRefused, match="certificate of Kafka at localhost"):
        unknown.check_start()


def test_a_listener_that_speaks_another_protocol_is_not_taken_for_a_wrong_certificate(kafka):
    """The broker closes such a connection; another server answers in its own words."""
    given = {"kafka__security__protocol": "SSL"}
    for address in (kafka.address, kafka.sasl_address):
        with pytest.raises(StartRefused, match=r"wants another kafka\.security\.protocol") as told:
            source_of(kafka, "t", **given, kafka__bootstrap__servers=address).check_start()
        assert address in str(told.value)
    with pytest.raises(StartRefused, match=r"wants another kafka\.security\.protocol"):
        source_of(kafka, "t", kafka__bootstrap__servers=kafka.tls_address).check_start()
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        threading.Thread(target=speak_http, args=(listening,), daemon=True).start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(StartRefused) as told:
            source_of(kafka, "t", **given, kafka__bootstrap__servers=address).check_start()
    assert f"{address} does not speak TLS as this client does" in str(told.value)
    assert "certificate" not in str(told.value)


def speak_http(listening):
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()
