"""S3 servers that keep what they hold when they are killed, and one that refuses what a test says.

versitygw keeps plain files. It takes minutes to build, so that is a command of its own, for where
there is a Go toolchain; the program stays in the cache of the other servers:

    python tests/shared/s3_servers.py

Elsewhere it is moto, which keeps everything in memory, but can record its requests and do them
again.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

from stillframe.testing.fetched import cache_directory

_VERSITYGW = "1.8.0"
_START_SECONDS_MAX = 60.0
ACCESS_KEY, SECRET_KEY = "an-access-key", "a-secret-that-nobody-may-see"


def keeping_server(home: Path, port: int) -> KeepingServer:
    made = Versitygw if _program().exists() else RecordingMoto
    return made(home, port)


class KeepingServer:
    """Can be killed and started again at the same port."""

    def __init__(self, home: Path, port: int) -> None:
        self.home, self.port = home, port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._launch()
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._listens():
            assert self._process is not None
            assert self._process.poll() is None, (self.home / "log").read_text()
            assert time.monotonic() < deadline, f"no S3 server after {_START_SECONDS_MAX} s"
            Event().wait(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def make_bucket(self, name: str) -> None:
        raise NotImplementedError

    def _launch(self) -> None:
        raise NotImplementedError

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

    def _request(self, method: str, path: str) -> int:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path)
            return connection.getresponse().status


class Versitygw(KeepingServer):
    def __init__(self, home: Path, port: int) -> None:
        super().__init__(home, port)
        (home / "buckets").mkdir()
        (home / "beside").mkdir()

    def make_bucket(self, name: str) -> None:
        (self.home / "buckets" / name).mkdir()

    def _launch(self) -> None:
        where = ["posix", "--sidecar", str(self.home / "beside"), str(self.home / "buckets")]
        given = ["--port", f"127.0.0.1:{self.port}", "--access", ACCESS_KEY, "--secret", SECRET_KEY]
        self._run([str(_program()), *given, "--quiet", *where])


def _program() -> Path:
    return cache_directory() / f"versitygw-{_VERSITYGW}" / "versitygw"


class RecordingMoto(KeepingServer):
    """Uploads in parts are not done again: they get other names then."""

    def make_bucket(self, name: str) -> None:
        assert self._request("PUT", f"/{name}") == 200

    def start(self) -> None:
        super().start()
        if (self.home / "requests").exists():
            assert self._request("POST", "/moto-api/recorder/replay-recording") == 200

    def _launch(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1"]
        self._run(
            [*command, "-p", str(self.port)],
            MOTO_ENABLE_RECORDING="true",
            MOTO_RECORDER_FILEPATH=str(self.home / "requests"),
        )


# --- in front of a server -------------------------------------------------------------------------

Refuses = Callable[[str, Any], tuple[int, str] | None]
"""Of a request's method and headers: the status and code of S3 with which it is refused."""


class Front:
    """An HTTP server that hands on what it does not refuse."""

    def __init__(self, server_port: int) -> None:
        self.refuses: Refuses = lambda method, headers: None
        self.refused = 0
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                refusal = front.refuses(self.command, self.headers)
                if refusal is not None:
                    front.refused += 1
                    status, code = refusal
                    said = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
                    return self._answer(status, {"Content-Length": str(len(said))}, said)
                with closing(
                    http.client.HTTPConnection("127.0.0.1", server_port, timeout=30)
                ) as connection:
                    connection.request(self.command, self.path, body, dict(self.headers.items()))
                    answer = connection.getresponse()
                    self._answer(answer.status, dict(answer.getheaders()), answer.read())

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                if "Content-Length" not in headers:
                    headers = {**headers, "Content-Length": str(len(body))}
                for name, value in headers.items():
                    if name not in ("Transfer-Encoding", "Connection"):
                        self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        Thread(target=self._http.serve_forever, daemon=True).start()

    def expire(self, token: str) -> None:
        """Refuse every request that is signed with this session token."""

        def refuses(_: str, headers: Any) -> tuple[int, str] | None:
            is_old = headers.get("x-amz-security-token") == token
            return (400, "ExpiredToken") if is_old else None

        self.refuses = refuses

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def end(self) -> None:
        self._http.shutdown()
        self._http.server_close()


if __name__ == "__main__":
    if shutil.which("go") is None:
        sys.exit(
            "versitygw is not built: there is no Go toolchain here; the tests use moto instead"
        )
    module = f"github.com/versity/versitygw/cmd/versitygw@v{_VERSITYGW}"
    environment = {**os.environ, "GOBIN": str(_program().parent)}
    subprocess.run(["go", "install", module], check=True, env=environment)
