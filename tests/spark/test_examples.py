"""The worked examples, with their numbers: what their checkpoints hold, read from the files alone.

Nothing of Stillframe is used to look into a checkpoint: `docs/snapshot-format.md` says how.
"""

from __future__ import annotations

import json
import os
import queue
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event, SlotsRunning
from stillframe.coordinator.query import Query

EXAMPLES = Path(__file__).parents[2] / "examples"
WAIT_SECONDS_MAX = 120.0

pytestmark = pytest.mark.spark


def example(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / name)))


class Checkpoint:
    """A completed checkpoint as it lies on disk."""

    def __init__(self, directory: Path) -> None:
        self.body = json.loads((directory / "_metadata").read_text())["body"]
        self._job = directory.parent

    @property
    def positions(self) -> list[int]:
        """How many numbers each source has given, in the order of the sources."""
        splits = [split for part in self.body["snapshots"] for split in part["items"]]
        return [split["position"]["next"] for split in sorted(splits, key=lambda s: s["id"])]

    @property
    def sums(self) -> dict[str, int]:
        return {key: total for sums in self.sums_by_subtask.values() for key, total in sums.items()}

    @property
    def sums_by_subtask(self) -> dict[int, dict[str, int]]:
        return {
            part["subtask"]: {
                parity: total
                for state in part["keyed"]
                for parity, total in self._rows(state["file"]["path"])
            }
            for part in self.body["snapshots"]
            if part["uid"] == "sums"
        }

    def timings(self, of: str) -> list[dict[str, Any]]:
        """Of the task whose name has this word in it, by subtask."""
        found = [timing for timing in self.body["timings"] if of in timing["task"]]
        return sorted(found, key=lambda timing: timing["subtask"])

    def _rows(self, path: str) -> list[tuple[Any, ...]]:
        with pa.memory_map(str(self._job / path)) as file:
            return [tuple(row.values()) for row in pa.ipc.open_file(file).read_all().to_pylist()]


def checkpoints(directory: Path, job: str) -> list[Checkpoint]:
    """Those the job log calls complete, oldest first."""
    home = directory / "checkpoints" / job
    newest = json.loads(max((home / "log").iterdir()).read_text())["body"]
    return [
        Checkpoint(home / f"chk-{kept['checkpoint_id']}-{kept['attempt']}")
        for kept in newest["checkpoints"]
    ]


def sums_up_to(position: int) -> dict[str, int]:
    """Of 1, 2, …, position. A sum is there from its first number on."""
    evens, odds = range(2, position + 1, 2), range(1, position + 1, 2)
    return {key: sum(some) for key, some in (("even", evens), ("odd", odds)) if some}


def added(*several: dict[str, int]) -> dict[str, int]:
    keys = {key for sums in several for key in sums}
    return {key: sum(sums.get(key, 0) for sums in several) for key in keys}


# --- E1 -------------------------------------------------------------------------------------------


def test_at_input_position_5_the_checkpoint_holds_the_sums_6_and_9(spark, tmp_path):
    e1 = example("e1_even_and_odd.py")
    e1.start(spark, tmp_path, rows=5, rows_per_second=1_000).awaitTermination(WAIT_SECONDS_MAX)

    last = checkpoints(tmp_path, "even-and-odd")[-1]

    assert last.positions == [5]
    assert last.sums == {"even": 6, "odd": 9}
    assert last.sums_by_subtask == {0: {"even": 6}, 1: {"odd": 9}}, "a task for each of them"
    assert e1.final_sums(spark, tmp_path) == {"even": 6, "odd": 9}


def test_every_checkpoint_on_the_way_holds_the_sums_of_its_own_position(spark, tmp_path):
    e1 = example("e1_even_and_odd.py")
    query = e1.start(
        spark,
        tmp_path,
        rows=30,
        rows_per_second=10,
        checkpointInterval="100 ms",
        checkpointsRetained=100,
    )
    query.awaitTermination(WAIT_SECONDS_MAX)

    taken = checkpoints(tmp_path, "even-and-odd")

    positions = [checkpoint.positions[0] for checkpoint in taken]
    assert positions == sorted(positions)
    assert len(set(positions)) > 3, "photographed while it moved"
    assert positions[-1] == 30
    for checkpoint in taken:
        assert checkpoint.sums == sums_up_to(checkpoint.positions[0])


# --- E2 -------------------------------------------------------------------------------------------


class Following:
    """The events of a query from its start on."""

    def __init__(self, query: Query) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        query.add_listener(self._events.put)
        self._query = query

    def wait(self, wanted: Callable[[Event], bool]) -> Event:
        while not wanted(event := self._events.get(timeout=WAIT_SECONDS_MAX)):
            pass
        return event

    def pids(self) -> tuple[int, ...]:
        """Of the slots; an event we came too late for is known to the query."""
        if not self._query.slot_pids:
            self.wait(lambda event: isinstance(event, SlotsRunning))
        return self._query.slot_pids


def test_two_sums_of_two_sources_are_exact_after_a_kill_and_in_every_checkpoint(spark, tmp_path):
    numbers_each = 200_000
    e2 = example("e2_two_sources_two_sums.py")
    query = e2.start(
        spark,
        tmp_path,
        numbers_each,
        checkpointInterval="200 ms",
        checkpointsRetained=100,
        restartDelay="100 ms",
        restartAttempts=10,
    )
    following = Following(query)
    pids = following.pids()
    for _ in range(3):
        following.wait(lambda event: isinstance(event, CheckpointCompleted))
    os.kill(pids[1], signal.SIGKILL)
    restarted = following.wait(lambda event: isinstance(event, AttemptStarted))
    query.awaitTermination(WAIT_SECONDS_MAX)

    assert query.summary.outcome == "finished"
    assert isinstance(restarted, AttemptStarted)
    assert restarted.restored_from is not None, "not from the beginning"
    once = sums_up_to(numbers_each)
    assert e2.final_sums(spark, tmp_path) == added(once, once)
    taken = checkpoints(tmp_path, "two-sources-two-sums")
    assert len(taken) > 5
    assert taken[-1].positions == [numbers_each, numbers_each]
    for checkpoint in taken:
        # The barriers met: in both sums lies the same part of source 0, and the same of source 1.
        assert checkpoint.sums == added(*map(sums_up_to, checkpoint.positions))
        _check_timings(checkpoint)
    assert any(timing["alignment_ms"] > 0 for each in taken for timing in each.timings("aggregate"))


def _check_timings(checkpoint: Checkpoint) -> None:
    """Both sums have acknowledged, each with its two channels aligned; sources align nothing."""
    sums, sources = checkpoint.timings("aggregate"), checkpoint.timings("read rate")
    assert [timing["subtask"] for timing in sums] == [0, 1]
    assert [timing["subtask"] for timing in sources] == [0, 1]
    for timing in (*sums, *sources):
        assert timing["sync_ms"] >= 0
        assert timing["async_ms"] >= 0
        assert timing["start_delay_ms"] >= 0
    assert all(timing["alignment_ms"] == 0 for timing in sources)


# --- The README's job -----------------------------------------------------------------------------
