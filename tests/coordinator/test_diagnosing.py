"""Whom a checkpoint waits for, by what slots have told."""

from __future__ import annotations

import pytest
from told_jobs import plan_of

from stillframe.coordinator.diagnosing import job_now
from stillframe.coordinator.history import History
from stillframe.ids import Attempt, CheckpointId, SlotIndex, SubtaskIndex
from stillframe.protocol.figures import Triggered
from stillframe.protocol.measures import Aligning, Measured, SubtaskMeasures, TimeShares
from stillframe.protocol.statistics import TaskShape
from stillframe.testing.clock import ManualClock

PLAN = plan_of("views", [(0, 1), (1, 2)], 3, 2)
NUMBER = CheckpointId(7)


@pytest.fixture
def history():
    """Nobody has answered checkpoint 7 yet."""
    made = History(clock=ManualClock())
    shapes = tuple(TaskShape(f"v{task.index}", task.name, 2) for task in PLAN.tasks)
    made.note_triggered(Triggered(NUMBER, Attempt(1), "CHECKPOINT", shapes, made.now()))
    return made


def tell(history, aligning):
    """By task and subtask: what it waits for."""
    parts = tuple(
        SubtaskMeasures(
            task, SubtaskIndex(subtask), 0, 0, 0, 0, TimeShares(0, 0, 0, 0, 0), None, 0, 0,
            aligning=waits,
        )
        for (task, subtask), waits in aligning.items()
    )  # fmt: skip
    history.note_measures(SlotIndex(0), Measured(0, parts))


def waits_for(history):
    now = job_now("RUNNING", "", PLAN, history, history.kept().statistics())
    waits = now.checkpoint
    return waits.task, waits.subtask, waits.senders or waits.what


def missing(*places, checkpoint=NUMBER, channels=2):
    return Aligning(checkpoint, 1, channels, 0, places)


def test_the_first_that_waits_for_a_barrier_is_named_with_its_channel(history):
    tell(
        history,
        {(2, 0): missing(("1-2", 1)), (1, 1): missing(("0-1", 0)), (2, 1): missing(("1-2", 1))},
    )

    assert waits_for(history) == ("task 1", 1, "task 0 0")


def test_of_many_channels_some_are_named(history):
    tell(history, {(1, 0): missing(*(("0-1", of) for of in range(8)), channels=64)})

    assert waits_for(history) == ("task 1", 0, "task 0 0, task 0 1, task 0 2, …")


def test_who_waits_for_barriers_of_another_checkpoint_is_not_named(history):
    tell(history, {(1, 1): missing(("0-1", 0), checkpoint=CheckpointId(6))})

    assert waits_for(history) == ("task 2", 0, "its barrier has not come")
