"""Splits that are found while a job runs: who gets them, and what a checkpoint keeps of it."""

from random import Random

import pytest

from stillframe.protocol import enumeration
from stillframe.protocol.enumeration import Ask, Assign, Enumeration, EnumeratorState


def split(name):
    return {"id": name, "position": {"next": 0}}


def splits(*names):
    return tuple(split(name) for name in names)


def found(count, is_last=False):
    return EnumeratorState({"found": count}, is_last)


class Source:
    """An enumeration that has been asked for the first time."""

    def __init__(self, held=((), ()), restored=EnumeratorState(), stops=False):  # noqa: B008 - frozen
        self.enumeration = Enumeration(2.0, restored, held, stops=stops)
        self.first = self.enumeration.on_running()

    def discovers(self, *names, is_last=False, at=0.0):
        return self.enumeration.on_discovered(splits(*names), found(len(names), is_last), at)


def test_it_asks_as_soon_as_all_subtasks_run_and_not_before():
    source = Enumeration(2.0, EnumeratorState(), ((), ()))

    assert source.wake_at_seconds() is None
    assert source.on_time(100.0) == []
    assert source.on_running() == [Ask()]


def test_subtasks_that_are_said_to_run_twice_are_asked_for_once():
    source = Source()

    assert source.first == [Ask()]
    assert source.enumeration.on_running() == []


def test_the_next_question_comes_an_interval_after_the_answer():
    source = Source()
    assert source.enumeration.wake_at_seconds() is None, "it was asked and has not answered"
    source.discovers("a", at=10.0)

    assert source.enumeration.wake_at_seconds() == 12.0
    assert source.enumeration.on_time(11.9) == []
    assert source.enumeration.on_time(12.0) == [Ask()]
    assert source.enumeration.on_time(12.1) == [], "one question at a time"


def test_splits_go_to_the_subtask_that_was_given_the_fewest():
    source = Source(held=(("r1", "r2"), ("r3",), ()))

    assert source.discovers("a", "b", "c", "d") == [
        Assign(0, splits("d"), False),
        Assign(1, splits("b"), False),
        Assign(2, splits("a", "c"), False),
    ]


def test_a_subtask_that_gets_nothing_is_told_nothing():
    assert Source().discovers("a") == [Assign(0, splits("a"), False)]
    assert Source().discovers() == []


def test_the_end_is_told_to_every_subtask_and_nobody_is_asked_again():
    source = Source()

    assert source.discovers("a", is_last=True, at=1.0) == [
        Assign(0, splits("a"), True),
        Assign(1, (), True),
    ]
    assert source.enumeration.wake_at_seconds() is None
    assert source.enumeration.on_time(1e9) == []


def test_a_split_that_comes_again_is_passed_over():
    source = Source(held=(("r1",), ()))
    source.discovers("a")
    source.enumeration.on_time(1e9)

    assert source.discovers("r1", "a", "b") == [Assign(0, splits("b"), False)]


def test_many_splits_go_in_several_orders_of_which_only_the_last_says_that_it_is(monkeypatch):
    monkeypatch.setattr(enumeration, "SPLITS_PER_ORDER_MAX", 2)
    source = Source(held=((),))

    assert source.discovers("a", "b", "c", is_last=True) == [
        Assign(0, splits("a", "b"), False),
        Assign(0, splits("c"), True),
    ]


def test_a_snapshot_does_not_know_what_is_found_after_it():
    source = Source()
    source.discovers("a")
    source.enumeration.on_time(1e9)

    before = source.enumeration.snapshot()
    source.discovers("b", "c", is_last=True)

    assert before == found(1)
    assert source.enumeration.snapshot() == found(2, is_last=True)


def test_a_job_restored_after_the_last_discovery_tells_the_end_without_asking():
    source = Source(held=(("a",), ("b",)), restored=found(2, is_last=True))

    assert source.first == [Assign(0, (), True), Assign(1, (), True)]
    assert source.enumeration.snapshot() == found(2, is_last=True)


def test_a_job_that_stops_at_what_is_there_is_told_so_with_the_first_answer_and_asks_no_more():
    source = Source(stops=True)

    assert source.discovers("a", at=1.0) == [
        Assign(0, splits("a"), True, stops=True),
        Assign(1, (), True, stops=True),
    ]
    assert source.enumeration.wake_at_seconds() is None
    assert source.enumeration.snapshot() == found(1), "more may be there at the next start"


def test_a_job_that_is_started_again_asks_again_for_what_is_there_then():
    source = Source(held=(("a",), ()), restored=found(1), stops=True)

    assert source.first == [Ask()]
    assert source.discovers("b") == [
        Assign(0, (), True, stops=True),
        Assign(1, splits("b"), True, stops=True),
    ]


def test_splits_that_are_the_last_of_all_end_also_a_job_that_stops():
    source = Source(stops=True)

    assert source.discovers("a", is_last=True) == [
        Assign(0, splits("a"), True),
        Assign(1, (), True),
    ]


@pytest.mark.parametrize("state", [EnumeratorState(), found(3), found(3, is_last=True)])
def test_what_a_checkpoint_keeps_survives_the_way(state):
    assert EnumeratorState.from_json(state.to_json()) == state


NAMES = [f"s{number}" for number in range(12)]


class OneAttempt:
    """A reader that reads at once and forgets; orders and triggers come to it in one line."""

    def __init__(self, random, kept, read):
        self.random = random
        self.kept = kept
        self.read_at_checkpoint = read
        self.read = list(read)
        self.known = set()
        self.line = []
        self.source = Enumeration(1.0, kept, ((), ()))
        self.now = 0.0
        self.carry_out(self.source.on_running())

    def carry_out(self, instructions):
        for instruction in instructions:
            if isinstance(instruction, Ask):
                self.answer()
            else:
                self.line += [instruction] * self.random.choice([1, 1, 2])

    def answer(self):
        at = (self.source.snapshot().state or {"found": 0})["found"]
        names = NAMES[at : at + self.random.randint(0, 3)]
        after = found(at + len(names), is_last=at + len(names) == len(NAMES))
        self.carry_out(self.source.on_discovered(splits(*names), after, self.now))

    def step(self):
        self.now += self.random.random()
        self.carry_out(self.source.on_time(self.now))
        if self.random.random() < 0.4:
            self.line.append(self.source.snapshot())
        for _ in range(self.random.randint(0, min(3, len(self.line)))):
            self.take(self.line.pop(0))

    def take(self, item):
        match item:
            case Assign(_, assigned):
                names = [each["id"] for each in assigned if each["id"] not in self.known]
                self.known.update(names)
                self.read += names
            case EnumeratorState():
                self.kept, self.read_at_checkpoint = item, list(self.read)

    def is_over(self):
        return self.source.snapshot().is_last and not self.line


@pytest.mark.parametrize("seed", range(200))
def test_wherever_checkpoints_and_restores_fall_every_split_is_read_once(seed):
    random = Random(seed)
    attempt = OneAttempt(random, EnumeratorState(), [])
    for _ in range(4):
        for _ in range(random.randint(0, 12)):
            attempt.step()
        attempt = OneAttempt(random, attempt.kept, attempt.read_at_checkpoint)
    while not attempt.is_over():
        attempt.step()

    assert sorted(attempt.read) == sorted(NAMES)
