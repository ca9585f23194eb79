"""What the attempts of a job work with and what outlives them, in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stillframe.clock import Clock
from stillframe.config import JobConfig
from stillframe.coordinator.history import History
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.located import LocatedSnapshot, locate
from stillframe.coordinator.savepoints import OpenStore
from stillframe.coordinator.sinks import DriverSinks
from stillframe.graph.plan import Plan
from stillframe.ids import OperatorUid
from stillframe.json_values import JsonObject
from stillframe.protocol.fit import StateFinding
from stillframe.protocol.manifests import Manifest
from stillframe.storage.store import Store, open_store

WATCHED_SECONDS = 10.0
"""Of a task whose channels somebody looks at: until it is said again."""
UnfitStates = Callable[[Plan, Manifest, Store, JsonObject], Sequence[StateFinding]]


def no_unfit_states(
    plan: Plan, manifest: Manifest, store: Store, given: JsonObject
) -> Sequence[StateFinding]:
    """Where nobody knows how states are kept it is found out when they are restored."""
    return ()


class Watched:
    """Tasks at whose channels somebody looks. May be used from any thread."""

    def __init__(self) -> None:
        self._until_seconds: dict[int, float] = {}
        self._told: tuple[int, ...] = ()

    def note(self, task: int, now_seconds: float) -> None:
        """Somebody looks, and says so again before it is forgotten."""
        self._until_seconds[task] = now_seconds + WATCHED_SECONDS

    def has_changed(self, now_seconds: float) -> bool:
        """Since slots were told."""
        return self._tasks(now_seconds) != self._told

    def told(self, now_seconds: float) -> tuple[int, ...]:
        """What slots are told now."""
        self._told = self._tasks(now_seconds)
        return self._told

    def _tasks(self, now_seconds: float) -> tuple[int, ...]:
        found = sorted(self._until_seconds.copy().items())
        return tuple(task for task, until_seconds in found if now_seconds < until_seconds)


@dataclass(frozen=True, slots=True)
class JobParts:
    """What an attempt works with and what outlives it."""

    plan: Plan
    config: JobConfig
    clock: Clock
    history: History
    sinks: DriverSinks
    ledger: Ledger
    open_store: OpenStore = open_store
    """Where savepoints go."""
    on_running: Callable[[], None] = lambda: None
    """Called when all slots of an attempt run, and everybody knows."""
    unfit_states: UnfitStates = no_unfit_states
    """Which states of a snapshot the plan cannot go on with, or in other columns only, as far as
    that can be told here."""
    oom_kills: Callable[[], int | None] = lambda: None
    """How many processes the driver's machine has killed for want of memory."""
    locate: Callable[[str], LocatedSnapshot] | None = None
    """How a snapshot from elsewhere is found by its address; None: where addresses lead to."""
    commit: Callable[[OperatorUid, Manifest], None] | None = None
    """Calls a sink that commits on the driver before an attempt begins; None: the sinks' own."""

    watched: Watched = field(default_factory=Watched)

    def located(self, address: str) -> LocatedSnapshot:
        if self.locate is not None:
            return self.locate(address)
        return locate(address, self.config.storage_settings)
