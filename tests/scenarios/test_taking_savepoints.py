"""Savepoints of running jobs on plain processes: taken, stopped with, drained with, gone wrong."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.coordinator.history import CheckpointCommitted, CheckpointFailed, SlotsRunning
from stillframe.coordinator.located import locate
from stillframe.errors import StillframeError
from stillframe.testing.sinks import GatedSink

BACKENDS = ["fs", "memory", "rocksdb"]


def clicks_of(page_views) -> Counter:
    return Counter(pq.read_table(page_views.home / "clicks")["id"].to_pylist())


def last_counts(page_views) -> dict[str, int]:
    last: dict[str, int] = {}
    for row in pq.read_table(page_views.home / "counts").to_pylist():
        last[row["app_id"]] = max(row["count"], last.get(row["app_id"], 0))
    return last


def truth(source) -> pa.Table:
    batches = [item for script in source.scripts for item in script if hasattr(item, "column")]
    return pa.Table.from_batches(batches)


def move(page_views) -> None:
    """Another job from now on: its directory and its output are elsewhere."""
    page_views.home = page_views.home / "elsewhere"
    page_views.home.mkdir()
    page_views.location = str(page_views.home / "chk")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_runs_on_and_another_starts_from_its_savepoint_moved(page_views, backend):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    plan = page_views.plan(source)
    first = page_views.start(plan, checkpointInterval="1 hour", stateBackend=backend)
    first.wait_for_records(2_000)
    address = first.query.savepoint(str(page_views.home / "savepoint"))
    moved = page_views.home / "moved"
    Path(address).rename(moved)
    gate.open()
    first.finish()
    page_views.check_exactly_once(source)

    move(page_views)
    other = BACKENDS[BACKENDS.index(backend) - 1]
    second = page_views.start(
        page_views.plan(source, parallelism=3), restoreFrom=str(moved), stateBackend=other
    )
    second.finish()

    assert locate(str(moved)).manifest.kind == "savepoint"
    assert second.query.summary.records_in == 2_000, "only the second half was read"
    assert last_counts(page_views) == dict(Counter(truth(source)["app_id"].to_pylist()))


def test_what_sinks_had_prepared_comes_out_with_a_checkpoint_that_follows_at_once(page_views):
    gate = page_views.gate("second-half")
    running = page_views.start(page_views.plan(page_views.halves(gate)), checkpointInterval=None)
    running.wait_for_records(2_000)
    assert page_views.clicks_visible() == 0

    running.query.savepoint(str(page_views.home / "savepoint"))
    running.wait(CheckpointCommitted)

    assert page_views.clicks_visible() == 2_000


def test_a_fail_over_to_a_checkpoint_before_the_savepoint_doubles_nothing(page_views):
    """The savepoint commits nothing, so what came before it may be read once more."""
    first, second = page_views.gate("first"), page_views.gate("second")
    source = page_views.three_parts(first, second)
    running = page_views.start(page_views.plan(source), checkpointInterval="1 hour")
    running.wait_for_records(1_000)
    running.query.checkpoint()
    first.open()
    running.wait_for_records(2_000)
    # The checkpoint that follows the savepoint cannot be written: it is killed before.
    killed = threading.Thread(target=lambda: running.kill(slot=0))
    running.query.add_listener(
        lambda event: killed.start() if "savepoint" in str(event) and not killed.ident else None
    )
    running.query.savepoint(str(page_views.home / "savepoint"))
    running.wait(SlotsRunning, attempt=2)
    second.open()
    running.finish()

    page_views.check_exactly_once(source)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_that_stops_with_a_savepoint_has_committed_all_of_it_and_nothing_more(
    page_views, backend
):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    plan = page_views.plan(source)
    first = page_views.start(plan, checkpointInterval="1 hour", stateBackend=backend)
    first.wait_for_records(2_000)
    savepoint = page_views.home / "savepoint"
    first.query.stop(savepoint=str(savepoint))

    assert first.query.summary.outcome == "stopped"
    assert page_views.clicks_visible() == 2_000
    gate.open()
    again = page_views.start(plan, stateBackend=backend)
    again.finish()
    assert again.query.summary.records_in == 2_000, "the same job goes on where it stopped"
    page_views.check_exactly_once(source)

    move(page_views)
    third = page_views.start(
        page_views.plan(source), restoreFrom=str(savepoint), stateBackend=backend
    )
    third.finish()
    assert last_counts(page_views) == dict(Counter(truth(source)["app_id"].to_pylist()))


def test_sources_send_nothing_behind_the_savepoint_with_which_the_job_stops(page_views):
    """Endless clicks, and a sink that shows what was written, committed or not."""
    from stillframe.connectors.generate import ClickSource

    source = ClickSource(records=None, batch_rows=100)
    running = page_views.start(page_views.plan(source), checkpointInterval="1 hour")
    running.wait_for_records(5_000)
    savepoint = page_views.home / "savepoint"
    running.query.stop(savepoint=str(savepoint))

    positions = [
        item["position"]
        for part in locate(str(savepoint)).manifest.snapshots
        for item in part.items
    ]
    read = sum(position["next"] for position in positions)
    assert running.query.summary.records_in == read
    assert page_views.clicks_visible() == read


def test_a_job_that_drains_says_all_there_is_to_say_and_is_finished(page_views):
    gate = page_views.gate("never")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source), checkpointInterval="1 hour")
    running.wait_for_records(2_000)

    running.query.stop(savepoint=str(page_views.home / "savepoint"), drain=True)

    assert running.query.summary.outcome == "finished"
    assert sum(clicks_of(page_views).values()) == 2_000


def test_a_job_without_checkpoints_can_be_stopped_with_a_savepoint_too(page_views, tmp_path):
    from stillframe.connectors.discard import DiscardSink
    from stillframe.graph.logical import Node, Read, Write
    from stillframe.graph.plan import build_plan

    source = page_views.halves(page_views.gate("never"))
    read = Node(Read(source), source.schema, given_uid="clicks")
    plan = build_plan("bare", [Node(Write(DiscardSink()), source.schema, (read,))], 2)
    running = page_views.start(plan, checkpointLocation=None, checkpointInterval=None)
    running.wait_for_records(2_000)

    running.query.stop(savepoint=str(tmp_path / "savepoint"))

    assert locate(str(tmp_path / "savepoint")).manifest.job == "bare"


# --- gone wrong


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.parametrize("ends", [False, True])
def test_a_directory_with_something_in_it_is_refused_and_left_alone(page_views, ends):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source))
    running.wait_for_records(2_000)
    taken = page_views.home / "taken"
    taken.mkdir()
    (taken / "letter").write_text("dear")
    query = running.query

    with pytest.raises(StillframeError, match="is not empty: give a directory"):
        query.stop(savepoint=str(taken)) if ends else query.savepoint(str(taken))

    assert [path.name for path in files_below(taken)] == ["letter"]
    gate.open()
    running.finish()
    page_views.check_exactly_once(source)


def test_a_place_that_cannot_be_written_is_told_before_the_sources_are_ended(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source))
    running.wait_for_records(2_000)
    (page_views.home / "a-file").write_text("no directory")

    with pytest.raises(StillframeError, match="a-file"):
        running.query.stop(savepoint=str(page_views.home / "a-file" / "savepoint"), drain=True)

    gate.open()
    running.finish()
    page_views.check_exactly_once(source)


def test_a_savepoint_that_does_not_fit_on_its_disk_fails_alone_and_leaves_nothing(
    page_views, small_disk
):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source))
    running.wait_for_records(2_000)
    with contextlib.suppress(OSError), (small_disk / "full").open("wb", buffering=0) as full:
        while full.write(b"x" * 4096):
            pass
    (small_disk / "savepoint").mkdir()

    with pytest.raises(StillframeError, match=r"the savepoint into .* failed"):
        running.query.stop(savepoint=str(small_disk / "savepoint"))

    assert running.wait(CheckpointFailed)
    assert not files_below(small_disk / "savepoint")
    gate.open()
    running.finish()
    page_views.check_exactly_once(source)


def test_one_savepoint_at_a_time(page_views):
    running = page_views.start(page_views.plan(page_views.halves(page_views.gate("never"))))
    running.wait_for_records(2_000)
    outcomes: list[str] = []

    def take(name: str) -> None:
        try:
            outcomes.append(running.query.savepoint(str(page_views.home / name)))
        except StillframeError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=take, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    there = [each for each in outcomes if Path(each).is_dir()]
    assert there
    assert all("is being taken: wait until it is there" in e for e in outcomes if e not in there)


def test_a_kill_while_it_is_taken_is_told_and_the_job_recovers(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source))
    running.wait_for_records(2_000)
    running.kill(slot=1)

    try:
        running.query.savepoint(str(page_views.home / "savepoint"))
    except StillframeError as error:
        assert "has ended" in str(error)  # noqa: PT017 - it may also have come in time
        assert not files_below(page_views.home / "savepoint")
    running.wait(SlotsRunning, attempt=2)
    gate.open()
    running.finish()
    page_views.check_exactly_once(source)


def test_a_savepoint_with_which_a_job_stops_is_not_there_before_all_it_holds_is_committed(
    page_views, until
):
    """Who found it and started from it would never see what its sinks had not committed."""
    gate, commit = page_views.gate("second-half"), page_views.gate("commit")
    reached = page_views.gate("reached")
    source = page_views.halves(gate)
    plan = page_views.plan(
        source, around_clicks=lambda sink: GatedSink(sink, None, commit, reached)
    )
    running = page_views.start(plan, checkpointInterval=None)
    running.wait_for_records(2_000)
    savepoint = page_views.home / "savepoint"
    said: list[str] = []

    def stop() -> None:
        try:
            running.query.stop(savepoint=str(savepoint))
        except StillframeError as error:
            said.append(str(error))

    stopping = threading.Thread(target=stop)
    stopping.start()
    until(lambda: reached.is_open)
    with pytest.raises(StillframeError, match="savepoint"):
        locate(str(savepoint))

    running.kill(slot=0)
    stopping.join(120)
    assert "was not taken: attempt 1 of the job has ended" in said[0]
    assert not files_below(savepoint)
    commit.open()
    gate.open()
    running.finish()
    page_views.check_exactly_once(source)


def test_a_drained_job_that_breaks_before_it_is_called_finished_reads_nothing_more(
    page_views, until
):
    """Its windows and timers are told as if there were no more: more would come too late."""
    gate, commit = page_views.gate("second-half"), page_views.gate("commit")
    reached = page_views.gate("reached")
    plan = page_views.plan(
        page_views.halves(gate),
        around_clicks=lambda sink: GatedSink(sink, None, commit, reached),
    )
    running = page_views.start(plan, checkpointInterval=None)
    running.wait_for_records(2_000)
    savepoint = page_views.home / "savepoint"

    def drain() -> None:
        with contextlib.suppress(StillframeError):
            running.query.stop(savepoint=str(savepoint), drain=True)

    draining = threading.Thread(target=drain)
    draining.start()
    until(lambda: reached.is_open)
    gate.open()
    running.kill(slot=0)
    running.wait(SlotsRunning, attempt=2)
    commit.open()
    running.finish()
    draining.join(120)

    assert page_views.clicks_visible() == 2_000


def test_a_job_that_has_ended_says_so(page_views):
    gate = page_views.gate("second-half")
    gate.open()
    running = page_views.start(page_views.plan(page_views.halves(gate)))
    running.finish()

    with pytest.raises(StillframeError, match="ended before a savepoint of it could be taken"):
        running.query.savepoint(str(page_views.home / "savepoint"))
