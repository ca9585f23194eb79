"""What the files below a checkpoint root say of a job whose driver does not answer.

The answers have the shape of a driver's own, so that whoever shows them need not know who gave
them. Nothing is ever written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from stillframe.clock import SystemClock
from stillframe.coordinator.job_log import JobLog
from stillframe.coordinator.kept_history import read_history
from stillframe.errors import StillframeError, StorageError
from stillframe.ids import CheckpointId
from stillframe.protocol.joblog import JobRecord
from stillframe.protocol.kept import KeptHistory
from stillframe.rest.registry import RegisteredJob, read_driver_file
from stillframe.storage.paths import LEASE_DIRECTORY, LOG_DIRECTORY, job_directory, job_id
from stillframe.storage.store import Store, is_local_address, open_store

Answer = dict[str, Any]
_STATES = {"finished": "FINISHED", "cancelled": "CANCELED", "failed": "FAILED"}
STOPPED, NO_DRIVER, UNREADABLE = "STOPPED", "NO DRIVER", "UNREADABLE"
KEPT_STATES = (STOPPED, NO_DRIVER, UNREADABLE)
"""Of jobs that no driver runs: Flink has no words for them."""


def jobs_below(root: str) -> list[KeptJob]:
    """All jobs of a checkpoint root, by name."""
    place = _existing(root)
    children = [(name, place.below(name)) for name in sorted(place.list(""))]
    return [KeptJob(child, root, unquote(name)) for name, child in children if _is_job(child)]


def job_below(root: str, asked: str) -> KeptJob:
    """The job of this name or id; a sentence for people if there is none."""
    jobs = jobs_below(root)
    jid = asked.replace("-", "").lower()
    for job in jobs:
        if job.name == asked or job.jid == jid:
            return job
    names = ", ".join(job.name for job in jobs[:10])
    raise StorageError(
        f"there is no job {asked!r} in {root}; "
        + (f"these are there: {names}" if names else "no job has ever run there")
    )


def _existing(root: str) -> Store:
    place = open_store(root)
    if is_local_address(root) and not Path(place.address).is_dir():
        raise StorageError(
            f"{place.address} is no directory: give the checkpointLocation of your jobs"
        )
    if _is_job(place):
        raise StorageError(
            f"{place.address} is the directory of a job: give the one above it, which is the job's"
            " checkpointLocation"
        )
    return place


def _is_job(place: Store) -> bool:
    if is_local_address(place.address) and not Path(place.address).is_dir():
        return False  # a file beside the jobs
    return LOG_DIRECTORY in place.list("")


@dataclass(frozen=True, slots=True)
class KeptJob:
    """A job by what it has left below its checkpoint location."""

    store: Store
    """Rooted at the job's own directory."""
    location: str
    name: str

    @classmethod
    def at(cls, location: str, name: str) -> KeptJob:
        return cls(open_store(location).below(job_directory(name)), location, name)

    @property
    def jid(self) -> str:
        """As its driver told it; where none has left word, as a driver would that is given this
        location."""
        registered = self.driver()
        if registered is not None:
            return registered.jid
        return job_id(self.location, self.name).replace("-", "")

    def driver(self) -> RegisteredJob | None:
        """The driver that has said so last and has not taken it back."""
        return read_driver_file(self.store)

    def record(self) -> JobRecord | None:
        return JobLog(self.store, self.name, SystemClock()).read()

    def status(self) -> Answer:
        record, history = self.record(), read_history(self.store)
        latest = history.statistics().latest_completed
        begun = history.begun[-1] if history.begun else None
        state, failures = self._state(record, history), history.failures
        return {
            "jid": self.jid,
            "name": self.name,
            "state": state,
            "driver": None,
            "start-time": None if begun is None else begun.at_ms,
            "attempts": None if record is None else record.attempt,
            "restarts": None,
            "last-failure": failures[-1].reason if failures else None,
            "last-failure-details": failures[-1].details if failures else [],
            "message": None,
            "trouble": [],
            "records-in": None,
            "records-in-per-second": None,
            "records-malformed": None,
            "watermark": None,
            "lags": [],
            "slot-pids": None,
            "guarantee": None,
            "parallelism": None,
            "last-checkpoint": None if latest is None else latest.to_json(),
            "checkpoint-location": self.location,
            "failure": failures[-1].reason if failures and state == "FAILED" else None,
        }

    def checkpoints(self) -> Answer:
        return dict(read_history(self.store).statistics().to_json())

    def checkpoint(self, number: int) -> Answer:
        """With the figures of every subtask."""
        found = read_history(self.store).statistics().checkpoint(CheckpointId(number))
        if found is None:
            raise StillframeError(
                f"job {self.name!r} has no checkpoint {number} that is remembered: leave the number"
                " out to see which are"
            )
        subtasks = {task.vertex: found.task_to_json(task.vertex) for task in found.tasks}
        return {**found.to_json(with_tasks=True), "subtasks": subtasks}

    def failures(self) -> Answer:
        entries: list[Any] = [
            each.to_json() for each in reversed(read_history(self.store).failures)
        ]
        newest = entries[0] if entries else {}
        return {
            "root-exception": newest.get("stacktrace"),
            "timestamp": newest.get("timestamp"),
            "all-exceptions": [],
            "truncated": False,
            "exceptionHistory": {"entries": entries, "truncated": False},
        }

    def goes_on_from(self) -> str:
        """In words, what starting it again would begin with."""
        record = self.record()
        if record is None or record.newest is None:
            return "it starts over"
        return f"it goes on from checkpoint {record.newest.checkpoint_id}"

    def _state(self, record: JobRecord | None, history: KeptHistory) -> str:
        if record is None:
            return NO_DRIVER
        if record.outcome in _STATES:
            return _STATES[record.outcome]
        ended = history.ended[-1] if history.ended else None
        if ended is not None and ended.attempt == record.attempt:
            return STOPPED if ended.outcome == "stopped" else _STATES[ended.outcome]
        has_left_word = self.driver() is not None or self.store.list(LEASE_DIRECTORY)
        return NO_DRIVER if has_left_word else STOPPED
