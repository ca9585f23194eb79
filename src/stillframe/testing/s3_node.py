"""S3 servers on 127.0.0.1: versitygw, which keeps plain files, where it has been built; else moto,
which keeps everything in memory.

versitygw takes minutes to build, so that is a command of its own (`make versitygw`); the program
stays in the cache of the other servers.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from threading import Event

from stillframe.errors import StillframeError
from stillframe.testing.fetched import cache_directory

VERSITYGW = "1.8.0"
ACCESS_KEY, SECRET_KEY = "an-access-key", "a-secret-that-nobody-may-see"
_START_SECONDS_MAX = 60.0


class NoS3(StillframeError):
    """It cannot be started here, and why."""


class S3Node(ABC):
    """Can be killed and started again at the same port."""

    def __init__(self, home: Path, port: int) -> None:
        self.home, self.port = home, port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._launch()
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._listens():
            assert self._process is not None
            if self._process.poll() is not None:
                said = " ".join((self.home / "log").read_text(errors="replace").split())
                raise NoS3(f"the S3 server ended when it was started: {said[-1000:]}")
            if time.monotonic() > deadline:
                raise NoS3(f"the S3 server does not answer after {_START_SECONDS_MAX:g} s")
            Event().wait(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    @abstractmethod
    def make_bucket(self, name: str) -> None: ...

    @abstractmethod
    def _launch(self) -> None: ...

    def _run(self, command: list[str], **environment: str) -> None:
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment}
            )

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


class VersitygwNode(S3Node):
    def __init__(self, home: Path, port: int) -> None:
        super().__init__(home, port)
        (home / "buckets").mkdir()
        (home / "beside").mkdir()

    def make_bucket(self, name: str) -> None:
        (self.home / "buckets" / name).mkdir()

    def _launch(self) -> None:
        where = ["posix", "--sidecar", str(self.home / "beside"), str(self.home / "buckets")]
        given = ["--port", f"127.0.0.1:{self.port}", "--access", ACCESS_KEY, "--secret", SECRET_KEY]
        self._run([str(versitygw()), *given, "--quiet", *where])


def versitygw() -> Path:
    """Where its program is, if it has been built."""
    return cache_directory() / f"versitygw-{VERSITYGW}" / "versitygw"


class MotoNode(S3Node):
    """Forgets all when it ends. Takes any keys."""

    def make_bucket(self, name: str) -> None:
        status = self._request("PUT", f"/{name}")
        if status != 200:
            raise NoS3(f"moto answers {status} to a new bucket {name}")

    def _launch(self) -> None:
        if importlib.util.find_spec("moto") is None:
            raise NoS3(
                "there is no S3 server here: build one with make versitygw, or install the package"
                " moto[s3], flask and flask-cors"
            )
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1"]
        self._run([*command, "-p", str(self.port)], **self._environment())

    def _environment(self) -> dict[str, str]:
        return {}

    def _request(self, method: str, path: str, timeout_seconds: float = 30.0) -> int:
        opened = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_seconds)
        with closing(opened) as connection:
            connection.request(method, path)
            return connection.getresponse().status


def s3_node(home: Path, port: int, otherwise: type[S3Node] = MotoNode) -> S3Node:
    """versitygw where it has been built."""
    made = VersitygwNode if versitygw().exists() else otherwise
    return made(home, port)
