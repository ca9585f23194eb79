"""Event time in PySpark's words: `withWatermark`, and `window(...)` and `session_window(...)`.

Theory of operation
-------------------
Spark's analyzer takes `window(...)` out of a grouping and puts a column in its place, which a
projection below computes with arithmetic on microseconds: `Project` over `Filter` where windows do
not overlap, `Filter` over `Expand`, with one projection per overlapping window, where they do. Of
the call itself nothing is left. Its size, slide and start are found by asking Spark for the windows
of one moment: the moment is put into the arithmetic in place of the event time.

Of `session_window(...)` it makes a column too, of the span that each record is by itself: `Filter`
over `Project`. That they are joined is left to the grouping. There the gap is still to be seen, in
what is added to the event time.

That an event time has a watermark Spark notes in the metadata of the column. It does so only for
its own streams, and our empty frames are none; so here the note is written by hand, and a frame of
Spark's, with the same columns and nothing in them either, is asked what it would say.

Rules of this file
------------------
1. A window is known by the mark that Spark gives its column, never by its name.
2. What the arithmetic looks like is Spark's affair: it is only evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.types import TimestampType

from stillframe.errors import BuildError
from stillframe.graph.finality import has_watermark
from stillframe.graph.logical import Join, Late, Node, WithWatermark
from stillframe.spark.steps import ExprId, below_aliases, children, class_name, id_of, sequence

DELAY = "spark.watermarkDelayMs"
_WINDOW_MARK = "spark.timeWindow"
_SESSION_MARK = "spark.sessionWindow"
_MOMENT_US = 2**50
"""Any would do that py4j takes for a long and not for an int; this one is in 2005."""
_DELAY_US_MAX = 2**61

WINDOW_TYPE = pa.struct(
    [("start", pa.timestamp("us", tz="UTC")), ("end", pa.timestamp("us", tz="UTC"))]
)
WALL_CLOCK_WINDOW_TYPE = pa.struct([("start", pa.timestamp("us")), ("end", pa.timestamp("us"))])
"""Of windows over a timestamp_ntz: kept as if its clock were UTC's, and shown as what they are."""


# --- Watermarks ---------------------------------------------------------------------------------


def watermark_of(frame: DataFrame, event_time: str, delay: str) -> tuple[WithWatermark, JavaObject]:
    """What `withWatermark` says, and Spark's columns behind it, a sequence."""
    frame.withWatermark(event_time, delay)  # raises where it is no column name or no interval
    column = _plain_column(frame, event_time)
    name = event_time if column is None else f"`{column.name().replace('`', '``')}`"
    said = _asked_of_spark(frame).withWatermark(name, delay).schema
    (time,) = (field for field in said if DELAY in field.metadata)
    if not isinstance(time.dataType, TimestampType):
        raise BuildError(
            f"the event time {event_time} is a {time.dataType.simpleString()}, but a stream reads"
            " it from a column of timestamps: select the field into a column of its own"
        )
    delay_us = int(time.metadata[DELAY]) * 1000
    if delay_us > _DELAY_US_MAX:
        raise BuildError(
            f"the delay {delay!r} is longer than the times a stream can tell: give a shorter one"
        )
    return WithWatermark(time.name, delay_us), _noted(frame, time.name, delay_us // 1000)


def _plain_column(frame: DataFrame, name: str) -> JavaObject | None:
    """The column that is meant, which may be called by an alias of the stream."""
    found = sequence(frame.select(name)._jdf.queryExecution().analyzed().projectList())
    return found[0] if [class_name(each) for each in found] == ["AttributeReference"] else None


def _asked_of_spark(frame: DataFrame) -> DataFrame:
    """A stream of Spark's with these columns. It is never started."""
    columns = [lit(None).cast(field.dataType).alias(field.name) for field in frame.schema]
    return frame.sparkSession.readStream.format("rate").load().select(columns)


def without_notes(frame: DataFrame) -> JavaObject:
    """The columns of the frame, none of which has a watermark, a sequence."""
    return _noted(frame, None, 0)


def _noted(frame: DataFrame, time: str | None, delay_ms: int) -> JavaObject:
    """The columns of the frame as Spark has them behind a watermark: one has the note."""
    jvm: Any = frame.sparkSession._jvm
    columns = jvm.java.util.ArrayList()
    for column in sequence(frame._jdf.queryExecution().analyzed().output()):
        builder = jvm.org.apache.spark.sql.types.MetadataBuilder().withMetadata(column.metadata())
        if column.name() == time:
            builder.putLong(DELAY, delay_ms)
        else:
            builder.remove(DELAY)
        columns.add(column.withMetadata(builder.build()))
    return jvm.org.apache.spark.api.python.PythonUtils.toSeq(columns)


def is_event_time(column: JavaObject) -> bool:
    """Whether a watermark is about it."""
    return bool(column.metadata().contains(DELAY))


def without_note(spark: SparkSession, column: JavaObject) -> JavaObject:
    """The column as one that no watermark is about."""
    jvm: Any = spark._jvm
    builder = jvm.org.apache.spark.sql.types.MetadataBuilder().withMetadata(column.metadata())
    return column.withMetadata(builder.remove(DELAY).build())


def refuse_untimely(node: Node, *, is_watermarked: bool) -> None:
    """Windows over this node must be closed by its watermark, in time, or not at all."""
    if not has_watermark(node):
        return
    if not is_watermarked and _reaches_unbounded_join(node):
        raise BuildError(
            "rows of the join before these windows may come out long after their event time, so it"
            " could not close the windows: bound on both sides how far apart the event times of the"
            " joined streams may be, as in join(other, expr('id = other_id AND other_time BETWEEN"
            " time AND time + INTERVAL 1 HOUR'))"
        )
    if not is_watermarked:
        raise BuildError(
            "these windows are not over the column that withWatermark was given, so event time"
            " would close them too early or too late: compute their event time in a column of its"
            " own and give that to withWatermark, as the last step before groupBy"
        )
    if _reaches_source_without_watermark(node):
        raise BuildError(
            "only some of the streams that are united here have a watermark, and the others would"
            " keep event time from ever coming to the end of a window: call withWatermark after"
            " union"
        )


def is_watermarked_throughout(node: Node) -> bool:
    """Whether event time comes to it from all sides."""
    return not _reaches_source_without_watermark(node)


def _reaches_source_without_watermark(node: Node) -> bool:
    if isinstance(node.operator, WithWatermark):
        return False
    if not node.inputs or isinstance(node.operator, Late):
        return True
    return any(map(_reaches_source_without_watermark, node.inputs))


def _reaches_unbounded_join(node: Node) -> bool:
    """Whether event time comes to it, or would, through a join that leaves a side unbounded."""
    if isinstance(node.operator, WithWatermark):
        return False
    if isinstance(node.operator, Join) and None in (
        node.operator.earliest_us,
        node.operator.latest_us,
    ):
        return True
    return any(map(_reaches_unbounded_join, node.inputs))


# --- Windows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What Spark has taken out of a grouping."""

    column: JavaObject
    """What stands in its place."""
    time: JavaObject
    """The event time, over the columns of `below`."""
    below: JavaObject
    """The plan without it."""
    is_watermarked: bool

    @property
    def is_wall_clock(self) -> bool:
        """Whether the event time is a timestamp_ntz, and so are its windows."""
        return bool(self.time.dataType().typeName() == "timestamp_ntz")

    def is_at(self, node: JavaObject) -> bool:
        return class_name(node) == "AttributeReference" and id_of(node) == id_of(self.column)


@dataclass(frozen=True)
class FoundWindow(Found):
    """A `window(...)`."""

    size_us: int
    slide_us: int
    start_us: int


@dataclass(frozen=True)
class FoundSession(Found):
    """A `session_window(...)`."""

    adding: JavaObject
    """What adds the gap to the event time, over the columns of `below`."""


ADDS_INTERVAL = ("TimestampAddInterval", "TimeAdd")
"""To a moment. Before 4.1 Spark called it by the latter name."""


def window_grouped_by(
    spark: SparkSession, grouping: JavaObject
) -> FoundWindow | FoundSession | None:
    """The window that is made for this grouping, right below it; None: there is none."""
    found = _window_made_in(spark, below_aliases(grouping.child()))
    keys = sequence(grouping.groupingExpressions())
    return found if found is not None and any(found.is_at(key) for key in keys) else None


def _window_made_in(spark: SparkSession, plan: JavaObject) -> FoundWindow | FoundSession | None:
    making = plan.child() if class_name(plan) == "Filter" else plan
    if class_name(making) not in ("Project", "Expand"):
        return None
    for place, column in enumerate(sequence(making.output())):
        if not _is_made_in(making, place):
            continue
        if is_session(column):
            return _found_session(making, place, column)
        if is_window(column):
            return _found(spark, making, place, column)
    return None


def is_window(column: JavaObject) -> bool:
    """Whether Spark says that it is one, of `window(...)`."""
    return bool(column.metadata().contains(_WINDOW_MARK))


def is_session(column: JavaObject) -> bool:
    """Whether Spark says that it is a session: grouping by it joins those that overlap."""
    return bool(column.metadata().contains(_SESSION_MARK))


def _is_made_in(making: JavaObject, place: int) -> bool:
    """Whether the column at this place is a window's arithmetic; else it only passes through."""
    if class_name(making) == "Expand":
        made = making.projections().apply(0).apply(place)
    else:
        made = making.projectList().apply(place)
    made = made.child() if class_name(made) == "Alias" else made
    return class_name(made) == "CreateNamedStruct"


def is_for_window(plan: JavaObject) -> bool:
    """Whether it stands below a projection only because that has a `window(...)` in it."""
    if class_name(plan) == "Expand":  # a rollup has one too
        return any(is_window(column) for column in sequence(plan.output()))
    return class_name(plan) == "Filter"


def _found(spark: SparkSession, making: JavaObject, place: int, column: JavaObject) -> FoundWindow:
    if class_name(making) == "Expand":
        structs = [row.apply(place) for row in sequence(making.projections())]
    else:
        structs = [making.projectList().apply(place).child()]
    below = making.child()
    if class_name(below) == "Filter":  # which drops the records without event time, as we do
        below = below.child()
    time = _time_in(structs[0])
    start_us, end_us = _bounds_us(spark, structs[0])
    size_us = end_us - start_us
    # Each projection is one slide before the one in front of it.
    slide_us = start_us - _bounds_us(spark, structs[1])[0] if len(structs) > 1 else size_us
    shape = (size_us, slide_us, start_us % slide_us)
    return FoundWindow(column, time, below, _is_event_time(time, below), *shape)


def _found_session(making: JavaObject, place: int, column: JavaObject) -> FoundSession:
    struct, below = making.projectList().apply(place).child(), making.child()
    time = _time_in(struct)
    *_, end = children(struct)
    # The outermost: the event time may be computed likewise.
    adding = next(node for node in _subtree(end) if class_name(node) in ADDS_INTERVAL)
    return FoundSession(column, time, below, _is_event_time(time, below), adding)


def _is_event_time(time: JavaObject, below: JavaObject) -> bool:
    return class_name(time) == "AttributeReference" and id_of(time) in event_times_of(below)


def event_times_of(plan: JavaObject) -> set[ExprId]:
    """By the column and not by the reference: one taken from an earlier stream has no note."""
    return {id_of(each) for each in sequence(plan.output()) if is_event_time(each)}


def _refuse_unless_timestamp(time: JavaObject) -> None:
    kind = time.dataType().typeName()
    if kind not in ("timestamp", "timestamp_ntz"):
        raise BuildError(
            f"the windows over {time.sql()} are of type {kind}, but a stream keeps windows of"
            f" times: cast it, window(col(...).cast('timestamp'), ...)"
        )


def _is_to_microseconds(node: JavaObject) -> bool:
    """Whether it makes a number of a moment, as opposed to the way back."""
    return class_name(node) == "PreciseTimestampConversion" and node.dataType().typeName() == "long"


def _time_in(struct: JavaObject) -> JavaObject:
    time = next(node for node in _subtree(struct) if _is_to_microseconds(node)).child()
    _refuse_unless_timestamp(time)
    return time


def _subtree(node: JavaObject) -> Iterator[JavaObject]:
    yield node
    for child in children(node):
        yield from _subtree(child)


def _bounds_us(spark: SparkSession, struct: JavaObject) -> tuple[int, int]:
    """Start and end of the window around `_MOMENT_US`."""
    _, start, _, end = children(struct)
    return _at_moment(spark, start), _at_moment(spark, end)


def _at_moment(spark: SparkSession, node: JavaObject) -> int:
    jvm: Any = spark._jvm
    return int(_with_moment(jvm, node).eval(None))


def _with_moment(jvm: Any, node: JavaObject) -> JavaObject:
    if _is_to_microseconds(node):
        literal = getattr(jvm.org.apache.spark.sql.catalyst.expressions, "Literal$")
        return getattr(literal, "MODULE$").apply(_MOMENT_US)
    new = jvm.java.util.ArrayList()
    for child in children(node):
        new.add(_with_moment(jvm, child))
    return node.withNewChildren(jvm.org.apache.spark.api.python.PythonUtils.toSeq(new))
