"""Jobs on Spark are served over HTTP by their driver, from their start to the driver's end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F
from waiting import wait_until

from stillframe.coordinator.located import locate
from stillframe.errors import StartRefused
from stillframe.rest.registry import DRIVER_FILE, RegisteredJob, registered_jobs

if TYPE_CHECKING:
    from stillframe.coordinator.query import Query
    from stillframe.spark.session import Still

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WAIT_SECONDS_MAX = 120.0


def start(still: Still, location: Path, name: str, **options: str) -> Query:
    clicks = still.readStream.format("clicks").option("recordsPerSecond", 1000).load()
    writer = clicks.groupBy("app_id").count().writeStream.queryName(name).outputMode("update")
    options = {"checkpointLocation": str(location), "checkpointInterval": "1 second", **options}
    return writer.format("noop").options(**options).start()


def wait_for_job(name: str) -> RegisteredJob:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        for job in registered_jobs():
            if job.name == name:
                return job
        assert time.monotonic() < deadline, f"job {name} was not registered"
        threading.Event().wait(0.05)


def ask(job: RegisteredJob, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        f"{job.url}/jobs/{job.jid}{path}",
        method=method,
        headers={"Authorization": f"Bearer {job.token}"},
        data=None if body is None else json.dumps(body).encode(),
    )
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as answer:
        return json.load(answer)


def outcome(job: RegisteredJob, path: str) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while (told := ask(job, "GET", path))["status"]["id"] == "IN_PROGRESS":
        assert time.monotonic() < deadline, f"{path} is still under way"
        threading.Event().wait(0.05)
    return told["operation"]


def test_a_job_is_found_asked_and_stopped_over_http(still, tmp_path):
    query = start(still, tmp_path, "served")
    job = wait_for_job("served")

    number = ask(job, "POST", "/checkpoints")["request-id"]
    taken = outcome(job, f"/checkpoints/{number}")
    told = ask(job, "GET", "")
    number = ask(job, "POST", "/stop", {"targetDirectory": str(tmp_path / "savepoint")})

    assert taken["checkpointId"] >= 1
    assert (told["state"], told["stillframe"]["slot-pids"]) == ("RUNNING", list(query.slot_pids))
    stopped = outcome(job, f"/savepoints/{number['request-id']}")
    assert stopped == {"location": str(tmp_path / "savepoint")}
    assert query.summary.outcome == "stopped"


def test_a_port_that_is_taken_is_refused_before_the_job_begins(still, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(StartRefused, match=f"port {port}"):
            start(still, tmp_path / "chk", "refused", restPort=str(port))

    assert not (tmp_path / "chk").exists()


SCRIPT = """
import sys
from pyspark.sql import SparkSession
import stillframe
from stillframe.spark.deployment.java import ensure_java

ensure_java()
spark = (
    SparkSession.builder.master("local[4]")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.log.level", "ERROR")
    .getOrCreate()
)
clicks = stillframe.on(spark).readStream.format("clicks").option("recordsPerSecond", 1000).load()
writer = clicks.groupBy("app_id").count().writeStream.queryName("script").outputMode("update")
query = writer.format("noop").options(
    checkpointLocation=sys.argv[1], checkpointInterval="1 second"
).start()
query.awaitTermination()
"""


def test_who_stops_a_script_hears_that_it_was_done_and_nothing_is_left_behind(tmp_path):
    """The script has nothing more to do then: its process ends, but not before it has answered."""
    (tmp_path / "job.py").write_text(SCRIPT)
    log = tmp_path / "log"
    with log.open("wb") as output:
        script = subprocess.Popen(
            [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "chk")],
            stdout=output,
            stderr=output,
        )
    try:
        job = wait_for_job("script")
        number = ask(job, "POST", "/stop", {"targetDirectory": str(tmp_path / "savepoint")})
        told = outcome(job, f"/savepoints/{number['request-id']}")
        assert script.wait(WAIT_SECONDS_MAX) == 0, log.read_text()
    finally:
        script.kill()
        script.wait(10)

    assert told == {"location": str(tmp_path / "savepoint")}
    assert locate(str(tmp_path / "savepoint")).manifest.job == "script"
    assert not any(each.name == "script" for each in registered_jobs())
    assert not (tmp_path / "chk" / "script" / DRIVER_FILE).exists()


@pytest.fixture(params=["fs", "rocksdb"])
def looked_into(still: Still, tmp_path: Path, request: Any) -> Iterator[Query]:
    """Keys come and change: each is that of some hundred records, and a tenth come back."""
    numbers = still.readStream.format("rate").options(rowsPerSecond=2_000).load()
    keys = numbers.selectExpr(
        "concat('key-', if(value % 10 = 0, value % 7, value div 300)) AS name", "value"
    )
    counts = keys.groupBy("name").agg(F.count("*").alias("n"), F.max("value").alias("newest"))
    writer = counts.uid("count").writeStream.format("noop").outputMode("update")
    options = {"checkpointLocation": str(tmp_path), "checkpointInterval": "1 hour"}
    more = {"stateBackend": request.param, "checkpointsRetained": "5"}
    query = writer.queryName(f"looked-into-{request.param}").options(**options, **more).start()
    yield query
    query.stop()


def test_keys_and_differences_are_those_that_spark_finds_while_the_job_runs(still, looked_into):
    running, job = looked_into, wait_for_job(looked_into.name)
    wait_until(lambda: running.summary.records_in >= 2_000)
    before = running.checkpoint()
    read = running.summary.records_in
    wait_until(lambda: running.summary.records_in >= read + 2_000)
    after = running.checkpoint()
    places = {each.checkpoint_id: each.path for each in running.checkpoint_statistics.completed}
    old, new = (
        still.spark.read.format("stillframe")
        .option("operator", "count")
        .load(places[number])
        .select("key.name", "value")
        .cache()
        for number in (before, after)
    )

    for row in new.orderBy(F.rand(1)).limit(1).collect():
        found = ask(job, "GET", f"/state?checkpoint={after}&uid=count&key={row.name}")
        assert [each["value"] for each in found["rows"]] == [row.value.asDict()]
    nobody = ask(job, "GET", f"/state?checkpoint={after}&uid=count&key=nobody")
    assert nobody["rows"] == []

    asked = ask(job, "POST", "/diffs", {"a": before, "b": after, "uid": "count"})
    (told,) = outcome(job, f"/diffs/{asked['request-id']}")["states"]
    both = old.withColumnRenamed("value", "a").join(
        new.withColumnRenamed("value", "b"), "name", "full_outer"
    )
    [expected] = both.agg(
        F.expr("count_if(a IS NULL)").alias("added"),
        F.expr("count_if(a != b)").alias("changed"),
        F.expr("count_if(b IS NULL)").alias("gone"),
    ).collect()
    assert {name: told[name] for name in expected.asDict()} == expected.asDict()
    assert expected.added > 0
    assert expected.changed > 0
    shown = {each["key"]["name"]: each for each in told["examples"]}
    rows = both.where(F.col("name").isin(list(shown))).collect()
    assert len(rows) == len(shown) > 0
    for name, a, b in rows:
        assert shown[name].get("before") == (None if a is None else a.asDict())
        assert shown[name].get("after") == (None if b is None else b.asDict())
    assert running.isActive
