"""`Stream`: what a DataFrame is in PySpark, for rows that keep coming.

Theory of operation: a stream keeps a node of the graph and an empty DataFrame with its columns.
An operation is applied to the empty DataFrame first, so that Spark's analyzer says what the result
looks like and what is wrong; then it is translated into nodes. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.types import StructType

from stillframe.connectors.discard import DiscardSink
from stillframe.errors import BuildError
from stillframe.graph import expressions as graph
from stillframe.graph.finality import can_be_final, sends_updates
from stillframe.graph.logical import (
    Aggregate,
    Filter,
    MapInArrow,
    Node,
    Operator,
    Project,
    Union,
    WithWatermark,
    Write,
    replaced,
    walk,
)
from stillframe.graph.plan import build_plan
from stillframe.runtime.row_functions import (
    ArrowFunction,
    Batches,
    PandasFunction,
    RowFlatMap,
    RowMap,
    name_of,
)
from stillframe.spark.expressions.evaluated import columns_in_two, condition_in_two
from stillframe.spark.expressions.windows import watermark_of
from stillframe.spark.internals import as_known
from stillframe.spark.refusals import REFUSED, refuse_what_never_ends
from stillframe.spark.steps import analyzed
from stillframe.spark.types import empty_frame, parse_schema, to_arrow_schema

if TYPE_CHECKING:
    import pandas

    from stillframe.api.functions import TwoInputFunction
    from stillframe.api.stream_functions import StreamFunction
    from stillframe.spark.plans.combined import BroadcastStream
    from stillframe.spark.plans.grouped import GroupedStream
    from stillframe.spark.plans.lookups import LatestStream
    from stillframe.spark.session import Still
    from stillframe.spark.writer import StreamWriter

ColumnOrName = Column | str


class Stream:
    """Rows that keep coming, with the columns and methods of a DataFrame. Immutable."""

    def __init__(
        self,
        still: Still,
        node: Node,
        frame: DataFrame,
        *,
        principal: Node | None = None,
        grouped: Stream | None = None,
        is_settled: bool = False,
    ) -> None:
        self._still = still
        self._node = node
        self._frame = frame
        self._principal = principal or node
        """Whose uid and parallelism are meant: an aggregate, not the projection behind it."""
        self._grouped = grouped
        """The stream that was aggregated to make this one."""
        self._is_settled = is_settled
        """Whether another stream begins at its principal too, which must stay what it is."""

    @classmethod
    def reading(cls, still: Still, node: Node) -> Stream:
        """The stream that a source gives."""
        return cls(still, node, empty_frame(still.spark, node.schema))

    # --- What it looks like -------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """Its place in the graph."""
        names = self._frame.columns
        if len(set(names)) < len(names):  # which only a join makes
            repeated = next(name for name in names if names.count(name) > 1)
            raise BuildError(
                f"the stream has two columns named {repeated}, of either side of a join: drop one,"
                f" drop(other.{repeated}), or rename it with select(...) and alias(...)"
            )
        return self._node

    @property
    def node_by_ids(self) -> Node:
        """The same, for what finds columns by Spark's ids: names may repeat, as behind a join."""
        return self._node

    @property
    def frame(self) -> DataFrame:
        """An empty DataFrame with its columns, for Spark's analyzer."""
        return self._frame

    @property
    def still(self) -> Still:
        return self._still

    @property
    def schema(self) -> StructType:
        return self._frame.schema

    @property
    def columns(self) -> list[str]:
        return self._frame.columns

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        return self._frame.dtypes

    @property
    def isStreaming(self) -> bool:
        return True

    @property
    def is_updates(self) -> bool:
        """Whether rows are new values of keys, as an aggregation makes them until it is told."""
        return sends_updates(self._node)

    @property
    def can_be_final(self) -> bool:
        """Whether a row never takes another's place, if the output mode is append."""
        return can_be_final(self._node)

    @property
    def principal(self) -> Node:
        """The operator that it is named after."""
        return self._principal

    @property
    def grouped(self) -> Stream | None:
        """The stream that was aggregated to make this one; None: none was, or several."""
        return self._grouped

    def printSchema(self, level: int | None = None) -> None:
        self._frame.printSchema(level)

    def explain(self) -> None:
        """Print the physical plan: its tasks, how many of each, and what travels between them."""
        config = self._still.job_config({})
        slots = config.parallelism or self._still.spark.sparkContext.defaultParallelism
        last = self._node
        if isinstance(last.operator, Union):  # it shows only as the inputs of what reads it
            last = Node(Write(DiscardSink()), last.schema, (last,))
        print(build_plan("stream", [last], slots, config.max_parallelism).explain())

    def __repr__(self) -> str:
        return f"Stream[{', '.join(f'{name}: {kind}' for name, kind in self.dtypes)}]"

    def __getitem__(self, item: Any) -> Any:
        """A column by name or place; as in PySpark, a list selects and a Column filters."""
        if isinstance(item, Column):
            return self.filter(item)
        if isinstance(item, list | tuple):
            return self.select(*item)
        return self._frame[item]

    def __getattr__(self, name: str) -> Any:
        """A column; or a method that a DataFrame has, which gives a stream where it gives one."""
        if name.startswith("_"):
            raise AttributeError(f"a stream has no attribute {name!r}")
        if name in self._frame.columns:
            return self._frame[name]
        refuse_what_never_ends(name)
        if hasattr(DataFrame, name):
            from stillframe.spark.plans.borrowed import borrowed

            return borrowed(self, name)
        return self._frame.__getattr__(name)  # raises in Spark's words

    def __dir__(self) -> list[str]:
        of_frames = (name for name in dir(DataFrame) if name not in REFUSED)
        columns = (name for name in self.columns if name.isidentifier())
        return sorted({*super().__dir__(), *columns, *of_frames})

    # --- Rows in, rows out --------------------------------------------------------------------

    def select(self, *cols: ColumnOrName | list[ColumnOrName]) -> Stream:
        return projected(self, self._frame.select(*_listed(cols)))

    def selectExpr(self, *expr: str | list[str]) -> Stream:
        return projected(self, self._frame.selectExpr(*_listed(expr)))

    def withColumn(self, colName: str, col: Column) -> Stream:
        return projected(self, self._frame.withColumn(colName, col))

    def withColumns(self, colsMap: dict[str, Column]) -> Stream:
        return projected(self, self._frame.withColumns(colsMap))

    def withColumnRenamed(self, existing: str, new: str) -> Stream:
        return projected(self, self._frame.withColumnRenamed(existing, new))

    def withColumnsRenamed(self, colsMap: dict[str, str]) -> Stream:
        return projected(self, self._frame.withColumnsRenamed(colsMap))

    def drop(self, *cols: ColumnOrName) -> Stream:
        return projected(self, self._frame.drop(*cols))

    def toDF(self, *cols: str) -> Stream:
        return projected(self, self._frame.toDF(*cols))

    def filter(self, condition: ColumnOrName) -> Stream:
        return filtered(self, self._frame.filter(condition))

    where = filter

    def alias(self, alias: str) -> Stream:
        """The same rows; their columns also go by `alias.column`."""
        return self.with_frame(self._frame.alias(alias))

    def transform(self, func: Callable[..., Stream], *args: Any, **kwargs: Any) -> Stream:
        return func(self, *args, **kwargs)

    def mapInArrow(
        self, func: Callable[[Batches], Iterable[pa.RecordBatch]], schema: str | StructType
    ) -> Stream:
        """Call `func` on executors with an iterator over record batches; emit what it yields.

        It is called once per batch, never once per partition: what it keeps in variables of its
        own does not survive, and is in no checkpoint.
        """
        declared = parse_schema(self._still.spark, schema)
        function = ArrowFunction(func, to_arrow_schema(declared), self._time_zone)
        return self._mapped(func, function, declared)

    def mapInPandas(
        self,
        func: Callable[[Iterator[pandas.DataFrame]], Iterable[pandas.DataFrame]],
        schema: str | StructType,
    ) -> Stream:
        """As `mapInArrow`, with pandas DataFrames."""
        declared = parse_schema(self._still.spark, schema)
        function = PandasFunction(func, to_arrow_schema(declared), self._time_zone)
        return self._mapped(func, function, declared)

    def map_rows(self, function: Callable[[Any], Any], schema: str | StructType) -> Stream:
        """Call `function` with each row; it gives back a tuple, dict or Row, or None to drop it.

        This costs a Python call per row: expressions and `mapInArrow` are much faster.
        """
        declared = parse_schema(self._still.spark, schema)
        return self._mapped(function, RowMap(function, to_arrow_schema(declared)), declared)

    def flat_map_rows(
        self, function: Callable[[Any], Iterable[Any]], schema: str | StructType
    ) -> Stream:
        """As `map_rows`, but `function` gives back any number of rows: a list, or a generator."""
        declared = parse_schema(self._still.spark, schema)
        return self._mapped(function, RowFlatMap(function, to_arrow_schema(declared)), declared)

    def process(self, function: Callable[[], StreamFunction], schema: str | StructType) -> Stream:
        """Call a `StreamFunction` with the batches of this stream; it may keep state.

        `function` is the class, or whatever makes an object of it when called without arguments;
        it is called on executors, once per subtask and start, and once here. `schema` is that of
        the batches it answers. For state by key call `groupBy` first.
        """
        from stillframe.spark.processors.processed import processed_whole

        refuse_repeated(self.columns)
        return self._then(*processed_whole(self, function, schema))

    def withWatermark(self, eventTime: str, delayThreshold: str) -> Stream:
        """Say which column is the event time, and by how much records may come out of order."""
        refuse_updates(self)
        return watermarked(self, *watermark_of(self._frame, eventTime, delayThreshold))

    def groupBy(self, *cols: ColumnOrName | list[ColumnOrName]) -> GroupedStream:
        from stillframe.spark.plans.grouped import GroupedStream, refuse_grouped

        refuse_grouped(self)
        return GroupedStream(self, self._node, self._frame.groupBy(*_listed(cols)))

    groupby = groupBy

    def union(self, other: Stream) -> Stream:
        """The rows of both, column by column by their places, in no order between the two."""
        from stillframe.spark.plans.combined import refuse_strangers, united

        refuse_strangers("union", self, other)
        return united([self, other], self._frame.union(other._frame))

    unionAll = union

    def unionByName(self, other: Stream, allowMissingColumns: bool = False) -> Stream:
        """The rows of both, column by column by their names."""
        from stillframe.spark.plans.combined import refuse_strangers, united

        refuse_strangers("union", self, other)
        frame = self._frame.unionByName(other._frame, allowMissingColumns)
        return united([self, other], frame)

    def join(
        self,
        other: Stream | DataFrame | LatestStream,
        on: str | list[str] | Column | list[Column] | None = None,
        how: str | None = None,
    ) -> Stream:
        """The rows of both that match; the other is a stream, a DataFrame or `latest_by(...)`.

        Two streams are joined on equal keys, and on event times that are so far apart: a row is
        kept until the watermark says that nothing more can match it. `how` is inner, left, right,
        full or left_semi; all but inner need watermarks and such a range. A row that comes later
        than the watermark is dropped.
        """
        from stillframe.spark.plans.joins import joined

        return joined(self, other, on, how)

    def dropDuplicates(self, subset: list[str] | None = None) -> Stream:
        """The first row of each key: of all columns, or of those named.

        Keys are kept for ever, unless the column of `withWatermark` is one of them.
        """
        from stillframe.spark.plans.duplicates import without_duplicates

        return without_duplicates(self, subset, within=False)

    drop_duplicates = dropDuplicates

    def distinct(self) -> Stream:
        """Every different row once."""
        return self.dropDuplicates()

    def dropDuplicatesWithinWatermark(self, subset: list[str] | None = None) -> Stream:
        """The first row of each key; it is forgotten when the watermark passes event time + delay.

        Duplicates whose event times are no further apart than the watermark's delay are dropped.
        """
        from stillframe.spark.plans.duplicates import without_duplicates

        return without_duplicates(self, subset, within=True)

    @property
    def writeStream(self) -> StreamWriter:
        from stillframe.spark.writer import StreamWriter

        return StreamWriter(self)

    def toDataFrame(self) -> DataFrame:
        """A streaming DataFrame that stands for this stream, for PySpark's verbs, views and SQL.

        Only Stillframe can run it: `still.writeStream(df)`, or `still.stream(df)` to go on here.
        """
        from stillframe.spark.plans.stand_ins import stand_in

        return stand_in(self)

    # --- Ours ---------------------------------------------------------------------------------

    def broadcast(self) -> BroadcastStream:
        """This stream for `other.connect(...)`: every subtask there gets all of its rows."""
        from stillframe.spark.plans.combined import BroadcastStream

        return BroadcastStream(self)

    def latest_by(self, *keys: str) -> LatestStream:
        """Of each key the newest row, for `other.join(this.latest_by("currency"), "currency")`.

        Every row of the other stream comes out at once, beside the row that is the newest one
        known then: by event time if this stream has a watermark, otherwise the one that came last.
        """
        from stillframe.spark.plans.lookups import latest_of

        return latest_of(self, keys)

    def connect(
        self,
        other: Stream | BroadcastStream,
        function: Callable[[], TwoInputFunction],
        schema: str | StructType,
        by: str | Sequence[str] | None = None,
    ) -> Stream:
        """Call a `TwoInputFunction` with the batches of this stream and of another.

        `function` is the class, or whatever makes an object of it when called without arguments;
        it is called on executors, once per subtask and start. `schema` is that of the batches it
        answers. Either `by` names columns that both streams have, and the rows of a key, of
        whichever stream, all come to the same object; or the other stream is broadcast,
        `stream.connect(other.broadcast(), ...)`, and every object gets all of its rows.
        """
        from stillframe.spark.plans.combined import connected

        return connected(self, other, function, schema, by)

    def iterate(self, body: Callable[[Stream], tuple[Stream, Stream]]) -> Stream:
        """A cycle: `body(stream)` answers `(out, back)`; what is in `back` comes round again.

        `body` is called once, here. The stream it is given has the rows of this one and those of
        `back`, which must have the same columns; `out` is what `iterate` answers. Both must come
        from the given stream. Rows on their way round are part of every checkpoint.

        A bounded job ends when its inputs have ended and nothing circulates any more: so every
        row must leave the cycle, or be dropped, after finitely many rounds. If one row never
        does, the job never ends. A cycle within a cycle is refused.
        """
        from stillframe.spark.plans.combined import iterated

        return iterated(self, body)

    def with_late(self) -> tuple[Stream, Stream]:
        """This stream of windows, and the rows that came too late for it.

        `counts, late = counts.with_late()`: the second has the rows that were grouped, with all
        their columns, whose windows had all closed when they came. They are not combined before
        they travel, which costs speed. To name the aggregate or to set its parallelism, do so
        before. Behind the late rows there is no watermark; they may be given one anew.
        """
        from stillframe.spark.plans.late import with_late

        return with_late(self)

    def uid(self, name: str) -> Stream:
        """Name the operator that made this stream, so that its state finds it after changes."""
        return self._with_principal(self._principal.with_uid(name))

    def parallelism(self, subtasks: int) -> Stream:
        """Run the operator that made this stream in this many subtasks."""
        return self._with_principal(self._principal.with_parallelism(subtasks))

    # --- How it is built ----------------------------------------------------------------------

    @property
    def _time_zone(self) -> str:
        return str(self._still.spark.conf.get("spark.sql.session.timeZone"))

    def _mapped(
        self,
        given: Callable[..., Any],
        function: Callable[[Batches], Iterable[pa.RecordBatch]],
        declared: StructType,
    ) -> Stream:
        if not callable(given):
            raise BuildError(f"a function is wanted here, not {given!r}")
        refuse_repeated(self.columns)
        schema = to_arrow_schema(declared)
        refuse_repeated(schema.names)
        frame = empty_frame(self._still.spark, declared)
        return self._then(MapInArrow(function, name_of(given)), schema, frame)

    def with_frame(self, frame: DataFrame) -> Stream:
        """The same rows; to Spark's analyzer their columns are those of `frame`."""
        return self._with(self._node, frame)

    def after(self, node: Node, frame: DataFrame) -> Stream:
        """What this node makes of the stream, with the columns of `frame`."""
        return self._with(node, frame)

    def _then(self, operator: Operator, schema: pa.Schema, frame: DataFrame) -> Stream:
        return self._with(Node(operator, schema, (self._node,)), frame)

    def _with(self, node: Node, frame: DataFrame) -> Stream:
        is_same = node is self._node
        return Stream(
            self._still,
            node,
            frame,
            principal=self._principal if is_same else node,
            grouped=self._grouped,
            is_settled=self._is_settled and is_same,
        )

    def _with_principal(self, principal: Node) -> Stream:
        if self._is_settled:
            raise BuildError(
                "uid and parallelism are said before with_late(), because the stream of late rows"
                " begins at the same operator: counts, late = counts.uid(...).with_late()"
            )
        node = replaced(self._node, self._principal, principal)
        return Stream(
            self._still,
            node,
            self._frame,
            principal=principal,
            grouped=self._grouped,
        )


def _listed(given: tuple[Any, ...]) -> Any:
    """As in PySpark, one list is as good as several arguments."""
    return given[0] if len(given) == 1 and isinstance(given[0], list) else given


@as_known()
def projected(stream: Stream, frame: DataFrame) -> Stream:
    """The stream with the columns of `frame`, which is a projection of the stream's own."""
    refuse_repeated(frame.columns)
    node = projection_node(stream._node, columns_in_two(frame), to_arrow_schema(frame.schema))
    return stream._with(node, leaf_of(frame))


@as_known()
def filtered(stream: Stream, frame: DataFrame) -> Stream:
    """The rows that `frame` keeps, which is a filter over the stream's own."""
    return stream._then(Filter(condition_in_two(frame)), stream._node.schema, stream._frame)


def watermarked(stream: Stream, operator: WithWatermark, columns: Any) -> Stream:
    """The stream with event time; `columns` are Spark's behind it, a sequence."""
    refuse_updates(stream)
    frame = frame_of_columns(stream._still.spark, columns)
    return stream._then(operator, stream._node.schema, frame)


def refuse_updates(stream: Stream) -> None:
    """Raise if event time would come too late to it."""
    nodes = walk([stream._node], through_late=False)
    if any(isinstance(node.operator, Aggregate) for node in nodes):
        raise BuildError(
            "Redefining watermark is disallowed: this stream is already aggregated, and the windows"
            " it is about are closed by the event time of what comes in; call withWatermark before"
            " groupBy, and behind it group by window_time(window)"
        )


def projection_node(upstream: Node, columns: tuple[graph.Named, ...], schema: pa.Schema) -> Node:
    """A node that computes these columns; none where they are what comes in."""
    is_same = columns == unchanged(upstream.schema)
    return upstream if is_same else Node(Project(columns), schema, (upstream,))


def unchanged(schema: pa.Schema) -> tuple[graph.Named, ...]:
    """Its columns as they are, for a projection."""
    return tuple(graph.Named(field.name, graph.Column(field.name, field.type)) for field in schema)


def leaf_of(frame: DataFrame) -> DataFrame:
    """An empty DataFrame whose columns are those of `frame`, also to Spark's analyzer.

    A column is known to Spark by an id. Those that an operation passes on keep theirs, so that
    `clicks.select("id", "app_id").filter(clicks.id > 7)` means what it means in PySpark.
    """
    return frame_of_columns(frame.sparkSession, analyzed(frame).output())


def frame_of_columns(spark: SparkSession, output: Any) -> DataFrame:
    """An empty DataFrame of these columns, which are Spark's own (a Scala sequence of them)."""
    jvm: Any = spark._jvm
    sql = jvm.org.apache.spark.sql
    # By its companion object: the class has a constructor of another shape in every version.
    local_relation = getattr(getattr(sql.catalyst.plans.logical, "LocalRelation$"), "MODULE$")
    relation = local_relation.apply(output)
    return DataFrame(sql.classic.Dataset.ofRows(spark._jsparkSession, relation), spark)


def schema_of(columns: Iterable[graph.Named]) -> pa.Schema:
    """That of the columns that these expressions make."""
    return pa.schema([(column.name, column.expression.type) for column in columns])


def refuse_repeated(names: list[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise BuildError(
            f"two columns would have the name {repeated[0]}: rename one of them with alias(...)"
        )
