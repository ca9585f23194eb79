"""Nobody is dead and nobody answers: slots that are frozen, and connections that swallow all."""

import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from stillframe.coordinator.history import AttemptFailed, CheckpointCompleted, SlotsRunning
from stillframe.graph.launch import Deployment, RunningSlots
from stillframe.testing.processes import ProcessDeployment
from stillframe.wire import Address

pytestmark = pytest.mark.slow

SILENT_SECONDS_MAX = 6


class Unreachable(RunningSlots):
    """Slots that nobody can end: they do it themselves."""

    def cancel(self):
        pass


class BlackHole(Deployment):
    """Slots reach their coordinator by a way that passes everything on, or swallows everything.

    What is swallowed is read and dropped, and no connection ends: as where a router between two
    machines forgets them.
    """

    def __init__(self):
        self.swallows = threading.Event()
        self.swallowed_bytes = 0
        self._sockets = []

    def launch(self, launch, on_ended):
        listener = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(listener)
        server = (launch.coordinator.host, launch.coordinator.port)
        threading.Thread(target=self._accept, args=(listener, server), daemon=True).start()
        here = Address("127.0.0.1", listener.getsockname()[1])
        ProcessDeployment().launch(replace(launch, coordinator=here), on_ended)
        return Unreachable()

    def end(self):
        for each in self._sockets:
            with suppress(OSError):  # wakes the thread that waits in it
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener, server):
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(server)
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source, target):
        is_lost = False
        with suppress(OSError):
            while data := source.recv(1 << 16):
                # A connection that has lost bytes never carries any again.
                is_lost = is_lost or self.swallows.is_set()
                if is_lost:
                    self.swallowed_bytes += len(data)
                else:
                    target.sendall(data)
        if not is_lost:
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)


@pytest.fixture
def hole(page_views):
    page_views.deployment = hole = BlackHole()
    yield hole
    page_views.stop_all()
    hole.end()


@pytest.fixture
def halves(page_views):
    half = page_views.gate("second-half")
    return page_views.halves(half), half


def test_a_slot_that_is_frozen_is_given_up_and_nothing_is_lost_or_doubled(page_views, halves):
    source, half = halves
    running = page_views.start(
        page_views.plan(source), heartbeatTimeout=f"{SILENT_SECONDS_MAX} seconds"
    )
    running.next_checkpoint()
    frozen = running.wait(SlotsRunning, attempt=1).pids[1]
    os.kill(frozen, signal.SIGSTOP)
    half.open()  # the other slot reads on, into channels that nobody takes from
    failed = running.wait(AttemptFailed, attempt=1)
    running.finish()

    assert "slot 1" in failed.reason
    assert "heartbeatTimeout" in failed.reason
    assert running.attempts()[1].restored_from is not None
    page_views.check_exactly_once(source)


@pytest.mark.parametrize("seconds", [2.0, pytest.param(12.0, marks=pytest.mark.soak)])
def test_a_slot_that_is_frozen_for_a_moment_goes_on_as_if_nothing_had_been(
    page_views, halves, seconds
):
    source, half = halves
    running = page_views.start(page_views.plan(source))
    running.next_checkpoint()
    frozen = running.wait(SlotsRunning, attempt=1).pids[1]
    os.kill(frozen, signal.SIGSTOP)
    half.open()
    threading.Timer(seconds, os.kill, (frozen, signal.SIGCONT)).start()
    running.finish()

    assert len(running.attempts()) == 1
    page_views.check_exactly_once(source)


def test_connections_that_swallow_everything_are_given_up_and_their_slots_end(
    page_views, halves, hole
):
    source, half = halves
    running = page_views.start(
        page_views.plan(source), heartbeatTimeout=f"{SILENT_SECONDS_MAX} seconds"
    )
    before = running.next_checkpoint()
    slots = running.wait(SlotsRunning, attempt=1).pids
    hole.swallows.set()
    failed = running.wait(AttemptFailed, attempt=1)
    hole.swallows.clear()
    running.wait(SlotsRunning, attempt=2)
    half.open()
    running.finish()

    assert hole.swallowed_bytes > 0
    assert "heartbeatTimeout" in failed.reason
    assert running.attempts()[1].restored_from >= before.checkpoint_id
    assert all(not _is_there(pid) for pid in slots), "the slots of the lost attempt have ended"
    completed = [each for each in running.told if isinstance(each, CheckpointCompleted)]
    numbers = [each.checkpoint_id for each in completed]
    assert numbers == sorted(set(numbers))
    page_views.check_exactly_once(source)


def _is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
