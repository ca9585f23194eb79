"""Jobs that keep their state in databases, under every fault there is."""

from __future__ import annotations

import pytest

from stillframe.protocol import sharing
from stillframe.testing.simulation import jobs
from stillframe.testing.simulation.run import run_seed

ON_DISK = {("rocksdb",): 2, ("rocksdb", "fs"): 1, ("memory", "rocksdb"): 1}


@pytest.fixture(autouse=True)
def on_disk(monkeypatch):
    monkeypatch.setattr(jobs, "_BACKENDS", ON_DISK)


def test_every_promise_is_kept_with_databases():
    recoveries = 0
    for seed in range(40):
        verdict = run_seed(seed)
        assert verdict.violation is None, f"seed {seed}: {verdict.violation}"
        recoveries += verdict.recoveries
    assert recoveries > 30, "or the schedules prove nothing"


def test_a_seed_is_played_the_same_way_twice():
    played = [[run_seed(seed).trace for seed in (0, 5, 7)] for _ in range(2)]
    assert played[0] == played[1]


def test_a_database_that_refers_to_files_it_may_not_is_caught(monkeypatch):
    def careless(self, checkpoint_id):
        taken = {name: file for held in self._undecided.values() for name, file in held.items()}
        self._undecided[checkpoint_id] = {}
        return {**self._base, **taken}

    monkeypatch.setattr(sharing.SharedFiles, "on_snapshot", careless)

    assert any(run_seed(seed).catches_mutant for seed in range(200))
