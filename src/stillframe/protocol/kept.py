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

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stillframe.ids import Attempt, CheckpointId
from stillframe.json_values import JsonObject
from stillframe.protocol.documents import (
    JsonFields,
    decode_document,
    decode_fields,
    encode_document,
)
from stillframe.protocol.failures import AttemptBegun, AttemptEnded, Failure
from stillframe.protocol.statistics import (
    CheckpointingStatistics,
    CheckpointStatistics,
    Counts,
)

RECORD_VERSION = 2
"""2: a failure may say what is known of an error in code that is not ours."""
KEPT_MAX = 100
"""How many checkpoints, and how many failures, of a job are remembered."""

Record = CheckpointStatistics | AttemptBegun | AttemptEnded | Failure
_RecordT = TypeVar("_RecordT", CheckpointStatistics, AttemptBegun, AttemptEnded, Failure)


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

    def record(self) -> JsonObject:
        return {"completed": self.completed, "failed": self.failed, "restored": self.restored}

    @classmethod
    def from_record(cls, value: JsonObject) -> Totals:
        fields = JsonFields(value)
        return cls(
            fields.integer("completed"), fields.integer("failed"), fields.integer("restored")
        )


_DECODED: Mapping[str, Callable[[JsonFields], Record]] = {
    "checkpoint": CheckpointStatistics.from_record,
    "begun": AttemptBegun.from_record,
    "ended": AttemptEnded.from_record,
    "failure": Failure.from_record,
}
_ENCODED: Mapping[type[Record], str] = {
    CheckpointStatistics: "checkpoint",
    AttemptBegun: "begun",
    AttemptEnded: "ended",
    Failure: "failure",
}


def encode_kept(record: Record, totals: Totals) -> bytes:
    """The bytes of one file of a job's history."""
    body: JsonObject = {
        "record": _ENCODED[type(record)],
        "totals": totals.record(),
        **record.record(),
    }
    return encode_document(body, RECORD_VERSION, "a record of the job's history")


def decode_kept(data: bytes, where: str) -> tuple[Record, Totals]:
    """What is in these bytes; damage and newer versions are told as for a manifest."""
    _, body = decode_document(data, RECORD_VERSION, where)
    return decode_fields(lambda: _decoded(JsonFields(body)), where)


def _decoded(fields: JsonFields) -> tuple[Record, Totals]:
    kind = fields.text("record")
    if kind not in _DECODED:
        raise ValueError(f"record {kind!r}")
    return _DECODED[kind](fields), Totals.from_record(fields.object("totals"))


@dataclass(frozen=True, slots=True)
class KeptHistory:
    """The records of a job, of one driver or of several; in each list oldest first."""

    checkpoints: tuple[CheckpointStatistics, ...] = ()
    begun: tuple[AttemptBegun, ...] = ()
    ended: tuple[AttemptEnded, ...] = ()
    kept_failures: tuple[Failure, ...] = ()
    """As they were written down; `failures` knows more."""
    totals: Totals = field(default_factory=Totals)
    under_way: tuple[CheckpointStatistics, ...] = ()
    retained: frozenset[CheckpointId] | None = None
    """The completed checkpoints that are still there; None: that is not known."""

    @classmethod
    def of(cls, records: Iterable[tuple[Record, Totals]]) -> KeptHistory:
        """Whatever was found, in any order."""
        found = list(records)
        totals = Totals()
        for _, at_its_time in found:
            totals = totals.at_least(at_its_time)
        each = [record for record, _ in found]
        return cls(
            checkpoints=tuple(
                sorted(
                    _only(each, CheckpointStatistics), key=lambda r: (r.checkpoint_id, r.attempt)
                )
            ),
            begun=tuple(sorted(_only(each, AttemptBegun), key=lambda r: r.attempt)),
            ended=tuple(sorted(_only(each, AttemptEnded), key=lambda r: r.attempt)),
            kept_failures=tuple(sorted(_only(each, Failure), key=lambda r: (r.attempt, r.number))),
            totals=totals,
        )

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.begun or self.ended or self.kept_failures)

    def followed_by(self, later: KeptHistory, kept_max: int = KEPT_MAX) -> KeptHistory:
        """Together with what the driver after this has seen, within the bound."""
        return KeptHistory(
            checkpoints=(*self.checkpoints, *later.checkpoints)[-kept_max:],
            begun=(*self.begun, *later.begun)[-kept_max:],
            ended=(*self.ended, *later.ended)[-kept_max:],
            kept_failures=(*self.kept_failures, *later.kept_failures)[-kept_max:],
            totals=self.totals.plus(later.totals),
            under_way=later.under_way,
            retained=later.retained,
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
        )

    def is_over(self, attempt: Attempt) -> bool:
        """Whether its driver has said that nothing more comes of this attempt."""
        given_up = {each.attempt for each in self.kept_failures if each.is_given_up}
        return attempt in given_up | {each.attempt for each in self.ended}

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


def _only(records: Collection[Record], kind: type[_RecordT]) -> list[_RecordT]:
    return [record for record in records if isinstance(record, kind)]
