"""A standalone Spark cluster on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stillframe.spark.java import ensure_java

START_SECONDS_MAX = 60.0


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

    def start_workers(self) -> None:
        for number in (1, 2):
            self._run(
                f"worker-{number}", "org.apache.spark.deploy.worker.Worker",
                "--host", "127.0.0.1", "--cores", "2", "--memory", "1g", "--webui-port", "0",
                self.master,
            )  # fmt: skip

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

    def _run(self, name: str, *command: str) -> None:
        command = (str(self._home / "bin" / "spark-class"), *command)
        with (self._directory / f"{name}.log").open("w") as log:
            self._processes.append(
                subprocess.Popen(
                    command, env=self.environment, cwd=self._directory, stdout=log, stderr=log
                )
            )
