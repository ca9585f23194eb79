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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from driven_jobs import session_of

from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.processes import await_ended
from stillframe.storage.paths import LEASE_DIRECTORY, LOG_DIRECTORY, sequence_of
from stillframe.storage.store import Store, is_local_address, open_store

pytestmark = [pytest.mark.spark, pytest.mark.slow]

KILLS = int(os.environ.get("STILLFRAME_DRIVER_KILLS", "2"))
"""`make soak` asks for more."""
RECORDS, PARTITIONS, APPS = 60_000 * KILLS, 4, 50
RATE = 40_000
SEED = 20
WAIT_SECONDS_MAX = 90.0

JOB = """
import json, logging, os, signal, sys, threading
from pathlib import Path
from pyspark.sql import SparkSession
import stillframe
from stillframe.coordinator.history import AttemptStarted
from stillframe.spark.deployment.java import ensure_java

ensure_java()
told = logging.getLogger("stillframe")  # a listener may come too late for the first events
told.setLevel(logging.INFO)
told.addHandler(logging.StreamHandler(sys.stdout))
directory, location, records, rate, partitions, apps, then = sys.argv[1:]
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

writers = [
    clicks.writeStream.format("parquet").option("path", f"{directory}/clicks"),
    clicks.writeStream.format("json").option("path", f"{directory}/json"),
    views.writeStream.outputMode("update").option("path", f"{directory}/views"),
]
if "://" not in location:  # a bucket is no place to stage rows
    writers.append(views.writeStream.outputMode("update").foreachBatch(keep))
query = still.start(
    "page-views",
    *writers,
    checkpointLocation=location,
    checkpointInterval="200 ms",
    restartDelay="100 ms",
    leaseTimeout="6 s",
    parallelism=2,
)
if then == "wait":
    query.awaitTermination()
while query.isActive and query.summary.checkpoints_completed < 2:
    query.awaitTermination(0.05)
if then == "stop-spark":
    spark.stop()
    query.awaitTermination()

def die_while_the_slots_are_started(event):
    if isinstance(event, AttemptStarted) and not mark.exists():
        mark.touch()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()

if then == "rescale":
    mark = Path(directory, "died")
    query.add_listener(die_while_the_slots_are_started)
    query.rescale(3, timeout=60)
    query.awaitTermination()
"""


@dataclass(frozen=True)
class Story:
    """Where one job is, and how much it has to read."""

    directory: Path
    location: str
    records: int = RECORDS

    @cached_property
    def store(self) -> Store:
        return open_store(self.location).below("page-views")

    @property
    def log_entries(self) -> int:
        """The number of the newest one: older ones are deleted in time."""
        found = (sequence_of(name) for name in self.store.list(LOG_DIRECTORY))
        return max((number for number in found if number is not None), default=0)


class Driver:
    """One run of the job file."""

    def __init__(self, story: Story, number: int, then: str = "wait") -> None:
        self._story = story
        self._log = story.directory / f"said-{number}.txt"
        self._entries_before = story.log_entries
        job = story.directory / "job.py"
        job.write_text(JOB)
        given = (story.directory, story.location, story.records, RATE, PARTITIONS, APPS, then)
        arguments = [str(each) for each in given]
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
        _until(lambda: self._story.log_entries >= goal or self.process.poll() is not None)

    def kill(self, which: str) -> None:
        for pid in self._pids() if which == "both" else self._pids()[which == "jvm" :][:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stall(self) -> None:
        """All of it stands still: Python, Java, the daemon and the slots."""
        for pid in session_of(self.process.pid):
            os.kill(pid, signal.SIGSTOP)

    def wake(self) -> None:
        for pid in session_of(self.process.pid):
            os.kill(pid, signal.SIGCONT)

    def wait(self) -> int:
        return self.process.wait(WAIT_SECONDS_MAX)

    def end(self) -> None:
        for pid in session_of(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _pids(self) -> list[int]:
        file = self._story.directory / f"pids-{self.process.pid}"
        pids: list[int] = json.loads(file.read_text())
        return pids


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path, str(tmp_path / "checkpoints"))


@pytest.fixture
def story_on_s3(tmp_path: Path, s3_environment: None, s3_bucket: str) -> Story:
    return Story(tmp_path, f"s3://{s3_bucket}/checkpoints", 200_000)


@pytest.fixture
def start(story: Story) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def begin(then: str = "wait", of: Story = story) -> Driver:
        drivers.append(Driver(of, len(drivers), then))
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.end()


@pytest.mark.timeout(60 * (KILLS + 2))
def test_a_driver_killed_again_and_again_leaves_exact_output_and_nothing_else(
    start: Callable[..., Driver], story: Story
) -> None:
    _kill_again_and_again(start, story, KILLS)
    last = start()
    assert last.wait() == 0, last.said

    _compare_with_the_truth(story)
    assert _left_over(story) == []


@pytest.mark.s3
def test_with_checkpoints_and_lease_on_s3_it_is_the_same_also_in_the_middle_of_a_rescale(
    start: Callable[..., Driver], story_on_s3: Story
) -> None:
    _kill_again_and_again(start, story_on_s3, kills=1)
    in_a_rescale = start("rescale", story_on_s3)
    assert in_a_rescale.wait() == -signal.SIGKILL, in_a_rescale.said
    at_rest = in_a_rescale.said.partition("slots running")[2]
    assert "restored checkpoint" in at_rest, "the slots of the other parallelism were started"
    assert "slots running" not in at_rest
    last = start("rescale", story_on_s3)
    assert last.wait() == 0, last.said

    assert "rescaled from parallelism 2 to 3" in last.said, "it came back with 2, as it says"
    _compare_with_the_truth(story_on_s3)
    assert _left_over(story_on_s3) == []
    assert story_on_s3.store.list(LEASE_DIRECTORY) == []


def test_a_stalled_driver_that_wakes_after_its_successor_took_over_changes_nothing(
    start: Callable[..., Driver], story: Story
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
    _compare_with_the_truth(story)
    assert _left_over(story) == []


def test_of_two_drivers_that_start_at_once_only_one_runs_the_job(
    start: Callable[..., Driver], story: Story
) -> None:
    drivers = [start(), start()]
    codes = sorted(driver.wait() for driver in drivers)

    # The later one finds the job running, or finished.
    said = [driver.said for driver in drivers]
    assert codes in ([0, 1], [0, 0]), said
    refused = [words for words in said if "Error" in words or "JobFailed" in words]
    assert all("driver" in words.splitlines()[-1] for words in refused), refused
    _compare_with_the_truth(story)
    assert _left_over(story) == []


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


def _kill_again_and_again(start: Callable[..., Driver], story: Story, kills: int) -> None:
    """Each time it is started again by the same command."""
    draw = random.Random(SEED)
    for _ in range(kills):
        driver = start(of=story)
        driver.wait_for_progress(entries=draw.randint(1, 4))
        time.sleep(draw.uniform(0.0, 0.3))  # anywhere between two entries
        driver.kill(draw.choice(["python", "both"]))
        assert driver.wait() == -signal.SIGKILL, driver.said


def _compare_with_the_truth(story: Story) -> None:
    directory, records = story.directory, story.records
    source = ClickSource(records=records, partitions=PARTITIONS, apps=APPS)
    truth = pa.Table.from_batches(
        [clicks_table(source, p, 0, records // PARTITIONS) for p in range(PARTITIONS)]
    ).sort_by("id")
    assert pq.read_table(directory / "clicks").sort_by("id").equals(truth)
    files = (directory / "json").glob("part-*")
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert sorted(json.loads(line)["id"] for line in lines) == truth["id"].to_pylist()
    counts = truth.group_by("app_id").aggregate([([], "count_all")]).sort_by("app_id")
    for updates in ("views", "epochs") if is_local_address(story.location) else ("views",):
        seen = pq.read_table(directory / updates).group_by("app_id").aggregate([("count", "max")])
        assert seen.sort_by("app_id")["count_max"].equals(counts["count_all"]), updates


def _left_over(story: Story) -> list[str]:
    """Files that nobody needs any more, beyond the two retained checkpoints."""
    sinks = [story.directory / name for name in ("clicks", "json", "views")]
    files = [
        file for sink in sinks for file in sink.rglob("*") if not file.name.startswith("part-")
    ]
    files += story.directory.glob("checkpoints/**/.tmp-*")
    files += story.directory.glob("checkpoints/page-views/staged/**/*")
    names = [name for name in story.store.list("") if name.startswith("chk-")]
    checkpoints = sorted(names, key=lambda name: int(name.split("-")[1]))
    return [str(file) for file in files if file.is_file()] + checkpoints[:-2]


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.03)


HANGING_JOB = """
import json, os, re, signal, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
import stillframe
from stillframe.spark.deployment.java import ensure_java

ensure_java()
directory, holds_the_lock = sys.argv[1], sys.argv[2] == "True"

def hang(row):
    if row.id == 50:
        Path(directory, "reached").touch()
        if holds_the_lock:
            re.match(r"(a+)+$", "a" * 60 + "b")
        time.sleep(1_000)
    return row

spark = (
    SparkSession.builder.master("local[3]")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.log.level", "ERROR")
    .getOrCreate()
)
clicks = stillframe.on(spark).readStream.format("clicks").options(records=1_000).load()
writer = clicks.select("id").map_rows(hang, "id long").writeStream.format("noop")
query = writer.option("parallelism", 1).start()
while not (query.slot_pids and Path(directory, "reached").exists()):
    time.sleep(0.05)
jvm = spark.sparkContext._gateway.proc.pid
Path(directory, "pids").write_text(json.dumps([jvm, *query.slot_pids]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("holds_the_lock", [False, True])
def test_a_driver_that_dies_with_a_function_that_hangs_leaves_no_process(
    tmp_path: Path, holds_the_lock: bool
) -> None:
    job = tmp_path / "job.py"
    job.write_text(HANGING_JOB)
    command = [sys.executable, str(job), str(tmp_path), str(holds_the_lock)]

    died = subprocess.run(command, timeout=WAIT_SECONDS_MAX, capture_output=True, check=False)

    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    pids = json.loads((tmp_path / "pids").read_text())
    assert len(pids) == 2
    assert await_ended(pids, 30) == []
