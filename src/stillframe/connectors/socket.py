"""Lines of text from a TCP connection, as Spark's `socket`: what was read cannot be read again.

Theory of operation
-------------------
One subtask connects and reads; whoever sends decides what comes next, so there is no position. An
attempt that follows another connects anew and gets what is sent from then on. State and sinks go
back to the last completed checkpoint as always, so what had been read after it is lost, and so is
what is sent while nobody is connected; nothing comes twice. That is at-most-once.

Lines end as Java's `BufferedReader` has them: with a line feed, a carriage return or both. Bytes
that are no UTF-8 become U+FFFD. What precedes the end of the connection is a line too; what
precedes its breakdown is not, as nobody knows whether it was whole.

A connection that ends is made again, with pauses that grow, for so long at most; then the attempt
fails and the job's restart strategy decides. (Spark's `socket` never gets another record then.)
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from stillframe.api.sources import BlockingReader, Source, SourceContext, Split
from stillframe.clock import Clock
from stillframe.config import parse_count, parse_duration_seconds, parse_flag, refuse_unknown
from stillframe.errors import BuildError, DataError, StillframeError

_SPLIT = "connection"
_CHUNK_BYTES = 64 * 1024
_LOOK_UP_SECONDS = 0.2
"""How often a reader that waits for bytes looks whether it is to end."""
_CONNECT_SECONDS_MAX = 2.0
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 0.05, 2.0
_PORT_MAX = 65_535

log = logging.getLogger("stillframe")


class LineCutter:
    """Cuts bytes into lines as they come; keeps less than one line."""

    def __init__(self, line_bytes_max: int) -> None:
        self._line_bytes_max = line_bytes_max
        self._rest = b""
        self._may_be_second_half = False
        """Whether a line feed that comes next belongs to a carriage return that was seen."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that end in this chunk."""
        if self._may_be_second_half and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._may_be_second_half = chunk.endswith(b"\r")
        lines = (self._rest + chunk).splitlines()
        is_whole = chunk.endswith((b"\n", b"\r")) or not lines
        self._rest = b"" if is_whole else lines.pop()
        for line in (*lines, self._rest):
            self._refuse_too_long(line)
        return lines

    def end(self) -> list[bytes]:
        """The line that nothing ended but the end of everything."""
        rest, self._rest = self._rest, b""
        self._may_be_second_half = False
        return [rest] if rest else []

    def _refuse_too_long(self, line: bytes) -> None:
        if len(line) > self._line_bytes_max:
            raise DataError(
                f"a line of at least {len(line)} bytes came, longer than maxLineBytes of"
                f" {self._line_bytes_max}: raise the option, or end lines with a line feed"
            )


@dataclass(frozen=True)
class SocketSource(Source):
    """What somebody sends who listens on a port; it never ends."""

    rewindable = False

    host: str
    port: int
    with_timestamp: bool = False
    """Whether there is a column with the time at which a line came."""
    line_bytes_max: int = 1 << 20
    connect_seconds_max: float = 60.0
    """How long nobody may be there before the attempt fails."""

    @property
    def is_unbounded(self) -> bool:
        return True

    @property
    def schema(self) -> pa.Schema:
        value = pa.field("value", pa.string())
        if not self.with_timestamp:
            return pa.schema([value])
        return pa.schema([value, pa.field("timestamp", pa.timestamp("us", tz="UTC"))])

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(_SPLIT, {})]

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _SocketReader(self, splits, context.clock)

    def describe(self) -> str:
        return f"socket {self.host}:{self.port}"

    def batch(self, lines: Sequence[bytes], now_ms: int) -> pa.RecordBatch:
        """The records that these lines are."""
        columns = [pa.array([line.decode("utf-8", "replace") for line in lines], pa.string())]
        if self.with_timestamp:
            came_us = pa.array([now_ms * 1000] * len(lines), pa.int64())
            columns.append(came_us.cast(pa.timestamp("us", tz="UTC")))
        return pa.record_batch(columns, schema=self.schema)


class _SocketReader(BlockingReader):
    def __init__(self, source: SocketSource, splits: Sequence[Split], clock: Clock) -> None:
        self._source = source
        self._splits = splits
        self._clock = clock
        self._ending = threading.Event()

    def read(self) -> Iterator[tuple[Split, pa.RecordBatch]]:
        for split in self._splits:  # one, or none in all subtasks but one
            while not self._ending.is_set():
                for lines in self._lines():
                    yield split, self._source.batch(lines, self._clock.wall_ms())

    def interrupt(self) -> None:
        self._ending.set()

    def close(self) -> None:
        self._ending.set()

    def _lines(self) -> Iterator[list[bytes]]:
        """Of one connection, until it ends or breaks, or the reader is to end."""
        connection = self._connect()
        if connection is None:
            return
        cutter = LineCutter(self._source.line_bytes_max)
        with connection:
            for chunk in self._chunks(connection):
                if lines := cutter.feed(chunk) if chunk else cutter.end():
                    yield lines
        if not self._ending.is_set():
            log.warning("%s has closed the connection: connecting again", self._source.describe())

    def _chunks(self, connection: socket.socket) -> Iterator[bytes]:
        """Bytes as they come; none at all is the end, which a connection that breaks does not have.

        Bounded waits, so that a reader that is to end does, and the sender hears it.
        """
        while not self._ending.is_set():
            try:
                chunk = connection.recv(_CHUNK_BYTES)
            except TimeoutError:
                continue
            except OSError as error:
                log.warning("the connection to %s broke: %s", self._source.describe(), error)
                return
            yield chunk
            if not chunk:
                return

    def _connect(self) -> socket.socket | None:
        """A connection; None if the reader is to end instead."""
        address = (self._source.host, self._source.port)
        pause, deadline = _PAUSE_SECONDS_MIN, self._now() + self._source.connect_seconds_max
        while not self._ending.is_set():
            try:
                connection = socket.create_connection(address, _CONNECT_SECONDS_MAX)
            except OSError as error:
                if self._now() >= deadline:
                    raise StillframeError(
                        f"nobody answers at {self._source.describe()} for"
                        f" {self._source.connect_seconds_max:g} s ({error}): start who is to send,"
                        " or correct host and port"
                    ) from error
            else:
                # Who vanishes without a word would otherwise be waited for for ever.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.settimeout(_LOOK_UP_SECONDS)
                return connection
            self._ending.wait(pause)
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)
        return None

    def _now(self) -> float:
        return self._clock.monotonic_seconds()


_OPTIONS = ("host", "port", "includeTimestamp", "maxLineBytes", "connectTimeout")


def socket_from_options(options: Mapping[str, str]) -> SocketSource:
    """What `readStream.format("socket").option(…)` asks for."""
    refuse_unknown(options, _OPTIONS, "the source socket")
    given = {name.lower(): text for name, text in options.items()}
    return SocketSource(
        host=_given(given, "host"),
        port=_parse_port(_given(given, "port")),
        with_timestamp=parse_flag("includeTimestamp", given.get("includetimestamp", "false")),
        line_bytes_max=parse_count("maxLineBytes", given.get("maxlinebytes", str(1 << 20))),
        connect_seconds_max=parse_duration_seconds(
            "connectTimeout", given.get("connecttimeout", "1 minute")
        ),
    )


def _given(options: Mapping[str, str], name: str) -> str:
    text = options.get(name, "").strip()
    if not text:
        raise BuildError(f'Set a {name} to read from with option("{name}", ...).')
    return text


def _parse_port(text: str) -> int:
    port = parse_count("port", text)
    if port > _PORT_MAX:
        raise BuildError(f"option port is a number from 1 to {_PORT_MAX}, not {text!r}")
    return port
