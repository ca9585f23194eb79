"""A job's past as it is kept: records that outlive the driver, and what they tell together.

Theory of operation
-------------------
Whatever is over leaves a record: a checkpoint (complete or failed), the start of an attempt, its
failure, its end. A record is written once and never changed, so that it suits a store; what is only
known later is worked out when records are read together. The checkpoint a job recovered from after
a failure, for one, is what the next attempt started from. Records are bounded and counts are not,
so every record carries the job's totals at its time.

Pure: `coordinator/kept_history.py` writes and reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import Any, TypeVar

import msgspec

from stillframe.ids import Attempt, CheckpointId
from stillframe.json_values import JsonObject, built
from stillframe.protocol.checkpointing import CheckpointingStatistics, Counts, Spent
from stillframe.protocol.documents import decode_document, decode_fields, encode_document
from stillframe.protocol.failures import (
    AttemptBegun,
    AttemptEnded,
    AttemptPhases,
    Failure,
    Restored,
    SlotRead,
)
from stillframe.protocol.statistics import CheckpointStatistics

RECORD_VERSION = 4
"""2: a failure may say what is known of an error in code that is not ours. 3: a checkpoint says
where its time went and whom it waited for, an attempt how it came up. 4: a checkpoint says how many
records had been read before it, and so does a slot that has lost its driver."""
KEPT_MAX = 100
"""How many attempts, and how many failures, of a job are remembered, and of how many checkpoints
all subtasks."""
CHECKPOINTS_MAX = 1_000
"""How many checkpoints, if nobody says (`historyCheckpoints`)."""
_SLOWEST_MAX = 10
_IN_ORDER = ("finished", "stopped")
"""Outcomes of attempts that end with a checkpoint, behind which nothing is read."""
_ARRIVALS_KEPT_MAX = 10
"""Of so many checkpoints the driver remembers single barriers."""

Record = CheckpointStatistics | AttemptBegun | AttemptPhases | AttemptEnded | Failure | SlotRead
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Totals:
    """Of a job since its very beginning."""

    completed: int = 0
    failed: int = 0
    restored: int = 0

    def plus(self, other: Totals) -> Totals:
        return Totals(
            self.completed + other.completed,
            self.failed + other.failed,
            self.restored + other.restored,
        )

    def at_least(self, other: Totals) -> Totals:
        return Totals(
            max(self.completed, other.completed),
            max(self.failed, other.failed),
            max(self.restored, other.restored),
        )


_KINDS: Mapping[str, type[Record]] = {
    "checkpoint": CheckpointStatistics,
    "begun": AttemptBegun,
    "phases": AttemptPhases,
    "ended": AttemptEnded,
    "failure": Failure,
    "read": SlotRead,
}
built(tuple[CheckpointStatistics, ...], *_KINDS.values())
_ROLLED = "checkpoints"
_NAMES = {kind: name for name, kind in _KINDS.items()}
_NOT_KEPT = ("is_discarded", "recovered_by")
"""What is worked out when records are read together."""


def encode_kept(record: Record, totals: Totals) -> bytes:
    """The bytes of one file of a job's history."""
    body = {"record": _NAMES[type(record)], "totals": msgspec.to_builtins(totals)}
    return encode_document(body | _fields(record), RECORD_VERSION, "a record of the job's history")


def encode_rolled(records: Sequence[CheckpointStatistics], totals: Totals) -> bytes:
    """The bytes of a file that takes the place of as many others."""
    body: JsonObject = {
        "record": _ROLLED,
        "totals": msgspec.to_builtins(totals),
        "checkpoints": [_fields(record) for record in records],
    }
    return encode_document(body, RECORD_VERSION, "a part of the job's history")


def _fields(record: Record) -> dict[str, Any]:
    fields = msgspec.to_builtins(record)
    return {name: value for name, value in fields.items() if name not in _NOT_KEPT}


def decode_kept(data: bytes, where: str) -> tuple[tuple[Record, ...], Totals]:
    """What is in these bytes; damage and newer versions are told as for a manifest."""
    version, body = decode_document(data, RECORD_VERSION, where)

    def decoded() -> tuple[tuple[Record, ...], Totals]:
        return _records(version, body), _converted(body.get("totals"), Totals)

    return decode_fields(decoded, where)


def _records(version: int, body: JsonObject) -> tuple[Record, ...]:
    kind = body.get("record")
    if kind == _ROLLED:
        return _converted(body.get("checkpoints"), tuple[CheckpointStatistics, ...])
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"record {kind!r}")
    return (_converted(body if version >= 3 else _renewed(body), _KINDS[kind]),)


def _converted(value: object, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _renewed(body: JsonObject) -> JsonObject:
    """As this version would have written it."""
    renewed = dict(body)
    if isinstance(delay_ms := renewed.get("restart_delay_ms"), int):
        renewed["restart_delay_seconds"] = delay_ms / 1000
    elif "restart_delay_ms" in renewed:
        renewed["restart_delay_seconds"] = delay_ms
    if renewed.get("kind") == "bystander":
        renewed["kind"] = "lost slot"
    if isinstance(restored := renewed.get("restored"), Mapping):
        names = {
            "id": "checkpoint_id",
            "restore_timestamp": "restored_at_ms",
            "external_path": "path",
        }
        renewed["restored"] = {names.get(name, name): value for name, value in restored.items()}
    return renewed


@dataclass(frozen=True, slots=True)
class KeptHistory:
    """The records of a job, of one driver or of several; in each list oldest first."""

    checkpoints: tuple[CheckpointStatistics, ...] = ()
    begun: tuple[AttemptBegun, ...] = ()
    phases: tuple[AttemptPhases, ...] = ()
    ended: tuple[AttemptEnded, ...] = ()
    read: tuple[SlotRead, ...] = ()
    kept_failures: tuple[Failure, ...] = ()
    """As they were written down; `failures` knows more."""
    totals: Totals = field(default_factory=Totals)
    under_way: tuple[CheckpointStatistics, ...] = ()
    retained: frozenset[CheckpointId] | None = None
    """The completed checkpoints that are still there; None: that is not known."""
    unreadable: tuple[str, ...] = ()
    """What is there and could not be read, a sentence each."""
    spent: Spent = field(default_factory=Spent)
    """Of the driver that runs the job."""

    @classmethod
    def of(
        cls, records: Iterable[tuple[Record, Totals]], checkpoints_max: int = CHECKPOINTS_MAX
    ) -> KeptHistory:
        """Whatever was found, in any order; of what is there twice, the one with more subtasks."""
        found = list(records)
        totals = Totals()
        for _, at_its_time in found:
            totals = totals.at_least(at_its_time)
        each = [record for record, _ in found]
        numbered: dict[tuple[CheckpointId, Attempt], CheckpointStatistics] = {}
        for part in _only(each, CheckpointStatistics):
            known = numbered.setdefault((part.checkpoint_id, part.attempt), part)
            if len(known.subtasks) < len(part.subtasks):
                numbered[part.checkpoint_id, part.attempt] = part
        return cls(
            checkpoints=within_bounds([numbered[key] for key in sorted(numbered)], checkpoints_max),
            begun=tuple(sorted(_only(each, AttemptBegun), key=lambda r: r.attempt)),
            phases=tuple(sorted(_only(each, AttemptPhases), key=lambda r: r.attempt)),
            ended=tuple(sorted(_only(each, AttemptEnded), key=lambda r: r.attempt)),
            read=tuple(_only(each, SlotRead)),
            kept_failures=tuple(sorted(_only(each, Failure), key=lambda r: (r.attempt, r.number))),
            totals=totals,
        )

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.begun or self.ended or self.kept_failures)

    def followed_by(
        self, later: KeptHistory, checkpoints_max: int = CHECKPOINTS_MAX
    ) -> KeptHistory:
        """Together with what the driver after this has seen, within the bounds."""
        return KeptHistory(
            checkpoints=within_bounds((*self.checkpoints, *later.checkpoints), checkpoints_max),
            begun=(*self.begun, *later.begun)[-KEPT_MAX:],
            phases=(*self.phases, *later.phases)[-KEPT_MAX:],
            ended=(*self.ended, *later.ended)[-KEPT_MAX:],
            kept_failures=(*self.kept_failures, *later.kept_failures)[-KEPT_MAX:],
            totals=self.totals.plus(later.totals),
            under_way=later.under_way,
            retained=later.retained,
            unreadable=self.unreadable,
            spent=later.spent,
        )

    @property
    def failures(self) -> list[Failure]:
        """Oldest first, each with the attempt that came after it, if there was one."""
        in_order = sorted(self.kept_failures, key=lambda each: (each.attempt, each.number))
        return [replace(each, recovered_by=self._after(each)) for each in in_order]

    def statistics(self) -> CheckpointingStatistics:
        """Of all checkpoints."""
        newest_first = (*reversed(self.under_way), *reversed(self.checkpoints))
        restored = [each.restored for each in self.begun if each.restored is not None]
        return CheckpointingStatistics(
            counts=Counts(
                restored=self.totals.restored,
                total=self.totals.completed + self.totals.failed + len(self.under_way),
                in_progress=len(self.under_way),
                completed=self.totals.completed,
                failed=self.totals.failed,
            ),
            history=tuple(map(self._with_discarded, newest_first)),
            restored=restored[-1] if restored else None,
            unreadable=self.unreadable,
            spent=self.spent,
        )

    def attempts_json(self) -> list[JsonObject]:
        """How each attempt came up and what became of it, the newest first; moments in
        milliseconds since 1970."""
        told = {each.attempt: each for each in self.phases}
        return [
            self._attempt_json(each, told.get(each.attempt, AttemptPhases(each.attempt)))
            for each in reversed(self.begun)
        ]

    def _attempt_json(self, begun: AttemptBegun, came: AttemptPhases) -> JsonObject:
        before = [each for each in self.failures if each.recovered_by == begun]
        heard, noticed = came.heard, came.noticed
        if noticed is None and before:  # by a driver that found it out when it began
            heard, noticed = self._last_heard(before[-1].attempt), before[-1].at_ms
        return {
            "attempt": begun.attempt,
            "phases": {
                "heard": heard,
                "noticed": noticed,
                "begun": begun.at_ms,
                "slots": came.slots,
                "running": came.running,
                "first_record": came.first_record,
                "caught_up": came.caught_up,
            },
            "restored": None if begun.restored is None else begun.restored.to_json(),
            "replayed": came.replayed,
            "ended": self._end_json(begun.attempt),
        }

    def _last_heard(self, attempt: Attempt) -> int | None:
        """The last sign of an attempt whose driver is gone."""
        checkpoints = (each for each in self.checkpoints if each.attempt == attempt)
        seen = [round(each.triggered_at_ms + each.end_to_end_ms) for each in checkpoints]
        seen += [each.at_ms for each in self.begun if each.attempt == attempt]
        return max(seen, default=None)

    def _end_json(self, attempt: Attempt) -> JsonObject | None:
        for failure in reversed(self.kept_failures):
            if failure.attempt == attempt:
                how: JsonObject = {"kind": failure.kind, "reason": failure.reason}
                return {"at": failure.at_ms, "outcome": "failed", **how}
        for ended in self.ended:
            if ended.attempt == attempt:
                return {"at": ended.at_ms, "outcome": ended.outcome, "kind": None, "reason": None}
        return None

    def is_over(self, attempt: Attempt) -> bool:
        """Whether its driver has said that nothing more comes of this attempt."""
        given_up = {each.attempt for each in self.kept_failures if each.is_given_up}
        return attempt in given_up | {each.attempt for each in self.ended}

    def read_behind(self, begun: AttemptBegun) -> int | None:
        """How many records the attempt before had read behind what this one begins from; None:
        nobody is left who knows."""
        last = self.begun[-1] if self.begun else None
        if last is None:
            return 0 if begun.attempt == 1 and begun.restored is None else None
        if any(e.attempt == last.attempt and e.outcome in _IN_ORDER for e in self.ended):
            return 0
        told = {each.slot: each for each in self.read if each.attempt == last.attempt}
        if not told or len(told) < max(each.slots for each in told.values()):
            return None
        before = self._read_before(begun.restored, last)
        read = sum(each.records_read for each in told.values())
        return None if before is None else max(0, read - before)

    def _read_before(self, start: Restored | None, last: AttemptBegun) -> int | None:
        """By the last attempt, until it took the checkpoint from which another one starts."""
        number = None if start is None else start.checkpoint_id
        if number == (None if last.restored is None else last.restored.checkpoint_id):
            return 0
        for each in self.checkpoints:
            if (each.checkpoint_id, each.attempt) == (number, last.attempt):
                return each.records_read
        return None

    def failures_of(self, attempt: Attempt) -> int:
        """The highest number of a failure of this attempt; 0 if it has none."""
        numbers = (each.number for each in self.kept_failures if each.attempt == attempt)
        return max(numbers, default=0)

    def _after(self, failure: Failure) -> AttemptBegun | None:
        later = (each for each in self.begun if each.attempt > failure.attempt)
        return next(later, None)

    def _with_discarded(self, each: CheckpointStatistics) -> CheckpointStatistics:
        gone = (
            self.retained is not None
            and each.status == "COMPLETED"
            and not each.is_savepoint
            and each.checkpoint_id not in self.retained
        )
        return replace(each, is_discarded=True) if gone else each


def within_bounds(
    checkpoints: Sequence[CheckpointStatistics], checkpoints_max: int
) -> tuple[CheckpointStatistics, ...]:
    """The newest of them. All subtasks are remembered of the newest hundred, of the newest hundred
    that failed and of the ten slowest, and single barriers of the newest ten."""
    newest = checkpoints[-checkpoints_max:]
    failed = [each for each in newest if each.status == "FAILED"][-KEPT_MAX:]
    slowest = nlargest(_SLOWEST_MAX, newest, key=lambda each: each.end_to_end_ms)
    whole = {id(each) for each in (*newest[-KEPT_MAX:], *failed, *slowest)}
    replayed = {id(each) for each in newest[-_ARRIVALS_KEPT_MAX:]}
    bounded = (each if id(each) in whole else each.shrunk() for each in newest)
    return tuple(
        new if id(old) in replayed else new.with_arrivals(0)
        for old, new in zip(newest, bounded, strict=True)
    )


def _only(records: Collection[Record], kind: type[_T]) -> list[_T]:
    return [record for record in records if isinstance(record, kind)]
