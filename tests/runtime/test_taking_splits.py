"""One blocking reader that reads all splits of its subtask, takes more while it runs, and hears of
checkpoints."""

import logging
import queue
import threading

import pyarrow as pa
import pytest

from stillframe.api.sources import BlockingReader, EndOfData, NothingYet, Split
from stillframe.errors import UserCodeError
from stillframe.graph.logical import WithWatermark
from stillframe.runtime import reading
from stillframe.runtime.elements import Watermark
from stillframe.runtime.reading import SplitAfterSplitReader, ThreadedReader
from stillframe.runtime.source_operator import Reading
from stillframe.runtime.watermarking import Watermarking

SCHEMA = pa.schema([("id", pa.int64())])
LIMIT_SECONDS = 20
END = "end"


def batch(*ids):
    return pa.record_batch([list(ids)], schema=SCHEMA)


def split(name, line=0):
    return Split(name, {"line": line})


class Consumer(BlockingReader):
    """Yields what a test hands to it, in that order, and writes down what it is told."""

    takes_splits = True

    def __init__(self):
        self.items = queue.SimpleQueue()
        self.told = []
        self.told_by = set()
        self.heard = threading.Condition()
        self.interrupted = threading.Event()
        self.is_closed = False

    def add_splits(self, splits):
        self.told.append(("splits", [each.id for each in splits]))

    def no_more_splits(self, *, until_now):
        self.told.append(("no more", until_now))

    def on_checkpoint_complete(self, checkpoint_id, splits):
        with self.heard:
            self.told_by.add(threading.current_thread().name)
            lines = {each.id: each.position["line"] for each in splits}
            self.told.append(("complete", checkpoint_id, lines))
            self.heard.notify_all()

    def await_told(self, *what):
        with self.heard:
            assert self.heard.wait_for(lambda: what in self.told, LIMIT_SECONDS), self.told

    def has_ended(self, split):
        return split.position["line"] == END

    def read(self):
        while True:
            item = self.items.get(timeout=LIMIT_SECONDS)
            if item is END or self.interrupted.is_set():
                return
            yield item

    def interrupt(self):
        self.interrupted.set()
        self.items.put(END)

    def close(self):
        self.is_closed = True


class Taking:
    """A source with an enumerator whose reader takes splits."""

    def __init__(self, *restored):
        self.consumer = Consumer()
        self.woken = threading.Event()
        self.reader = ThreadedReader((), self.consumer, self.woken.set, "topic")
        self.reader.add_splits(restored)
        self.reading = Reading("topic", 0, self.reader, name="topic", awaits_splits=True)

    def give(self, *items):
        for item in items:
            self.consumer.items.put(item)

    def add(self, *names, is_last=False, stops=False):
        self.reading.on_splits([split(name) for name in names], is_last, stops)

    def next(self):
        while isinstance(polled := self.reading.poll(), NothingYet):
            assert self.woken.wait(LIMIT_SECONDS), "nobody woke the loop"
            self.woken.clear()
        return polled["id"].to_pylist() if isinstance(polled, pa.RecordBatch) else polled

    def until(self, condition):
        """Poll, without a record, until something can be seen."""
        while isinstance(polled := self.reading.poll(), NothingYet) and not condition():
            assert not polled.retry_seconds or self.woken.wait(LIMIT_SECONDS), "nobody woke us"
            self.woken.clear()

    def kept(self, checkpoint_id=1):
        items = self.reading.snapshot(checkpoint_id)().items
        return {item["id"]: item["position"]["line"] for item in items}


@pytest.fixture
def taking():
    made = []

    def make(*restored):
        made.append(Taking(*restored))
        return made[-1]

    yield make
    for each in made:
        each.reader.close()


# --- splits ---


def test_splits_that_never_end_are_read_side_by_side_as_they_come(taking):
    source = taking(split("a", 5))
    source.give((split("a", 6), batch(1)))
    assert source.next() == [1]
    source.add("b", "c")
    source.give((split("c", 1), batch(2)), (split("a", 7), batch(3)), (split("b", 1), batch(4)))

    assert [source.next(), source.next(), source.next()] == [[2], [3], [4]]
    assert source.kept() == {"a": 7, "b": 1, "c": 1}
    assert source.consumer.told == [("splits", ["a"]), ("splits", ["b", "c"])]


def test_a_split_that_is_assigned_twice_is_given_once(taking):
    source = taking()
    source.add("a")
    source.add("a")

    assert source.consumer.told == [("splits", ["a"])]


def test_a_position_moves_without_a_record_and_counts_only_when_it_was_polled(taking):
    source = taking(split("a"))
    source.give((split("a", 1), None), (split("a", 2), batch()), (split("a", 3), batch(1)))

    assert source.kept() == {"a": 0}
    assert source.next() == [1]
    assert source.kept() == {"a": 3}


def test_positions_that_move_for_ever_do_not_keep_the_loop(taking):
    source = taking(split("a"))
    source.give(*((split("a", line), None) for line in range(1, 1000)))

    source.until(lambda: source.kept() == {"a": 999})


def test_without_a_split_there_is_nothing_to_read_and_time_does_not_wait_for_it(taking):
    source = taking()
    assert isinstance(source.reading.poll(), NothingYet)
    assert source.reading.has_nothing_to_read

    source.add("a")
    assert isinstance(source.reading.poll(), NothingYet)
    assert not source.reading.has_nothing_to_read


def test_it_ends_when_no_split_will_come_and_all_have_ended(taking):
    source = taking(split("a"))
    source.give((split("a", END), batch(1)))
    assert source.next() == [1]
    assert isinstance(source.reading.poll(), NothingYet)
    source.add("b", is_last=True)
    assert isinstance(source.reading.poll(), NothingYet)
    source.give((split("b", END), None))

    assert source.next() == EndOfData()
    assert source.consumer.told[-1] == ("no more", False)
    assert source.kept() == {"a": END, "b": END}, "they stay where they are"


def test_a_job_that_stops_at_what_is_there_says_so_and_the_end_of_read_is_the_end(taking):
    source = taking(split("a"))
    source.add(is_last=True, stops=True)
    source.add(is_last=True, stops=True)
    source.give((split("a", 4), batch(1)), END)

    assert [source.next(), source.next()] == [[1], EndOfData()]
    assert source.consumer.told == [("splits", ["a"]), ("no more", True)]
    assert source.kept() == {"a": 4}, "the next start goes on from there"


def test_one_that_ends_before_all_splits_have_come_is_refused(taking):
    source = taking(split("a"))
    source.give(END)

    with pytest.raises(UserCodeError, match="topic has ended although more splits"):
        source.next()


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ((split("b"), batch(1)), "yielded split 'b', which it was not given"),
        (batch(1), r"yielded pyarrow.RecordBatch.*yield \(Split, RecordBatch\)"),
        (("a", batch(1)), r"yielded \('a', .*yield \(Split, RecordBatch\)"),
    ],
    ids=["a foreign split", "no split", "a name"],
)
def test_what_is_yielded_that_is_no_batch_of_a_given_split_is_refused(taking, item, says):
    source = taking(split("a"))
    source.give(item)

    with pytest.raises(UserCodeError, match=f"(?s)the reader of source topic {says}"):
        source.next()


def test_event_time_waits_for_splits_from_when_they_are_given_until_they_have_ended(taking):
    source = taking(split("a"), split("z", END))
    assert source.reader.open_splits() == {"a"}
    source.add("b")
    assert source.reader.open_splits() == {"a", "b"}
    assert not source.reader.reads_in_turn, "so that one that gives nothing becomes idle"
    source.give((split("b", 1), batch(1)), (split("a", END), None))
    source.next()
    assert source.reader.polled_split() == "b"

    source.until(lambda: source.reader.open_splits() == {"b"})


TIMED = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))])


def test_a_split_that_gives_nothing_holds_event_time_back_only_until_it_is_idle(new_source, taking):
    topic = taking(split("a"), split("b"))

    def marking(clock):
        return Watermarking("time", 0, WithWatermark("at", 0), clock, None, None, 10.0)

    source = new_source(
        reader=topic.reader, behind=[marking], idle_timeout_seconds=10.0, awaits_splits=True
    )

    def read(line, second):
        at = pa.array([second * 1_000_000]).cast(TIMED.field("at").type)
        topic.give((split("a", line), pa.record_batch([pa.array([second]), at], schema=TIMED)))
        while not source.subtask.step():
            assert topic.woken.wait(LIMIT_SECONDS), "nobody woke the loop"
            topic.woken.clear()
        return source.sent()

    assert read(1, 100) == [[100]], "b may have older ones"
    source.clock.advance(9)
    assert read(2, 200) == [[200]]
    source.clock.advance(1)
    assert read(3, 300) == [Watermark(200_000_000), [300], Watermark(300_000_000)]


# --- completion ---


def test_a_completed_checkpoint_is_told_by_the_readers_own_thread_as_its_splits_were(taking):
    source = taking(split("a"))
    source.give((split("a", 1), batch(1)))
    source.next()
    source.kept(checkpoint_id=1)
    source.give((split("a", 2), batch(2)))
    source.next()
    source.reading.completed(1)
    source.give(None)

    source.consumer.await_told("complete", 1, {"a": 1})
    assert source.consumer.told_by == {"source"}


def test_the_restored_checkpoint_is_told_with_the_splits_of_now(taking):
    source = taking(split("a", 7))
    source.reading.completed(3)
    source.give(None)

    source.consumer.await_told("complete", 3, {"a": 7})


def test_of_an_aborted_checkpoint_and_of_a_savepoint_nothing_is_kept(taking):
    source = taking(split("a"))
    source.kept(checkpoint_id=1)
    source.reading.aborted(1)
    source.reading.snapshot(2, savepoint=object())
    assert not source.reading._in_checkpoints
    source.kept(checkpoint_id=3)
    source.kept(checkpoint_id=4)
    source.reading.completed(3)

    assert list(source.reading._in_checkpoints) == [4]


def test_of_several_only_the_newest_is_told_to_a_reader_that_is_busy(taking):
    source = taking(split("a"))
    for checkpoint_id in (1, 2, 3):
        source.kept(checkpoint_id)
        source.reading.completed(checkpoint_id)
    source.give(None)
    source.consumer.await_told("complete", 3, {"a": 0})

    assert [each[1] for each in source.consumer.told if each[0] == "complete"] == [3]


def test_it_is_told_while_the_job_has_no_room(taking):
    source = taking(split("a"))
    source.give(*((split("a", line), batch(line)) for line in range(1, 20)))
    source.next()
    while source.consumer.items.qsize() > 19 - 1 - 4 - 1:  # polled, ahead, in hand
        source.woken.wait(0.01)
    source.kept(checkpoint_id=1)
    source.reading.completed(1)

    source.consumer.await_told("complete", 1, {"a": 1})


def test_it_is_told_after_its_end_and_before_it_is_closed(taking):
    source = taking(split("a"))
    source.add(is_last=True)
    source.give((split("a", 1), batch(1)), END)
    assert [source.next(), source.next()] == [[1], EndOfData()]
    source.kept(checkpoint_id=1)
    source.reading.completed(1)
    source.consumer.await_told("complete", 1, {"a": 1})

    source.kept(checkpoint_id=2)
    source.reading.completed(2)
    source.reader.close()
    assert source.consumer.told[-1] == ("complete", 2, {"a": 1})
    assert source.consumer.is_closed


def test_what_it_raises_when_it_is_told_is_raised_where_it_is_polled(taking):
    source = taking(split("a"))

    def refuse(checkpoint_id, splits):
        raise ConnectionError("the queue is away")

    source.consumer.on_checkpoint_complete = refuse
    source.reading.completed(1)
    source.give(None)

    with pytest.raises(UserCodeError, match="source topic raised ConnectionError: the queue is"):
        source.next()


class OneSplit(Consumer):
    takes_splits = False


def test_where_splits_have_readers_of_their_own_each_is_told_of_its_own():
    readers = {"a": OneSplit(), "b": OneSplit()}
    reader = SplitAfterSplitReader(lambda split: readers[split.id], lambda: None)
    reader.add_splits([split("a"), split("b")])
    reader.on_checkpoint_complete(1, [split("a", 1), split("b")])
    readers["a"].items.put(None)
    readers["a"].await_told("complete", 1, {"a": 1})
    readers["a"].items.put(END)
    reader.on_checkpoint_complete(2, [split("b", 3)])
    readers["b"].items.put(None)
    readers["b"].await_told("complete", 2, {"b": 3})
    reader.close()


# --- one that does not end ---


class Deaf(Consumer):
    def __init__(self):
        super().__init__()
        self.let_go = threading.Event()

    def read(self):
        self.let_go.wait(LIMIT_SECONDS)
        yield from ()

    def interrupt(self):
        """It does not hear."""


def test_a_reader_that_does_not_hear_interrupt_is_named_with_where_it_waits(monkeypatch, caplog):
    monkeypatch.setattr(reading, "_CLOSE_SECONDS", 0.1)
    deaf = Deaf()
    with caplog.at_level(logging.ERROR, "stillframe"):
        ThreadedReader((), deaf, lambda: None, "topic").close()
    deaf.let_go.set()

    [record] = caplog.records
    said = record.getMessage()
    assert "the reader of source topic does not end 0.1 s after interrupt was called" in said
    assert "test_taking_splits.py" in said
    assert "in Deaf.read" in said
    assert not deaf.is_closed, "it is still at work"
