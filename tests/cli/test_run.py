"""`stillframe run` on small job files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stillframe.cli.main import _parser, main
from stillframe.cli.run import session_settings

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
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not list(tmp_path.glob("stillframe-run-*"))


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


def test_where_to_start_from_and_what_to_leave_out_become_settings_of_the_session():
    given = ["run", "job.py", "--restore", "./savepoint", "--allow-non-restored-state"]

    conf = session_settings(_parser().parse_args(given))

    assert conf == {
        "spark.stillframe.restoreFrom": "./savepoint",
        "spark.stillframe.allowNonRestoredState": "true",
    }
    assert session_settings(_parser().parse_args(["run", "job.py"])) == {}
