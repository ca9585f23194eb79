"""The killer, on real processes: when it may kill, whom, and that a seed says it all."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stillframe.cli.kills import WAIT_SECONDS_MAX, Kill, Killer, planned_kills
from stillframe.clock import SystemClock
from stillframe.coordinator.history import (
    AttemptFailed,
    CheckpointCompleted,
    JobEnded,
    SlotsRunning,
)
from stillframe.ids import Attempt, CheckpointId, Epoch

WAIT_SECONDS = 90.0


@pytest.fixture
def slots() -> Iterator[list[subprocess.Popen[bytes]]]:
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    processes = [subprocess.Popen(sleep) for _ in range(4)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def completed(attempt: int = 1) -> CheckpointCompleted:
    return CheckpointCompleted(
        CheckpointId(1), Epoch(0), Attempt(attempt), 0, 1.0, 1, (), records_in=1, records_out=1
    )


def running(attempt: int, *processes: subprocess.Popen[bytes]) -> SlotsRunning:
    return SlotsRunning(Attempt(attempt), tuple(process.pid for process in processes))


def stays_alive(slot: subprocess.Popen[bytes]) -> bool:
    """Given time enough for a killer that acts at once."""
    try:
        slot.wait(0.3)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_the_same_seed_plans_the_same_kills_and_another_seed_others():
    assert planned_kills(10, 7) == planned_kills(10, 7)
    assert planned_kills(10, 7) != planned_kills(10, 8)
    assert planned_kills(10, 7)[:3] == planned_kills(3, 7)


def test_some_kills_come_at_the_instant_of_a_checkpoint_and_none_too_late():
    waits = [kill.wait_seconds for kill in planned_kills(200, 1)]
    assert 20 < waits.count(0.0) < 80
    assert max(waits) <= WAIT_SECONDS_MAX


def test_a_slot_is_killed_in_every_attempt_that_has_completed_a_checkpoint(slots):
    killed: list[tuple[int, int]] = []
    killer = Killer(
        [Kill(0.9, 0.0), Kill(0.0, 0.0)], SystemClock(), lambda *who: killed.append(who)
    )
    killer.start()
    killer.on_event(running(1, slots[0], slots[1]))
    killer.on_event(completed(1))
    assert slots[1].wait(WAIT_SECONDS) == -signal.SIGKILL
    killer.on_event(AttemptFailed(Attempt(1), "slot 1 was lost", 0.1))
    killer.on_event(running(2, slots[2], slots[3]))
    killer.on_event(completed(2))
    killer.join(WAIT_SECONDS)
    assert killed == [(1, slots[1].pid), (0, slots[2].pid)]
    assert killer.done == 2
    assert slots[0].poll() is None
    assert slots[3].poll() is None


def test_before_the_first_checkpoint_of_an_attempt_nobody_is_killed(slots):
    killer = Killer([Kill(0.0, 0.0)], SystemClock(), lambda *who: None)
    killer.start()
    killer.on_event(running(1, slots[0]))
    assert stays_alive(slots[0])
    killer.on_event(AttemptFailed(Attempt(1), "it fell over by itself", 0.1))
    killer.on_event(completed(1))  # told late: its slots are gone, or somebody else by now
    assert stays_alive(slots[0])
    killer.on_event(running(2, slots[1]))
    killer.on_event(JobEnded("finished"))
    killer.join(WAIT_SECONDS)
    assert killer.done == 0
    assert [slot.poll() for slot in slots] == [None] * 4


def test_a_victim_that_has_just_ended_by_itself_does_not_count(slots):
    slots[0].kill()
    slots[0].wait()
    killer = Killer([Kill(0.0, 0.0)], SystemClock(), lambda *who: None)
    killer.start()
    killer.on_event(running(1, slots[0]))
    killer.on_event(completed(1))
    killer.on_event(running(2, slots[1]))
    killer.on_event(completed(2))
    killer.join(WAIT_SECONDS)
    assert killer.done == 1
    assert slots[1].wait(WAIT_SECONDS) == -signal.SIGKILL
