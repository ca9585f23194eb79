"""What watches Spark's queries watches ours: PySpark's StreamingQueryListener and its objects.

`onQueryStarted` is called before `start` returns, as in Spark. All else is told by one thread of
its own, in its order, so that a listener that takes long holds up no job.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from stillframe.connectors.files import FileSource
from stillframe.coordinator.history import (
    CheckpointCommitted,
    CheckpointCompleted,
    Event,
    JobEnded,
)
from stillframe.coordinator.progress import iso
from stillframe.coordinator.query import Query
from stillframe.errors import BuildError, JobFailed
from stillframe.graph.logical import Read
from stillframe.ids import OperatorUid
from stillframe.spark.plans.observed import Observing, observed_in

log = logging.getLogger("stillframe")

_IDLE_SECONDS = 10.0
"""How often it is told that there is nothing new, as Spark does it."""
_TOLD_MAX = 10_000
"""What may wait for a listener that takes long; Spark has the same bound."""

_Tell = Callable[[StreamingQueryListener], None]
_lock = threading.Lock()
_listeners: list[StreamingQueryListener] = []
_waiting: queue.Queue[_Tell] = queue.Queue(_TOLD_MAX)
_threads: list[threading.Thread] = []


class StreamingJobFailed(JobFailed, StreamingQueryException):
    """The same failure for who expects Spark's."""

    __str__ = JobFailed.__str__


class SparkQuery(Query):
    """Our query, whose progress and whose failure are PySpark's own objects."""

    @property
    def recentProgress(self) -> list[Any]:
        """One StreamingQueryProgress per completed checkpoint, oldest first, the last hundred."""
        observed = observed_in(self.plan)
        return [_as_spark(each, observed) for each in super().recentProgress]

    def exception(self) -> JobFailed | None:
        failure = super().exception()
        if failure is None or isinstance(failure, StreamingJobFailed):
            return failure
        ours = StreamingJobFailed(str(failure))
        for each in getattr(failure, "__notes__", ()):
            ours.add_note(each)
        ours.__cause__ = failure.__cause__
        return ours

    def processAllAvailable(self) -> None:
        """Wait until what is there is read, processed and committed; of files, also those that
        have come since they were listed last. Returns at once if the query has ended."""
        files = [] if self.config.available_now else self._followed()
        if files:
            self._await_discovered(files)
        super().processAllAvailable()
        while self.isActive and files and not self._has_read(files):
            super().processAllAvailable()

    def _followed(self) -> list[OperatorUid]:
        return [
            each.uid
            for _, each in self.plan.operators()
            if isinstance(each.operator, Read)
            and isinstance(each.operator.source, FileSource)
            and each.operator.source.following is not None
        ]

    def _has_read(self, uids: Sequence[OperatorUid]) -> bool:
        """Whether the newest checkpoint has no file of these sources that is not read."""
        figures = {each.uid: each for each in self.checkpoints[-1].operators}
        return not any(uid in figures and figures[uid].positions != () for uid in uids)

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        try:
            return super().awaitTermination(timeout)
        except JobFailed as failure:
            raise self.exception() or failure from failure.__cause__


def _as_spark(
    progress: dict[str, Any], observed: Sequence[Observing] = ()
) -> StreamingQueryProgress:
    """With what is ours in it beside: `progress["checkpoint"]`."""
    metrics = {each.name: each.of(progress["batchId"]) for each in observed}
    known = {name: told for name, told in metrics.items() if told is not None}
    made = StreamingQueryProgress.fromJson({**progress, "observedMetrics": known})
    made.update({name: value for name, value in progress.items() if name not in made})
    return made


def add(listener: StreamingQueryListener) -> None:
    if not isinstance(listener, StreamingQueryListener):
        raise BuildError(f"addListener takes a StreamingQueryListener, not {listener!r}")
    with _lock:
        _listeners.append(listener)


def remove(listener: StreamingQueryListener) -> None:
    """One that was not added is passed over, as in Spark."""
    with _lock:
        _listeners[:] = [each for each in _listeners if each is not listener]


def follow(query: Query) -> None:
    """Tell of this query, whose job is about to begin."""
    known_as = {"id": query.id, "runId": query.runId}
    now = iso(int(time.time() * 1000))
    started = {**known_as, "name": query.name, "timestamp": now, "jobTags": []}
    for each in _known():
        _call(each, lambda each: each.onQueryStarted(QueryStartedEvent.fromJson(started)))
    told_idle = float("-inf")
    # What is observed is known when the epoch has been handed over.
    told_by = CheckpointCommitted if observed_in(query.plan) else CheckpointCompleted

    def note(event: Event) -> None:
        nonlocal told_idle
        if not _known():
            return
        if isinstance(event, told_by):
            progress: Any = next(
                (
                    each
                    for each in reversed(query.recentProgress)
                    if each["checkpoint"]["id"] == event.checkpoint_id
                ),
                None,
            )
            if progress is None:
                return
            if progress["numInputRows"] or progress["sink"]["numOutputRows"]:
                told_idle = float("-inf")
                moved = QueryProgressEvent(progress)
                _tell(lambda each: each.onQueryProgress(moved))
            elif time.monotonic() - told_idle >= _IDLE_SECONDS:
                told_idle = time.monotonic()
                idle = QueryIdleEvent.fromJson({**known_as, "timestamp": progress["timestamp"]})
                _tell(lambda each: each.onQueryIdle(idle))
        elif isinstance(event, JobEnded):
            failure = query.exception()
            ended = QueryTerminatedEvent.fromJson(
                {
                    **known_as,
                    "exception": None if failure is None else str(failure),
                    "errorClassOnException": None,
                }
            )
            _tell(lambda each: each.onQueryTerminated(ended))

    query.add_listener(note)


def await_told(seconds_max: float) -> None:
    """Until every listener has been told what has happened by now."""
    with _waiting.all_tasks_done:
        _waiting.all_tasks_done.wait_for(lambda: not _waiting.unfinished_tasks, seconds_max)


def _known() -> list[StreamingQueryListener]:
    with _lock:
        return list(_listeners)


def _tell(what: _Tell) -> None:
    """Have every listener told, by the thread for it."""
    with _lock:
        if not _threads:
            thread = threading.Thread(target=_run, name="stillframe-listeners", daemon=True)
            _threads.append(thread)
            thread.start()
    try:
        _waiting.put_nowait(what)
    except queue.Full:
        log.warning(
            "a StreamingQueryListener is %d events behind, so one is not told: let its methods"
            " return sooner",
            _TOLD_MAX,
        )


def _run() -> None:
    while True:
        what = _waiting.get()
        for listener in _known():
            _call(listener, what)
        _waiting.task_done()


def _call(listener: StreamingQueryListener, what: _Tell) -> None:
    try:
        what(listener)
    except Exception:  # a curious listener must not harm the job
        log.exception("a StreamingQueryListener failed")
