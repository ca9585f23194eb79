"""`stillframe run` with another parallelism, from a savepoint of the job as it was."""

from __future__ import annotations

import json
import textwrap

import pyarrow.parquet as pq
import pytest

from stillframe.connectors.generate import ClickSource, clicks_table

RECORDS, PARTITIONS, APPS = 20_000, 4, 50
JOB = f"""
    import sys

    from pyspark.sql import SparkSession

    import stillframe

    home, *savepoint = sys.argv[1:]
    still = stillframe.on(SparkSession.builder.appName("moved").getOrCreate())
    clicks = still.readStream.format("clicks").options(records={RECORDS}, apps={APPS})
    pace = 4000 if savepoint else 1_000_000
    clicks = clicks.options(partitions={PARTITIONS}, recordsPerSecond=pace).load().uid("clicks")
    query = (
        clicks.groupBy("app_id").count().uid("counts")
        .writeStream.queryName("moved").outputMode("update").format("parquet")
        .option("checkpointLocation", home + "/chk").option("checkpointInterval", "1 second")
        .start(home + "/counts")
    )
    if savepoint:
        query.checkpoint()
        query.stop(savepoint=savepoint[0])
"""

pytestmark = pytest.mark.spark


def test_a_job_file_goes_on_from_a_savepoint_with_another_parallelism(command, tmp_path):
    path, savepoint = tmp_path / "job.py", tmp_path / "savepoint"
    path.write_text(textwrap.dedent(JOB))
    before = command(
        *("run", str(path), "--parallelism", "1", "--"), str(tmp_path / "a"), str(savepoint)
    )
    assert before.returncode == 0, before.stderr

    after = command(
        *("run", str(path), "--json", "--parallelism", "3", "--restore", str(savepoint)),
        *("--", str(tmp_path / "b")),
    )

    assert after.returncode == 0, after.stderr
    told = [json.loads(line) for line in after.stdout.splitlines() if line.startswith("{")]
    [running] = [each for each in told if each["kind"] == "slots_running"]
    assert len(running["pids"]) == 3
    [given] = [each for each in told if each["kind"] == "guarantee_given"]
    assert given["word"] == "exactly-once"
    last = [each for each in told if each["kind"] == "progress"][-1]
    assert last["records_in"] < RECORDS, "what the savepoint holds is not read again"
    counts: dict[str, int] = {}
    for row in pq.read_table(tmp_path / "b" / "counts").to_pylist():
        counts[row["app_id"]] = max(row["count"], counts.get(row["app_id"], 0))
    assert counts.items() <= truth().items()
    assert sum(counts.values()) > RECORDS / 2


def truth() -> dict[str, int]:
    source = ClickSource(records=RECORDS, partitions=PARTITIONS, apps=APPS)
    counts: dict[str, int] = {}
    for partition in range(PARTITIONS):
        batch = clicks_table(source, partition, 0, RECORDS // PARTITIONS)
        for app in batch.column("app_id").to_pylist():
            counts[app] = counts.get(app, 0) + 1
    return counts
