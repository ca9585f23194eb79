"""What the command's tests share: a small job that has really run, and the command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.clock import SystemClock
from stillframe.config import job_config
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.job import Job
from stillframe.coordinator.query import Query
from stillframe.coordinator.running import DriverAddress
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.testing.processes import ProcessDeployment

COMMAND_SECONDS_MAX = 280.0


def run_small_job(home: Path, name: str = "page-views", **more_options: str) -> Query:
    """1,000 clicks counted by app on two slots, to the end; checkpoints are below `home`/chk."""
    source = ClickSource(records=1_000, apps=10)
    read = Node(Read(source), source.schema, given_uid="clicks")
    counts = pa.schema([("app_id", pa.string()), ("count", pa.int64())])
    call = AggregateCall("count", None, "count", pa.int64())
    counted = Node(Aggregate(("app_id",), (call,)), counts, (read,), given_uid="count")
    sink = FileSink(str(home / f"{name}-counts"), "parquet", counts)
    write = Node(Write(sink), counts, (counted,), given_uid="write")
    location = str(home / "chk")
    options = {"checkpointLocation": location, "checkpointInterval": "10 s", **more_options}
    job = Job(
        build_plan(name, [write], 2),
        job_config(options),
        ProcessDeployment(),
        DriverAddress("127.0.0.1"),
        SystemClock(),
    )
    query = Query(job)
    job.start()
    assert query.awaitTermination(60)
    return query


@pytest.fixture
def small_job() -> Callable[..., Query]:
    return run_small_job


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command() -> Command:
    """`stillframe …` in a process of its own, with this interpreter and this package."""
    import stillframe

    package = Path(stillframe.__file__).parents[1]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.run(
            [sys.executable, "-m", "stillframe.cli.main", *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS_MAX,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    return run
