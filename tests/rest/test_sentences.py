"""Each sentence about a job, from what its slots and its coordinator tell until it is asked for."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from msgspec.structs import replace
from served_jobs import ServingDriver
from told_jobs import ToldJob, plan_of

from stillframe.coordinator.history import (
    AttemptFailed,
    CheckpointCompleted,
    CheckpointFailed,
    Hanging,
    JobEnded,
    Waiting,
)
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.protocol import messages
from stillframe.protocol.diagnosis import Code
from stillframe.protocol.figures import Moment, Triggered
from stillframe.protocol.measures import Measured, SubtaskMeasures, TimeShares
from stillframe.protocol.messages import Progress, SourceLag
from stillframe.protocol.snapshots import SubtaskTimings
from stillframe.protocol.statistics import TaskShape
from stillframe.rest import answers

IDLE = (0.1, 0.0, 500)


@pytest.fixture(scope="module")
def told_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingDriver]:
    made = ServingDriver(tmp_path_factory.mktemp("told"))
    yield made
    made.close()


def report(job: ToldJob, *subtasks: tuple[float, float, int], **of_slot: Any) -> None:
    """Two reports of each slot, a second apart; of each subtask, one task after the other: the
    shares of its time that it works and waits for room, and its records a second."""
    for second in (1, 2):
        for slot in range(job.plan.slots):
            parts = tuple(
                _measures(task.index, slot, second, *subtasks[task.index * job.plan.slots + slot])
                for task in job.plan.tasks
            )
            known = Measured(time.time_ns() // 1_000_000, parts, 2_000_000_000, 1.0)
            job.history.note_measures(SlotIndex(slot), replace(known, **of_slot))


def _measures(
    task: int, slot: int, second: int, works: float, waits: float, rate: int
) -> SubtaskMeasures:
    spent = [int(share * second * 1e9) for share in (works, waits, 1 - works - waits)]
    shares = TimeShares(spent[0], 0, spent[1], 0, spent[2])
    records = rate * second
    return SubtaskMeasures(
        task, SubtaskIndex(slot), records, records, 0, 0, shares, 1_000_000 * (2 - slot), 0, 0
    )


def trigger(job: ToldJob, number: int, seconds_ago: float) -> tuple[TaskShape, ...]:
    now = job.history.now()
    shapes = tuple(
        TaskShape(answers.task_vertex(task), task.name, task.parallelism) for task in job.plan.tasks
    )
    began = Moment(now.wall_ms - int(seconds_ago * 1000), now.monotonic_seconds - seconds_ago)
    job.history.note_triggered(
        Triggered(CheckpointId(number), Attempt(1), "CHECKPOINT", shapes, began)
    )
    return shapes


def given_up(job: ToldJob) -> None:
    job.history.tell(JobEnded("failed"))


def ended(job: ToldJob) -> None:
    job.history.tell(JobEnded("stopped"))


def restarting(job: ToldJob) -> None:
    job.history.tell(AttemptFailed(Attempt(1), "slot 0 was lost", 1.0))


def stuck(job: ToldJob) -> None:
    hanging = messages.Hanging(12.0, "function tidy", None, "")
    job.history.begin("slot 1", Hanging(SlotIndex(1), hanging))


def waiting(job: ToldJob) -> None:
    job.history.begin("slot 1 silent", Waiting("slot 1 (pid 7) has sent nothing for 9 s"))


def checkpoints_fail(job: ToldJob) -> None:
    for number in (1, 2, 3):
        trigger(job, number, 1.0)
        job.history.tell(CheckpointFailed(CheckpointId(number), "the disk is full"))


def checkpoint_waits(job: ToldJob) -> None:
    trigger(job, 1, 5.0)


def storage_slow(job: ToldJob) -> None:
    for shape in trigger(job, 1, 10.0):
        for subtask in range(shape.parallelism):
            timings = SubtaskTimings(
                task=shape.name, subtask=SubtaskIndex(subtask), start_delay_ms=1.0,
                alignment_ms=1.0, sync_ms=1.0, async_ms=9_000.0, bytes_written=1, state_bytes=1,
                in_flight_bytes=0,
            )  # fmt: skip
            job.history.note_acknowledged(CheckpointId(1), shape.vertex, timings)
    done = CheckpointCompleted(CheckpointId(1), Epoch(1), Attempt(1), 0, 10_000.0, 1, (), 0, 0)
    job.history.tell(done)


def bottleneck(job: ToldJob) -> None:
    report(job, (0.2, 0.7, 500), (0.2, 0.7, 500), IDLE, (0.97, 0.0, 500))


def read(job: ToldJob, second: int, lag: int, watermark_us: int) -> None:
    lags = (SourceLag(OperatorUid("task-0"), "clicks", lag, None),)
    told = Progress(10 * second, 0, watermark_us=watermark_us, lags=lags)
    job.history.report_progress(SlotIndex(0), told, float(second))


def lag_grows(job: ToldJob) -> None:
    for second in range(1, 5):
        read(job, second, 1_000 * second, second)


def time_stands_still(job: ToldJob) -> None:
    report(job, *4 * (IDLE,))
    for second in range(1, 91):
        read(job, second, 0, 7)


def skew(job: ToldJob) -> None:
    report(job, IDLE, IDLE, (0.1, 0.0, 1_900), (0.5, 0.0, 4_000))


def memory(job: ToldJob) -> None:
    report(job, *4 * (IDLE,), memory=(90_000_000, 8_000_000_000))


def clocks_differ(job: ToldJob) -> None:
    behind = time.time_ns() // 1_000_000 - 2_000
    for _ in range(6):
        report(job, *4 * (IDLE,), at_ms=behind)


def keeps_up(job: ToldJob) -> None:
    report(job, *4 * (IDLE,), memory=(4_000_000_000, 8_000_000_000))
    for second in range(1, 91):
        read(job, second, 0, second)


HOW: dict[str, tuple[Callable[[ToldJob], None], str]] = {
    "given-up": (given_up, "It has failed"),
    "ended": (ended, "It has ended."),
    "restarting": (restarting, "slot 0 was lost"),
    "stuck": (stuck, "Function tidy has not returned for 12 s"),
    "waiting": (waiting, "Slot 1 (pid 7) has sent nothing for 9 s."),
    "checkpoints-failing": (checkpoints_fail, "The last 3 checkpoints failed"),
    "checkpoint-waits": (checkpoint_waits, "Checkpoint 1 waits for task 1 0 since 5 s"),
    "storage-slow": (storage_slow, "Writing takes 9.0 s of the 10.0 s"),
    "bottleneck": (bottleneck, "task 1 1 is the bottleneck: it works 97% of the time"),
    "lag-grows": (lag_grows, "4,000 records wait, 1,000 before"),
    "time-stands-still": (
        time_stands_still,
        "has not moved for 89 s although records come: task 0 1, or one of its splits,",
    ),
    "skew": (skew, "task 1 1 gets 4,000 records a second, the others about 1,900"),
    "memory": (memory, "Memory is short on vm: slot 0 takes 2,000 MB there, and 90 MB are left."),
    "clocks-differ": (clocks_differ, "of slot 0 and of the driver differ by 2."),
    "keeps-up": (keeps_up, "It keeps up with its sources."),
}


def diagnosis_of(driver: ServingDriver, job: str) -> Any:
    with urllib.request.urlopen(f"{driver.url}/jobs/{job}/diagnosis", timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize("code", HOW)
def test_a_job_says_it_when_it_is_told_what_it_is_made_from(told_by, code):
    tell, sentence = HOW[code]
    name = f"job-{code}"
    tell(ToldJob.of(told_by, plan_of(name, [(0, 1)], 2, 2)))

    said = diagnosis_of(told_by, name)

    assert said["code"] == code, said
    assert sentence in said["sentence"]


def test_a_job_whose_slots_are_not_there_is_starting(told_by):
    told_by.prepare("not-yet")

    assert diagnosis_of(told_by, "not-yet")["code"] == "starting"


def test_no_sentence_is_left_out():
    # That of a job without a driver is seen where a driver is killed (`tests/cli/test_control.py`).
    assert {*HOW, "starting", "no-driver"} == set(get_args(Code))
