"""What two states differ in, as a DataFrame; `stillframe diff` says the same without Spark."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from stillframe.errors import BuildError
from stillframe.state.shapes import KEY, KEY_GROUP, LIST_INDEX, MAP_KEY, SHOWN_EXPIRES

_IDENTITY = (KEY, MAP_KEY, LIST_INDEX)
_BESIDE = (KEY_GROUP, SHOWN_EXPIRES)


def state_difference(before: DataFrame, after: DataFrame) -> DataFrame:
    """A row for each entry that was added, changed or is gone, with what it was and is.

    Both were read by the format `stillframe`, with the operator and the state that are meant.
    """
    if before.columns != after.columns:
        raise BuildError(
            f"the states have the columns {', '.join(before.columns)} and"
            f" {', '.join(after.columns)}: give two DataFrames of the same operator and state"
        )
    named = [name for name in _IDENTITY if name in before.columns]
    values = [name for name in before.columns if name not in (*_IDENTITY, *_BESIDE)]
    if len(values) != 1 or not named:
        raise BuildError(
            f"columns {', '.join(before.columns)} are not those of one state with keys: read it"
            ' with format("stillframe") and option operator'
        )
    old = before.select(*named, F.col(values[0]).alias("before"), F.lit(True).alias("_old"))
    new = after.select(*named, F.col(values[0]).alias("after"), F.lit(True).alias("_new"))
    both = old.join(new, named, "full_outer")
    change = (
        F.when(F.col("_old").isNull(), "added")
        .when(F.col("_new").isNull(), "gone")
        .when(~F.col("before").eqNullSafe(F.col("after")), "changed")
    )
    return both.select(change.alias("change"), *named, "before", "after").where(
        "change IS NOT NULL"
    )
