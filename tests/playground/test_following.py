"""What the supervisor makes of its driver and of what goes wrong, without Spark."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from eyes import FlowingDriver
from waiting import wait_until

from stillframe.errors import StillframeError
from stillframe.playground import following as following_module
from stillframe.playground.checkpoints import Checkpoints
from stillframe.playground.following import Following, Left
from stillframe.playground.serving import Buttons
from stillframe.playground.supervisor import Supervisor
from stillframe.playground.tour import Result, Step, Tour


def lines(*told: dict[str, object]) -> Iterator[str]:
    return (f"{json.dumps(each)}\n" for each in told)


RUNNING = {"kind": "slots_running", "pids": [47, 48]}
COMMITTED = {"kind": "checkpoint_committed", "checkpoint_id": 7}


def test_a_line_that_a_killed_driver_has_not_written_to_its_end_is_no_line():
    following = Following(lambda checkpoint_id: None)

    following.read([*lines(RUNNING), '{"kind": "checkpoint_comp'], 123)

    assert [each["kind"] for each in following.lines] == ["slots_running"]
    assert (following.now.driver, following.now.pids) == (None, ())


def test_a_board_that_cannot_be_compared_does_not_end_the_listening(caplog):
    def fails(checkpoint_id: int) -> None:
        raise OSError("a file of the sink is gone")

    following = Following(fails)
    following.read(lines(COMMITTED, {"kind": "refused", "text": "no room"}), 123)

    assert following.now.refused == "no room"
    assert "checkpoint 7 cannot be followed" in caplog.text


def test_a_wait_that_takes_long_is_told_once_with_what_it_is_for(monkeypatch):
    monkeypatch.setattr(following_module, "_PATIENCE_SECONDS", 0.0)
    following, told = Following(lambda checkpoint_id: None), []
    following.on_long = told.append
    answers = iter([None, None, "there"])

    assert following.wait("the record comes", lambda: next(answers)) == "there"
    assert told == ["has waited for 0 s: the record comes"]


@pytest.fixture
def play() -> Iterator[Supervisor]:
    """One whose driver is never started."""
    with Supervisor(master="local[2]") as made:
        yield made


def test_a_driver_that_has_ended_is_told_of_at_once_by_whoever_waits_for_it(play):
    play.driver.start()
    os.kill(play.driver.pid, signal.SIGKILL)

    for wait in (
        play.await_end,
        lambda: play.await_attempt(1),
        lambda: play.await_score("a score"),
    ):
        with pytest.raises(StillframeError, match="the driver has ended with code -9"):
            wait()
    with pytest.raises(StillframeError, match="the driver has ended"):
        play.start_job()


def step(number, run):
    return Step(number, "a step", "Do something.", run)


def test_whatever_a_step_raises_is_its_result_and_the_next_one_runs(play):
    def breaks(play):
        raise KeyError("positions")

    tour = Tour(play, [step(1, breaks), step(2, lambda play: Result("exact", "exact", True))])

    results = [result for _, result in tour.run([1, 2])]

    assert [each.is_right for each in results] == [False, True]
    assert results[0].observed == "KeyError: 'positions'"


def test_who_leaves_ends_the_tour(play):
    def waits(play):
        play.following.leave()
        return play.following.wait("nothing", lambda: None)

    with pytest.raises(Left):
        list(Tour(play, [step(1, waits)]).run([1]))


def test_a_button_whose_deed_fails_in_an_unexpected_way_says_so(play):
    buttons = Buttons(play)

    def breaks() -> object:
        raise IndexError("no checkpoint yet")

    buttons._begin("flip_byte", breaks)
    wait_until(lambda: buttons.busy is None)

    assert buttons.last == {
        "action": "flip_byte",
        "text": "IndexError: no checkpoint yet",
        "failed": True,
    }


def test_the_newest_checkpoint_is_read_while_newer_ones_take_its_place(tmp_path: Path):
    driver = FlowingDriver(tmp_path)
    try:
        query = driver.start("page-views", checkpointInterval="10 ms", checkpointsRetained="1")
        checkpoints = Checkpoints(Path(driver.location))
        wait_until(lambda: bool(query.checkpoints))
        read = [checkpoints.read_newest().checkpoint_id for _ in range(100)]
    finally:
        driver.close()

    assert read == sorted(read)
    assert read[-1] > read[0]
