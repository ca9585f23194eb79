"""What crosses to an executor, and the contract of whoever brings it there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from stillframe.config import CheckpointMode, LogFormat, StateSettings
from stillframe.graph.plan import Plan
from stillframe.ids import Attempt
from stillframe.json_values import JsonObject
from stillframe.wire import Address


@dataclass(frozen=True, slots=True)
class SlotLaunch:
    """Everything a slot needs to find its coordinator and to know its part. Picklable."""

    plan: Plan
    attempt: Attempt
    coordinator: Address
    secret: bytes
    store_address: str | None
    """Of the job's own directory; None where checkpointing is off."""
    channel_buffer_bytes: int
    checkpoint_mode: CheckpointMode = "exactly-once"
    idle_timeout_seconds: float | None = None
    rests: bool = False
    """Whether the job stops when it has read what there is, and goes on from there."""
    ahead_seconds_max: float = math.inf
    heartbeat_timeout_seconds: float = 50.0
    stuck_timeout_seconds: float = 300.0
    metrics_interval_seconds: float | Literal["off"] = 1.0
    state: StateSettings = StateSettings()  # noqa: RUF009 - frozen
    store_settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the store needs besides its address; keys and secrets are among it."""
    savepoint_address: str | None = None
    """Of the savepoint this attempt starts from, if it starts from one."""
    savepoint_settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    incarnation: str = ""
    """By which the job's sinks are known in other systems."""
    evaluator_memory_bytes: int = 512 << 20
    """The heap of the JVM with Spark's evaluator beside the slot, if an expression needs it."""
    log_format: LogFormat = "text"
    accepts_missing: frozenset[str] = frozenset()
    """Output that is gone, and that its sinks go on without."""
    state_defaults: JsonObject = field(default_factory=dict)
    """What columns of a state begin with that the snapshot does not have."""


class RunningSlots(ABC):
    """The slots of one attempt, wherever they run."""

    @abstractmethod
    def cancel(self) -> None:
        """End them by force. May be called more than once, and after they have ended."""

    def wait_for(self) -> str | None:
        """What keeps them from starting, in a sentence, if that is known."""
        return None


class Deployment(ABC):
    """Starts the slots of an attempt, all at once."""

    def shortage(self) -> str | None:
        """Why work on the driver, such as a foreachBatch, has to wait, in a sentence, if it has."""
        return None

    def works(self) -> bool:
        """Whether something is computed besides the slots, such as what a foreachBatch asks for."""
        return False

    @abstractmethod
    def launch(self, launch: SlotLaunch, on_ended: Callable[[str | None], None]) -> RunningSlots:
        """Start `launch.plan.slots` slots and return at once.

        `on_ended` is called exactly once, on any thread, when none of them runs any more: with
        None if all returned, otherwise with what is known about why they did not.
        """
