"""Event time at a task with several inputs."""

from __future__ import annotations

import random

import pytest

from stillframe.protocol.event_time import END_OF_TIME_US, AdvanceTime, BecomeIdle, EventTime


def test_time_is_as_far_as_the_slowest_channel():
    time = EventTime([0, 1])
    assert time.on_watermark(0, 50) == []
    assert time.on_watermark(1, 20) == [AdvanceTime(20)]
    assert time.on_watermark(1, 70) == [AdvanceTime(50)]
    assert time.time_us == 50


def test_a_watermark_that_changes_nothing_is_not_passed_on():
    time = EventTime([0, 1])
    time.on_watermark(0, 50)
    time.on_watermark(1, 20)
    assert time.on_watermark(0, 60) == []
    assert time.on_watermark(1, 20) == []


def test_a_channel_never_goes_back():
    time = EventTime([0])
    assert time.on_watermark(0, 50) == [AdvanceTime(50)]
    assert time.on_watermark(0, 10) == []
    assert time.on_watermark(0, 51) == [AdvanceTime(51)]


def test_an_idle_channel_does_not_hold_time_back():
    time = EventTime([0, 1])
    time.on_watermark(0, 50)
    assert time.on_idle(1) == [AdvanceTime(50)]


def test_a_channel_that_wakes_up_holds_time_where_it_is_and_does_not_turn_it_back():
    time = EventTime([0, 1])
    time.on_watermark(0, 50)
    time.on_idle(1)
    assert time.on_watermark(1, 30) == []
    assert time.time_us == 50
    assert time.on_watermark(0, 60) == []
    assert time.on_watermark(1, 55) == [AdvanceTime(55)]


def test_a_task_whose_channels_are_all_idle_says_so_once():
    time = EventTime([0, 1])
    assert time.on_idle(0) == []
    assert time.on_idle(1) == [BecomeIdle()]
    assert time.on_idle(1) == []
    time.on_active(0)
    assert time.on_idle(0) == [BecomeIdle()]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_when_all_are_idle_time_is_that_of_the_furthest_whichever_fell_silent_first(order):
    time = EventTime([0, 1])
    time.on_watermark(0, 20)
    time.on_watermark(1, 50)
    said = [each for channel in order for each in time.on_idle(channel)]
    assert said == [AdvanceTime(50), BecomeIdle()]


def test_time_ends_when_all_channels_have_ended():
    time = EventTime([0, 1])
    time.on_watermark(0, 5)
    assert time.on_watermark(1, END_OF_TIME_US) == [AdvanceTime(5)]
    assert time.on_watermark(0, END_OF_TIME_US) == [AdvanceTime(END_OF_TIME_US)]


def test_a_restored_task_does_not_begin_before_the_time_it_had_reached():
    time = EventTime([0, 1], restored_us=100)
    assert time.on_watermark(0, 40) == []
    assert time.on_watermark(1, 40) == []
    assert time.time_us == 100
    time.on_watermark(0, 120)
    assert time.on_watermark(1, 110) == [AdvanceTime(110)]


@pytest.mark.parametrize("seed", range(50))
def test_time_never_goes_back_whatever_comes(seed):
    chance = random.Random(seed)
    time = EventTime(range(3))
    said = []
    newest = dict.fromkeys(range(3), -1)
    for _ in range(200):
        channel = chance.randrange(3)
        if chance.random() < 0.2:
            made = time.on_idle(channel)
        else:
            moment = chance.randrange(1000)
            newest[channel] = max(newest[channel], moment)
            made = time.on_watermark(channel, moment)
        said += [each.time_us for each in made if isinstance(each, AdvanceTime)]
    assert said == sorted(set(said))
    assert all(moment <= max(newest.values()) for moment in said)


# --- channels that come and go ---------------------------------------------------------------


def test_a_channel_that_was_opened_holds_time_back_before_anything_came_on_it():
    time = EventTime(["a"])
    time.on_watermark("a", 50)
    assert time.on_change((), {"b": None}) == []
    assert time.on_watermark("a", 60) == []
    assert time.on_watermark("b", 55) == [AdvanceTime(55)]


def test_a_channel_that_was_closed_does_not_count_any_more():
    time = EventTime(["a", "b"])
    time.on_watermark("a", 50)
    assert time.on_change(["b"], {}) == [AdvanceTime(50)]


def test_what_is_opened_counts_before_what_is_closed_lets_time_go():
    time = EventTime(["a", "b"])
    time.on_watermark("a", 50)
    assert time.on_change(["b"], {"c": None}) == []


def test_when_all_channels_are_closed_time_is_that_of_the_furthest():
    time = EventTime(["a", "b"])
    time.on_watermark("a", 50)
    time.on_watermark("b", 20)
    assert time.on_change(["a"], {}) == []
    assert time.on_change(["b"], {}) == [AdvanceTime(50)]
    assert time.on_change((), {"c": None}) == []
    assert time.on_watermark("c", 60) == [AdvanceTime(60)]


@pytest.mark.parametrize("is_idle_first", [True, False])
def test_a_task_of_which_only_idle_channels_are_left_is_idle_and_as_far_as_the_furthest(
    is_idle_first,
):
    time = EventTime(["idle", "ended"])
    said = time.on_idle("idle") if is_idle_first else []
    said += time.on_watermark("ended", 50)
    said += time.on_change(["ended"], {})
    said += time.on_idle("idle") if not is_idle_first else []
    assert said == [AdvanceTime(50), BecomeIdle()], "not at its end: what is idle may go on"
    assert time.on_watermark("idle", 60) == [AdvanceTime(60)]


def test_a_channel_that_was_idle_when_it_was_closed_leaves_nothing_behind():
    time = EventTime(["a", "b"])
    time.on_watermark("a", 50)
    time.on_idle("b")
    assert time.on_change(["b"], {"c": None}) == []
    assert time.on_idle("a") == []
    assert time.on_idle("c") == [BecomeIdle()]


# --- streams: where each input counts for itself ---------------------------------------------


def test_a_stream_that_rests_holds_time_where_it_has_come():
    time = EventTime([0, 1, 2], stream_of={0: 0, 1: 1, 2: 1})
    time.on_watermark(0, 20)
    assert time.on_idle(0) == [], "of the other stream nothing is known"
    assert time.on_watermark(1, 50) == []
    assert time.on_idle(2) == [AdvanceTime(20)], "the slowest stream"
    assert time.on_watermark(1, 70) == []
    assert time.on_idle(1) == [BecomeIdle()]
    assert time.time_us == 20
    assert time.on_watermark(0, 60) == [AdvanceTime(60)]


def test_a_stream_has_come_as_far_as_the_furthest_of_its_channels_when_all_rest():
    time = EventTime([0, 1, 2], stream_of={0: 0, 1: 0, 2: 1})
    time.on_watermark(0, 20)
    time.on_watermark(1, 50)
    time.on_watermark(2, 90)
    assert [time.on_idle(0), time.on_idle(1)] == [[AdvanceTime(50)], []]
    assert time.on_idle(2) == [BecomeIdle()]


def test_a_stream_of_which_nothing_came_holds_time_as_long_as_it_rests():
    time = EventTime([0, 1], stream_of={0: 0, 1: 1})
    time.on_watermark(0, 20)
    assert time.on_idle(1) == []
    assert time.on_idle(0) == [BecomeIdle()]
    assert time.time_us is None


def test_a_stream_that_has_ended_holds_time_where_it_ended_among_those_that_rest():
    time = EventTime([0, 1], stream_of={0: 0, 1: 1})
    time.on_watermark(0, 20)
    time.on_watermark(1, 50)
    assert time.on_change([0], {}) == []
    assert time.on_watermark(1, 70) == []
    assert time.time_us == 20
