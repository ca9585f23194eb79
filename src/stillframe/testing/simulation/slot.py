"""A simulated slot: the real subtasks, stepped by the schedule, their background work delayed."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from stillframe.config import CheckpointMode
from stillframe.errors import SnapshotDamaged, StillframeError
from stillframe.graph.plan import Plan, SubtaskRef
from stillframe.ids import Attempt, CheckpointId, Epoch, SlotIndex
from stillframe.protocol.commits import Commit
from stillframe.protocol.manifests import OperatorSnapshot, SubtaskTimings
from stillframe.protocol.messages import (
    AbortCheckpoint,
    Acknowledged,
    Committed,
    CompleteCheckpoint,
    Declined,
    Drained,
    EndSlot,
    Failed,
    FailureCause,
    Order,
    Report,
    Running,
    StartSlot,
    TriggerCheckpoint,
    message_to_json,
    order_from_json,
    report_from_json,
)
from stillframe.runtime.assembly import Surroundings, assemble
from stillframe.runtime.channels import InputChannel, OutputChannel
from stillframe.runtime.elements import Barrier, Element
from stillframe.runtime.operators import Writing
from stillframe.runtime.task import SnapshotStarted, SourceSubtask, Subtask, TaskEvents
from stillframe.testing.simulation.storage import Died, SimulatedStore
from stillframe.testing.simulation.world import World

if TYPE_CHECKING:
    from stillframe.testing.simulation.driver import SimulatedDriver

_ELEMENTS_MAX = 4
"""How many elements may be under way or waiting in one channel before its sender must pause."""


class SimulatedChannel(OutputChannel, InputChannel):
    """One channel between two slots: in order, each element after a delay of its own."""

    def __init__(self, world: World, receiver: SimulatedSlot, sender: SimulatedSlot) -> None:
        self._world = world
        self._receiver = receiver
        self._sender = sender
        self._under_way: deque[Element] = deque()
        self._arrived: deque[Element] = deque()
        self._slowness = world.random.choice([0.01, 0.05, 0.3])

    def has_room(self) -> bool:
        return len(self._under_way) + len(self._arrived) < _ELEMENTS_MAX

    def send(self, element: Element) -> None:
        self._under_way.append(element)
        self._world.soon(self._deliver, self._slowness)

    def is_flushed(self) -> bool:
        return not self._under_way

    def is_empty(self) -> bool:
        return not self._arrived

    def take(self) -> Element:
        element = self._arrived.popleft()
        self._sender.wake()
        return element

    def _deliver(self) -> None:
        # The oldest, whichever delay has run out: a channel never reorders.
        if self._under_way and not self._sender.is_dead:
            self._arrived.append(self._under_way.popleft())
            self._receiver.wake()


class Exchange:
    """The channels between the slots of one attempt; both ends of a channel are one object."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._channels: dict[int, SimulatedChannel] = {}
        self.slots: dict[SlotIndex, SimulatedSlot] = {}

    def channel(self, sender: SlotIndex, receiver: SlotIndex, channel_id: int) -> SimulatedChannel:
        if channel_id not in self._channels:
            self._channels[channel_id] = SimulatedChannel(
                self._world, self.slots[receiver], self.slots[sender]
            )
        return self._channels[channel_id]


class _OwnExchange:
    """A slot's view of the exchange."""

    def __init__(self, exchange: Exchange, slot: SlotIndex) -> None:
        self._exchange = exchange
        self._slot = slot

    def output(self, peer: SlotIndex, channel_id: int) -> OutputChannel:
        return self._exchange.channel(self._slot, peer, channel_id)

    def input(self, peer: SlotIndex, channel_id: int) -> InputChannel:
        return self._exchange.channel(peer, self._slot, channel_id)


class SimulatedSlot(TaskEvents):
    """One slot of one attempt. Dead or ended, it does nothing more, unless it is a zombie."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        attempt: Attempt,
        index: SlotIndex,
        driver: SimulatedDriver,
        exchange: Exchange,
        store: SimulatedStore,
        mode: CheckpointMode,
    ) -> None:
        self.index = index
        self.attempt = attempt
        self.is_dead = False
        self.has_joined = False
        self.is_cut_off = False
        """Whether the coordinator has closed the connection."""
        self._world = world
        self._plan = plan
        self._driver = driver
        self._exchange = exchange
        self._store = store
        self._mode = mode
        self._subtasks: dict[SubtaskRef, Subtask] = {}
        self._mailbox: deque[Callable[[], None]] = deque()
        self._orders: deque[str] = deque()
        self._reports: deque[str] = deque()
        self._commits: deque[tuple[SubtaskRef, Writing, Epoch, Commit]] = deque()
        self._is_step_due = False
        self._slowness = world.random.choice([0.02, 0.1, 0.4])

    # --- life ---

    def join(self) -> None:
        if not self.is_dead:
            self._driver.on_joined(self)

    def kill(self) -> None:
        """As by kill -9."""
        self.is_dead = True
        self._world.note(f"slot {self.index} of attempt {self.attempt} is killed")
        self._world.soon(lambda: self._driver.on_lost(self, "killed"))
        self._tell_peers()

    def lose_connection(self, what: str) -> None:
        """The coordinator, or a peer, is gone: the slot ends itself."""
        if not self.is_dead:
            self._fail(StillframeError(f"{what} is gone"), is_bystander=True)

    def wake(self) -> None:
        if not self._is_step_due and not self.is_dead:
            self._is_step_due = True
            self._world.soon(self._step, self._slowness)

    def _tell_peers(self) -> None:
        for peer in self._exchange.slots.values():
            if peer is not self and not peer.is_dead:
                self._world.soon(partial(peer.lose_connection, "a peer"), 0.5)

    # --- orders and reports: JSON on the way, in order, delayed ---

    def order(self, order: Order) -> None:
        self._orders.append(json.dumps(message_to_json(order)))
        self._world.soon(self._take_order)

    def _take_order(self) -> None:
        if self._orders and not self.is_dead and not self.is_cut_off:
            order = order_from_json(json.loads(self._orders.popleft()))
            self._mail(lambda: self._obey(order))

    def _report(self, report: Report) -> None:
        if not self.is_cut_off:
            self._reports.append(json.dumps(message_to_json(report)))
            self._world.soon(self._deliver_report)

    def _deliver_report(self) -> None:
        if self._reports:
            report = report_from_json(json.loads(self._reports.popleft()))
            self._driver.on_report(self, report)

    def _obey(self, order: Order) -> None:
        match order:
            case StartSlot():
                self._start(order)
            case TriggerCheckpoint(checkpoint_id, triggered_at_ms):
                for subtask in self._subtasks.values():
                    if isinstance(subtask, SourceSubtask):
                        subtask.on_trigger(Barrier(checkpoint_id, triggered_at_ms))
            case CompleteCheckpoint(checkpoint_id, epoch):
                for subtask in self._subtasks.values():
                    subtask.on_complete(checkpoint_id, epoch)
            case AbortCheckpoint(checkpoint_id):
                for subtask in self._subtasks.values():
                    subtask.on_abort(checkpoint_id)
            case EndSlot():
                self.is_dead = True

    def _start(self, order: StartSlot) -> None:
        around = Surroundings(
            plan=self._plan,
            slot=self.index,
            attempt=self.attempt,
            state=order.state,
            store=self._store,
            network=_OwnExchange(self._exchange, self.index),
            channel_buffer_bytes=2_000,
            clock=self._world,
            wake=self.wake,
            feed=None,
            events=self,
            mode=self._mode,
        )
        self._subtasks = assemble(around)
        self._report(Running())
        if order.restored_checkpoint is not None:
            assert order.restored_epoch is not None
            for subtask in self._subtasks.values():
                subtask.on_complete(order.restored_checkpoint, order.restored_epoch)

    # --- the loop ---

    def _mail(self, letter: Callable[[], None]) -> None:
        self._mailbox.append(letter)
        self.wake()

    def _step(self) -> None:
        self._is_step_due = False
        if self.is_dead:
            return
        try:
            while self._mailbox and not self.is_dead:
                self._mailbox.popleft()()
            self._step_subtasks()
        except Died:
            self.is_dead = True
        except StillframeError as error:
            self._fail(error)

    def _step_subtasks(self) -> None:
        progressed = False
        subtasks = list(self._subtasks.values())
        self._world.random.shuffle(subtasks)
        for subtask in subtasks:
            for _ in range(self._world.random.randint(1, 4)):
                if self.is_dead or not subtask.step():
                    break
                progressed = True
        if progressed:
            self.wake()
        elif subtasks:
            idle = min(subtask.idle_seconds_max() for subtask in subtasks)
            if idle < 1.0:
                self._world.after(idle, self.wake)

    def _fail(self, error: StillframeError, is_bystander: bool = False) -> None:
        self._world.note(f"slot {self.index} of attempt {self.attempt} fails: {error}")
        damaged = isinstance(error, SnapshotDamaged)
        cause: FailureCause = "bystander" if is_bystander else "other"
        self._report(Failed(str(error), "damaged snapshot" if damaged else cause))
        self.is_dead = True
        self._world.soon(lambda: self._driver.on_lost(self, "it ended"), 0.5)
        self._tell_peers()

    # --- what subtasks say ---

    def snapshot_started(self, subtask: SubtaskRef, started: SnapshotStarted) -> None:
        # A dead process may have sent its upload on its way, so it happens all the same, sometimes.
        outlives = self._world.chance(0.3)

        def write() -> None:
            if self.is_dead and not outlives:
                return
            try:
                results = [_answer_or_error(background) for background in started.writes]
            except Died:
                return
            self._mail(lambda: self._subtasks[subtask].on_written(started.checkpoint_id, results))

        self._world.soon(write, self._world.random.choice([0.05, 0.3, 2.0]))

    def snapshot_unwanted(self, operators: Sequence[OperatorSnapshot]) -> None:
        for operator in operators:
            for state in operator.keyed:
                self._world.soon(partial(self._delete, state.file.path))

    def _delete(self, path: str) -> None:
        if not self.is_dead:
            with contextlib.suppress(StillframeError):  # the sweep gets it
                self._store.delete(path)

    def acknowledged(
        self,
        subtask: SubtaskRef,
        checkpoint_id: CheckpointId,
        operators: Sequence[OperatorSnapshot],
        timings: SubtaskTimings,
    ) -> None:
        self._report(
            Acknowledged(*subtask, checkpoint_id, operators=tuple(operators), timings=timings)
        )

    def declined(self, subtask: SubtaskRef, checkpoint_id: CheckpointId, reason: str) -> None:
        self._report(Declined(checkpoint_id, reason))

    def commit_wanted(
        self, subtask: SubtaskRef, sink: Writing, epoch: Epoch, commit: Commit
    ) -> None:
        self._commits.append((subtask, sink, epoch, commit))
        self._world.soon(self._commit_next, 0.4)

    def _commit_next(self) -> None:
        if not self._commits or self.is_dead:
            return
        subtask, sink, epoch, commit = self._commits.popleft()
        try:
            sink.committer.commit(epoch, commit.committables)
        except StillframeError as error:
            self._fail(error)
            return
        self._mail(lambda: self._subtasks[subtask].on_committed(sink, commit.checkpoint_id))

    def committed(self, subtask: SubtaskRef, checkpoint_id: CheckpointId) -> None:
        self._report(Committed(*subtask, checkpoint_id))

    def drained(self, subtask: SubtaskRef) -> None:
        self._report(Drained(*subtask))


def _answer_or_error(background: Callable[[], object]) -> object:
    try:
        return background()
    except Exception as error:
        return error
