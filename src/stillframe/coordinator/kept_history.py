"""A job's history on its store: written in the background, read back by whoever comes next.

Theory of operation
-------------------
Every record (`protocol/kept`) is a small file of its own below `history/`, created once and never
changed; beyond the bound the oldest go. Where many checkpoints are to be kept, the oldest hundred
of two hundred files are rolled into one first, with less detail, so that a start reads few. One
thread does it all, so that a slow storage holds nobody up: first it reads what earlier drivers
left, then it writes what it is given. What does not fit its queue any more is lost with a warning,
and so is what the storage refuses: a job does not depend on its history.

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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from stillframe.clock import SystemClock
from stillframe.coordinator.job_log import JobLog
from stillframe.errors import StillframeError, StorageError
from stillframe.ids import CheckpointId
from stillframe.protocol.failures import (
    AttemptBegun,
    AttemptEnded,
    AttemptPhases,
    Failure,
    SlotRead,
)
from stillframe.protocol.kept import (
    CHECKPOINTS_MAX,
    KEPT_MAX,
    KeptHistory,
    Record,
    Totals,
    decode_kept,
    encode_kept,
    encode_rolled,
    within_bounds,
)
from stillframe.protocol.statistics import CheckpointStatistics
from stillframe.storage.paths import (
    HISTORY_DIRECTORIES,
    attempt_history_path,
    checkpoint_history_path,
    failure_history_path,
    is_history_file,
    read_history_path,
    rolled_history_path,
)
from stillframe.storage.store import Store

log = logging.getLogger("stillframe")

_WAITING_MAX = 100
_ROLLED_TOGETHER = 100
_SLOTS_READ_MAX = 1_000
_CHECKPOINTS, _, _, _ROLLED, _READ = HISTORY_DIRECTORIES
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
    return replace(_read(store, CHECKPOINTS_MAX)[0], retained=_retained(store))


def _retained(store: Store) -> frozenset[CheckpointId] | None:
    try:
        record = JobLog(store, store.address, SystemClock()).read()
    except StorageError as error:
        log.warning("which checkpoints are retained is not known: %s", error)
        return None
    return frozenset(each.checkpoint_id for each in record.checkpoints) if record else None


def _read(store: Store, checkpoints_max: int) -> tuple[KeptHistory, dict[str, list[str]]]:
    """And the names of the files of each directory, oldest first."""
    unreadable: list[str] = []

    def pass_over(why: str) -> None:
        log.warning("of the job's history something is passed over: %s", why)
        unreadable.append(why)

    names: dict[str, list[str]] = {}
    for directory in HISTORY_DIRECTORIES:
        names[directory] = []
        for name in store.list(directory):
            if is_history_file(name):
                names[directory].append(name)
            else:
                pass_over(f"{store.address}/{directory}/{name} is no record of ours")
    paths = [
        f"{directory}/{name}"
        for directory, there in names.items()
        for name in there[-_files_max(directory, checkpoints_max) :]
    ]
    found: list[Kept] = []
    if paths:
        with ThreadPoolExecutor(_READERS, "stillframe-history-reader") as readers:
            for records, totals in readers.map(partial(_read_file, store, pass_over), paths):
                found += ((record, totals) for record in records)
    kept = KeptHistory.of(found, checkpoints_max)
    return replace(kept, unreadable=tuple(unreadable)), names


def _read_file(
    store: Store, pass_over: Callable[[str], None], path: str
) -> tuple[Sequence[Record], Totals]:
    try:
        return decode_kept(store.read(path), f"{store.address}/{path}")
    except StillframeError as error:
        pass_over(str(error))
        return (), Totals()


def _files_max(directory: str, checkpoints_max: int) -> int:
    match directory:
        case "history/checkpoints":
            return min(checkpoints_max, 2 * _ROLLED_TOGETHER)
        case "history/rolled":
            return max(0, -(-checkpoints_max // _ROLLED_TOGETHER) - 1)
        case "history/read":
            return _SLOTS_READ_MAX
        case "history/attempts":
            return 3 * min(checkpoints_max, KEPT_MAX)  # its beginning, its phases and its end
        case _:
            return min(checkpoints_max, KEPT_MAX)


def _path(record: Record) -> str:
    match record:
        case CheckpointStatistics(checkpoint_id, attempt):
            return checkpoint_history_path(checkpoint_id, attempt)
        case Failure(attempt, number):
            return failure_history_path(attempt, number)
        case AttemptBegun(attempt):
            return attempt_history_path(attempt, "begun")
        case AttemptPhases(attempt):
            return attempt_history_path(attempt, "phases")
        case AttemptEnded(attempt):
            return attempt_history_path(attempt, "ended")
        case SlotRead(attempt, slot):
            return read_history_path(attempt, slot)


class HistoryThread:
    """Keeps the history of one job, in one driver. Everything may be called by any thread."""

    def __init__(self, store: Store, checkpoints_max: int = CHECKPOINTS_MAX) -> None:
        """`store` is rooted at the job's own directory."""
        self._store = store
        self._checkpoints_max = checkpoints_max
        self._unrolled: dict[str, CheckpointStatistics] = {}
        """What is in the files of single checkpoints, by their names."""
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

    def amend(self, record: CheckpointStatistics) -> None:
        """More is known of it; that is written when it is rolled up."""
        self._unrolled[_path(record).rpartition("/")[2]] = record

    def sweep(self) -> None:
        """Remove what drivers that died were writing, and what their slots have left for this one,
        which knows it by then; only where the job is this driver's now."""
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
            self._earlier, self._names = _read(self._store, self._checkpoints_max)
        except Exception as error:  # whatever it is, the job does not depend on it
            log.warning("the history of earlier drivers cannot be read: %s", error)
            return
        read = {_path(each).rpartition("/")[2]: each for each in self._earlier.checkpoints}
        self._unrolled |= {name: read[name] for name in self._names[_CHECKPOINTS] if name in read}

    def _delete_unfinished(self) -> None:
        for directory in HISTORY_DIRECTORIES:
            self._store.delete_unfinished(directory)
        while self._names.get(_READ):
            self._delete_oldest(_READ)

    def _next(self) -> Telling | None:
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._is_closing or self._is_over)
            return self._waiting.popleft() if self._waiting else None

    def _write(self, kept: Kept | None) -> None:
        if kept is None:
            return
        record, totals = kept
        directory, _, name = _path(record).rpartition("/")
        self._create(directory, name, encode_kept(record, totals))
        if isinstance(record, CheckpointStatistics):
            self._unrolled.setdefault(name, record)
            if len(self._names[directory]) >= 2 * _ROLLED_TOGETHER:
                self._roll(totals)

    def _roll(self, totals: Totals) -> None:
        """One file first, and then none of those it stands for: a driver that dies in between
        leaves some of them twice, which does no harm."""
        if self._checkpoints_max <= 2 * _ROLLED_TOGETHER:
            return
        oldest = self._names[_CHECKPOINTS][:_ROLLED_TOGETHER]
        records = [self._unrolled[name] for name in oldest if name in self._unrolled]
        in_order = sorted(self._unrolled.copy().items())
        all_of_them = within_bounds([each for _, each in in_order], self._checkpoints_max)
        whole = {each.checkpoint_id for each in all_of_them if not each.is_shrunk}
        if records:
            newest = records[-1]
            path = rolled_history_path(newest.checkpoint_id, newest.attempt)
            shown = [each if each.checkpoint_id in whole else each.shrunk() for each in records]
            self._create(_ROLLED, path.rpartition("/")[2], encode_rolled(shown, totals))
        for name in oldest:
            self._delete_oldest(_CHECKPOINTS)
            self._unrolled.pop(name, None)

    def _create(self, directory: str, name: str, data: bytes) -> None:
        self._store.create_if_absent(f"{directory}/{name}", data)
        names = self._names.setdefault(directory, [])
        if name not in names:
            insort(names, name)
        while len(names) > _files_max(directory, self._checkpoints_max):
            self._unrolled.pop(self._delete_oldest(directory), None)

    def _delete_oldest(self, directory: str) -> str:
        name = self._names[directory].pop(0)
        if not self._is_over:
            self._store.delete(f"{directory}/{name}")
        return name
