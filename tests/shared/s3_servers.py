"""S3 servers that keep what they hold when they are killed, and one that refuses what a test says.

As a command it builds versitygw, which keeps plain files, for where there is a Go toolchain; that
takes minutes:

    python tests/shared/s3_servers.py

Elsewhere it is moto, which keeps everything in memory, but can record its requests and do them
again.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from stillframe.testing.s3_node import VERSITYGW, MotoNode, S3Node, s3_node, versitygw


def keeping_server(home: Path, port: int) -> S3Node:
    return s3_node(home, port, otherwise=RecordingMoto)


class RecordingMoto(MotoNode):
    """Uploads in parts are not done again: they get other names then."""

    def start(self) -> None:
        super().start()
        if (self.home / "requests").exists():
            # All that was ever asked of it is done again, which takes long in a long story.
            again = "/moto-api/recorder/replay-recording"
            assert self._request("POST", again, timeout_seconds=300) == 200

    def _environment(self) -> dict[str, str]:
        return {
            "MOTO_ENABLE_RECORDING": "true",
            "MOTO_RECORDER_FILEPATH": str(self.home / "requests"),
        }


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
                body = self._body()
                refusal = front.refuses(self.command, self.headers)
                if refusal is not None:
                    front.refused += 1
                    status, code = refusal
                    said = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
                    return self._answer(status, {"Content-Length": str(len(said))}, said)
                with closing(
                    http.client.HTTPConnection("127.0.0.1", server_port, timeout=30)
                ) as connection:
                    names = ("transfer-encoding", "expect")
                    headers = {k: v for k, v in self.headers.items() if k.lower() not in names}
                    connection.request(self.command, self.path, body, headers)
                    answer = connection.getresponse()
                    self._answer(answer.status, dict(answer.getheaders()), answer.read())

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                pieces = []
                while length_bytes := int(self.rfile.readline().partition(b";")[0], 16):
                    pieces.append(self.rfile.read(length_bytes))
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    """What is said behind the last piece."""
                return b"".join(pieces)

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
    module = f"github.com/versity/versitygw/cmd/versitygw@v{VERSITYGW}"
    environment = {**os.environ, "GOBIN": str(versitygw().parent)}
    subprocess.run(["go", "install", module], check=True, env=environment)
