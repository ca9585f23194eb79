"""`dropDuplicates` and `dropDuplicatesWithinWatermark` in PySpark's words.

What they mean is Spark's: where the stream has a watermark, records that are not after it are
dropped; keys are forgotten if the event time is one of them, or within the watermark, and are kept
for ever otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame

from stillframe.errors import BuildError
from stillframe.graph.expressions import Column, Named
from stillframe.graph.logical import DropDuplicates, Node
from stillframe.key_groups import unsupported_key_type
from stillframe.spark.expressions.window_rules import bound_of, is_window_type, last_moment_of
from stillframe.spark.expressions.windows import DELAY, refuse_untimely
from stillframe.spark.plans.joins import told_apart
from stillframe.spark.steps import below_aliases, sequence
from stillframe.spark.stream import (
    Stream,
    projection_node,
    refuse_repeated,
    schema_of,
    unchanged,
)


def without_duplicates(stream: Stream, subset: list[str] | None, within: bool) -> Stream:
    """The first record of each key; `within` the delay of the watermark, or of all."""
    _refuse_updates(stream, _method(within))
    return deduplicated(stream, _keys_of(stream.frame, subset), within)


def deduplicated(stream: Stream, keys: tuple[str, ...], within: bool) -> Stream:
    """As `without_duplicates`, by these columns of the stream."""
    method = _method(within)
    _refuse_updates(stream, method)
    refuse_repeated(list(keys))
    _refuse_unfit_keys(stream, keys, method)
    time = _noted_time_of(stream)
    before, named = _with_parts_of_windows(stream, keys, time)
    parts = tuple(part for key in keys for part in named.get(key, (key,)))
    if time is not None and time.name in named:
        time = EventTime(named[time.name][-1], time.delay_us)
    operator = _operator(parts, time, within)
    node = Node(operator, before.schema, (before,))
    last = projection_node(node, unchanged(stream.node.schema), stream.node.schema)
    return Stream(stream.still, last, stream.frame, principal=node)


def _with_parts_of_windows(
    stream: Stream, keys: tuple[str, ...], time: EventTime | None
) -> tuple[Node, dict[str, tuple[str, str]]]:
    """The stream, and beside its windows that are asked about where they start and end.

    What the two parts of such a column are called; the second is its event time.
    """
    schema = stream.node.schema
    wanted = {*keys, *(() if time is None else (time.name,))}
    windows = [each for each in schema if each.name in wanted and is_window_type(each.type)]
    columns = list(unchanged(schema))
    for each in windows:
        window = Column(each.name, each.type)
        columns.append(Named(f"{each.name}.start", bound_of(window, "start")))
        columns.append(Named(f"window_time({each.name})", last_moment_of(window)))
    made = told_apart(tuple(columns))
    names = [each.name for each in made[len(schema) :]]
    parts = zip(names[::2], names[1::2], strict=True)
    named = {each.name: part for each, part in zip(windows, parts, strict=True)}
    return projection_node(stream.node, made, schema_of(made)), named


def _method(within: bool) -> str:
    return "dropDuplicatesWithinWatermark" if within else "dropDuplicates"


def _operator(keys: tuple[str, ...], time: EventTime | None, within: bool) -> DropDuplicates:
    if time is None and within:
        raise BuildError(
            "dropDuplicatesWithinWatermark is not supported on streaming DataFrames/DataSets"
            " without watermark: call withWatermark before it, and keep the column it names"
        )
    if time is None:
        return DropDuplicates(keys)
    if within:
        return DropDuplicates(keys, time.name, time.delay_us)
    return DropDuplicates(keys, time.name, 0 if time.name in keys else None)


@dataclass(frozen=True)
class EventTime:
    """The column that a stream's watermark is about, and its delay."""

    name: str
    delay_us: int


def event_time_of(stream: Stream) -> EventTime | None:
    """That of its rows one by one; where windows say it, that has to be asked of them."""
    time = _noted_time_of(stream)
    if time is not None and is_window_type(stream.node.schema.field(time.name).type):
        raise BuildError(
            f"the event time of this stream is in its windows, {time.name}: select"
            f" window_time({time.name}) in their place"
        )
    return time


def _noted_time_of(stream: Stream) -> EventTime | None:
    """By the note of Spark's columns: one that was computed anew is not the event time."""
    noted = [field for field in stream.schema if DELAY in field.metadata]
    if not noted:
        return None
    if len(noted) > 1:
        raise BuildError(
            "More than one event time columns are available. The column list:"
            f" {', '.join(field.name for field in noted)}. Please ensure there is only one event"
            " time column per stream: drop the others, or compute them again with withColumn"
        )
    refuse_untimely(stream.node, is_watermarked=True)
    return EventTime(noted[0].name, int(noted[0].metadata[DELAY]) * 1000)


def _keys_of(frame: DataFrame, subset: list[str] | None) -> tuple[str, ...]:
    """As Spark's analyzer finds them, without regard to case; it says what is wrong."""
    plan = below_aliases(_analyzed(frame.dropDuplicates(subset)))
    return tuple(str(key.name()) for key in sequence(plan.keys()))


def _analyzed(frame: DataFrame) -> JavaObject:
    return frame._jdf.queryExecution().analyzed()


def _refuse_updates(stream: Stream, method: str) -> None:
    if not stream.can_be_final:
        raise BuildError(
            f"{method} is called on an aggregated stream, whose rows are new values of older ones"
            " and of which it would keep the first: drop duplicates before groupBy, or group by"
            " windows of a stream withWatermark(...), which event time closes"
        )


def _refuse_unfit_keys(stream: Stream, keys: tuple[str, ...], method: str) -> None:
    kinds = dict(stream.dtypes)
    for key in keys:
        kind = stream.node.schema.field(key).type
        if unsupported_key_type(kind) is not None and not is_window_type(kind):
            raise BuildError(
                f"{method} by {key!r} is not possible, as rows are not told apart by a"
                f" {kinds[key]}: name other columns, {method}(['...']), or cast it to a string"
            )
