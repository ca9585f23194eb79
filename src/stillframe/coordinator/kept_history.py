"""A job's history on its store: written in the background, read back by whoever comes next.

Theory of operation
-------------------
Every record (`protocol/kept`) is a small file of its own below `history/`, created once and never
changed; beyond the bound the oldest go. One thread does it all, so that a slow storage holds nobody
up: first it reads what earlier drivers left, then it writes what it is given. What does not fit its
queue any more is lost with a warning, and so is what the storage refuses: a job does not depend on
its history.

Two drivers of one job never meet: names carry the attempt, a file that is there already is left
alone, and a driver deletes only what was there when it came and what it wrote itself. What others
have begun to write goes when the job log says that the job is this driver's: then they are dead, or
fenced off, and lose a record at most.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from stillframe.clock import SystemClock
from stillframe.coordinator.job_log import JobLog
from stillframe.errors import StillframeError, StorageError
from stillframe.ids import CheckpointId
from stillframe.protocol.failures import AttemptBegun, AttemptEnded, Failure
from stillframe.protocol.kept import (
    KEPT_MAX,
    KeptHistory,
    Record,
    Totals,
    decode_kept,
    encode_kept,
)
from stillframe.protocol.statistics import CheckpointStatistics
from stillframe.storage.paths import (
    HISTORY_DIRECTORIES,
    attempt_history_path,
    checkpoint_history_path,
    failure_history_path,
    is_history_file,
)
from stillframe.storage.store import Store

log = logging.getLogger("stillframe")

_WAITING_MAX = 100
_READERS = 8
_READ_SECONDS_MAX = 10.0
CLOSE_SECONDS_MAX = 5.0

Kept = tuple[Record, Totals]
Telling = Callable[[KeptHistory], Kept | None]
"""Makes what is to be written, as soon as it is known what was there before."""


def read_history(store: Store) -> KeptHistory:
    """What the drivers of a job have kept; `store` is rooted at the job's own directory.

    No driver need run for it, and one that does is not disturbed.
    A file that cannot be read is passed over with a warning. Raises `StorageError` if the storage
    does not even say which files there are.
    """
    return replace(_read(store, _list(store), KEPT_MAX), retained=_retained(store))


def _retained(store: Store) -> frozenset[CheckpointId] | None:
    try:
        record = JobLog(store, store.address, SystemClock()).read()
    except StorageError as error:
        log.warning("which checkpoints are retained is not known: %s", error)
        return None
    return frozenset(each.checkpoint_id for each in record.checkpoints) if record else None


def _list(store: Store) -> dict[str, list[str]]:
    """The files of each directory, oldest first."""
    return {
        directory: [name for name in store.list(directory) if _is_ours(store, directory, name)]
        for directory in HISTORY_DIRECTORIES
    }


def _is_ours(store: Store, directory: str, name: str) -> bool:
    if not is_history_file(name):
        log.warning("%s/%s/%s is no record of ours: passed over", store.address, directory, name)
        return False
    return True


def _read(store: Store, names: Mapping[str, list[str]], kept_max: int) -> KeptHistory:
    paths = [
        f"{directory}/{name}"
        for directory, there in names.items()
        for name in there[-_files_max(directory, kept_max) :]
    ]
    if not paths:
        return KeptHistory()
    with ThreadPoolExecutor(_READERS, "stillframe-history-reader") as readers:
        return KeptHistory.of(_found(readers.map(partial(_read_file, store), paths)))


def _found(read: Iterable[Kept | None]) -> Iterator[Kept]:
    return (each for each in read if each is not None)


def _read_file(store: Store, path: str) -> Kept | None:
    where = f"{store.address}/{path}"
    try:
        return decode_kept(store.read(path), where)
    except StillframeError as error:
        log.warning("a record of the job's history is passed over: %s", error)
        return None


def _files_max(directory: str, kept_max: int) -> int:
    # An attempt has two files, for its beginning and its end.
    return 2 * kept_max if directory.endswith("attempts") else kept_max


def _path(record: Record) -> str:
    match record:
        case CheckpointStatistics(checkpoint_id, attempt):
            return checkpoint_history_path(checkpoint_id, attempt)
        case Failure(attempt, number):
            return failure_history_path(attempt, number)
        case AttemptBegun(attempt):
            return attempt_history_path(attempt, "begun")
        case AttemptEnded(attempt):
            return attempt_history_path(attempt, "ended")


class HistoryThread:
    """Keeps the history of one job, in one driver. Everything may be called by any thread."""

    def __init__(self, store: Store, kept_max: int = KEPT_MAX) -> None:
        """`store` is rooted at the job's own directory."""
        self._store = store
        self._kept_max = kept_max
        self._names: dict[str, list[str]] = {}
        self._earlier = KeptHistory()
        self._is_read = threading.Event()
        self._news = threading.Condition()
        self._waiting: deque[Telling] = deque()
        self._is_closing = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="stillframe-history", daemon=True)

    def start(self) -> None:
        """Begin with reading what is there."""
        self._thread.start()

    def earlier(self) -> KeptHistory:
        """What earlier drivers left; empty if that could not be read, or not within seconds."""
        if self._thread.ident is not None:
            self._is_read.wait(_READ_SECONDS_MAX)
        return self._earlier

    def submit(self, telling: Telling) -> None:
        """Have it kept; never waits. If too many wait already, the oldest is dropped."""
        with self._news:
            if self._is_closing or self._is_over:
                return
            if len(self._waiting) >= _WAITING_MAX:
                self._waiting.popleft()
                log.warning(
                    "%s is so slow that a record of the job's history is lost: %d others wait",
                    self._store.address,
                    _WAITING_MAX,
                )
            self._waiting.append(telling)
            self._news.notify()

    def sweep(self) -> None:
        """Remove what drivers that died were writing; only where the job is this driver's now."""
        self.submit(lambda _: self._delete_unfinished())

    def abandon(self) -> None:
        """Another driver has taken over: write and delete nothing any more."""
        with self._news:
            self._is_over = True
            self._waiting.clear()
            self._news.notify()

    def close(self, seconds_max: float = CLOSE_SECONDS_MAX) -> None:
        """Write what is left, as far as there is time for it."""
        with self._news:
            self._is_closing = True
            self._news.notify()
        if self._thread.ident is None:
            return
        self._thread.join(seconds_max)
        if self._thread.is_alive():
            log.warning(
                "%s is so slow that the end of the job's history is lost", self._store.address
            )
            self.abandon()

    def _run(self) -> None:
        try:
            self._read_back()
        finally:
            self._is_read.set()
        while (telling := self._next()) is not None:
            try:
                self._write(telling(self._earlier))
            except StillframeError as error:
                log.warning("a record of the job's history is lost: %s", error)
            except Exception:  # whatever it is, the next record may do better
                log.exception("a record of the job's history is lost")

    def _read_back(self) -> None:
        try:
            self._names = _list(self._store)
            self._earlier = _read(self._store, self._names, self._kept_max)
        except Exception as error:  # whatever it is, the job does not depend on it
            log.warning("the history of earlier drivers cannot be read: %s", error)

    def _delete_unfinished(self) -> None:
        for directory in HISTORY_DIRECTORIES:
            self._store.delete_unfinished(directory)

    def _next(self) -> Telling | None:
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._is_closing or self._is_over)
            return self._waiting.popleft() if self._waiting else None

    def _write(self, kept: Kept | None) -> None:
        if kept is None:
            return
        path = _path(kept[0])
        self._store.create_if_absent(path, encode_kept(*kept))
        directory, _, name = path.rpartition("/")
        names = self._names.setdefault(directory, [])
        if name not in names:
            insort(names, name)
        while len(names) > _files_max(directory, self._kept_max) and not self._is_over:
            self._store.delete(f"{directory}/{names.pop(0)}")
