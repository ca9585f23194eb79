"""Writers in another process, as they are in a job: what they keep in memory is not here."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pyarrow as pa

from stillframe.api.sinks import Committable, Sink, SinkContext, SinkWriter
from stillframe.ids import CheckpointId

_STARTS_SECONDS_MAX = 60.0


class Elsewhere:
    """One process that opens writers, and does with them what it is told, call by call."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        # Not by `multiprocessing`, which would run the user's script once more.
        program = f"from {__name__} import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self._opened = 0

    def why_not(self, sink: Sink) -> str | None:
        """Why the other process cannot know this sink; None: it can."""
        try:
            self.call("knows", 0, sink)
        except RuntimeError as error:
            return str(error)
        return None

    def open_writer(self, sink: Sink, context: SinkContext) -> SinkWriter:
        self._opened += 1
        self.call("open", self._opened, sink, context)
        return _FarWriter(self, self._opened)

    def call(self, what: str, *arguments: Any) -> Any:
        self._connection.send((what, arguments))
        if not self._connection.poll(_STARTS_SECONDS_MAX):
            raise TimeoutError(f"the other process does not answer to {what}")
        is_good, answer = self._connection.recv()
        if not is_good:
            raise RuntimeError(f"in another process: {answer}")
        return answer

    def close(self) -> None:
        self._connection.close()  # upon which it ends
        self._process.wait()


class _FarWriter(SinkWriter):
    def __init__(self, elsewhere: Elsewhere, number: int) -> None:
        self._elsewhere = elsewhere
        self._number = number

    def write(self, batch: pa.RecordBatch) -> None:
        self._elsewhere.call("write", self._number, batch)

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        self._elsewhere.call("rotate", self._number, checkpoint_id)
        return lambda: list(self._elsewhere.call("prepare", self._number, checkpoint_id))

    def close(self) -> None:
        self._elsewhere.call("close", self._number)


def serve(descriptor: int) -> None:
    """Carry out what comes over this connection, until it ends."""
    connection = Connection(descriptor)
    writers: dict[int, SinkWriter] = {}
    background: dict[tuple[int, int], Callable[[], Sequence[Committable]]] = {}

    def carry_out(what: str, number: int, *arguments: Any) -> Any:
        match what:
            case "knows":
                return None
            case "open":
                sink, context = arguments
                writers[number] = sink.open_writer(context)
            case "rotate":
                background[number, arguments[0]] = writers[number].rotate(arguments[0])
            case "prepare":
                return list(background.pop((number, arguments[0]))())
            case _:
                getattr(writers[number], what)(*arguments)

    while True:
        try:
            what, arguments = connection.recv()
            connection.send((True, carry_out(what, *arguments)))
        except EOFError:
            return
        except Exception as error:
            connection.send((False, traceback.format_exception_only(error)[-1].strip()))
