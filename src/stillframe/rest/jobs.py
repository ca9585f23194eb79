"""The jobs that a driver answers for: those that run, and the last that have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from stillframe.clock import Clock
from stillframe.coordinator.history import AttemptFailed, Event, JobEnded, SlotsRunning
from stillframe.coordinator.query import Query
from stillframe.json_values import JsonObject
from stillframe.protocol.rings import Rings
from stillframe.rest.figure_rows import RING_COLUMNS
from stillframe.rest.refusals import Refused

ENDED_KEPT_MAX = 20
STATES = (
    "INITIALIZING",
    "RUNNING",
    "RESTARTING",
    "FINISHED",
    "CANCELED",
    "FAILED",
)
"""Flink's words for what a job is doing. One that was stopped is FINISHED there, and so here; its
outcome tells the two apart."""
RINGS_OF_JOB = ("records_in_per_second", "records_out_per_second", "lag_records")
_STATE_OF = {
    "finished": "FINISHED",
    "stopped": "FINISHED",
    "cancelled": "CANCELED",
    "failed": "FAILED",
}

_IN_WORDS = {
    "finished": "finished",
    "stopped": "been stopped",
    "cancelled": "been cancelled",
    "failed": "failed",
}


Tell: TypeAlias = "Callable[[ServedJob, Event], None]"
"""Told of everything that happens to a job, on the job's thread; it must not wait."""


class ServedJob:
    """A query, and when it came to be what it is. Every member may be used from any thread."""

    def __init__(self, query: Query, clock: Clock, tell: Tell) -> None:
        self.query = query
        self.jid = jid_of(query)
        self.started_at_ms = clock.wall_ms()
        self._clock = clock
        self._tell = tell
        self._lock = threading.Lock()
        self._state = "INITIALIZING"
        self._since_ms = {self._state: self.started_at_ms}
        self._rings = Rings(RINGS_OF_JOB, RING_COLUMNS)
        self._changed_at_ms = self.started_at_ms
        query.add_listener(self._on_event)
        self._catch_up()

    @property
    def name(self) -> str:
        return self.query.name

    @property
    def state(self) -> str:
        with self._lock:
            return self._state

    def remember(
        self,
        at_ms: int,
        of_job: Sequence[float | None],
        of_tasks: Mapping[int, Sequence[float | None]],
    ) -> None:
        """A point of the last minutes, in the order of the rings' columns."""
        with self._lock:
            self._rings.add(at_ms, of_job, of_tasks)

    def remembered(self, window_seconds: int, task: int | None) -> JsonObject:
        with self._lock:
            return self._rings.to_json(self._clock.wall_ms(), window_seconds, task)

    @property
    def has_ended(self) -> bool:
        return self.state in _STATE_OF.values()

    def refuse_if_ended(self) -> None:
        if self.has_ended:
            outcome = self.query.summary.outcome
            raise Refused(409, f"job {self.name!r} has {_IN_WORDS.get(outcome, 'ended')} already")

    @property
    def changed_at_ms(self) -> int:
        """When it came into the state in which it is."""
        with self._lock:
            return self._changed_at_ms

    @property
    def since_ms(self) -> dict[str, int]:
        """When it came into each state last."""
        with self._lock:
            return dict(self._since_ms)

    @property
    def ended_at_ms(self) -> int | None:
        with self._lock:
            return self._changed_at_ms if self._state in _STATE_OF.values() else None

    def _catch_up(self) -> None:
        """It may have begun, and even ended, before anybody listened."""
        outcome = self.query.summary.outcome
        if outcome in _STATE_OF:
            self._become(_STATE_OF[outcome])
        elif self.query.slot_pids:
            self._become("RUNNING")

    def _on_event(self, event: Event) -> None:
        match event:
            case SlotsRunning():
                self._become("RUNNING")
            case AttemptFailed(restart_seconds=seconds) if seconds is not None:
                self._become("RESTARTING")
            case JobEnded(outcome):
                self._become(_STATE_OF.get(outcome, "FINISHED"))
        self._tell(self, event)

    def _become(self, state: str) -> None:
        with self._lock:
            if self._state in _STATE_OF.values():
                return  # it has ended while somebody caught up
            self._state = state
            self._changed_at_ms = self._clock.wall_ms()
            self._since_ms[state] = self._changed_at_ms


def jid_of(query: Query) -> str:
    """The job's id as Flink writes ids."""
    return query.id.replace("-", "")


class ServedJobs:
    """All jobs of a server, oldest first. Every member may be used from any thread."""

    def __init__(self, clock: Clock, tell: Tell) -> None:
        self.clock = clock
        self._tell = tell
        self._lock = threading.Lock()
        self._jobs: list[ServedJob] = []

    def add(self, query: Query) -> ServedJob:
        """It takes the place of one of the same id that has ended."""
        job = ServedJob(query, self.clock, self._tell)
        with self._lock:
            others = [each for each in self._jobs if each.jid != job.jid or not each.has_ended]
            ended = [each for each in others if each.has_ended]
            too_many = ended[: max(0, len(ended) - ENDED_KEPT_MAX)]
            self._jobs = [*(each for each in others if each not in too_many), job]
        return job

    def all(self) -> list[ServedJob]:
        with self._lock:
            return list(self._jobs)

    def find(self, name_or_id: str) -> ServedJob:
        """By its id, with or without dashes, or by its name; those that run come first."""
        jid = name_or_id.replace("-", "").lower()
        for is_meant in (
            lambda job: job.jid == jid,
            lambda job: job.name == name_or_id and not job.has_ended,
            lambda job: job.name == name_or_id,
        ):
            found = self._only(is_meant, name_or_id)
            if found is not None:
                return found
        raise Refused(404, f"this driver has no job {name_or_id!r}: GET /jobs/overview tells which")

    def _only(self, is_meant: Callable[[ServedJob], bool], asked: str) -> ServedJob | None:
        found = [job for job in self.all() if is_meant(job)]
        running = [job for job in found if not job.has_ended]
        if len(running) > 1 and len({job.jid for job in running}) > 1:
            ids = ", ".join(job.jid for job in running)
            raise Refused(409, f"several jobs are named {asked!r}: give the id of one ({ids})")
        return found[-1] if found else None
