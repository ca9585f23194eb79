"""What the driver does at the very end of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillframe.api.sources import Source
from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.attempt import JobParts
from stillframe.coordinator.history import History
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.sinks import DriverSinks
from stillframe.coordinator.starting import Starter
from stillframe.errors import StorageError
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.storage.paths import state_path
from stillframe.storage.store import Store, open_store
from stillframe.testing.clock import ManualClock


def starter(store: Store) -> Starter:
    source: Source = ClickSource(records=1)
    read = Node(Read(source), source.schema)
    plan = build_plan("views", [Node(Write(DiscardSink()), source.schema, (read,))], 1)
    clock = ManualClock()
    ledger = Ledger(store, "views", 2, clock)
    ledger.read()
    return Starter(JobParts(plan, JobConfig(), clock, History(), DriverSinks(plan), ledger))


def test_a_job_is_not_called_finished_before_what_nobody_needs_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    first = starter(store)
    first.begin()
    store.write(state_path(1, "count", 0, 1, "aggregates"), [b"of a checkpoint that failed"])

    def die(self: object, *args: object) -> None:
        raise StorageError("the driver dies here")

    with monkeypatch.context() as dying:
        dying.setattr(type(first._ledger), "sweep", die)
        with pytest.raises(StorageError):
            first.finish()

    successor = starter(store)
    record = successor._ledger.record
    assert record is not None
    assert record.outcome == "running", "so it goes on, and sweeps again"
    successor.begin()
    assert store.list("shared") == []
