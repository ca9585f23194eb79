"""Which guarantee a job gives as a whole: by its sources, its checkpoints and its sinks.

Theory of operation
-------------------
A failure can do two things to a record: lose it, or let it count twice. Each part of a job is asked
which of the two may happen because of it, and what may happen because of any part may happen to the
job. Nothing lost and nothing doubled is exactly-once; one of them makes it at-least-once or
at-most-once; both leave none.

A failure is whatever ends an attempt: a slot, an executor or the driver, with the job going on from
its last completed checkpoint. That a disk with all checkpoints is lost is another matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from stillframe.api.sinks import Sink
from stillframe.api.sources import Source
from stillframe.config import CheckpointMode, JobConfig
from stillframe.errors import StartRefused
from stillframe.graph.logical import Operator, Read, Write
from stillframe.graph.plan import Plan
from stillframe.ids import SubtaskIndex
from stillframe.json_values import JsonObject

Word = Literal["exactly-once", "at-least-once", "at-most-once", "none"]


@dataclass(frozen=True, slots=True)
class Guarantee:
    """What holds for every record of a job, whatever fails, and why it is not more."""

    word: Word
    reasons: tuple[str, ...] = ()
    """One sentence for each part that weakens it; empty: exactly-once."""

    @property
    def loses(self) -> bool:
        """Whether a failure may lose records."""
        return self.word in ("at-most-once", "none")

    def __str__(self) -> str:
        return f"{self.word}: {'; '.join(self.reasons)}" if self.reasons else self.word

    def to_json(self) -> JsonObject:
        return {"guarantee": self.word, "reasons": list(self.reasons)}


@dataclass(frozen=True, slots=True)
class _Weakness:
    reason: str
    loses: bool = False
    doubles: bool = False


def guarantee_of(plan: Plan, config: JobConfig) -> Guarantee:
    """Of a job with this plan and these settings."""
    operators = [planned.operator for _, planned in plan.operators()]
    return best_guarantee_of(operators, config, waits_for_barriers=waits_for_barriers(plan))


def best_guarantee_of(
    operators: Iterable[Operator], config: JobConfig, *, waits_for_barriers: bool = False
) -> Guarantee:
    """Of a job with these operators and settings, as far as it is known without a plan."""
    everything = list(operators)
    return weigh(
        [each.source for each in everything if isinstance(each, Read)],
        [each.sink for each in everything if isinstance(each, Write)],
        config.checkpoint_mode,
        keeps_checkpoints=config.checkpoint_location is not None,
        waits_for_barriers=waits_for_barriers,
    )


def waits_for_barriers(plan: Plan) -> bool:
    """Whether a barrier can come to some subtask on one channel before it comes on another.

    Where each has one channel, or none, nothing is read between them. What comes back in a cycle
    is recorded, and does not count.
    """
    channels = Counter[int]()
    for edge in plan.edges:
        if not edge.is_feedback:
            channels[edge.target_task] += len(edge.sources_of(SubtaskIndex(0)))
    return any(number > 1 for number in channels.values())


def weigh(
    sources: Sequence[Source],
    sinks: Sequence[Sink],
    mode: CheckpointMode,
    *,
    keeps_checkpoints: bool = True,
    waits_for_barriers: bool = True,
) -> Guarantee:
    """What is left when all of these have weakened it."""
    if mode == "at-least-once" and not waits_for_barriers:
        mode = "exactly-once"  # nothing follows a barrier into the snapshot before it
    found = [*_of_checkpoints(sources, mode, keeps_checkpoints), *_of_sources(sources)]
    found += _of_sinks(sinks)
    loses, doubles = any(each.loses for each in found), any(each.doubles for each in found)
    # One sentence once, also where two sources are the same.
    return Guarantee(_word(loses, doubles), tuple(dict.fromkeys(each.reason for each in found)))


def refuse_weaker(guarantee: Guarantee, config: JobConfig) -> None:
    """Raise if the job would give less than it was told to."""
    required = config.required_guarantee
    if required is None or guarantee.word == "exactly-once":
        return
    if required == "exactly-once" or guarantee.loses:
        raise StartRefused(
            f"requireGuarantee is {required}, but the guarantee of this job is {guarantee.word}:"
            f" {'; '.join(guarantee.reasons)}"
        )


def _word(loses: bool, doubles: bool) -> Word:
    if loses:
        return "none" if doubles else "at-most-once"
    return "at-least-once" if doubles else "exactly-once"


def _of_checkpoints(
    sources: Sequence[Source], mode: CheckpointMode, keeps_checkpoints: bool
) -> Iterator[_Weakness]:
    if not keeps_checkpoints:
        yield _Weakness(
            "there is no checkpointLocation, so after a failure the job begins again from nothing",
            loses=True,
            doubles=True,
        )
    elif mode == "at-least-once" and any(source.rewindable for source in sources):
        # What is never read again cannot count again, whatever a snapshot holds of it.
        yield _Weakness(
            "checkpointMode is at-least-once, so after a failure records count again that had"
            " passed a barrier",
            doubles=True,
        )
    elif mode == "at-most-once":
        yield _Weakness(
            "checkpointMode is at-most-once, so after a failure records are skipped that were"
            " reserved and not emitted yet",
            loses=True,
        )


def _of_sources(sources: Sequence[Source]) -> Iterator[_Weakness]:
    for source in sources:
        if not source.rewindable:
            yield _Weakness(
                f"{source.describe()} cannot be read again, so after a failure what came since the"
                " last completed checkpoint is lost",
                loses=True,
            )


def _of_sinks(sinks: Sequence[Sink]) -> Iterator[_Weakness]:
    for sink in sinks:
        match sink.guarantee:
            case "at-least-once":
                why = sink.weakness or "may be given records again after a failure"
                yield _Weakness(f"{sink.describe()} {why}", doubles=True)
            case "at-most-once":
                why = sink.weakness or "may not be given all records after a failure"
                yield _Weakness(f"{sink.describe()} {why}", loses=True)
            case "exactly-once" | "nothing is kept":
                pass
