"""Whether a job fits the snapshot it is to begin with: every reason why not, all at once.

Theory of operation
-------------------
What a person has to mend is best told in one go, and before anything runs: no attempt begins, no
slot is started and no other driver is ended for a job that cannot go on. What follows from the
snapshot's metadata and the job's plan is decided here. How the columns of a state must look only
those know who keep it; their findings are handed in and become part of the same answer.

Rules of this file
------------------
1. Pure: the shape of the job and a manifest in, mismatches out.
2. A mismatch is one line: what the snapshot has, what the job has, and what to do.
3. What may be left out (`allowNonRestoredState`) has been taken out of the manifest before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stillframe.ids import OperatorUid
from stillframe.json_values import JsonObject
from stillframe.protocol.manifests import Manifest, OperatorDescription
from stillframe.protocol.restore import EdgeDescription
from stillframe.protocol.savepoints import operators_gone

_MADE_BY_HAND = "savepoint"
"""The kind of an operator of which only state is known, as a savepoint made of tables has it."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One reason why a job cannot begin with a snapshot."""

    what: str
    remedy: str
    operator: OperatorUid | None = None
    """The one it is about; None: the job as a whole."""

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"

    def to_json(self) -> JsonObject:
        return {"operator": self.operator, "what": self.what, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class JobShape:
    """A job, as far as a snapshot must fit it."""

    operators: Sequence[OperatorDescription]
    edges: Sequence[EdgeDescription]
    max_parallelism: int
    enumerated: Collection[OperatorUid]
    """Sources that look for more splits while the job runs."""


def mismatches(
    job: JobShape, manifest: Manifest, of_states: Sequence[Mismatch] = ()
) -> tuple[Mismatch, ...]:
    """Why the job cannot begin with this snapshot; none if it can.

    `of_states`: what those found who know how states are kept.
    """
    return (
        *_of_key_groups(job, manifest),
        *_of_operators_gone(job, manifest),
        *_of_kinds(job, manifest),
        *of_states,
        *_of_enumerators(job, manifest),
        *_of_channels(job, manifest),
    )


def in_words(manifest: Manifest, found: Sequence[Mismatch]) -> str:
    """One sentence, or one line for each of several."""
    assert found
    if len(found) == 1:
        return f"{manifest.title} does not fit this job: {found[0]}"
    lines = "".join(f"\n- {each}" for each in found)
    return f"{manifest.title} does not fit this job, for {len(found)} reasons:{lines}"


def _of_key_groups(job: JobShape, manifest: Manifest) -> list[Mismatch]:
    if manifest.max_parallelism == job.max_parallelism:
        return []
    return [
        Mismatch(
            f"it has {manifest.max_parallelism} key groups and the job {job.max_parallelism}",
            f"set maxParallelism to {manifest.max_parallelism}, it cannot change",
        )
    ]


def _of_operators_gone(job: JobShape, manifest: Manifest) -> list[Mismatch]:
    present = {operator.uid for operator in job.operators}
    return [
        Mismatch(
            f"it holds state of {gone.name!r} ({gone.uid}), which the job does not have",
            "give an operator this uid, or set allowNonRestoredState to leave its state out",
            gone.uid,
        )
        for gone in operators_gone(manifest, present)
    ]


def _of_kinds(job: JobShape, manifest: Manifest) -> list[Mismatch]:
    """The same uid for something else: its state would mean nothing to it."""
    now = {operator.uid: operator for operator in job.operators}
    holding = {
        snapshot.uid for snapshot in manifest.snapshots if snapshot.items or any(snapshot.files())
    }
    return [
        Mismatch(
            f"operator {old.uid} is {_with_article(old.kind)} in it and"
            f" {_with_article(now[old.uid].kind)} in the job",
            "give the new operator another uid",
            old.uid,
        )
        for old in manifest.operators
        if old.uid in now
        and old.uid in holding
        and old.kind not in (now[old.uid].kind, _MADE_BY_HAND)
    ]


def _with_article(kind: str) -> str:
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}"


def _of_enumerators(job: JobShape, manifest: Manifest) -> list[Mismatch]:
    """Without its enumerator a source would end with the splits that were found until then."""
    present = {operator.uid for operator in job.operators}
    return [
        Mismatch(
            f"it was looking for more splits of source {uid}, which now has none to look for",
            "let it follow its path (followInterval) as before, or begin anew (fresh)",
            uid,
        )
        for uid in sorted(manifest.enumerators.keys() - set(job.enumerated))
        if uid in present or not _holds(manifest, uid)
    ]


def _holds(manifest: Manifest, uid: OperatorUid) -> bool:
    """Then that the operator is gone has been said."""
    return any(each.items or any(each.files()) for each in manifest.snapshots_of(uid))


def _of_channels(job: JobShape, manifest: Manifest) -> list[Mismatch]:
    return [
        Mismatch(
            f"it holds records under way from one operator to another ({edge}) that the job does"
            " not connect",
            "give operators the uids they had, or restore a checkpoint that was not unaligned",
        )
        for edge in edges_lost(job.edges, manifest)
    ]


def edges_lost(edges: Sequence[EdgeDescription], manifest: Manifest) -> list[str]:
    """Channels with records under way for which there is no place."""
    return sorted({state.edge for state in manifest.channels} - {edge.name for edge in edges})
