"""Clicks into a Delta and an Iceberg table: slots and the driver are killed, also in a commit.

The driver is a process of its own and is started again by the same command. It kills itself at each
moment once: before and after it adds an entry to the log of either table.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from bucket_files import ids_of
from lake_jobs import Bucket, ClicksToDelta, ClicksToIceberg
from s3_servers import Front

from stillframe.coordinator.history import AttemptFailed, CheckpointFailed

WAIT_SECONDS_MAX = 120.0
RECORDS = 20_000
MOMENTS = ["before Delta", "after Delta", "before Iceberg", "after Iceberg"]

DRIVER = """
import os, signal, sys
from pathlib import Path
from random import Random

conftest, home, records = sys.argv[1:]
sys.path[:0] = [conftest, str(Path(conftest).parent / "shared")]
from conftest import PageViews
from test_tables import sinks
from stillframe.connectors.delta_table import OpenDelta
from stillframe.connectors.generate import ClickSource
from stillframe.connectors.iceberg_table import OpenIceberg
from stillframe.coordinator.history import CheckpointCompleted
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan


def killing(kind, commit):
    # Not with the first files: then there is something in the table.
    committed = []

    def reach(moment):
        reached = Path(home, f"{moment} {kind}")
        if len(committed) > 1 and not reached.exists():
            reached.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def commit_or_die(self, mark, files):
        committed.extend(files[:1])
        reach("before")
        commit(self, mark, files)
        reach("after")

    return commit_or_die


OpenDelta.commit = killing("Delta", OpenDelta.commit)
OpenIceberg.commit = killing("Iceberg", OpenIceberg.commit)
source = ClickSource(records=int(records), records_per_second=5_000)
read = Node(Read(source), source.schema, given_uid="clicks")
made = sinks(Path(home), source.schema)
for sink in made:
    sink.check_start()
ends = [
    Node(Write(sink), source.schema, (read,), given_uid=f"write-{number}")
    for number, sink in enumerate(made)
]
options = {"restartAttempts": "100", "checkpointInterval": "100 ms", "leaseTimeout": "1 s"}
running = PageViews(Path(home)).start(build_plan("page-views", ends, 2), **options)
running.wait(CheckpointCompleted)
running.kill_any(Random(len(os.listdir(home))))
running.finish()
"""


def sinks(home, schema):
    from stillframe.connectors.delta_table import delta_from_options
    from stillframe.connectors.iceberg_table import iceberg_from_options
    from stillframe.options import Options

    delta = {"path": f"{home}/delta"}
    iceberg = {
        "table": "shop.clicks",
        "catalog.type": "sql",
        "catalog.uri": f"sqlite:///{home}/catalog.db",
        "catalog.warehouse": f"file://{home}/iceberg",
    }
    made = (("delta", delta, delta_from_options), ("iceberg", iceberg, iceberg_from_options))
    return [
        make(Options(f"the sink {name}", {**given, "createTable": "true"}), schema)
        for name, given, make in made
    ]


@pytest.mark.slow
def test_kills_of_slots_and_of_the_driver_lose_and_double_nothing(tmp_path):
    command = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), str(tmp_path)]
    codes = []
    while 0 not in codes:
        ran = subprocess.run(
            [*command, str(RECORDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_SECONDS_MAX,
            check=False,
        )
        codes.append(ran.returncode)
        assert ran.returncode in (0, -9), ran.stdout

    assert codes == [-9] * len(MOMENTS) + [0], [name.name for name in tmp_path.iterdir()]
    check_delta(tmp_path / "delta")
    check_iceberg(sinks(tmp_path, pa.schema([("id", pa.int64())]))[1], tmp_path / "iceberg")
    left = {file.name.partition("-")[0] for file in tmp_path.rglob("prepared/*/*")}
    assert left <= {"marked"}, "nothing is left behind but notes of the marks"


@pytest.mark.s3
@pytest.mark.parametrize("kind", [ClicksToDelta, ClicksToIceberg])
def test_while_the_bucket_of_a_table_is_away_the_job_says_so_and_then_goes_on(
    kind, page_views, gateway, s3_bucket, s3_settings, s3_port, until
):
    gate = page_views.gate("more")
    source = page_views.halves(gate)
    more = {"catalog": f"{page_views.home}/catalog.db"} if kind is ClicksToIceberg else {}
    plan = kind(source, f"s3://{s3_bucket}", s3_settings, **more)
    plan.sink().check_start()
    running = page_views.start(plan(2), restartAttempts="1000")
    running.next_checkpoint()
    gateway.close()
    gate.open()
    until(lambda: any(plan.sink().describe() in each for each in said_by(running)))
    gateway.open()
    running.finish()

    check_each_is_there_once(plan, s3_bucket, s3_settings, s3_port)
    assert not any(s3_settings["fs.s3a.secret.key"] in each for each in said_by(running))


@pytest.mark.s3
@pytest.mark.parametrize("kind", [ClicksToDelta, ClicksToIceberg])
def test_a_token_of_a_table_that_expires_and_is_renewed_in_its_file_loses_nothing(
    kind, page_views, s3_bucket, s3_settings, s3_port, until
):
    front, token, gate = Front(s3_port), page_views.home / "token", page_views.gate("more")
    token.write_text("the-first-token")
    source = page_views.halves(gate)
    settings = {
        **s3_settings,
        "fs.s3a.endpoint": front.url,
        "fs.s3a.session.token": f"file:{token}",
    }
    more = {"catalog": f"{page_views.home}/catalog.db"} if kind is ClicksToIceberg else {}
    plan = kind(source, f"s3://{s3_bucket}", settings, **more)
    plan.sink().check_start()
    running = page_views.start(plan(2), restartAttempts="1000", restartDelay="300 ms")
    running.next_checkpoint()
    front.expire("the-first-token")
    gate.open()
    until(lambda: any(plan.sink().describe() in each for each in said_by(running)))
    token.write_text("the-next-token")
    running.finish()
    check_each_is_there_once(plan, s3_bucket, s3_settings, s3_port)
    front.end()

    assert not any("-token" in each for each in said_by(running))


def said_by(running):
    failures = [each for each in running.told if isinstance(each, AttemptFailed | CheckpointFailed)]
    return [*(each.reason for each in failures), *running.query.trouble]


def check_each_is_there_once(plan, bucket, settings, port):
    """As the bucket's own client tells it, and no file that the table's log does not name."""
    key, secret = settings["fs.s3a.access.key"], settings["fs.s3a.secret.key"]
    place = Bucket(f"http://127.0.0.1:{port}", bucket, key, secret)
    there = place.data_files()
    assert there == plan.named(there)
    assert sorted(id for name in there for id in place.ids(name)) == sorted(ids_of(plan.source))


def check_delta(place):
    from deltalake import DeltaTable

    table = DeltaTable(str(place))
    assert sorted(table.to_pyarrow_table()["id"].to_pylist()) == list(range(RECORDS))
    assert files_below(place) == {uri.rpartition("/")[2] for uri in table.file_uris()}


def check_iceberg(sink, place):
    catalog = sink.load_catalog()
    table = catalog.load_table(sink.table)
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(RECORDS))
    named = {task.file.file_path.rpartition("/")[2] for task in table.scan().plan_files()}
    assert files_below(place) == named
    catalog.close()


def files_below(place):
    return {file.name for file in place.rglob("part-*.parquet")}
