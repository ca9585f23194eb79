"""One job on Spark with 2, 3, 1 and 4 slots, started again each time or as it runs: all exact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.errors import StartRefused

if TYPE_CHECKING:
    from stillframe.coordinator.query import Query
    from stillframe.spark.session import Still

pytestmark = [pytest.mark.spark, pytest.mark.slow]

RECORDS, PARTITIONS, RATE, APPS = 240_000, 6, 60_000, 2_000


@pytest.mark.parametrize("backend", ["fs", "memory", "rocksdb"])
def test_counts_are_exact_after_2_3_1_and_4_slots(
    still: Still, tmp_path: Path, backend: str
) -> None:
    def start(parallelism: int) -> Query:
        clicks = (
            still.readStream.format("clicks")
            .options(records=RECORDS, recordsPerSecond=RATE, partitions=PARTITIONS, apps=APPS)
            .load()
        )
        return (
            clicks.groupBy("app_id")
            .count()
            .writeStream.queryName("rescaled")
            .outputMode("update")
            .format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "chk"))
            .option("checkpointInterval", "200 ms")
            .option("stateBackend", backend)
            .option("parallelism", parallelism)
            .start()
        )

    for parallelism in (2, 3, 1):
        query = start(parallelism)
        query.checkpoint(timeout=60)
        query.checkpoint(timeout=60)
        query.stop()
        assert query.summary.records_in < RECORDS, "it must not be over before the last start"
    query = start(4)
    assert query.awaitTermination(120)

    check_counts(tmp_path / "out")


def test_counts_are_exact_when_a_running_job_goes_from_2_to_4_and_to_1_slot(
    still: Still, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clicks = (
        still.readStream.format("clicks")
        .options(records=RECORDS, recordsPerSecond=RATE // 3, partitions=PARTITIONS, apps=APPS)
        .load()
    )
    query = (
        clicks.groupBy("app_id")
        .count()
        .writeStream.queryName("rescaled-live")
        .outputMode("update")
        .format("parquet")
        .options(path=str(tmp_path / "out"), checkpointLocation=str(tmp_path / "chk"))
        .options(checkpointInterval="500 ms", parallelism=2)
        .start()
    )
    query.checkpoint(timeout=60)
    rescales = []
    for parallelism in (4, 1):
        rescales.append(query.rescale(parallelism, timeout=120))
        assert len(query.slot_pids) == query.parallelism == parallelism
        query.checkpoint(timeout=60)
    with capsys.disabled():
        print("", *rescales, sep="\n    ")
    assert query.awaitTermination(180)

    assert [(each.before, each.after) for each in rescales] == [(2, 4), (4, 1)]
    assert query.summary.records_in == RECORDS, "not one record was read twice"
    assert query.summary.restarts == 0
    check_counts(tmp_path / "out")


def test_more_slots_than_spark_has_and_slots_that_a_dataframe_feeds_are_refused(
    still: Still, tmp_path: Path
) -> None:
    fed = (
        still.stream(still.spark.range(0, 100_000, 1, 2))
        .writeStream.queryName("fed")
        .format("noop")
        .options(checkpointLocation=str(tmp_path / "chk"), checkpointInterval="1 second")
        .start()
    )
    unbounded = (
        still.readStream.format("rate")
        .load()
        .writeStream.queryName("wide")
        .format("noop")
        .options(checkpointLocation=str(tmp_path / "chk"), checkpointInterval="1 second")
        .option("parallelism", 1)
        .start()
    )
    with pytest.raises(StartRefused, match="each of its 2 partitions into one slot"):
        fed._job.request_rescale(3, lambda outcome: None)  # it may be over before a query asks
    with pytest.raises(StartRefused, match="the job needs 100 cores at the same time"):
        unbounded.rescale(100)
    unbounded.stop()
    fed.awaitTermination(60)


def check_counts(out: Path) -> None:
    source = ClickSource(records=RECORDS, partitions=PARTITIONS, apps=APPS)
    clicks = [clicks_table(source, p, 0, RECORDS // PARTITIONS) for p in range(PARTITIONS)]
    truth = pa.Table.from_batches(clicks).group_by("app_id").aggregate([([], "count_all")])
    seen = pq.read_table(out).group_by("app_id").aggregate([("count", "max")])
    assert counts_of(seen, "count_max") == counts_of(truth, "count_all")


def counts_of(table: pa.Table, column: str) -> dict[str, int]:
    return dict(zip(table["app_id"].to_pylist(), table[column].to_pylist(), strict=True))
