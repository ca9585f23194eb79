"""The sinks of a job, seen from the driver: commits that are made here, and sweeping up."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from stillframe.api.sinks import Committable, Committer, CommitterContext, Prepared, Staging
from stillframe.coordinator.ports import CommitsPort
from stillframe.errors import Blame, Unavailable
from stillframe.graph.logical import Write
from stillframe.graph.plan import Plan
from stillframe.ids import Attempt, Epoch, Mark, OperatorUid, SubtaskIndex, Writer
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.messages import FailureCause, blame_of, cause_of
from stillframe.protocol.outside import retry_after_seconds
from stillframe.user_code import calling

log = logging.getLogger("stillframe")


@dataclass(frozen=True, slots=True)
class EpochCommitted:
    """Every sink that commits at the coordinator has made this epoch visible."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """A sink's commit at the coordinator raised."""

    reason: str
    cause: FailureCause
    blame: Blame | None = field(default=None, compare=False)


CommitEvent = EpochCommitted | CommitFailed


@dataclass(frozen=True, slots=True)
class CommitUnderWay:
    """A sink has been given an epoch and has not returned."""

    uid: OperatorUid
    sink: str
    epoch: Epoch
    began_at_seconds: float
    thread: threading.Thread
    awaits: str | None = None
    """What the sink waits for before it tries again, in a sentence."""


class DriverSinks:
    """One committer per sink, on the driver."""

    def __init__(
        self,
        plan: Plan,
        staging: Staging | None = None,
        accepts_missing: frozenset[str] = frozenset(),
    ) -> None:
        self._job = plan.job
        self._staging = staging
        sinks = {
            planned.uid: planned.operator.sink
            for _, planned in plan.operators()
            if isinstance(planned.operator, Write)
        }
        self._names = {uid: f"sink {sink.describe()}" for uid, sink in sinks.items()}
        context = CommitterContext(plan.job, staging, accepts_missing)
        self._committers: dict[OperatorUid, Committer] = {}
        for uid, sink in sinks.items():
            with calling(self._names[uid], operator=uid):
                self._committers[uid] = sink.open_committer(context)
        self.committing_here: Sequence[OperatorUid] = [
            uid for uid, sink in sinks.items() if sink.commits_at_coordinator
        ]
        self.under_way: CommitUnderWay | None = None
        """The sink that is called here, if one is: one after the other is."""
        self.left_behind: threading.Thread | None = None
        """On which a call was given up; nothing else is called any more."""
        self._former: Mapping[OperatorUid, OperatorUid] = {}
        self._incarnation = ""

    @property
    def uids(self) -> Collection[OperatorUid]:
        return self._committers.keys()

    def go_on_after(self, former: Mapping[OperatorUid, OperatorUid], incarnation: str = "") -> None:
        """By uids: those under which sinks have prepared what they commit in this attempt."""
        self._former = former
        self._incarnation = incarnation

    def commit(self, uid: OperatorUid, manifest: Manifest) -> None:
        """Make the epoch of this checkpoint visible, once more if need be."""
        name, epoch, thread = self._names[uid], manifest.epoch, threading.current_thread()
        self.under_way = CommitUnderWay(uid, name, epoch, time.monotonic(), thread)
        try:
            with calling(name, f"epoch {epoch}", operator=uid):
                prepared = prepared_by_all(uid, manifest, self._incarnation)
                self._committers[uid].commit(epoch, [prepared])
        finally:
            self.under_way = None

    @contextmanager
    def awaiting(self, uid: OperatorUid, epoch: Epoch, what: str) -> Iterator[None]:
        """In here a sink is not called: it waits before it tries again."""
        thread = threading.current_thread()
        name = self._names[uid]
        self.under_way = CommitUnderWay(uid, name, epoch, time.monotonic(), thread, what)
        try:
            yield
        finally:
            self.under_way = None

    def sweep(
        self, older_than: Attempt, manifest: Manifest | None, *, is_running: bool = False
    ) -> None:
        """Remove what older attempts left behind; what `manifest` still has to commit stays.

        While slots are running, files that somebody has begun to stage may be theirs.
        """
        for uid, committer in self._committers.items():
            if self._staging is not None and not is_running:
                self._staging.delete_unfinished(self._staging.directory(uid))
            pending = pending_committables(uid, manifest)
            former = self._former.get(uid)
            with calling(self._names[uid], operator=uid):
                committer.sweep(self._job, uid, older_than, pending)
                if former is not None and former not in self._committers:
                    committer.sweep(self._job, former, older_than, pending)

    def writers(self, plan: Plan) -> frozenset[Writer]:
        """All who write with this plan."""
        subtasks = [
            (planned.uid, subtask)
            for task, planned in plan.operators()
            for subtask in (*range(task.parallelism), None)
            if planned.uid in self._committers
        ]
        return frozenset(
            Writer(self._incarnation, uid, None if subtask is None else SubtaskIndex(subtask))
            for uid, subtask in subtasks
        )

    def end_writers(self, needed: frozenset[Writer]) -> None:
        """Have other systems forget all other writers of these sinks."""
        for uid, committer in self._committers.items():
            with calling(self._names[uid], operator=uid):
                for known_as in {uid, self._former.get(uid, uid)}:
                    committer.end_writers(known_as, needed)

    @property
    def is_left_behind(self) -> bool:
        """Whether a sink may still be at what it was given."""
        return self.left_behind is not None and self.left_behind.is_alive()

    def close(self) -> None:
        """What one of them raises must not keep the job from ending: it is only told. A sink that
        may still be at work is left alone."""
        if self.is_left_behind:
            return
        for uid, committer in self._committers.items():
            try:
                committer.close()
            except Exception as error:
                log.warning("%s could not be closed: %s", self._names[uid], error)


def prepared_by_all(uid: OperatorUid, manifest: Manifest, incarnation: str) -> Prepared:
    """All of it at once; it stays the work of the sink that prepared it, by its uid then."""
    pending = [each for part in manifest.snapshots_of(uid) for each in part.commits]
    writers = (each.writer for each in pending if each.writer is not None)
    known_as = next((writer.uid for writer in writers), uid)
    writer = Writer(incarnation, known_as, None)
    committables = tuple(each.committable for each in pending)
    return Prepared(Mark(writer, manifest.checkpoint_id), committables)


def pending_committables(uid: OperatorUid, manifest: Manifest | None) -> list[Committable]:
    if manifest is None:
        return []
    return [
        pending.committable
        for snapshot in manifest.snapshots_of(uid)
        for pending in snapshot.commits
    ]


class CommitThread(CommitsPort):
    """Commits epochs in the background, one after the other; a slow one delays only the next.

    `on_event` is called on its thread. `finish` waits for what was submitted.
    """

    def __init__(
        self,
        sinks: DriverSinks,
        on_event: Callable[[CommitEvent], None],
        patience_seconds: float = 600.0,
    ) -> None:
        """`patience_seconds`: how long a system that cannot be reached is tried again."""
        self._sinks = sinks
        self._patience_seconds = patience_seconds
        self._on_event = on_event
        self._work: queue.Queue[Manifest | None] = queue.Queue(1)
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stillframe-epochs", daemon=True)
        self._thread.start()

    def submit(self, manifest: Manifest) -> None:
        """Never blocks: no checkpoint is stored until the last one's commit has been reported."""
        self._work.put_nowait(manifest)

    def finish(self, seconds_max: float | None = None) -> bool:
        """Wait for the commit under way, however long the user's function takes, and end; False if
        it takes longer than this. May be called again then."""
        if not self._finishing.is_set():
            self._finishing.set()
            self._work.put(None)
        self._thread.join(seconds_max)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (manifest := self._work.get()) is not None:
            try:
                for uid in self._sinks.committing_here:
                    self._commit(uid, manifest)
            except BaseException as error:  # whatever it is, this thread goes on
                self._on_event(CommitFailed(str(error), cause_of(error), blame_of(error)))
            else:
                self._on_event(EpochCommitted(manifest.epoch))

    def _commit(self, uid: OperatorUid, manifest: Manifest) -> None:
        began_at = time.monotonic()
        for failures in itertools.count(1):
            try:
                return self._sinks.commit(uid, manifest)
            except Unavailable as error:
                if time.monotonic() - began_at > self._patience_seconds:
                    raise
                awaits = f"{error}; tried {failures} times to commit epoch {manifest.epoch}"
                with self._sinks.awaiting(uid, manifest.epoch, awaits):
                    if self._finishing.wait(retry_after_seconds(failures)):
                        raise
