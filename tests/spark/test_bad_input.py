"""What cannot work ends in one clear sentence on real Spark: never in a hang or a Java trace."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark import SparkConf
from pyspark.errors import ParseException
from pyspark.sql import DataFrame, SparkSession

import stillframe
from stillframe import BuildError, JobFailed, StartRefused
from stillframe.spark.deployment import checks
from stillframe.spark.internals import as_known, refuse_other_versions

pytestmark = pytest.mark.spark

WAIT_SECONDS_MAX = 120.0


@pytest.fixture
def still(spark: SparkSession) -> Any:
    return stillframe.on(spark)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    return {"checkpointLocation": str(tmp_path / "checkpoints"), "checkpointInterval": "1 second"}


def clicks(still: Any, records: int = 20_000) -> Any:
    return still.readStream.format("clicks").option("records", records).load()


def failure_of(query: stillframe.Query) -> str:
    """The sentence a job ended with: one line, and nothing of Java in it."""
    with pytest.raises(JobFailed) as raised:
        query.awaitTermination(WAIT_SECONDS_MAX)
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert "java" not in sentence.lower()
    assert not query.isActive
    return sentence


def ignore(frame: DataFrame, epoch: int) -> None:
    """A function for foreachBatch."""


def test_a_job_that_needs_more_slots_than_spark_has_says_both_numbers(
    still: Any, options: dict[str, str]
) -> None:
    writer = clicks(still).writeStream.format("noop").options(**options)

    with pytest.raises(StartRefused, match="needs 64 cores at the same time, but Spark has 4"):
        writer.option("parallelism", 64).start()


def test_slots_that_would_leave_no_core_for_foreach_batch_are_refused(
    still: Any, options: dict[str, str]
) -> None:
    writer = clicks(still).writeStream.foreachBatch(ignore).options(**options)

    with pytest.raises(StartRefused, match=r"needs 5 cores \(4 slots and 1 for .* has 4: lower"):
        writer.option("parallelism", 4).start()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("spark.dynamicAllocation.enabled", "set it to false for this application"),
        ("spark.network.crypto.enabled", "does not encrypt the traffic between slots yet"),
        ("spark.ssl.rpc.enabled", "does not encrypt the traffic between slots yet"),
        ("spark.io.encryption.enabled", "does not encrypt the files that slots write to local"),
    ],
)
@pytest.mark.parametrize("yes", ["true", "True", "TRUE", " true "])
def test_settings_under_which_no_job_can_keep_its_promises_are_refused(
    setting: str, said: str, yes: str
) -> None:
    with pytest.raises(StartRefused, match=said):
        checks.refuse_unfit_settings(SparkConf(loadDefaults=False).set(setting, yes))


@pytest.mark.parametrize("no", ["false", "False", "FALSE"])
def test_settings_that_are_off_are_no_reason_to_refuse(no: str) -> None:
    checks.refuse_unfit_settings(
        SparkConf(loadDefaults=False)
        .set("spark.dynamicAllocation.enabled", no)
        .set("spark.io.encryption.enabled", no)
    )


def test_a_setting_that_is_neither_on_nor_off_is_not_taken_for_off() -> None:
    conf = SparkConf(loadDefaults=False).set("spark.network.crypto.enabled", "yes")
    with pytest.raises(BuildError, match=r"spark.network.crypto.enabled is true or false.*'yes'"):
        checks.refuse_unfit_settings(conf)


def test_an_executor_without_stillframe_or_with_another_pyarrow_is_named() -> None:
    here = {"python": "3.11", "stillframe": "0.1.0", "pyarrow": "26.0.1"}
    there = {**here, "host": "e1", "executable": "/usr/bin/python3"}

    with pytest.raises(StartRefused) as refused:
        checks.refuse_other_versions(here, {**there, "stillframe": None})
    said = str(refused.value)
    assert "stillframe is not installed on executor host e1 for /usr/bin/python3" in said
    assert "PYSPARK_PYTHON" in said
    assert "--archives" in said
    with pytest.raises(StartRefused, match=r"e1 has pyarrow 18.0.0 and the driver has 26.0.1"):
        checks.refuse_other_versions(here, {**there, "pyarrow": "18.0.0"})


@pytest.mark.parametrize(
    ("said_by_spark", "expected"),
    [
        (
            "Lost task 0.0 (host executor 1): java.io.IOException: Cannot run program"
            ' "/opt/python": error=2, No such file or directory',
            "executors cannot run /opt/python",
        ),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in"
            " driver: 3.11, PySpark cannot run with different minor versions.",
            "executors run Python 3.9 and the driver runs Python 3.11",
        ),
    ],
)
def test_executors_without_a_python_that_fits_are_told_with_the_ways_to_one(
    said_by_spark: str, expected: str
) -> None:
    said = checks.no_python_that_fits(said_by_spark)

    assert said is not None
    assert said.startswith(expected)
    assert "PYSPARK_PYTHON" in said
    assert "--archives" in said
    assert checks.no_python_that_fits("Task 3 failed: OutOfMemoryError") is None


def test_executors_that_have_what_the_driver_has_are_welcome(spark: SparkSession) -> None:
    checks.refuse_unfit_executors(spark, 2)


def test_a_user_function_that_raises_the_same_error_again_fails_the_job_by_name(
    still: Any, options: dict[str, str], tmp_path: Path
) -> None:
    def stumble(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            raise ZeroDivisionError("one record too many")
        yield from ()

    stream = clicks(still).mapInArrow(stumble, "id long")
    options["restartSameErrorMax"] = "1"
    query = stream.writeStream.format("parquet").options(**options).start(str(tmp_path / "out"))

    assert "stumble" in failure_of(query)
    assert "one record too many" in str(query.exception())
    assert query.summary.restarts == 1


def test_a_function_given_to_foreach_batch_that_raises_fails_the_job_and_keeps_the_epoch(
    still: Any, options: dict[str, str]
) -> None:
    seen: list[tuple[int, int]] = []

    def start(is_broken: bool) -> stillframe.Query:
        def to_table(frame: DataFrame, epoch: int) -> None:
            if is_broken:
                raise OSError("the table is locked")
            seen.append((epoch, frame.count()))

        writer = clicks(still).writeStream.foreachBatch(to_table).options(**options)
        return writer.option("restartSameErrorMax", 0).start()

    broken = start(is_broken=True)
    assert "function to_table given to foreachBatch" in failure_of(broken)
    assert "the table is locked" in str(broken.exception())

    start(is_broken=False).awaitTermination(WAIT_SECONDS_MAX)
    assert sum(rows for _, rows in seen) == 20_000
    assert [epoch for epoch, _ in seen] == list(range(len(seen)))


def test_an_epoch_that_a_function_refused_is_given_to_it_corrected_renamed_and_behind_a_filter(
    still: Any, options: dict[str, str]
) -> None:
    seen: list[int] = []

    def save(frame: DataFrame, epoch: int) -> None:
        raise OSError("the table is locked")

    def save_corrected(frame: DataFrame, epoch: int) -> None:
        seen.append(frame.count())

    writer = clicks(still).writeStream.foreachBatch(save).options(**options)
    broken = writer.option("restartSameErrorMax", 0).start()
    assert "the table is locked" in failure_of(broken)

    corrected = clicks(still).filter("id >= 0").writeStream.foreachBatch(save_corrected)
    corrected.options(**options).start().awaitTermination(WAIT_SECONDS_MAX)
    assert sum(seen) == 20_000


def test_a_function_given_to_foreach_batch_that_hangs_ends_the_job_with_its_line(
    still: Any, options: dict[str, str]
) -> None:
    let_go = threading.Event()

    def save(frame: DataFrame, epoch: int) -> None:
        let_go.wait()

    options["stuckTimeout"] = "1 second"
    query = clicks(still).writeStream.foreachBatch(save).options(**options).start()
    try:
        sentence = failure_of(query)
    finally:
        let_go.set()
    assert "has had epoch 0" in sentence
    assert f"({__file__}:" in sentence


def test_a_function_given_to_foreach_batch_for_which_spark_works_long_does_not_hang(
    still: Any, options: dict[str, str]
) -> None:
    rows: list[int] = []

    def take_long(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import time

        time.sleep(15.0)
        yield from batches

    def save(frame: DataFrame, epoch: int) -> None:
        slow = frame.coalesce(1).mapInArrow(take_long, frame.schema) if epoch == 0 else frame
        rows.append(slow.count())

    options["stuckTimeout"] = "1 second"
    query = clicks(still).writeStream.foreachBatch(save).options(**options, parallelism=1).start()
    assert query.awaitTermination(WAIT_SECONDS_MAX)
    assert sum(rows) == 20_000


def test_a_source_file_that_vanished_is_named(
    still: Any, options: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"id": range(2_000_000)}), folder / "a.parquet", row_group_size=10_000)
    pq.write_table(pa.table({"id": range(10)}), folder / "b.parquet")
    second = str(folder / "b.parquet")

    def remove_the_second(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pathlib

        for batch in batches:
            pathlib.Path(second).unlink(missing_ok=True)
            yield batch

    stream = still.readStream.schema("id long").parquet(str(folder))
    writer = stream.mapInArrow(remove_the_second, "id long").writeStream.format("noop")
    query = writer.options(**options, parallelism=1).start()

    assert "b.parquet" in failure_of(query)
    assert query.summary.restarts == 0


def test_a_record_that_does_not_fit_the_schema_is_named_by_file_and_line(
    still: Any, options: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "clicks.json").write_text('{"id": 1}\n{"id": "two"}\n{"id": 3}\n')
    reader = still.readStream.schema("id long").option("mode", "FAILFAST")
    stream = reader.json(str(tmp_path / "in"))
    query = stream.writeStream.format("json").options(**options).start(str(tmp_path / "out"))

    assert "clicks.json" in failure_of(query)
    assert "line 2" in str(query.exception())
    assert not list((tmp_path / "out").glob("part-*")), "nothing of it is visible"


@pytest.mark.parametrize("kind", ["parquet", "frame"])
def test_text_that_is_not_utf8_ends_the_job_in_one_sentence(
    kind: str, still: Any, spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    text = pa.array([b"go", b"caf\xe9"], pa.binary()).view(pa.string())
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"name": text}), tmp_path / "in" / "a.parquet")
    if kind == "parquet":
        stream = still.readStream.schema("name string").parquet(str(tmp_path / "in"))
    else:
        stream = still.stream(spark.read.parquet(str(tmp_path / "in")))
    loud = stream.selectExpr("upper(name) AS name")
    query = loud.writeStream.format("json").options(**options).start(str(tmp_path / "out"))

    assert "has text in column name that is not UTF-8, b'caf\\xe9'" in failure_of(query)
    assert query.summary.restarts == 0


def test_a_checkpoint_location_that_is_a_file_is_told_at_the_start(
    still: Any, options: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("not a directory")
    query = clicks(still).writeStream.format("parquet").options(**options)

    assert "checkpoints" in failure_of(query.start(str(tmp_path / "out")))


def test_a_checkpoint_location_of_a_query_that_spark_ran_is_refused(
    still: Any, options: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.txt").write_text("one\n")
    lines = still.spark.readStream.text(str(tmp_path / "lines"))
    theirs = lines.writeStream.format("noop").trigger(availableNow=True)
    theirs.option("checkpointLocation", options["checkpointLocation"]).start().awaitTermination()

    query = still.writeStream(lines).format("noop").options(**options).start()
    assert "the checkpoints of a query that Spark ran" in failure_of(query)


def test_a_job_that_is_running_already_is_not_started_twice(
    still: Any, options: dict[str, str], tmp_path: Path
) -> None:
    endless = still.readStream.format("rate").load()
    writer = endless.writeStream.format("noop").options(**options, parallelism=1)
    query = writer.start()
    try:
        with pytest.raises(StartRefused, match="is running already"):
            writer.start()
    finally:
        query.stop()


def test_an_option_nobody_knows_names_the_nearest(still: Any) -> None:
    with pytest.raises(BuildError, match="did you mean 'checkpointInterval'"):
        clicks(still).writeStream.format("noop").option("chekpointInterval", "1 second").start()


def test_a_module_that_workers_cannot_import_ends_the_job_with_its_name_and_how_to_ship_it(
    spark: SparkSession,
    still: Any,
    options: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tidying_elsewhere.py").write_text("def keep(row):\n    return row\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    module = importlib.import_module("tidying_elsewhere")

    def start() -> stillframe.Query:
        kept = clicks(still).select("id").map_rows(module.keep, "id long")
        query: stillframe.Query = kept.writeStream.format("noop").options(**options).start()
        return query

    query = start()
    sentence = failure_of(query)
    assert "cannot import the module 'tidying_elsewhere'" in sentence
    assert "spark.sparkContext.addPyFile" in sentence
    assert "no slot has ever run" in sentence
    assert len(query.failures) == 2, "the same failure again is final"

    spark.sparkContext.addPyFile(str(elsewhere / "tidying_elsewhere.py"))
    assert start().awaitTermination(WAIT_SECONDS_MAX)


def test_what_spark_does_not_have_is_one_sentence_with_both_versions(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    plan = spark.range(1)._jdf.queryExecution().analyzed()
    for missing, ask in {
        "a class is not there": lambda: jvm.org.apache.spark.sql.catalyst.NoSuchRule(plan),
        r"Method noSuchField\(\[\]\) does not exist": lambda: plan.noSuchField(),
        "Literal.noSuchMaker does not exist in the JVM": lambda: (
            jvm.org.apache.spark.sql.catalyst.expressions.Literal.noSuchMaker()
        ),
    }.items():
        with pytest.raises(stillframe.StartRefused, match=missing) as refused, as_known():
            ask()
        assert f"PySpark {pyspark.__version__} " in str(refused.value)
        assert f"Stillframe {stillframe.__version__} " in str(refused.value)
    with pytest.raises(ParseException), as_known():
        spark.range(1).selectExpr("1 +")


@pytest.mark.parametrize(
    "asked", ["on(None)", "everywhere()", "register(None)", "Savepoint", "from_generator"]
)
def test_a_pyspark_that_is_too_old_is_refused_before_anything_of_it_is_imported(
    tmp_path: Path, asked: str
) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark/__init__.py").write_text('__version__ = "3.5.6"')
    done = subprocess.run(
        [sys.executable, "-c", f"import stillframe\nstillframe.{asked}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == (
        "stillframe.errors.StartRefused: PySpark 3.5.6 is too old for Stillframe"
        f" {stillframe.__version__}: use PySpark 4.0 to 4.3"
    )


def test_a_spark_that_is_newer_than_was_tried_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "stillframe"):
        for version in ("4.0.0", "4.2.1.dev3", pyspark.__version__, "5.1.0", "5.1.0"):
            refuse_other_versions(version)
    assert [record.getMessage() for record in caplog.records] == [
        f"PySpark 5.1.0 is newer than what Stillframe {stillframe.__version__} was tried with,"
        " which is PySpark 4.0 to 4.3: if something of it is not as expected, the job is refused"
        " with a sentence"
    ]


def test_a_spark_that_is_older_than_its_pyspark_is_refused() -> None:
    with pytest.raises(StartRefused, match=r"^Spark 3\.5\.1 is too old .* PySpark 4\.0 to 4\.3$"):
        refuse_other_versions("3.5.1", "Spark")
