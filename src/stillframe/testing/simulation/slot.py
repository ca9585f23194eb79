"""A simulated slot: the real subtasks, stepped by the schedule, their background work delayed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from stillframe.config import CheckpointMode, StateSettings
from stillframe.errors import SnapshotDamaged, StillframeError, Unavailable, UserCodeError
from stillframe.graph.plan import Plan, SubtaskRef
from stillframe.ids import Attempt, CheckpointId, Epoch, SlotIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.commits import Commit
from stillframe.protocol.inline import put_together
from stillframe.protocol.manifests import (
    ChannelState,
    FileHandle,
    OperatorSnapshot,
    SubtaskTimings,
)
from stillframe.protocol.messages import (
    AbortCheckpoint,
    Acknowledged,
    CaughtUp,
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
    StillThere,
    TakeFile,
    order_from_json,
    report_from_json,
)
from stillframe.protocol.outside import retry_after_seconds
from stillframe.runtime.assembly import assemble
from stillframe.runtime.building import Surroundings
from stillframe.runtime.channels import InputChannel, OutputChannel, pull_barrier
from stillframe.runtime.disk import DiskRoom
from stillframe.runtime.elements import Barrier, Element, Watermark
from stillframe.runtime.operators import Background
from stillframe.runtime.task import (
    SnapshotStarted,
    Subtask,
    TaskEvents,
    answer_or_error,
    complete_restored,
    obey,
)
from stillframe.runtime.writing import Writing, parts_of
from stillframe.state.disk import DiskMemory
from stillframe.storage.savepoint import StoreWithSavepoint
from stillframe.storage.staging import StagedFiles
from stillframe.storage.store import Store
from stillframe.testing.simulation.checkers import Violation
from stillframe.testing.simulation.line import Line
from stillframe.testing.simulation.storage import JOB_DIRECTORY, Died
from stillframe.testing.simulation.world import World

if TYPE_CHECKING:
    from stillframe.testing.simulation.driver import SimulatedDriver

_CALM_STEPS_MAX = 20
_ELEMENTS_MAX = 4
"""How many elements may be under way or waiting in one channel before its sender must pause."""


class SimulatedChannel(OutputChannel, InputChannel):
    """One channel between two slots: in order, each element after a delay of its own."""

    def __init__(self, world: World, receiver: SimulatedSlot, sender: SimulatedSlot) -> None:
        self._world = world
        self._receiver = receiver
        self._sender = sender
        self._under_way: deque[Element] = deque()
        self._arrived: deque[tuple[Element, int]] = deque()
        self._barriers: deque[Barrier] = deque()
        self._time_us: int | None = None
        self._slowness = world.random.choice([0.01, 0.05, 0.3, 1.5])

    def has_room(self) -> bool:
        return len(self._under_way) + len(self._arrived) < _ELEMENTS_MAX

    def send(self, element: Element) -> None:
        if isinstance(element, Watermark):
            self._check_time(element.time_us)
        self._under_way.append(element)
        self._world.soon(self._deliver, 0.05 if self._world.is_calm else self._slowness)

    def _check_time(self, time_us: int) -> None:
        before_us, self._time_us = self._time_us, time_us
        if before_us is not None and time_us < before_us:
            raise Violation(f"time: went from {before_us} to {time_us} on a channel")

    def is_flushed(self) -> bool:
        return not self._under_way

    def is_empty(self) -> bool:
        return not self._arrived

    def peek(self) -> Element:
        return self._arrived[0][0]

    def take(self) -> Element:
        if not self.has_room():
            self._sender.wake()
        element, _ = self._arrived.popleft()
        if self._barriers and element is self._barriers[0]:
            self._barriers.popleft()
        return element

    def overtake(self, barrier: Barrier) -> list[pa.RecordBatch]:
        """Some of what is under way has left the sender already: any share of it."""
        place = self._world.random.randint(0, len(self._under_way))
        return self._send_ahead(barrier, place, len(self._under_way))

    def hasten(self, checkpoint_id: CheckpointId) -> list[pa.RecordBatch] | None:
        for place, element in enumerate(self._under_way):
            if isinstance(element, Barrier) and element.checkpoint_id == checkpoint_id:
                del self._under_way[place]
                ahead = replace(element, alignment_timeout_ms=0)
                return self._send_ahead(ahead, self._world.random.randint(0, place), place)
        return None

    def holds(self, checkpoint_id: CheckpointId) -> bool:
        return any(
            isinstance(element, Barrier) and element.checkpoint_id == checkpoint_id
            for element in self._under_way
        )

    def waiting_barriers(self) -> Sequence[Barrier]:
        return self._barriers

    def pull(self, checkpoint_id: CheckpointId) -> list[pa.RecordBatch]:
        return pull_barrier(self._arrived, self._barriers, checkpoint_id)

    def _send_ahead(self, barrier: Barrier, place: int, stop: int) -> list[pa.RecordBatch]:
        overtaken = list(self._under_way)[place:stop]
        self._under_way.insert(place, barrier)
        self._world.soon(self._deliver, 0.05 if self._world.is_calm else self._slowness)
        return [element for element in overtaken if isinstance(element, pa.RecordBatch)]

    def _deliver(self) -> None:
        # The oldest, whichever delay has run out: a channel never reorders.
        if self._under_way and not self._sender.is_dead:
            element = self._under_way.popleft()
            self._arrived.append((element, 0))
            if isinstance(element, Barrier):
                self._barriers.append(element)
                self._sender.wake()  # whose snapshot may have waited for it to leave
            self._receiver.wake()


class Exchange:
    """The channels between the slots of one attempt; both ends of a channel are one object."""

    def __init__(self, world: World, repeats: float) -> None:
        self.repeats = repeats
        """The share of control messages that come twice."""
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
        open_store: Callable[[str], Store],
        mode: CheckpointMode,
        settings: StateSettings,
        incarnation: str,
        savepoint: Store | None,
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
        self._open_store = open_store
        self._incarnation = incarnation
        own = open_store(JOB_DIRECTORY)
        self._staging = StagedFiles(own)
        self._store = own
        if savepoint is not None:
            self._store = StoreWithSavepoint(own, open_store(savepoint.address))
        self._mode = mode
        self._settings = settings
        self._taken: dict[FileHandle, FileHandle] = {}
        self._subtasks: dict[SubtaskRef, Subtask] = {}
        self._mailbox: deque[Callable[[], None]] = deque()
        self._orders = Line(world, exchange.repeats, order_from_json, self._take_order)
        self._reports = Line(
            world,
            exchange.repeats,
            report_from_json,
            lambda report: self._driver.on_report(self, report),
        )
        self._commits: deque[tuple[SubtaskRef, Writing, Epoch, Commit]] = deque()
        """The first is tried again until the other system takes it; the others wait."""
        self._commit_failures = 0
        self._commit_at = 0.0
        self._closed: set[CheckpointId] = set()
        """Checkpoints that it was told are complete, or given up."""
        self._is_step_due = False
        self._alarm_at = 0.0
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
            self._fail(StillframeError(f"{what} is gone"), is_peer_lost=True)

    def wake(self) -> None:
        if not self._is_step_due and not self.is_dead:
            self._is_step_due = True
            self._world.soon(self._step, self._slowness)

    def _tell_peers(self) -> None:
        for peer in self._exchange.slots.values():
            if peer is not self and not peer.is_dead:
                self._world.soon(partial(peer.lose_connection, "a peer"), 0.5)

    # --- orders and reports ---

    def order(self, order: Order) -> None:
        self._orders.send(order)

    def _take_order(self, order: Order) -> None:
        if not self.is_dead and not self.is_cut_off:
            self._mail(lambda: self._obey(order))

    def _report(self, report: Report) -> None:
        """Also when it was cut off and does not know it: somebody else may listen there by now."""
        self._reports.send(report)

    def hello(self) -> JsonObject:
        return {
            "kind": "control",
            "job": self._plan.job,
            "attempt": self.attempt,
            "slot": self.index,
            "pid": 1000 + self.index,
            "host": "simulated",
            "port": self.index,
        }

    def _obey(self, order: Order) -> None:
        match order:
            case StartSlot():
                if not self._subtasks:  # it may come twice
                    self._start(put_together(order, self._taken))
            case TakeFile(file):
                self._taken[file] = file
            case EndSlot():
                self.is_dead = True
            case StillThere():
                pass  # that it came is what it says
            case _:
                obey(self._subtasks.values(), order)
        if isinstance(order, CompleteCheckpoint | AbortCheckpoint):
            self._closed.add(order.checkpoint_id)
            self._driver.on_closed(self._subtasks.values(), self._closed)

    def end(self) -> None:
        """The job is over: take the last orders, and say what is left."""
        self._orders.deliver_all()
        while self._mailbox and not self.is_dead:
            self._mailbox.popleft()()
        self._driver.on_closed(self._subtasks.values(), None)

    def _room(self) -> DiskRoom | None:
        """Databases are real ones, in real directories, but nothing happens in them by itself."""
        if self._settings.backend != "rocksdb":
            return None
        memory = DiskMemory(0, merges_files=False)
        incremental = self._settings.is_incremental
        return DiskRoom(self._world.new_directory(), memory, 0, is_incremental=incremental)

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
            channels=order.channels,
            settings=self._settings,
            room=self._room(),
            incarnation=self._incarnation,
            staging=self._staging,
        )
        self._subtasks = assemble(around)
        if around.room is not None:
            for subtask in self._subtasks.values():
                self._world.at_end(subtask.close)  # a database cannot be closed without its files
        self._driver.on_started(self.attempt, self._subtasks.values())
        self._report(Running())
        complete_restored(self._subtasks.values(), order)

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
        except UserCodeError as error:
            raise AssertionError(f"no function here is wrong, but {error}") from error
        except StillframeError as error:
            self._fail(error)

    def _step_subtasks(self) -> None:
        progressed = False
        subtasks, random = list(self._subtasks.values()), self._world.random.random
        first = int(random() * len(subtasks))
        for subtask in subtasks[first:] + subtasks[:first]:
            for _ in range(1 + int(random() * (_CALM_STEPS_MAX if self._world.is_calm else 4))):
                if self.is_dead or not subtask.step():
                    break
                progressed = True
        if progressed:
            self.wake()
        elif subtasks:
            idle = min(subtask.idle_seconds_max() for subtask in subtasks)
            if idle < 1.0:
                self._set_alarm(idle)

    def _set_alarm(self, seconds: float) -> None:
        """One at a time: each that rings would set the next, and soon there would be hundreds."""
        at = self._world.now + seconds
        if self._world.now < self._alarm_at <= at:
            return
        self._alarm_at = at
        self._world.after(seconds, lambda: self.wake() if at == self._alarm_at else None)

    def _fail(self, error: StillframeError, is_peer_lost: bool = False) -> None:
        self._world.note(f"slot {self.index} of attempt {self.attempt} fails: {error}")
        damaged = isinstance(error, SnapshotDamaged)
        cause: FailureCause = "lost slot" if is_peer_lost else "other"
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
                results = [answer_or_error(background) for background in started.writes]
            except Died:
                return
            self._mail(lambda: self._subtasks[subtask].on_written(started.checkpoint_id, results))

        self._world.soon(write, self._upload_seconds_max())

    def _upload_seconds_max(self) -> float:
        """Once faults stop, storage is quick: the job must finish within any timeout."""
        return 0.05 if self._world.is_calm else self._world.random.choice([0.05, 0.3, 2.0])

    def channels_recorded(
        self, subtask: SubtaskRef, checkpoint_id: CheckpointId, write: Background
    ) -> None:
        outlives = self._world.chance(0.3)

        def write_now() -> None:
            if self.is_dead and not outlives:
                return
            try:
                result = answer_or_error(write)
            except Died:
                return
            self._mail(lambda: self._subtasks[subtask].on_channels_written(checkpoint_id, result))

        self._world.soon(write_now, self._upload_seconds_max())

    def open_savepoint(self, address: str) -> Store:
        return self._open_store(address)

    def snapshot_unwanted(self, files: Sequence[FileHandle], savepoint: Store | None) -> None:
        for file in files:
            if not file.is_inline:
                self._world.soon(partial(self._delete, savepoint or self._store, file.path))

    def _delete(self, store: Store, path: str) -> None:
        if not self.is_dead:
            with contextlib.suppress(StillframeError, Died):  # the sweep gets it
                store.delete(path)

    def acknowledged(
        self,
        subtask: SubtaskRef,
        checkpoint_id: CheckpointId,
        operators: Sequence[OperatorSnapshot],
        timings: SubtaskTimings,
        channels: Sequence[ChannelState],
    ) -> None:
        self._report(
            Acknowledged(*subtask, checkpoint_id, tuple(operators), timings, tuple(channels))
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
        if self._world.now < self._commit_at:
            self._world.after(self._commit_at - self._world.now, self._commit_next)
            return
        subtask, sink, epoch, commit = self._commits[0]
        try:
            sink.committer.commit(epoch, parts_of(commit.prepared))
            sink.committer.forget(commit.settled)
        except Unavailable:
            self._commit_failures += 1
            self._commit_at = self._world.now + retry_after_seconds(self._commit_failures)
            self._commit_next()
            return
        except Died:
            self.is_dead = True
            return
        except StillframeError as error:
            self._fail(error)
            return
        self._commits.popleft()
        self._commit_failures = 0
        self._mail(lambda: self._subtasks[subtask].on_committed(sink, commit.checkpoint_id))

    def committed(self, subtask: SubtaskRef, checkpoint_id: CheckpointId) -> None:
        self._report(Committed(*subtask, checkpoint_id))

    def caught_up(self, subtask: SubtaskRef) -> None:
        self._report(CaughtUp(*subtask))

    def drained(self, subtask: SubtaskRef) -> None:
        self._report(Drained(*subtask))
