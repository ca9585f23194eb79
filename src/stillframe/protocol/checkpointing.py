"""What the checkpoints of a job tell together: Flink's JSON of them, pages and columns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from stillframe.ids import CheckpointId
from stillframe.json_values import JsonObject, JsonValue
from stillframe.protocol.failures import Restored
from stillframe.protocol.statistics import CheckpointStatistics, CheckpointStatus, StatsSummary

SHOWN_MAX = 100
"""As many are shown where nobody says how many."""
BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class Spent:
    """How long the completed checkpoints of one driver took, in milliseconds."""

    phases: dict[str, float] = field(default_factory=dict)
    """Together they are the durations of all."""
    counts: tuple[int, ...] = (0,) * (len(BUCKETS_SECONDS) + 1)
    """Of durations up to each of the buckets and above them."""
    commit_counts: tuple[int, ...] = (0,) * (len(BUCKETS_SECONDS) + 1)
    """Of commits by all sinks, likewise."""

    def plus(self, each: CheckpointStatistics) -> Spent:
        """A checkpoint is complete; its commit comes later."""
        counts = _one_more(self.counts, each.end_to_end_ms)
        spent = self
        for name, ms in each.phases_json().items():
            spent = spent.plus_phase(name, ms) if isinstance(ms, float) else spent
        return replace(spent, counts=counts)

    def plus_commit(self, ms: float) -> Spent:
        """All sinks have committed, so long after the checkpoint was complete."""
        counts = _one_more(self.commit_counts, ms)
        return replace(self.plus_phase("commit", ms), commit_counts=counts)

    def plus_phase(self, name: str, ms: float) -> Spent:
        return replace(self, phases={**self.phases, name: self.phases.get(name, 0.0) + ms})


def _one_more(counts: tuple[int, ...], ms: float) -> tuple[int, ...]:
    place = sum(ms / 1000 > bound for bound in BUCKETS_SECONDS)
    return (*counts[:place], counts[place] + 1, *counts[place + 1 :])


@dataclass(frozen=True, slots=True)
class Counts:
    """How many there were since the job's very beginning, and are under way."""

    restored: int
    total: int
    in_progress: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class CheckpointingStatistics:
    """What Flink's `GET /jobs/:jobid/checkpoints` tells."""

    counts: Counts
    history: tuple[CheckpointStatistics, ...]
    """Newest first; those under way included."""
    restored: Restored | None
    """By the last attempt that started from something."""
    unreadable: tuple[str, ...] = ()
    """Files of the history that are passed over, a sentence each."""
    spent: Spent = field(default_factory=Spent)
    """By the driver that runs the job."""

    @property
    def completed(self) -> tuple[CheckpointStatistics, ...]:
        """Those in the history that are complete, savepoints included; newest first."""
        return tuple(each for each in self.history if each.status == "COMPLETED")

    @property
    def latest_completed(self) -> CheckpointStatistics | None:
        return _first(each for each in self.completed if not each.is_savepoint)

    @property
    def latest_savepoint(self) -> CheckpointStatistics | None:
        return _first(each for each in self.completed if each.is_savepoint)

    @property
    def latest_failed(self) -> CheckpointStatistics | None:
        return _first(each for each in self.history if each.status == "FAILED")

    def checkpoint(self, checkpoint_id: CheckpointId) -> CheckpointStatistics | None:
        """The one of this number; of two drivers' that of the newer."""
        return _first(each for each in self.history if each.checkpoint_id == checkpoint_id)

    def summary(self, value: Callable[[CheckpointStatistics], float]) -> StatsSummary:
        """Over the completed ones in the history: `summary(lambda each: each.end_to_end_ms)`."""
        return StatsSummary.of(value(each) for each in self.completed)

    def to_json(
        self,
        limit: int = SHOWN_MAX,
        before: CheckpointId | None = None,
        status: CheckpointStatus | None = None,
    ) -> JsonObject:
        """The newest of the history: of this status, and older than the one `before`."""
        shown = [
            each
            for each in self.history
            if (before is None or each.checkpoint_id < before) and status in (None, each.status)
        ]
        return {
            "counts": msgspec.to_builtins(self.counts),
            "summary": self._summary_json(),
            "latest": {
                "completed": _json_or_none(self.latest_completed),
                "savepoint": _json_or_none(self.latest_savepoint),
                "failed": _json_or_none(self.latest_failed),
                "restored": _json_or_none(self.restored),
            },
            "history": [each.to_json() for each in shown[:limit]],
            "stillframe": {"unreadable": list(self.unreadable)},
        }

    def series_json(self, from_ms: int | None = None, to_ms: int | None = None) -> JsonObject:
        """All that were triggered between these moments in columns, the oldest first."""
        shown = [
            each
            for each in reversed(self.history)
            if (from_ms is None or each.triggered_at_ms >= from_ms)
            and (to_ms is None or each.triggered_at_ms <= to_ms)
        ]
        phases = [each.phases_json() for each in shown]
        return {
            "id": [each.checkpoint_id for each in shown],
            "triggered": [each.triggered_at_ms for each in shown],
            "status": "".join(each.status[0].lower() for each in shown),
            **{
                name: [each[name] for each in phases]
                for name in ("start", "align", "sync", "async", "store", "commit")
            },
            "new": [each.bytes_written for each in shown],
            "full": [each.state_bytes for each in shown],
        }

    def _summary_json(self) -> JsonObject:
        return {
            "checkpointed_size": self.summary(lambda each: each.bytes_written).to_json(),
            "state_size": self.summary(lambda each: each.state_bytes).to_json(),
            "end_to_end_duration": self.summary(lambda each: each.end_to_end_ms).to_json(),
            "alignment_buffered": self.summary(lambda each: 0).to_json(),
            "processed_data": self.summary(lambda each: each.processed_bytes).to_json(),
            "persisted_data": self.summary(lambda each: each.in_flight_bytes).to_json(),
        }


def _json_or_none(value: CheckpointStatistics | Restored | None) -> JsonValue:
    return None if value is None else value.to_json()


_T = TypeVar("_T")


def _first(found: Iterable[_T]) -> _T | None:
    return next(iter(found), None)
