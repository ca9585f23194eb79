"""Mistakes with other systems: in marks, fences, receipts and staged files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from stillframe.connectors import transactional
from stillframe.connectors.transactional import TransactionalCommitter
from stillframe.coordinator import ledger
from stillframe.ids import CheckpointId, Mark
from stillframe.protocol.checkpoints import Checkpoints
from stillframe.protocol.commits import PendingCommits
from stillframe.protocol.outside import Part
from stillframe.storage.staging import StagedFiles
from stillframe.testing.simulation.marked import MarkedOutside, MarkedTarget
from stillframe.testing.simulation.mutants.mutant import Mutant, nothing

# --- what a mark is ---

_PARTS_MAX = 1000


def _number(epoch: int, place: int) -> CheckpointId:
    """One epoch may hold what was prepared for several checkpoints."""
    return CheckpointId((epoch + 1) * _PARTS_MAX + place)


def _marked_by_epoch(original: Any) -> Any:
    right: dict[Mark, CheckpointId] = {}

    def commit(self: Any, epoch: Any, prepared: Any) -> None:
        marked = [
            replace(part, mark=Mark(part.mark.writer, _number(epoch, place)))
            for place, part in enumerate(prepared)
        ]
        for part, wrong in zip(prepared, marked, strict=True):
            right[wrong.mark] = part.mark.checkpoint_id
        self._outside.prepared_for = right.__getitem__
        original(self, epoch, marked)

    return commit


def _own_identity(original: Any) -> Any:
    def init(self: Any, restored: Any = (), *, writer: Any = None, **how: Any) -> None:
        mine = [replace(each, writer=writer) for each in restored]
        original(self, mine, writer=writer, **how)

    return init


def _always_the_same(original: Any) -> Any:
    def attempt_started(*what: Any, incarnation: str, **how: Any) -> Any:
        return original(*what, incarnation="the same", **how)

    return attempt_started


def _by_any_mark(original: Any) -> Any:
    def decide(prepared_for: Any, newest_mark: Any, **found: bool) -> Any:
        return Part.DONE if newest_mark is not None else original(prepared_for, None, **found)

    return decide


def _by_its_own_mark(original: Any) -> Any:
    def decide(prepared_for: Any, newest_mark: Any, **found: bool) -> Any:
        own = newest_mark if newest_mark == prepared_for else None
        return original(prepared_for, own, **found)

    return decide


# --- the order of things ---


def _look_first(original: Any) -> Any:
    def begin(self: Any, writer: Any) -> Any:
        self._outside.check_there(writer)
        newest = self._outside.newest_mark(writer)
        self._began = self._outside.shut_out(writer)
        self._outside.perhaps_break()
        return newest

    return begin


def _look_only(original: Any) -> Any:
    def begin(self: Any, writer: Any) -> Any:
        self._outside.check_there(writer)
        self._began = self._outside._began.setdefault(writer, 1)
        return self._outside.newest_mark(writer)

    return begin


def _mark_apart(original: Any) -> Any:
    def put_mark(self: Any, mark: Any) -> None:
        self.perhaps_break()
        original(self, mark)

    return put_mark


def _delete_what_is_read(original: Any) -> Any:
    def rows(self: Any, part: Any) -> Iterator[Any]:
        batches = list(original(self, part))
        self._delete(transactional.part_names(part.committables))
        yield from batches

    return rows


def _note_first(original: Any) -> Any:
    def brought_about(self: Any, part: Any, *found: bool) -> Any:
        self._staging.note(str(part.committables[0]["receipt"]))
        return original(self, part, *found)

    return brought_about


def _without_restored(original: Any) -> Any:
    def init(self: Any, *what: Any) -> None:
        original(self, *what[:6])

    return init


OUTSIDE_MUTANTS: Mapping[str, Mutant] = {
    "mark-with-the-epoch": Mutant(
        "output is marked with its epoch, which comes again when an older checkpoint is restored",
        TransactionalCommitter, "commit", _marked_by_epoch,
    ),
    "mark-by-who-commits": Mutant(
        "what a former subtask has prepared is marked as the work of the one that commits it",
        PendingCommits, "__init__", _own_identity,
    ),
    "be-the-same-job-for-ever": Mutant(
        "a job that begins without a log has the incarnation of the one before",
        ledger, "attempt_started", _always_the_same,
    ),
    "take-any-mark-for-done": Mutant(
        "a mark of an earlier checkpoint is taken to say that this one is done",
        transactional, "decide", _by_any_mark,
    ),
    "look-for-one's-own-mark-only": Mutant(
        "a mark of a later checkpoint is not taken to say that this one is done",
        transactional, "decide", _by_its_own_mark,
    ),
    "look-before-shutting-out": Mutant(
        "the mark is read before other committers are shut out",
        MarkedTarget, "begin", _look_first,
    ),
    "shut-nobody-out": Mutant(
        "whoever committed before is not shut out",
        MarkedTarget, "begin", _look_only,
    ),
    "mark-apart-from-the-rows": Mutant(
        "the mark is written after the transaction that has the rows",
        MarkedOutside, "put_mark", _mark_apart,
    ),
    "note-no-receipt": Mutant(
        "nothing but the mark says that output was committed",
        StagedFiles, "note", nothing,
    ),
    "note-a-receipt-first": Mutant(
        "the receipt is noted before the transaction",
        TransactionalCommitter, "_brought_about", _note_first,
    ),
    "delete-staged-files-first": Mutant(
        "staged files are deleted when they have been read, before the transaction is done",
        TransactionalCommitter, "_rows", _delete_what_is_read,
    ),
    "do-not-wait-for-what-was-restored": Mutant(
        "a checkpoint completes before what was restored is committed everywhere",
        Checkpoints, "__init__", _without_restored,
    ),
}  # fmt: skip
