"""Readers that block, in a thread of their own."""

import threading

import pyarrow as pa
import pytest

from stillframe.api.sources import BlockingReader, EndOfData, NothingYet, Split
from stillframe.errors import DataError
from stillframe.runtime.reading import ThreadedReader

SCHEMA = pa.schema([("id", pa.int64())])
LIMIT_SECONDS = 20


class Lines(BlockingReader):
    """Yields what it is told, waiting where it is told."""

    def __init__(self, *items):
        self.items = items
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
                    Split("file", {"line": item}),
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


def test_closing_ends_the_thread_even_when_nobody_polls(threaded):
    source = threaded(*range(1000))
    source.next()

    source.reader.close()

    assert source.lines.is_closed
