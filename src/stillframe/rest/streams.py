"""Who follows jobs over HTTP: what happens is sent at once, figures once a second.

Theory of operation
-------------------
Whatever happens to a job comes as mail, from any thread. One task of the server's loop takes the
mail, has it put into words by a worker, and appends it to the job's ring; once a second, while
somebody looks, it has the figures made too. Both are encoded once, however many look. A client is
a place in the ring and the figures that it has seen last: when its connection has room, it gets
what follows its place, else the newest figures, else a sign of life.

Rules of this file
------------------
1. A client that does not read costs what its connection holds, and no more: nothing is queued for
   it. One that is too far behind what happens, or takes nothing for a while, is sent away.
2. Figures that nobody has taken are replaced by newer ones; what happened never is.
3. All but `post` and `close` is for the loop's thread alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

from stillframe.protocol.event_ring import EventRing, Place, frame
from stillframe.rest import news
from stillframe.rest.jobs import ServedJob, ServedJobs
from stillframe.rest.news import Figures, Logged, News
from stillframe.rest.refusals import Refused
from stillframe.rest.workers import Workers

STREAMS_MAX = 16
BEHIND_BYTES_MAX = 256 << 10
_CHUNK_BYTES = 32 << 10
_LARGE_BYTES = 16 << 10
"""Figures larger than this come half as often."""
SIGN_OF_LIFE = b":\n\n"
log = logging.getLogger("stillframe.rest")


@dataclass(frozen=True, slots=True)
class Stream:
    """What a client asked for."""

    job: ServedJob | None
    """None: all jobs, a line each."""
    watch: str | None = None
    """The vertex of the task whose subtasks it wants."""
    last_event_id: str | None = None
    is_trusted: bool = False
    """Whether it has shown the token."""


class OwnStream(ABC):
    """One that is not made here."""

    @abstractmethod
    def parts(self, workers: Workers, gone: asyncio.Future[Any]) -> AsyncGenerator[bytes, None]:
        """What the client is sent, until `gone`; asked for when there is room."""


@dataclass(slots=True, eq=False)
class _Client:
    stream: Stream
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Channel:
    """What is told of one job, or of all of them together."""

    ring: EventRing
    figures: Figures | None = None
    made_at_seconds: float = float("-inf")
    clients: list[_Client] = field(default_factory=list)

    @property
    def due_at_seconds(self) -> float:
        is_large = self.figures is not None and len(self.figures.text) > _LARGE_BYTES
        return self.made_at_seconds + (2 if is_large else 1) * news.TICK_SECONDS

    def watched(self) -> frozenset[str]:
        return frozenset(each.stream.watch for each in self.clients if each.stream.watch)

    def wake(self) -> None:
        for each in self.clients:
            each.wake.set()


class Streams:
    """All streams of a server."""

    def __init__(self, jobs: ServedJobs, loop: asyncio.AbstractEventLoop, workers: Workers) -> None:
        self._jobs = jobs
        self._loop = loop
        self._workers = workers
        self._lock = threading.Lock()
        self._mail: deque[tuple[ServedJob, News]] = deque()
        self._has_mail = asyncio.Event()
        self._is_closed = False
        self._channels: dict[ServedJob | None, _Channel] = {}
        self._remembered_at_seconds = float("-inf")
        self.count = 0
        """How many follow something now."""

    # --- any thread ---

    def post(self, job: ServedJob, what: News) -> None:
        """Never waits."""
        with self._lock:
            if self._is_closed:
                return
            self._mail.append((job, what))
        with contextlib.suppress(RuntimeError):  # the loop is over
            self._loop.call_soon_threadsafe(self._has_mail.set)

    # --- the loop's thread ---

    async def run(self) -> None:
        """Until it is closed."""
        while not self._is_closed:
            try:
                await _wait(self._has_mail, self._pause_seconds())
                self._has_mail.clear()
                await self._tell_all()
                await self._remember()
            except Exception:  # whoever looks hears of what comes next
                log.exception("something that happened to a job is not told")
                await asyncio.sleep(news.TICK_SECONDS)

    def _pause_seconds(self) -> float | None:
        """None: nobody looks and nothing runs."""
        due = [each.due_at_seconds for each in self._channels.values() if each.clients]
        if self._running():
            due.append(self._remembered_at_seconds + news.TICK_SECONDS)
        return max(0.0, min(due) - self._loop.time()) if due else None

    async def _tell_all(self) -> None:
        with self._lock:
            mail = list(self._mail)
            self._mail.clear()
        if mail:
            for job, kind, text, is_secret in await self._workers.run(lambda: _in_words(mail)):
                channel = self._channel(job)
                channel.ring.append(kind, text, is_secret)
                channel.wake()
        now_seconds = self._loop.time()
        for followed, channel in list(self._channels.items()):
            if channel.clients and channel.due_at_seconds <= now_seconds:
                channel.made_at_seconds = now_seconds
                await self._look_at(followed, channel)

    def _running(self) -> list[ServedJob]:
        return [job for job in self._jobs.all() if not job.has_ended]

    async def _remember(self) -> None:
        """Once a second, whoever looks: who comes after a fault wants to see what was before."""
        running, now_ms = self._running(), self._jobs.clock.wall_ms()
        if not running or self._loop.time() < self._remembered_at_seconds + news.TICK_SECONDS:
            return
        self._remembered_at_seconds = self._loop.time()

        def remember() -> None:
            for job in running:
                news.remember(job, now_ms)

        try:
            await self._workers.run(remember)
        except Exception:
            log.exception("a point of the last minutes is missing")

    async def _look_at(self, job: ServedJob | None, channel: _Channel) -> None:
        watched, now_ms = channel.watched(), self._jobs.clock.wall_ms()

        def look() -> Figures:
            if job is None:
                return news.figures_of_all(self._jobs.all(), now_ms)
            return news.figures(job, watched, now_ms)

        try:
            channel.figures = await self._workers.run(look)
        except Exception:  # those who look see that the figures grow old
            log.exception("the figures of a job cannot be told")
        channel.wake()

    def _channel(self, job: ServedJob | None) -> _Channel:
        found = self._channels.get(job)
        if found is None:
            self._forget_others()
            run = job.query.runId if job is not None else str(uuid.uuid4())
            found = self._channels[job] = _Channel(EventRing(run.replace("-", "")[:8]))
        return found

    def _forget_others(self) -> None:
        """Of jobs that are not served any more."""
        served = self._jobs.all()
        for job, channel in list(self._channels.items()):
            if job is not None and job not in served and not channel.clients:
                del self._channels[job]

    def close(self) -> None:
        """Everybody is told good-bye."""
        with self._lock:
            self._is_closed = True
        self._has_mail.set()
        for channel in self._channels.values():
            channel.wake()

    # --- one client ---

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A place among those who follow; refused if there is none."""
        if self.count >= STREAMS_MAX:
            sentence = f"{STREAMS_MAX} streams are open already: close one, or try again soon"
            raise Refused(503, sentence, {"Retry-After": "5"})
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1

    def parts(
        self, stream: Stream | OwnStream, gone: asyncio.Future[Any]
    ) -> AsyncGenerator[bytes, None]:
        if isinstance(stream, OwnStream):
            return stream.parts(self._workers, gone)
        return self._parts(stream, gone)

    async def _parts(
        self, stream: Stream, gone: asyncio.Future[Any]
    ) -> AsyncGenerator[bytes, None]:
        """What it is sent, piece by piece, each asked for when there is room; until `gone`."""
        client = _Client(stream)
        gone.add_done_callback(lambda _: client.wake.set())
        channel = self._channel(stream.job)
        place = channel.ring.place_after(stream.last_event_id)
        yield await self._workers.run(lambda: self._hello(channel.ring, stream.job, place))
        channel.clients.append(client)
        self._has_mail.set()  # somebody looks: there is a tick again
        try:
            async for part in self._news(channel, client, place.number, gone):
                yield part
        finally:
            channel.clients.remove(client)

    def _hello(self, ring: EventRing, job: ServedJob | None, place: Place) -> bytes:
        now_ms = self._jobs.clock.wall_ms()
        if job is None:
            return frame("hello", news.encoded(news.hello_to_all(ring.run, now_ms)))
        said = news.hello(job, ring.run, now_ms, place.is_reset)
        return frame("hello", news.encoded(said), ring.id_of(place.number))

    async def _news(
        self, channel: _Channel, client: _Client, seen: int, gone: asyncio.Future[Any]
    ) -> AsyncGenerator[bytes, None]:
        ring, shown, began_with = channel.ring, channel.figures, channel.ring.newest
        while not gone.done():
            client.wake.clear()
            behind = ring.bytes_after(max(seen, began_with))
            if behind > BEHIND_BYTES_MAX or not ring.has_all_after(seen):
                yield self._bye("this client reads too slowly: begin again", is_reset=True)
                return
            events = ring.after(seen, _CHUNK_BYTES)
            if events:
                seen = events[-1].number
                part = b"".join(
                    each.data for each in events if client.stream.is_trusted or not each.is_secret
                )
                if part:
                    yield part
            elif channel.figures is not None and channel.figures is not shown:
                shown = channel.figures
                yield frame("figures", shown.of(client.stream.watch))
            elif self._is_closed:
                yield self._bye("the driver ends", is_reset=False)
                return
            elif not await _wait(client.wake, news.HEARTBEAT_SECONDS):
                yield SIGN_OF_LIFE

    def _bye(self, reason: str, *, is_reset: bool) -> bytes:
        at_ms = self._jobs.clock.wall_ms()
        return frame("bye", news.encoded({"at": at_ms, "reset": is_reset, "reason": reason}))


def _in_words(mail: list[tuple[ServedJob, News]]) -> list[tuple[ServedJob, str, str, bool]]:
    told = []
    for job, what in mail:
        try:
            kind, fields = news.told(job, what)
            told.append((job, kind, news.encoded(fields), isinstance(what, Logged)))
        except Exception:  # the rest is told all the same
            log.exception("something that happened to job %r cannot be told", job.name)
    return told


async def _wait(event: asyncio.Event, seconds_max: float | None) -> bool:
    """Whether it came."""
    try:
        await asyncio.wait_for(event.wait(), seconds_max)
    except TimeoutError:
        return False
    return True
