"""The twelve steps, each a function of the playground that says what it predicted and what came."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from stillframe.playground import breaking
from stillframe.playground.checkpoints import JOB, NEWEST, savepoint_at
from stillframe.playground.scoreboard import Score, surplus
from stillframe.playground.supervisor import Supervisor
from stillframe.playground.tour import Result, Step
from stillframe.playground.truth import PARTITIONS, RECORDS_PER_SECOND, Positions

SLOW = {"source": 0, "target": 1, "seconds": 3.0}
_FREEZE_SECONDS = 8.0
"""Shorter than 10 s, after which a slot whose interpreter stands still has its stacks written while
its threads go on again (`runtime/watching.py`): now and then that ends its process."""
_INSPECT_SECONDS_MAX = 60.0
_SURPLUS_MIN = 200
_POISON_AHEAD = 3 * RECORDS_PER_SECOND


def look(play: Supervisor) -> Result:
    number = play.checkpoint()
    score = play.await_score(f"checkpoint {number} is committed", number - 1)
    return Result(
        "exact", f"checkpoint {number} is complete; {_in_words(score)}", score.is_exact,
        (f"stillframe trigger {JOB}",),
    )  # fmt: skip


def kill_a_slot(play: Supervisor) -> Result:
    pid = play.slot_pid(1)
    kill = breaking.kill_slot(play, 1)
    score = _passed(play, kill.reached)
    return Result(
        "our sink and the counts exact",
        f"attempt {kill.attempt} from checkpoint {kill.prediction.checkpoint}; {_in_words(score)}",
        score.is_exact,
        (f"kill -9 {pid}",),
    )


def two_phase_commit_off(play: Supervisor) -> Result:
    pid, slots = play.slot_pid(1), _all(play)
    kill = breaking.kill_slot(play, 1, lambda prediction: prediction.naive)
    score = _passed(play, kill.reached)
    doubled = score.naive.doubled - kill.naive_doubled
    return Result(
        f"naive sink +{kill.prediction.naive:,} doubled, ours +{kill.prediction.ours:,}",
        f"naive sink +{doubled:,} doubled, ours +{score.ours.doubled:,}, lost {score.naive.lost:,}",
        (doubled, score.ours.doubled, score.naive.lost)
        == (kill.prediction.naive, kill.prediction.ours, 0)
        and kill.prediction.naive > 0,
        (f"kill -STOP {slots}", "ls naive", f"kill -9 {pid}"),
    )


def kill_an_executor(play: Supervisor) -> Result:
    pid = breaking.kill_executor(play)
    attempt = play.now.attempt
    score = play.await_score("a checkpoint after the executor's death is committed", None, attempt)
    return Result(
        "exact",
        f"attempt {attempt} in another executor; {_in_words(score)}",
        score.is_exact,
        (f"kill -9 {pid}",),
    )


def freeze(play: Supervisor) -> Result:
    before, began = play.now.attempt, time.monotonic()
    pid = breaking.freeze_slot(play, 0, _FREEZE_SECONDS)
    number = play.checkpoint()
    waited = time.monotonic() - began
    score = play.await_score(f"checkpoint {number} is committed", number - 1)
    is_same = score.attempt == before
    why = "" if is_same else f" ({_shortened(play, play.now.failure or 'nobody says why')})"
    return Result(
        f"the checkpoint waits for the slot and completes in attempt {before}",
        f"checkpoint {number} completed after {waited:.1f} s in attempt {score.attempt}{why};"
        f" {_in_words(score)}",
        score.is_exact and is_same and waited >= _FREEZE_SECONDS / 2,
        (f"kill -STOP {pid}; sleep {_FREEZE_SECONDS:g}; kill -CONT {pid}",),
    )


def slow_channel(play: Supervisor) -> Result:
    play.set_faults(delay=SLOW)
    try:
        number = play.checkpoint()
        held = _alignment_seconds(play, number)
        pid = play.slot_pid(1)
        kill = breaking.kill_slot(play, 1)
    finally:
        play.set_faults(delay=None)
    score = _passed(play, kill.reached)
    return Result(
        "alignment of about 3 s, then exact",
        f"checkpoint {number} was aligned for {held:.1f} s; {_in_words(score)}",
        held >= 2.0 and score.is_exact,
        (
            "faults.json: " + '{"delay": {"source": 0, "target": 1, "seconds": 3.0}}',
            f"kill -9 {pid}",
        ),
    )


def not_aligned(play: Supervisor) -> Result:
    savepoint = play.stop()
    try:
        play.settings = play.with_settings(mode="at-least-once")
        play.start_job()
        pid = play.slot_pid(1)
        play.set_faults(delay=SLOW)
        play.checkpoint()
        # When the newest checkpoint holds records that its positions do not, and more than the few
        # of barriers that never come at quite the same time.
        kill = breaking.kill_slot(
            play, 1, lambda prediction: sum(prediction.counts.values()) > _SURPLUS_MIN
        )
        play.set_faults(delay=None)
        # Behind the barrier of a savepoint that stops the job nothing is counted any more: its
        # state has no surplus but the one it was restored with.
        after = savepoint_at(play.stop())
        observed = surplus(after.counts, play.truth_at(after.positions))
    finally:
        play.set_faults(delay=None)
        play.go_back(savepoint, mode="exactly-once")
    score = play.await_score("a checkpoint after the savepoint is committed")
    is_right = observed == dict(kill.prediction.counts) and bool(observed) and score.is_exact
    return Result(
        _surplus_in_words(kill.prediction.counts),
        f"{_surplus_in_words(observed)}; back to the savepoint: {_in_words(score)}",
        is_right,
        (f"stillframe stop {JOB} --savepoint {savepoint}", "--set checkpointMode=at-least-once",
         f"kill -9 {pid}"),
    )  # fmt: skip


def damaged(play: Supervisor) -> Result:
    while len(play.checkpoints.retained()) < 2:
        play.checkpoint()
    path = breaking.break_newest(play, 1)
    inspected = subprocess.run(
        [sys.executable, "-m", "stillframe", "inspect", str(play.checkpoints.store.address)],
        capture_output=True,
        text=True,
        timeout=_INSPECT_SECONDS_MAX,
    )
    is_named = inspected.returncode == 1 and path.name in inspected.stdout
    refusal = play.now.failure or ""
    does_not_guess = "is damaged" in refusal and "restoreFrom=" in refusal
    breaking.flip_back(play)
    play.start_job()
    score = play.await_score("a checkpoint after the repair is committed")
    savepoint = play.stop()
    try:
        older = play.checkpoints.retained()[0]
        prediction = play.predict(older)
        before = play.reached()
        play.start_job(restoreFrom=older)
        doubled = _passed(play, before).ours.doubled
    finally:
        play.go_back(savepoint)
    again = play.await_score("a checkpoint after the savepoint is committed")
    return Result(
        f"the file is named, the job stops; the byte back: exact; checkpoint {older} instead:"
        f" our sink +{prediction.ours:,} doubled",
        f"{path.name} {'is' if is_named else 'is not'} named; {_shortened(play, refusal)};"
        f" the byte back: {_in_words(score)}; checkpoint {older} instead: our sink +{doubled:,}"
        " doubled",
        is_named and does_not_guess and score.is_exact and again.is_exact
        and doubled == prediction.ours > 0,
        (f"stillframe inspect {play.checkpoints.store.address}", f"--restore {older}"),
    )  # fmt: skip


def poison(play: Supervisor) -> Result:
    number = poison_ahead(play)
    play.now.blame = None
    play.set_faults(poison=number)
    try:
        blame = play.following.wait("the record comes", lambda: play.now.blame)
        failure = play.now.failure or ""
    finally:
        play.set_faults(poison=None)
    attempt = play.now.attempt
    score = play.await_score("a checkpoint without the record is committed", None, attempt + 1)
    return Result(
        f"function checked, click {number} and its line are named; exact when the record is good",
        f"{_shortened(play, failure)}; {_in_words(score)}",
        f"click {number}" in failure and "checked" in failure and str(blame["line"]) in failure
        and score.is_exact,
        (f'faults.json: {{"poison": {number}}}',),
    )  # fmt: skip


def rescale(play: Supervisor) -> Result:
    target = 3 if play.settings.parallelism != 3 else 2
    said = play.rescale(target)
    attempt = play.now.attempt
    score = play.await_score("a checkpoint after the rescale is committed", None, attempt)
    return Result(
        "exact",
        f"{said}; {_in_words(score)}",
        score.is_exact and len(play.now.pids) == target,
        (f"stillframe rescale {JOB} {target}",),
    )


def upgrade(play: Supervisor) -> Result:
    savepoint = play.stop()
    before = savepoint_at(savepoint)
    was_exact = not surplus(before.counts, play.truth_at(before.positions))
    version = 2 if play.settings.version == 1 else 1
    play.settings = play.with_settings(version=version)
    gone: dict[str, Any] = {"allowNonRestoredState": "true"} if version == 1 else {}
    play.start_job(**gone)
    score = play.await_score(f"a checkpoint of version {version} is committed")
    has_newest = NEWEST in play.checkpoints.read_newest().operators
    return Result(
        "counts unchanged, one state new",
        f"version {version}: counts in the savepoint {'exact' if was_exact else 'wrong'}, state"
        f" newest {'is there' if has_newest else 'is gone'}; {_in_words(score)}",
        was_exact and score.is_exact and has_newest == (version == 2),
        (f"stillframe stop {JOB} --savepoint {savepoint}", "stillframe run views.py"),
    )


def kill_the_driver(play: Supervisor) -> Result:
    has_metrics = "stillframe_job_restarts_total" in play.metrics()
    before = play.completed_since_first_start()
    pid = breaking.kill_driver(play)
    attempt = play.now.attempt
    score = play.await_score("a checkpoint of the next driver is committed", None, attempt)
    after = play.completed_since_first_start()
    return Result(
        f"another driver goes on; more than {before} checkpoints since the first start",
        f"attempt {attempt}, {after} checkpoints since the first start; {_in_words(score)}",
        has_metrics and after > before and score.is_exact,
        (f"kill -9 {pid}",),
    )


STEPS = (
    Step(1, "look", "Take a checkpoint while records flow.", look),
    Step(2, "kill a slot", "Kill slot 1 and see the job come back.", kill_a_slot),
    Step(3, "two-phase commit off", "Kill slot 1 and see what a naive sink shows twice.",
         two_phase_commit_off),
    Step(4, "kill an executor", "Kill the executor of slot 0.", kill_an_executor, True),
    Step(5, "freeze", f"Let slot 0 stand still for {_FREEZE_SECONDS:g} s.", freeze),
    Step(6, "slow channel, aligned", "Slow one channel down by 3 s, then kill slot 1.",
         slow_channel),
    Step(7, "not aligned", "The same without alignment: counts go wrong as predicted.",
         not_aligned),
    Step(8, "damaged checkpoint", "Flip a byte of the newest checkpoint, then kill slot 1.",
         damaged),
    Step(9, "poison record", "Send a record that a function cannot take.", poison),
    Step(10, "rescale", "Go on with three slots.", rescale),
    Step(11, "upgrade", "Stop with a savepoint and go on with one aggregate more.", upgrade),
    Step(12, "kill the driver", "Ask for the metrics, then kill the driver.", kill_the_driver),
)  # fmt: skip


def poison_ahead(play: Supervisor) -> int:
    """The number of a click that comes in some seconds."""
    return max(play.reached().values()) * PARTITIONS + _POISON_AHEAD


def _passed(play: Supervisor, reached: Positions) -> Score:
    """The board at the first checkpoint of this attempt that has come past what was shown before
    it."""
    attempt = play.now.attempt

    def score() -> Score | None:
        found = play.score
        if found is None or found.attempt < attempt:
            return None
        ends = reached.items()
        is_past = all(found.positions.get(partition, 0) >= end for partition, end in ends)
        return found if is_past else None

    return play.following.wait("all that was shown before has come again", score)


def _alignment_seconds(play: Supervisor, checkpoint: int) -> float:
    """The longest alignment of a checkpoint, as the driver has told it."""
    lines = [
        each
        for each in list(play.following.lines)
        if each["kind"] == "checkpoint_completed" and each["checkpoint_id"] == checkpoint
    ]
    timings = lines[-1]["timings"] if lines else []
    return max((each["alignment_ms"] for each in timings), default=0.0) / 1000


def _all(play: Supervisor) -> str:
    return " ".join(map(str, play.now.pids))


def _in_words(score: Score) -> str:
    if score.is_exact:
        return f"exact at checkpoint {score.checkpoint}: {score.ours.rows:,} clicks"
    return (
        f"WRONG at checkpoint {score.checkpoint}: {score.ours.lost:,} lost,"
        f" {score.ours.doubled:,} doubled, {_surplus_in_words(score.surplus)}"
    )


def _surplus_in_words(found: Mapping[str, int]) -> str:
    return ", ".join(f"{app} {by:+,}" for app, by in sorted(found.items())) or "no count wrong"


def _shortened(play: Supervisor, text: str) -> str:
    """Without the directory that everything is in."""
    text = text.replace(f"{play.root}/", "")
    return text if len(text) <= 400 else f"{text[:400]}…"
