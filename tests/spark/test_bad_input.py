"""What cannot work ends in one clear sentence on real Spark: never in a hang or a Java trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import SparkConf
from pyspark.sql import DataFrame, SparkSession

import stillframe
from stillframe import BuildError, JobFailed, StartRefused
from stillframe.spark import checks

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

    with pytest.raises(StartRefused, match="needs 64 slots at the same time and Spark has 4"):
        writer.option("parallelism", 64).start()


def test_slots_that_would_leave_no_core_for_foreach_batch_are_refused(
    still: Any, options: dict[str, str]
) -> None:
    writer = clicks(still).writeStream.foreachBatch(ignore).options(**options)

    with pytest.raises(StartRefused, match=r"needs 4 slots and 1 more core .* Spark has 4: lower"):
        writer.option("parallelism", 4).start()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("spark.dynamicAllocation.enabled", "set it to false for this application"),
        ("spark.network.crypto.enabled", "does not encrypt the traffic between slots yet"),
        ("spark.ssl.rpc.enabled", "does not encrypt the traffic between slots yet"),
    ],
)
def test_settings_under_which_no_job_can_keep_its_promises_are_refused(
    setting: str, said: str
) -> None:
    with pytest.raises(StartRefused, match=said):
        checks.refuse_unfit_settings(SparkConf(loadDefaults=False).set(setting, "true"))


def test_an_executor_without_stillframe_or_with_another_pyarrow_is_named() -> None:
    here = {"host": "driver", "python": "3.11", "stillframe": "0.1.0", "pyarrow": "26.0.1"}

    with pytest.raises(StartRefused, match=r"stillframe is not installed on executor host e1"):
        checks.refuse_other_versions(here, {**here, "host": "e1", "stillframe": None})
    with pytest.raises(StartRefused, match=r"e2 has pyarrow 18.0.0 and the driver has 26.0.1"):
        checks.refuse_other_versions(here, {**here, "host": "e2", "pyarrow": "18.0.0"})


def test_executors_that_have_what_the_driver_has_are_welcome(spark: SparkSession) -> None:
    checks.refuse_unfit_executors(spark, 2)


def test_a_user_function_that_raises_fails_the_job_at_once_and_by_name(
    still: Any, options: dict[str, str], tmp_path: Path
) -> None:
    def stumble(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            raise ZeroDivisionError("one record too many")
        yield from ()

    stream = clicks(still).mapInArrow(stumble, "id long")
    query = stream.writeStream.format("parquet").options(**options).start(str(tmp_path / "out"))

    assert "stumble" in failure_of(query)
    assert "one record too many" in str(query.exception())
    assert query.summary.restarts == 0


def test_a_function_given_to_foreach_batch_that_raises_fails_the_job_and_keeps_the_epoch(
    still: Any, options: dict[str, str]
) -> None:
    seen: list[tuple[int, int]] = []

    def start(is_broken: bool) -> stillframe.Query:
        def to_table(frame: DataFrame, epoch: int) -> None:
            if is_broken:
                raise OSError("the table is locked")
            seen.append((epoch, frame.count()))

        return clicks(still).writeStream.foreachBatch(to_table).options(**options).start()

    broken = start(is_broken=True)
    assert "function to_table given to foreachBatch" in failure_of(broken)
    assert "the table is locked" in str(broken.exception())

    start(is_broken=False).awaitTermination(WAIT_SECONDS_MAX)
    assert sum(rows for _, rows in seen) == 20_000
    assert [epoch for epoch, _ in seen] == list(range(len(seen)))


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
    stream = still.readStream.schema("id long").json(str(tmp_path / "in"))
    query = stream.writeStream.format("json").options(**options).start(str(tmp_path / "out"))

    assert "clicks.json" in failure_of(query)
    assert "line 2" in str(query.exception())
    assert not list((tmp_path / "out").glob("part-*")), "nothing of it is visible"


def test_a_checkpoint_location_that_is_a_file_is_told_at_the_start(
    still: Any, options: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("not a directory")
    query = clicks(still).writeStream.format("parquet").options(**options)

    assert "checkpoints" in failure_of(query.start(str(tmp_path / "out")))


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
