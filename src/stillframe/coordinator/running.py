"""Runs an attempt for real: the control port, the slots, the threads of the store and the sinks.

An attempt is over when none of its slots runs, the sinks on the driver have committed what they
were given and everything that was to be written is in the store: then the job's thread owns the
ledger again, and what it reads there is all that became of the attempt.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stillframe.coordinator.attempt import RunningAttempt
from stillframe.coordinator.commit_watch import TELL_SECONDS, CommitWatch
from stillframe.coordinator.control import ControlServer
from stillframe.coordinator.enumerators import DiscoveryThreads
from stillframe.coordinator.history import Waiting
from stillframe.coordinator.job_parts import JobParts
from stillframe.coordinator.ledger_thread import LedgerThread
from stillframe.coordinator.mail import (
    AttemptBroke,
    AttemptFinished,
    AttemptRested,
    AttemptStopped,
    Mail,
    Outcome,
    SlotsEnded,
)
from stillframe.coordinator.sinks import CommitFailed, CommitThread
from stillframe.errors import StillframeError
from stillframe.graph.launch import Deployment, RunningSlots, SlotLaunch
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.messages import EndSlot
from stillframe.protocol.restore import StartingState
from stillframe.storage.store import Store
from stillframe.wire import Address

_END_SECONDS_MAX = 30.0
_CANCEL_SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.5
_WRITES_MAX = 16
"""Beside what is known of every checkpoint in flight: one to be stored, an epoch, a savepoint."""
_WRITE_SECONDS_MAX = 600.0
"""A storage that has not answered for so long after the end of an attempt will not."""
_DELETE_SECONDS_MAX = 30.0
_DELETE_SECONDS_MAX_BROKEN = 1.0
"""The next attempt sweeps as it begins, and is waited for."""


@dataclass(frozen=True, slots=True)
class DriverAddress:
    """Where slots reach the coordinator; it may listen on another address than they dial."""

    host: str
    bind_host: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """Where and how the attempts of a job run."""

    deployment: Deployment
    driver: DriverAddress
    secret: bytes
    mailbox: queue.Queue[Mail]


def run_attempt(
    parts: JobParts,
    stage: Stage,
    restored: Manifest | None,
    state: StartingState,
    savepoint: Store | None = None,
) -> Outcome:
    """Launch the slots and see the attempt through; when it returns none of them runs.

    `savepoint` is where the restored files are, if the job starts from one.
    """
    attempt = parts.ledger.attempt
    commits = CommitThread(parts.sinks, stage.mailbox.put, parts.config.checkpoint_timeout_seconds)
    store = LedgerThread(stage.mailbox.put, parts.config.max_concurrent_checkpoints + _WRITES_MAX)
    server = ControlServer(
        stage.driver.bind_host or stage.driver.host,
        stage.secret,
        parts.plan.job,
        attempt,
        parts.plan.slots,
        stage.mailbox.put,
        parts.config.heartbeat_timeout_seconds,
    )
    discoveries = DiscoveryThreads(parts.plan, restored, attempt, stage.mailbox.put)
    running = RunningAttempt(parts, server, commits, store, restored, state, discoveries)
    watch = CommitWatch(parts, stage.deployment)
    launch = SlotLaunch(
        plan=parts.plan,
        attempt=attempt,
        incarnation=parts.ledger.incarnation,
        accepts_missing=parts.config.accept_missing_output,
        state_defaults=parts.config.state_defaults,
        coordinator=Address(stage.driver.host, server.port),
        secret=stage.secret,
        store_address=parts.ledger.store_address,
        # Savepoints may go to another storage than checkpoints, which are in a directory.
        store_settings=parts.ledger.store_settings or parts.config.storage_settings,
        savepoint_address=savepoint.address if savepoint is not None else None,
        savepoint_settings=savepoint.settings if savepoint is not None else {},
        channel_buffer_bytes=parts.config.channel_buffer_bytes,
        checkpoint_mode=parts.config.checkpoint_mode,
        idle_timeout_seconds=parts.config.watermark_idle_timeout_seconds,
        rests=parts.config.available_now,
        ahead_seconds_max=parts.config.watermark_ahead_seconds_max,
        heartbeat_timeout_seconds=parts.config.heartbeat_timeout_seconds,
        stuck_timeout_seconds=parts.config.stuck_timeout_seconds,
        metrics_interval_seconds=parts.config.metrics_interval_seconds,
        state=parts.config.state,
        evaluator_memory_bytes=parts.config.evaluator_memory_bytes,
        log_format=parts.config.log_format,
    )
    slots: RunningSlots | None = None
    waits = _Waits(parts, running, watch, store)
    try:
        slots = waits.slots = stage.deployment.launch(
            launch, lambda reason: stage.mailbox.put(SlotsEnded(attempt, reason))
        )
        while running.outcome is None:
            left = running.wake_at_seconds() - parts.clock.monotonic_seconds()
            _handle_next(stage, running, left)
            running.on_time()
            waits.tell()
    finally:
        given_up: CommitFailed | None = None
        with _closed_at_last(stage, running, store):
            _end(parts, stage, running, server, slots)
            discoveries.close()
            while given_up is None and not commits.finish(TELL_SECONDS):
                given_up = watch.look()
            _handle_all(stage, running)
            _await_writes(parts, store, waits)
            _handle_all(stage, running)
    for request in running.unanswered_requests():
        stage.mailbox.put(request)
    assert running.outcome is not None
    if given_up is not None and not isinstance(running.outcome, AttemptStopped):
        return AttemptBroke(given_up.reason, given_up.cause, blame=given_up.blame)
    return running.outcome


@contextmanager
def _closed_at_last(stage: Stage, running: RunningAttempt, store: LedgerThread) -> Iterator[None]:
    """Whatever goes wrong in the end: nothing is written any more, and whoever waits hears it."""
    try:
        yield
    finally:
        running.give_up()
        is_broken = running.outcome is None or isinstance(running.outcome, AttemptBroke)
        store.close(_DELETE_SECONDS_MAX_BROKEN if is_broken else _DELETE_SECONDS_MAX)
        running.on_port_closed()
        _handle_all(stage, running)


def _await_writes(parts: JobParts, store: LedgerThread, waits: _Waits) -> None:
    """Until the store has answered; who goes on without could begin with less than there is."""
    deadline = parts.clock.monotonic_seconds() + _WRITE_SECONDS_MAX
    while not store.await_writes(TELL_SECONDS):
        waits.tell_of_storage()
        if parts.clock.monotonic_seconds() > deadline:
            raise StillframeError(
                f"{_unanswered(parts, store)}, so that it is not known which checkpoint is the"
                " newest: start the job again when the storage is back"
            )
    parts.history.over("storage")


def _handle_all(stage: Stage, running: RunningAttempt) -> None:
    """What is in the mailbox."""
    while _handle_next(stage, running, 0.0):
        pass


class _Waits:
    """Tells what an attempt waits for outside it: slots that do not come, a sink on the driver, the
    storage."""

    def __init__(
        self,
        parts: JobParts,
        running: RunningAttempt,
        watch: CommitWatch,
        store: LedgerThread,
    ) -> None:
        self.slots: RunningSlots | None = None
        """None: they have not been launched."""
        self._parts = parts
        self._running = running
        self._watch = watch
        self._store = store
        self._tell_at = parts.clock.monotonic_seconds() + TELL_SECONDS

    def tell(self) -> None:
        """Every few seconds; in between it does nothing."""
        now = self._parts.clock.monotonic_seconds()
        if now < self._tell_at:
            return
        self._tell_at = now + TELL_SECONDS
        self._show("slots", self._slots_awaited())
        self.tell_of_storage()
        given_up = self._watch.look()
        if given_up is not None:
            self._running.handle(given_up)

    def tell_of_storage(self) -> None:
        is_slow = self._store.busy_seconds() >= TELL_SECONDS
        self._show("storage", _unanswered(self._parts, self._store) if is_slow else None)

    def _show(self, what: str, told: str | None) -> None:
        if told is None:
            self._parts.history.over(what)
        else:
            self._parts.history.begin(what, Waiting(told))

    def _slots_awaited(self) -> str | None:
        if self._running.do_all_run or self._running.outcome is not None or self.slots is None:
            return None
        slots, why = self._parts.plan.slots, self.slots.wait_for()
        return f"waiting for {slots} slot{'s' if slots > 1 else ''}{f': {why}' if why else ''}"


def _unanswered(parts: JobParts, store: LedgerThread) -> str:
    address = parts.ledger.store_address
    where = f" ({address})" if address is not None else ""
    return f"the storage{where} has not answered for {store.busy_seconds():.0f} s"


def _handle_next(stage: Stage, running: RunningAttempt, seconds_max: float) -> bool:
    """Handle the next mail, if one comes in time."""
    try:
        mail = stage.mailbox.get(block=seconds_max > 0, timeout=max(seconds_max, 0.0) or None)
    except queue.Empty:
        return False
    running.handle(mail)
    return True


def _end(
    parts: JobParts,
    stage: Stage,
    running: RunningAttempt,
    server: ControlServer,
    slots: RunningSlots | None,
) -> None:
    """Leave nothing running: slots are told, then cut off, then ended by force."""
    is_good_end = isinstance(running.outcome, AttemptFinished | AttemptRested | AttemptStopped)
    if is_good_end and running.have_all_joined:
        server.broadcast(EndSlot())
        _await_slots_ended(parts, stage, running)
    server.close()
    if slots is not None and not running.have_slots_ended:
        slots.cancel()
        deadline = parts.clock.monotonic_seconds() + _CANCEL_SECONDS_MAX
        while not running.have_slots_ended:
            left = deadline - parts.clock.monotonic_seconds()
            if left <= 0 or not _handle_next(stage, running, left):
                return


def _await_slots_ended(parts: JobParts, stage: Stage, running: RunningAttempt) -> None:
    """Until they have, or time is up, or one of them does not do anything any more."""
    deadline = parts.clock.monotonic_seconds() + _END_SECONDS_MAX
    while not running.have_slots_ended and not running.is_hanging():
        left = deadline - parts.clock.monotonic_seconds()
        if left <= 0:
            return
        _handle_next(stage, running, min(left, _LOOK_SECONDS))
