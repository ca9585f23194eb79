"""One slot: a loop that steps the subtasks of its index, and everything they need around them.

Theory of operation
-------------------
`run_slot` is called on an executor, in the Python worker of one barrier task. It opens its data
port, reports to the coordinator, and waits for the order to start, which brings the peers'
addresses and the state to start from. Then one thread, this one, steps all subtasks until it is
told to end. Whatever other threads have to say (orders, finished writes, finished commits, a lost
connection) they put into the slot's mailbox and wake the loop; nobody else touches a subtask.

Losing the coordinator or a peer ends the slot at once: it stops processing and committing, and
raises, so that the worker process ends with it and nothing of it can reach the next attempt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pyarrow as pa

from stillframe.clock import Clock, SystemClock
from stillframe.errors import StillframeError, UserCodeError
from stillframe.evaluator.beside import Evaluator
from stillframe.evaluator.process import SparkHere, no_spark_here
from stillframe.graph.launch import SlotLaunch
from stillframe.graph.logical import Aggregate, evaluated_by_spark
from stillframe.graph.plan import SubtaskRef
from stillframe.ids import CheckpointId, Epoch, SlotIndex
from stillframe.json_values import JsonObject
from stillframe.logs import About
from stillframe.memory import oom_kills
from stillframe.protocol.commits import Commit
from stillframe.protocol.failures import SlotRead
from stillframe.protocol.inline import put_together
from stillframe.protocol.kept import Totals, encode_kept
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
    Declined,
    Drained,
    EndSlot,
    Failed,
    FailureCause,
    Order,
    Progress,
    Report,
    Running,
    SourceLag,
    StartSlot,
    StillThere,
    SubtaskDoing,
    TakeFile,
    blame_of,
    cause_of,
)
from stillframe.runtime.assembly import assemble
from stillframe.runtime.building import Surroundings
from stillframe.runtime.control import Control
from stillframe.runtime.disk import DiskRoom, has_database
from stillframe.runtime.interpreter import quick_threads, spared_collections
from stillframe.runtime.measuring import Measuring, want_latency
from stillframe.runtime.memory import keep_freed_memory
from stillframe.runtime.network import Network
from stillframe.runtime.operators import Background
from stillframe.runtime.slot_log import SlotLog, logging_as_slot
from stillframe.runtime.task import (
    SnapshotStarted,
    Subtask,
    TaskEvents,
    Turn,
    complete_restored,
    obey,
    take_turn,
)
from stillframe.runtime.uploads import CancellableStore, Upload, Uploads
from stillframe.runtime.watching import LoopWatch, ReaderWatch, SinkWatch, StackLine
from stillframe.runtime.writing import Writing
from stillframe.secrets import masked, shows_secret
from stillframe.storage.paths import read_history_path
from stillframe.storage.savepoint import StoreWithSavepoint
from stillframe.storage.staging import StagedFiles
from stillframe.storage.store import Store, open_store
from stillframe.wire import Address, ConnectionLost

_START_SECONDS_MAX = 120.0
_CONNECT_SECONDS_MAX = 30.0
_FLUSH_SECONDS_MAX = 10.0
_LEAVE_SECONDS_MAX = 5.0
"""How long a slot that has lost its coordinator may take to give everything back."""

log = logging.getLogger("stillframe")


class SlotLost(StillframeError):
    """The slot can no longer be part of its attempt."""


def run_slot(
    launch: SlotLaunch,
    slot: SlotIndex,
    host: str,
    pid: int,
    feed: Iterator[pa.RecordBatch] | None,
    find_spark: Callable[[], SparkHere] = no_spark_here,
) -> None:
    """Run one slot until the coordinator ends it; raises if it ends any other way.

    `find_spark` is asked only if an expression of the plan needs Spark's evaluator.
    """
    keep_freed_memory()
    about = About(launch.plan.job, launch.attempt, slot=slot)
    try:
        with (
            quick_threads(),
            logging_as_slot(about, as_json=launch.log_format == "json") as slot_log,
        ):
            running = _Slot(launch, slot, host, pid, feed, SystemClock(), find_spark, slot_log)
            try:
                running.run()
            except Exception as error:
                running.report_failure(error)
                raise
            finally:
                running.close()
    except Exception as error:
        if shows_secret(error):  # Spark writes into its log what is raised here
            raise StillframeError(masked(f"{type(error).__name__}: {error}")) from None
        raise


def _opened(launch: SlotLaunch) -> Store | None:
    """The job's own store; if it starts from a savepoint, one that shows that as well."""
    if launch.store_address is None:
        return None
    own = CancellableStore(open_store(launch.store_address, launch.store_settings))
    if launch.savepoint_address is None:
        return own
    savepoint = open_store(launch.savepoint_address, launch.savepoint_settings)
    return StoreWithSavepoint(own, savepoint)


def _staging(launch: SlotLaunch) -> StagedFiles | None:
    if launch.store_address is None:
        return None
    return StagedFiles(open_store(launch.store_address, launch.store_settings))


class _Slot(TaskEvents):
    def __init__(
        self,
        launch: SlotLaunch,
        slot: SlotIndex,
        host: str,
        pid: int,
        feed: Iterator[pa.RecordBatch] | None,
        clock: Clock,
        find_spark: Callable[[], SparkHere],
        slot_log: SlotLog,
    ) -> None:
        self._launch = launch
        self._slot_log = slot_log
        self._find_spark = find_spark
        self._evaluator: Evaluator | None = None
        self._slot = slot
        self._feed = feed
        self._clock = clock
        self._mailbox: deque[Callable[[], None]] = deque()
        self._awake = threading.Event()
        self._lost: str | None = None
        self._is_lost = threading.Event()
        self._ended = False
        self._start: StartSlot | None = None
        self._taken: dict[FileHandle, FileHandle] = {}
        """What the start refers to, and is not on the store."""
        self._subtasks: dict[SubtaskRef, Subtask] = {}
        self._turn = Turn()
        self._watch = LoopWatch(self._turn, clock, launch.stuck_timeout_seconds)
        self._sink_watch = SinkWatch(clock, launch.stuck_timeout_seconds)
        self._reader_watch = ReaderWatch(clock, launch.stuck_timeout_seconds)
        self._is_ending = False
        """Whether the coordinator has said so, which the loop may not have heard."""
        self._gone = threading.Event()
        """Set when all is given back."""
        self._warned_of: set[SubtaskRef] = set()
        """Subtasks for which records came too late, which is said once of each."""
        self._lags: tuple[SourceLag, ...] = ()
        """As they were at the last beat."""
        self._measuring = Measuring(launch.metrics_interval_seconds, clock, self._turn)
        self._warned_of_malformed: set[SubtaskRef] = set()
        self._store = _opened(launch)
        self._room: DiskRoom | None = None
        self._uploads = Uploads()
        self._commit_pool = ThreadPoolExecutor(1, "stillframe-commit")
        self._network = Network(
            job=launch.plan.job,
            host=host,
            secret=launch.secret,
            attempt=launch.attempt,
            slot=slot,
            buffer_bytes_max=launch.channel_buffer_bytes,
            wake=self._awake.set,
        )
        hello: JsonObject = {
            "kind": "control",
            "job": launch.plan.job,
            "attempt": launch.attempt,
            "slot": slot,
            "pid": pid,
            "host": self._network.address.host,
            "port": self._network.address.port,
        }
        with contextlib.ExitStack() as undoing:
            undoing.callback(self._network.abort)
            self._stacks = StackLine(
                launch.coordinator, launch.secret, hello, launch.heartbeat_timeout_seconds
            )
            undoing.callback(self._stacks.close)
            self._control = self._report_for_duty(hello)
            undoing.pop_all()

    def _report_for_duty(self, hello: JsonObject) -> Control:
        return Control(
            self._launch.coordinator,
            self._launch.secret,
            hello,
            self._launch.heartbeat_timeout_seconds,
            self._clock,
            self._beat,
            on_order=self._hear,
            on_lost=self._lose,
        )

    def run(self) -> None:
        self._evaluator = self._start_evaluator()  # it comes up while we wait
        self._await_start()
        assert self._start is not None
        self._room = self._disk_room()
        self._subtasks = assemble(
            Surroundings(
                plan=self._launch.plan,
                slot=self._slot,
                attempt=self._launch.attempt,
                state=self._start.state,
                store=self._store,
                network=self._network,
                channel_buffer_bytes=self._launch.channel_buffer_bytes,
                clock=self._clock,
                wake=self._awake.set,
                feed=self._feed,
                events=self,
                mode=self._launch.checkpoint_mode,
                channels=self._start.channels,
                idle_timeout_seconds=self._launch.idle_timeout_seconds,
                rests=self._launch.rests,
                ahead_seconds_max=self._launch.ahead_seconds_max,
                settings=self._launch.state,
                room=self._room,
                incarnation=self._launch.incarnation,
                staging=_staging(self._launch),
                accepts_missing=self._launch.accepts_missing,
                state_defaults=self._launch.state_defaults,
                evaluator=self._evaluator,
            )
        )
        peers = {
            peer: Address(*where) for peer, where in self._start.peers.items() if peer != self._slot
        }
        # What was restored is in the operators now: it need not be held twice.
        self._start = replace(self._start, state={}, channels={})
        self._taken.clear()
        self._network.connect(peers, _CONNECT_SECONDS_MAX)
        if self._evaluator is not None:
            self._evaluator.await_ready()
        self._control.send(Running())
        names = ", ".join(subtask.name for subtask in self._subtasks.values())
        log.info("running on %s: %s", self._network.address.host, names)
        # Before all orders, and where the watch looks: it may call the user's functions.
        restored = partial(complete_restored, self._subtasks.values(), self._start, self._turn)
        self._mailbox.appendleft(restored)
        with spared_collections():
            self._loop()

    def _start_evaluator(self) -> Evaluator | None:
        projections = [
            result.projection
            for task, planned in self._launch.plan.operators()
            # Batches are combined for an aggregate where they come from.
            if self._slot < task.parallelism or isinstance(planned.operator, Aggregate)
            for result in evaluated_by_spark(planned.operator)
        ]
        if not projections:
            return None
        return Evaluator(self._find_spark(), projections, self._launch.evaluator_memory_bytes)

    def _disk_room(self) -> DiskRoom | None:
        launch = self._launch
        if launch.state.backend != "rocksdb":
            return None
        databases = sum(
            has_database(operator.operator)
            for task in launch.plan.tasks
            for operator in task.operators
        )
        identity = (launch.plan.job, launch.store_address, launch.attempt, self._slot)
        return DiskRoom.open(launch.state, *identity, databases)

    def report_failure(self, error: Exception) -> None:
        """Tell the coordinator why, if it is still there to hear it."""
        is_ours = isinstance(error, StillframeError)
        reason = masked(str(error) if is_ours else f"{type(error).__name__}: {error}")
        failing = self._turn.subtask
        if isinstance(error, UserCodeError) and failing is not None:
            failing.locate(error)
        with contextlib.suppress(ConnectionLost):  # it may have ended the attempt without us
            # Also of what has befallen a peer.
            self._control.send(replace(self._progress(), oom_kills=oom_kills()))
            task = failing.name if failing is not None else None
            subtask = failing.ref.subtask if failing is not None else None
            self._control.send(Failed(reason, _cause_of(error), task, subtask, blame_of(error)))
        if self._control.is_lost():
            self._leave_word()

    def _leave_word(self) -> None:
        """To the driver that comes next: the one that knew how far we have come is gone."""
        if self._store is None or self._start is None or self._is_ending:
            return
        attempt, slots = self._launch.attempt, len(self._start.peers)
        read = SlotRead(attempt, self._slot, slots, self._progress().records_in)
        with contextlib.suppress(StillframeError):
            path = read_history_path(attempt, self._slot)
            self._store.create_if_absent(path, encode_kept(read, Totals()))

    def close(self) -> None:
        """Give everything back; no thread of ours outlives this, because workers are reused."""
        self._lost = self._lost or "the slot has ended"
        self._is_lost.set()
        with contextlib.ExitStack() as closing:  # in reverse, and all of it whatever one raises
            closing.callback(self._stacks.close)
            closing.callback(self._control.close)
            closing.callback(self._gone.set)
            if self._room is not None:
                closing.callback(self._room.close)
            if self._evaluator is not None:
                closing.callback(self._evaluator.close)
            for subtask in self._subtasks.values():
                closing.callback(subtask.close)
            closing.callback(self._commit_pool.shutdown, wait=True, cancel_futures=True)
            closing.callback(self._uploads.close)
            if self._ended:
                closing.callback(self._network.close, _FLUSH_SECONDS_MAX)
            else:
                closing.callback(self._network.abort)

    # --- the loop ---

    def _await_start(self) -> None:
        deadline = self._clock.monotonic_seconds() + _START_SECONDS_MAX
        while self._start is None:
            self._read_mail()
            left = deadline - self._clock.monotonic_seconds()
            if self._start is None and (left <= 0 or self._ended):
                raise SlotLost(f"slot {self._slot} was not started within {_START_SECONDS_MAX:g} s")
            if self._start is None:
                self._awake.wait(left)
                self._awake.clear()

    def _loop(self) -> None:
        subtasks, turn = list(self._subtasks.values()), self._turn
        while True:
            turn.is_working = True
            # Cleared before looking, so that what happens while we look wakes us again.
            self._awake.clear()
            self._read_mail()
            if self._ended:
                self._control.send(self._progress())
                log.info("ending, as the driver says")
                return
            if not take_turn(subtasks, turn):
                turn.is_working = False
                self._awake.wait(min(subtask.idle_seconds_max() for subtask in subtasks))

    def _read_mail(self) -> None:
        while self._mailbox:
            self._mailbox.popleft()()
        failure = self._lost or self._network.failure()
        if failure and not self._ended:
            raise SlotLost(failure)

    def _mail(self, letter: Callable[[], None]) -> None:
        self._mailbox.append(letter)
        self._awake.set()

    def _hear(self, order: Order) -> None:
        self._is_ending = self._is_ending or isinstance(order, EndSlot)
        self._mail(lambda: self._obey(order))

    def _lose(self, reason: str) -> None:
        """The attempt is over. What hangs then would outlive it, and its driver, for ever."""
        self._lost = reason
        self._is_lost.set()
        self._awake.set()
        if not self._gone.wait(_LEAVE_SECONDS_MAX):
            log.error("slot %d does not end, so its process is ended", self._slot)
            os._exit(1)

    # --- orders from the coordinator ---

    def _obey(self, order: Order) -> None:
        match order:
            case StartSlot():
                self._start = self._start or put_together(order, self._taken)  # may come twice
            case TakeFile(file):
                if self._start is None:  # otherwise it has come twice
                    self._taken[file] = file
            case EndSlot():
                self._ended = True
            case StillThere(watched):
                self._measuring.watched = frozenset(watched)
            case _:
                if isinstance(order, AbortCheckpoint):
                    self._uploads.cancel(order.checkpoint_id)
                obey(self._subtasks.values(), order, self._turn)

    # --- what subtasks say ---

    def snapshot_started(self, subtask: SubtaskRef, started: SnapshotStarted) -> None:
        number = started.checkpoint_id

        def on_done(results: Sequence[object]) -> None:
            self._mail(lambda: self._subtasks[subtask].on_written(number, results))

        self._uploads.submit(Upload(number, started.writes, started.kept, on_done))

    def channels_recorded(
        self, subtask: SubtaskRef, checkpoint_id: CheckpointId, write: Background
    ) -> None:
        def on_done(results: Sequence[object]) -> None:
            [result] = results
            self._mail(lambda: self._subtasks[subtask].on_channels_written(checkpoint_id, result))

        self._uploads.submit(Upload(checkpoint_id, [write], [False], on_done))

    def open_savepoint(self, address: str) -> Store:
        return CancellableStore(open_store(address, self._launch.store_settings))

    def snapshot_unwanted(self, files: Sequence[FileHandle], savepoint: Store | None) -> None:
        store = savepoint or self._store
        paths = [file.path for file in files if not file.is_inline]
        if store is not None and paths:
            deleting = [lambda: [store.delete(path) for path in paths]]
            self._uploads.submit(Upload(None, deleting, [True], lambda results: None))

    def acknowledged(
        self,
        subtask: SubtaskRef,
        checkpoint_id: CheckpointId,
        operators: Sequence[OperatorSnapshot],
        timings: SubtaskTimings,
        channels: Sequence[ChannelState],
    ) -> None:
        # First, so that what is told of a checkpoint counts the rows it holds, at any interval.
        self._control.send(self._progress())
        self._control.send(
            Acknowledged(*subtask, checkpoint_id, tuple(operators), timings, tuple(channels))
        )

    def declined(self, subtask: SubtaskRef, checkpoint_id: CheckpointId, reason: str) -> None:
        self._control.send(Declined(checkpoint_id, reason))

    def commit_wanted(
        self, subtask: SubtaskRef, sink: Writing, epoch: Epoch, commit: Commit
    ) -> None:
        def commit_now() -> None:
            try:
                if self._lost or not sink.commit_patiently(epoch, commit, self._is_lost.wait):
                    return
            except Exception as error:  # whatever the outside said; the loop raises it
                self._mail(partial(_raise, error))
                return
            self._mail(lambda: self._subtasks[subtask].on_committed(sink, commit.checkpoint_id))

        self._commit_pool.submit(commit_now)

    def committed(self, subtask: SubtaskRef, checkpoint_id: CheckpointId) -> None:
        self._control.send(Committed(*subtask, checkpoint_id))

    def caught_up(self, subtask: SubtaskRef) -> None:
        self._control.send(CaughtUp(*subtask))

    def drained(self, subtask: SubtaskRef) -> None:
        self._control.send(Drained(*subtask))

    def _beat(self) -> Iterator[Report]:
        """What the control thread reports twice a second."""
        self._stacks.put_off()
        hanging = (
            self._watch.look(is_ending=self._is_ending)
            or self._sink_watch.look(self._subtasks.values())
            or self._reader_watch.look(self._subtasks.values())
        )
        lags = [subtask.lag for subtask in self._subtasks.values()]
        self._lags = tuple(lag for lag in lags if lag is not None)
        yield replace(self._progress(), hanging=hanging, oom_kills=oom_kills())
        if self._measuring.is_due():
            yield self._measuring.measured(self._subtasks.values())
            wanted = partial(want_latency, self._subtasks.values(), self._clock.wall_ms())
            self._mail(wanted)
        yield from self._slot_log.said()

    def _progress(self) -> Progress:
        subtasks = list(self._subtasks.values())
        for subtask in subtasks:
            if subtask.records_late and subtask.ref not in self._warned_of:
                self._warned_of.add(subtask.ref)
                log.warning(
                    "records came too late for %s, subtask %d, and are dropped: give withWatermark"
                    " a longer delay to wait for them, or take them with with_late()",
                    subtask.name,
                    subtask.ref.subtask,
                )
            self._warn_of_malformed(subtask)
        return Progress(
            records_in=sum(subtask.counters.records_read for subtask in subtasks),
            records_out=sum(subtask.records_written for subtask in subtasks),
            records_late=sum(subtask.records_late for subtask in subtasks),
            watermark_us=_slowest_us(subtasks),
            doing=tuple(_doing(subtasks)),
            records_malformed=sum(subtask.records_malformed for subtask in subtasks),
            awaits=next((each.awaits for each in subtasks if each.awaits is not None), None),
            lags=self._lags,
        )

    def _warn_of_malformed(self, subtask: Subtask) -> None:
        if subtask.records_malformed and subtask.ref not in self._warned_of_malformed:
            self._warned_of_malformed.add(subtask.ref)
            log.warning(
                "%s, subtask %d, has read malformed records: what of them could not be read is"
                " null, or with mode DROPMALFORMED they are left out; declare a column"
                " _corrupt_record string to see them, or set mode to FAILFAST",
                subtask.name,
                subtask.ref.subtask,
            )


def _doing(subtasks: Sequence[Subtask]) -> Iterator[SubtaskDoing]:
    for subtask in subtasks:
        # The loop may change them meanwhile: then the next report has them.
        with contextlib.suppress(RuntimeError):
            for checkpoint_id, what in list(subtask.holdings()):
                if checkpoint_id is not None:
                    yield SubtaskDoing(*subtask.ref, checkpoint_id, what)


def _slowest_us(subtasks: Sequence[Subtask]) -> int | None:
    times = (time for subtask in subtasks for time in subtask.times_us().values())
    return min((time for time in times if time is not None), default=None)


def _raise(error: Exception) -> None:
    raise error


def _cause_of(error: Exception) -> FailureCause:
    return "lost slot" if isinstance(error, SlotLost | ConnectionLost) else cause_of(error)
