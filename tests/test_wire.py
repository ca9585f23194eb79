"""Who gets in at the door of a job, and how control messages travel, over real sockets."""

import queue
import socket
import struct
import threading
from types import MappingProxyType

import pytest

from stillframe import wire
from stillframe.errors import StillframeError
from stillframe.wire import (
    Address,
    ConnectionLost,
    Doorman,
    MessageReader,
    accept_authenticated,
    address_of,
    connect,
    listen,
    read_message,
    send_message,
)

SECRET = b"the secret of this job"
HELLO = {"kind": "data", "job": "page-views", "attempt": 3, "slot": 1}
GREETING_BYTES = 4 + 2 + 32
LIMIT_SECONDS = 10.0


class House:
    """A doorman and everyone he let in."""

    def __init__(self, **options):
        self.peers = queue.Queue()
        self.sockets = []
        listener = listen("127.0.0.1")
        self.address = address_of(listener)
        self.doorman = Doorman(
            listener, SECRET, lambda sock, hello: self.peers.put((sock, hello)), **options
        )

    def next_peer(self):
        peer = self.peers.get(timeout=LIMIT_SECONDS)
        self.sockets.append(peer[0])
        return peer

    def stranger(self):
        sock = socket.create_connection((self.address.host, self.address.port), LIMIT_SECONDS)
        self.sockets.append(sock)
        return sock


@pytest.fixture
def house():
    opened = []

    def open_house(**options):
        opened.append(House(**options))
        return opened[-1]

    yield open_house
    for each in opened:
        each.doorman.close()
        while not each.peers.empty():
            each.next_peer()
        for sock in each.sockets:
            sock.close()


def everything_sent_to(sock):
    received = b""
    while True:
        try:
            part = sock.recv(4096)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def serve_once(answer):
    """A server of one connection that does as told; where it listens, and its thread."""
    listener = listen("127.0.0.1")

    def serve():
        sock, _ = listener.accept()
        with sock, listener:
            answer(sock)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return address_of(listener), thread


def test_a_peer_that_knows_the_secret_is_let_in_with_its_hello(house):
    door = house()

    with connect(door.address, SECRET, HELLO, LIMIT_SECONDS) as mine:
        theirs, hello = door.next_peer()
        with theirs:
            assert hello == HELLO
            mine.sendall(b"ping")
            assert theirs.recv(4) == b"ping"


def test_the_blocking_form_lets_in_a_peer_too():
    seen = []
    address, thread = serve_once(
        lambda sock: seen.append(accept_authenticated(sock, SECRET, LIMIT_SECONDS))
    )

    connect(address, SECRET, HELLO, LIMIT_SECONDS).close()
    thread.join(LIMIT_SECONDS)
    assert seen == [HELLO]


def test_a_peer_with_another_secret_is_turned_away(house):
    door = house()

    with pytest.raises(ConnectionLost, match="does not know the same job secret"):
        connect(door.address, b"another secret", HELLO, LIMIT_SECONDS)
    assert door.peers.empty()


def test_a_server_with_another_secret_is_not_believed():
    def impostor(sock):
        sock.sendall(struct.pack("!4sH32s", b"STLF", wire.PROTOCOL_VERSION, b"n" * 32))
        sock.recv(4096)
        sock.sendall(struct.pack("!BH", 0, 0) + b"m" * 32)

    address, _ = serve_once(impostor)
    with pytest.raises(StillframeError, match="does not know the job's secret"):
        connect(address, SECRET, HELLO, LIMIT_SECONDS)


def test_a_proof_sent_back_to_its_maker_is_not_believed():
    def mirror(sock):
        sock.sendall(struct.pack("!4sH32s", b"STLF", wire.PROTOCOL_VERSION, b"n" * 32))
        sock.sendall(struct.pack("!BH", 0, 0) + sock.recv(4096)[-32:])

    address, _ = serve_once(mirror)
    with pytest.raises(StillframeError, match="does not know the job's secret"):
        connect(address, SECRET, HELLO, LIMIT_SECONDS)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b" " * 100,
        struct.pack("!4sH32sI", b"STLF", 1, b"n" * 32, 2) + b"{}" + b"m" * 32,
        struct.pack("!4sH32sI", b"STLF", 1, b"n" * 32, 8193),
        struct.pack("!4sH32sI", b"STLF", 2, b"n" * 32, 2) + b"{}" + b"m" * 32,
    ],
    ids=["another protocol", "a wrong proof", "a hello too long", "another version"],
)
def test_a_stranger_gets_the_greeting_and_not_a_byte_more(house, said):
    door = house()

    with door.stranger() as stranger:
        stranger.sendall(said)
        assert len(everything_sent_to(stranger)) == GREETING_BYTES
    assert door.peers.empty()


def test_a_recorded_handshake_opens_no_door(house):
    door, recording = house(), bytearray()

    def listen_in(sock):
        upstream = door.stranger()
        with upstream:
            sock.sendall(upstream.recv(GREETING_BYTES))
            recording.extend(sock.recv(4096))
            upstream.sendall(recording)
            sock.sendall(upstream.recv(4096))

    address, thread = serve_once(listen_in)
    connect(address, SECRET, HELLO, LIMIT_SECONDS).close()
    thread.join(LIMIT_SECONDS)
    door.next_peer()

    with door.stranger() as stranger:
        stranger.sendall(recording)
        assert len(everything_sent_to(stranger)) == GREETING_BYTES
    assert door.peers.empty()


def test_another_version_is_told_apart_from_a_stranger(house, monkeypatch):
    door = house()
    greeting = door.stranger().recv(GREETING_BYTES)
    address, _ = serve_once(lambda sock: sock.sendall(greeting))

    monkeypatch.setattr(wire, "PROTOCOL_VERSION", 2)
    with pytest.raises(StillframeError, match="version 1 of the protocol, this process version 2"):
        connect(address, SECRET, HELLO, LIMIT_SECONDS)


def test_a_refused_peer_hears_why(house):
    door = house(admit=lambda hello: f"attempt {hello['attempt']} is over")

    with pytest.raises(StillframeError, match="refused us: attempt 3 is over"):
        connect(door.address, SECRET, HELLO, LIMIT_SECONDS)
    assert door.peers.empty()


def test_a_silent_stranger_delays_nobody(house):
    door = house()

    with door.stranger(), connect(door.address, SECRET, HELLO, LIMIT_SECONDS):
        assert door.next_peer()[1] == HELLO


def test_a_silent_stranger_is_dropped_after_the_limit(house):
    door = house(stranger_seconds_max=0.05)

    with door.stranger() as stranger:
        assert len(everything_sent_to(stranger)) == GREETING_BYTES


def test_the_oldest_stranger_makes_room_for_the_next(house):
    door = house(strangers_max=2, stranger_seconds_max=60.0)

    with door.stranger() as oldest, door.stranger() as older, door.stranger() as newest:
        assert len(everything_sent_to(oldest)) == GREETING_BYTES
        for waiting in (older, newest):
            assert len(waiting.recv(4096)) == GREETING_BYTES
        with connect(door.address, SECRET, HELLO, LIMIT_SECONDS):
            assert door.next_peer()[1] == HELLO


def test_a_crowd_of_strangers_keeps_no_peer_out(house):
    door = house()
    for _ in range(100):
        door.stranger()

    with connect(door.address, SECRET, HELLO, LIMIT_SECONDS):
        assert door.next_peer()[1] == HELLO


def test_a_peer_that_cannot_be_served_leaves_the_door_open():
    served = threading.Event()

    def serve(sock, hello):
        if hello["slot"] == 1:
            raise OSError("too bad")
        sock.close()
        served.set()

    listener = listen("127.0.0.1")
    address = address_of(listener)
    doorman = Doorman(listener, SECRET, serve)
    connect(address, SECRET, HELLO, LIMIT_SECONDS).close()
    connect(address, SECRET, {**HELLO, "slot": 2}, LIMIT_SECONDS).close()
    assert served.wait(LIMIT_SECONDS)
    doorman.close()


def test_a_closed_door_closes_on_strangers_and_may_be_closed_twice(house):
    door = house()

    with door.stranger() as stranger:
        assert len(stranger.recv(GREETING_BYTES)) == GREETING_BYTES
        door.doorman.close()
        assert everything_sent_to(stranger) == b""
    door.doorman.close()
    with pytest.raises(ConnectionLost, match="cannot reach"):
        connect(door.address, SECRET, HELLO, LIMIT_SECONDS)


def test_a_server_that_says_nothing_is_given_up_at_the_limit():
    with listen("127.0.0.1") as listener, pytest.raises(ConnectionLost, match=r"in 0\.05 s"):
        connect(address_of(listener), SECRET, HELLO, 0.05)


def test_a_hello_too_long_is_refused_before_it_is_sent(house):
    with pytest.raises(StillframeError, match="more than the 8192 allowed"):
        connect(house().address, SECRET, {"job": "x" * 9000}, LIMIT_SECONDS)


def test_an_address_nobody_owns_cannot_be_listened_on():
    with pytest.raises(StillframeError, match="cannot listen on"):
        listen("192.0.2.1")
    assert str(Address("10.0.0.1", 80)) == "10.0.0.1:80"


# --- messages


@pytest.fixture
def wires():
    one, other = socket.socketpair()
    one.settimeout(LIMIT_SECONDS)
    other.settimeout(LIMIT_SECONDS)
    with one, other:
        yield one, other


def test_messages_arrive_in_order_and_then_the_end(wires):
    one, other = wires
    messages = [{"n": n, "text": "帧" * n, "list": [1.5, None, True]} for n in range(5)]
    for message in messages:
        send_message(one, message)
    one.shutdown(socket.SHUT_WR)

    assert [read_message(other) for _ in messages] == messages
    assert read_message(other) is None


def test_any_mapping_or_sequence_is_sent_as_json(wires):
    send_message(wires[0], MappingProxyType({"splits": (1, 2), "at": MappingProxyType({"row": 7})}))
    assert read_message(wires[1]) == {"splits": [1, 2], "at": {"row": 7}}


def test_a_message_may_come_in_any_pieces():
    one, other = socket.socketpair()
    send_message(one, {"a": 1})
    send_message(one, {"b": 2})
    data = other.recv(4096)
    one.close()
    other.close()

    for size in range(1, len(data) + 1):
        reader, messages = MessageReader(), []
        for start in range(0, len(data), size):
            messages += reader.receive(data[start : start + size])
        reader.end()
        assert messages == [{"a": 1}, {"b": 2}]


def test_a_connection_that_ends_inside_a_message_is_lost(wires):
    one, other = wires
    one.sendall(struct.pack("!I", 10) + b'{"a"')
    one.close()

    with pytest.raises(ConnectionLost, match="ended inside a message"):
        read_message(other)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [(b"\xff\xfe", "not JSON"), (b"[1]", "a list came"), (b"[" * 100_000, "not JSON")],
)
def test_what_is_not_a_json_object_is_refused(wires, body, complaint):
    wires[0].sendall(struct.pack("!I", len(body)) + body)
    with pytest.raises(StillframeError, match=complaint):
        read_message(wires[1])


def test_a_message_too_long_is_refused_on_both_sides(wires, monkeypatch):
    wires[0].sendall(struct.pack("!I", wire.MESSAGE_BYTES_MAX + 1))
    with pytest.raises(StillframeError, match="more than the 67108864 allowed"):
        read_message(wires[1])

    monkeypatch.setattr(wire, "MESSAGE_BYTES_MAX", 10)
    with pytest.raises(StillframeError, match="more than the 10 allowed"):
        send_message(wires[0], {"text": "too long"})
