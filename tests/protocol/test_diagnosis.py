"""One sentence of a job's figures: each code once, and which of several is said."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from stillframe.protocol.diagnosis import (
    CheckpointWaits,
    Code,
    EventTimeSeen,
    JobNow,
    LastCheckpoint,
    SlotMemory,
    SubtaskNow,
    TaskNow,
    diagnose,
    subtask_now,
)
from stillframe.protocol.measures import SubtaskMeasures, TimeShares

RUNNING = JobNow("RUNNING")


def task(name, *subtasks, inputs=()):
    """Each subtask: working, backpressured, records a second."""
    made = (
        SubtaskNow(index, working, back, 0.0, rate)
        for index, (working, back, rate) in enumerate(subtasks)
    )
    return TaskNow(name, tuple(made), inputs)


CLICKS = task("clicks", (0.3, 0.6, 20_000), (0.3, 0.6, 20_000))
BUSY = [
    CLICKS,
    task("count", (0.9, 0.0, 20_000), (0.97, 0.0, 20_000), inputs=(0,)),
    task("write", (0.1, 0.0, 8_000), inputs=(1,)),
]
SLOW_SINK = [
    CLICKS,
    task("count", (0.2, 0.8, 20_000), (0.85, 0.3, 20_000), inputs=(0,)),
    task("write", (0.9, 0.0, 8_000), inputs=(1,)),
]
WAITS = CheckpointWaits(19, 5.2, "count", 1, "its barrier has not come")

SAID = {
    "no-driver": (JobNow("NO DRIVER"), "No driver runs it"),
    "given-up": (JobNow("FAILED", "the disk is full"), "It has failed: the disk is full"),
    "ended": (JobNow("FINISHED"), "It has ended."),
    "restarting": (JobNow("RESTARTING", "slot 0 was lost"), "It restarts: slot 0 was lost"),
    "starting": (JobNow("INITIALIZING"), "It is starting"),
    "stuck": (
        replace(RUNNING, stuck=["function tidy has not returned for 12 s\n  stack"]),
        "Function tidy has not returned for 12 s.",
    ),
    "waiting": (
        replace(RUNNING, waiting=["slot 1 (pid 7) has sent nothing for 9 s"]),
        "Slot 1 (pid 7) has sent nothing for 9 s.",
    ),
    "checkpoints-failing": (
        replace(RUNNING, failed_in_a_row=3, last_failure="it timed out"),
        "The last 3 checkpoints failed, the last one because it timed out",
    ),
    "checkpoint-waits": (
        replace(RUNNING, checkpoint=WAITS),
        "Checkpoint 19 waits for count 1 since 5 s: its barrier has not come.",
    ),
    "storage-slow": (
        replace(RUNNING, last=LastCheckpoint(10.0, 9.0)),
        "Writing takes 9.0 s of the 10.0 s of a checkpoint: the storage is slow.",
    ),
    "bottleneck": (
        replace(RUNNING, tasks=BUSY),
        "count 1 is the bottleneck: it works 97% of the time, and clicks waits for it.",
    ),
    "lag-grows": (
        replace(RUNNING, lags=[10, 2_000, 5_000]),
        "More comes than it reads: 5,000 records wait, 10 before.",
    ),
    "time-stands-still": (
        replace(RUNNING, still_seconds=90.0),
        "Event time has not moved for 90 s although records come: a source, or one",
    ),
    "skew": (
        replace(RUNNING, tasks=[task("count", (0.5, 0, 9_000), (0.1, 0, 1_000), (0.1, 0, 1_100))]),
        "count 0 gets 9,000 records a second, the others about 1,050",
    ),
    "memory": (
        replace(
            RUNNING,
            memory=[
                SlotMemory(0, "a", 2_000_000_000, 4_000_000_000, 8_000_000_000),
                SlotMemory(1, "b", 7_400_000_000, 300_000_000, 8_000_000_000),
            ],
        ),
        "Memory is short on b: slot 1 takes 7,400 MB there, and 300 MB are left.",
    ),
    "clocks-differ": (
        replace(RUNNING, clocks={0: 0.002, 1: -2.04, 2: 0.3}),
        "The clocks of slot 1 and of the driver differ by 2.0 s",
    ),
    "keeps-up": (RUNNING, "It keeps up with its sources."),
}


def test_every_code_is_looked_at_here():
    assert list(SAID) == list(get_args(Code))


@pytest.mark.parametrize("code", SAID)
def test_each_has_its_sentence(code):
    job, sentence = SAID[code]

    said = diagnose(job)

    assert said.code == code
    assert said.sentence.startswith(sentence)
    assert "\n" not in said.sentence


def test_whose_barriers_a_checkpoint_waits_for_is_said_where_it_is_known():
    said = diagnose(replace(RUNNING, checkpoint=replace(WAITS, senders="clicks 0")))

    sentence = "Checkpoint 19 waits for count 1 since 5 s: it waits for barriers of clicks 0."
    assert said.sentence == sentence
    assert said.arguments["senders"] == "clicks 0"


def test_who_is_blocked_is_not_the_cause():
    said = diagnose(replace(RUNNING, tasks=SLOW_SINK))

    assert said.arguments["task"] == "write"


def test_a_task_that_works_all_the_time_and_for_which_nobody_waits_keeps_up():
    job = replace(RUNNING, tasks=[task("clicks", (1.0, 0.0, 20_000))])

    assert diagnose(job).code == "keeps-up"


def test_what_stops_a_job_is_said_before_what_slows_it():
    job = replace(RUNNING, tasks=BUSY, checkpoint=WAITS, lags=[1, 2, 3])
    assert diagnose(job).code == "checkpoint-waits"
    assert diagnose(replace(job, state="FAILED", reason="x")).code == "given-up"


@pytest.mark.parametrize(
    "nothing",
    [
        {"checkpoint": replace(WAITS, seconds=0.4)},
        {"failed_in_a_row": 2},
        {"last": LastCheckpoint(0.5, 0.45)},
        {"lags": [5, 9, 7]},
        {"still_seconds": 3.0},
        {"tasks": [task("count", (0.3, 0, 9_000), (0.1, 0, 1_000))]},
        {"memory": [SlotMemory(0, "a", 7_000, 600, 8_000)]},
        {"clocks": {0: 0.09, 1: -0.09}},
        {"tasks": [task("count", (0.5, 0, 90), (0.1, 0, 10))]},
    ],
)
def test_what_is_too_small_to_matter_is_not_said(nothing):
    assert diagnose(replace(RUNNING, **nothing)).code == "keeps-up"


def test_of_two_subtasks_one_may_get_more_than_its_share():
    uneven = task("count", (0.5, 0, 1_900), (0.5, 0, 4_000))

    assert diagnose(replace(RUNNING, tasks=[uneven])).arguments["usual"] == 1_900


def test_whose_records_are_oldest_is_said_where_it_is_known():
    job = replace(RUNNING, still_seconds=90.0, furthest_behind=("clicks", 1))

    assert "come: clicks 1, or one of its splits, gives nothing newer." in diagnose(job).sentence
    assert diagnose(job).arguments == {"seconds": 90, "task": "clicks", "subtask": 1}


def seen(*reports):
    """Each: event time, records so far, when."""
    event_time = EventTimeSeen()
    for watermark_us, records, seconds in reports:
        event_time.on_report(watermark_us, records, seconds)
    return event_time.still_seconds


def test_event_time_stands_still_from_its_last_step_to_the_newest_record():
    steps = [(7, 10 * second, 100.0 + second) for second in range(1, 91)]

    assert seen((5, 0, 100.0), *steps) == 89.0
    assert seen((5, 0, 100.0), *steps, (8, 901, 191.0)) is None
    assert seen((5, 0, 100.0), *steps, (8, 901, 191.0), (8, 902, 192.0)) == 1.0


def test_where_no_records_come_or_nobody_tells_event_time_it_may_stand():
    assert seen((7, 10, 0.0), *((7, 10, float(second)) for second in range(1, 90))) is None
    assert seen((7, 10, 0.0), (7, 20, 50.0), (7, 20, 56.0)) is None
    assert seen((None, 10, 0.0), (None, 20, 90.0)) is None


def test_shares_and_rates_are_those_between_two_reports():
    earlier = SubtaskMeasures(0, 1, 1_000, 0, 0, 0, TimeShares(10, 10, 10, 10, 10), None, 0, 0)
    spent = TimeShares(10 + 10**9, 10 + 10**9, 10 + 10**9, 10, 10 + 10**9)
    later = SubtaskMeasures(0, 1, 9_000, 0, 0, 0, spent, None, 0, 0)

    assert subtask_now(earlier, later) == SubtaskNow(1, 0.5, 0.25, 0.0, 2_000.0)
    assert subtask_now(later, later) is None
