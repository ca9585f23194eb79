"""What a committer is given, made of committables alone, where nobody looks at the mark."""

from __future__ import annotations

from collections.abc import Iterable

from stillframe.api.sinks import Committable, Prepared
from stillframe.ids import CheckpointId, Mark, OperatorUid, SubtaskIndex, Writer


def parts(committables: Iterable[Committable], checkpoint_id: int = 1) -> list[Prepared]:
    writer = Writer("0123abcd", OperatorUid("w0"), SubtaskIndex(0))
    return [Prepared(Mark(writer, CheckpointId(checkpoint_id)), tuple(committables))]
