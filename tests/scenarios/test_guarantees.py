"""What a job promises, told when it starts, and what a source that cannot rewind leaves of it."""

from __future__ import annotations

import logging
import socket
from collections import Counter

import pyarrow.parquet as pq
import pytest

from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.socket import SocketSource
from stillframe.coordinator.history import GuaranteeGiven, SlotsRunning
from stillframe.errors import StartRefused
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan

WAIT_SECONDS_MAX = 90.0


class Sender:
    """Numbers as lines, to whoever is connected."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_SECONDS_MAX)
        self.port = self._listener.getsockname()[1]
        self._connection = None

    def accept(self):
        """The next connection takes the place of the one before."""
        self.close_connection()
        self._connection, _ = self._listener.accept()

    def send(self, first, stop):
        self._connection.sendall("".join(f"{number}\n" for number in range(first, stop)).encode())

    def close_connection(self):
        if self._connection is not None:
            self._connection.close()

    def close(self):
        self.close_connection()
        self._listener.close()


@pytest.fixture
def sender():
    sender = Sender()
    yield sender
    sender.close()


@pytest.fixture
def lines(page_views, sender):
    """A plan that writes what is sent to files, for any parallelism."""

    def plan(parallelism):
        source = SocketSource("127.0.0.1", sender.port)
        read = Node(Read(source), source.schema, given_uid="lines").with_parallelism(1)
        sink = FileSink(str(page_views.home / "lines"), "parquet", source.schema)
        write = Node(Write(sink), source.schema, (read,), given_uid="write")
        return build_plan("lines", [write.with_parallelism(parallelism)], parallelism)

    return plan


def written(page_views):
    return Counter(map(int, pq.read_table(page_views.home / "lines")["value"].to_pylist()))


def once(*numbers):
    return Counter(number for each in numbers for number in each)


def test_after_a_failure_what_came_since_the_last_checkpoint_is_lost_and_nothing_comes_twice(
    page_views, sender, lines
):
    running = page_views.start(lines(2), checkpointInterval="1 hour")
    sender.accept()
    sender.send(0, 100)
    running.wait_for_records(100)
    running.query.checkpoint()
    sender.send(100, 200)
    running.wait_for_records(200)

    running.kill(slot=0)
    running.wait(SlotsRunning, attempt=2)
    sender.accept()
    sender.send(200, 300)
    running.wait_for_records(100)
    running.query.processAllAvailable()
    running.query.stop()

    assert running.query.guarantee().word == "at-most-once"
    assert written(page_views) == once(range(100), range(200, 300))


def test_a_sender_that_goes_and_comes_back_is_no_failure(page_views, sender, lines):
    running = page_views.start(lines(2), checkpointInterval="1 hour")
    sender.accept()
    sender.send(0, 100)
    running.wait_for_records(100)
    sender.close_connection()
    sender.accept()
    sender.send(100, 200)
    running.wait_for_records(200)
    running.query.processAllAvailable()
    running.query.stop()

    assert running.query.summary.attempts == 1
    assert written(page_views) == once(range(200))


def test_a_rescale_connects_again_and_loses_nothing_that_had_been_read(page_views, sender, lines):
    running = page_views.start(lines(2), lines, checkpointInterval="1 hour")
    sender.accept()
    sender.send(0, 100)
    running.wait_for_records(100)

    running.query.rescale(3)
    sender.accept()
    sender.send(100, 200)
    running.wait_for_records(100)
    running.query.processAllAvailable()
    running.query.stop()

    assert written(page_views) == once(range(200))


def test_a_job_that_is_stopped_lets_the_sender_go(page_views, sender, lines):
    running = page_views.start(lines(1))
    sender.accept()
    sender.send(0, 10)
    running.wait_for_records(10)
    running.query.stop()

    sender._connection.settimeout(WAIT_SECONDS_MAX)
    assert sender._connection.recv(1) == b""


def test_the_guarantee_is_told_before_anything_runs_and_wherever_one_looks(
    page_views, lines, caplog, capsys
):
    with caplog.at_level(logging.WARNING, "stillframe"):
        running = page_views.start(lines(1))
        given = running.wait(GuaranteeGiven)

    assert running.told[0] == given
    assert (given.word, len(given.reasons)) == ("at-most-once", 1)
    assert "the guarantee is at-most-once (socket 127.0.0.1:" in caplog.text
    query = running.query
    assert query.guarantee().reasons == given.reasons
    assert query.status["guarantee"] == "at-most-once"
    assert query.summary.guarantee == "at-most-once"
    query.explain()
    assert f"guarantee: at-most-once\n    {given.reasons[0]}\n" in capsys.readouterr().out


def test_an_exact_job_says_so_in_a_word(page_views, capsys):
    running = page_views.start(page_views.plan(page_views.halves(page_views.gate("never"))))

    assert str(running.wait(GuaranteeGiven)) == "the guarantee is exactly-once"
    running.query.explain()
    assert capsys.readouterr().out.endswith("guarantee: exactly-once\n")


@pytest.mark.parametrize("required", ["exactly-once", "at-least-once"])
def test_a_job_that_cannot_give_what_is_required_does_not_start(page_views, lines, required):
    with pytest.raises(StartRefused, match=f"requireGuarantee is {required}, but .* at-most-once"):
        page_views.start(lines(1), requireGuarantee=required)

    assert not list(page_views.home.glob("chk/*"))


def test_a_job_that_gives_more_than_is_required_starts(page_views):
    gate = page_views.gate("second-half")
    gate.open()
    source = page_views.halves(gate)

    page_views.start(page_views.plan(source), requireGuarantee="at-least-once").finish()
    page_views.check_exactly_once(source)


def test_at_least_once_is_exactly_once_with_one_channel_also_after_a_kill(page_views):
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    options = {"checkpointMode": "at-least-once", "requireGuarantee": "exactly-once"}
    running = page_views.start(page_views.plan(source, parallelism=1), **options)
    assert running.query.guarantee().word == "exactly-once"
    running.wait_for_records(2_000)
    running.next_checkpoint()
    running.kill(slot=0)
    running.wait(SlotsRunning, attempt=2)
    half.open()
    running.finish()

    assert running.attempts()[-1].restored_from is not None
    page_views.check_exactly_once(source)


def test_at_least_once_is_refused_as_exactly_once_with_several_channels(page_views):
    options = {"checkpointMode": "at-least-once", "requireGuarantee": "exactly-once"}
    plan = page_views.plan(page_views.halves(page_views.gate("never")), parallelism=2)

    with pytest.raises(StartRefused, match=r"checkpointMode is at-least-once, so after a failure"):
        page_views.start(plan, **options)
