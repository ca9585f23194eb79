"""Which operator of a job goes on with what an operator of a snapshot has left.

Theory of operation
-------------------
A uid that somebody gave says it. One that was derived says it as long as nothing in front of the
operator changes; then it is another one, though the operator is the same. So a snapshot tells of an
operator without a given uid what it looks like: its kind, its traits (keys, window, what it is tied
to outside) and the operators with state that feed it, seen through those without. Operators are
looked at in the order of the stream: what feeds one has been found before it.

Rules of this file
------------------
1. Pure: descriptions in, pairs out.
2. Never by a number or an order: state is given only where exactly one operator on each side looks
   like that, or where those that look alike have the uids they had, all of them.
3. Where nothing looks like it any more, the uid is believed: its keys or its window have changed,
   and whether its state fits is for `protocol/fit` to say.
4. Metadata that does not tell what operators look like is matched by uid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stillframe.ids import OperatorUid
from stillframe.protocol.manifests import OperatorDescription


@dataclass(frozen=True, slots=True)
class Unmatched:
    """An operator of a snapshot that the job does not have, or has more than once."""

    operator: OperatorDescription
    candidates: tuple[OperatorDescription, ...]
    """Those of the job that it might be, and that no other one is."""


@dataclass(frozen=True, slots=True)
class Matching:
    pairs: Mapping[OperatorUid, OperatorUid]
    """From a snapshot's uid to the job's."""
    unmatched: tuple[Unmatched, ...]


def matched(before: Sequence[OperatorDescription], now: Sequence[OperatorDescription]) -> Matching:
    """`before` are a snapshot's operators, `now` a job's, each after those that feed it."""
    by_uid = {each.uid: each for each in now}
    pairs = {
        old.uid: old.uid
        for old in before
        if old.uid in by_uid and (old.place is None or by_uid[old.uid].place is None)
    }
    alike_now: dict[OperatorUid, list[OperatorDescription]] = {}
    for old in before:
        if old.uid in pairs or old.place is None:
            continue
        looks = _looks(old, pairs)
        free = [each for each in now if each.uid not in pairs.values()]
        alike = [each for each in free if looks is not None and _looks(each) == looks]
        twins = [each for each in before if each.uid not in pairs and _looks(each, pairs) == looks]
        alike_now[old.uid] = alike
        if _uids(alike) == _uids(twins):
            pairs |= {uid: uid for uid in _uids(twins)}
        elif len(alike) == len(twins) == 1:
            pairs[old.uid] = alike[0].uid
        elif not alike and _is_still_there(old, free, before, pairs):
            pairs[old.uid] = old.uid
    taken = set(pairs.values())
    return Matching(
        pairs,
        tuple(
            Unmatched(
                old,
                tuple(
                    each
                    for each in alike_now.get(old.uid) or now
                    if each.kind == old.kind and each.uid not in taken
                ),
            )
            for old in before
            if old.uid not in pairs
        ),
    )


_Looks: TypeAlias = tuple[str, str, tuple[tuple[OperatorUid, ...], ...]]


def _looks(
    operator: OperatorDescription, pairs: Mapping[OperatorUid, OperatorUid] | None = None
) -> _Looks | None:
    """In the job's uids; None if it is known by its uid alone, or what feeds it is not known."""
    if operator.place is None:
        return None
    fed_by: list[tuple[OperatorUid, ...]] = []
    for uids in operator.place.fed_by:
        known = uids if pairs is None else [pairs[uid] for uid in uids if uid in pairs]
        if len(known) < len(uids):
            return None
        fed_by.append(tuple(sorted(known)))  # a union has no order
    return operator.kind, operator.place.traits, tuple(fed_by)


def _is_still_there(
    old: OperatorDescription,
    free: Sequence[OperatorDescription],
    before: Sequence[OperatorDescription],
    pairs: Mapping[OperatorUid, OperatorUid],
) -> bool:
    """Whether the job has its uid, and for nothing that another one of the snapshot looks like."""
    return any(
        each.uid == old.uid
        and all(_looks(other, pairs) != _looks(each) for other in before if other is not old)
        for each in free
    )


def _uids(operators: Sequence[OperatorDescription]) -> set[OperatorUid]:
    return {each.uid for each in operators}
