"""The progress of a job that really runs, in its three forms."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from stillframe.cli.progress import Progress, figures_of, form_for
from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointCompleted,
    History,
    JobEnded,
    SlotsRunning,
    Summary,
)
from stillframe.ids import Attempt, CheckpointId, Epoch, SlotIndex
from stillframe.protocol.messages import Progress as ProgressReport


@dataclass
class SteppingClock:
    now_seconds: float = 0.0

    def monotonic_seconds(self) -> float:
        return self.now_seconds

    def wall_ms(self) -> int:
        return int(self.now_seconds * 1000)


@dataclass
class ToldQuery:
    """A query whose history the test tells."""

    name: str = "page-views"
    history: History = field(default_factory=History)
    plan: Any = field(default_factory=lambda: SimpleNamespace(slots=2))

    @property
    def summary(self) -> Summary:
        return self.history.summary()

    @property
    def checkpoints(self) -> list[CheckpointCompleted]:
        return self.history.completed()

    def add_listener(self, listener: Any) -> None:
        self.history.add_listener(listener)


CHECKPOINT = CheckpointCompleted(
    CheckpointId(1), Epoch(0), Attempt(1), 0, 41.2, 21_000, (), records_in=10, records_out=9
)


@pytest.fixture
def query() -> ToldQuery:
    return ToldQuery()


def shown(form: Any, query: ToldQuery, *, is_quiet: bool = False) -> str:
    """What is said when the query reads, takes a checkpoint, falls over and comes to its end."""
    clock, out = SteppingClock(), io.StringIO()
    progress = Progress(form, clock, out, is_quiet=is_quiet)
    progress.waiting("starting Spark (local[4])")
    progress.follow(query)  # type: ignore[arg-type]
    if not is_quiet:
        progress._closing.set()  # the test says when to look
        progress._thread.join()
    tell = query.history.tell
    tell(AttemptStarted(Attempt(1), None, ()))
    tell(SlotsRunning(Attempt(1), (1, 2)))
    query.history.report_progress(SlotIndex(0), ProgressReport(5_000, 4_000), 0.0)
    tell(CHECKPOINT)
    tell(CheckpointCommitted(CheckpointId(1)))
    clock.now_seconds = 2.0
    if not is_quiet:
        progress.show()
        progress.show()
    tell(AttemptFailed(Attempt(1), "slot 1 was lost", 0.1))
    tell(AttemptStarted(Attempt(2), CheckpointId(1), ("partition-0 at next=7",)))
    tell(JobEnded("finished"))
    progress.close()
    return out.getvalue()


def test_plain_lines_come_only_when_something_has_changed(query):
    assert shown("plain", query).splitlines() == [
        "starting Spark (local[4])",
        "page-views: waiting for 2 slots",
        "slots running: 0 (pid 1), 1 (pid 2)",
        "page-views: 5,000 records in, 4,000 out, 2,500/s, 1 checkpoint (last 41 ms, 21 KB)",
        "attempt 1 failed: slot 1 was lost; restarting in 0.1 s",
        "restored checkpoint 1, replaying from partition-0 at next=7",
        "page-views: waiting for 2 slots",
        "page-views: 5,000 records in, 4,000 out, 0/s, 1 checkpoint (last 41 ms, 21 KB),"
        " 1 restart, finished",
    ]


def test_records_that_came_too_late_are_told_where_there_are_any(query):
    query.history.report_progress(SlotIndex(0), ProgressReport(5_000, 4_000, 1_200), 0.0)
    figures = figures_of("page-views", query.summary, None, 0, 1.0)
    assert str(figures).startswith("page-views: 5,000 records in, 4,000 out, 1,200 too late, ")
    assert figures.to_json()["records_late"] == 1_200


def test_malformed_records_are_told_where_there_are_any(query):
    report = ProgressReport(5_000, 4_000, records_malformed=12)
    query.history.report_progress(SlotIndex(0), report, 0.0)
    figures = figures_of("page-views", query.summary, None, 0, 1.0)
    assert str(figures).startswith("page-views: 5,000 records in, 12 malformed, 4,000 out, ")
    assert figures.to_json()["records_malformed"] == 12


def test_machines_get_one_json_object_per_line_and_every_event(query):
    said = [json.loads(line) for line in shown("json", query).splitlines()]
    assert [line["kind"] for line in said] == [
        "waiting",
        "attempt_started",
        "slots_running",
        "checkpoint_completed",
        "checkpoint_committed",
        "progress",
        "attempt_failed",
        "attempt_started",
        "job_ended",
        "progress",
    ]
    assert said[5]["records_per_second"] == 2500.0
    assert said[-1]["outcome"] == "finished"
    assert said[-1]["restarts"] == 1


def test_a_terminal_has_one_line_that_is_written_anew(query):
    said = shown("terminal", query)
    assert said.startswith("\rstarting Spark (local[4])")
    assert "\rpage-views: 5,000 records in" in said
    assert said.endswith("\n")
    assert "attempt 1 failed" in said
    assert said.count("\n") == 4  # three events, and the end


def test_a_quiet_command_says_only_what_goes_wrong(query):
    assert shown("plain", query, is_quiet=True).splitlines() == [
        "attempt 1 failed: slot 1 was lost; restarting in 0.1 s",
    ]


def test_before_the_first_checkpoint_there_is_no_duration_to_tell(query):
    figures = figures_of("page-views", query.summary, None, 0, 0.0)
    assert str(figures) == "page-views: 0 records in, 0 out, 0/s, 0 checkpoints"


def test_a_stream_that_is_no_terminal_gets_plain_lines():
    assert form_for(io.StringIO(), as_json=False) == "plain"
    assert form_for(io.StringIO(), as_json=True) == "json"
