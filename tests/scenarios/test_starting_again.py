"""A job that is stopped, finished, rescaled or run by two drivers at once."""

import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import (
    AlreadyFinished,
    CheckpointCommitted,
    CheckpointCompleted,
    SlotsRunning,
)
from stillframe.errors import JobFailed
from stillframe.graph.launch import Deployment
from stillframe.storage.paths import HISTORY_DIRECTORIES, LEASE_DIRECTORY, LOG_DIRECTORY
from stillframe.testing.processes import ProcessDeployment


def test_a_stopped_job_goes_on_from_its_last_checkpoint_in_a_new_driver(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    first = page_views.start(page_views.plan(source))
    first.wait_for_records(2_000)
    last = first.next_checkpoint()
    first.query.stop()
    assert first.query.summary.outcome == "stopped"
    assert first.query.exception() is None

    gate.open()
    second = page_views.start(page_views.plan(source))
    second.finish()

    page_views.check_exactly_once(source)
    [started] = second.attempts()
    assert started.attempt == 2
    assert started.restored_from >= last.checkpoint_id
    assert second.query.summary.records_in == 2_000, "only the second half was read"


def test_a_job_can_be_stopped_and_started_again_and_again(page_views):
    source = ClickSource(records=20_000, records_per_second=10_000)
    for _ in range(3):
        running = page_views.start(page_views.plan(source))
        running.wait(CheckpointCompleted)
        running.query.stop()

    running = page_views.start(page_views.plan(source))
    running.finish()

    page_views.check_exactly_once(source)


def test_a_finished_job_started_again_ends_at_once_and_changes_nothing(page_views):
    gate = page_views.gate("second-half")
    gate.open()
    source = page_views.halves(gate)
    page_views.start(page_views.plan(source)).finish()
    before = sorted(page_views.home.rglob("*"))

    again = page_views.start(page_views.plan(source))
    again.finish()

    assert again.attempts() == []
    assert sorted(page_views.home.rglob("*")) == before
    [told] = [str(event) for event in again.told if isinstance(event, AlreadyFinished)]
    assert "the job has finished, with checkpoint " in told
    assert "fresh=true (stillframe run --fresh)" in told
    assert f"restoreFrom={page_views.location}/page-views" in told


def test_a_finished_job_does_not_pass_over_a_snapshot_it_is_to_start_from(page_views):
    gate = page_views.gate("second-half")
    gate.open()
    source = page_views.halves(gate)
    page_views.start(page_views.plan(source)).finish()

    again = page_views.start(page_views.plan(source), restoreFrom=str(page_views.home / "sp"))

    with pytest.raises(JobFailed, match=r"of its own, so it does not start from .*--fresh"):
        again.query.awaitTermination(90)


def test_a_finished_job_started_again_sweeps_what_the_past_has_written_since(page_views):
    gate = page_views.gate("second-half")
    gate.open()
    source = page_views.halves(gate)
    page_views.start(page_views.plan(source)).finish()
    before = sorted(page_views.home.rglob("*"))
    job = Path(page_views.location) / "page-views"
    late = [job / "chk-99-1" / "_metadata", job / "shared" / "1" / "count-0-aggregates-99.arrow"]
    for file in late:  # as a driver and a slot that were thought dead
        file.parent.mkdir(exist_ok=True)
        file.write_text("too late")

    page_views.start(page_views.plan(source)).finish()

    assert sorted(page_views.home.rglob("*")) == before


def half_written_in(job):
    """A temporary file, as a driver leaves it that is killed while it writes, in each directory."""
    for place in (LOG_DIRECTORY, LEASE_DIRECTORY, *HISTORY_DIRECTORIES):
        (job / place).mkdir(exist_ok=True)
        (job / place / ".tmp-half").write_text("half of it")


def test_what_a_killed_driver_has_half_written_is_swept_by_the_next(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    first = page_views.start(page_views.plan(source))
    first.wait(CheckpointCompleted)
    first.query.stop()
    job = Path(page_views.location) / "page-views"
    half_written_in(job)

    gate.open()
    page_views.start(page_views.plan(source)).finish()

    assert list(job.rglob(".tmp-*")) == []
    page_views.check_exactly_once(source)


def test_what_a_driver_killed_at_the_end_of_its_job_has_half_written_is_swept(page_views):
    gate = page_views.gate("second-half")
    gate.open()
    source = page_views.halves(gate)
    page_views.start(page_views.plan(source)).finish()
    job = Path(page_views.location) / "page-views"
    half_written_in(job)

    page_views.start(page_views.plan(source)).finish()

    assert list(job.rglob(".tmp-*")) == []


def test_a_second_driver_that_asks_nobody_ends_the_first(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    first = page_views.start(page_views.plan(source))
    first.wait(CheckpointCompleted)

    second = page_views.start(page_views.plan(source), leaseTimeout="0 s")
    second.wait(SlotsRunning)
    with pytest.raises(JobFailed, match=r"attempt 2 .* has written .*run only one driver per job"):
        first.query.awaitTermination(90)
    gate.open()
    second.finish()

    page_views.check_exactly_once(source)
    assert second.attempts()[0].attempt == 2


def move_published(files, directory):
    """As a consumer does that takes away what it sees."""
    directory.mkdir(exist_ok=True)
    for file in files:
        file.rename(directory / file.name)


def test_published_files_that_a_consumer_moves_away_do_not_stop_the_next_start(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    first = page_views.start(page_views.plan(source), checkpointInterval="1 hour")
    first.wait_for_records(2_000)
    first.query.checkpoint(timeout=60)
    first.wait(CheckpointCommitted)
    first.query.stop()
    assert page_views.published("clicks")
    taken = page_views.home / "taken"
    move_published(page_views.published("clicks"), taken)

    again = page_views.start(page_views.plan(source))
    again.wait(SlotsRunning)
    gate.open()
    again.finish()

    assert again.query.summary.attempts == 1
    move_published(list(taken.iterdir()), page_views.home / "clicks")
    page_views.check_exactly_once(source)
    assert not list(page_views.home.rglob("_stillframe/*/*")), "nothing needs a receipt any more"


def test_a_published_file_that_is_lost_is_named_and_the_option_it_names_goes_on(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    first = page_views.start(page_views.plan(source), checkpointInterval="1 hour")
    first.wait_for_records(2_000)
    first.query.checkpoint(timeout=60)
    first.wait(CheckpointCommitted)
    first.query.stop()
    [lost, *_] = page_views.published("clicks")
    rows = pq.read_metadata(lost).num_rows
    lost.unlink()
    shutil.rmtree(page_views.home / "clicks" / "_stillframe" / "receipts")

    refused = page_views.start(page_views.plan(source))
    with pytest.raises(JobFailed) as raised:
        refused.query.awaitTermination(90)
    option = f"acceptMissingOutput={lost.name}:{rows}"
    assert option in str(raised.value)
    gate.open()
    accepted = {"acceptMissingOutput": option.partition("=")[2]}
    page_views.start(page_views.plan(source), **accepted).finish()

    assert page_views.clicks_visible() == 4_000 - rows


def test_a_job_that_runs_on_keeps_few_receipts(page_views):
    source = ClickSource(records=10_000_000, records_per_second=4_000)
    running = page_views.start(page_views.plan(source), checkpointInterval="100 ms")
    running.wait(CheckpointCommitted, number=12)

    kept = [len(list(each.iterdir())) for each in page_views.home.rglob("_stillframe/receipts")]
    running.query.stop()

    assert len(page_views.published("clicks")) > 8
    assert len(kept) == 2, "of clicks and of counts"
    assert max(kept) <= 6, "those of two or three checkpoints, of two subtasks"


def test_a_job_restarted_with_another_parallelism_counts_on_exactly(page_views):
    source = ClickSource(records=24_000, records_per_second=12_000, partitions=5)
    for parallelism in (2, 3):
        running = page_views.start(page_views.plan(source, parallelism))
        running.next_checkpoint()
        running.query.stop()

    running = page_views.start(page_views.plan(source, 1))
    running.finish()

    page_views.check_exactly_once(source)
    assert running.attempts()[0].restored_from is not None


def test_a_requested_checkpoint_is_taken_at_once_and_returns_its_number(page_views):
    source = page_views.halves(page_views.gate("never"))
    running = page_views.start(page_views.plan(source), checkpointInterval="1 hour")
    running.wait(SlotsRunning)

    assert running.query.checkpoint(timeout=60) == 1
    assert running.query.checkpoint(timeout=60) == 2


class AmongStrangers(Deployment):
    """Somebody talks nonsense to every port that the driver or a slot opens.

    A slot listens for moments only, until all have found each other. So the others are halted until
    the strangers have found it.
    """

    def __init__(self):
        self.bothered = set()
        self.stranger = None

    def launch(self, launch, on_ended):
        running = ProcessDeployment().launch(launch, on_ended)
        _halt(running.pids)
        self.stranger = threading.Thread(target=self.bother_one_by_one, args=(running.pids,))
        self.stranger.start()
        self.bothered.add(launch.coordinator.port)
        _bother(launch.coordinator.port)
        return running

    def bother_one_by_one(self, pids):
        deadline = time.monotonic() + 60
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            found = set()
            while not found and time.monotonic() < deadline:
                found = set(_listening_ports(pid)) - self.bothered
            self.bothered |= found
            for port in found:
                _bother(port)
            _halt([pid])
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _halt(pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def test_strangers_on_every_port_change_nothing(page_views):
    source = ClickSource(records=20_000, records_per_second=20_000)
    page_views.deployment = strangers = AmongStrangers()

    running = page_views.start(page_views.plan(source))
    running.finish()
    strangers.stranger.join(90)

    assert len(strangers.bothered) >= 3, "the coordinator's port and one per slot"
    page_views.check_exactly_once(source)
    assert len(running.attempts()) == 1


def _bother(port):
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 200, b"\xff" * 100_000):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(words)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(100)
        except OSError:
            pass  # being thrown out is what a stranger should expect


def _listening_ports(pid):
    """The ports a process listens on, as Linux tells them."""
    try:
        sockets = {_link_of(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return  # the process has ended
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            yield int(fields[1].split(":")[1], 16)


def _link_of(fd):
    try:
        return os.readlink(fd)
    except OSError:
        return ""  # it was closed while we looked


def test_a_job_without_a_place_for_checkpoints_ends_when_its_records_do(page_views):
    source = ClickSource(records=5_000)

    running = page_views.start(
        page_views.plan(source), checkpointLocation=None, checkpointInterval=None
    )
    running.finish()

    assert running.query.summary.checkpoints_completed == 0
    assert running.query.summary.records_in == 5_000
