"""`stillframe inspect --against JOB.py PATH`: whether a job fits, told without starting it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from stillframe.cli.main import main

JOB = """
    import sys

    from pyspark.sql import SparkSession

    import stillframe

    home = sys.argv[1]
    spark = SparkSession.builder.appName("small").getOrCreate()
    still = stillframe.on(spark)
    clicks = still.readStream.format("clicks").option("records", 1000).load().uid("clicks")
    views = clicks.groupBy(GROUPED_BY).count().uid("COUNTED")
    query = (
        views.writeStream.queryName("small").outputMode("update").format("parquet")
        .option("checkpointLocation", home + "/chk").option("checkpointInterval", "1 second")
        .option("maxParallelism", MAX_PARALLELISM)
        .start(home + "/counts")
    )
    query.awaitTermination()
    print("the job has run")
"""


def job_file(directory: Path, grouped_by="'app_id'", counted="count", max_parallelism=128) -> str:
    text = textwrap.dedent(JOB).replace("GROUPED_BY", grouped_by).replace("COUNTED", counted)
    path = directory / "job.py"
    path.write_text(text.replace("MAX_PARALLELISM", str(max_parallelism)))
    return str(path)


def contents(place: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}


def test_a_job_file_that_is_not_there_is_refused(capsys, tmp_path):
    assert main(["inspect", "--against", str(tmp_path / "job.py"), str(tmp_path)]) == 1
    assert "there is no job file" in capsys.readouterr().err


@pytest.mark.spark
def test_a_job_is_compared_with_a_checkpoint_and_nothing_runs_or_changes(command, tmp_path):
    arguments = ["--", str(tmp_path)]
    done = command("run", job_file(tmp_path), "--parallelism", "1", *arguments)
    assert done.returncode == 0, done.stderr
    place = str(tmp_path / "chk" / "small")
    before = contents(tmp_path / "chk")

    fits = command("inspect", "--against", job_file(tmp_path), place, *arguments)
    assert fits.returncode == 0, fits.stderr
    assert "of job 'small' fits job 'small' of " in fits.stdout
    assert "the job has run" not in fits.stdout

    changed = job_file(tmp_path, grouped_by="'user_id'", max_parallelism=64)
    unfit = command("inspect", "--json", "--against", changed, place, *arguments)
    assert unfit.returncode == 1, unfit.stderr
    told = json.loads(unfit.stdout)
    assert (told["job"], told["fits"]) == ("small", False)
    assert [each["operator"] for each in told["mismatches"]] == [None, "count"]

    renamed = job_file(tmp_path, counted="counted")
    gone = command("inspect", "--against", renamed, place, *arguments)
    assert gone.returncode == 1, gone.stderr
    assert "(count), which could belong to 'aggregate count(*) by app_id' (counted)" in gone.stdout
    assert 'add .uid("count") to the one it belongs to' in gone.stdout
    assert contents(tmp_path / "chk") == before


@pytest.mark.spark
def test_a_mistake_in_the_job_file_is_told_with_its_line(command, tmp_path):
    path = tmp_path / "job.py"
    path.write_text("x = 1\nraise ValueError('nonsense')\n")

    done = command("inspect", "--against", str(path), str(tmp_path))

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"stillframe: {path}, line 2: ")
    assert "nonsense" in done.stderr
