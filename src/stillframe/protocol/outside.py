"""Exactly-once in another system: what a committer does about one prepared part.

Theory of operation
-------------------
An epoch is staged with the checkpoint, as files of the job's own. When the checkpoint is complete,
one transaction of the other system writes the rows together with a mark: who prepared them, and for
which checkpoint. Nothing is open there between barriers, so no timeout of it can lose anything. A
commit that is repeated, by anybody, finds the mark.

The other system may forget its marks: they expire, or somebody empties a table. So a receipt is
noted beside the staged files when the transaction is done, and kept until no checkpoint holds the
part any more. The receipt is the memory, the mark is what makes the moment between the transaction
and the receipt safe.

A system whose marks expire by themselves may forget one too early: a job that died in that moment
and is started again a week later would write the part twice. There a writer's mark is made before
its first rows, and noted. If it was noted and is missing, nobody knows whether a part was written
that somebody may have tried before.

Rules of this file
------------------
1. A mark is looked for only after every older committer of the same writer is shut out: one that
   was overtaken may be in the middle of the same transaction.
2. A writer's parts are committed in the order of their checkpoints, so a mark of a later checkpoint
   speaks for all before it. Checkpoint ids are never used twice; epochs are, and say nothing here.
3. A mark of another incarnation is another job's. It is told and never compared: a writer carries
   its own.
4. What is neither noted nor staged is lost, and is told: nobody guesses that it was committed.
5. What may have been written, and whose mark is missed, is in doubt: it is neither written nor
   taken for done until a person has looked. A part that this attempt has prepared and not tried yet
   was written by nobody, whatever became of the marks.
"""

from __future__ import annotations

from enum import Enum

from stillframe.ids import CheckpointId


class Part(Enum):
    """What becomes of a prepared part."""

    DONE = "it was committed before"
    TO_WRITE = "it is written now"
    IN_DOUBT = "it may have been committed, and the mark that would tell is gone"
    LOST = "it was never committed, as far as anybody knows, and is gone"


def decide(
    prepared_for: CheckpointId,
    newest_mark: CheckpointId | None,
    *,
    has_receipt: bool,
    is_staged: bool,
    had_mark: bool = False,
    may_be_tried: bool = True,
) -> Part:
    """What to do, by what was found after the other committers were shut out.

    `had_mark`: the writer is known to have had one. `may_be_tried`: somebody may have tried before
    to write this part.
    """
    if has_receipt or (newest_mark is not None and newest_mark >= prepared_for):
        return Part.DONE
    if is_staged and newest_mark is None and had_mark and may_be_tried:
        return Part.IN_DOUBT
    return Part.TO_WRITE if is_staged else Part.LOST


RETRY_SECONDS_FIRST = 0.2
RETRY_SECONDS_MAX = 10.0


def retry_after_seconds(failures: int) -> float:
    """How long to wait for a system that could not be reached this many times in a row."""
    return min(RETRY_SECONDS_FIRST * 2.0 ** (failures - 1), RETRY_SECONDS_MAX)
