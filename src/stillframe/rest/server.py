"""The HTTP server of a driver: its address, its thread and the jobs it answers for.

`connections.py` speaks HTTP, `api.py` makes the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
import time
from contextlib import closing

from stillframe.clock import Clock, SystemClock
from stillframe.coordinator.history import Event, about_event, level_of
from stillframe.coordinator.query import Query
from stillframe.errors import StartRefused
from stillframe.rest.announcing import Announcement
from stillframe.rest.api import Api
from stillframe.rest.jobs import ServedJob, ServedJobs
from stillframe.rest.log_ring import LogLine, log_ring
from stillframe.rest.news import Happened, Logged, OperationNews
from stillframe.rest.operations import Done, Failed, Kind, Operations
from stillframe.rest.registry import this_process
from stillframe.rest.streams import Streams
from stillframe.rest.workers import Workers
from stillframe.storage.store import canonical_address

REQUEST_SECONDS_MAX = 10.0
"""From its first byte, or from the end of the last one: idle connections are closed too. Who
follows a stream and takes nothing of it has as long."""
_CLOSE_SECONDS_MAX = _WITHDRAWN_SECONDS_MAX = 10.0
_BACKLOG = 32
"""Who connects before the server's thread is ready waits here."""
log = logging.getLogger("stillframe.rest")


class RestServer:
    """Serves all jobs of a driver. Every member may be used from any thread."""

    def __init__(
        self,
        bind_host: str,
        port: int,
        token: str,
        clock: Clock | None = None,
        request_seconds_max: float = REQUEST_SECONDS_MAX,
    ) -> None:
        """Listens when it returns; raises `StartRefused` if it cannot."""
        self._jobs = ServedJobs(clock or SystemClock(), self._tell_event)
        self._api = self._made_api(token, bind_host)
        try:
            self._listening = _listen(bind_host, port)
        except (OSError, UnicodeError) as error:
            raise StartRefused(
                f"the HTTP API cannot be served on {bind_host} port {port} ({error}): give another"
                " restPort or restBindAddress, or 0 for any free port, or off"
            ) from error
        self.bind_host, self.asked_port = bind_host, port
        self.port = int(self._listening.getsockname()[1])
        self._request_seconds_max = request_seconds_max
        self._announcements: list[Announcement] = []
        self._answering = _Answering()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._workers = Workers(self._loop)
        self._streams = Streams(self._jobs, self._loop, self._workers)
        self._thread = threading.Thread(target=self._serve, name="stillframe-rest", daemon=True)
        self._thread.start()

    def _made_api(self, token: str, bind_host: str) -> Api:
        operations = Operations(self._tell_operation)
        return Api(self._jobs, operations, token, bind_host, is_loopback(bind_host))

    def _serve(self) -> None:
        with closing(self._loop), closing(self._listening), log_ring().heard_by(self._tell_line):
            try:
                self._answer_until_closed()
            except Exception:  # the jobs go on; who asks is refused and does not wait
                log.exception("the HTTP API of this driver has ended; its jobs go on")

    def _answer_until_closed(self) -> None:
        from stillframe.rest.connections import serve

        self._loop.run_until_complete(
            serve(
                self._listening,
                self._api,
                self._streams,
                self._workers,
                self._answering,
                self._request_seconds_max,
                self._closing,
            )
        )

    def _tell_event(self, job: ServedJob, event: Event) -> None:
        at_ms = self._jobs.clock.wall_ms()
        self._streams.post(job, Happened(at_ms, event))
        log_ring().add(at_ms, level_of(event), about_event(job.name, event), str(event))

    def _tell_line(self, line: LogLine) -> None:
        for job in self._jobs.all():
            if line.is_of(job.name):
                self._streams.post(job, Logged(line.at_ms, line.to_json()))

    def _tell_operation(
        self, jid: str, kind: Kind, trigger_id: str, outcome: Done | Failed | None
    ) -> None:
        at_ms = self._jobs.clock.wall_ms()
        for job in self._jobs.all():
            if job.jid == jid:
                self._streams.post(job, OperationNews(at_ms, kind, trigger_id, outcome))

    @property
    def url(self) -> str:
        """As others find it: where all addresses are listened on, by the machine's name."""
        host = self.bind_host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def token(self) -> str:
        return self._api.token

    def add(self, query: Query) -> None:
        """Answer for this query, from before it begins; tell others of it while it runs."""
        job = self._jobs.add(query)
        location = query.config.checkpoint_location
        if location is not None:  # who looks it up may be in another working directory
            location = canonical_address(location)
        registered = this_process(
            job.jid, job.name, self.url, self.token, location, job.started_at_ms
        )
        # Its last run looks whether the files are its own, and then removes them: not these.
        for each in self._announcements:
            if each.jid == job.jid:
                each.await_end(_WITHDRAWN_SECONDS_MAX)
        self._announcements = [each for each in self._announcements if not each.is_over]
        self._announcements.append(Announcement(query, registered))

    def withdraw(self, seconds_max: float) -> None:
        """Wait until jobs that have ended are no longer announced."""
        deadline = time.monotonic() + seconds_max
        for each in self._announcements:
            each.await_end(max(0.0, deadline - time.monotonic()))

    def await_heard(self, seconds_max: float) -> None:
        """Wait until those who asked for something that has just ended know it."""
        self._api.operations.await_heard(seconds_max)
        self._answering.await_none(seconds_max)

    def close(self) -> None:
        """May be called more than once."""
        with contextlib.suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSE_SECONDS_MAX)


class _Answering:
    """Entered while an answer is on its way. Every member may be used from any thread."""

    def __init__(self) -> None:
        self._under_way = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._under_way += 1

    def __exit__(self, *raised: object) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def await_none(self, seconds_max: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._under_way == 0, seconds_max)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
