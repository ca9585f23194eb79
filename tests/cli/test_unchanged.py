"""Spark's own example, from the PySpark package, as it is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

EXAMPLE = "examples/src/main/python/sql/streaming/structured_network_wordcount.py"
WAIT_SECONDS_MAX = 120


def test_spark_s_word_count_of_a_socket_runs_unchanged(tmp_path):
    import pyspark

    script = Path(pyspark.__file__).parent / EXAMPLE
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_SECONDS_MAX)
        port = server.getsockname()[1]
        command = ["-m", "stillframe.cli.main", "run", "--unchanged", str(script), "--quiet"]
        process = subprocess.Popen(
            [sys.executable, *command, "--", "127.0.0.1", str(port)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"to be or not\nto be\n")
                assert process.stdout is not None
                counts: dict[str, int] = {}
                for line in process.stdout:
                    cells = [each.strip() for each in line.strip().strip("|").split("|")]
                    if line.startswith("|") and cells[1].isdigit():
                        counts[cells[0]] = int(cells[1])
                    if counts == {"to": 2, "be": 2, "or": 1, "not": 1}:
                        break
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=WAIT_SECONDS_MAX)
        finally:
            process.kill()
    assert counts == {"to": 2, "be": 2, "or": 1, "not": 1}
    assert process.returncode == 130
