"""Several streams become one: `union`, `connect`, and the cycle of `iterate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from stillframe.api.functions import TwoInputFunction
from stillframe.errors import BuildError
from stillframe.graph import expressions as graph
from stillframe.graph.logical import CloseLoop, Connect, LoopHead, Node, Project, Union, walk
from stillframe.key_groups import unsupported_key_type
from stillframe.runtime.row_functions import name_of
from stillframe.spark.expressions.evaluated import columns_in_two
from stillframe.spark.processors.processed import refuse_no_function
from stillframe.spark.stream import (
    Stream,
    frame_of_columns,
    leaf_of,
    refuse_repeated,
    unchanged,
)
from stillframe.spark.types import empty_frame, parse_schema, to_arrow_schema


class BroadcastStream:
    """What `stream.broadcast()` gives: a stream that goes to every subtask of a `connect`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def stream(self) -> Stream:
        return self._stream

    def __repr__(self) -> str:
        return f"Broadcast{self._stream!r}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"a broadcast stream has no attribute {name!r}")
        raise BuildError(
            f"a broadcast stream has no {name}: it is only there to be connected,"
            " stream.connect(other.broadcast(), ...), so call broadcast() last"
        )


# --- Union ------------------------------------------------------------------------------------


def united(streams: Sequence[Stream], frame: DataFrame) -> Stream:
    """The rows of all, as Spark understands `frame`, which is a union of their frames."""
    if not all(stream.can_be_final for stream in streams):
        raise BuildError(
            "an aggregated stream cannot be united with another, as nobody could tell which rows"
            " are new values of which: unite the streams before groupBy, or write each on its own"
        )
    refuse_repeated(frame.columns)
    schema = to_arrow_schema(frame.schema)
    sides = zip(streams, _sides_of(frame), strict=True)
    inputs = tuple(_onto(stream.node, side, schema) for stream, side in sides)
    return Stream(streams[0].still, Node(Union(), schema, inputs), leaf_of(frame))


def _sides_of(frame: DataFrame) -> list[DataFrame]:
    """What the union is made of: each stream's columns, cast and put in order by Spark."""
    spark = frame.sparkSession
    jvm: Any = spark._jvm
    plans = frame._jdf.queryExecution().analyzed().children()
    of_rows = jvm.org.apache.spark.sql.classic.Dataset.ofRows
    return [
        DataFrame(of_rows(spark._jsparkSession, plans.apply(place)), spark)
        for place in range(plans.size())
    ]


def _onto(node: Node, side: DataFrame, schema: pa.Schema) -> Node:
    """This stream with the columns of the union: all that meets in one reader must be alike."""
    columns = tuple(
        graph.Named(name, column.expression)
        for name, column in zip(schema.names, columns_in_two(side), strict=True)
    )
    return node if node.schema == schema else Node(Project(columns), schema, (node,))


# --- Connect ----------------------------------------------------------------------------------


def connected(
    first: Stream,
    other: Stream | BroadcastStream,
    function: Callable[[], TwoInputFunction],
    schema: str | StructType,
    by: str | Sequence[str] | None,
) -> Stream:
    second = other.stream if isinstance(other, BroadcastStream) else other
    refuse_strangers("connect", first, second)
    keys = _keys_meant(other, by)
    if keys is not None:
        _refuse_unfit_keys(keys, first, second)
    refuse_no_function(function, TwoInputFunction, "connect")
    declared = parse_schema(first.still.spark, schema)
    made = to_arrow_schema(declared)
    refuse_repeated(made.names)
    operator = Connect(function, name_of(function), keys)
    return Stream(
        first.still,
        Node(operator, made, (first.node, second.node)),
        empty_frame(first.still.spark, declared),
    )


def _keys_meant(
    other: Stream | BroadcastStream, by: str | Sequence[str] | None
) -> tuple[str, ...] | None:
    keys = (by,) if isinstance(by, str) else tuple(by or ())
    if isinstance(other, BroadcastStream):
        if keys:
            raise BuildError(
                f"connect is given a broadcast stream and by={keys}, but rows are either parted by"
                " key or sent to everybody: leave out one of by and broadcast()"
            )
        return None
    if not keys:
        raise BuildError(
            "connect has to know which rows of the two streams meet: name the columns that both"
            " have, by='user_id', or send all of the other stream everywhere, other.broadcast()"
        )
    return keys


def _refuse_unfit_keys(keys: tuple[str, ...], first: Stream, second: Stream) -> None:
    for key in keys:
        if not isinstance(key, str):
            raise BuildError(f"connect takes the names of columns in by, not {key!r}")
        for stream, which in ((first, "first"), (second, "second")):
            if key not in stream.columns:
                raise BuildError(
                    f"connect by {key!r} needs that column in both streams, but the {which} has"
                    f" {', '.join(stream.columns)}: rename one with withColumnRenamed"
                )
        kinds = [dict(stream.dtypes)[key] for stream in (first, second)]
        if kinds[0] != kinds[1]:
            raise BuildError(
                f"connect by {key!r} needs one type in both streams, but it is {kinds[0]} in the"
                f" first and {kinds[1]} in the second: cast one of them"
            )
        if unsupported_key_type(first.node.schema.field(key).type) is not None:
            raise BuildError(
                f"connect by {key!r} is not possible, as rows are not told apart by a {kinds[0]}:"
                " cast it to a string or a number"
            )
    refuse_repeated(list(keys))


# --- Iterate ----------------------------------------------------------------------------------


def iterated(stream: Stream, body: Callable[[Stream], tuple[Stream, Stream]]) -> Stream:
    if not stream.can_be_final:
        raise BuildError(
            "an aggregated stream cannot go round in a cycle, as nobody could tell which rows are"
            " new values of which: call iterate before groupBy"
        )
    entry, frame = _nullable(stream)
    given = Stream(stream.still, Node(LoopHead(), entry.schema, (entry,)), frame)
    out, back = _two_streams(body(given), stream)
    if not back.can_be_final:
        raise BuildError(
            "what iterate sends back is aggregated, and its rows are new values of older ones:"
            " send rows back before groupBy, or make new ones of them in connect"
        )
    head = _head_of(entry, out, back)
    closed = Node(CloseLoop(head), out.node.schema, (out.node, _fitted_back(back, given)))
    return Stream(stream.still, closed, out.frame, principal=head)


def _nullable(stream: Stream) -> tuple[Node, DataFrame]:
    """The stream as it enters a cycle: whatever comes back later may be null in any column."""
    node = stream.node
    if all(field.nullable for field in node.schema):
        return node, stream.frame
    schema = pa.schema([field.with_nullable(True) for field in node.schema])
    return Node(Project(unchanged(node.schema)), schema, (node,)), _nullable_frame(stream.frame)


def _nullable_frame(frame: DataFrame) -> DataFrame:
    jvm: Any = frame.sparkSession._jvm
    output = frame._jdf.queryExecution().analyzed().output()
    columns = jvm.java.util.ArrayList()
    for place in range(output.size()):
        columns.add(output.apply(place).withNullability(True))
    as_seq = jvm.org.apache.spark.api.python.PythonUtils.toSeq
    return frame_of_columns(frame.sparkSession, as_seq(columns))


def _two_streams(answer: object, stream: Stream) -> tuple[Stream, Stream]:
    if (
        not isinstance(answer, tuple)
        or len(answer) != 2
        or not all(isinstance(part, Stream) for part in answer)
    ):
        raise BuildError(
            "the body of iterate answers two streams, (out, back): what leaves the cycle and what"
            f" goes round again, not {answer!r}"
        )
    for part in answer:
        refuse_strangers("iterate", stream, part)
    return answer


def _head_of(entry: Node, out: Stream, back: Stream) -> Node:
    """The head as the body left it: it may have been given a uid or a parallelism."""
    found = [_open_heads(entry, part.node) for part in (out, back)]
    for heads, which in zip(found, ("out", "back"), strict=True):
        if not heads:
            raise BuildError(
                f"the stream {which} that the body of iterate answers does not come from the"
                " stream the body is given: make both of that one"
            )
    first, *others = {id(head): head for heads in found for head in heads}.values()
    if others:
        raise BuildError(
            "the body of iterate uses the stream it is given both with and without a uid or"
            " parallelism: call uid(...) once, and use only what it answers"
        )
    return first


def _open_heads(entry: Node, last: Node) -> list[Node]:
    nodes = walk([last])
    closed = [node.operator.head for node in nodes if isinstance(node.operator, CloseLoop)]
    return [
        node
        for node in nodes
        if isinstance(node.operator, LoopHead)
        and node.inputs == (entry,)
        and not any(head is node for head in closed)
    ]


def _fitted_back(back: Stream, given: Stream) -> Node:
    if back.dtypes != given.dtypes:
        raise BuildError(
            f"iterate sends back {_in_words(back)}, but the cycle takes {_in_words(given)}:"
            " select the same columns in the same order, and cast where needed"
        )
    node, schema = back.node, given.node.schema
    if node.schema == schema:
        return node
    return Node(Project(unchanged(node.schema)), schema, (node,))


# --- All of them ------------------------------------------------------------------------------


def refuse_strangers(method: str, first: Stream, second: object) -> None:
    """Raise unless both are streams of one session."""
    if isinstance(second, BroadcastStream):
        raise BuildError(f"{method} takes a stream as it is: leave out broadcast()")
    if not isinstance(second, Stream):
        hint = ": make it one with still.stream(df)" if isinstance(second, DataFrame) else ""
        raise BuildError(f"{method} takes a stream, not a {type(second).__name__}{hint}")
    if first.still.spark is not second.still.spark:
        raise BuildError(
            f"{method} is given streams of two Spark sessions, and a job runs in one: read both"
            " with the same stillframe.on(spark)"
        )


def _in_words(stream: Stream) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in stream.dtypes)
