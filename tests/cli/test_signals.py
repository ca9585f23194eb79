"""Signals to a process whose job runs on processes: what is wished for is done, within a bound.

The program below stands for `stillframe run`, with a fork server where that has a JVM: the parent
of all slots, which ends by itself when its driver is gone. The story with Spark is in test_run.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stillframe.cli.last_steps import descendants_of
from stillframe.clock import SystemClock
from stillframe.coordinator.job_log import JobLog
from stillframe.processes import await_ended
from stillframe.storage.store import open_store

WAIT_SECONDS_MAX = 120.0
RECORDS = 40_000

PROGRAM = """
import os, signal, sys, threading
from multiprocessing import forkserver
from pathlib import Path

from stillframe.cli.signals import Ending, Interrupted
from stillframe.clock import SystemClock
from stillframe.config import job_config
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.generate import CLICK_SCHEMA, ClickSource
from stillframe.coordinator.history import JobEnded
from stillframe.coordinator.job import Job
from stillframe.coordinator.query import Query
from stillframe.coordinator.running import DriverAddress
from stillframe.graph.logical import MapInArrow, Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.testing.processes import ProcessDeployment


def stuck(batches):
    for batch in batches:
        os.write(1, b"stuck\\n")  # at once: the other slot may say so too
        threading.Event().wait()
        yield batch


def end_a_child():
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    os.kill(child, signal.SIGTERM)
    print("child ended by", os.waitpid(child, 0)[1], flush=True)


def main():
    home, wish, seconds_max, function, location, records = sys.argv[1:]
    source = ClickSource(records=int(records), records_per_second=10_000, batch_rows=100)
    read = Node(Read(source), CLICK_SCHEMA, given_uid="clicks")
    chosen = {"iter": iter, "stuck": stuck, "fork": iter}[function]
    mapped = Node(MapInArrow(chosen, "map"), CLICK_SCHEMA, (read,))
    sink = FileSink(home + "/clicks", "parquet", CLICK_SCHEMA)
    write = Node(Write(sink), CLICK_SCHEMA, (mapped,), given_uid="write")
    options = {"checkpointLocation": location, "checkpointInterval": "200 ms"}
    plan = build_plan("clicks", [write], 2)
    driver, clock = DriverAddress("127.0.0.1"), SystemClock()
    job = Job(plan, job_config(options), ProcessDeployment(), driver, clock)
    query = Query(job)
    ending = Ending(wish, float(seconds_max), None, lambda: forkserver._forkserver._forkserver_pid)

    def tell(event):
        print(type(event).__name__, flush=True)
        if isinstance(event, JobEnded):
            print("outcome:", event.outcome, flush=True)

    query.add_listener(tell)
    try:
        with ending.listening():
            ending.follow(query)
            if function == "fork":
                end_a_child()
            job.start()
            try:
                query.awaitTermination()
                print("the job has come to its end", flush=True)
            finally:
                print("the script's own last step", flush=True)
    except Interrupted as interrupted:
        ending.await_done()
        print(*ending.savepoints_taken, *ending.undone, sep="\\n", flush=True)
        sys.exit(1 if ending.undone else interrupted.exit_code)


if __name__ == "__main__":
    main()
"""


class Program:
    """One run of it, in a session of its own, with what it has said so far."""

    def __init__(
        self,
        home: Path,
        wish: str,
        *,
        seconds_max: float = 60,
        function: str = "iter",
        location: str | None = None,
    ) -> None:
        file = home / "program.py"
        file.write_text(textwrap.dedent(PROGRAM))
        location = location or str(home / "chk")
        arguments = [home, wish, seconds_max, function, location, RECORDS]
        self.process = subprocess.Popen(
            [sys.executable, str(file), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said: list[str] = []

    def wait_for(self, event: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())
            if self.said[-1] == event:
                return
        raise AssertionError("\n".join(self.said))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Its exit code, when it and everything it had started are gone."""
        started = descendants_of(self.process.pid)
        out, _ = self.process.communicate(timeout=WAIT_SECONDS_MAX)
        self.said += out.splitlines()
        assert await_ended(started, WAIT_SECONDS_MAX) == [], "processes are left"
        return self.process.returncode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def begin(wish: str, **more: object) -> Program:
        programs.append(Program(tmp_path, wish, **more))  # type: ignore[arg-type]
        return programs[-1]

    yield begin
    for program in programs:
        with suppress(ProcessLookupError):
            os.killpg(program.process.pid, signal.SIGKILL)
        program.process.wait()
        assert program.process.stdout is not None
        program.process.stdout.close()


def check_exactly_once(home: Path) -> None:
    assert sorted(pq.read_table(home / "clicks")["id"].to_pylist()) == list(range(RECORDS))


def checkpoints_of(home: Path) -> list[int]:
    record = JobLog(open_store(str(home / "chk" / "clicks")), "clicks", SystemClock()).read()
    assert record is not None
    return [kept.checkpoint_id for kept in record.checkpoints]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_and_started_again_it_is_exact(start, tmp_path, number):
    first = start("stop")
    first.wait_for("CheckpointCompleted")
    first.signal(number)

    assert first.end() == 128 + number, first.said
    assert "the script's own last step" in first.said, first.said
    assert first.said.index("JobEnded") < first.said.index("the script's own last step")
    assert "the job has come to its end" not in first.said
    assert "AttemptFailed" not in first.said

    assert start("stop").end() == 0
    check_exactly_once(tmp_path)


def test_a_signal_takes_a_savepoint_before_the_script_is_interrupted(start, tmp_path):
    first = start("savepoint")
    first.wait_for("CheckpointCompleted")
    first.signal(signal.SIGTERM)

    assert first.end() == 143, first.said
    (savepoint,) = (tmp_path / "chk" / "savepoints").iterdir()
    assert first.said[-1] == str(savepoint)
    assert (savepoint / "_metadata").is_file()
    assert "the script's own last step" in first.said, first.said
    assert first.said.index("SavepointCompleted") < first.said.index("the script's own last step")

    assert start("savepoint").end() == 0
    check_exactly_once(tmp_path)


def test_a_savepoint_that_cannot_be_written_leaves_a_job_that_is_stopped_and_goes_on(
    start, tmp_path
):
    (tmp_path / "chk").mkdir()
    (tmp_path / "chk" / "savepoints").write_text("a file where the directory would be")
    first = start("savepoint")
    first.wait_for("CheckpointCompleted")
    first.signal(signal.SIGTERM)

    assert first.end() == 1
    assert "was stopped without a savepoint, and goes on" in first.said[-1]
    assert "outcome: stopped" in first.said, first.said

    assert start("stop").end() == 0
    check_exactly_once(tmp_path)


def test_a_cancelled_job_keeps_nothing_to_go_on_from(start, tmp_path):
    first = start("cancel")
    first.wait_for("CheckpointCompleted")
    first.signal(signal.SIGINT)

    assert first.end() == 130, first.said
    assert "the script's own last step" in first.said, first.said
    assert checkpoints_of(tmp_path) == []


def test_detached_the_command_ends_at_once_as_after_a_crash_and_the_next_start_is_exact(
    start, tmp_path
):
    first = start("detach")
    first.wait_for("CheckpointCompleted")
    first.signal(signal.SIGTERM)

    assert first.end() == 143, first.said
    assert "JobEnded" not in first.said, "nobody waited for it"
    assert "AttemptFailed" not in first.said, "the job did not see its slots go"
    assert "the script's own last step" not in first.said

    assert start("stop").end() == 0
    check_exactly_once(tmp_path)


def test_a_job_that_does_not_end_within_the_bound_is_ended_by_force(start):
    program = start("stop", seconds_max=1.5, function="stuck")
    program.wait_for("stuck")
    began = time.monotonic()
    program.signal(signal.SIGTERM)

    assert program.end() == 1
    assert time.monotonic() - began < 20
    assert "did not end within 1.5 s (--signal-timeout)" in program.said[-1]


def test_a_child_that_the_script_forks_ends_by_its_own_signals_and_tells_us_nothing(start):
    program = start("stop", function="fork")

    assert program.end() == 0, program.said
    assert f"child ended by {int(signal.SIGTERM)}" in program.said
    assert "outcome: finished" in program.said


def test_a_second_signal_ends_everything_at_once(start):
    program = start("stop", function="stuck")
    program.wait_for("stuck")
    program.signal(signal.SIGINT)
    program.signal(signal.SIGTERM)

    assert program.end() in (130, 143), program.said
    assert "the script's own last step" not in program.said
