"""The parallelism of a running job, and the one change of it that may be under way.

Theory of operation
-------------------
A rescale is asked for from any thread. Whatever speaks against it is said there and then, before
anything has stopped, and the plan for the other parallelism is made there too. The rest is the job
thread's: the attempt that runs rests (`protocol.checkpoints`: its last checkpoint, behind which
the sources send nothing), the job takes the other plan, and the next attempt goes on from that
checkpoint. The time between is the downtime: from the trigger of that checkpoint, when sources
begin to be held, until every slot of the new attempt runs.

A job that has no running attempt, because slots are missing or it waits to be restarted, has
nothing to hold: it takes the other plan at once, and goes on from its newest checkpoint.

Until the attempt has come to rest, everything that goes wrong leaves the job as it was, and whoever
asked hears it. Afterwards the job has the other parallelism, also if it takes several attempts to
get there; only a plan that the checkpoint does not fit is taken back.

Where the tables of its joins have other rows (`refreshInterval`), the job rests in the same way,
and goes on with the same parallelism and the new rows.

Rules of this file
------------------
1. Whoever asked is answered once: it is done, it is not, or the job has ended.
2. One change at a time. What is asked for meanwhile is refused, not queued: it was meant for
   another parallelism than the job will have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from stillframe.clock import Clock
from stillframe.config import JobConfig
from stillframe.coordinator.history import History
from stillframe.coordinator.replanned import Refreshed, Rescaled
from stillframe.errors import StartRefused, StillframeError
from stillframe.graph.plan import Plan

Replan = Callable[[int], Plan]
"""The same job for another parallelism; raises where it could not run so."""


@dataclass(frozen=True, slots=True)
class RescaleFailed:
    """The job has the parallelism it had, or has ended, and this is why."""

    reason: str


RescaleOutcome = Rescaled | Refreshed | RescaleFailed


@dataclass(frozen=True, slots=True)
class RescaleWanted:
    """A person asks for another parallelism, and is told, on the job's thread, what became of it.

    `on_outcome` may be called more than once; all but the first are ignored.
    """

    parallelism: int
    plan: Plan
    on_outcome: Callable[[RescaleOutcome], None]
    refreshes: bool = False
    """Whether it is the parallelism that the job has, and its tables have other rows."""

    @property
    def not_done(self) -> str:
        """What is told if nothing comes of it."""
        if self.refreshes:
            return "the tables of the job stay as they were read"
        return f"the job is not rescaled to parallelism {self.parallelism}"


@dataclass(frozen=True, slots=True)
class _Change:
    """What the job had before, for as long as the other plan has not run."""

    plan: Plan
    held_at_seconds: float


class Scale:
    """How many slots a job has. `ask` and `parallelism` are for any thread, the rest for the job's.

    `replan` None: nobody can make another plan.
    """

    def __init__(
        self,
        parallelism: int,
        replan: Replan | None,
        config: JobConfig,
        clock: Clock,
        history: History,
    ) -> None:
        self._replan = replan
        self._config = config
        self._clock = clock
        self._history = history
        self._lock = threading.Lock()
        self._parallelism = parallelism
        self._wanted: int | None = None
        self._on_outcome: Callable[[RescaleOutcome], None] | None = None
        self._change: _Change | None = None

    @property
    def parallelism(self) -> int:
        """Of all operators that have none of their own."""
        with self._lock:
            return self._parallelism

    def ask(
        self, parallelism: int, on_outcome: Callable[[RescaleOutcome], None]
    ) -> RescaleWanted | None:
        """What to send to the job's thread; None: there was nothing to do, and that was told.

        Raises, and nothing has changed, if the job cannot be given this parallelism.
        """
        replan = self._refuse_what_cannot_be(parallelism)
        reserved = self._reserve(parallelism, on_outcome)
        if reserved is None:
            on_outcome(Rescaled(parallelism, parallelism, 0.0))
            return None
        return self._made(replan, reserved, on_outcome)

    def refresh(self, on_outcome: Callable[[RescaleOutcome], None]) -> RescaleWanted:
        """What to send to the job's thread, where its tables have other rows. Raises as `ask`."""
        replan = self._refuse_what_cannot_be(self.parallelism)
        reserved = self._reserve(None, on_outcome)
        assert reserved is not None, "there is something to do"
        return self._made(replan, reserved, on_outcome, refreshes=True)

    def _made(
        self,
        replan: Replan,
        parallelism: int,
        on_outcome: Callable[[RescaleOutcome], None],
        *,
        refreshes: bool = False,
    ) -> RescaleWanted:
        try:
            answer = partial(self._answer_to, on_outcome)
            return RescaleWanted(parallelism, replan(parallelism), answer, refreshes)
        except BaseException:
            self._forget()
            raise

    def _reserve(
        self, parallelism: int | None, on_outcome: Callable[[RescaleOutcome], None]
    ) -> int | None:
        """The parallelism of the change that may be under way from now on; None: there is nothing
        to do. Asked for None: the one that the job has, with another plan."""
        with self._lock:
            if self._wanted is not None:
                doing = f"is being rescaled to parallelism {self._wanted}"
                if self._wanted == self._parallelism:
                    doing = "goes on with new rows of its tables"
                raise StillframeError(f"the job {doing}: wait until it is done")
            if parallelism == self._parallelism:
                return None
            self._wanted, self._on_outcome = parallelism or self._parallelism, on_outcome
            return self._wanted

    def _refuse_what_cannot_be(self, parallelism: int) -> Replan:
        config = self._config
        if parallelism < 1:
            raise StartRefused(
                f"a job has at least 1 slot, not {parallelism}: give a positive parallelism"
            )
        if parallelism > config.max_parallelism:
            raise StartRefused(
                f"parallelism {parallelism} is more than maxParallelism {config.max_parallelism},"
                " which a job keeps all its life: give a lower one"
            )
        if config.checkpoint_location is None:
            raise StartRefused(
                "the job takes no checkpoints, so with another parallelism it would begin from"
                " nothing: set checkpointLocation and checkpointInterval"
            )
        if config.checkpoint_mode == "at-most-once":
            raise StartRefused(
                "checkpointMode is at-most-once, so a rescale would skip what has been read and"
                " not emitted yet: if that may be lost, stop the job and start it again with the"
                " other parallelism"
            )
        if self._replan is None:
            raise StartRefused(
                "nobody has told how this job is planned for another parallelism: stop it and"
                " start it again with the other parallelism"
            )
        return self._replan

    # --- the job's thread ---

    def change(self, before: Plan, held_at_seconds: float) -> None:
        """The attempt with this plan has come to rest; the next one has the other."""
        self._change = _Change(before, held_at_seconds)

    def take_back(self, reason: str) -> Plan | None:
        """The checkpoint does not fit the other plan: answers the one the job had.

        None: the job is not between two plans.
        """
        change, self._change = self._change, None
        if change is None:
            return None
        self._answer(RescaleFailed(reason))
        return change.plan

    def on_running(self) -> None:
        """Every slot of an attempt runs."""
        change, self._change = self._change, None
        if change is None:
            return
        downtime = self._clock.monotonic_seconds() - change.held_at_seconds
        with self._lock:
            assert self._wanted is not None
            before, self._parallelism = self._parallelism, self._wanted
        changed: Rescaled | Refreshed = Rescaled(before, self._parallelism, downtime)
        if before == self._parallelism:
            changed = Refreshed(downtime)
        self._history.tell(changed)
        self._answer(changed)

    def on_ended(self, reason: str) -> None:
        """The job is over."""
        self._answer(RescaleFailed(reason))

    def _answer_to(
        self, on_outcome: Callable[[RescaleOutcome], None], outcome: RescaleOutcome
    ) -> None:
        """Unless that is done: who asks next must not hear what comes too late."""
        with self._lock:
            is_waiting = self._on_outcome is on_outcome
        if is_waiting:
            self._answer(outcome)

    def _answer(self, outcome: RescaleOutcome) -> None:
        on_outcome = self._forget()
        if on_outcome is not None:
            on_outcome(outcome)

    def _forget(self) -> Callable[[RescaleOutcome], None] | None:
        with self._lock:
            on_outcome, self._on_outcome = self._on_outcome, None
            self._wanted = None
            return on_outcome
