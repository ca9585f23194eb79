"""One job on Spark, stopped and started again with 2, 3, 1 and 4 slots: every count is exact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.connectors.generate import ClickSource, clicks_table

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

    source = ClickSource(records=RECORDS, partitions=PARTITIONS, apps=APPS)
    clicks = [clicks_table(source, p, 0, RECORDS // PARTITIONS) for p in range(PARTITIONS)]
    truth = pa.Table.from_batches(clicks).group_by("app_id").aggregate([([], "count_all")])
    seen = pq.read_table(tmp_path / "out").group_by("app_id").aggregate([("count", "max")])
    assert counts_of(seen, "count_max") == counts_of(truth, "count_all")


def counts_of(table: pa.Table, column: str) -> dict[str, int]:
    return dict(zip(table["app_id"].to_pylist(), table[column].to_pylist(), strict=True))
