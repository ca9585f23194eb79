"""`foreachBatch` made exactly-once: an epoch that is handed over again is written once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stillframe
from stillframe.ids import Mark, Writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from stillframe.spark.session import Still

pytestmark = pytest.mark.spark


def test_marks_are_said_to_spark_as_delta_has_them() -> None:
    mark = Mark(Writer("abc", "sink", None), 7)
    assert mark.delta_options == {"txnAppId": "abc/sink/all", "txnVersion": "7"}


@pytest.mark.database
def test_an_epoch_that_comes_again_is_written_to_a_database_once(
    still: Still, tmp_path: Path, postgres: Any
) -> None:
    from database_servers import PASSWORD

    given = {
        "url": f"jdbc:{postgres.url}",
        "user": "postgres",
        "password": PASSWORD,
        "createTable": True,
    }
    tables = (postgres.table("id bigint"), postgres.table("id bigint"))
    failed = set()

    @stillframe.exactly_once
    def write(rows: DataFrame, epoch: int, mark: stillframe.Mark) -> None:
        for table in tables:
            stillframe.write_jdbc(rows.select("id"), mark, dbtable=table, **given)
        if mark not in failed and len(failed) < 2:
            failed.add(mark)
            raise ConnectionError("it died before it said that it was done")

    clicks = still.readStream.format("clicks").options(records=3_000, recordsPerSecond=2_000).load()
    query = (
        clicks.writeStream.queryName("written")
        .foreachBatch(write)
        .options(checkpointLocation=str(tmp_path), checkpointInterval="500 ms")
        .options(restartAttempts=10, restartDelay="20 ms", requireGuarantee="exactly-once")
        .start()
    )

    assert query.awaitTermination(120)
    assert len(failed) == 2
    assert query.guarantee().word == "exactly-once"
    for table in tables:
        rows = postgres.execute(f"select count(*), count(distinct id) from {table}")
        assert rows == [(3_000, 3_000)]
