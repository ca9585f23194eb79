"""`join` in PySpark's words: what Spark's analyzer made of it, as our graph has it.

Theory of operation
-------------------
The two empty frames are joined by Spark, which resolves names, aliases and `on="id"`, makes both
sides of an equality one type, and raises its own errors. What it understood is a `Join`, perhaps
with a projection above it that leaves one of two key columns. The condition is taken apart: each
equality of something on the left with something on the right is a pair of keys, all else is
evaluated on pairs of rows. How long a row has to be kept is read off that condition, from what it
says about the two event times.

Within the operator every column has a name of its own; the projection behind it gives Spark's.
Where Spark has two columns of one name, the stream's columns keep their own names within, and
Spark's columns note them (`COLUMN_NOTE`): one of the two can still be dropped or renamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from py4j.java_gateway import JavaObject
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession

from stillframe.errors import BuildError
from stillframe.graph.expressions import Call, Column, Expression, Named, StartValue, all_parts
from stillframe.graph.logical import Join, JoinKind, JoinSide, Node, walk
from stillframe.graph.time_bounds import TimeBounds, time_bounds
from stillframe.key_groups import unsupported_key_type
from stillframe.spark.expressions.evaluated import Crossings, InTwo, columns_below
from stillframe.spark.expressions.nodes import name_or_sql
from stillframe.spark.expressions.reading import COLUMN_NOTE, Translator, translated
from stillframe.spark.expressions.window_rules import bound_of, is_window_type, last_moment_of
from stillframe.spark.expressions.windows import (
    is_event_time,
    is_watermarked_throughout,
    without_note,
)
from stillframe.spark.internals import as_known
from stillframe.spark.steps import ExprId, below_aliases, children, class_name, id_of, sequence
from stillframe.spark.stream import Stream, frame_of_columns, projection_node, schema_of
from stillframe.spark.types import to_arrow_schema

if TYPE_CHECKING:
    from stillframe.spark.plans.lookups import LatestStream

_SPARK_NAMES: dict[JoinKind, str] = {
    "inner": "Inner",
    "left": "LeftOuter",
    "right": "RightOuter",
    "full": "FullOuter",
    "semi": "LeftSemi",
}
On = str | list[str] | SparkColumn | list[SparkColumn] | None

_KINDS = {
    "INNER": "inner",
    "LEFT OUTER": "left",
    "RIGHT OUTER": "right",
    "FULL OUTER": "full",
    "LEFT SEMI": "semi",
    "LEFT ANTI": "anti",
    "CROSS": "cross",
}


# --- Two streams --------------------------------------------------------------------------------


def joined(
    stream: Stream, other: Stream | DataFrame | LatestStream, on: On, how: str | None
) -> Stream:
    """The stream joined with another, with a bounded DataFrame or with newest rows."""
    from stillframe.spark.plans.lookups import (
        LatestStream,
        joined_with_latest,
        joined_with_leaf,
        joined_with_table,
    )

    if isinstance(other, Stream):
        _refuse_strangers(stream, other)
        return joined_streams(stream, other, stream.frame.join(other.frame, on, how))
    if isinstance(other, DataFrame):
        return joined_with_table(stream, other, joined_with_leaf(stream, other, on, how))
    if isinstance(other, LatestStream):
        return joined_with_latest(stream, other, on, how)
    raise BuildError(
        f"join takes a stream, a DataFrame or newest rows (latest_by), not a {type(other).__name__}"
    )


@as_known()
def joined_streams(first: Stream, second: Stream, frame: DataFrame) -> Stream:
    """The two as Spark understands `frame`, which is a join of their frames."""
    _refuse_updates(first, second)
    found = found_join(frame)
    _refuse_unequal(found)
    times, bounds = _times_of(found, first.node_by_ids, second.node_by_ids)
    _refuse_unbounded(found, bounds)
    inputs = tuple(
        projection_node(stream.node_by_ids, side.columns, schema_of(side.columns))
        for stream, side in ((first, found.left), (second, found.right))
    )
    operator = Join(
        cast(JoinKind, found.how),
        JoinSide(found.left.keys, times[0]),
        JoinSide(found.right.keys, times[1]),
        bounds.earliest_us,
        bounds.latest_us,
        found.condition,
    )
    join = Node(operator, _schema_of_join(operator, inputs), inputs)
    result = told_apart(found.result)
    fields = zip(to_arrow_schema(frame.schema), result, strict=True)
    schema = pa.schema([field.with_name(named.name) for field, named in fields])
    last = projection_node(join, result, schema)
    return Stream(first.still, last, _frame_of(frame, found, result, bounds), principal=join)


def _refuse_strangers(first: Stream, second: Stream) -> None:
    if first.still.spark is not second.still.spark:
        raise BuildError(
            "join is given streams of two Spark sessions, and a job runs in one: read both with"
            " the same stillframe.on(spark)"
        )


def _refuse_updates(first: Stream, second: Stream) -> None:
    if not (first.can_be_final and second.can_be_final):
        raise BuildError(
            "an aggregated stream cannot be joined, as its rows are new values of older ones, which"
            " were joined already: join the streams before groupBy, or group by windows of a stream"
            " withWatermark(...), which event time closes"
        )


def _refuse_unequal(found: FoundJoin) -> None:
    if found.how == "anti":
        raise BuildError(
            "LeftAnti joins with a streaming DataFrame/Dataset on the right are not supported: say"
            " 'left', and keep the rows where a column of the right is null"
        )
    if found.how == "cross" or not found.left.keys:
        raise BuildError(
            "Stream-stream join without equality predicate is not supported: rows meet where they"
            " have the same key, so say join(other, left.id == right.id), with any further"
            " condition beside that"
        )


def _times_of(
    found: FoundJoin, first: Node, second: Node
) -> tuple[tuple[str | None, str | None], TimeBounds]:
    """The event times of the sides, and how far apart they are in a pair, as far as that is said.

    Behind a join there are two event times in one stream: those are taken about which most is said.
    """
    lefts = tuple(found.left.event_times) if is_watermarked_throughout(first) else ()
    rights = tuple(found.right.event_times) if is_watermarked_throughout(second) else ()
    if not lefts or not rights:
        return (next(iter(lefts), None), next(iter(rights), None)), TimeBounds()
    pairs = zip(found.left.keys, found.right.keys, strict=True)
    keys = {(left, right) for left, right in pairs}

    def bounds_of(times: tuple[str, str]) -> TimeBounds:
        # As in Spark a row stays until event time is behind its last match, not only there.
        bounds = time_bounds(found.condition, *times).loosened(by_us=1)
        return bounds.and_also(TimeBounds(0, 0)) if times in keys else bounds

    def said_about(times: tuple[str, str]) -> int:
        bounds = bounds_of(times)
        return (bounds.earliest_us is not None) + (bounds.latest_us is not None)

    times = max(product(lefts, rights), key=said_about)
    return times, bounds_of(times)


def _refuse_unbounded(found: FoundJoin, bounds: TimeBounds) -> None:
    """An unmatched row comes out when nothing can match it any more: that must be in sight."""
    is_bounded = {
        "left": bounds.latest_us is not None,
        "semi": bounds.latest_us is not None,
        "right": bounds.earliest_us is not None,
        "full": bounds != TimeBounds(),
    }
    if not is_bounded.get(found.how, True):
        raise BuildError(
            f"Stream-stream {found.spark_name} join between two streaming DataFrame/Datasets is not"
            " supported without a watermark in the join keys, or a watermark on the nullable side"
            " and an appropriate range condition: call withWatermark on both streams, and say"
            " between which times after a row's own its matches are"
        )


def _schema_of_join(operator: Join, inputs: tuple[Node, ...]) -> pa.Schema:
    """Whatever the inputs say: the other side of an unmatched row is null."""
    sides = inputs[:1] if operator.how == "semi" else inputs
    return pa.schema([pa.field(each.name, each.type) for side in sides for each in side.schema])


def told_apart(columns: tuple[Named, ...]) -> tuple[Named, ...]:
    """The same columns with names of which there are not two."""
    taken = {named.name for named in columns}
    seen: set[str] = set()
    made = []
    for named in columns:
        name = named.name
        if name in seen:
            name = next(
                n for place in range(2, len(columns) + 2) if (n := f"{name}_{place}") not in taken
            )
            taken.add(name)
        seen.add(name)
        made.append(Named(name, named.expression))
    return tuple(made)


def _frame_of(
    frame: DataFrame, found: FoundJoin, result: tuple[Named, ...], bounds: TimeBounds
) -> DataFrame:
    """Spark's columns of the result, with what is to be noted about them.

    An event time is one behind the join only if its rows cannot come out arbitrarily late.
    """
    in_time = {
        *(found.left.event_times.values() if bounds.latest_us is not None else ()),
        *(found.right.event_times.values() if bounds.earliest_us is not None else ()),
    }
    return noted_frame(frame, result, in_time)


def noted_frame(frame: DataFrame, result: tuple[Named, ...], in_time: set[str]) -> DataFrame:
    """Spark's columns of a join; `in_time` are those behind it that are event times."""
    spark = frame.sparkSession
    jvm: Any = spark._jvm
    columns = jvm.java.util.ArrayList()
    outputs = sequence(frame._jdf.queryExecution().analyzed().output())
    for column, named in zip(outputs, result, strict=True):
        is_column = isinstance(named.expression, Column)
        if not (is_column and cast(Column, named.expression).name in in_time):
            column = without_note(spark, column)
        builder = jvm.org.apache.spark.sql.types.MetadataBuilder().withMetadata(column.metadata())
        if frame.columns.count(column.name()) > 1:
            builder.putString(COLUMN_NOTE, named.name)
        else:
            builder.remove(COLUMN_NOTE)
        columns.add(column.withMetadata(builder.build()))
    return frame_of_columns(spark, jvm.org.apache.spark.api.python.PythonUtils.toSeq(columns))


def refuse_mode_of_joins(last: Node, mode: str) -> None:
    """Spark's words: a row that has come out with nulls is not taken back."""
    for node in walk([last]):
        if not isinstance(node.operator, Join):
            continue
        is_outer = node.operator.how in ("left", "right", "full")
        modes = ("append",) if is_outer else ("append", "update")
        if mode not in modes:
            offered = " and ".join(each.capitalize() for each in modes)
            raise BuildError(
                f"{_SPARK_NAMES[node.operator.how]} join between two streaming DataFrames/Datasets"
                f" is not supported in {mode.capitalize()} output mode, only in {offered} output"
                f" mode{'s' if len(modes) > 1 else ''}"
            )


# --- What Spark made of it ----------------------------------------------------------------------


@dataclass(frozen=True)
class FoundInput:
    """One input of a join: what has to be computed of the stream before it."""

    columns: tuple[Named, ...]
    """All of the stream's, by names that no column of the other input has; then computed keys."""
    keys: tuple[str, ...]
    """Among these columns, pair by pair with those of the other input."""
    event_times: dict[str, str]
    """The columns with the event times that a watermark is about, and who says them: themselves,
    or the column with the windows whose last moments they are."""


@dataclass(frozen=True)
class FoundJoin:
    """A join as Spark understood it."""

    how: str
    """inner, left, right, full, semi, anti or cross."""
    spark_name: str
    """As Spark calls it in its messages."""
    left: FoundInput
    right: FoundInput
    condition: Expression | None
    """What must hold besides the equality of the keys, over the columns of both inputs."""
    result: tuple[Named, ...]
    """Spark's columns, over those of both inputs (of the left one, of a semi or anti join)."""


def found_join(frame: DataFrame) -> FoundJoin:
    """What `frame` is, which is the join of two leaves, `first.frame.join(second.frame, …)`."""
    top = below_aliases(frame._jdf.queryExecution().analyzed())
    join = below_aliases(top.child()) if class_name(top) == "Project" else top
    if class_name(join) != "Join":
        raise BuildError(
            f"a stream cannot do this operation itself: {join.simpleString(200).strip()}; say"
            " join(other, on, how) with columns of both in on"
        )
    taken: set[str] = set()
    spark = frame.sparkSession
    left, right = (_Side(spark, side, taken) for side in (join.left(), join.right()))
    rest = []
    for part in _demanded(join.condition()):
        if not _is_pair_of_keys(part, left, right):
            rest.append(part)
    both: dict[ExprId, Expression] = {**left.inner, **right.inner}
    crossings = Crossings(spark)
    made = [InTwo(crossings, Translator(both)).translate(part) for part in rest]
    _refuse_subqueries(made)
    kind = str(join.joinType().sql())
    return FoundJoin(
        how=_KINDS.get(kind, kind.lower()),
        spark_name=str(join.joinType().toString()),
        left=left.found(),
        right=right.found(),
        condition=_all_of(crossings.settled(made)),
        result=tuple(_result(top, both)),
    )


def _refuse_subqueries(conditions: list[Expression]) -> None:
    for part in all_parts(*conditions):
        if isinstance(part, StartValue):
            raise BuildError(
                f"the {part.sql} stands in the condition of a join, where a stream does not run it:"
                " select it into a column of one of the two first"
            )


class _Side:
    """The columns of one input by Spark's ids: what they are in the stream and in the join."""

    def __init__(self, spark: SparkSession, plan: JavaObject, taken: set[str]) -> None:
        """`taken` are the names that columns of either side have already; it grows."""
        self._crossings = Crossings(spark)
        self._own = columns_below(self._crossings, plan)
        self._taken = taken
        self._columns: list[Named] = []
        self._event_times: dict[str, str] = {}
        self._keys: list[str] = []
        self.inner: dict[ExprId, Column] = {}
        own: dict[str, Expression] = {}
        noted: list[str] = []
        for output in sequence(below_aliases(plan).output()):
            named = self._add(str(output.name()), self._own[id_of(output)])
            own[named] = self._own[id_of(output)]
            self.inner[id_of(output)] = Column(named, own[named].type)
            if is_event_time(output):
                noted.append(named)
        for name in noted:
            time = name
            if is_window_type(own[name].type):
                time = self._add(f"window_time({name})", last_moment_of(own[name]))
            self._event_times[time] = name

    def has_all_of(self, node: JavaObject) -> bool:
        """Whether the expression is over columns of this side, and over some."""
        ids = set(_ids_in(node))
        return bool(ids) and ids <= self.inner.keys()

    def add_key(self, node: JavaObject) -> None:
        column = self.inner[id_of(node)] if class_name(node) == "AttributeReference" else None
        own = InTwo(self._crossings, Translator(self._own)).translate(node)
        if is_window_type(own.type):
            self._add_window_keys(str(node.sql()), column, own)
            return
        if reason := unsupported_key_type(own.type):
            raise BuildError(
                f"rows cannot be joined by {node.sql()}: {reason}; use numbers, booleans, strings,"
                " binary, dates, timestamps or decimals"
            )
        self._keys.append(column.name if column else self._add(name_or_sql(node), own))

    def _add_window_keys(self, name: str, column: Column | None, window: Expression) -> None:
        """Windows are the same if they start and end together: by its end event time may go."""
        self._keys.append(self._add(f"{name}.start", bound_of(window, "start")))
        said_by = {column: time for time, column in self._event_times.items()}
        time = said_by.get(column.name) if column else None
        self._keys.append(time or self._add(f"window_time({name})", last_moment_of(window)))

    def found(self) -> FoundInput:
        made = self._crossings.settled(each.expression for each in self._columns)
        columns = (Named(named.name, each) for named, each in zip(self._columns, made, strict=True))
        return FoundInput(tuple(columns), tuple(self._keys), self._event_times)

    def _add(self, wanted: str, expression: Expression) -> str:
        names = (wanted, *(f"{wanted}_{place}" for place in range(2, len(self._taken) + 3)))
        name = next(each for each in names if each not in self._taken)
        self._taken.add(name)
        self._columns.append(Named(name, expression))
        return name


def _demanded(condition: JavaObject) -> Iterator[JavaObject]:
    """The parts of an optional condition that must all be true."""
    waiting = [condition.get()] if condition.isDefined() else []
    while waiting:
        node = waiting.pop(0)
        if class_name(node) == "And":
            waiting[:0] = children(node)
        else:
            yield node


def _is_pair_of_keys(node: JavaObject, left: _Side, right: _Side) -> bool:
    """Whether it is an equality between the sides, which are then told their keys."""
    if class_name(node) != "EqualTo" or not node.deterministic():
        return False
    one, other = children(node)
    if left.has_all_of(other) and right.has_all_of(one):
        one, other = other, one
    elif not (left.has_all_of(one) and right.has_all_of(other)):
        return False
    left.add_key(one)
    right.add_key(other)
    return True


def _ids_in(node: JavaObject) -> Iterator[ExprId]:
    if class_name(node) == "AttributeReference":
        yield id_of(node)
    for child in children(node):
        yield from _ids_in(child)


def _all_of(parts: list[Expression]) -> Expression | None:
    whole: Expression | None = None
    for part in parts:
        whole = part if whole is None else Call("and", (whole, part), part.type)
    return whole


def _result(top: JavaObject, both: dict[ExprId, Expression]) -> Iterator[Named]:
    nodes = top.projectList() if class_name(top) == "Project" else top.output()
    for node in sequence(nodes):
        yield Named(str(node.name()), translated(node, both))
