"""The enumerators of a job's sources, seen from the driver: asked in the background, handed on.

Theory of operation
-------------------
`protocol/enumeration` decides; `Enumerators` carries it out for all sources of one attempt, on the
job's thread; `DiscoveryThreads` asks and tells, one thread for each enumerator, because an answer
may take long. An answer comes back as mail, is handed out to the slots at once, and only then is
the next question due, so no more than one answer of each source ever waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from stillframe.api.sources import Discovered, Source, Split, SplitEnumerator
from stillframe.coordinator.ports import DiscoveriesPort, SlotsPort
from stillframe.errors import Blame, StillframeError, UserCodeError
from stillframe.graph.logical import Read
from stillframe.graph.plan import Plan
from stillframe.ids import (
    NO_CHECKPOINT,
    Attempt,
    CheckpointId,
    OperatorUid,
    SlotIndex,
    SubtaskIndex,
)
from stillframe.json_values import JsonObject, json_flaw
from stillframe.protocol.enumeration import (
    Ask,
    Assign,
    Enumeration,
    EnumeratorState,
    Instruction,
)
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.messages import AssignSplits, FailureCause, blame_of, cause_of
from stillframe.protocol.positions import split_flaw
from stillframe.protocol.restore import StartingState, SubtaskState
from stillframe.user_code import calling

_STATE_BYTES_MAX = 64 << 20
"""Of one enumerator, as JSON: it is in every checkpoint's metadata."""


@dataclass(frozen=True, slots=True)
class SplitsDiscovered:
    """The enumerator of this source has answered."""

    attempt: Attempt
    uid: OperatorUid
    discovered: Discovered


@dataclass(frozen=True, slots=True)
class DiscoveryFailed:
    """An enumerator raised."""

    attempt: Attempt
    reason: str
    cause: FailureCause
    blame: Blame | None = field(default=None, compare=False)


DiscoveryEvent = SplitsDiscovered | DiscoveryFailed


def enumerated_sources(plan: Plan) -> Mapping[OperatorUid, Source]:
    """The sources of the job that have an enumerator."""
    return {
        planned.uid: planned.operator.source
        for _, planned in plan.operators()
        if isinstance(planned.operator, Read)
        and planned.operator.source.discovery_interval_seconds is not None
    }


def restored_enumerator(restored: Manifest | None, uid: OperatorUid) -> EnumeratorState:
    """What the enumerator of this source goes on from."""
    if restored is None or uid not in restored.enumerators:
        return EnumeratorState()
    return EnumeratorState.from_json(restored.enumerators[uid])


class Enumerators:
    """What one attempt knows about its sources' enumerators. Used by the job's thread alone."""

    def __init__(
        self,
        plan: Plan,
        restored: Manifest | None,
        state: StartingState,
        slots: SlotsPort,
        discoveries: DiscoveriesPort | None,
        *,
        available_now: bool = False,
    ) -> None:
        """`available_now`: the job stops when it has read what is there."""
        self._slots = slots
        self._discoveries = discoveries
        self._enumerations = _enumerations(plan, restored, state, available_now)
        self._triggered: dict[CheckpointId, Mapping[OperatorUid, JsonObject]] = {}

    def wake_at_seconds(self) -> float | None:
        moments = [each.wake_at_seconds() for each in self._enumerations.values()]
        return min((moment for moment in moments if moment is not None), default=None)

    def on_running(self) -> None:
        for uid, enumeration in self._enumerations.items():
            self._carry_out(uid, enumeration.on_running())

    def on_time(self, now_seconds: float) -> None:
        for uid, enumeration in self._enumerations.items():
            self._carry_out(uid, enumeration.on_time(now_seconds))

    def on_discovered(self, uid: OperatorUid, found: Discovered, now_seconds: float) -> None:
        """Hand the splits out."""
        splits: list[JsonObject] = [
            {"id": split.id, "position": split.position} for split in found.splits
        ]
        after = EnumeratorState(found.state, found.is_last)
        self._carry_out(uid, self._enumerations[uid].on_discovered(splits, after, now_seconds))

    def on_triggered(self, checkpoint_id: CheckpointId) -> None:
        """Keep what this checkpoint will say of the enumerators; before its trigger is sent."""
        self._triggered[checkpoint_id] = {
            uid: enumeration.snapshot().to_json() for uid, enumeration in self._enumerations.items()
        }

    def at_trigger(self, checkpoint_id: CheckpointId) -> Mapping[OperatorUid, JsonObject]:
        """What the enumerators had found when this checkpoint was triggered."""
        return self._triggered[checkpoint_id]

    def on_completed(self, manifest: Manifest) -> None:
        """The checkpoint that this describes is complete."""
        if self._discoveries is not None:
            for uid in self._enumerations:
                self._discoveries.tell_complete(uid, manifest)

    def forget(self, decided: CheckpointId) -> None:
        """This checkpoint is stored or aborted."""
        self._triggered.pop(decided, None)

    def _carry_out(self, uid: OperatorUid, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Ask():
                    assert self._discoveries is not None, f"nobody can ask the enumerator of {uid}"
                    self._discoveries.ask(uid)
                case Assign(subtask, splits, is_last, stops):
                    # Subtask n of every task runs in slot n.
                    order = AssignSplits(uid, subtask, splits, is_last, stops)
                    self._slots.send(SlotIndex(subtask), order)


def _enumerations(
    plan: Plan, restored: Manifest | None, state: StartingState, available_now: bool
) -> Mapping[OperatorUid, Enumeration]:
    parallelism = {planned.uid: task.parallelism for task, planned in plan.operators()}
    enumerations = {}
    for uid, source in enumerated_sources(plan).items():
        assert source.discovery_interval_seconds is not None
        parts = [
            state.get((uid, SubtaskIndex(index)), SubtaskState())
            for index in range(parallelism[uid])
        ]
        held = [{str(item["id"]) for item in part.items} for part in parts]
        enumerations[uid] = Enumeration(
            source.discovery_interval_seconds,
            restored_enumerator(restored, uid),
            held,
            stops=available_now,
        )
    return enumerations


class DiscoveryThreads(DiscoveriesPort):
    """One thread for each enumerator of an attempt; `on_event` is called on them.

    `close` does not wait for one that is being asked: what it answers then, nobody hears.
    """

    def __init__(
        self,
        plan: Plan,
        restored: Manifest | None,
        attempt: Attempt,
        on_event: Callable[[DiscoveryEvent], None],
    ) -> None:
        self._asking = {
            uid: _Asking(uid, source, restored, attempt, on_event)
            for uid, source in enumerated_sources(plan).items()
        }

    def ask(self, uid: OperatorUid) -> None:
        self._asking[uid].ask()

    def tell_complete(self, uid: OperatorUid, completed: Manifest) -> None:
        self._asking[uid].tell_complete(completed)

    def close(self) -> None:
        for asking in self._asking.values():
            asking.close()


class _Asking(threading.Thread):
    """Asks one enumerator, as often as it is told to, and tells it what is complete."""

    def __init__(
        self,
        uid: OperatorUid,
        source: Source,
        restored: Manifest | None,
        attempt: Attempt,
        on_event: Callable[[DiscoveryEvent], None],
    ) -> None:
        super().__init__(name=f"stillframe-discovery-{uid}", daemon=True)
        self._uid = uid
        self._source = source
        self._restored = restored_enumerator(restored, uid)
        self._attempt = attempt
        self._on_event = on_event
        self._news = threading.Condition()
        self._is_asked = False
        self._completed: Manifest | None = None
        """The newest that the enumerator has not been told of."""
        # A savepoint is no checkpoint of this job, and nobody is told of it.
        if restored is not None and restored.checkpoint_id != NO_CHECKPOINT:
            self._completed = restored if uid in restored.enumerators else None
        self._is_closed = False
        self._checked_state: JsonObject | None = None
        self.start()

    def ask(self) -> None:
        with self._news:
            self._is_asked = True
            self._news.notify()

    def tell_complete(self, completed: Manifest) -> None:
        with self._news:
            self._completed = completed
            self._news.notify()

    def close(self) -> None:
        with self._news:
            self._is_closed = True
            self._news.notify()

    def run(self) -> None:
        try:
            with calling(f"the enumerator of source {self._source.describe()}"):
                self._serve()
        except StillframeError as error:
            if not self._is_closed:
                self._on_event(_failure(self._attempt, error))

    def _serve(self) -> None:
        enumerator: SplitEnumerator | None = None
        try:
            while (wanted := self._next()) is not None:
                # Not before it is needed, and here, because opening may take as long as asking.
                enumerator = enumerator or self._source.open_enumerator(self._restored.state)
                completed, is_asked = wanted
                if completed is not None:
                    enumerator.on_checkpoint_complete(
                        completed.checkpoint_id,
                        restored_enumerator(completed, self._uid).state,
                        _splits_in(completed, self._uid),
                    )
                if is_asked:
                    discovered = enumerator.discover()
                    self._refuse_bad(discovered)
                    if not self._is_closed:
                        self._on_event(SplitsDiscovered(self._attempt, self._uid, discovered))
        finally:
            if enumerator is not None:
                enumerator.close()

    def _refuse_bad(self, discovered: Discovered) -> None:
        name = f"source {self._source.describe()}"
        refuse_bad_splits(name, discovered.splits)
        if discovered.state == self._checked_state:  # as mostly, where nothing new is found
            return
        flaw = json_flaw(discovered.state, _STATE_BYTES_MAX)
        if flaw is not None:
            raise UserCodeError(f"{name}: the state of its enumerator {flaw}")
        self._checked_state = discovered.state

    def _next(self) -> tuple[Manifest | None, bool] | None:
        """What is to be told, and whether to ask; None: it is over.

        What came with the end is still told: a job that has finished lets its last files go.
        """
        with self._news:
            self._news.wait_for(lambda: self._is_asked or self._completed or self._is_closed)
            wanted = self._completed, self._is_asked and not self._is_closed
            self._completed, self._is_asked = None, False
            return wanted if any(wanted) else None


def refuse_bad_splits(name: str, splits: Iterable[Split]) -> None:
    """Raise what is wrong with splits that the source of this name has given."""
    for split in splits:
        flaw = split_flaw(split.id, split.position)
        if flaw is not None:
            raise UserCodeError(f"{name}: {flaw}")


def _splits_in(manifest: Manifest, uid: OperatorUid) -> list[Split]:
    items = (item for part in manifest.snapshots if part.uid == uid for item in part.items)
    return [Split(str(item["id"]), cast(JsonObject, item["position"])) for item in items]


def _failure(attempt: Attempt, error: Exception) -> DiscoveryFailed:
    return DiscoveryFailed(attempt, str(error), cause_of(error), blame_of(error))
