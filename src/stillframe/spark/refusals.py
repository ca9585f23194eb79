"""What a DataFrame has and a stream has not, and what to do instead; and what Spark says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from py4j.java_gateway import JavaObject
from pyspark.errors import AnalysisException

from stillframe.errors import BuildError

BEFORE = "do it with Spark before still.stream(df), or per epoch in foreachBatch"
"""What to do, where there is nothing better to say."""

_NEVER_ENDS = "a stream never ends, so its rows cannot be fetched: write it somewhere, writeStream"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("collect", "show", "take", "head", "first", "tail", "toPandas", "toArrow", "count",
         "toLocalIterator", "isEmpty", "foreach", "foreachPartition"),
        _NEVER_ENDS,
    ),
    **dict.fromkeys(("orderBy", "sort"), f"a stream has no last row to sort by; {BEFORE}"),
    "write": "a stream is written with writeStream",
}  # fmt: skip


class NotOffered(BuildError, AttributeError):
    """A method that a DataFrame has and a stream has not."""


def refuse_what_never_ends(name: str) -> None:
    """Raise, if this is an attribute of DataFrames for rows that are all there."""
    if name in REFUSED:
        raise NotOffered(f"a stream has no {name}: {REFUSED[name]}")


def refused_by_spark(jvm: Any, plan: JavaObject) -> str | None:
    """Spark's own words for what it does in no output mode; None: it has none."""
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    said: list[str] = []
    for mode in (modes.Append(), modes.Update(), modes.Complete()):
        try:
            checker.checkForStreaming(plan, mode)
        except AnalysisException as error:
            said.append(str(error).partition(";\n")[0].partition("\n")[0].rstrip(".;"))
        else:
            return None
    return said[0]
