"""A job that runs is announced: in the registry, and in its own directory on the store."""

from __future__ import annotations

import logging
import threading

from stillframe.coordinator.history import AttemptStarted, Event, JobEnded
from stillframe.coordinator.query import Query
from stillframe.errors import StillframeError
from stillframe.rest.registry import (
    RegisteredJob,
    register,
    remove_driver_file,
    unregister,
    write_driver_file,
)
from stillframe.storage.paths import job_directory
from stillframe.storage.store import Store, open_store

log = logging.getLogger("stillframe.rest")


class Announcement:
    """Of one job, from its first attempt on: only then is it known that no other driver has it.

    Done on a thread of its own, because storage may be slow. What cannot be written is a warning:
    the job runs on, and is found by those who know its address.
    """

    def __init__(self, query: Query, registered: RegisteredJob) -> None:
        self._query = query
        self._registered = registered
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        query.add_listener(self._on_event)
        if query.summary.attempts > 0:
            self._begin()

    @property
    def jid(self) -> str:
        return self._registered.jid

    @property
    def is_over(self) -> bool:
        return self._ended.is_set() and (self._thread is None or not self._thread.is_alive())

    def await_end(self, seconds_max: float) -> None:
        """If the job has ended: until it is no longer announced."""
        if self._ended.is_set() and self._thread is not None:
            self._thread.join(seconds_max)

    def _on_event(self, event: Event) -> None:
        match event:
            case AttemptStarted():
                self._begin()
            case JobEnded():
                self._ended.set()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                name = f"stillframe-announce-{self._registered.name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        store: Store | None = None
        try:
            register(self._registered)
        except OSError as error:
            log.warning("the job cannot be entered into the registry: %s", error)
        try:
            store = self._store()
            if store is not None:
                write_driver_file(store, self._registered)
        except StillframeError as error:
            log.warning("the job's directory cannot tell where its driver is: %s", error)
        self._ended.wait()
        try:
            unregister(self._registered)
            if store is not None:
                remove_driver_file(store, self._registered)
        except (OSError, StillframeError) as error:
            log.warning("the job has ended but is still announced: %s", error)

    def _store(self) -> Store | None:
        if self._registered.checkpoint_location is None:
            return None
        settings = self._query.config.storage_settings
        location = open_store(self._registered.checkpoint_location, settings)
        directory = job_directory(self._query.name)
        # Nobody else writes into it, only into those below it: a driver that died may have.
        location.delete_unfinished(directory)
        return location.below(directory)
