"""What `groupBy` gives, and the stream that an aggregation of it makes.

Theory of operation: the grouping is applied to the empty DataFrame of the stream, and what Spark
made of it is read (`aggregations`). It becomes up to three nodes: what keys and aggregates read is
computed, records are aggregated, and the result columns are computed of that. The uid and the
parallelism that are said afterwards are those of the aggregate, not of the projection behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import StructType

from stillframe.errors import BuildError
from stillframe.graph.logical import WINDOW, Aggregate, Node
from stillframe.key_groups import unsupported_key_type
from stillframe.spark.expressions.windows import WINDOW_TYPE, refuse_untimely
from stillframe.spark.internals import as_known
from stillframe.spark.plans.aggregations import Aggregation, aggregation_of
from stillframe.spark.refusals import BEFORE, NotOffered
from stillframe.spark.stream import Stream, leaf_of, projection_node, schema_of
from stillframe.spark.types import from_arrow_type, to_arrow_schema
from stillframe.state.accumulators import unsupported

if TYPE_CHECKING:
    from pyspark.sql import GroupedData
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    from stillframe.api.functions import KeyedFunction
    from stillframe.api.processors import KeyProcessor


class GroupedStream:
    """What `groupBy` gives: PySpark's GroupedData for a stream."""

    def __init__(self, stream: Stream, node: Node, grouped: Any) -> None:
        """`node` is the stream's, also where `stream.node` refuses columns of the same name.

        `grouped` is what Spark makes of the grouping.
        """
        self._stream = stream
        self._node = node
        self._grouped = grouped

    def agg(self, *exprs: Column | dict[str, str]) -> Stream:
        return aggregated(self._stream, self._node, self._grouped.agg(*exprs))

    def count(self) -> Stream:
        return aggregated(self._stream, self._node, self._grouped.count())

    def sum(self, *cols: str) -> Stream:
        return aggregated(self._stream, self._node, self._grouped.sum(*cols))

    def min(self, *cols: str) -> Stream:
        return aggregated(self._stream, self._node, self._grouped.min(*cols))

    def max(self, *cols: str) -> Stream:
        return aggregated(self._stream, self._node, self._grouped.max(*cols))

    def avg(self, *cols: str) -> Stream:
        return aggregated(self._stream, self._node, self._grouped.avg(*cols))

    mean = avg

    def process(
        self,
        function: Callable[[], KeyedFunction] | Callable[[], KeyProcessor],
        schema: str | StructType,
    ) -> Stream:
        """Call a `KeyProcessor` with the rows of each key, or a `KeyedFunction` with batches.

        `function` is the class, or whatever makes an object of it when called without arguments;
        it is called on executors, once per subtask and start, and what is no class or `partial` of
        one also here, to know which of the two it makes. `schema` is that of what it answers. The
        rows of a key all come to the same object, which may register timers.
        """
        from stillframe.spark.processors.processed import processed

        return processed(self._stream, self._grouped, function, schema)

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: GroupedData | None = None,
        eventTimeColumnName: str = "",
    ) -> Stream:
        """Call a PySpark `StatefulProcessor` with the rows of each key, as `Row` objects."""
        given = (statefulProcessor, outputStructType, outputMode, timeMode)
        return self._transformed(given, initialState, eventTimeColumnName, in_pandas=False)

    def transformWithStateInPandas(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: GroupedData | None = None,
        eventTimeColumnName: str = "",
    ) -> Stream:
        """Call a PySpark `StatefulProcessor` with the rows of each key, as pandas DataFrames."""
        given = (statefulProcessor, outputStructType, outputMode, timeMode)
        return self._transformed(given, initialState, eventTimeColumnName, in_pandas=True)

    def _transformed(
        self,
        given: tuple[StatefulProcessor, StructType | str, str, str],
        initial: GroupedData | None,
        event_time: str,
        *,
        in_pandas: bool,
    ) -> Stream:
        from stillframe.spark.processors.processed import keys_of_grouping
        from stillframe.spark.processors.stateful import Initial, transformed

        method = "transformWithStateInPandas" if in_pandas else "transformWithState"
        keys = keys_of_grouping(self._stream, self._grouped, method)
        more = (Initial.of(initial), event_time)
        return transformed(self._stream, keys, *given, *more, in_pandas=in_pandas)

    def applyInPandasWithState(
        self,
        func: Callable[..., Any],
        outputStructType: StructType | str,
        stateStructType: StructType | str,
        outputMode: str,
        timeoutConf: str,
    ) -> Stream:
        """Call a function with the rows of each key, as pandas DataFrames, and a `GroupState`."""
        from stillframe.spark.processors.processed import keys_of_grouping
        from stillframe.spark.processors.stateful import with_group_state

        keys = keys_of_grouping(self._stream, self._grouped, "applyInPandasWithState")
        given = (func, outputStructType, stateStructType, outputMode, timeoutConf)
        return with_group_state(self._stream, keys, *given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"a grouped stream has no attribute {name!r}")
        raise NotOffered(
            f"a grouped stream has no {name}: it has count, sum, min, max, avg, agg, process,"
            f" transformWithState, transformWithStateInPandas and applyInPandasWithState; {BEFORE}"
        )


@as_known()
def aggregated(stream: Stream, node: Node, frame: DataFrame) -> Stream:
    """The stream as Spark understood a grouping of its frame; for `node` see `GroupedStream`."""
    refuse_grouped(stream)
    made = aggregation_of(frame)
    before = projection_node(node, made.before, schema_of(made.before))
    _refuse_unsupported(made, before.schema)
    if made.window is not None:
        refuse_untimely(node, is_watermarked=made.is_watermarked)
    operator = Aggregate(made.keys, made.calls, made.window)
    aggregate = Node(operator, _aggregate_schema(made, before), (before,))
    last = projection_node(aggregate, made.after, to_arrow_schema(frame.schema))
    return Stream(stream.still, last, leaf_of(frame), principal=aggregate, grouped=stream)


def refuse_grouped(stream: Stream) -> None:
    """Raise for a stream whose rows replace each other, in whichever output mode."""
    if not stream.can_be_final:
        raise BuildError(
            "this stream is already aggregated, and grouping its updates again would count"
            " every new value beside the old one: group once, by the keys that are wanted, or first"
            " by windows of a stream withWatermark(...), which event time closes"
        )


def _aggregate_schema(made: Aggregation, upstream: Node) -> pa.Schema:
    window = [] if made.window is None else [pa.field(WINDOW, WINDOW_TYPE)]
    keys = [upstream.schema.field(name) for name in made.keys]
    return pa.schema([*window, *keys, *(pa.field(call.name, call.type) for call in made.calls)])


def _refuse_unsupported(made: Aggregation, schema: pa.Schema) -> None:
    for key in made.keys:
        if unsupported_key_type(schema.field(key).type) is not None:
            found = from_arrow_type(schema.field(key).type).simpleString()
            raise BuildError(
                f"groupBy {key!r} is not possible, as rows are not told apart by a {found}: group"
                " by its parts, or cast it to a string"
            )
    for call in made.calls:
        kind = None if call.input is None else schema.field(call.input).type
        why = unsupported(call, kind)
        if why is not None:
            raise BuildError(
                f"the aggregate {call.name} cannot be kept for a stream ({why}): cast its column"
                " to another type, or leave it out"
            )
