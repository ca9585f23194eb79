"""What breaks a playground, and what mends it: signals, `faults.json`, and a byte that is flipped.

A kill that is to be predicted to the record happens while all slots stand still: only then can be
counted what the sinks show, and only then does no newer checkpoint change what a restart brings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stillframe.errors import StillframeError
from stillframe.playground import processes
from stillframe.playground.scoreboard import Prediction
from stillframe.playground.supervisor import Supervisor
from stillframe.playground.truth import Positions
from stillframe.processes import await_ended

_SETTLED_SECONDS = 0.5
"""What slots had sent before they stood still has come to the driver by then."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill, and what was counted before it."""

    prediction: Prediction
    attempt: int
    """That began after it."""
    naive_doubled: int
    reached: Positions
    """What sinks had shown up to."""


def kill_slot(
    play: Supervisor, slot: int, wanted: Callable[[Prediction], object] = lambda prediction: True
) -> Kill:
    """Kill a slot with everything counted before; returns when the next attempt runs.

    It is killed when the prediction is one that is `wanted`. The other slots are killed too, when
    the driver has noticed: they are cut off by then and only stand there.
    """
    victim, pids, attempt = play.slot_pid(slot), play.now.pids, play.now.attempt

    def standing_still() -> Prediction | None:
        if not wanted(play.predict()):
            return None
        processes.freeze(pids)
        found = _settled_prediction(play)
        if not wanted(found):  # a checkpoint was complete at the last moment
            processes.thaw(pids)
            return None
        return found

    try:
        prediction = play.following.wait("there is something to predict", standing_still)
        reached, doubled = play.reached(), play.naive_doubled()
        processes.kill_all([victim])
        _await_failed(play, attempt)
    finally:
        processes.kill_all(pids)
    play.await_attempt(attempt + 1)
    if play.now.restored_from != prediction.checkpoint:
        raise StillframeError(
            f"checkpoint {play.now.restored_from} completed after the prediction for"
            f" {prediction.checkpoint} was made: repeat the step"
        )
    return Kill(prediction, attempt + 1, doubled, reached)


def kill_executor(play: Supervisor, slot: int = 0) -> int:
    """Kill the executor of a slot, and with it all slots that it runs; its process."""
    if play.no_executor is not None:
        raise StillframeError(play.no_executor)
    attempt = play.now.attempt
    pid = processes.executor_of(play.slot_pid(slot))
    processes.kill_all([pid])
    _await_failed(play, attempt)
    play.await_attempt(attempt + 1)
    return pid


def freeze_slot(play: Supervisor, slot: int, seconds: float) -> int:
    """Have a slot stand still for some seconds; its process."""
    pid = play.slot_pid(slot)
    processes.freeze([pid])
    play.timers.append(processes.thaw_later([pid], seconds))
    return pid


def kill_driver(play: Supervisor) -> int:
    """Kill the driver, then start another that goes on with the job; the one that was killed.

    Its slots end by themselves, and so does its JVM.
    """
    attempt = play.now.attempt
    pid, below = play.driver.kill()
    play.following.wait(
        "the driver's processes are gone",
        lambda: True if not await_ended(below, 0.0) else None,
    )
    play.driver.start()
    play.start_job()
    play.await_attempt(attempt + 1)
    return pid


def flip_byte(play: Supervisor) -> Path:
    """Alter one byte of a state file of the newest checkpoint; the file."""
    path = play.checkpoints.state_file(play.checkpoints.retained()[-1])
    data = path.read_bytes()
    at = len(data) // 2
    play.flipped = (path, data)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    return path


def flip_back(play: Supervisor) -> None:
    if play.flipped is not None:
        path, data = play.flipped
        play.flipped = None
        path.write_bytes(data)


def break_newest(play: Supervisor, slot: int) -> Path:
    """Flip a byte of the newest checkpoint and kill a slot before there is a newer one; the file.

    Returns when the job has ended.
    """
    victim, pids, attempt = play.slot_pid(slot), play.now.pids, play.now.attempt
    processes.freeze(pids)
    try:
        _settled_prediction(play)
        path = flip_byte(play)
        processes.kill_all([victim])
        _await_failed(play, attempt)
    finally:
        processes.kill_all(pids)
    play.await_end()
    return path


def _settled_prediction(play: Supervisor) -> Prediction:
    """For the newest checkpoint, when no newer one is on its way any more."""
    prediction, since = play.predict(), time.monotonic()

    def settled() -> Prediction | None:
        nonlocal prediction, since
        if play.checkpoints.retained()[-1] != prediction.checkpoint:
            prediction, since = play.predict(), time.monotonic()
        if time.monotonic() <= since + _SETTLED_SECONDS or play.is_storing():
            return None
        return prediction if play.checkpoints.retained()[-1] == prediction.checkpoint else None

    return play.following.wait("no checkpoint is being stored", settled)


def _await_failed(play: Supervisor, attempt: int) -> None:
    play.following.wait(
        f"the driver notices that attempt {attempt} is broken",
        lambda: True if play.now.attempt > attempt or not play.now.is_running else None,
    )
