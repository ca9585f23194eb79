"""Mistakes in a slot: in what its tasks hold, record, pass on, write down and take up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stillframe.api.sinks import Prepared
from stillframe.ids import Attempt, Epoch, Mark, Writer
from stillframe.protocol.alignment import Hold, Release
from stillframe.runtime import assembly, building, restoring, state_files
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import ReplayingInput
from stillframe.runtime.connecting import Connecting
from stillframe.runtime.elements import EndOfRecords
from stillframe.runtime.inner_task import InnerSubtask
from stillframe.runtime.keyed_functions import FunctionOperator
from stillframe.runtime.outputs import EdgeOutput
from stillframe.runtime.source_operator import Reading
from stillframe.runtime.source_task import Reserved, SourceSubtask
from stillframe.runtime.task import Subtask
from stillframe.runtime.watermarking import Watermarking
from stillframe.runtime.writing import Writing
from stillframe.testing.simulation.mutants.mutant import Breaking, Mutant, nothing

# --- alignment ---


def _without(kind: type) -> Breaking:
    def breaking(original: Any) -> Any:
        def carry_out(self: Any, instructions: Sequence[Any], overtaken: Any = None) -> None:
            original(self, [each for each in instructions if not isinstance(each, kind)], overtaken)

        return carry_out

    return breaking


def _drop_what_was_held(original: Any) -> Any:
    def abandon(self: Any, checkpoint_id: Any) -> None:
        for index in self._inputs.held:
            channel = self._inputs.channels[index]
            while not channel.is_empty() and not channel.waiting_barriers():
                if isinstance(channel.take(), EndOfRecords):
                    self._unended.discard(index)
        original(self, checkpoint_id)

    return abandon


# --- records under way ---


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


# --- ends ---


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


def _hold_for_ever(original: Any) -> Any:
    def on_abort(self: Any, checkpoint_id: Any) -> None:
        held_by = self._held_by
        original(self, checkpoint_id)
        self._held_by = held_by

    return on_abort


def _move_though_held(original: Any) -> Any:
    def step(self: Any) -> Any:
        held_by, self._held_by = self._held_by, None
        try:
            return original(self)
        finally:
            self._held_by = self._held_by or held_by

    return step


# --- splits ---


def _know_no_split(original: Any) -> Any:
    def on_splits(self: Any, splits: Any, is_last: bool, stops: bool = False) -> None:
        self._known.clear()
        original(self, splits, is_last, stops)

    return on_splits


def _tell_where_it_is_now(original: Any) -> Any:
    def completed(self: Any, checkpoint_id: Any) -> None:
        self._in_checkpoints[checkpoint_id] = self._reader.splits()
        original(self, checkpoint_id)

    return completed


def _tell_at_the_barrier(original: Any) -> Any:
    def snapshot(self: Any, checkpoint_id: Any, savepoint: Any = None) -> Any:
        self._reader.on_checkpoint_complete(checkpoint_id, self._reader.splits())
        return original(self, checkpoint_id, savepoint)

    return snapshot


def _take_a_stop_for_the_end(original: Any) -> Any:
    return lambda self, order: original(self, replace(order, stops=False))


def _free_at_once(original: Any) -> Any:
    def add(self: Any, batch: Any) -> None:
        original(self, batch)
        self._free.append(self._waiting.pop()[1])

    return add


# --- event time ---


def _as_far_as_the_furthest(original: Any) -> Any:
    def times_of_splits(items: Any, uid: Any) -> Any:
        times = original(items, uid)
        return {str(item["id"]): max(times.values()) for item in items} if times else {}

    return times_of_splits


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


# --- snapshots ---


def _say_written_before_it_is(original: Any) -> Any:
    class Nowhere:
        def write(self, path: str, chunks: Any) -> Any:
            from stillframe.storage.store import Written

            return Written(len(b"".join(bytes(chunk) for chunk in chunks)), 0)

    return lambda store, path, frozen: original(Nowhere(), path, frozen)


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


# --- commits ---


def _commit_when_prepared(original: Any) -> Any:
    def described(self: Any, checkpoint_id: Any, written: Any) -> Any:
        if self.commits_here:
            mark = Mark(Writer("", self.uid, None), checkpoint_id)
            self.committer.commit(Epoch(0), [Prepared(mark, tuple(written))])
        return original(self, checkpoint_id, written)

    return described


def _commit_on_abort(original: Any) -> Any:
    def on_abort(self: Any, checkpoint_id: Any) -> None:
        original(self, checkpoint_id)
        self.on_complete(checkpoint_id, Epoch(0))

    return on_abort


RUNTIME_MUTANTS: Mapping[str, Mutant] = {
    "do-not-hold": Mutant(
        "channels that delivered their barrier are read on",
        InnerSubtask, "_carry_out", _without(Hold),
    ),
    "do-not-release": Mutant(
        "held channels stay held",
        InnerSubtask, "_carry_out", _without(Release),
    ),
    "drop-the-cancel": Mutant(
        "a task that is told that a checkpoint was given up does nothing",
        InnerSubtask, "on_abort", nothing,
    ),
    "lose-post-barrier-records": Mutant(
        "records that waited behind the barrier of a checkpoint that fails are dropped with it",
        InnerSubtask, "_abandon", _drop_what_was_held,
    ),
    "do-not-record": Mutant(
        "what a channel delivers before its barrier is not written down",
        InnerSubtask, "_record", nothing,
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
    "restore-the-time-of-the-fastest-split": Mutant(
        "a restored source is as far in event time as the furthest of its splits was",
        building, "times_of_splits", _as_far_as_the_furthest,
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
        FunctionOperator, "restore_timers", nothing,
    ),
    "acknowledge-before-durable": Mutant(
        "a snapshot is acknowledged that was not written",
        state_files, "write_keyed_snapshot", _say_written_before_it_is,
    ),
    "overtake-an-unfinished-prepare": Mutant(
        "a later snapshot is acknowledged while an earlier epoch is still being prepared",
        Subtask, "on_written", _in_order_of_arrival,
    ),
    "lose-an-aborted-epoch": Mutant(
        "what was prepared for a checkpoint that failed is dropped",
        Subtask, "_take_results", _drop_what_an_aborted_checkpoint_prepared,
    ),
    "certify-a-dead-attempts-files": Mutant(
        "state files are not named by their attempt: dead and living ones share their names",
        state_files, "state_path", _without_the_attempt,
    ),
    "commit-before-completion": Mutant(
        "a sink commits what it has prepared at once",
        Writing, "described", _commit_when_prepared,
    ),
    "move-behind-the-last-word": Mutant(
        "a job that stops with a savepoint holds its sources only, and its last checkpoint commits"
        " what timers and windows say behind the savepoint's barrier",
        InnerSubtask, "step", _move_though_held,
    ),
    "hold-for-ever": Mutant(
        "a source that was held for a last checkpoint does not go on when that fails",
        SourceSubtask, "on_abort", _hold_for_ever,
    ),
    "commit-on-abort": Mutant(
        "an aborted checkpoint is committed",
        Subtask, "on_abort", _commit_on_abort,
    ),
    "restore-all-key-groups": Mutant(
        "every subtask restores every key group",
        building, "key_group_range",
        lambda original: lambda subtask, parallelism, groups: range(groups),
    ),
    "finish-at-what-was-there": Mutant(
        "a job that stops at what was there, and is to go on from it, finishes",
        SourceSubtask, "on_splits", _take_a_stop_for_the_end,
    ),
    "assign-a-split-twice": Mutant(
        "an assignment that comes twice is not recognised",
        Reading, "on_splits", _know_no_split,
    ),
    "let-go-what-was-read-since": Mutant(
        "a source is told of a completed checkpoint with where it is now",
        Reading, "completed", _tell_where_it_is_now,
    ),
    "let-go-at-the-barrier": Mutant(
        "a source is told of a checkpoint that is not complete yet",
        Reading, "snapshot", _tell_at_the_barrier,
    ),
}  # fmt: skip
