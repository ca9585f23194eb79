"""Reads all Kafka partitions of one subtask with one consumer, from offsets that we keep.

Theory of operation
-------------------
The consumer is told each partition and offset (`incremental_assign`); no group takes part. Its own
threads fetch ahead. One `poll` waits for the first message, `consume` takes what else is there,
and the messages of each partition become a batch whose position is the offset behind the last.

The client makes an object of each message. They are taken a few hundred at a time: what is read of
them is kept, and they are gone before the next come. So they stay in the processor's cache, and are
fewer than what makes the garbage collector look. With 10,000 at a time, the client was measured to
take a third more processor time.

The end of a partition may be a transaction's marker, which is an offset but no record. So a
position also moves when the client says that it has come to the end (partition EOF), and whether a
partition has been read up to somewhere is asked of the position, never of the last record.

Rules of this file
------------------
1. Everything but `add_splits`, `no_more_splits`, `has_ended`, `interrupt` and what tells figures is
   done by the reader's own thread.
2. No partition is read before it is known to be of the topic of which the position speaks: one that
   was deleted and made again has the same offsets and other records.
3. While no broker answers, the reader waits and says so.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from stillframe.api.sources import BlockingReader, Lag, ReadItem, SourceContext, Split
from stillframe.connectors.kafka_client import Client, Partition, made, refused
from stillframe.connectors.kafka_columns import Columns, Taken
from stillframe.connectors.kafka_options import GROUP
from stillframe.connectors.kafka_source import KafkaSource
from stillframe.errors import DataError, Unavailable
from stillframe.ids import CheckpointId

_MESSAGES_MAX = 32_000
"""In a batch: what each batch costs is spread over many records."""
_BYTES_MAX = 16 << 20
"""Of values in a batch, as far as a sample of each piece tells."""
_PIECE_MESSAGES_MAX = 500
"""Less than the 700 new objects at which Python's garbage collector begins to look."""
_SAMPLE_EVERY = 50
_POLL_SECONDS = 0.1
_LINGER_SECONDS = 0.005
"""How long more messages are waited for when one has come."""
_ANSWER_SECONDS_MAX = 2.0
"""`read` has to come back in time: what gets no answer is asked again."""
_LOOK_SECONDS = 5.0
"""How often it is asked whether the topics are still the same."""
_LAG_SECONDS = 1.0
"""How often the ends of partitions are asked for."""
_MISSING_SECONDS_MAX = 30.0
"""A broker that has just started may not know all topics yet."""

_USUAL: Mapping[str, Any] = {
    "group.id": "stillframe",
    "isolation.level": "read_committed",
    # Records are waited for at the broker for so long; then it says that the end is reached.
    "fetch.wait.max.ms": 100,
    # Of a full queue; the usual second is three times as long as it takes to empty it.
    "fetch.queue.backoff.ms": 10,
    "fetch.message.max.bytes": 4 << 20,
    "queued.min.messages": 200_000,
    "queued.max.messages.kbytes": 64 << 10,
}
_OURS: Mapping[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    # Where an offset is gone the job says what becomes of it, not the client.
    "auto.offset.reset": "error",
    # That a topic is gone is told at once: when it is back, it may be another one.
    "topic.metadata.propagation.max.ms": 0,
}
_GONE = {
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
}

log = logging.getLogger("stillframe")


@dataclass(slots=True)
class _Reading:
    """One partition, as far as it was given out."""

    split: Split
    offset: int
    end: int | None
    """Behind which nothing is read."""
    newest_ms: int | None = None
    """When the newest record that was read was written."""
    taken: Taken | None = None
    """What is not in a batch yet."""

    @property
    def has_ended(self) -> bool:
        return self.end is not None and self.offset >= self.end

    def moved(self, offset: int) -> Split:
        self.offset = offset if self.end is None else min(offset, self.end)
        self.split = Split(self.split.id, {**self.split.position, "offset": self.offset})
        return self.split


class Room:
    """What a batch still has room for."""

    def __init__(self) -> None:
        self._messages, self._bytes, self._bytes_each = _MESSAGES_MAX, _BYTES_MAX, 1

    def fill(self, messages: Sequence[Any]) -> None:
        if messages:
            sample = messages[::_SAMPLE_EVERY]
            self._bytes_each = max(1, sum(map(len, sample)) // len(sample))
            self._messages -= len(messages)
            self._bytes -= self._bytes_each * len(messages)

    def asked(self) -> int:
        """How many come next; none: it is full."""
        fit = max(0, self._bytes) // self._bytes_each
        return min(self._messages, fit, _PIECE_MESSAGES_MAX)


class _EndsNow:
    """Where partitions end, asked once a second in the background. Used by one thread."""

    def __init__(self, client: Client, *, is_committed: bool) -> None:
        self._client = client
        self._is_committed = is_committed
        self._ends: dict[Partition, int] = {}
        self._asked: dict[Partition, Future[Any]] = {}
        self._ask_at_seconds = 0.0

    def known(self, partitions: Iterable[Partition], now_seconds: float) -> Mapping[Partition, int]:
        """As the brokers said last; without those of which they did not."""
        if self._asked and all(answer.done() for answer in self._asked.values()):
            answers, self._asked = self._asked, {}
            self._ends = {
                partition: answer.result().offset
                for partition, answer in answers.items()
                if answer.exception() is None
            }
        if not self._asked and now_seconds >= self._ask_at_seconds:
            self._ask_at_seconds = now_seconds + _LAG_SECONDS
            self._asked = self._client.ask_ends(partitions, is_committed=self._is_committed)
        return self._ends


class KafkaReader(BlockingReader):
    takes_splits = True

    def __init__(
        self, source: KafkaSource, splits: Sequence[Split], context: SourceContext
    ) -> None:
        self._source = source
        self._clock = context.clock
        self._columns = Columns(source.shape, context.columns)
        self._coming: queue.SimpleQueue[Split] = queue.SimpleQueue()
        self.add_splits(splits)
        self._new: list[Split] = []
        """Those that were taken and wait to be looked at."""
        self._reading: dict[Partition, _Reading] = {}
        self._assigned: set[Partition] = set()
        """Those that the consumer reads."""
        self._ends: dict[str, int] = {}
        """Of each split that has an end, for the loop thread."""
        self._has_all = False
        self._stops_now = False
        self._knows_ends = False
        self._missing_since: dict[str, float] = {}
        self._given_up: set[str] = set()
        """Topics that are gone, of which a job that reads what is there waits for nothing."""
        self._looked_at = 0.0
        self._must_look = False
        """Whether a topic was gone for a moment, so that nothing is read before it is looked at."""
        self._trouble: str | None = None
        self._ends_now: _EndsNow | None = None
        self._ending = threading.Event()
        self._consumer: Any = None
        self._client: Client | None = None

    # --- the loop thread

    def add_splits(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._coming.put(split)

    def no_more_splits(self, *, until_now: bool) -> None:
        self._stops_now = until_now
        self._has_all = True

    def has_ended(self, split: Split) -> bool:
        # By the position alone: this thread is ahead of the one that asks.
        end = self._end_of(split)
        return end is not None and _offset(split) >= end

    def records_malformed(self) -> int:
        return self._columns.records_malformed

    def awaits(self) -> str | None:
        return self._trouble

    def lag(self, splits: Sequence[Split]) -> Lag | None:
        if self._ends_now is None or not splits:
            return None
        ends = self._ends_now.known(map(_partition, splits), self._clock.monotonic_seconds())
        records, oldest_ms = 0, float("inf")
        for split in splits:
            partition = _partition(split)
            if partition not in ends:
                return None
            end = min(ends[partition], self._ends.get(split.id, ends[partition]))
            if (left := end - _offset(split)) > 0:
                records += left
                reading = self._reading.get(partition)
                if reading is not None and reading.newest_ms is not None:
                    oldest_ms = min(oldest_ms, reading.newest_ms)
        if not records:
            return Lag(0, 0.0)
        if oldest_ms == float("inf"):
            return Lag(records, None)
        return Lag(records, max(0.0, self._clock.wall_ms() - oldest_ms) / 1000)

    def interrupt(self) -> None:
        self._ending.set()

    # --- the reader's thread

    def read(self) -> Iterator[ReadItem]:
        settings = self._source.settings
        self._client = Client(settings, _ANSWER_SECONDS_MAX)
        self._consumer = made(Consumer, settings, _USUAL, **_OURS, error_cb=self._hear)
        self._ends_now = _EndsNow(self._client, is_committed=self._source.reads_committed)
        while not self._ending.is_set():
            has_all, stops = self._has_all, self._stops_now  # what was given by then is taken below
            while not self._coming.empty():
                self._new.append(self._coming.get())
            yield from self._looked()
            if stops and not self._new and not self._knows_ends:
                yield from self._found_ends()
            is_over = has_all and not self._new and (self._knows_ends or not stops)
            if is_over and all(each.has_ended for each in self._reading.values()):
                return
            told = self._consumed()
            if self._must_look:  # also what was taken may be of another topic
                self._begin_again()
                yield None
            else:
                yield from self._batches(told)

    def on_checkpoint_complete(self, checkpoint_id: CheckpointId, splits: Sequence[Split]) -> None:
        """Those who watch a group's lag are told; nothing here depends on it."""
        if self._consumer is None or self._source.settings.get(GROUP) is None or not splits:
            return
        offsets = [
            TopicPartition(*_partition(split), cast(int, split.position["offset"]))
            for split in splits
        ]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            log.warning("offsets of %s were not committed: %s", self._source.describe(), error)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()

    def _consumed(self) -> list[Any]:
        """Take what is there now, a batch at most; what the client says beside records."""
        first = self._consumer.poll(_POLL_SECONDS)
        if first is None:
            return []
        told: list[Any] = []
        linger_until = self._clock.monotonic_seconds() + _LINGER_SECONDS
        room, asked, messages = Room(), 1, [first]
        while True:
            room.fill(messages)
            is_all = len(messages) < asked
            self._take(messages, told)
            del messages  # before the next ones come
            asked = room.asked()
            if is_all or not asked:
                return told
            linger = max(0.0, linger_until - self._clock.monotonic_seconds())
            messages = self._consumer.consume(asked, linger)

    def _take(self, messages: list[Any], told: list[Any]) -> None:
        """Note what is read of these messages, and those that are no records."""
        if errors := list(filter(Message.error, messages)):
            told += errors
            messages = [message for message in messages if message.error() is None]
        for partition, part in self._by_partition(messages):
            reading = self._reading[partition]
            end = reading.end
            if end is not None and part[-1].offset() >= end:
                part = [message for message in part if message.offset() < end]
            if part:
                reading.taken = self._columns.take(part, reading.taken)
                reading.newest_ms = part[-1].timestamp()[1]

    def _batches(self, told: list[Any]) -> Iterator[ReadItem]:
        """Of what was taken, and of what the client says instead of records; at least None."""
        has_yielded = False
        for partition, reading in self._reading.items():
            if (taken := reading.taken) is not None:
                reading.taken, self._trouble, has_yielded = None, None, True
                batch = self._columns.batch(*partition, taken)
                yield reading.moved(taken.next_offset), batch
        for message in told:
            yield from self._heard((message.topic(), message.partition()), message)
        self._leave_ended()
        if not has_yielded:
            yield None

    def _by_partition(self, messages: list[Any]) -> Iterator[tuple[Partition, list[Any]]]:
        """Runs of them; a partition may have several."""
        if len(self._reading) == 1:  # the usual case, and the fastest
            if messages:
                yield next(iter(self._reading)), messages
            return
        for topic, of_topic in _runs(messages, Message.topic):
            for number, part in _runs(of_topic, Message.partition):
                yield (topic, number), part

    def _heard(self, partition: Partition, message: Any) -> Iterator[ReadItem]:
        """What the client says of a partition instead of a record."""
        reading, error = self._reading.get(partition), message.error()
        if reading is None:
            return
        if error.code() == KafkaError._PARTITION_EOF:
            if message.offset() > reading.offset or reading.end is not None:
                yield reading.moved(max(message.offset(), reading.offset)), None
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            yield from self._out_of_range(partition, reading)
        else:
            self._hear(error)

    def _out_of_range(self, partition: Partition, reading: _Reading) -> Iterator[ReadItem]:
        """The broker does not have the offset any more, or the topic is another one."""
        assert self._client is not None
        try:
            topics = self._client.described([partition[0]])
            if partition[0] not in topics:
                self._must_look = True
                return
            begins = self._client.begins([partition])[partition]
        except Unavailable as error:
            self._trouble = str(error)
            self._must_look = True
            return
        of_now = self._of_same_topic(reading.split, topics[partition[0]].id)
        if of_now is reading.split:
            yield self._lost(partition, reading, begins), None
        else:
            yield self._moved_over(partition, reading, of_now), None

    def _lost(self, partition: Partition, reading: _Reading, begins: int) -> Split:
        topic, number = partition
        said = (
            f"partition {number} of topic {topic} was to be read from offset {reading.offset}, but"
            f" Kafka at {self._source.settings.servers} has it only from offset {begins} on"
        )
        if self._source.fails_on_data_loss:
            raise DataError(
                f"{said}: records that were not read are gone; to go on without them set"
                " failOnDataLoss to false"
            )
        log.warning("%s: the job goes on there, because failOnDataLoss is false", said)
        return self._moved_to(partition, reading, begins)

    def _moved_to(self, partition: Partition, reading: _Reading, offset: int) -> Split:
        self._consumer.incremental_unassign([TopicPartition(*partition)])
        self._consumer.incremental_assign([TopicPartition(*partition, offset)])
        return reading.moved(offset)

    def _moved_over(self, partition: Partition, reading: _Reading, of_now: Split) -> Split:
        """Read this in its stead, of a topic that was made again."""
        reading.split, reading.end = of_now, self._end_of(of_now)
        return self._moved_to(partition, reading, _offset(of_now))

    def _begin_again(self) -> None:
        """Read nothing before all topics were looked at, from where they were given out."""
        self._must_look = False
        self._consumer.incremental_unassign([TopicPartition(*at) for at in self._assigned])
        self._new += [self._reading.pop(at).split for at in self._assigned]  # with what was taken
        self._assigned.clear()

    def _leave_ended(self) -> None:
        ended = {at for at in self._assigned if self._reading[at].has_ended}
        if ended:
            self._consumer.incremental_unassign([TopicPartition(*at) for at in ended])
            self._assigned -= ended

    def _found_ends(self) -> Iterator[ReadItem]:
        """Where the partitions end now, so that a job which reads what is there can stop."""
        assert self._client is not None
        left = {at: reading for at, reading in self._reading.items() if not reading.has_ended}
        try:
            ends = self._client.ends(left, is_committed=self._source.reads_committed)
        except Unavailable as error:
            self._trouble = str(error)
            return
        for partition, reading in left.items():
            end = ends[partition]
            reading.end = end if reading.end is None else min(end, reading.end)
            self._ends[reading.split.id] = reading.end
            if reading.has_ended:
                yield reading.split, None
        self._knows_ends = True
        self._leave_ended()

    # --- whether the topics are those of the positions

    def _looked(self) -> Iterator[ReadItem]:
        """Look at the topics if it is time to; begin to read what is new and theirs."""
        assert self._client is not None
        now = self._clock.monotonic_seconds()
        if not self._new and (not self._reading or now < self._looked_at + _LOOK_SECONDS):
            return
        self._looked_at = now
        splits = [*self._new, *(reading.split for reading in self._reading.values())]
        try:
            topics = self._client.described({_partition(split)[0] for split in splits})
        except Unavailable as error:
            self._trouble = str(error)
            return
        self._trouble = None
        self._note_missing({_partition(split)[0] for split in splits} - set(topics), now)
        waiting, self._new = self._new, []
        for split in waiting:
            topic, _ = _partition(split)
            if topic in topics:
                yield from self._begun(self._of_same_topic(split, topics[topic].id))
            elif topic in self._given_up:
                self._reading[_partition(split)] = _Reading(split, _offset(split), None)
            else:
                self._new.append(split)
        for partition, reading in self._reading.items():
            if partition[0] in self._given_up and not reading.has_ended:
                reading.end = self._ends[reading.split.id] = reading.offset
                yield reading.split, None
            if partition[0] in topics:
                of_now = self._of_same_topic(reading.split, topics[partition[0]].id)
                if of_now is not reading.split and partition in self._assigned:
                    yield self._moved_over(partition, reading, of_now), None
        self._leave_ended()

    def _begun(self, split: Split) -> Iterator[ReadItem]:
        partition = _partition(split)
        reading = _Reading(split, _offset(split), self._end_of(split))
        self._reading[partition] = reading
        if not reading.has_ended:
            self._consumer.incremental_assign([TopicPartition(*partition, reading.offset)])
            self._assigned.add(partition)
        yield split, None

    def _end_of(self, split: Split) -> int | None:
        return self._ends.get(split.id, cast("int | None", split.position.get("end")))

    def _of_same_topic(self, split: Split, now: str) -> Split:
        """The split, or its successor in a topic that was made again."""
        topic, number = _partition(split)
        before = split.position.get("topic_id", "")
        if not before or not now or before == now:
            return split
        said = (
            f"topic {topic} at {self._source.settings.servers} was deleted and made again since"
            f" partition {number} was read up to offset {_offset(split)}"
        )
        if self._source.fails_on_data_loss:
            raise DataError(
                f"{said}: to read the new one from its beginning set failOnDataLoss to false"
            )
        log.warning("%s: the new one is read from its beginning", said)
        self._ends.pop(split.id, None)  # of the one before it
        self._knows_ends = False
        return Split(split.id, {**split.position, "topic_id": now, "offset": 0})

    def _note_missing(self, missing: set[str], now: float) -> None:
        self._missing_since = {topic: self._missing_since.get(topic, now) for topic in missing}
        for topic, since in self._missing_since.items():
            self._trouble = f"topic {topic} is not there at {self._source.settings.servers}"
            if now - since <= _MISSING_SECONDS_MAX or topic in self._given_up:
                continue
            said = f"topic {topic} at {self._source.settings.servers} was deleted"
            if self._source.fails_on_data_loss:
                raise DataError(
                    f"{said} while it was read: take it out of the job, or set failOnDataLoss to"
                    " false"
                )
            if self._stops_now:
                log.warning("%s: the job ends without what was not read of it", said)
                self._given_up.add(topic)

    # --- what it waits for

    def _hear(self, error: KafkaError) -> None:
        """Called by the client while it is polled."""
        if error.code() in _GONE:
            self._must_look = True
            return
        raised = refused(error, self._source.settings)
        if isinstance(raised, DataError):
            raise raised
        # One of several brokers may be away, and a connection may break and be made again.
        if error.code() == KafkaError._ALL_BROKERS_DOWN and self._trouble is None:
            self._trouble = str(raised)


def _runs(messages: list[Any], of: Callable[[Any], Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Neighbours that are of the same; without an object for each, which `_take` is about."""
    begin = 0
    for key, run in groupby(map(of, messages)):
        end = begin + len(list(run))
        yield key, messages[begin:end]
        begin = end


def _partition(split: Split) -> Partition:
    return cast(str, split.position["topic"]), cast(int, split.position["partition"])


def _offset(split: Split) -> int:
    return cast(int, split.position["offset"])
