"""Lines from a real connection: cut, decoded, bounded, and connected to again."""

import contextlib
import logging
import socket
import threading
from random import Random

import pyarrow as pa
import pytest

from stillframe.api.sources import SourceContext
from stillframe.clock import SystemClock
from stillframe.connectors.socket import LineCutter, SocketSource, socket_from_options
from stillframe.errors import BuildError, DataError, StillframeError, UnknownOption
from stillframe.ids import SubtaskIndex

WAIT_SECONDS_MAX = 30.0


class Sender:
    """Listens, and hands out one connection at a time."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_SECONDS_MAX)
        self.port = self._listener.getsockname()[1]
        self.connections = []

    def accept(self):
        connection, _ = self._listener.accept()
        connection.settimeout(WAIT_SECONDS_MAX)
        self.connections.append(connection)
        return connection

    def close(self):
        for each in (*self.connections, self._listener):
            each.close()


@pytest.fixture
def sender():
    sender = Sender()
    yield sender
    sender.close()


@contextlib.contextmanager
def reading(source, subtask=0):
    """The values that come, and the reader, which ends with this."""
    splits = source.splits(2) if subtask == 0 else []
    reader = source.open(splits, SourceContext(SubtaskIndex(subtask), 2, SystemClock()))
    values = (value for _, batch in reader.read() for value in batch.column("value").to_pylist())
    yield values
    reader.interrupt()
    values.close()
    reader.close()


def take(values, count):
    return [next(values) for _ in range(count)]


# --- cutting


@pytest.mark.parametrize("seed", range(50))
def test_however_the_bytes_come_the_lines_are_the_same(seed):
    random = Random(seed)
    text = bytes(random.choice(b"ab\r\n") for _ in range(random.randint(0, 60)))
    cutter, lines, at = LineCutter(100), [], 0
    while at < len(text):
        end = at + random.randint(1, 7)
        lines += cutter.feed(text[at:end])
        at = end
    lines += cutter.end()

    assert lines == text.splitlines()


def test_a_line_is_there_as_soon_as_its_end_is():
    cutter = LineCutter(100)

    assert cutter.feed(b"one\r") == [b"one"]
    assert cutter.feed(b"\ntwo") == []
    assert cutter.feed(b"\n\n") == [b"two", b""]
    assert cutter.end() == []


@pytest.mark.parametrize("chunks", [[b"x" * 11], [b"x" * 6, b"x" * 6], [b"x" * 11 + b"\n"]])
def test_a_line_that_is_too_long_is_refused_before_it_has_ended(chunks):
    cutter = LineCutter(10)
    for chunk in chunks[:-1]:
        assert cutter.feed(chunk) == []

    with pytest.raises(DataError, match="longer than maxLineBytes of 10: raise the option"):
        cutter.feed(chunks[-1])


# --- reading


def test_lines_come_as_they_are_sent(sender):
    with reading(SocketSource("127.0.0.1", sender.port)) as values:
        sending = threading.Thread(
            target=lambda: sender.accept().sendall("eins\nzwei\ndrü".encode())
        )
        sending.start()
        assert take(values, 2) == ["eins", "zwei"]
        sending.join()
        sender.connections[0].sendall(b"ben\n")
        assert take(values, 1) == ["drüben"]


def test_bytes_that_are_no_utf_8_are_replaced_as_java_does(sender):
    with reading(SocketSource("127.0.0.1", sender.port)) as values:
        threading.Thread(target=lambda: sender.accept().sendall(b"a\xffb\n\xe2\x82\n")).start()

        assert take(values, 2) == ["a\ufffdb", "\ufffd"]


def test_a_time_is_added_where_it_is_asked_for(sender):
    source = SocketSource("127.0.0.1", sender.port, with_timestamp=True)
    before_ms = SystemClock().wall_ms()
    reader = source.open(source.splits(1), SourceContext(SubtaskIndex(0), 1, SystemClock()))
    threading.Thread(target=lambda: sender.accept().sendall(b"now\n")).start()
    _, batch = next(reader.read())
    reader.close()

    assert batch.schema.field("timestamp").type == pa.timestamp("us", tz="UTC")
    came_ms = batch.column("timestamp").cast(pa.int64()).to_pylist()[0] / 1000
    assert before_ms <= came_ms <= SystemClock().wall_ms()


def test_a_connection_that_ends_is_made_again_and_its_last_line_counts(sender, caplog):
    def send():
        with sender.accept() as first:
            first.sendall(b"one\nunfinished")
        sender.accept().sendall(b"two\n")

    with reading(SocketSource("127.0.0.1", sender.port)) as values:
        threading.Thread(target=send).start()
        with caplog.at_level(logging.WARNING):
            assert take(values, 3) == ["one", "unfinished", "two"]

    assert "has closed the connection: connecting again" in caplog.text


def test_a_connection_that_breaks_leaves_no_half_line(sender):
    def send():
        first = sender.accept()
        first.sendall(b"one\nhal")
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        was_read.wait(WAIT_SECONDS_MAX)
        first.close()  # with a reset
        sender.accept().sendall(b"two\n")

    was_read = threading.Event()
    with reading(SocketSource("127.0.0.1", sender.port)) as values:
        threading.Thread(target=send).start()
        assert take(values, 1) == ["one"]
        was_read.set()
        assert take(values, 1) == ["two"]


def test_who_reads_waits_for_who_sends_but_not_for_ever():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    source = SocketSource("127.0.0.1", port, connect_seconds_max=0.2)

    with (
        reading(source) as values,
        pytest.raises(StillframeError, match="nobody answers at socket"),
    ):
        next(values)


def test_a_reader_that_is_to_end_ends_where_it_waits_and_the_sender_hears_it(sender):
    source = SocketSource("127.0.0.1", sender.port)
    reader = source.open(source.splits(1), SourceContext(SubtaskIndex(0), 1, SystemClock()))
    read = []
    thread = threading.Thread(target=lambda: read.extend(reader.read()))
    thread.start()
    connection = sender.accept()

    reader.interrupt()
    thread.join(WAIT_SECONDS_MAX)

    assert not thread.is_alive()
    assert connection.recv(1) == b"", "the connection is closed"
    assert read == []
    reader.close()


def test_a_reader_without_the_split_ends_at_once():
    with reading(SocketSource("127.0.0.1", 1), subtask=1) as values:
        assert list(values) == []


# --- options


def test_options_are_sparks_and_two_of_our_own():
    source = socket_from_options(
        {
            "HOST": "a.example",
            "port": "9999",
            "includeTimestamp": "true",
            "maxLineBytes": "10",
            "connectTimeout": "5 s",
        }
    )

    assert source == SocketSource("a.example", 9999, True, 10, 5.0)
    assert source.describe() == "socket a.example:9999"
    assert source.schema.names == ["value", "timestamp"]
    assert socket_from_options({"host": "h", "port": "1"}).schema.names == ["value"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"port": "1"}, "Set a host to read from"),
        ({"host": "h"}, "Set a port to read from"),
        ({"host": "h", "port": "x"}, "option port is a whole number"),
        ({"host": "h", "port": "70000"}, "option port is a number from 1 to 65535, not '70000'"),
        ({"host": "h", "port": "1", "includeTimestamp": "si"}, "includeTimestamp is true or false"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, reason):
    with pytest.raises(BuildError, match=reason):
        socket_from_options(options)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UnknownOption, match="did you mean 'port'"):
        socket_from_options({"host": "h", "ports": "1"})
