"""The coordinator's end of the control connections, with real sockets."""

import queue
import socket

import pytest

from stillframe.coordinator.control import ControlServer, SlotJoined, SlotLost, SlotReported
from stillframe.errors import StillframeError
from stillframe.protocol.messages import (
    Drained,
    EndSlot,
    Running,
    TriggerCheckpoint,
    message_to_json,
    order_from_json,
)
from stillframe.wire import Address, connect, read_message, send_message

SECRET = b"s" * 32
LIMIT_SECONDS = 20


class Coordinator:
    def __init__(self):
        self.events = queue.Queue()
        self.server = ControlServer("127.0.0.1", SECRET, "views", 3, 2, self.events.put)
        self.sockets = []

    def join(self, slot=0, secret=SECRET, **hello):
        said = {"kind": "control", "job": "views", "attempt": 3, "slot": slot, "pid": 4711}
        said |= {"host": "10.0.0.1", "port": 5000, **hello}
        sock = connect(Address("127.0.0.1", self.server.port), secret, said, LIMIT_SECONDS)
        sock.settimeout(LIMIT_SECONDS)
        self.sockets.append(sock)
        return sock

    def next_event(self):
        return self.events.get(timeout=LIMIT_SECONDS)

    def close(self):
        self.server.close()
        for sock in self.sockets:
            sock.close()


@pytest.fixture
def coordinator():
    made = Coordinator()
    yield made
    made.close()


def test_a_slot_that_joins_is_told_with_its_pid_and_where_its_data_goes(coordinator):
    coordinator.join(slot=1)

    assert coordinator.next_event() == SlotJoined(1, 4711, ("10.0.0.1", 5000))


def test_reports_arrive_in_order_and_the_end_of_the_connection_after_them(coordinator):
    sock = coordinator.join()
    coordinator.next_event()
    for report in (Running(), Drained(0, 0)):
        send_message(sock, message_to_json(report))
    sock.close()

    assert coordinator.next_event() == SlotReported(0, Running())
    assert coordinator.next_event() == SlotReported(0, Drained(0, 0))
    assert coordinator.next_event() == SlotLost(0, "it closed its connection")


def test_an_order_goes_to_its_slot_and_a_broadcast_to_all(coordinator):
    first, second = coordinator.join(0), coordinator.join(1)
    for _ in range(2):
        coordinator.next_event()

    coordinator.server.send(1, TriggerCheckpoint(7, 1))
    coordinator.server.broadcast(EndSlot())

    assert order_from_json(read_message(second)) == TriggerCheckpoint(7, 1)
    assert order_from_json(read_message(second)) == EndSlot()
    assert order_from_json(read_message(first)) == EndSlot()


def test_sending_to_a_slot_that_is_gone_is_no_error(coordinator):
    coordinator.join(0).close()
    coordinator.next_event()
    assert isinstance(coordinator.next_event(), SlotLost)

    for _ in range(3):
        coordinator.server.broadcast(EndSlot())
    coordinator.server.send(1, EndSlot())


@pytest.mark.parametrize(
    ("hello", "answer"),
    [
        ({"attempt": 2}, "attempt 2 is over, attempt 3 is running"),
        ({"job": "other"}, "coordinator of job 'views'"),
        ({"kind": "data"}, "coordinator of job 'views'"),
        ({"slot": 2}, "there is no slot 2"),
        ({"slot": -1}, "there is no slot -1"),
        ({"slot": "0"}, "not a slot's"),
    ],
)
def test_who_does_not_belong_here_is_told_why(coordinator, hello, answer):
    with pytest.raises(StillframeError, match=answer):
        coordinator.join(**hello)
    assert coordinator.events.empty()


def test_a_hello_without_a_pid_or_an_address_is_refused_and_harms_nobody(coordinator):
    with pytest.raises(StillframeError, match="not a slot's"):
        coordinator.join(pid=None)
    with pytest.raises(StillframeError, match="not a slot's"):
        coordinator.join(port="5000")

    coordinator.join()
    assert coordinator.next_event() == SlotJoined(0, 4711, ("10.0.0.1", 5000))


def test_a_slot_registers_once_per_attempt(coordinator):
    coordinator.join(0)
    coordinator.next_event()

    with pytest.raises(StillframeError, match="slot 0 has registered already"):
        coordinator.join(0)


def test_without_the_secret_nobody_gets_in(coordinator):
    with pytest.raises(StillframeError):
        coordinator.join(secret=b"x" * 32)
    assert coordinator.events.empty()


def test_a_slot_that_talks_nonsense_is_lost_with_the_reason(coordinator):
    sock = coordinator.join()
    coordinator.next_event()
    send_message(sock, {"type": "Dance"})

    lost = coordinator.next_event()
    assert isinstance(lost, SlotLost)
    assert "same version of stillframe" in lost.reason


def test_closing_ends_the_connections_and_is_not_told_as_a_loss(coordinator):
    sock = coordinator.join()
    coordinator.next_event()

    coordinator.server.close()

    assert read_message(sock) is None
    assert coordinator.events.empty()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", coordinator.server.port), timeout=5)
