"""Deliberately broken variants of the protocol: each must be caught by a checker.

A mutant replaces one function while a run lasts; what it says in its description is the mistake an
implementer could make. If none of a few hundred seeds catches it, the checkers are worth little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from stillframe.coordinator import attempt, control, enumerators
from stillframe.coordinator.enumerators import Enumerators
from stillframe.coordinator.job_log import JobLog
from stillframe.coordinator.ledger import Ledger
from stillframe.coordinator.sinks import DriverSinks
from stillframe.coordinator.starting import Starter
from stillframe.ids import Attempt, Epoch
from stillframe.protocol import restore
from stillframe.protocol.alignment import BarrierAligner, Hold, Release, TakeSnapshot
from stillframe.protocol.checkpoints import AnnounceComplete, Checkpoints, Finish
from stillframe.protocol.commits import PendingCommits
from stillframe.protocol.event_time import EventTime
from stillframe.protocol.joblog import checkpoint_completed
from stillframe.protocol.laps import HeadLaps, Returned
from stillframe.protocol.manifests import decode_manifest
from stillframe.protocol.retention import Retention
from stillframe.protocol.split_times import SplitTimes
from stillframe.runtime import assembly, building, restoring, state_files
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import ReplayingInput
from stillframe.runtime.connecting import Connecting
from stillframe.runtime.elements import EndOfRecords
from stillframe.runtime.inner_task import InnerSubtask
from stillframe.runtime.keyed_functions import FunctionOperator
from stillframe.runtime.operators import Reading, Writing
from stillframe.runtime.outputs import EdgeOutput
from stillframe.runtime.source_task import Reserved, SourceSubtask
from stillframe.runtime.task import Subtask
from stillframe.runtime.watermarking import Watermarking
from stillframe.state import timers
from stillframe.state.aggregates import AggregateTable
from stillframe.state.columns import ChangingColumns
from stillframe.state.duplicates import SeenKeys
from stillframe.state.joins import JoinRows
from stillframe.state.newest import NewestRows
from stillframe.state.sessions import SessionTable
from stillframe.state.windows import WindowTables
from stillframe.storage import local
from stillframe.storage.local import LocalStore
from stillframe.storage.paths import checkpoint_of, metadata_path
from stillframe.testing.simulation.storage import Died

Breaking = Callable[[Any], Any]
"""Gets the right function, answers the wrong one."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small mistake."""

    description: str
    target: Any
    attribute: str
    breaking: Breaking

    @contextmanager
    def applied(self) -> Iterator[None]:
        original = getattr(self.target, self.attribute)
        setattr(self.target, self.attribute, self.breaking(original))
        try:
            yield
        finally:
            setattr(self.target, self.attribute, original)


# --- alignment -------------------------------------------------------------------------------


def _snapshot_at_first_barrier(original: Any) -> Any:
    def on_barrier(self: Any, channel: Any, checkpoint_id: Any, overtakes: bool = False) -> Any:
        if overtakes or checkpoint_id <= self._last_closed:
            return original(self, channel, checkpoint_id, overtakes)
        self._last_closed = checkpoint_id
        return [TakeSnapshot(checkpoint_id)]

    return on_barrier


def _one_channel_early(original: Any) -> Any:
    def snapshot_if_aligned(self: Any) -> Any:
        missing = self._channels - self._held_channels
        if self._aligning is None or not self._held_channels or len(missing) > 1:
            return []
        checkpoint_id = self._aligning
        return [TakeSnapshot(checkpoint_id), *self._close(checkpoint_id)]

    return snapshot_if_aligned


def _without(kind: type) -> Breaking:
    def breaking(original: Any) -> Any:
        def carry_out(self: Any, instructions: Sequence[Any], overtaken: Any = None) -> None:
            original(self, [each for each in instructions if not isinstance(each, kind)], overtaken)

        return carry_out

    return breaking


def _release_again(original: Any) -> Any:
    def on_cancel(self: Any, checkpoint_id: Any) -> Any:
        held = frozenset(self._held_channels)
        is_second = checkpoint_id <= self._last_closed
        return [*original(self, checkpoint_id), *([Release(held)] if is_second else [])]

    return on_cancel


def _drop_what_was_held(original: Any) -> Any:
    def abandon(self: Any, checkpoint_id: Any) -> None:
        for index in self._inputs.held:
            channel = self._inputs.channels[index]
            while not channel.is_empty() and not channel.waiting_barriers():
                if isinstance(channel.take(), EndOfRecords):
                    self._unended.discard(index)
        original(self, checkpoint_id)

    return abandon


# --- records under way -----------------------------------------------------------------------


def _new_input_first(original: Any) -> Any:
    def take(self: Any) -> Any:
        return original(self) if self._channel.is_empty() else self._channel.take()

    return take


def _overtaken_and_forgotten(original: Any) -> Any:
    def overtake(self: Any, barrier: Any) -> Any:
        return [(target, []) for target, _ in original(self, barrier)]

    return overtake


def _without_recording_feedback(original: Any) -> Any:
    def snapshot(self: Any, take: Any, overtaken: Any) -> None:
        original(self, replace(take, recorded=take.recorded - self._feedback), overtaken)

    return snapshot


def _deaf_to_other_heads(original: Any) -> Any:
    def on_barrier(self: Any, channel: Any, checkpoint_id: Any, overtakes: bool = False) -> Any:
        if channel in self._feedback:
            return self._recordings.on_barrier(channel, checkpoint_id)
        return original(self, channel, checkpoint_id, overtakes)

    return on_barrier


def _deaf_to_an_end(original: Any) -> Any:
    def on_marker(self: Any, channel: Any, marker: Any) -> None:
        if not (isinstance(marker, EndOfRecords) and self._inputs.held):
            original(self, channel, marker)

    return on_marker


def _end_at_the_first(original: Any) -> Any:
    def on_marker(self: Any, channel: Any, marker: Any) -> None:
        if isinstance(marker, EndOfRecords):
            self._unended &= {channel}
        original(self, channel, marker)

    return on_marker


def _keep_what_was_finished(original: Any) -> Any:
    def rows(self: Any) -> Any:
        has_finished, self._has_finished = self._has_finished, False
        try:
            return original(self)
        finally:
            self._has_finished = has_finished

    return rows


def _free_at_once(original: Any) -> Any:
    def add(self: Any, batch: Any) -> None:
        original(self, batch)
        self._free.append(self._waiting.pop()[1])

    return add


def _as_far_as_the_furthest(original: Any) -> Any:
    def times_of_splits(items: Any, uid: Any) -> Any:
        times = original(items, uid)
        return {str(item["id"]): max(times.values()) for item in items} if times else {}

    return times_of_splits


def _as_far_as_the_furthest_subtask(original: Any) -> Any:
    def state_of(operator: Any, subtask: Any, groups: Any, manifest: Any, splits: Any) -> Any:
        state = original(operator, subtask, groups, manifest, splits)
        found = manifest.snapshots_of(operator.uid) if manifest is not None else ()
        times = [each.watermark_us for each in found if each.watermark_us is not None]
        return replace(state, watermark_us=max(times), reached=()) if times else state

    return state_of


def _nobody_knows_the_time(original: Any) -> Any:
    def state_of(*about: Any) -> Any:
        return replace(original(*about), watermark_us=None, reached=())

    return state_of


def _back_in_time(original: Any) -> Any:
    def on_watermark(self: Any, channel: Any, time_us: int) -> Any:
        self._channels[channel], self._time_us = time_us, None
        self.on_active(channel)
        return self._advanced()

    return on_watermark


def _time_first(original: Any) -> Any:
    def advance_at(self: Any, position: int, time_us: int) -> None:
        operator = self._operators[position]
        if not isinstance(operator, Watermarking):
            self._advance_after(position, operator.time_after(time_us))
            self._pass_on(position, operator.on_watermark(time_us))

    return advance_at


def _told_before_fired(original: Any) -> Any:
    def tell_if_fired(self: Any) -> None:
        firing, self._firing = self._firing, None
        try:
            original(self)
        finally:
            self._firing = firing

    return tell_if_fired


def _fired_ones_too(original: Any) -> Any:
    def freeze(self: Any) -> Any:
        frozen = original(self)
        return replace(frozen, is_there=frozen.is_there | True)

    return freeze


def _unlinked(original: Any) -> Any:
    def restore_sessions(self: Any, batch: Any) -> None:
        original(self, batch)
        self._newest.rows[:] = -1

    return restore_sessions


def _none_matched(original: Any) -> Any:
    def restore_rows(self: Any, batches: Any) -> None:
        original(self, batches)
        for chunk in self._chunks:
            chunk.matched = chunk.matched & False

    return restore_rows


def _one_copy(original: Any) -> Any:
    def state_of(operator: Any, subtask: Any, groups: Any, manifest: Any, splits: Any) -> Any:
        state = original(operator, subtask, groups, manifest, splits)
        return replace(state, broadcast=()) if subtask else state

    return state_of


# --- snapshots -------------------------------------------------------------------------------


def _say_written_before_it_is(original: Any) -> Any:
    class Nowhere:
        def write(self, path: str, chunks: Any) -> Any:
            from stillframe.storage.store import Written

            return Written(len(b"".join(bytes(chunk) for chunk in chunks)), 0)

    return lambda store, path, frozen: original(Nowhere(), path, frozen)


def _nothing(original: Any) -> Any:
    return lambda *args, **kwargs: None


def _in_order_of_arrival(original: Any) -> Any:
    def on_written(self: Any, checkpoint_id: Any, results: Any) -> None:
        self._unwritten.clear()
        self._take_results(checkpoint_id, None, results)

    return on_written


def _drop_what_an_aborted_checkpoint_prepared(original: Any) -> Any:
    def take_results(self: Any, checkpoint_id: Any, savepoint: Any, results: Any) -> None:
        if checkpoint_id in self._open:
            original(self, checkpoint_id, savepoint, results)

    return take_results


def _without_the_attempt(original: Any) -> Any:
    def state_path(checkpoint_id: Any, uid: Any, subtask: Any, attempt: Any, state: str) -> Any:
        return original(checkpoint_id, uid, subtask, Attempt(1), state)

    return state_path


# --- shared files ----------------------------------------------------------------------------


def _delete_all_it_refers_to(original: Any) -> Any:
    def on_completed(self: Any, checkpoint_id: Any, files: Any, dropped: Any) -> Any:
        gone = [self._retained.get(each) or () for each in dropped]
        return original(self, checkpoint_id, files, dropped).union(*gone)

    return on_completed


# --- commits ---------------------------------------------------------------------------------


def _commit_when_prepared(original: Any) -> Any:
    def described(self: Any, checkpoint_id: Any, written: Any) -> Any:
        if self.commits_here:
            self.committer.commit(Epoch(0), written)
        return original(self, checkpoint_id, written)

    return described


def _commit_on_abort(original: Any) -> Any:
    def on_abort(self: Any, checkpoint_id: Any) -> None:
        original(self, checkpoint_id)
        self.on_complete(checkpoint_id, Epoch(0))

    return on_abort


def _hold_for_ever(original: Any) -> Any:
    def on_abort(self: Any, checkpoint_id: Any) -> None:
        held_by = self._held_by
        original(self, checkpoint_id)
        self._held_by = held_by

    return on_abort


def _commit_a_savepoint(original: Any) -> Any:
    def on_savepoint_stored(self: Any, checkpoint_id: Any, now_seconds: float) -> Any:
        instructions = original(self, checkpoint_id, now_seconds)
        return [AnnounceComplete(checkpoint_id), *instructions]

    return on_savepoint_stored


def _snapshot_only_the_newest(original: Any) -> Any:
    def on_prepared(self: Any, checkpoint_id: Any, committables: Any) -> Any:
        held = original(self, checkpoint_id, committables)
        return tuple(kept for kept in held if kept.checkpoint_id == checkpoint_id)

    return on_prepared


def _forget_restored_commits(original: Any) -> Any:
    def init(self: Any, restored: Any = (), **settings: Any) -> None:
        original(self, (), **settings)

    return init


def _scattered_commits(original: Any) -> Any:
    def state_of(operator: Any, subtask: Any, groups: Any, manifest: Any, splits: Any) -> Any:
        state = original(operator, subtask, groups, manifest, splits)
        found = manifest.snapshots_of(operator.uid) if manifest is not None else ()
        commits = [commit for snapshot in found for commit in snapshot.commits]
        return replace(state, commits=tuple(commits[subtask :: operator.parallelism]))

    return state_of


def _sweep_everything(original: Any) -> Any:
    return lambda self, older_than, manifest: original(self, older_than, None)


# --- the coordinator -------------------------------------------------------------------------


def _one_acknowledgement_is_enough_less(original: Any) -> Any:
    def on_acknowledged(self: Any, checkpoint_id: Any, subtask: Any, snapshot: Any) -> Any:
        answer, instructions = original(self, checkpoint_id, subtask, snapshot)
        pending = self._pending.get(checkpoint_id)
        if not instructions and pending is not None and len(pending.waiting_for) == 1:
            pending.waiting_for.clear()
            instructions = self._store_next()
        return answer, instructions

    return on_acknowledged


def _use_the_number_again(original: Any) -> Any:
    def fail(self: Any, pending: Any, reason: str, now_seconds: float) -> Any:
        if pending.checkpoint_id == max(self._pending):
            self._next_id = pending.checkpoint_id
        return original(self, pending, reason, now_seconds)

    return fail


def _store_while_the_driver_commits(original: Any) -> Any:
    def store_next(self: Any) -> Any:
        committing = [each for each in self._uncommitted.values() if each.waits_for_coordinator]
        for each in committing:
            each.waits_for_coordinator = False
        instructions = original(self)
        for each in committing:
            each.waits_for_coordinator = True
        return instructions

    return store_next


def _finish_when_drained(original: Any) -> Any:
    def on_drained(self: Any, subtask: Any, now_seconds: float) -> Any:
        instructions = original(self, subtask, now_seconds)
        return instructions if self._undrained else [Finish()]

    return on_drained


def _complete_without_the_log(original: Any) -> Any:
    def complete(self: Any, manifest: Any) -> Any:
        completed = self._kept().write_manifest(manifest)
        after, _ = checkpoint_completed(self._record, completed, self._retained_max)
        self._record = replace(after, sequence=self._record.sequence)
        self._log._last = self._record
        return completed

    return complete


def _delete_the_newest(original: Any) -> Any:
    def complete(self: Any, manifest: Any) -> Any:
        completed = original(self, manifest)
        self._kept().delete(completed.checkpoint_id, completed.attempt)
        return completed

    return complete


def _newest_directory(original: Any) -> Any:
    def choose_manifest(self: Any) -> Any:
        store = self._ledger._snapshots._store
        found = sorted(filter(None, map(checkpoint_of, store.list(""))))
        for checkpoint in reversed(found):
            path = metadata_path(*checkpoint)
            if "_metadata" in store.list(path.split("/", maxsplit=1)[0]):
                return decode_manifest(store.read(path)), False
        return None, False

    return choose_manifest


def _from_the_beginning(original: Any) -> Any:
    return lambda self: (None, False)


def _write_all_the_same(original: Any) -> Any:
    def append(self: Any, record: Any) -> Any:
        newest = self._newest()
        self._last = newest
        self._own_attempt, self._fenced = record.attempt, None
        sequence = newest.sequence + 1 if newest else 1
        return original(self, replace(record, sequence=sequence))

    return append


# --- enumerators -----------------------------------------------------------------------------


def _found_by_now(original: Any) -> Any:
    def at_trigger(self: Any, checkpoint_id: Any) -> Any:
        self.on_triggered(checkpoint_id)
        return original(self, checkpoint_id)

    return at_trigger


def _know_no_split(original: Any) -> Any:
    def on_splits(self: Any, splits: Any, is_last: bool) -> None:
        self._known.clear()
        original(self, splits, is_last)

    return on_splits


# --- restore ---------------------------------------------------------------------------------


def _own_state_only(original: Any) -> Any:
    def state_of(operator: Any, subtask: Any, groups: Any, manifest: Any, splits: Any) -> Any:
        state = original(operator, subtask, groups, manifest, splits)
        found = manifest.snapshots_of(operator.uid) if manifest is not None else ()
        own = tuple(k for snapshot in found if snapshot.subtask == subtask for k in snapshot.keyed)
        return replace(state, keyed=own)

    return state_of


def _unverified(original: Any) -> Any:
    def read_verified(self: Any, path: str, length_bytes: int, crc32: int) -> Any:
        import pyarrow as pa

        return pa.py_buffer(self.read(path))

    return read_verified


# --- storage ---------------------------------------------------------------------------------


class _Lazy:
    """Another's files or file, of which what it would wait for is done a little later, or never."""

    def __init__(self, whole: Any, world: Any) -> None:
        self._whole = whole
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def open_new(self, file: str) -> Any:
        return _Lazy(self._whole.open_new(file), self._world)

    def sync(self) -> None:
        self._later(self._whole.sync)

    def flush_directory(self, directory: str) -> None:
        self._later(self._whole.flush_directory, directory)

    def _later(self, action: Any, *arguments: Any) -> None:
        def act() -> None:
            with suppress(OSError, Died):
                action(*arguments)

        if self._world is not None:
            self._world.soon(act, 1.0)


def _durable_later(original: Any) -> Any:
    def write(self: Any, path: str, chunks: Any) -> Any:
        if path.endswith("_metadata"):
            return original(self, path, chunks)
        files = _Lazy(self._files, self._files.world)
        return original(LocalStore(self.address, files), path, chunks)

    return write


def _without_sync(original: Any) -> Any:
    return lambda target, chunks: original(_Lazy(target, None), chunks)


MUTANTS: Mapping[str, Mutant] = {
    "skip-alignment": Mutant(
        "the snapshot is taken at the first barrier",
        BarrierAligner, "on_barrier", _snapshot_at_first_barrier,
    ),
    "snapshot-one-channel-early": Mutant(
        "the last channel's barrier is not waited for",
        BarrierAligner, "_snapshot_if_aligned", _one_channel_early,
    ),
    "do-not-hold": Mutant(
        "channels that delivered their barrier are read on",
        InnerSubtask, "_carry_out", _without(Hold),
    ),
    "do-not-release": Mutant(
        "held channels stay held",
        InnerSubtask, "_carry_out", _without(Release),
    ),
    "release-a-held-channel-twice": Mutant(
        "a second cancellation of a checkpoint releases what is held for a newer one by then",
        BarrierAligner, "on_cancel", _release_again,
    ),
    "drop-the-cancel": Mutant(
        "a task that is told that a checkpoint was given up does nothing",
        InnerSubtask, "on_abort", _nothing,
    ),
    "lose-post-barrier-records": Mutant(
        "records that waited behind the barrier of a checkpoint that fails are dropped with it",
        InnerSubtask, "_abandon", _drop_what_was_held,
    ),
    "do-not-record": Mutant(
        "what a channel delivers before its barrier is not written down",
        InnerSubtask, "_record", _nothing,
    ),
    "forget-what-left-late": Mutant(
        "a barrier overtakes batches at the sender and nobody writes them down",
        EdgeOutput, "overtake", _overtaken_and_forgotten,
    ),
    "forget-channel-state": Mutant(
        "what was under way is not restored",
        assembly, "restored_batches", lambda original: lambda *args: {},
    ),
    "replay-channel-state-last": Mutant(
        "what was under way is processed after what comes anew",
        ReplayingInput, "take", _new_input_first,
    ),
    "restore-rows-of-others": Mutant(
        "after a change of parallelism every subtask gets all records under way",
        restoring, "_own", lambda original: lambda batches, *about: batches,
    ),
    "forget-the-feedback-log": Mutant(
        "what comes back in a cycle before its barrier is not written down",
        InnerSubtask, "_snapshot", _without_recording_feedback,
    ),
    "wait-for-a-barrier-that-has-been": Mutant(
        "a barrier that comes round by another head, before the own inputs have it, is ignored",
        BarrierAligner, "on_barrier", _deaf_to_other_heads,
    ),
    "end-a-cycle-too-early": Mutant(
        "the first lap round a cycle ends it",
        HeadLaps, "on_lap", lambda original: lambda self, *lap: Returned.QUIET,
    ),
    "forget-an-ended-channel": Mutant(
        "the end of a channel that comes while others are held is not remembered",
        InnerSubtask, "_on_marker", _deaf_to_an_end,
    ),
    "forget-an-open-channel": Mutant(
        "the end of one channel is taken for the end of all",
        InnerSubtask, "_on_marker", _end_at_the_first,
    ),
    "finish-again": Mutant(
        "a function that has finished is restored with its state, as if it had not",
        Connecting, "_rows", _keep_what_was_finished,
    ),
    "emit-what-is-not-reserved": Mutant(
        "at most once: records are emitted before their position is durable",
        Reserved, "add", _free_at_once,
    ),
    "tell-the-time-of-the-fastest-split": Mutant(
        "event time at a source is that of its newest record, whichever split it came from",
        SplitTimes, "on_splits", lambda original: lambda self, splits: [],
    ),
    "restore-the-time-of-the-fastest-split": Mutant(
        "a restored source is as far in event time as the furthest of its splits was",
        building, "times_of_splits", _as_far_as_the_furthest,
    ),
    "forget-open-windows": Mutant(
        "a restored job begins its windows anew",
        WindowTables, "restore", _nothing,
    ),
    "restore-the-time-of-the-furthest-subtask": Mutant(
        "a restored operator is as far in event time as the furthest of its subtasks was",
        restore, "_state_of", _as_far_as_the_furthest_subtask,
    ),
    "forget-the-time": Mutant(
        "a restored operator does not know how far event time had come",
        restore, "_state_of", _nobody_knows_the_time,
    ),
    "let-time-go-back": Mutant(
        "the last watermark of a channel counts, also if it is behind the one before",
        EventTime, "on_watermark", _back_in_time,
    ),
    "tell-the-time-before-what-it-closes": Mutant(
        "a watermark goes on ahead of the windows that it closes",
        Chain, "_advance_at", _time_first,
    ),
    "tell-the-time-before-timers-have-fired": Mutant(
        "a watermark goes on ahead of the timers that it makes due",
        Chain, "_tell_if_fired", _told_before_fired,
    ),
    "forget-timers": Mutant(
        "a snapshot of a function has its rows and not its timers",
        FunctionOperator, "restore_timers", _nothing,
    ),
    "fire-a-timer-again": Mutant(
        "a snapshot has the timers that have fired, too",
        timers._Clock, "freeze", _fired_ones_too,
    ),
    "begin-sessions-anew": Mutant(
        "a restored session is closed by itself, whatever more comes of it",
        SessionTable, "restore", _unlinked,
    ),
    "forget-what-has-met": Mutant(
        "rows of a join are restored as if nothing had matched them",
        JoinRows, "restore", _none_matched,
    ),
    "forget-rows-of-a-join": Mutant(
        "a restored join begins with no rows",
        JoinRows, "restore", _nothing,
    ),
    "forget-the-newest": Mutant(
        "a restored job knows no row of the stream whose newest rows it looks up",
        NewestRows, "restore", _nothing,
    ),
    "forget-what-was-seen": Mutant(
        "a restored job knows no record for a duplicate",
        SeenKeys, "restore", _nothing,
    ),
    "restore-one-copy": Mutant(
        "broadcast state is restored in the first subtask only",
        restore, "_state_of", _one_copy,
    ),
    "acknowledge-before-durable": Mutant(
        "a snapshot is acknowledged that was not written",
        state_files, "write_keyed_snapshot", _say_written_before_it_is,
    ),
    "change-a-frozen-snapshot": Mutant(
        "updates reach a snapshot already taken",
        ChangingColumns, "before_change", _nothing,
    ),
    "overtake-an-unfinished-prepare": Mutant(
        "a later snapshot is acknowledged while an earlier epoch is still being prepared",
        Subtask, "on_written", _in_order_of_arrival,
    ),
    "lose-an-aborted-epoch": Mutant(
        "what was prepared for a checkpoint that failed is dropped",
        Subtask, "_take_results", _drop_what_an_aborted_checkpoint_prepared,
    ),
    "take-state-for-unchanged": Mutant(
        "a snapshot refers to an older file although the state has changed",
        AggregateTable, "version", lambda original: 0,
    ),
    "certify-a-dead-attempts-files": Mutant(
        "state files are not named by their attempt: dead and living ones share their names",
        state_files, "state_path", _without_the_attempt,
    ),
    "delete-a-shared-file-too-early": Mutant(
        "dropping a checkpoint deletes every file it refers to",
        Retention, "on_completed", _delete_all_it_refers_to,
    ),
    "commit-before-completion": Mutant(
        "a sink commits what it has prepared at once",
        Writing, "described", _commit_when_prepared,
    ),
    "commit-a-savepoint": Mutant(
        "sinks are told to commit what they prepared for a savepoint",
        Checkpoints, "on_savepoint_stored", _commit_a_savepoint,
    ),
    "hold-for-ever": Mutant(
        "a source that was held for a last checkpoint does not go on when that fails",
        SourceSubtask, "on_abort", _hold_for_ever,
    ),
    "commit-on-abort": Mutant(
        "an aborted checkpoint is committed",
        Subtask, "on_abort", _commit_on_abort,
    ),
    "forget-older-commits": Mutant(
        "a snapshot holds only its own epoch's commits",
        PendingCommits, "on_prepared", _snapshot_only_the_newest,
    ),
    "skip-recommit-in-slots": Mutant(
        "what the restored checkpoint had prepared is not committed by its slots",
        PendingCommits, "__init__", _forget_restored_commits,
    ),
    "skip-recommit-on-the-driver": Mutant(
        "what the restored checkpoint had prepared is not committed by the driver",
        Starter, "_commit_again", _nothing,
    ),
    "scatter-restored-commits": Mutant(
        "the commits of one former subtask are dealt out to several",
        restore, "_state_of", _scattered_commits,
    ),
    "sweep-too-much": Mutant(
        "the sweep takes prepared transactions the restored checkpoint needs",
        DriverSinks, "sweep", _sweep_everything,
    ),
    "complete-with-one-missing": Mutant(
        "the last acknowledgement is not waited for",
        Checkpoints, "on_acknowledged", _one_acknowledgement_is_enough_less,
    ),
    "accept-an-old-attempts-acknowledgement": Mutant(
        "the coordinator listens to slots of attempts that are over",
        control, "refusal", lambda original: lambda *hello: None,
    ),
    "reuse-a-checkpoint-id": Mutant(
        "an aborted checkpoint's number is given to the next",
        Checkpoints, "_fail", _use_the_number_again,
    ),
    "complete-while-the-driver-commits": Mutant(
        "a checkpoint completes while the driver still commits the epoch of the one before",
        Checkpoints, "_store_next", _store_while_the_driver_commits,
    ),
    "finish-without-last-checkpoint": Mutant(
        "the job ends when its records have been processed",
        Checkpoints, "on_drained", _finish_when_drained,
    ),
    "metadata-without-log-entry": Mutant(
        "a checkpoint counts as complete when its metadata is written",
        Ledger, "complete", _complete_without_the_log,
    ),
    "delete-a-checkpoint-too-early": Mutant(
        "retention deletes the newest checkpoint",
        Ledger, "complete", _delete_the_newest,
    ),
    "restore-newest-directory": Mutant(
        "the newest directory is restored instead of the newest completed checkpoint",
        Starter, "_choose_manifest", _newest_directory,
    ),
    "never-restore": Mutant(
        "every attempt starts from the beginning",
        Starter, "_choose_manifest", _from_the_beginning,
    ),
    "ignore-the-fence": Mutant(
        "a driver whose successor is alive writes its log entries all the same",
        JobLog, "append", _write_all_the_same,
    ),
    "restore-own-state-only": Mutant(
        "after a change of parallelism each subtask reads what its namesake wrote",
        restore, "_state_of", _own_state_only,
    ),
    "restore-all-key-groups": Mutant(
        "every subtask restores every key group",
        building, "key_group_range",
        lambda original: lambda subtask, parallelism, groups: range(groups),
    ),
    "lose-a-split": Mutant(
        "one split is dealt to nobody",
        restore, "_dealt",
        lambda original: lambda items, *to: original(items[1:], *to),
    ),
    "deal-a-split-twice": Mutant(
        "the first subtask gets every split, the others their own too",
        restore, "_dealt",
        lambda original: lambda items, subtask, parallelism: tuple(items)
        if subtask == 0
        else original(items, subtask, parallelism),
    ),
    "lose-a-split-assigned-around-a-barrier": Mutant(
        "a checkpoint keeps what the enumerator has found when it is stored, not when triggered",
        Enumerators, "at_trigger", _found_by_now,
    ),
    "assign-a-split-twice": Mutant(
        "an assignment that comes twice is not recognised",
        Reading, "on_splits", _know_no_split,
    ),
    "forget-what-was-discovered": Mutant(
        "a restored job opens its enumerators without their state",
        enumerators, "restored_enumerator",
        lambda original: lambda restored, uid: original(None, uid),
    ),
    "keep-the-metadata-to-yourself": Mutant(
        "slots are sent a start that refers to state in the metadata, and not that state",
        attempt, "in_pieces",
        lambda original: lambda start: list(original(start))[-1:],
    ),
    "ignore-checksums": Mutant(
        "a damaged file is restored from",
        LocalStore, "read_verified", _unverified,
    ),
    "metadata-before-files": Mutant(
        "a state file counts as written while the disk is still at it",
        LocalStore, "write", _durable_later,
    ),
    "skip-the-sync": Mutant(
        "a file gets its name before the disk has its bytes",
        local, "_write_through", _without_sync,
    ),
    "forget-to-flush-the-directory": Mutant(
        "a file gets its name and the disk may not know it",
        LocalStore, "_flush_name", _nothing,
    ),
    "let-deletions-come-back": Mutant(
        "the job is called finished while what its last sweep deleted may come back",
        Ledger, "settle", _nothing,
    ),
    "trust-a-directory-that-is-there": Mutant(
        "the name of a directory is flushed only by those who make it, who may die before",
        LocalStore, "_flush_found", _nothing,
    ),
}  # fmt: skip
