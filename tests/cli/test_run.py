"""`stillframe run` on small job files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stillframe.cli.main import _parser, main
from stillframe.cli.run import session_settings
from stillframe.config import job_option_names

JOB = """
    import sys

    from pyspark.sql import SparkSession

    import stillframe

    home, records = sys.argv[1:]
    spark = SparkSession.builder.appName("small").getOrCreate()
    still = stillframe.on(spark)
    clicks = still.readStream.format("clicks").option("records", records).load()
    {extra}
    views = clicks.groupBy("app_id").count()
    query = (
        views.writeStream.queryName("small").outputMode("update").format("parquet")
        .option("checkpointLocation", home + "/chk").option("checkpointInterval", "1 second")
        .start(home + "/counts")
    )
    print("the script has ended")
"""


def job_file(directory: Path, text: str, extra: str = "") -> str:
    path = directory / "job.py"
    path.write_text(textwrap.dedent(text).replace("{extra}", extra))
    return str(path)


@pytest.fixture(autouse=True)
def temporary_files_below_here(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_job_file_that_is_not_there_is_refused(capsys, tmp_path):
    assert main(["run", str(tmp_path / "job.py")]) == 1
    assert "there is no job file" in capsys.readouterr().err


def test_an_unknown_setting_is_refused_and_the_nearest_named(capsys, tmp_path):
    path = job_file(tmp_path, "raise AssertionError('it must not run')")
    assert main(["run", path, "--set", "checkpointIntervall=1 s"]) == 1
    assert "did you mean 'checkpointInterval'?" in capsys.readouterr().err


@pytest.mark.spark
def test_a_job_that_the_script_leaves_running_is_waited_for(command, tmp_path):
    path = job_file(tmp_path, JOB)
    done = command("run", path, "--parallelism", "1", "--", str(tmp_path), "1000")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the script has ended\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("small: 1,000 records in, ")
    assert last.endswith("finished")
    assert len(done.stderr.splitlines()) < 30, done.stderr
    assert "WARN" not in done.stderr
    assert main(["inspect", str(tmp_path / "chk" / "small")]) == 0


@pytest.mark.spark
def test_a_failing_query_ends_in_one_sentence(command, tmp_path):
    extra = 'clicks = clicks.mapInArrow(lambda batches: 1 / 0, "app_id string")'
    path = job_file(tmp_path, JOB, extra)
    settings = ["--parallelism", "1", "--set", "restartAttempts=0"]
    done = command("run", path, "--json", *settings, "--", str(tmp_path), "1000")
    assert done.returncode == 1
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert said[-1]["outcome"] == "failed"
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("stillframe: job 'small' failed: ")
    assert "division by zero" in sentence
    assert Path(sentence.rsplit(" ", 1)[1].rstrip(")")).is_file()
    assert "Traceback" not in done.stderr
    assert "java" not in done.stderr


@pytest.mark.spark
def test_a_mistake_in_the_script_is_told_with_its_line(command, tmp_path):
    path = job_file(tmp_path, JOB, 'clicks = clicks.select("nonsense")')
    done = command("run", path, "--", str(tmp_path), "1000")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "nonsense" in done.stderr
    assert "at org.apache" not in done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr  # 'starting Spark', and the mistake
    assert not list(tmp_path.glob("stillframe-run-*"))


def test_what_a_run_that_was_killed_left_behind_is_removed_by_the_next(command, tmp_path):
    killed = command("run", job_file(tmp_path, "import os; os.kill(os.getpid(), 9)"))
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("stillframe-run-*/"))

    done = command("run", job_file(tmp_path, "print('done')"))

    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert not list(tmp_path.glob("stillframe-run-*"))


def test_the_logs_that_a_failed_run_has_named_are_kept_when_others_run(command, tmp_path):
    failed = command("run", job_file(tmp_path, "raise RuntimeError('JAVA_GATEWAY_EXITED')"))
    assert failed.returncode == 1
    logs = Path(failed.stderr.splitlines()[-1].rsplit(" ", 1)[1]).parent

    command("run", job_file(tmp_path, "pass"))

    assert list(tmp_path.glob("stillframe-run-*")) == [logs]


@pytest.mark.spark
def test_an_interrupt_stops_the_queries_in_good_order(tmp_path):
    path = job_file(
        tmp_path, JOB.replace('.option("records", records)', '.option("recordsPerSecond", records)')
    )
    arguments = ["run", path, "--json", "--parallelism", "1", "--", str(tmp_path), "1000"]
    with subprocess.Popen(
        [sys.executable, "-m", "stillframe.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as running:
        assert running.stdout is not None
        kinds = []
        for line in running.stdout:
            kinds += [json.loads(line)["kind"]] if line.startswith("{") else []
            if kinds[-1:] == ["checkpoint_completed"]:
                break
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=120)
    assert running.returncode == 130
    ended = [json.loads(line) for line in out.splitlines() if '"job_ended"' in line]
    assert [event["outcome"] for event in ended] == ["stopped"]
    assert '"attempt_failed"' not in out
    assert err.splitlines()[-1] == "stillframe: interrupted"


CLICKS = 40_000
ENDED_OFTEN = f"""
    import sys

    from pyspark.sql import SparkSession

    import stillframe

    home = sys.argv[1]
    spark = SparkSession.builder.appName("clicks").getOrCreate()
    still = stillframe.on(spark)
    clicks = still.readStream.format("clicks").options(records={CLICKS}, recordsPerSecond=4000)
    query = (
        clicks.load().writeStream.queryName("clicks").format("parquet")
        .option("checkpointLocation", home + "/chk").option("checkpointInterval", "300 ms")
        .start(home + "/clicks")
    )
    try:
        query.awaitTermination()
        print("the job has come to its end")
    finally:
        spark.stop()
"""


class Command:
    """`stillframe run` in a session of its own, and what it says in JSON."""

    def __init__(self, home: Path, *options: str) -> None:
        arguments = ["run", job_file(home, ENDED_OFTEN), "--json", "--parallelism", "1", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stillframe.cli.main", *arguments, "--", str(home)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.said: list[dict[str, Any]] = []
        self.others: list[str] = []
        self.left: list[str] = []
        """The processes that were there when it had ended."""

    def send_when_it_has_a_checkpoint(self, number: signal.Signals) -> None:
        self.wait_for_a_checkpoint()
        self.process.send_signal(number)

    def wait_for_a_checkpoint(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._note(line)
            if "checkpoint_completed" in self.kinds:
                break

    def end(self) -> int:
        """Its exit code."""
        out, err = self.process.communicate(timeout=120)
        self.left = self.processes()
        for line in out.splitlines():
            self._note(line)
        self.others += err.splitlines()
        return self.process.returncode

    def processes(self) -> list[str]:
        """Those that belong to it, as commands."""
        return processes_of_session(self.process.pid)

    @property
    def kinds(self) -> list[str]:
        return [said["kind"] for said in self.said if "kind" in said]

    def _note(self, line: str) -> None:
        if line.startswith("{"):
            self.said.append(json.loads(line))
        else:
            self.others.append(line.strip())


def processes_of_session(session: int) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, of = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append((place / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)  # four times a JVM
def test_ended_by_signals_in_every_way_and_started_again_each_time_the_output_is_exact(
    tmp_path, capsys
):
    """Detached, stopped with a savepoint, cancelled with its checkpoints retained, finished."""
    detached = Command(tmp_path, "--on-signal", "detach")
    detached.send_when_it_has_a_checkpoint(signal.SIGTERM)
    assert detached.end() == 143, detached.others
    assert "job_ended" not in detached.kinds
    assert "attempt_failed" not in detached.kinds

    places = tmp_path / "places"
    stopped = Command(tmp_path, "--on-signal", "savepoint", "--savepoint-dir", str(places))
    stopped.send_when_it_has_a_checkpoint(signal.SIGINT)
    assert stopped.end() == 130, stopped.others
    (savepoint,) = places.iterdir()
    assert stopped.said[-1] == {
        "kind": "savepoint", "text": str(savepoint), "path": str(savepoint)
    }  # fmt: skip
    assert (savepoint / "_metadata").is_file()
    assert stopped.others[-1] == "stillframe: interrupted"

    cancelled = Command(tmp_path, "--on-signal", "cancel", "--set", "retainOnCancel=true")
    cancelled.wait_for_a_checkpoint()
    capsys.readouterr()
    assert main(["status", "clicks", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["guarantee"]) == ("RUNNING", "exactly-once")
    assert status["driver"]["pid"] == cancelled.process.pid
    cancelled.process.send_signal(signal.SIGTERM)
    assert cancelled.end() == 143, cancelled.others
    (ended,) = (said for said in cancelled.said if said.get("kind") == "job_ended")
    assert ended["outcome"] == "cancelled"
    assert cancelled.others[-1] == "stillframe: terminated"

    last = Command(tmp_path)
    assert last.end() == 0, last.others
    assert sorted(pq.read_table(tmp_path / "clicks")["id"].to_pylist()) == list(range(CLICKS))
    for command in (detached, stopped, cancelled):
        assert command.left == []
        assert "the job has come to its end" not in command.others
        assert not [line for line in command.others if "Traceback" in line or "java" in line]
    assert not list(tmp_path.glob("stillframe-run-*"))


@pytest.mark.spark
def test_a_signal_while_spark_is_starting_leaves_no_jvm_behind(tmp_path):
    command = Command(tmp_path)
    for _ in range(6_000):
        if any("spark-submit" in line or "SparkSubmit" in line for line in command.processes()):
            break
        assert command.process.poll() is None, command.process.communicate()
        threading.Event().wait(0.01)
    command.process.send_signal(signal.SIGTERM)

    assert command.end() == 143, command.others
    assert command.left == []
    assert command.others == ["stillframe: terminated"]


def test_where_to_start_from_and_what_to_leave_out_become_settings_of_the_session():
    given = ["run", "job.py", "--restore", "./savepoint", "--allow-non-restored-state"]

    conf = session_settings(_parser().parse_args(given))

    assert conf == {
        "spark.stillframe.restoreFrom": "./savepoint",
        "spark.stillframe.allowNonRestoredState": "true",
    }
    assert session_settings(_parser().parse_args(["run", "job.py"])) == {}


def test_a_directory_is_named_with_a_dot_and_a_slash_before_it_or_without(tmp_path, monkeypatch):
    (tmp_path / "sp").mkdir()
    monkeypatch.chdir(tmp_path)

    for name in ("sp", "./sp", str(tmp_path / "sp")):
        conf = session_settings(_parser().parse_args(["run", "job.py", "--restore", name]))
        assert conf == {"spark.stillframe.restoreFrom": name}


def test_which_start_is_wanted_becomes_settings_of_the_session():
    given = ["run", "job.py", "--claim-mode", "claim", "--fresh", "--require", "at-least-once"]

    conf = session_settings(_parser().parse_args(given))

    assert conf == {
        "spark.stillframe.restoreMode": "claim",
        "spark.stillframe.fresh": "true",
        "spark.stillframe.requireGuarantee": "at-least-once",
    }
    for option in conf:
        assert option.removeprefix("spark.stillframe.") in job_option_names()
