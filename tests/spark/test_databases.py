"""Databases on Spark: counts into a table, by the words of Spark's JDBC writer."""

from __future__ import annotations

import pytest
from database_servers import PASSWORD

from stillframe.errors import BuildError, StartRefused, UnknownOption

pytestmark = [pytest.mark.spark, pytest.mark.database]


def write(still, server, location, **options):
    counts = still.readStream.format("clicks").option("records", 5_000).load()
    writer = counts.groupBy("app_id").count().writeStream.format("jdbc").outputMode("update")
    given = {
        "url": f"jdbc:{server.url}",
        "user": "root",
        "password": PASSWORD,
        "checkpointLocation": str(location),
        "createTable": "true",
        **options,
    }
    return writer.options(**{name: text for name, text in given.items() if text is not None})


def test_counts_are_replaced_in_a_table_as_they_change(still, mariadb, tmp_path):
    writer = write(still, mariadb, tmp_path, dbtable="spark_counts", upsertKeys="app_id",
                   driver="org.mariadb.jdbc.Driver", batchsize="1000")  # fmt: skip
    query = writer.queryName("counts").start()

    assert query.awaitTermination(120)
    assert query.guarantee().word == "exactly-once"
    assert mariadb.execute("select sum(`count`) from spark_counts") == [(5_000,)]
    shown = str(query.status) + str(query.summary)
    assert PASSWORD not in shown


def test_what_is_wrong_is_told_before_any_slot_runs(still, mariadb, tmp_path):
    with pytest.raises(StartRefused, match="table nowhere does not exist in MySQL at"):
        write(still, mariadb, tmp_path, dbtable="nowhere", createTable=None).start()
    with pytest.raises(UnknownOption, match="did you mean 'upsertKeys'"):
        write(still, mariadb, tmp_path, dbtable="t", upsertKey="app_id").start()
    with pytest.raises(BuildError, match="needs the option dbtable"):
        write(still, mariadb, tmp_path).start()
    with pytest.raises(BuildError, match=r"checkpointLocation must be specified .* to jdbc"):
        write(still, mariadb, tmp_path, dbtable="t", checkpointLocation=None).start()
