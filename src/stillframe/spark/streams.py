"""`still.streams`: the queries of this process, as PySpark's StreamingQueryManager has them."""

from __future__ import annotations

import threading

from pyspark.sql.streaming.listener import StreamingQueryListener

from stillframe.coordinator.history import Event, JobEnded
from stillframe.coordinator.query import Query
from stillframe.errors import StillframeError
from stillframe.spark import listeners

_changed = threading.Condition()
_queries: list[Query] = []
_ended: list[Query] = []
"""Those that nobody has waited for since the last `resetTerminated`, oldest first."""


class Streams:
    """Made by `still.streams`; all of them know the same queries."""

    @property
    def active(self) -> list[Query]:
        """The queries that run, oldest first."""
        with _changed:
            return list(_queries)

    def get(self, id: str) -> Query | None:
        """The running query of this id or name, if there is one."""
        return next((query for query in self.active if id in (query.id, query.name)), None)

    def addListener(self, listener: StreamingQueryListener) -> None:
        """Have it told of all queries of this process from now on."""
        listeners.add(listener)

    def removeListener(self, listener: StreamingQueryListener) -> None:
        listeners.remove(listener)

    def awaitAnyTermination(self, timeout: float | None = None) -> bool | None:
        """Wait until a query ends, or has ended since the last `resetTerminated`.

        Raises if it failed. Without a timeout it returns nothing; with one, whether one has ended.
        """
        if timeout is not None and timeout <= 0:
            raise StillframeError(f"timeout is a positive number of seconds, not {timeout!r}")
        with _changed:
            has_ended = _changed.wait_for(lambda: bool(_ended), timeout)
            failures = [failed for query in _ended if (failed := query.exception()) is not None]
        if failures:
            raise failures[0]
        return None if timeout is None else has_ended

    def resetTerminated(self) -> None:
        """Forget the queries that have ended, so that others can be waited for."""
        with _changed:
            _ended.clear()


def follow(query: Query) -> None:
    """A job is about to begin."""

    def note(event: Event) -> None:
        if isinstance(event, JobEnded):
            with _changed:
                _queries.remove(query)
                _ended.append(query)
                _changed.notify_all()

    with _changed:
        _queries.append(query)
    query.add_listener(note)
    listeners.follow(query)
