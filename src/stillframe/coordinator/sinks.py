"""The sinks of a job, seen from the driver: commits that are made here, and sweeping up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stillframe.api.sinks import Committable, Committer
from stillframe.coordinator.ports import CommitsPort
from stillframe.errors import StillframeError, UserCodeError
from stillframe.graph.logical import Write
from stillframe.graph.plan import Plan
from stillframe.ids import Attempt, Epoch, OperatorUid
from stillframe.protocol.manifests import Manifest


@dataclass(frozen=True, slots=True)
class EpochCommitted:
    """Every sink that commits at the coordinator has made this epoch visible."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """A sink's commit at the coordinator raised."""

    reason: str
    is_permanent: bool


CommitEvent = EpochCommitted | CommitFailed


class DriverSinks:
    """One committer per sink, on the driver."""

    def __init__(self, plan: Plan) -> None:
        self._job = plan.job
        sinks = {
            planned.uid: planned.operator.sink
            for _, planned in plan.operators()
            if isinstance(planned.operator, Write)
        }
        self._committers: Mapping[OperatorUid, Committer] = {
            uid: sink.open_committer() for uid, sink in sinks.items()
        }
        self.committing_here: Sequence[OperatorUid] = [
            uid for uid, sink in sinks.items() if sink.commits_at_coordinator
        ]

    def commit(self, uid: OperatorUid, manifest: Manifest) -> None:
        """Make the epoch of this checkpoint visible, once more if need be."""
        self._committers[uid].commit(manifest.epoch, _pending(uid, manifest))

    def sweep(self, older_than: Attempt, manifest: Manifest | None) -> None:
        """Remove what older attempts left behind; what `manifest` still has to commit stays."""
        for uid, committer in self._committers.items():
            committer.sweep(self._job, uid, older_than, _pending(uid, manifest))

    def close(self) -> None:
        for committer in self._committers.values():
            committer.close()


def _pending(uid: OperatorUid, manifest: Manifest | None) -> list[Committable]:
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

    def __init__(self, sinks: DriverSinks, on_event: Callable[[CommitEvent], None]) -> None:
        self._sinks = sinks
        self._on_event = on_event
        self._work: queue.Queue[Manifest | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="stillframe-epochs", daemon=True)
        self._thread.start()

    def submit(self, manifest: Manifest) -> None:
        """Never blocks: no checkpoint is stored until the last one's commit has been reported."""
        self._work.put_nowait(manifest)

    def finish(self) -> None:
        """Wait for the commit under way, however long the user's function takes, and end."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (manifest := self._work.get()) is not None:
            try:
                for uid in self._sinks.committing_here:
                    self._sinks.commit(uid, manifest)
            except Exception as error:
                self._on_event(_failure(error))
            else:
                self._on_event(EpochCommitted(manifest.epoch))


def _failure(error: Exception) -> CommitFailed:
    if isinstance(error, StillframeError):
        return CommitFailed(str(error), isinstance(error, UserCodeError))
    return CommitFailed(f"a commit on the driver raised {type(error).__name__}: {error}", True)
