"""The jobs below a checkpoint location, whoever runs them: what a driver answers where one does,
and otherwise what its files tell, in the same words.

Theory of operation
-------------------
A request about one job goes to its driver, with the token of whoever asks. If none answers, the
same handlers as a driver's answer it from the files: they are given a query that knows the past and
refuses everything else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from stillframe.clock import Clock
from stillframe.config import JobConfig
from stillframe.coordinator.kept_history import read_history
from stillframe.errors import StorageError
from stillframe.json_values import JsonObject
from stillframe.protocol.checkpointing import CheckpointingStatistics
from stillframe.protocol.event_ring import frame
from stillframe.protocol.failures import Failure
from stillframe.rest import kept_answers, news
from stillframe.rest.api import Answer, Api, Request
from stillframe.rest.kept_jobs import KeptJob, job_below, jobs_below
from stillframe.rest.passing_on import Driver, NobodyThere, bye, driver_of, path_of, token_of
from stillframe.rest.refusals import Refused
from stillframe.rest.routes import Route
from stillframe.rest.streams import SIGN_OF_LIFE, OwnStream, Stream
from stillframe.rest.workers import Workers

_ASKED_SECONDS_MAX = 3.0
"""How long one of several drivers may take."""
_LOOK_SECONDS = 2.0
_SILENT_SECONDS_MAX = 15.0
"""A driver's stream has a sign of life every few seconds."""


class KeptQuery:
    """What the files of a job tell of it, under the names of `Query`; the rest is refused."""

    def __init__(self, kept: KeptJob) -> None:
        self._kept = kept
        self.name = kept.name
        self.config = JobConfig(checkpoint_location=kept.location)

    @property
    def checkpoint_statistics(self) -> CheckpointingStatistics:
        return read_history(self._kept.store).statistics()

    @property
    def failures(self) -> list[Failure]:
        return read_history(self._kept.store).failures

    @property
    def attempts(self) -> list[JsonObject]:
        return read_history(self._kept.store).attempts_json()

    def __getattr__(self, name: str) -> Any:
        raise Refused(
            409, f"no driver of job {self.name!r} answers, and its files do not tell this"
        )


class KeptServedJob:
    """A job without a driver, under the names of `ServedJob`."""

    def __init__(self, kept: KeptJob) -> None:
        self.query = KeptQuery(kept)
        self.name = kept.name
        self.jid = kept.jid

    @property
    def state(self) -> str:
        return str(self.query._kept.status()["state"])

    def refuse_if_ended(self) -> None:
        raise Refused(409, f"no driver of job {self.name!r} answers: start it first")


class KeptJobs:
    """All jobs below a location, under the names of `ServedJobs`."""

    def __init__(self, clock: Clock, root: str) -> None:
        self.clock = clock
        self._root = root

    def find(self, name_or_id: str) -> KeptServedJob:
        return KeptServedJob(self.kept(name_or_id))

    def kept(self, name_or_id: str) -> KeptJob:
        try:
            return job_below(self._root, name_or_id)
        except StorageError as error:
            raise Refused(404, str(error)) from error

    def below(self) -> list[KeptJob]:
        return jobs_below(self._root)

    def all(self) -> list[KeptServedJob]:
        return [KeptServedJob(each) for each in self.below()]


@dataclass(frozen=True, slots=True)
class HistoryApi(Api):
    """Of `stillframe history`. Its `jobs` are `KeptJobs`."""

    forward: frozenset[str] = frozenset()
    """Hosts whose drivers may be asked, besides those of this machine."""

    @property
    def _kept_jobs(self) -> KeptJobs:
        return cast(KeptJobs, self.jobs)

    def _routed(
        self, route: Route, parts: list[str], behind: str, request: Request
    ) -> Answer | Stream | OwnStream:
        if route in self.more_routes:
            return Api._routed(self, route, parts, behind, request)
        if "jobid" not in route.path_names:
            return self._of_all(route)
        kept = self._kept_jobs.kept(str(route.path_values(parts)["jobid"]))
        driver = driver_of(kept.driver(), self.forward)
        if driver is not None:
            passed = self._passed_on(driver, parts, behind, request)
            if passed is not None:
                return passed
        match route.handler.__name__:
            case "job_events":
                return KeptStream(self._telling_of(kept))
            case "job_details":
                return Answer(200, kept_answers.details(kept, self.jobs.clock.wall_ms()))
            case "job_diagnosis":
                return Answer(200, kept_answers.diagnosis(kept))
            case _:
                return Api._routed(self, route, parts, behind, request)

    def _passed_on(
        self, driver: Driver, parts: list[str], behind: str, request: Request
    ) -> Answer | OwnStream | None:
        """None: nobody answers. By the job's id: a driver may have several of a name."""
        target = path_of(parts[0], driver.jid, *parts[2:]) + (f"?{behind}" if behind else "")
        authorization = request.authorization
        if self._has_token(request):  # ours, which is nobody else's business
            token = token_of(driver)
            authorization = None if token is None else f"Bearer {token}"
        is_stream = parts[-1] == "events" and request.method == "GET"
        try:
            if is_stream:
                told = driver.ask("HEAD", target, seconds_max=_ASKED_SECONDS_MAX)
            else:
                told = driver.ask(request.method, target, authorization, request.body)
        except NobodyThere:
            return None
        if told.status == 404 and "this driver has no job" in told.text:
            return None  # another process has its port
        if is_stream and told.status == 200:
            headers = {"Authorization": authorization, "Last-Event-ID": request.last_event_id}
            given = {name: value for name, value in headers.items() if value is not None}
            return RelayedStream(driver, target, given)
        return Answer(told.status, told.text or None, told.headers)

    # --- all of them ---

    def _of_all(self, route: Route) -> Answer | OwnStream:
        if route.path == "/events":
            return KeptStream(self._tell_all, is_of_all=True)
        found = [self._overview(each) for each in self._kept_jobs.below()]
        if route.path == "/jobs":
            return Answer(
                200, {"jobs": [{"id": each["jid"], "status": each["state"]} for each in found]}
            )
        return Answer(200, {"jobs": found})

    def _overview(self, kept: KeptJob) -> JsonObject:
        told = self._ask(kept, "jobs", "overview")
        for each in told.get("jobs", ()) if told else ():
            if each["jid"] == kept.jid:
                return cast(JsonObject, each)
        return kept_answers.overview(kept)

    def _tell_all(self) -> JsonObject:
        jobs = [self._in_list(each) for each in self._kept_jobs.below()]
        return {"at": self.jobs.clock.wall_ms(), "jobs": jobs}

    def _in_list(self, kept: KeptJob) -> JsonObject:
        details = self._ask(kept, "jobs", kept.jid)
        diagnosis = self._ask(kept, "jobs", kept.jid, "diagnosis") if details else None
        if not details or not diagnosis:
            return kept_answers.in_list(kept)
        own = details["stillframe"]
        latest = (self._ask(kept, "jobs", kept.jid, "checkpoints") or {}).get("latest", {})
        seconds = [lag["seconds"] for lag in own["lags"] if lag["seconds"] is not None]
        return {
            **kept_answers.in_list_of(
                details["jid"], details["name"], details["state"], latest.get("completed")
            ),
            "guarantee": own["guarantee"],
            "started_at": details["start-time"],
            "diagnosis": diagnosis,
            "records_in_per_second": own["records-in-per-second"],
            "lag_records": sum(lag["records"] for lag in own["lags"]) if own["lags"] else None,
            "lag_seconds": max(seconds) if seconds else None,
            "restarts": own["restarts"],
        }

    def _ask(self, kept: KeptJob, *path: str) -> dict[str, Any] | None:
        """What its driver tells everybody; None if none answers."""
        driver = driver_of(kept.driver(), self.forward)
        if driver is None:
            return None
        try:
            told = driver.ask("GET", path_of(*path), seconds_max=_ASKED_SECONDS_MAX)
            answer = json.loads(told.text) if told.status == 200 else None
        except (NobodyThere, ValueError):
            return None
        return answer if isinstance(answer, dict) else None

    def _telling_of(self, kept: KeptJob) -> Callable[[], JsonObject | None]:
        def tell() -> JsonObject | None:
            if self._ask(kept, "jobs", kept.jid) is not None:
                return None
            now_ms = self.jobs.clock.wall_ms()
            listed = kept_answers.in_list(kept)
            figures = {name: listed[name] for name in _OF_JOB}
            return {
                "at": now_ms,
                "age_ms": 0,
                "state": listed["state"],
                "attempt": kept_answers.status_of(kept)["attempts"],
                "diagnosis": listed["diagnosis"],
                "trouble": [],
                "job": {**dict.fromkeys(_NOT_KEPT), **figures, "under_way": []},
                "tasks": [],
                "edges": [],
                "aligning": [],
            }

        return tell


_OF_JOB = (
    "records_in_per_second", "lag_records", "lag_seconds", "restarts", "last_checkpoint"
)  # fmt: skip
_NOT_KEPT = (
    "records_out_per_second", "watermark", "watermark_lag_ms", "checkpoints_completed",
    "checkpoints_failed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RelayedStream(OwnStream):
    """A driver's own."""

    driver: Driver
    target: str
    headers: Mapping[str, str]

    def parts(self, workers: Workers, gone: asyncio.Future[Any]) -> AsyncGenerator[bytes, None]:
        return self.driver.parts(self.target, self.headers, gone, _SILENT_SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class KeptStream(OwnStream):
    """What files tell, looked at now and then."""

    tell: Callable[[], JsonObject | None]
    """None: a driver answers now, and tells more."""
    is_of_all: bool = False

    async def parts(
        self, workers: Workers, gone: asyncio.Future[Any]
    ) -> AsyncGenerator[bytes, None]:
        yield frame("hello", news.encoded(news.hello_to_all("files", 0)))
        shown: JsonObject = {}
        while not gone.done():
            told = await workers.run(self.tell)
            if told is None:
                yield bye("a driver answers now")
                return
            is_news = {**told, "at": 0} != {**shown, "at": 0}
            yield frame("figures", news.encoded(told)) if is_news else SIGN_OF_LIFE
            shown = told
            await asyncio.wait({gone}, timeout=_LOOK_SECONDS)
