"""A job that is stopped, finished, rescaled or run by two drivers at once."""

import socket
import threading

import pytest

from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, SlotsRunning
from stillframe.errors import JobFailed


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


def test_a_second_driver_on_the_same_directory_ends_the_first(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    first = page_views.start(page_views.plan(source))
    first.wait(CheckpointCompleted)

    second = page_views.start(page_views.plan(source))
    second.wait(SlotsRunning)
    with pytest.raises(JobFailed, match=r"attempt 2 .* has written .*run only one driver per job"):
        first.query.awaitTermination(30)
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

    assert running.query.checkpoint(timeout=20) == 1
    assert running.query.checkpoint(timeout=20) == 2


def test_strangers_on_every_port_change_nothing(page_views):
    source = ClickSource(records=20_000, records_per_second=10_000)
    running = page_views.start(page_views.plan(source))
    pids = running.wait(SlotsRunning).pids
    ports = {port for pid in (*pids, "self") for port in _listening_ports(pid)}
    assert len(ports) >= 3, "the coordinator and two slots listen"

    strangers = [threading.Thread(target=_bother, args=(port,)) for port in ports]
    for stranger in strangers:
        stranger.start()
    for stranger in strangers:
        stranger.join(20)
    running.finish()

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
    from pathlib import Path

    sockets = {
        fd.readlink().name for fd in Path(f"/proc/{pid}/fd").iterdir() if _is_socket_link(fd)
    }
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            yield int(fields[1].split(":")[1], 16)


def _is_socket_link(fd):
    try:
        return fd.readlink().name.startswith("socket:")
    except OSError:
        return False


def test_a_job_without_a_checkpoint_location_runs_once_and_ends(page_views):
    source = ClickSource(records=5_000)
    running = page_views.start(
        page_views.plan(source), checkpointLocation="x", checkpointInterval="1 hour"
    )
    running.query.stop()
    del running
    assert isinstance(page_views.started[0].told[0], AttemptStarted)
