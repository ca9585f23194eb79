"""A job that is stopped, finished, rescaled or run by two drivers at once."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import CheckpointCompleted, SlotsRunning
from stillframe.errors import JobFailed
from stillframe.graph.launch import Deployment
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
