"""What a DataFrame has and a stream has not, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame

from stillframe.errors import BuildError

BEFORE = "do it with Spark before still.stream(df), or per epoch in foreachBatch"
"""What to do, where there is nothing better to say."""

_NEVER_ENDS = "a stream never ends, so its rows cannot be fetched: write it somewhere, writeStream"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("collect", "show", "take", "head", "first", "tail", "toPandas", "toArrow", "count",
         "toLocalIterator", "isEmpty", "foreach", "foreachPartition"),
        _NEVER_ENDS,
    ),
    **dict.fromkeys(("orderBy", "sort"), f"a stream has no last row to sort by; {BEFORE}"),
    **dict.fromkeys(("limit", "offset"), f"a stream is not cut off; {BEFORE}"),
    "crossJoin": "rows of streams meet where they have the same key: say join(other, on, how)",
    "write": "a stream is written with writeStream",
    "agg": "say groupBy().agg(...)",
}  # fmt: skip


class NotOffered(BuildError, AttributeError):
    """A method that a DataFrame has and a stream has not."""


def refuse_what_frames_have(name: str) -> None:
    """Raise, if a DataFrame has this attribute; asked of those that a stream has not."""
    if name in _REFUSED or hasattr(DataFrame, name):
        why = _REFUSED.get(name, BEFORE)
        raise NotOffered(f"a stream has no {name}: {why}")
