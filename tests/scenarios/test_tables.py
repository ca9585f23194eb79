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

WAIT_SECONDS_MAX = 120.0
RECORDS = 20_000
MOMENTS = ["before Delta", "after Delta", "before Iceberg", "after Iceberg"]

DRIVER = """
import os, signal, sys
from pathlib import Path
from random import Random

conftest, home, records = sys.argv[1:]
sys.path.insert(0, conftest)
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
