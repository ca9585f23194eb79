"""A driver whose job runs, without Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from eyes import JOB, FlowingDriver
from waiting import wait_until

from stillframe.coordinator.query import Query


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowingDriver]:
    made = FlowingDriver(tmp_path_factory.mktemp("page"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def query(driver: FlowingDriver) -> Query:
    """A job that takes a checkpoint each second, and has taken three."""
    started = driver.start(JOB, checkpointInterval="1 s", checkpointsRetained="100")
    wait_until(lambda: (started.summary.last_checkpoint or 0) >= 3)
    return started
