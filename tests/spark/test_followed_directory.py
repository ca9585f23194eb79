"""A followed directory on real Spark: files come, a worker is killed, each row counts once."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import stillframe
from stillframe.api.sources import SourceContext
from stillframe.clock import SystemClock
from stillframe.coordinator.history import AttemptStarted
from stillframe.errors import BuildError, StartRefused
from stillframe.ids import SubtaskIndex
from stillframe.spark.stream import Stream
from stillframe.spark.writer import StreamWriter

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
    with pytest.raises(BuildError, match="PATH_NOT_FOUND"):
        reading(tmp_path / "absent", followInterval="1 s")


# --- directories as Spark understands them ---

LAYOUTS: dict[str, tuple[list[str], str]] = {
    "files below": (["a", "sub/b"], "v long"),
    "only files below": (["sub/b"], "v long"),
    "hidden": (["_a", ".b", "c._COPYING_", "_t/d", "e"], "v long"),
    "hidden, and a key": (["_a", "_k=1/b"], "v long, _k int"),
    "a key": (["k=1/a", "k=2/b"], "v long, k long"),
    "declared first": (["k=1/a", "k=2/b"], "k string, v long"),
    "not declared": (["k=1/a", "k=2/b"], "v long"),
    "not declared, text": (["k=x/a", "k=2/b"], "v long"),
    "not declared, date": (["d=2024-01-02/a"], "v long"),
    "not declared, time": (["d=2024-01-02 03%3A04%3A05/a"], "v long"),
    "not declared, decimal": (["d=1.5/a", "d=2/b"], "v long"),
    "null": (["k=__HIVE_DEFAULT_PARTITION__/a", "k=2/b"], "k int, v long"),
    "escaped": (["k=a%20b%2Fc+d/a"], "v long, k string"),
    "time": (["d=2024-01-02 03%3A04%3A05/a"], "v long, d timestamp"),
    "decimal": (["d=1.5/a"], "v long, d decimal(10,2)"),
    "flag": (["d=true/a"], "v long, d boolean"),
    "bytes": (["d=abc/a"], "v long, d binary"),
    "two keys": (["y=2024/m=01/a", "y=2024/m=02/b"], "v long, m string"),
    "files beside keys": (["k=1/a", "b"], "v long, k long"),
    "below a key": (["k=1/sub/a"], "v long, k long"),
    "a key below": (["sub/k=1/a"], "v long, k long"),
    "another case": (["K=1/a"], "v long, k long"),
    "in the file too": (["v=7/a"], "v long"),
    "leading zero": (["k=007/a"], "v long, k string"),
    "does not fit": (["k=x/a"], "v long, k int"),
    "does not fit in": (["k=99999999999/a"], "v long, k int"),
    "conflicting places": (["k=1/a", "sub/b"], "v long, k long"),
    "conflicting keys": (["k=1/a", "j=1/b"], "v long, k long"),
    "no value": (["k=/a"], "v long, k string"),
}


def laid_out(home: Path, names: list[str]) -> str:
    for number, name in enumerate(names):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(json.dumps({"v": number}) + "\n")
    return str(home)


def rows_of(stream: Stream) -> Any:
    """What the source of this stream reads, without slots around it."""
    source = stream.node.operator.source  # type: ignore[union-attr]
    splits = source.open_enumerator(None).discover().splits
    reader = source.open(splits, SourceContext(SubtaskIndex(0), 1, SystemClock()))
    batches = [batch for _, batch in reader.read()]
    return pa.Table.from_batches(batches, source.schema).to_pylist()


def told_by_spark(spark: SparkSession, path: str, schema: str, **options: str) -> Any:
    try:
        columns = spark.readStream.schema(schema).options(**options).json(path).schema
        rows = spark.read.schema(schema).options(**options).json(path).toArrow().to_pylist()
    except Exception:
        return "refused"
    return columns, sorted(rows, key=str)


def told_by_us(spark: SparkSession, path: str, schema: str, **options: str) -> Any:
    try:
        stream = stillframe.on(spark).readStream.schema(schema).options(**options).json(path)
    except BuildError:
        return "refused"
    return stream.schema, sorted(rows_of(stream), key=str)


@pytest.mark.parametrize(
    ("layout", "zone"),
    [
        *((layout, "UTC") for layout in LAYOUTS),
        *((layout, "America/New_York") for layout in LAYOUTS if "time" in layout),
    ],
)
def test_a_directory_means_what_it_means_in_spark(
    spark: SparkSession, tmp_path: Path, layout: str, zone: str
) -> None:
    names, schema = LAYOUTS[layout]
    path = laid_out(tmp_path / "in", names)
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        assert told_by_us(spark, path, schema) == told_by_spark(spark, path, schema)
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))


@pytest.mark.parametrize("layout", ["files below", "a key", "conflicting places", "hidden"])
def test_a_directory_that_is_read_recursively_means_what_it_means_in_spark(
    spark: SparkSession, tmp_path: Path, layout: str
) -> None:
    names, schema = LAYOUTS[layout]
    path = laid_out(tmp_path / "in", names)
    how = {"recursiveFileLookup": "true"}

    assert told_by_us(spark, path, schema, **how) == told_by_spark(spark, path, schema, **how)


@pytest.mark.parametrize("zone", ["GMT+5", "+01:30", "Z", "Asia/Tokyo"])
def test_times_in_directories_are_in_the_zone_that_the_options_say(
    spark: SparkSession, tmp_path: Path, zone: str
) -> None:
    names, schema = LAYOUTS["time"]
    path = laid_out(tmp_path / "in", names)

    ours, theirs = (
        tell(spark, path, schema, timeZone=zone) for tell in (told_by_us, told_by_spark)
    )
    assert ours == theirs != "refused"


@pytest.mark.parametrize("pattern", ["k=*", "k=1", "*/*"])
def test_what_is_above_a_path_is_no_column(
    spark: SparkSession, tmp_path: Path, pattern: str
) -> None:
    path = f"{laid_out(tmp_path / 'in', ['k=1/a', 'k=2/b', 'k=1/sub/c'])}/{pattern}"

    assert told_by_us(spark, path, "v long") == told_by_spark(spark, path, "v long")


# --- night after night ---


def counted_by_window(reader: Any, directory: Path) -> Any:
    """The rows of each ten seconds, told when no more can come."""
    from pyspark.sql import functions as F

    rows = (
        reader.schema("at timestamp, n long").json(str(directory)).withWatermark("at", "5 seconds")
    )
    return rows.groupBy(F.window("at", "10 seconds")).count().select("window.start", "count")


def run_once(counted: Any, place: Path, **options: str) -> None:
    writer = counted.writeStream.format("parquet").queryName("nights").outputMode("append")
    writer = writer.option("checkpointLocation", str(place / "chk")).options(**options)
    query = writer.trigger(availableNow=True).start(str(place / "out"))
    query.awaitTermination(WAIT_SECONDS_MAX)
    assert not query.isActive


def test_night_after_night_a_job_tells_what_spark_tells(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Windows that are open in the evening stay open until the next one."""
    incoming = tmp_path / "in"
    incoming.mkdir()
    seen = []
    for night, (first, last) in enumerate([(0, 34), (28, 52), (52, 52), (52, 90)]):
        rows = [
            {"at": f"2024-01-01T00:{s // 60:02}:{s % 60:02}Z", "n": s} for s in range(first, last)
        ]
        if rows:
            (incoming / f"{night}.json").write_text("".join(json.dumps(r) + "\n" for r in rows))
        run_once(counted_by_window(spark.readStream, incoming), tmp_path / "spark")
        ours = counted_by_window(stillframe.on(spark).readStream, incoming)
        run_once(ours, tmp_path / "ours", parallelism="2")
        told = [
            sorted(map(tuple, spark.read.parquet(str(tmp_path / of / "out")).collect()))
            for of in ("ours", "spark")
        ]
        assert told[0] == told[1], f"night {night}"
        seen.append([count for _, count in told[0]])

    assert seen[0] == [10, 10]
    assert len(seen[-1]) > len(seen[0])


def test_a_job_that_reads_what_is_there_may_follow_it_from_then_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    incoming, out = Incoming(tmp_path / "in"), tmp_path / "out"

    def writer() -> StreamWriter:
        reader = stillframe.on(spark).readStream.format("json").schema("n long")
        numbers = reader.load(str(incoming.home)).writeStream.queryName("now and then")
        return numbers.options(path=str(out), checkpointLocation=str(tmp_path / "chk"))

    incoming.put(2)
    writer().trigger(once=True).start().awaitTermination(WAIT_SECONDS_MAX)
    assert seen(out) == Counter(range(incoming.rows))
    incoming.put(1)
    query = writer().trigger(processingTime="200 ms").start()
    try:
        wait_for_rows(out, incoming.rows)
        incoming.put(1)
        wait_for_rows(out, incoming.rows)
    finally:
        query.stop()
    incoming.put(1)
    writer().trigger(availableNow=True).start().awaitTermination(WAIT_SECONDS_MAX)

    assert seen(out) == Counter(range(incoming.rows))


def test_a_query_of_a_name_runs_once_also_without_a_location(
    spark: SparkSession, tmp_path: Path
) -> None:
    incoming = Incoming(tmp_path / "in")
    numbers = stillframe.on(spark).readStream.schema("n long").json(str(incoming.home))
    writer = numbers.writeStream.format("memory").queryName("once_only").option("parallelism", 1)
    query = writer.start()
    try:
        with pytest.raises(StartRefused, match="'once_only' is running already"):
            writer.start()
        location = query.config.checkpoint_location
    finally:
        query.stop()
    writer.trigger(availableNow=True).start().awaitTermination(WAIT_SECONDS_MAX)

    assert location is not None
    assert not Path(location).exists()


def test_a_temporary_location_is_gone_when_the_query_has_ended(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "stillframe-temporary-killed").mkdir()  # its driver was killed
    (tmp_path / "stillframe-temporary-killed.lock").touch()
    incoming = Incoming(tmp_path / "in")
    incoming.put(1)
    numbers = stillframe.on(spark).readStream.schema("n long").json(str(incoming.home))
    writer = numbers.writeStream.format("memory").queryName("for_now")
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination(WAIT_SECONDS_MAX)

    assert spark.table("for_now").count() == ROWS
    assert query.config.checkpoint_location is not None
    assert query.config.checkpoint_location.startswith(str(tmp_path / "stillframe-temporary-"))
    assert not list(tmp_path.glob("stillframe-temporary-*"))


def test_a_function_is_not_called_for_epochs_in_which_nothing_came(
    spark: SparkSession, tmp_path: Path
) -> None:
    incoming = Incoming(tmp_path / "in")
    incoming.put(1)
    reader = stillframe.on(spark).readStream.format("json").schema("n long")
    numbers = reader.option("followInterval", "50 ms").load(str(incoming.home))
    handed: list[tuple[int, int]] = []
    query = (
        numbers.writeStream.queryName("handed")
        .foreachBatch(lambda df, epoch: handed.append((epoch, df.count())))
        .option("checkpointLocation", str(tmp_path / "chk"))
        .option("checkpointInterval", "200 ms")
        .option("parallelism", "1")
        .start()
    )
    try:
        for _ in range(4):
            query.checkpoint()
        incoming.put(1)
        query.processAllAvailable()
    finally:
        query.stop()

    assert sum(rows for _, rows in handed) == 2 * ROWS
    assert 0 not in [rows for _, rows in handed]
    epochs = [epoch for epoch, _ in handed]
    assert epochs == sorted(set(epochs))
