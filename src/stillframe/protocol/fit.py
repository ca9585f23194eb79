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
3. What a sink has prepared and not committed is never left out: a person who does not want it
   names it, and it has been taken out of the manifest before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stillframe.ids import Epoch, OperatorUid
from stillframe.json_values import JsonObject
from stillframe.protocol.manifests import Manifest, OperatorDescription
from stillframe.protocol.matching import Unmatched, matched
from stillframe.protocol.restore import EdgeDescription
from stillframe.protocol.savepoints import (
    PreparedOutput,
    keeps_something,
    prepared_output,
    with_uids,
    without_operators,
)

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
class Evolves:
    """A state that the job goes on with, in other columns than the snapshot has."""

    operator: OperatorUid
    what: str
    """Which columns begin and which are left behind."""

    def __str__(self) -> str:
        return f"operator {self.operator} goes on with other columns than before: {self.what}"

    def to_json(self) -> JsonObject:
        return {"operator": self.operator, "what": self.what}


StateFinding: TypeAlias = Mismatch | Evolves
"""What those say of a state who know how states are kept."""


@dataclass(frozen=True, slots=True)
class JobShape:
    """A job, as far as a snapshot must fit it."""

    operators: Sequence[OperatorDescription]
    edges: Sequence[EdgeDescription]
    max_parallelism: int
    enumerated: Collection[OperatorUid]
    """Sources that look for more splits while the job runs."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What a snapshot holds of an operator that the job does not have."""

    operator: OperatorDescription
    candidates: tuple[OperatorDescription, ...]
    """Those of the job that it might belong to."""
    prepared: PreparedOutput | None
    """Output that nobody would commit any more; None: it is state."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A snapshot in the words of a job."""

    manifest: Manifest
    """By the job's uids, without what is lost."""
    former: Mapping[OperatorUid, OperatorUid]
    """By uids of the job: those that the snapshot had, where they differ."""
    lost: tuple[Lost, ...]


def fitted(
    job: JobShape, manifest: Manifest, committed: Mapping[OperatorUid, Epoch] | None = None
) -> Fitted:
    """What each operator of the job has in the snapshot, and what none has.

    `committed`: the newest epoch that each sink is known to have committed.
    """
    matching = matched(manifest.operators, job.operators)
    prepared = {each.uid: each for each in prepared_output(manifest, committed or {})}
    lost = tuple(
        Lost(each.operator, each.candidates, prepared.get(each.operator.uid))
        for each in matching.unmatched
        if _would_lose(manifest, each, prepared)
    )
    # First: the uid of what is lost may be another operator's in the job.
    rest = without_operators(manifest, {each.operator.uid for each in lost})
    return Fitted(
        with_uids(rest, matching.pairs),
        {now: before for before, now in matching.pairs.items() if now != before},
        lost,
    )


def _would_lose(
    manifest: Manifest, unmatched: Unmatched, prepared: Mapping[OperatorUid, PreparedOutput]
) -> bool:
    uid = unmatched.operator.uid
    if uid in prepared or keeps_something(manifest, uid):
        return True
    # How far it had come is kept with the splits. Without it event time starts again, which matters
    # only to one that might go on with it.
    knows_time = any(each.watermark_us is not None for each in manifest.snapshots_of(uid))
    return knows_time and bool(unmatched.candidates)


def left_out(lost: Sequence[Lost], *, allows_state: bool) -> tuple[Lost, ...]:
    """What may be left behind because a person allows it for state: never what was prepared."""
    return tuple(each for each in lost if allows_state and each.prepared is None)


def mismatches(
    job: JobShape,
    fit: Fitted,
    of_states: Sequence[StateFinding] = (),
    *,
    allows_state_lost: bool = False,
) -> tuple[Mismatch, ...]:
    """Why the job cannot begin with this snapshot; none if it can.

    `of_states`: what those found who know how states are kept.
    """
    manifest = fit.manifest
    gone = left_out(fit.lost, allows_state=allows_state_lost)
    return (
        *_of_key_groups(job, manifest),
        *(_of_lost(each) for each in fit.lost if each not in gone),
        *_of_kinds(job, manifest),
        *(each for each in of_states if isinstance(each, Mismatch)),
        *_of_enumerators(job, manifest),
        *_of_channels(job, manifest),
        *_of_records_under_way(manifest, evolving(of_states)),
    )


def evolving(of_states: Sequence[StateFinding]) -> list[Evolves]:
    """What is said when the job starts."""
    return [each for each in of_states if isinstance(each, Evolves)]


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


def _of_lost(lost: Lost) -> Mismatch:
    operator, uid = lost.operator, lost.operator.uid
    line = f'.uid("{uid}")'
    might = ", ".join(f"{each.name!r} ({each.uid})" for each in lost.candidates)
    if lost.prepared is not None:
        which = f"the job has no such sink, but {might}" if might else "the job has no such sink"
        return Mismatch(
            f"it holds {lost.prepared} has prepared and not committed, and {which}",
            f"add {line} to the writeStream that is to write them",
            uid,
        )
    if might:
        return Mismatch(
            f"it holds state of {operator.name!r} ({uid}), which could belong to {might}",
            f"add {line} to the one it belongs to, or set allowNonRestoredState to leave its state"
            " out",
            uid,
        )
    return Mismatch(
        f"it holds state of {operator.name!r} ({uid}), which the job does not have",
        f"add {line} to the operator it belongs to, or set allowNonRestoredState to leave its"
        " state out",
        uid,
    )


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
    return [
        Mismatch(
            f"it was looking for more splits of source {uid}, which now has none to look for",
            "let it follow its path as before, or begin again (fresh)",
            uid,
        )
        for uid in sorted(manifest.enumerators.keys() - set(job.enumerated))
    ]


def _of_channels(job: JobShape, manifest: Manifest) -> list[Mismatch]:
    return [
        Mismatch(
            f"it holds records under way from one operator to another ({edge}) that the job does"
            " not connect",
            "give operators the uids they had, or restore a checkpoint that was not unaligned",
        )
        for edge in edges_lost(job.edges, manifest)
    ]


def _of_records_under_way(manifest: Manifest, changed: Sequence[Evolves]) -> list[Mismatch]:
    """They have the columns that the operators had."""
    if not changed or not manifest.channels:
        return []
    uid = changed[0].operator
    return [
        Mismatch(
            f"it holds records under way, and operator {uid} has other columns in the job",
            "start the job as it was, stop it with a savepoint, and begin with that",
            uid,
        )
    ]


def edges_lost(edges: Sequence[EdgeDescription], manifest: Manifest) -> list[str]:
    """Channels with records under way for which there is no place."""
    return sorted({state.edge for state in manifest.channels} - {edge.name for edge in edges})
