"""Sources and sinks of an installed package on Spark, and that what they must keep to themselves
shows nowhere."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brought
import pyarrow.json
import pytest

from stillframe.connectors.function_sink import to_function
from stillframe.errors import BuildError, StartRefused

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

WAIT_SECONDS_MAX = 120.0
PASSWORD, PIN, TOKEN = "hunter-2 of the shelf", "pin-of-the-shelf-99", "tok/en+of=counting"


@pytest.fixture(scope="module")
def shelves(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of a package that the driver and the workers have."""
    site = tmp_path_factory.mktemp("site")
    file = brought.install(site)
    spark.sparkContext.addPyFile(str(brought.zipped(file)))
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    yield importlib.import_module("shelves")
    sys.path.remove(str(site))


def written(path: Path) -> list[int]:
    return sorted(
        row["n"] for file in path.glob("part-*") for row in pyarrow.json.read_json(file).to_pylist()
    )


@pytest.mark.parametrize("by", ["class", "name"])
def test_a_source_and_a_sink_of_a_package_run_by_class_and_by_name(
    by, still, shelves, tmp_path, job_options
):
    source, sink = (
        (shelves.CountingSource, shelves.ShelfSink)
        if by == "class"
        else (
            "counting",
            "shelf",
        )
    )
    counted = still.readStream.format(source).option("Until", 1000).load()

    query = (
        counted.select("n")
        .writeStream.queryName(f"by-{by}")
        .format(sink)
        .option("pin", PIN)
        .options(**job_options)
        .start(str(tmp_path / "out"))
    )

    assert query.awaitTermination(WAIT_SECONDS_MAX)
    assert written(tmp_path / "out") == list(range(1000))
    assert query.guarantee().word == "exactly-once"


def test_instances_run_and_survive_a_failure(still, shelves, tmp_path, job_options, capsys):
    sink = shelves.ShelfSink(
        str(tmp_path / "out"), shelves.SCHEMA, shelves.Secret(PASSWORD), "open_writer"
    )
    counted = still.readStream.format(shelves.CountingSource(500)).load()

    query = (
        counted.writeStream.queryName("instances")
        .format(sink)
        .uid("shelf")
        .options(**job_options)
        .start()
    )

    assert query.awaitTermination(WAIT_SECONDS_MAX)
    assert written(tmp_path / "out") == list(range(500))
    (failure, *_) = query.failures
    assert "raised ConnectionError: no login as *** (***)" in failure.reason
    query.explain()
    assert "counting to 500" in capsys.readouterr().out


def test_a_sink_made_of_a_function_is_an_instance_too(still, shelves, tmp_path, job_options):
    out = tmp_path / "delivered"
    out.mkdir()

    def deliver(rows: Any, key: str) -> None:
        (out / key.replace("/", "-")).write_text(str(rows["n"].to_pylist()))

    counted = still.readStream.format(shelves.CountingSource(100)).load()
    sink = to_function(deliver, idempotent=True)
    query = counted.writeStream.queryName("function").format(sink).options(**job_options).start()

    assert query.awaitTermination(WAIT_SECONDS_MAX)
    told = [n for file in out.iterdir() for n in ast.literal_eval(file.read_text())]
    assert sorted(told) == list(range(100))
    assert query.guarantee().word == "exactly-once"


def test_a_sink_of_a_package_keeps_the_rules_of_ours(still, shelves, tmp_path):
    counted = still.readStream.format(shelves.CountingSource(500)).load()
    writer = counted.writeStream.format("shelf").option("pin", PIN)

    with pytest.raises(
        BuildError, match=r"checkpointLocation must be specified .* writes to shelf"
    ):
        writer.start(str(tmp_path / "out"))
    with pytest.raises(BuildError, match="the sink shelf has no option 'checkpoint_Location'; did"):
        writer.option("checkpoint_Location", "x").start(str(tmp_path / "out"))
    grouped = counted.groupBy("n").count().writeStream.format("shelf").option("pin", PIN)
    grouped = grouped.option("checkpointLocation", str(tmp_path / "chk"))
    with pytest.raises(BuildError, match=r"STREAMING_OUTPUT_MODE\.UNSUPPORTED_DATASOURCE"):
        grouped.outputMode("complete").start(str(tmp_path / "out"))
    with pytest.raises(BuildError, match="not supported for streaming aggregations without"):
        grouped.outputMode("append").start(str(tmp_path / "out"))


def test_a_source_that_says_it_has_no_end_is_not_read_to_it(still, shelves, tmp_path):
    class Endless(shelves.CountingSource):
        is_unbounded = True

    writer = still.readStream.format(Endless(5)).load().writeStream.trigger(availableNow=True)

    with pytest.raises(BuildError, match=r"trigger\(availableNow=True\) would never stop"):
        writer.option("checkpointLocation", str(tmp_path / "chk")).start(str(tmp_path / "out"))


def test_a_package_that_the_workers_do_not_have_is_refused_before_the_start(
    still, tmp_path, monkeypatch, job_options
):
    brought.install(tmp_path / "here", "racks", sources=(), sinks=())
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    monkeypatch.delitem(sys.modules, "racks", raising=False)
    racks = importlib.import_module("racks")
    counted = still.readStream.format(racks.CountingSource(5)).load()

    with pytest.raises(
        StartRefused, match=r"class CountingSource cannot be imported \(No module named 'racks'\)"
    ):
        counted.writeStream.format("noop").options(**job_options).start()
    assert not (tmp_path / "checkpoints").exists()


# --- secrets --------------------------------------------------------------------------------------

SCRIPT = """
import json, logging, sys, threading, urllib.error, urllib.request
from pathlib import Path
from stillframe.spark.deployment.java import ensure_java

ensure_java()
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
from pyspark.sql import SparkSession
import stillframe
from stillframe.rest.registry import registered_jobs
from stillframe.rest.routes import ROUTES

home, stumbles = Path(sys.argv[1]), sys.argv[2]
(home / "events").mkdir()
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.log.level", "INFO")
    .config("spark.eventLog.enabled", "true")
    .config("spark.eventLog.dir", (home / "events").as_uri())
    .getOrCreate()
)
still = stillframe.on(spark)
reader = still.readStream.format("counting").option("token", "env:COUNTING_TOKEN")
counted = reader.option("until", 10**8).load()
writer = (
    counted.filter("n % 1000 = 0").writeStream.queryName("hidden").format("shelf")
    .option("client.password", "env:SHELF_PASSWORD")
    .option("pin", f"file:{home / 'pin'}")
    .option("stumbles", stumbles)
    .options(checkpointLocation=str(home / "chk"), checkpointInterval="300 ms", parallelism=1)
)
print(repr(reader), repr(counted), repr(writer))
try:
    query = writer.start(str(home / "out"))
except stillframe.StillframeError as error:
    print("REFUSED", error)
    sys.exit(0)
enough = threading.Event()


def listen(event):
    if type(event).__name__ == "CheckpointCompleted" and event.checkpoint_id >= 3:
        enough.set()


query.add_listener(listen)
assert enough.wait(100), query.status
(job,) = registered_jobs()


def ask(path):
    request = urllib.request.Request(
        job.url + path, headers={"Authorization": f"Bearer {job.token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            if answer.headers["Content-Type"].startswith("text/event-stream"):  # it has no end
                return b"".join(answer.readline() for _ in range(20)).decode()
            return answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.read().decode()


query.savepoint(str(home / "savepoint"))
vertex = json.loads(ask(f"/jobs/{job.jid}"))["vertices"][0]["id"]
for route in ROUTES:
    if route.method == "GET":
        path = route.path.format(jobid=job.jid, checkpointid=3, vertexid=vertex, triggerid="0" * 32)
        print("ANSWER", path, ask(path))
print("ANSWER", ask("/openapi.json"))
query.explain(True)
print(query.status, query.summary, repr(query), query._repr_html_(), query.recentProgress)
print([failure.to_json() for failure in query.failures], query.failures)
for planned in (each for _, each in query.plan.operators()):
    print(repr(planned.operator))
query.stop()
print("STOPPED", len(query.failures))
"""


@pytest.mark.parametrize("stumbles", ["open_writer", "open_committer", "built"])
def test_a_secret_shows_nowhere(stumbles, tmp_path):
    """Not in a plan, checkpoint, savepoint, log, event log of Spark, HTTP answer or error."""
    brought.install(tmp_path / "site")
    (tmp_path / "job.py").write_text(SCRIPT)
    home = tmp_path / "home"
    home.mkdir()
    (home / "pin").write_text(PIN)
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py"), str(home), stumbles],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "COUNTING_TOKEN": TOKEN,
            "SHELF_PASSWORD": PASSWORD,
            "STILLFRAME_REGISTRY": str(tmp_path / "registry"),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    if stumbles == "open_writer":
        assert "no login as ***" in done.stdout
        assert "STOPPED 1" in done.stdout
    else:
        assert "REFUSED" in done.stdout
        assert "no login as ***" in done.stdout

    (home / "pin").unlink()
    files = [file for file in [*home.rglob("*"), *tmp_path.glob("registry/*")] if file.is_file()]
    if stumbles == "open_writer":
        assert {"chk", "savepoint", "events", "out"} <= {each.name for each in home.iterdir()}
        assert len(files) > 20, files
    for secret in (PASSWORD, PIN, TOKEN):
        assert secret not in said
        assert [str(file) for file in files if secret.encode() in file.read_bytes()] == []
