"""What a notebook or a REPL shows of jobs, and what its keys do to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from stillframe.errors import StartRefused

pytestmark = pytest.mark.spark

SESSION = """
    import json, sys, threading, time
    from pyspark.sql import SparkSession
    import stillframe

    spark = SparkSession.builder.master("local[4]").getOrCreate()
    still = stillframe.on(spark)
    clicks = still.readStream.format("clicks").option("recordsPerSecond", 1000).load()
    writer = clicks.writeStream.queryName("clicks").format("noop").option("parallelism", 1)
    query = writer.options(checkpointLocation=sys.argv[1], checkpointInterval="200 ms").start()
    query.checkpoint()

    def sleep_in_spark():
        spark.sparkContext.parallelize([600], 1).map(time.sleep).collect()

    def say_when(jobs):
        while len(spark.sparkContext.statusTracker().getActiveJobsIds()) < jobs:
            time.sleep(0.05)
        print("waiting", flush=True)

    for wait, jobs in ((query.awaitTermination, 1), (sleep_in_spark, 2)):
        try:
            threading.Thread(target=say_when, args=(jobs,)).start()
            wait()
        except KeyboardInterrupt:
            query.checkpoint()
            print(json.dumps([query.isActive, query.summary.restarts]), flush=True)
    query.stop()
"""


def test_an_interrupt_ends_the_waiting_and_other_spark_jobs_but_not_the_slots(
    tmp_path: Path,
) -> None:
    script = tmp_path / "cell.py"
    script.write_text(textwrap.dedent(SESSION))
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "chk")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        told = []
        for line in program.stdout:
            if line == "waiting\n":
                os.kill(program.pid, signal.SIGINT)
            elif line.startswith("["):
                told.append(json.loads(line))
        assert program.stderr is not None
        shown = program.stderr.read()

    assert "[Stage" not in shown, "a bar of slots would stand there for as long as the job runs"
    assert told == [[True, 0], [True, 0]]
    assert program.returncode == 0


@pytest.fixture
def query(still: Any, tmp_path: Path) -> Any:
    clicks = still.readStream.format("clicks").option("recordsPerSecond", 1000).load()
    writer = clicks.writeStream.queryName("<clicks>").format("noop").option("parallelism", 1)
    where = {"checkpointLocation": str(tmp_path), "checkpointInterval": "1 second"}
    query = writer.options(**where).start()
    yield query
    query.stop()


def test_a_cell_that_is_run_again_is_told_where_the_handle_of_its_job_is(
    still: Any, query: Any, tmp_path: Path
) -> None:
    clicks = still.readStream.format("clicks").load()
    writer = clicks.writeStream.queryName("<clicks>").format("noop")
    with pytest.raises(StartRefused, match=r"still\.streams\.get\('<clicks>'\) is its handle"):
        writer.options(checkpointLocation=str(tmp_path), checkpointInterval="1 second").start()

    assert still.streams.get("<clicks>") is query
    assert still.streams.get(query.id) is query
    assert query in still.streams.active


def test_a_query_and_the_session_show_themselves(still: Any, query: Any) -> None:
    query.checkpoint()
    assert repr(query).startswith("<Query <clicks>, state: ")
    assert "guarantee: " in repr(query)
    assert "<clicks>" in repr(still)
    for shown in (query._repr_html_(), still._repr_html_()):
        assert "&lt;clicks&gt;" in shown
        assert "<clicks>" not in shown


def test_any_query_that_ends_is_waited_for_until_it_is_forgotten(still: Any, query: Any) -> None:
    still.streams.resetTerminated()
    assert still.streams.awaitAnyTermination(0.01) is False
    query.stop()
    assert still.streams.awaitAnyTermination(60) is True
    assert query not in still.streams.active
    still.streams.resetTerminated()
    assert still.streams.awaitAnyTermination(0.01) is False
