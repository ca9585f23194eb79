"""Mistakes in what `protocol/` decides: alignment, checkpoints, commits, event time, restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stillframe.protocol import restore
from stillframe.protocol.alignment import BarrierAligner, Release, TakeSnapshot
from stillframe.protocol.checkpoints import AnnounceComplete, Checkpoints, Finish
from stillframe.protocol.commits import PendingCommits
from stillframe.protocol.event_time import EventTime
from stillframe.protocol.laps import HeadLaps, Returned
from stillframe.protocol.retention import Retention
from stillframe.protocol.split_times import SplitTimes
from stillframe.testing.simulation.mutants.mutant import Mutant

# --- alignment ---


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


def _release_again(original: Any) -> Any:
    def on_cancel(self: Any, checkpoint_id: Any) -> Any:
        held = frozenset(self._held_channels)
        is_second = checkpoint_id <= self._last_closed
        return [*original(self, checkpoint_id), *([Release(held)] if is_second else [])]

    return on_cancel


def _deaf_to_other_heads(original: Any) -> Any:
    def on_barrier(self: Any, channel: Any, checkpoint_id: Any, overtakes: bool = False) -> Any:
        if channel in self._feedback:
            return self._recordings.on_barrier(channel, checkpoint_id)
        return original(self, channel, checkpoint_id, overtakes)

    return on_barrier


# --- event time ---


def _back_in_time(original: Any) -> Any:
    def on_watermark(self: Any, channel: Any, time_us: int) -> Any:
        self._channels[channel], self._time_us = time_us, None
        self.on_active(channel)
        return self._advanced()

    return on_watermark


# --- checkpoints ---


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


def _delete_all_it_refers_to(original: Any) -> Any:
    def on_completed(self: Any, checkpoint_id: Any, files: Any, dropped: Any) -> Any:
        gone = [self._retained.get(each) or () for each in dropped]
        return original(self, checkpoint_id, files, dropped).union(*gone)

    return on_completed


# --- commits ---


def _commit_a_savepoint(original: Any) -> Any:
    def on_savepoint_stored(self: Any, checkpoint_id: Any, now_seconds: float) -> Any:
        instructions = original(self, checkpoint_id, now_seconds)
        return [AnnounceComplete(checkpoint_id), *instructions]

    return on_savepoint_stored


def _go_on_after_the_last_word(original: Any) -> Any:
    def on_savepoint_stored(self: Any, checkpoint_id: Any, now_seconds: float) -> Any:
        self._pending[checkpoint_id].savepoint = "go on"
        self._has_last_completed = False
        return original(self, checkpoint_id, now_seconds)

    return on_savepoint_stored


def _go_on_behind_a_late_last_word(original: Any) -> Any:
    def on_savepoint_stored(self: Any, checkpoint_id: Any, now_seconds: float) -> Any:
        instructions = original(self, checkpoint_id, now_seconds)
        return [] if self._is_over else instructions

    return on_savepoint_stored


def _snapshot_only_the_newest(original: Any) -> Any:
    def on_prepared(self: Any, checkpoint_id: Any, committables: Any) -> Any:
        held = original(self, checkpoint_id, committables)
        return tuple(kept for kept in held if kept.checkpoint_id == checkpoint_id)

    return on_prepared


def _remember_for_its_own_checkpoint_only(original: Any) -> Any:
    def on_committed(self: Any, checkpoint_id: Any) -> None:
        newest, self._newest_held = self._newest_held, checkpoint_id
        original(self, checkpoint_id)
        self._newest_held = newest

    return on_committed


def _forget_restored_commits(original: Any) -> Any:
    def init(self: Any, restored: Any = (), **settings: Any) -> None:
        original(self, (), **settings)

    return init


# --- restore ---


def _own_state_only(original: Any) -> Any:
    def state_of(operator: Any, subtask: Any, groups: Any, manifest: Any, splits: Any) -> Any:
        state = original(operator, subtask, groups, manifest, splits)
        found = manifest.snapshots_of(operator.uid) if manifest is not None else ()
        own = tuple(k for snapshot in found if snapshot.subtask == subtask for k in snapshot.keyed)
        return replace(state, keyed=own)

    return state_of


def _one_copy(original: Any) -> Any:
    def state_of(operator: Any, subtask: Any, groups: Any, manifest: Any, splits: Any) -> Any:
        state = original(operator, subtask, groups, manifest, splits)
        return replace(state, broadcast=()) if subtask else state

    return state_of


def _scattered_commits(original: Any) -> Any:
    def state_of(operator: Any, subtask: Any, groups: Any, manifest: Any, splits: Any) -> Any:
        state = original(operator, subtask, groups, manifest, splits)
        found = manifest.snapshots_of(operator.uid) if manifest is not None else ()
        commits = [commit for snapshot in found for commit in snapshot.commits]
        return replace(state, commits=tuple(commits[subtask :: operator.parallelism]))

    return state_of


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


PROTOCOL_MUTANTS: Mapping[str, Mutant] = {
    "skip-alignment": Mutant(
        "the snapshot is taken at the first barrier",
        BarrierAligner, "on_barrier", _snapshot_at_first_barrier,
    ),
    "snapshot-one-channel-early": Mutant(
        "the last channel's barrier is not waited for",
        BarrierAligner, "_snapshot_if_aligned", _one_channel_early,
    ),
    "release-a-held-channel-twice": Mutant(
        "a second cancellation of a checkpoint releases what is held for a newer one by then",
        BarrierAligner, "on_cancel", _release_again,
    ),
    "wait-for-a-barrier-that-has-been": Mutant(
        "a barrier that comes round by another head, before the own inputs have it, is ignored",
        BarrierAligner, "on_barrier", _deaf_to_other_heads,
    ),
    "end-a-cycle-too-early": Mutant(
        "the first lap round a cycle ends it",
        HeadLaps, "on_lap", lambda original: lambda self, *lap: Returned.QUIET,
    ),
    "tell-the-time-of-the-fastest-split": Mutant(
        "event time at a source is that of its newest record, whichever split it came from",
        SplitTimes, "on_splits", lambda original: lambda self, splits: [],
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
    "restore-one-copy": Mutant(
        "broadcast state is restored in the first subtask only",
        restore, "_state_of", _one_copy,
    ),
    "delete-a-shared-file-too-early": Mutant(
        "dropping a checkpoint deletes every file it refers to",
        Retention, "on_completed", _delete_all_it_refers_to,
    ),
    "commit-a-savepoint": Mutant(
        "sinks are told to commit what they prepared for a savepoint",
        Checkpoints, "on_savepoint_stored", _commit_a_savepoint,
    ),
    "commit-once-more-after-the-last-word": Mutant(
        "a job that stops with a savepoint takes one more checkpoint when the savepoint exists",
        Checkpoints, "on_savepoint_stored", _go_on_after_the_last_word,
    ),
    "go-on-behind-a-late-last-word": Mutant(
        "an attempt that broke is restarted behind the savepoint with which the job stopped",
        Checkpoints, "on_savepoint_stored", _go_on_behind_a_late_last_word,
    ),
    "say-the-last-word-too-early": Mutant(
        "the savepoint with which a job stops exists before what it holds is committed",
        Checkpoints, "_is_all_committed", lambda original: property(lambda self: True),
    ),
    "forget-older-commits": Mutant(
        "a snapshot holds only its own epoch's commits",
        PendingCommits, "on_prepared", _snapshot_only_the_newest,
    ),
    "forget-a-commit-that-a-snapshot-holds": Mutant(
        "what was committed is forgotten although a checkpoint that is complete asks for it",
        PendingCommits, "on_committed", _remember_for_its_own_checkpoint_only,
    ),
    "skip-recommit-in-slots": Mutant(
        "what the restored checkpoint had prepared is not committed by its slots",
        PendingCommits, "__init__", _forget_restored_commits,
    ),
    "scatter-restored-commits": Mutant(
        "the commits of one former subtask are dealt out to several",
        restore, "_state_of", _scattered_commits,
    ),
    "complete-with-one-missing": Mutant(
        "the last acknowledgement is not waited for",
        Checkpoints, "on_acknowledged", _one_acknowledgement_is_enough_less,
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
    "restore-own-state-only": Mutant(
        "after a change of parallelism each subtask reads what its namesake wrote",
        restore, "_state_of", _own_state_only,
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
}  # fmt: skip
