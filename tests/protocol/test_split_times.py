"""Event time at a source, by its splits."""

from __future__ import annotations

import random

import pytest

from stillframe.protocol.event_time import AdvanceTime, BecomeIdle
from stillframe.protocol.split_times import OpenSplits, SplitTimes


class Reading:
    """A source that reads from these splits; what its records say of time."""

    def __init__(self, *splits, times=None, listens=False):
        self.times = times or SplitTimes()
        self.open = frozenset(splits)
        self.listened_seconds = 0.0 if listens else None
        self.said = []
        self._tell(None)

    def read(self, split, time_us=None, *, ends=False):
        """Records of a split came, or only nulls."""
        if ends:
            self.open -= {split}
        self._tell(split)
        if time_us is not None:
            self.said += self.times.on_time(time_us)
        self._tell(None)

    def change(self, *splits):
        self.open = frozenset(splits)
        self._tell(None)

    def listen(self, seconds):
        self.listened_seconds += seconds
        self._tell(None)

    def take(self):
        said, self.said = self.said, []
        return said

    def _tell(self, polled):
        self.said += self.times.on_splits(OpenSplits(self.open, polled, self.listened_seconds))


def test_time_is_as_far_as_the_slowest_split():
    reading = Reading("a", "b")
    reading.read("a", 500)
    assert reading.take() == []
    reading.read("b", 20)
    assert reading.take() == [AdvanceTime(20)]


def test_a_split_that_has_ended_does_not_count():
    reading = Reading("a", "b")
    reading.read("a", 500)
    reading.read("b", 20, ends=True)
    assert reading.take() == [AdvanceTime(20), AdvanceTime(500)]


def test_files_that_are_read_one_after_the_other_are_never_late_whatever_their_order():
    reading = Reading("new", "old")
    reading.read("new", 500)
    reading.read("new", 600, ends=True)
    assert reading.take() == []
    reading.read("old", 20)
    assert reading.take() == [AdvanceTime(20)]
    reading.read("old", 30, ends=True)
    assert reading.take() == [AdvanceTime(30), AdvanceTime(600)]


def test_a_split_that_was_discovered_counts_from_then_on():
    reading = Reading("a")
    reading.read("a", 50)
    reading.change("a", "b")
    reading.read("a", 90)
    assert reading.take() == [AdvanceTime(50)]
    reading.read("b", 40)
    reading.read("b", 70)
    assert reading.take() == [AdvanceTime(70)], "it does not turn time back"


def test_a_source_that_does_not_tell_its_splits_has_one():
    times = SplitTimes()
    assert times.on_time(50) == [AdvanceTime(50)]
    assert times.on_time(40) == []
    assert times.time_of("a") is None


def test_a_split_from_which_no_time_came_for_long_does_not_hold_time_back():
    reading = Reading("a", "b", times=SplitTimes(idle_timeout_seconds=10), listens=True)
    reading.listen(9)
    reading.read("a", 50)
    reading.read("b")  # filtered away, or without an event time
    assert reading.take() == []
    reading.listen(1)
    assert reading.take() == [AdvanceTime(50)]
    reading.read("b", 45)
    reading.read("a", 60)
    assert reading.take() == [], "it counts again"


def test_a_source_all_of_whose_splits_are_silent_is_idle_and_as_far_as_the_furthest():
    reading = Reading("a", "b", times=SplitTimes(idle_timeout_seconds=10), listens=True)
    reading.read("b", 20)
    reading.read("a", 50)
    reading.take()
    reading.listen(10)
    assert reading.take() == [AdvanceTime(50), BecomeIdle()]
    reading.listen(10)
    assert reading.take() == []


def test_a_split_that_waits_for_its_turn_is_not_idle():
    reading = Reading("a", "b", times=SplitTimes(idle_timeout_seconds=0.001))
    for moment in range(100):
        reading.read("a", moment)
    assert reading.take() == []


# --- after a restore -------------------------------------------------------------------------


def test_splits_go_on_where_they_were_wherever_they_are_read_now():
    reading = Reading("a", "b")
    reading.read("a", 500)
    reading.read("b", 20)
    kept = {split: reading.times.time_of(split) for split in ("a", "b")}

    both = Reading("a", "b", times=SplitTimes(20, kept))
    assert both.times.time_us == 20
    both.read("b", 700)
    assert both.take() == [AdvanceTime(500)]
    alone = Reading("a", times=SplitTimes(20, kept))
    assert alone.take() == [AdvanceTime(500)]


def test_a_split_is_restored_with_what_was_promised_of_all():
    reading = Reading("a", "b")
    reading.read("a", 500)
    reading.read("b", 400)
    reading.change("a", "b", "c")
    reading.read("c", 10)
    kept = {split: reading.times.time_of(split) for split in ("a", "b", "c", "d")}

    assert kept == {"a": 500, "b": 400, "c": 400, "d": 400}, "what is older was late already"


def test_a_split_that_had_given_nothing_holds_time_back_again():
    reading = Reading("a", "b")
    reading.read("a", 500)
    kept = {"a": reading.times.time_of("a")}
    assert reading.times.time_of("b") is None

    again = Reading("a", "b", times=SplitTimes(None, kept))
    again.read("a", 600)
    assert again.take() == []


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_late_in_splits_that_are_in_order_however_they_are_read_and_restored(seed):
    chance = random.Random(seed)
    ends = {f"s{n}": chance.randrange(1, 40) for n in range(chance.randrange(1, 6))}
    at = dict.fromkeys(ends, 0)
    reading = Reading(*ends)
    while any(at[split] < ends[split] for split in ends):
        split = chance.choice([each for each in ends if at[each] < ends[each]])
        at[split] += 1
        time_us = reading.times.time_us
        assert time_us is None or time_us <= at[split]
        reading.read(split, at[split], ends=at[split] == ends[split])
        if chance.random() < 0.1:
            kept = {each: reading.times.time_of(each) for each in reading.open}
            kept = {each: time for each, time in kept.items() if time is not None}
            restored = SplitTimes(reading.times.time_us, kept)
            reading = Reading(*reading.open, times=restored)
    said = [each.time_us for each in reading.said]
    assert said == sorted(set(said))
    assert reading.times.time_us >= min(ends.values())
