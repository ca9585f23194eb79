"""Checkpoints on S3, on real Spark: keys of the session reach the workers, kills cost nothing."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import stillframe
from stillframe.cli.main import main
from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event, SlotsRunning
from stillframe.errors import BuildError
from stillframe.spark import launch
from stillframe.storage.store import open_store

pytestmark = [pytest.mark.spark, pytest.mark.s3]

RECORDS, RATE, WAIT_SECONDS_MAX = 200_000, 60_000, 120


@pytest.fixture
def session(spark: SparkSession, s3_settings: dict[str, str]) -> Iterator[SparkSession]:
    """A session that knows the way to S3 as Spark users tell it."""
    names = {f"spark.hadoop.{name}": text for name, text in s3_settings.items()}
    names["spark.hadoop.fs.s3a.connection.request.timeout"] = "10s"
    for name, text in names.items():
        spark.conf.set(name, text)
    yield spark
    for name in names:
        spark.conf.unset(name)


@pytest.mark.slow
def test_a_worker_killed_while_its_checkpoints_go_to_s3_loses_and_doubles_nothing(
    session: SparkSession,
    s3_bucket: str,
    s3_settings: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    still = stillframe.on(session)
    source = still.readStream.format("clicks").options(
        records=RECORDS, recordsPerSecond=RATE, partitions=2, apps=50
    )
    clicks = source.load().parallelism(2)
    location = f"s3a://{s3_bucket}/checkpoints"
    told: list[Event] = []
    pids: list[int] = []

    def kill_once(event: Event) -> None:
        told.append(event)
        if isinstance(event, SlotsRunning) and event.attempt == 1:
            pids.extend(event.pids)
        if isinstance(event, CheckpointCompleted) and pids:
            os.kill(pids.pop(), signal.SIGKILL)
            pids.clear()

    launch.observe_starts(lambda query: query.add_listener(kill_once))
    try:
        query = still.start(
            "views-on-s3",
            clicks.writeStream.format("parquet").option("path", str(tmp_path / "clicks")),
            clicks.groupBy("app_id")
            .count()
            .writeStream.format("parquet")
            .outputMode("update")
            .option("path", str(tmp_path / "views")),
            checkpointLocation=location,
            checkpointInterval="300 ms",
            restartDelay="100 ms",
            restartAttempts=5,
        )
        assert query.awaitTermination(WAIT_SECONDS_MAX), "\n".join(map(str, told))
    finally:
        launch._observers.pop()

    assert [each.attempt for each in told if isinstance(each, AttemptStarted)] == [1, 2]
    check_counts(tmp_path)
    assert s3_settings["fs.s3a.secret.key"] not in "\n".join(map(str, told))
    # The command line has no session: it asks the environment.
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_settings["fs.s3a.endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_settings["fs.s3a.access.key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_settings["fs.s3a.secret.key"])
    assert main(["inspect", f"{location}/views-on-s3"]) == 0
    shown = capsys.readouterr().out
    assert f"job views-on-s3 in s3://{s3_bucket}/checkpoints/views-on-s3" in shown
    assert "complete, attempt 2" in shown


def check_counts(directory: Path) -> None:
    truth: Counter[str] = Counter()
    source = ClickSource(records=RECORDS, partitions=2, apps=50)
    for partition in range(2):
        batch = clicks_table(source, partition, 0, RECORDS // 2)
        truth.update(batch["app_id"].to_pylist())
    clicks = pq.read_table(directory / "clicks")
    assert clicks.num_rows == RECORDS
    assert len(set(clicks["id"].to_pylist())) == RECORDS
    views: Counter[str] = Counter()
    for row in pq.read_table(directory / "views").to_pylist():
        views[row["app_id"]] = max(views[row["app_id"]], row["count"])
    assert views == truth


def test_keys_given_to_a_writer_come_before_those_of_the_session(
    session: SparkSession, s3_bucket: str, s3_settings: dict[str, str]
) -> None:
    still = stillframe.on(session)
    clicks = still.readStream.format("clicks").options(records=10).load()
    writer = clicks.writeStream.format("noop").option("fs.s3a.secret.key", "the-keys-of-this-job")

    _, config = still.prepare("job", writer, checkpointLocation=f"s3://{s3_bucket}/x")

    assert config.storage_settings["fs.s3a.secret.key"] == "the-keys-of-this-job"
    assert config.storage_settings["fs.s3a.access.key"] == s3_settings["fs.s3a.access.key"]
    assert "the-keys-of-this-job" not in repr(config)
    assert open_store(f"s3://{s3_bucket}/x", config.storage_settings).settings


def test_two_writers_with_two_secrets_are_refused_without_telling_them(
    session: SparkSession,
) -> None:
    still = stillframe.on(session)
    clicks = still.readStream.format("clicks").options(records=10).load()
    writers = [
        clicks.writeStream.format("noop").option("fs.s3a.secret.key", secret)
        for secret in ("hidden-one", "hidden-two")
    ]

    with pytest.raises(BuildError, match=r"fs.s3a.secret.key is two values") as raised:
        still.prepare("job", *writers)
    assert "hidden" not in str(raised.value)


def test_a_bucket_alone_is_enough_for_spooled_rows_foreach_batch_and_files(
    session: SparkSession, s3_bucket: str, s3_settings: dict[str, str]
) -> None:
    still = stillframe.on(session)
    shuffled = session.range(1000).repartition(3).groupBy("id").count()
    seen: list[int] = []

    def keep(frame: DataFrame, epoch: int) -> None:
        seen.extend(row.id for row in frame.collect())

    rows = still.stream(shuffled)
    out = f"s3a://{s3_bucket}/out"
    query = still.start(
        "bucket-only",
        rows.writeStream.foreachBatch(keep),
        rows.writeStream.format("csv").option("header", True).option("path", out),
        checkpointLocation=f"s3a://{s3_bucket}/checkpoints",
        checkpointInterval="300 ms",
    )
    assert query.awaitTermination(WAIT_SECONDS_MAX)

    assert sorted(seen) == list(range(1000))
    again = still.readStream.csv(out, schema="id long, count long", header=True)
    query = again.writeStream.format("memory").queryName("bucket_again").trigger(availableNow=True)
    assert query.start(checkpointLocation=f"s3a://{s3_bucket}/again").awaitTermination(
        WAIT_SECONDS_MAX
    )
    assert session.table("bucket_again").count() == 1000
    assert session.table("bucket_again").selectExpr("sum(id)").first()[0] == 499_500  # type: ignore[index]
