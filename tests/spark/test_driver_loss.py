"""The driver dies, its JVM dies, or the script just ends: a job that is started again is exact.

Every story runs the job file below in a process of its own, with a Spark of its own. Kills come at
moments drawn from a seed: how far the job has got, and a little later.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.connectors.generate import ClickSource, clicks_table

pytestmark = [pytest.mark.spark, pytest.mark.slow]

KILLS = int(os.environ.get("STILLFRAME_DRIVER_KILLS", "5"))
"""`make soak` asks for more."""
RECORDS, PARTITIONS, APPS = 60_000 * KILLS, 4, 50
RATE = 40_000
SEED = 20
WAIT_SECONDS_MAX = 90.0

JOB = """
import json, os, sys
from pathlib import Path
from pyspark.sql import SparkSession
import stillframe
from stillframe.spark.java import ensure_java

ensure_java()
directory, records, rate, partitions, apps, then = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[4]")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .config("spark.log.level", "ERROR")
    .config("spark.scheduler.barrier.maxConcurrentTasksCheck.interval", "1s")
    .getOrCreate()
)
jvm = spark.sparkContext._gateway.proc.pid
Path(directory, f"pids-{os.getpid()}").write_text(json.dumps([os.getpid(), jvm]))
still = stillframe.on(spark)
clicks = still.readStream.format("clicks").options(
    records=records, recordsPerSecond=rate, partitions=partitions, apps=apps
).load()
views = clicks.groupBy("app_id").count()

def keep(df, epoch):
    df.write.mode("overwrite").parquet(f"{directory}/epochs/epoch={epoch}")

query = still.start(
    "page-views",
    clicks.writeStream.format("parquet").option("path", f"{directory}/clicks"),
    clicks.writeStream.format("json").option("path", f"{directory}/json"),
    views.writeStream.outputMode("update").option("path", f"{directory}/views"),
    views.writeStream.outputMode("update").foreachBatch(keep),
    checkpointLocation=f"{directory}/checkpoints",
    checkpointInterval="200 ms",
    restartDelay="100 ms",
    leaseTimeout="6 s",
    parallelism=2,
)
query.add_listener(lambda event: print(event, flush=True))
if then == "wait":
    query.awaitTermination()
while query.isActive and query.summary.checkpoints_completed < 2:
    query.awaitTermination(0.05)
if then == "stop-spark":
    spark.stop()
    query.awaitTermination()
"""


class Driver:
    """One run of the job file."""

    def __init__(self, directory: Path, number: int, then: str = "wait") -> None:
        self._directory = directory
        self._log = directory / f"said-{number}.txt"
        self._entries_before = _log_entries(directory)
        job = directory / "job.py"
        job.write_text(JOB)
        arguments = [str(given) for given in (directory, RECORDS, RATE, PARTITIONS, APPS, then)]
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(job), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_progress(self, entries: int) -> None:
        """Until this run has written so many entries of the job log, or has ended."""
        goal = self._entries_before + entries
        _until(lambda: _log_entries(self._directory) >= goal or self.process.poll() is not None)

    def kill(self, which: str) -> None:
        for pid in self._pids() if which == "both" else self._pids()[which == "jvm" :][:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stall(self) -> None:
        """All of it stands still: Python, Java, the daemon and the slots."""
        for pid in _session(self.process.pid):
            os.kill(pid, signal.SIGSTOP)

    def wake(self) -> None:
        for pid in _session(self.process.pid):
            os.kill(pid, signal.SIGCONT)

    def wait(self) -> int:
        return self.process.wait(WAIT_SECONDS_MAX)

    def end(self) -> None:
        for pid in _session(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _pids(self) -> list[int]:
        file = self._directory / f"pids-{self.process.pid}"
        pids: list[int] = json.loads(file.read_text())
        return pids


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def begin(then: str = "wait") -> Driver:
        drivers.append(Driver(tmp_path, len(drivers), then))
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.end()


@pytest.mark.timeout(60 * (KILLS + 2))
def test_a_driver_killed_again_and_again_leaves_exact_output_and_nothing_else(
    start: Callable[..., Driver], tmp_path: Path
) -> None:
    draw = random.Random(SEED)
    for _ in range(KILLS):
        driver = start()
        driver.wait_for_progress(entries=draw.randint(1, 4))
        time.sleep(draw.uniform(0.0, 0.3))  # anywhere between two entries
        driver.kill(draw.choice(["python", "both"]))
        assert driver.wait() == -signal.SIGKILL, driver.said
    last = start()
    assert last.wait() == 0, last.said

    _compare_with_the_truth(tmp_path)
    assert _left_over(tmp_path) == []


def test_a_stalled_driver_that_wakes_after_its_successor_took_over_changes_nothing(
    start: Callable[..., Driver], tmp_path: Path
) -> None:
    stalled = start()
    stalled.wait_for_progress(entries=3)
    stalled.stall()
    successor = start()
    successor.wait_for_progress(entries=2)
    assert "waiting up to 6 s for the driver on" in successor.said
    stalled.wake()

    assert stalled.wait() == 1, stalled.said
    assert "run only one driver per job" in stalled.said.splitlines()[-1]
    assert successor.wait() == 0, successor.said
    _compare_with_the_truth(tmp_path)
    assert _left_over(tmp_path) == []


def test_of_two_drivers_that_start_at_once_only_one_runs_the_job(
    start: Callable[..., Driver], tmp_path: Path
) -> None:
    drivers = [start(), start()]
    codes = sorted(driver.wait() for driver in drivers)

    # The later one finds the job running, or finished.
    said = [driver.said for driver in drivers]
    assert codes in ([0, 1], [0, 0]), said
    refused = [words for words in said if "Error" in words or "JobFailed" in words]
    assert all("driver" in words.splitlines()[-1] for words in refused), refused
    _compare_with_the_truth(tmp_path)
    assert _left_over(tmp_path) == []


def test_a_driver_that_loses_its_jvm_says_so_in_one_sentence(start: Callable[..., Driver]) -> None:
    driver = start()
    driver.wait_for_progress(entries=3)
    driver.kill("jvm")

    assert driver.wait() == 1
    assert "JobFailed: job 'page-views' failed: Spark is gone" in driver.said.splitlines()[-1]


def test_a_session_that_is_stopped_under_a_job_is_named_as_the_reason(
    start: Callable[..., Driver],
) -> None:
    driver = start(then="stop-spark")

    assert driver.wait() == 1
    assert "JobFailed: job 'page-views' failed: Spark is gone" in driver.said.splitlines()[-1]


def test_a_script_that_ends_while_its_job_runs_ends_it_in_good_order(
    start: Callable[..., Driver],
) -> None:
    driver = start(then="end")

    assert driver.wait() == 0, driver.said
    assert driver.said.splitlines()[-1] == "job stopped"


def _compare_with_the_truth(directory: Path) -> None:
    source = ClickSource(records=RECORDS, partitions=PARTITIONS, apps=APPS)
    truth = pa.Table.from_batches(
        [clicks_table(source, p, 0, RECORDS // PARTITIONS) for p in range(PARTITIONS)]
    ).sort_by("id")
    assert pq.read_table(directory / "clicks").sort_by("id").equals(truth)
    files = (directory / "json").glob("part-*")
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert sorted(json.loads(line)["id"] for line in lines) == truth["id"].to_pylist()
    counts = truth.group_by("app_id").aggregate([([], "count_all")]).sort_by("app_id")
    for updates in ("views", "epochs"):
        seen = pq.read_table(directory / updates).group_by("app_id").aggregate([("count", "max")])
        assert seen.sort_by("app_id")["count_max"].equals(counts["count_all"]), updates


def _left_over(directory: Path) -> list[str]:
    """Files that nobody needs any more, beyond the two retained checkpoints."""
    sinks = [directory / "clicks", directory / "json", directory / "views"]
    job = directory / "checkpoints" / "page-views"
    files = [
        file for sink in sinks for file in sink.rglob("*") if not file.name.startswith("part-")
    ]
    files += [*job.rglob(".tmp-*"), *(job / "staged").rglob("*")]
    checkpoints = sorted(job.glob("chk-*"), key=lambda chk: int(chk.name.split("-")[1]))
    return [str(file) for file in files if file.is_file()] + [str(c) for c in checkpoints[:-2]]


def _log_entries(directory: Path) -> int:
    """The number of the newest one: older ones are deleted in time."""
    names = [entry.name for entry in (directory / "checkpoints/page-views/log").glob("[0-9]*")]
    return max((int(name) for name in names), default=0)


def _session(leader: int) -> list[int]:
    """The processes of a session; one that has ended has none any more."""
    found = []
    for name in os.listdir("/proc"):
        with suppress(ValueError, ProcessLookupError):
            if os.getsid(int(name)) == leader:
                found.append(int(name))
    return found


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
