"""The daemon that Spark forks Python workers from, spoken to as Spark does, without a JVM."""

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")


@pytest.fixture
def daemon():
    command = [sys.executable, "-m", "stillframe.spark.daemon", "pyspark.worker"]
    environment = {**os.environ, "PYTHON_WORKER_FACTORY_SECRET": "secret"}
    pipe = subprocess.PIPE
    quiet = subprocess.DEVNULL  # a worker that gets nothing to do says so with a traceback
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=quiet)
    with process:
        yield process
        process.stdin.close()
        process.wait(30)  # it ends when Spark lets go of it


def whole_number(read):
    return struct.unpack("!i", read(4))[0]


def test_a_worker_that_is_forked_from_our_daemon_has_imported_what_a_slot_needs(daemon):
    port = whole_number(daemon.stdout.read)
    with socket.create_connection(("127.0.0.1", port)) as worker:
        pid = whole_number(worker.recv)
        libraries = Path(f"/proc/{pid}/maps").read_text()

        assert "libarrow" in libraries
        assert "pandas" in libraries


def test_our_daemon_prefers_the_compiled_modules_of_the_pyspark_whose_archives_come_first():
    import pyspark

    home = Path(pyspark.__file__).parent
    archives = sorted((home / "python/lib").glob("*.zip"))
    assert archives, "an installed PySpark has them"
    told = subprocess.run(
        [sys.executable, "-c", "import stillframe.spark.daemon, pyspark; print(pyspark.__file__)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, archives))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert told.stdout.strip() == pyspark.__file__


def test_our_daemon_has_no_thread_that_somebody_would_wait_for_after_a_fork(daemon):
    whole_number(daemon.stdout.read)
    tasks = Path(f"/proc/{daemon.pid}/task").iterdir()
    names = {(task / "comm").read_text().strip() for task in tasks if task.name != str(daemon.pid)}

    assert names <= {"jemalloc_bg_thd"}
