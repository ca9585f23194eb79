"""Seeing from another thread that a loop does not come back, and from what."""

import threading

import pytest

from stillframe.api.sources import BlockingReader, Split
from stillframe.graph.plan import SubtaskRef
from stillframe.runtime.reading import ThreadedReader
from stillframe.runtime.source_operator import Reading
from stillframe.runtime.task import Turn
from stillframe.runtime.watching import LoopWatch, ReaderWatch
from stillframe.stacks import Frame, Places, called, dumped_frames, innermost_own
from stillframe.testing.clock import ManualClock

LIMIT_SECONDS = 20


class Loop:
    """A thread that calls a function of the user's for one record after the other, in one step."""

    def __init__(self, stuck_timeout_seconds=300.0):
        self.clock = ManualClock()
        self.turn = Turn()
        self.turn.is_working = True
        self._stuck_timeout_seconds = stuck_timeout_seconds
        self._begun, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._begun.acquire(timeout=LIMIT_SECONDS)

    def _run(self):
        self.watch = LoopWatch(self.turn, self.clock, self._stuck_timeout_seconds)
        number = 0
        while not self._is_over:
            number += 1
            run_by_us(self.tidy, {"number": number})

    def tidy(self, record):
        self._begun.release()
        assert self._done.acquire(timeout=LIMIT_SECONDS)

    def next_record(self):
        self._done.release()
        assert self._begun.acquire(timeout=LIMIT_SECONDS)

    def look_after(self, seconds, is_ending=False):
        """As the control thread does: twice a second."""
        for _ in range(round(seconds * 2)):
            self.clock.advance(0.5)
            told = self.watch.look(is_ending=is_ending)
        return told

    def close(self):
        self._is_over = True
        self._done.release()
        self.thread.join(LIMIT_SECONDS)


def call_of_ours():
    """A function whose code is in a file of the package, as the runtime's is."""
    source = "def call(function, record):\n    return function(record)\n"
    made = {}
    exec(compile(source, Places.here().ours + "runtime/somewhere.py", "exec"), made)
    return made["call"]


run_by_us = call_of_ours()


@pytest.fixture
def loop():
    made = []

    def make(**settings):
        made.append(Loop(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_call_that_does_not_return_is_told_with_its_function_its_arguments_and_its_stack(loop):
    hanging = loop()

    assert hanging.look_after(9.5) is None
    told = hanging.look_after(3)

    assert told.code == "function Loop.tidy"
    assert told.called_with == "record={'number': 1}"
    assert "assert self._done.acquire" in told.stack
    assert 11 <= told.seconds <= 13


def test_a_function_that_is_slow_with_each_of_many_records_does_not_hang(loop):
    slow = loop()

    for _ in range(20):
        assert slow.look_after(8) is None
        slow.next_record()


def test_a_loop_that_waits_for_something_to_do_does_not_hang(loop):
    idle = loop()
    idle.turn.is_working = False

    assert idle.look_after(60) is None


def test_a_loop_that_comes_on_does_not_hang(loop):
    busy = loop()

    for _ in range(10):
        assert busy.look_after(8) is None
        busy.turn.steps += 1


def test_what_ends_the_attempt_soon_is_told_sooner_and_at_the_end_at_once(loop):
    assert loop(stuck_timeout_seconds=4.0).look_after(3) is not None
    ending = loop()
    assert ending.look_after(1.5, is_ending=True) is None
    assert ending.look_after(2, is_ending=True) is not None


DUMP = """Timeout (0:00:10)!
Thread 0x00007f0000000010 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
Thread 0x00007f0000000020 (most recent call first):
  File "/usr/lib/python3.11/re/__init__.py", line 166 in match
  File "/home/ann/job.py", line 12 in looks_odd
  File "/home/ann/job.py", line 30 in tidy
  File "/opt/stillframe/runtime/row_functions.py", line 110 in _mapped
  File "/usr/lib/python3.11/runpy.py", line 86 in _run_code
"""
PLACES = Places("/opt/stillframe/", ("/usr/lib/python3.11/",))


def test_the_stack_of_the_loop_is_found_in_what_the_interpreter_dumped():
    frames = dumped_frames(DUMP, 0x7F0000000020)

    assert frames[called(frames, PLACES)] == Frame("/home/ann/job.py", 30, "tidy")
    assert innermost_own(frames, PLACES) == "/home/ann/job.py:12 in looks_odd"


def test_a_stack_without_the_users_code_has_no_call_of_it():
    frames = dumped_frames(DUMP, 0x7F0000000010)

    assert called(frames, PLACES) is None
    assert innermost_own(frames, PLACES) is None


# --- readers in threads of their own ---


class Stubborn(BlockingReader):
    """Comes back only when a test says so."""

    def __init__(self, takes_splits):
        self.takes_splits = takes_splits
        self.waits, self.comes_back = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = False

    def read(self):
        while not self.is_over:
            self.waits.release()
            assert self.comes_back.acquire(timeout=LIMIT_SECONDS)
            yield None

    def interrupt(self):
        self.is_over = True
        self.comes_back.release()

    def close(self):
        pass


class WatchedReader:
    """As much of a source's subtask as is looked at."""

    name, head_uid = "source topic", "topic"
    ref = SubtaskRef(0, 1)

    def __init__(self, takes_splits):
        self.clock = ManualClock()
        self.stubborn = Stubborn(takes_splits)
        self.reader = ThreadedReader([Split("a", {})], self.stubborn, lambda: None, "topic")
        self.reading = Reading("topic", 1, self.reader, name="topic")
        self.watch = ReaderWatch(self.clock, 300.0)
        assert self.stubborn.waits.acquire(timeout=LIMIT_SECONDS)

    @property
    def reader_at_work(self):
        return self.reading.reader_at_work

    def come_back(self):
        self.stubborn.comes_back.release()
        assert self.stubborn.waits.acquire(timeout=LIMIT_SECONDS)

    def look_after(self, seconds):
        for _ in range(round(seconds * 2)):
            self.clock.advance(0.5)
            told = self.watch.look([self])
        return told


@pytest.fixture
def reader():
    made = []

    def make(takes_splits):
        made.append(WatchedReader(takes_splits))
        return made[-1]

    yield make
    for each in made:
        each.reader.close()


@pytest.mark.parametrize(
    ("takes_splits", "says"), [(True, "has not returned"), (False, "has given nothing")]
)
def test_a_reader_that_does_not_come_back_is_told_with_its_source_and_its_line(
    reader, takes_splits, says
):
    watched = reader(takes_splits)

    assert watched.look_after(9) is None
    told = watched.look_after(3)
    assert str(told).startswith("source topic (")
    assert f"in Stubborn.read) {says} for 1" in str(told)
    assert (told.task, told.subtask, told.operator) == ("source topic", 1, "topic")
    assert told.may_wait == (not takes_splits), "which may only be waiting for records"


def test_a_reader_that_comes_back_now_and_then_does_not_hang(reader):
    watched = reader(True)

    for _ in range(5):
        assert watched.look_after(8) is None
        watched.come_back()
