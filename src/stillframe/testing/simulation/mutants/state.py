"""Mistakes in how states are kept, frozen and restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stillframe.state import timers
from stillframe.state.aggregates import AggregateTable
from stillframe.state.columns import ChangingColumns
from stillframe.state.duplicates import SeenKeys
from stillframe.state.joins import JoinRows
from stillframe.state.newest import NewestRows
from stillframe.state.sessions import SessionTable
from stillframe.state.windows import WindowTables
from stillframe.testing.simulation.mutants.mutant import Mutant, nothing


def _fired_ones_too(original: Any) -> Any:
    def freeze(self: Any) -> Any:
        frozen = original(self)
        return replace(frozen, is_there=frozen.is_there | True)

    return freeze


def _unlinked(original: Any) -> Any:
    def restore_sessions(self: Any, batch: Any) -> None:
        original(self, batch)
        self._newest.rows[:] = -1

    return restore_sessions


def _none_matched(original: Any) -> Any:
    def restore_rows(self: Any, batches: Any) -> None:
        original(self, batches)
        for chunk in self._chunks:
            chunk.matched = chunk.matched & False

    return restore_rows


STATE_MUTANTS: Mapping[str, Mutant] = {
    "forget-open-windows": Mutant(
        "a restored job begins its windows anew",
        WindowTables, "restore", nothing,
    ),
    "fire-a-timer-again": Mutant(
        "a snapshot has the timers that have fired, too",
        timers._Clock, "freeze", _fired_ones_too,
    ),
    "begin-sessions-anew": Mutant(
        "a restored session is closed by itself, whatever more comes of it",
        SessionTable, "restore", _unlinked,
    ),
    "forget-what-has-met": Mutant(
        "rows of a join are restored as if nothing had matched them",
        JoinRows, "restore", _none_matched,
    ),
    "forget-rows-of-a-join": Mutant(
        "a restored join begins with no rows",
        JoinRows, "restore", nothing,
    ),
    "forget-the-newest": Mutant(
        "a restored job knows no row of the stream whose newest rows it looks up",
        NewestRows, "restore", nothing,
    ),
    "forget-what-was-seen": Mutant(
        "a restored job knows no record for a duplicate",
        SeenKeys, "restore", nothing,
    ),
    "change-a-frozen-snapshot": Mutant(
        "updates reach a snapshot already taken",
        ChangingColumns, "before_change", nothing,
    ),
    "take-state-for-unchanged": Mutant(
        "a snapshot refers to an older file although the state has changed",
        AggregateTable, "version", lambda original: 0,
    ),
}  # fmt: skip
