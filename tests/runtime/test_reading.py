"""Readers that block, in a thread of their own."""

import threading

import pyarrow as pa
import pytest

from stillframe.api.sources import BlockingReader, EndOfData, NothingYet, Split
from stillframe.errors import DataError
from stillframe.runtime.reading import SplitAfterSplitReader, ThreadedReader
from stillframe.runtime.source_operator import Reading

SCHEMA = pa.schema([("id", pa.int64())])
LIMIT_SECONDS = 20


class Lines(BlockingReader):
    """Yields what it is told, waiting where it is told."""

    def __init__(self, *items, name="file"):
        self.items = items
        self.name = name
        self.taken = 0
        self.is_closed = False

    def read(self):
        for index, item in enumerate(self.items):
            self.taken = index + 1
            if isinstance(item, threading.Event):
                item.wait(LIMIT_SECONDS)
            elif isinstance(item, BaseException):
                raise item
            else:
                yield (
                    Split(self.name, {"line": item}),
                    pa.record_batch([[item]], schema=SCHEMA),
                )

    def close(self):
        self.is_closed = True


class Threaded:
    def __init__(self, *items):
        self.lines = Lines(*items)
        self.woken = threading.Event()
        self.reader = ThreadedReader([Split("file", {"line": 0})], self.lines, self.woken.set)

    def next(self):
        """What is polled next, waiting to be woken where there is nothing yet."""
        while isinstance(polled := self.reader.poll(), NothingYet):
            assert self.woken.wait(LIMIT_SECONDS), "nobody woke the loop"
            self.woken.clear()
        return polled["id"][0].as_py() if isinstance(polled, pa.RecordBatch) else polled


@pytest.fixture
def threaded():
    made = []

    def make(*items):
        made.append(Threaded(*items))
        return made[-1]

    yield make
    for each in made:
        each.reader.close()


def test_batches_come_in_order_and_then_the_end_for_ever(threaded):
    source = threaded(1, 2, 3)

    assert [source.next() for _ in range(5)] == [1, 2, 3, EndOfData(), EndOfData()]


def test_the_position_is_that_of_what_was_emitted_however_far_the_thread_is_ahead(threaded):
    source = threaded(*range(1, 10))
    assert source.reader.splits() == [Split("file", {"line": 0})]

    source.next()
    source.next()

    assert source.reader.splits() == [Split("file", {"line": 2})]


def test_polling_never_waits_for_the_reader(threaded):
    bytes_came = threading.Event()
    source = threaded(bytes_came, 1)

    assert isinstance(source.reader.poll(), NothingYet)
    bytes_came.set()
    assert source.next() == 1


def test_the_thread_stays_only_a_few_batches_ahead(threaded):
    source = threaded(*range(1000))
    source.next()
    for _ in range(20):
        source.woken.clear()
        source.woken.wait(0.01)

    assert source.lines.taken < 10


def test_what_the_reader_raises_is_raised_where_it_is_polled(threaded):
    source = threaded(1, DataError("line 2 is not a click"))
    source.next()

    with pytest.raises(DataError, match="line 2"):
        source.next()


class Patient(BlockingReader):
    """Waits for bytes that never come, until it is told not to."""

    def __init__(self):
        self.interrupted = threading.Event()
        self.is_waiting = threading.Event()
        self.is_closed = False

    def read(self):
        self.is_waiting.set()
        self.interrupted.wait(LIMIT_SECONDS)
        yield from ()

    def interrupt(self):
        self.interrupted.set()

    def close(self):
        assert self.interrupted.is_set()
        self.is_closed = True


def test_a_reader_that_waits_is_interrupted_and_then_closed():
    patient = Patient()
    reader = ThreadedReader([Split("bytes", {})], patient, lambda: None)
    assert patient.is_waiting.wait(LIMIT_SECONDS)
    reader.close()

    assert patient.is_closed


def test_of_splits_that_are_read_in_turn_the_reader_that_waits_is_interrupted():
    patient = Patient()
    reader = SplitAfterSplitReader(lambda split: patient, lambda: None)
    reader.add_splits([Split("bytes", {})])
    assert patient.is_waiting.wait(LIMIT_SECONDS)
    reader.close()

    assert patient.is_closed


def test_closing_ends_the_thread_even_when_nobody_polls(threaded):
    source = threaded(*range(1000))
    source.next()

    source.reader.close()

    assert source.lines.is_closed


# --- splits that come while the job runs ---


class Growing:
    """A reader of splits that are added; each has the lines given with its name."""

    def __init__(self, **lines):
        self.lines = {name: Lines(*items, name=name) for name, items in lines.items()}
        self.opened = []
        self.woken = threading.Event()
        self.reader = SplitAfterSplitReader(self.open, self.woken.set)
        self.reading = Reading("files", 0, self.reader, awaits_splits=True)

    def open(self, split):
        self.opened.append(split)
        return self.lines[split.id]

    def add(self, *names, is_last=False):
        self.reading.on_splits([Split(name, {"line": 0}) for name in names], is_last)

    def next(self):
        while isinstance(polled := self.reading.poll(), NothingYet):
            assert self.woken.wait(LIMIT_SECONDS), "nobody woke the loop"
            self.woken.clear()
        return polled["id"][0].as_py() if isinstance(polled, pa.RecordBatch) else polled

    def kept(self):
        return [item["id"] for item in self.reading.snapshot(1)().items]


@pytest.fixture
def growing():
    made = []

    def make(**lines):
        made.append(Growing(**lines))
        return made[-1]

    yield make
    for each in made:
        each.reader.close()


def test_a_source_that_awaits_splits_ends_only_after_the_last_of_them(growing):
    source = growing(a=[1, 2], b=[3])
    assert isinstance(source.reading.poll(), NothingYet)
    source.add("a")
    assert [source.next(), source.next()] == [1, 2]
    assert isinstance(source.reading.poll(), NothingYet)
    source.add("b", is_last=True)

    assert [source.next(), source.next()] == [3, EndOfData()]
    assert all(lines.is_closed for lines in source.lines.values())


def test_being_told_the_end_does_not_cut_off_what_is_still_unread(growing):
    source = growing(a=[1, 2])
    source.add("a")
    source.add(is_last=True)

    assert [source.next(), source.next(), source.next()] == [1, 2, EndOfData()]


def test_a_split_that_is_assigned_twice_is_read_once_even_after_its_end(growing):
    source = growing(a=[1], b=[2])
    source.add("a")
    source.add("a")
    assert source.next() == 1
    source.add("a", "b", is_last=True)

    assert [source.next(), source.next()] == [2, EndOfData()]
    assert [split.id for split in source.opened] == ["a", "b"]


def test_a_snapshot_holds_splits_that_were_added_but_not_begun_and_none_that_ended(growing):
    source = growing(a=[1], b=[2], c=[3])
    source.add("a", "b", "c")
    assert source.kept() == ["a", "b", "c"]
    source.next()
    source.next()

    assert source.kept() == ["b", "c"], "the end of b is known only when c has begun"


def test_what_the_reader_of_one_split_raises_is_raised_where_it_is_polled(growing):
    source = growing(a=[DataError("line 1 is not a click")])
    source.add("a")

    with pytest.raises(DataError, match="line 1"):
        source.next()


def test_closing_ends_a_thread_that_waits_for_splits(growing):
    source = growing()
    source.reader.close()

    assert not source.reader._thread.is_alive()


# --- which splits may still give records ---


class Several(BlockingReader):
    """Yields records of several splits, at positions that may say that a split has ended."""

    def __init__(self, *items, in_turn):
        self.items = items
        self.reads_in_turn = in_turn

    def has_ended(self, split):
        return split.position["line"] == "end"

    def read(self):
        for name, position in self.items:
            yield Split(name, {"line": position}), pa.record_batch([[1]], schema=SCHEMA)

    def close(self):
        pass


def seen_open(reader, splits):
    """Which splits are open, at the beginning and behind each batch."""
    woken = threading.Event()
    threaded = ThreadedReader(splits, reader, woken.set)
    seen = [(None, sorted(threaded.open_splits()))]
    while not isinstance(polled := threaded.poll(), EndOfData):
        if isinstance(polled, NothingYet):
            assert woken.wait(LIMIT_SECONDS), "nobody woke the loop"
            woken.clear()
        else:
            seen.append((threaded.polled_split(), sorted(threaded.open_splits())))
    threaded.close()
    return seen


def test_splits_that_are_read_in_turn_have_ended_when_a_later_one_is_read():
    splits = [Split(name, {"line": 0}) for name in "abc"]
    reader = Several(("a", 1), ("c", 1), in_turn=True)

    assert seen_open(reader, splits) == [
        (None, ["a", "b", "c"]),
        ("a", ["a", "b", "c"]),
        ("c", ["c"]),
    ]


def test_splits_that_are_read_side_by_side_end_when_their_position_says_so():
    splits = [Split("a", {"line": 0}), Split("b", {"line": 0}), Split("c", {"line": "end"})]
    reader = Several(("b", 1), ("a", 1), ("b", "end"), in_turn=False)

    assert seen_open(reader, splits) == [
        (None, ["a", "b"]),
        ("b", ["a", "b"]),
        ("a", ["a", "b"]),
        ("b", ["a"]),
    ]


def test_time_waits_for_splits_that_came_together_and_not_for_those_that_came_later(growing):
    source = growing(a=[1], b=[2], c=[3])
    source.add("a", "b")
    source.add("c", is_last=True)
    seen = []
    while isinstance(source.next(), int):
        seen.append((source.reader.polled_split(), sorted(source.reader.open_splits())))

    assert seen == [("a", ["a", "b"]), ("b", ["b"]), ("c", ["c"])]
    assert source.reader.open_splits() == frozenset()
