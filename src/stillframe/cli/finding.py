"""Finds the job a person means, and whoever can tell of it: its driver, or else its files."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from stillframe.cli.client import Answer, DriverClient, NoDriver, NotThere
from stillframe.clock import SystemClock
from stillframe.errors import StillframeError, StorageError
from stillframe.rest.kept_answers import diagnosis
from stillframe.rest.kept_jobs import NO_DRIVER, UNREADABLE, KeptJob, job_below, jobs_below
from stillframe.rest.registry import RegisteredJob, find, is_gone, registered_jobs

_LIST_SECONDS_MAX = 3.0
"""How long one of many drivers may take to say that it is there."""


@dataclass(frozen=True, slots=True)
class Where:
    """What was said of where to look; nothing: in the registry of this user."""

    url: str | None
    root: str | None
    token: str | None
    """What was given for this very command."""
    token_otherwise: str | None
    """For drivers whose token the registry does not have."""
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job, with its driver if that answers, and with its files if anybody knows where."""

    name: str
    key: str
    """Its id, or the name by which its driver was asked for it."""
    client: DriverClient | None
    registered: RegisteredJob | None
    kept: KeptJob | None
    why_no_driver: str = ""

    def driver(self, to_do: str) -> DriverClient:
        """For what only a driver can do."""
        if self.client is not None:
            return self.client
        assert self.kept is not None, "a job without a driver was found by its files"
        raise StillframeError(
            f"job {self.name!r} cannot {to_do}, because {self.why_no_driver}: start it with the"
            f" command it was started with, {self.kept.goes_on_from()}"
        )

    # --- what both can tell ---

    def status(self) -> Answer:
        if self.client is None:
            return {**self._kept.status(), "diagnosis": diagnosis(self._kept)["sentence"]}
        details = self.client.get("jobs", self.key)
        latest = self.client.get("jobs", self.key, "checkpoints").get("latest") or {}
        own = details.get("stillframe") or {}
        registered = self.registered
        return {
            "jid": details.get("jid"),
            "name": details.get("name"),
            "state": state_of(details),
            "driver": {
                "url": self.client.url,
                "pid": None if registered is None else registered.pid,
                "host": None if registered is None else registered.host,
            },
            "start-time": details.get("start-time"),
            "attempts": own.get("attempts"),
            "restarts": own.get("restarts"),
            "last-failure": own.get("last-failure"),
            "last-failure-details": own.get("last-failure-details") or [],
            "message": own.get("message"),
            "diagnosis": own.get("diagnosis"),
            "trouble": own.get("trouble") or [],
            "records-in": own.get("records-in"),
            "records-in-per-second": own.get("records-in-per-second"),
            "records-malformed": own.get("records-malformed"),
            "watermark": own.get("watermark"),
            "lags": own.get("lags") or [],
            "slot-pids": own.get("slot-pids"),
            "guarantee": own.get("guarantee"),
            "parallelism": own.get("parallelism"),
            "last-checkpoint": latest.get("completed"),
            "checkpoint-location": own.get("checkpoint-location"),
            "failure": own.get("failure"),
        }

    def checkpoints(self) -> Answer:
        if self.client is None:
            return self._kept.checkpoints()
        return self.client.get("jobs", self.key, "checkpoints")

    def checkpoint(self, number: int) -> Answer:
        """With the figures of every subtask."""
        if self.client is None:
            return self._kept.checkpoint(number)
        path = ("jobs", self.key, "checkpoints", "details", str(number))
        details = self.client.get(*path)
        subtasks = {
            vertex: self.client.get(*path, "subtasks", vertex)
            for vertex in details.get("tasks") or {}
        }
        return {**details, "subtasks": subtasks}

    def failures(self) -> Answer:
        if self.client is None:
            return self._kept.failures()
        return self.client.get("jobs", self.key, "exceptions")

    @property
    def _kept(self) -> KeptJob:
        assert self.kept is not None, "a job without a driver was found by its files"
        return self.kept


def state_of(details: Answer) -> str:
    """Flink has no word for a job that was stopped and can go on: it is FINISHED there."""
    own = details.get("stillframe") or {}
    return "STOPPED" if own.get("outcome") == "stopped" else str(details.get("state"))


def find_job(asked: str, where: Where) -> FoundJob:
    """The one job of this name or id. Raises a sentence that says which there are."""
    if where.url is not None:
        client = _client(where.url, where, _token_for(where.url))
        registered = _registered_at(where.url, asked)
        client.get("jobs", asked)
        return FoundJob(asked, asked, client, registered, None)
    if where.root is not None:
        kept = job_below(where.root, asked)
        return _with_driver(kept.driver(), kept, where)
    registered = _registered(asked)
    location = registered.checkpoint_location
    kept_there = KeptJob.at(location, registered.name) if location is not None else None
    return _with_driver(registered, kept_there, where)


def _registered(asked: str) -> RegisteredJob:
    try:
        return find(asked)
    except StillframeError as error:
        if any(job.name == asked for job in registered_jobs()):
            raise  # it has named them all
        raise StillframeError(
            f"{error}; for a job of another machine give --url, for one that does not run"
            " --checkpoints with its checkpointLocation"
        ) from error


def _with_driver(registered: RegisteredJob | None, kept: KeptJob | None, where: Where) -> FoundJob:
    name = kept.name if kept is not None else registered.name if registered is not None else ""
    if registered is None:
        assert kept is not None
        return FoundJob(name, kept.jid, None, None, kept, "no driver of it runs")
    try:
        client = answering(registered, where)
        return FoundJob(name, registered.jid, client, registered, kept)
    except NoDriver as error:
        if kept is None:
            raise
        return FoundJob(name, registered.jid, None, registered, kept, str(error))


def answering(registered: RegisteredJob, where: Where) -> DriverClient:
    """Raises `NoDriver` if it is gone, or another one has its place."""
    if is_gone(registered):
        raise NoDriver(f"its driver, process {registered.pid} of {registered.host}, is gone")
    token = registered.token or _token_for(registered.url)
    client = _client(registered.url, where, token)
    try:
        client.get("jobs", registered.jid)
    except NotThere as error:
        raise NoDriver(f"the driver at {registered.url} does not know it") from error
    return client


def _client(url: str, where: Where, token_found: str | None) -> DriverClient:
    token = where.token or token_found or where.token_otherwise
    return DriverClient(url, token, where.timeout_seconds, SystemClock(), threading.Event().wait)


def _token_for(url: str) -> str | None:
    """What the registry has for this very address: nobody else gets it."""
    found = (job.token for job in registered_jobs() if job.url.rstrip("/") == url.rstrip("/"))
    return next(found, None)


def _registered_at(url: str, asked: str) -> RegisteredJob | None:
    jid = asked.replace("-", "").lower()
    for job in registered_jobs():
        if job.url.rstrip("/") == url.rstrip("/") and (job.name == asked or job.jid == jid):
            return job
    return None


# --- all of them ---


def all_jobs(where: Where) -> list[Answer]:
    """Id, name, state and start of every job there is, as far as somebody says it."""
    if where.url is not None:
        client = _client(where.url, where, _token_for(where.url))
        return [_in_list(client.get("jobs", job["jid"])) for job in _overview(client)]
    brief = replace(where, timeout_seconds=min(where.timeout_seconds, _LIST_SECONDS_MAX))
    if where.root is not None:
        return [_listed(kept.driver(), kept, brief) for kept in jobs_below(where.root)]
    return [_listed(job, None, brief) for job in registered_jobs()]


def _overview(client: DriverClient) -> list[Answer]:
    jobs = client.get("jobs", "overview").get("jobs")
    return [job for job in jobs if isinstance(job, dict)] if isinstance(jobs, list) else []


def _listed(registered: RegisteredJob | None, kept: KeptJob | None, where: Where) -> Answer:
    if registered is not None:
        try:
            return _in_list(answering(registered, where).get("jobs", registered.jid))
        except NoDriver:
            if kept is None:
                return {
                    "jid": registered.jid,
                    "name": registered.name,
                    "state": NO_DRIVER,
                    "start-time": registered.started_at_ms,
                }
    assert kept is not None
    try:
        return _in_list(kept.status())
    except StorageError:  # one that cannot be read must not hide the others; `status` says why
        return {"jid": kept.jid, "name": kept.name, "state": UNREADABLE, "start-time": None}


def _in_list(details: Answer) -> Answer:
    return {
        "jid": details.get("jid"),
        "name": details.get("name"),
        "state": state_of(details),
        "start-time": details.get("start-time"),
    }
