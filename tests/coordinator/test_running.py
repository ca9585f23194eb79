"""The end of an attempt whose storage does not answer."""

import threading

import pytest

from stillframe.clock import SystemClock
from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator import running
from stillframe.coordinator.history import History
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.ledger_thread import LedgerThread
from stillframe.coordinator.sinks import DriverSinks
from stillframe.errors import StillframeError
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.storage.store import open_store


class Waits:
    """Counts how often people are told."""

    told = 0

    def tell_of_storage(self):
        self.told += 1


def test_a_job_whose_storage_never_answers_ends_with_one_sentence(tmp_path, monkeypatch):
    """What the store may still write would change the record that the next attempt begins with."""
    monkeypatch.setattr(running, "TELL_SECONDS", 0.01)
    monkeypatch.setattr(running, "_WRITE_SECONDS_MAX", 0.05)
    clicks = ClickSource(records=10)
    read = Node(Read(clicks), clicks.schema)
    plan = build_plan("views", [Node(Write(DiscardSink()), clicks.schema, (read,))], 1)
    ledger = Ledger(open_store(str(tmp_path)), "views", 1, SystemClock())
    parts = JobParts(plan, JobConfig(), SystemClock(), History(), DriverSinks(plan), ledger)
    gate, waits = threading.Event(), Waits()
    store = LedgerThread(lambda event: None, writes_max=1)
    store.write(lambda: gate.wait(30) and None)

    with pytest.raises(StillframeError, match=f"the storage .{tmp_path}. has not answered for"):
        running._await_writes(parts, store, waits)

    assert waits.told > 0
    gate.set()
    running._await_writes(parts, store, waits)
    store.close(30.0)
