"""A standalone Spark cluster on this machine, and what its jobs tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stillframe.spark.deployment.java import ensure_java

START_SECONDS_MAX = 60.0
_APART = """\
mount -t tmpfs tmpfs "$0"
mount -t tmpfs tmpfs /dev/shm
mount -o remount,bind,ro /
exec "$@"
"""


class Cluster:
    """A master, and two workers of two cores each when they are asked for, from the installed
    pyspark."""

    def __init__(self, directory: Path, port: int) -> None:
        import pyspark

        self._home = Path(pyspark.__file__).parent
        self._directory = directory
        self.environment = {
            **os.environ,
            "SPARK_HOME": str(self._home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_WORKER_DIR": str(directory / "work"),
            "SPARK_LOCAL_DIRS": str(directory / "local"),
        }
        ensure_java(self.environment)
        self.master = f"spark://127.0.0.1:{port}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._run(
            "master", "org.apache.spark.deploy.master.Master",
            "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0",
        )  # fmt: skip

    def start_workers(self, *before: str, **environment: str) -> None:
        """`before` is put in front of their commands, `environment` among their variables."""
        for number in (1, 2):
            self._run(
                f"worker-{number}", "org.apache.spark.deploy.worker.Worker",
                "--host", "127.0.0.1", "--cores", "2", "--memory", "1g", "--webui-port", "0",
                self.master,
                before=before, environment=environment,
            )  # fmt: skip

    def start_workers_apart(self) -> None:
        """Each with a file system of its own to write to, and nothing else that it may write to:
        as on two machines that have no directory in common."""
        place = self._directory / "own"
        place.mkdir()
        self.start_workers(
            *("unshare", "--mount", "sh", "-euc", _APART, str(place)),
            SPARK_WORKER_DIR=f"{place}/work",
            SPARK_LOCAL_DIRS=f"{place}/local",
            TMPDIR=str(place),
            JAVA_TOOL_OPTIONS=f"-Djava.io.tmpdir={place}",
        )

    def submit(self, *arguments: str) -> subprocess.Popen[str]:
        with (self._directory / "submit.log").open("w") as log:
            return subprocess.Popen(
                [*self.submitting(), *arguments],
                env=self.environment,
                cwd=self._directory,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def submitting(self) -> list[str]:
        """The command, without the file and its arguments."""
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.executor.extraJavaOptions": os.environ["SPARK_DAEMON_JAVA_OPTS"],
            "spark.executor.memory": "600m",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
            # The session is there before its executors are: the job waits for so many cores, for
            # so long.
            "spark.cores.max": "4",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{START_SECONDS_MAX:g}s",
            "spark.sql.warehouse.dir": str(self._directory / "warehouse"),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        confs = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        return [str(self._home / "bin" / "spark-submit"), "--master", self.master, *confs]

    def executor_of(self, pid: int) -> int:
        """The executor JVM in whose Python worker this process runs."""
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError("a slot does not run below an executor")

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(START_SECONDS_MAX)

    def _run(
        self,
        name: str,
        *command: str,
        before: tuple[str, ...] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        with (self._directory / f"{name}.log").open("w") as log:
            self._processes.append(
                subprocess.Popen(
                    [*before, str(self._home / "bin" / "spark-class"), *command],
                    env={**self.environment, **environment},
                    cwd=self._directory,
                    stdout=log,
                    stderr=log,
                )
            )


class Events:
    """The lines a job prints, read as they come; whoever waits for one says how long at most."""

    def __init__(self, job: subprocess.Popen[str]) -> None:
        self._changed = threading.Condition()
        self._seen: list[dict[str, Any]] = []
        self._ended = False
        self._words = deque[str](maxlen=20)
        """What else it said last: an error, if it ended by one."""
        assert job.stdout is not None
        self._lines = job.stdout
        threading.Thread(target=self._read, daemon=True).start()

    def after(self, position: int, kind: str, seconds_max: float) -> tuple[int, dict[str, Any]]:
        """The first event of this kind from this position on, and the position behind it."""
        deadline = time.monotonic() + seconds_max
        with self._changed:
            while True:
                for index in range(position, len(self._seen)):
                    if self._seen[index]["kind"] == kind:
                        return index + 1, self._seen[index]
                left = deadline - time.monotonic()
                assert left > 0, f"no {kind} in {seconds_max} s, but {self._seen[-10:]}"
                words = "".join(self._words)
                assert not self._ended, f"no {kind} but {self._seen[-10:]}, and an end:\n{words}"
                self._changed.wait(left)

    def _read(self) -> None:
        for line in self._lines:
            if not line.startswith("EVENT "):
                self._words.append(line)
                continue
            with self._changed:
                self._seen.append(json.loads(line.removeprefix("EVENT ")))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
