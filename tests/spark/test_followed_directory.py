"""A followed directory on real Spark: files come, a worker is killed, each row counts once."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import stillframe
from stillframe.coordinator.history import AttemptStarted
from stillframe.errors import BuildError
from stillframe.spark.stream import Stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = 1_000
WAIT_SECONDS_MAX = 120.0


class Incoming:
    """A directory that JSON files are moved into, whole."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        self.rows = 0

    def put(self, files: int) -> None:
        for _ in range(files):
            rows = [{"n": n} for n in range(self.rows, self.rows + ROWS)]
            hidden = self.home / f".{self.rows}.json"
            hidden.write_text("".join(json.dumps(row) + "\n" for row in rows))
            os.rename(hidden, self.home / f"{self.rows}.json")
            self.rows += ROWS


def seen(out: Path) -> Counter[int]:
    files = list(out.glob("*.parquet"))
    return Counter(n for file in files for n in pq.read_table(file)["n"].to_pylist())


def wait_for_rows(out: Path, rows: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while seen(out).total() < rows:
        assert time.monotonic() < deadline, f"{seen(out).total()} of {rows} rows came"
        threading.Event().wait(0.1)


def test_a_kill_while_files_come_loses_and_doubles_no_row(
    spark: SparkSession, tmp_path: Path
) -> None:
    incoming, out = Incoming(tmp_path / "in"), tmp_path / "out"
    reader = stillframe.on(spark).readStream.format("json").schema("n long")
    numbers = reader.option("followInterval", "100 ms").load(str(incoming.home))
    query = (
        numbers.writeStream.queryName("followed")
        .format("parquet")
        .option("path", str(out))
        .option("checkpointLocation", str(tmp_path / "chk"))
        .option("checkpointInterval", "300 ms")
        .option("restartDelay", "100 ms")
        .option("restartAttempts", "10")
        .option("parallelism", "2")
        .start()
    )
    try:
        incoming.put(4)
        wait_for_rows(out, incoming.rows)
        incoming.put(10)
        os.kill(query.slot_pids[1], signal.SIGKILL)
        incoming.put(4)
        wait_for_rows(out, incoming.rows)
        query.processAllAvailable()
    finally:
        query.stop()

    assert seen(out) == Counter(range(incoming.rows))
    started = [event for event in query.events if isinstance(event, AttemptStarted)]
    assert len(started) >= 2
    assert started[-1].restored_from is not None


def test_options_of_following_that_cannot_be_meant_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    def reading(path: Path = tmp_path, **options: str) -> Stream:
        reader = stillframe.on(spark).readStream.schema("n long")
        return reader.options(**options).json(str(path))

    with pytest.raises(BuildError, match="leaves no pause"):
        reading(followInterval="0 s")
    with pytest.raises(BuildError, match="followInterval is a duration"):
        reading(followInterval="soon")
    with pytest.raises(BuildError, match="only with the option followInterval"):
        reading(maxFileAge="1 day")
    with pytest.raises(BuildError, match="PATH_NOT_FOUND"):
        reading(tmp_path / "absent", followInterval="1 s")
    endless = reading(followInterval="1 s").writeStream.queryName("q").format("memory")
    with pytest.raises(BuildError, match=r"would never stop: the source json .* has no end"):
        endless.trigger(availableNow=True).start()
