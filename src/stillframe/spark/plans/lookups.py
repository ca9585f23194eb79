"""`join` with something that is looked up: a bounded DataFrame, or the newest rows of a stream.

A bounded DataFrame is read when the job starts, and travels with the plan: every slot has it whole,
and all attempts of a driver have the same one, unless it is read again (`spark/refreshing`). What
it may be joined by, and how, is found in Spark's analyzed plan of the same join of two empty frames
(`spark/joins`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame

from stillframe.errors import BuildError, StartRefused
from stillframe.evaluator.beside import Evaluator
from stillframe.graph import expressions as graph
from stillframe.graph.expressions import Named, spark_results
from stillframe.graph.logical import Enrich, Lookup, Node, Transform, moved, walk
from stillframe.runtime.expressions import project
from stillframe.runtime.lookups import one_batch
from stillframe.spark.deployment.entry import spark_here
from stillframe.spark.expressions.subqueries import with_values_read
from stillframe.spark.internals import as_known
from stillframe.spark.plans.duplicates import event_time_of
from stillframe.spark.plans.joins import FoundJoin, found_join, noted_frame, told_apart
from stillframe.spark.steps import class_name, sequence
from stillframe.spark.stream import Stream, leaf_of, projection_node, refuse_repeated, schema_of
from stillframe.spark.types import to_arrow_schema

TABLE_BYTES_MAX = 64 * 1024 * 1024
_MIB = 1024 * 1024
_EVALUATOR_BYTES = 512 * _MIB

On = str | list[str] | Column | list[Column] | None


class LatestStream:
    """What `stream.latest_by(...)` gives: of each key the newest row that is known."""

    def __init__(self, stream: Stream, keys: Sequence[str]) -> None:
        self._stream = stream
        self._keys = tuple(keys)

    @property
    def stream(self) -> Stream:
        return self._stream

    @property
    def keys(self) -> tuple[str, ...]:
        return self._keys

    def __repr__(self) -> str:
        return f"Latest{self._stream!r} by {', '.join(self._keys)}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"the newest rows of a stream have no attribute {name!r}")
        raise BuildError(
            f"the newest rows of a stream have no {name}: they are only there to be joined,"
            " stream.join(other.latest_by(...), ...), so call latest_by last"
        )


def latest_of(stream: Stream, keys: Sequence[str]) -> LatestStream:
    """The newest rows of the stream by these columns, which must be there."""
    if not keys:
        raise BuildError(
            "latest_by has to know of what the newest row is meant: name the columns,"
            " latest_by('currency')"
        )
    for key in keys:
        if not isinstance(key, str):
            raise BuildError(f"latest_by takes the names of columns, not {key!r}")
    names = stream.frame.select(*keys).columns  # raises in Spark's words
    found = [_as_in(stream, name) for name in names]
    refuse_repeated(found)
    return LatestStream(stream, found)


def _as_in(stream: Stream, name: str) -> str:
    """The column as the stream spells it: Spark finds names without regard to case."""
    if name in stream.columns:
        return name
    return next(each for each in stream.columns if each.lower() == name.lower())


# --- A bounded DataFrame ------------------------------------------------------------------------


def joined_with_leaf(stream: Stream, frame: DataFrame, on: On, how: str | None) -> DataFrame:
    """The join of the stream's frame with an empty one that has the columns of `frame`."""
    if frame.isStreaming:
        raise BuildError(
            "join is given a streaming DataFrame of Spark's own: make it a stream with"
            " still.stream(df)"
        )
    return stream.frame.join(_aliased_leaf(frame), on, how)


@as_known()
def joined_with_table(stream: Stream, frame: DataFrame, joined: DataFrame) -> Stream:
    """Each row of the stream with the rows of a bounded DataFrame that match it; `joined` is the
    join of the stream's own frame with an empty one that has the columns of the other."""
    found = found_join(joined)
    kind = _refuse_outer(found)
    before = stream.node_by_ids
    left = projection_node(before, found.left.columns, schema_of(found.left.columns))
    table = TableOfFrame(frame, found.right.columns)
    operator = Lookup(table, kind, found.left.keys, found.right.keys, found.condition)
    if kind in ("semi", "anti"):
        schema = left.schema
    else:
        schema = pa.schema([*left.schema, *schema_of(found.right.columns)])
    lookup = Node(operator, schema, (left,))
    return _with_result(stream, lookup, joined, found)


def _refuse_outer(found: FoundJoin) -> Any:
    """The kind of join as the graph has it; Spark's words for what it refuses too."""
    if found.how == "right":
        raise BuildError(
            f"{found.spark_name} join with a streaming DataFrame/Dataset on the left and a static"
            " DataFrame/DataSet on the right not supported: a stream never ends, so nobody can"
            " say which rows of the DataFrame find no match; say 'left' or 'inner'"
        )
    if found.how == "full":
        raise BuildError(
            f"{found.spark_name} joins with streaming DataFrames/Datasets on the left and a static"
            " DataFrame/Dataset on the right is not supported: a stream never ends, so nobody can"
            " say which rows of the DataFrame find no match; say 'left' or 'inner'"
        )
    return "inner" if found.how == "cross" else found.how


def _aliased_leaf(frame: DataFrame) -> DataFrame:
    """An empty DataFrame with its columns, which also go by the names it has been given."""
    names = []
    plan = frame._jdf.queryExecution().analyzed()
    while class_name(plan) == "SubqueryAlias":
        names.append(str(plan.alias()))
        plan = plan.child()
    leaf = leaf_of(frame)
    for name in reversed(names):
        leaf = leaf.alias(name)
    return leaf


class TableOfFrame:
    """A bounded DataFrame as a table that is read when the job starts."""

    def __init__(self, frame: DataFrame, columns: tuple[Named, ...]) -> None:
        self._frame = frame
        self._columns = columns

    def read(self) -> pa.Table:
        """Run the DataFrame's plan; its columns, and what has to be computed of them."""
        schema = to_arrow_schema(self._frame.schema)
        # By their places: names may differ in nothing but their case.
        numbered = [f"c{place}" for place in range(len(schema))]
        rows = self._frame.toDF(*numbered).toArrow()
        _refuse_too_large(rows.nbytes)
        nullable = pa.schema([pa.field(f.name, f.type) for f in schema])
        rows = rows.rename_columns(schema.names).cast(nullable)
        with _evaluator_for(self._columns) as evaluator:
            made = project(self._columns, one_batch(rows), schema_of(self._columns), evaluator)
        return pa.Table.from_batches([made])

    @as_known()
    def read_again(self) -> pa.Table:
        """The same, of the files that are there now: Spark lists those of a DataFrame once."""
        for leaf in sequence(self._frame._jdf.queryExecution().analyzed().collectLeaves()):
            if class_name(leaf) == "LogicalRelation":
                relation: Any = leaf.relation()
                if class_name(relation) == "HadoopFsRelation":
                    relation.location().refresh()
        return self.read()


@contextmanager
def _evaluator_for(columns: tuple[Named, ...]) -> Iterator[Evaluator | None]:
    """Spark's evaluator, where these columns need it: here as beside a slot."""
    results = spark_results(*(each.expression for each in columns))
    if not results:
        yield None
        return
    wanted = [each.projection for each in results]
    with closing(Evaluator(spark_here(), wanted, _EVALUATOR_BYTES)) as evaluator:
        yield evaluator


def _refuse_too_large(size_bytes: int) -> None:
    if size_bytes > TABLE_BYTES_MAX:
        raise StartRefused(
            f"the DataFrame that a stream is joined with has {size_bytes / _MIB:,.0f} MiB, and"
            f" every slot keeps all of it, up to {TABLE_BYTES_MAX // _MIB} MiB: select fewer"
            " columns and rows of it, or join with its newest rows by key, which are spread over"
            " the slots: still.stream(df).latest_by(...)"
        )


def with_tables_read(sinks: Sequence[Node], refresh_seconds: float | None = None) -> list[Node]:
    """The graph with the rows of its tables, and what its subqueries give, in it; called once, when
    the job starts. `refresh_seconds`: how often the tables will be read again."""
    made: dict[int, Node] = {}
    for node in walk(sinks):
        fed = moved(node, made)
        operator = with_values_read(fed.operator)
        if operator is not fed.operator:
            fed = Node(operator, fed.schema, fed.inputs, fed.given_uid, fed.parallelism)
        if isinstance(operator, Lookup) and not isinstance(operator.table, pa.Table):
            rows = operator.table.read()
            read = replace(operator, table=rows, refresh_seconds=refresh_seconds)
            fed = Node(read, fed.schema, fed.inputs, fed.given_uid, fed.parallelism)
        if isinstance(operator, Transform) and operator.initial is not None:
            initial = operator.initial
            rows = initial if isinstance(initial, pa.Table) else initial.read()
            begun = replace(operator, initial=rows)
            fed = Node(begun, fed.schema, fed.inputs, fed.given_uid, fed.parallelism)
        made[id(node)] = fed
    return [made[id(sink)] for sink in sinks]


# --- The newest rows of a stream ----------------------------------------------------------------


def joined_with_latest(stream: Stream, latest: LatestStream, on: On, how: str | None) -> Stream:
    """Each row of the stream at once, with the newest row of the other that is known then."""
    other = latest.stream
    if stream.still.spark is not other.still.spark:
        raise BuildError(
            "join is given streams of two Spark sessions, and a job runs in one: read both with"
            " the same stillframe.on(spark)"
        )
    joined = stream.frame.join(other.frame, on, how)
    found = found_join(joined)
    _refuse_other_than_lookup(found, latest)
    left, right = (
        projection_node(side.node, columns, schema_of(columns))
        for side, columns in ((stream, found.left.columns), (other, found.right.columns))
    )
    time = event_time_of(other)
    named = dict(zip(other.columns, found.right.columns, strict=False))
    operator = Enrich(
        "left" if found.how == "left" else "inner",
        found.left.keys,
        found.right.keys,
        None if time is None else named[time.name].name,
    )
    schema = pa.schema([*left.schema, *schema_of(found.right.columns)])
    enriched = Node(operator, schema, (left, right))
    return _with_result(stream, enriched, joined, found)


def _refuse_other_than_lookup(found: FoundJoin, latest: LatestStream) -> None:
    if found.how not in ("inner", "left"):
        raise BuildError(
            f"the newest rows of a stream can be joined 'inner' or 'left', not {found.how!r}: only"
            " a row of the stream that is joined makes a row"
        )
    by = {named.name: named for named in found.right.columns}
    sought = [_own_name(by[key]) for key in found.right.keys]
    if sorted(sought) != sorted(latest.keys):
        raise BuildError(
            f"the newest rows are kept by {', '.join(latest.keys)}, so these columns have to be"
            " equal to columns of the same types of the stream that is joined, and nothing else,"
            f" but the join is on {', '.join(sought) or 'nothing'}: join on them, and cast a key"
            " before latest_by"
        )
    if found.condition is not None:
        raise BuildError(
            "the newest rows of a stream are joined on equal keys alone, and the condition asks"
            " for more: filter what comes out, or what goes in before latest_by"
        )


def _own_name(named: Named) -> str:
    """The stream's column that is meant; what is computed of it, as a cast, is another."""
    return named.expression.name if isinstance(named.expression, graph.Column) else named.name


# --- Both ---------------------------------------------------------------------------------------


def _with_result(stream: Stream, node: Node, joined: DataFrame, found: FoundJoin) -> Stream:
    """Spark's columns behind the operator. The event time of its rows is that of the stream."""
    result = told_apart(found.result)
    fields = zip(to_arrow_schema(joined.schema), result, strict=True)
    schema = pa.schema([field.with_name(named.name) for field, named in fields])
    return Stream(
        stream.still,
        projection_node(node, result, schema),
        noted_frame(joined, result, set(found.left.event_times.values())),
        principal=node,
    )
