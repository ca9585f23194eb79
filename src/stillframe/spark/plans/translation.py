"""A streaming DataFrame of Spark's own, as a stream: its analyzed plan, read from top to bottom.

Theory of operation
-------------------
The user has built `spark.readStream...` with plain PySpark, through SQL and views too. What Spark's
analyzer understood is a tree of some dozen kinds of nodes. Each is translated after its children:
they are streams then, and in Spark's plan an empty frame with the same columns (known by the same
ids) stands for each. What is left is one step over empty frames, which is what a method of `Stream`
makes, and it is read by the same code. So there is one translation of each step, whoever wrote it.

Rules of this file
------------------
1. A node that `_RULES` does not have is refused with its name, before anything starts.
2. A subtree without a stream in it is no business of ours: it becomes a DataFrame again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from stillframe.errors import BuildError
from stillframe.graph.expressions import Expression, Literal, Named
from stillframe.graph.logical import MapInArrow, Node, WithWatermark
from stillframe.runtime.exploding import Expanding
from stillframe.runtime.limiting import Limiting
from stillframe.spark.expressions.evaluated import (
    Crossings,
    InTwo,
    columns_below,
    computed_in_front,
)
from stillframe.spark.expressions.nodes import constant_of, schema_of_plan
from stillframe.spark.expressions.places import parts_of, placed
from stillframe.spark.expressions.reading import Translator, columns_of, function_of
from stillframe.spark.expressions.windows import window_grouped_by, without_note
from stillframe.spark.internals import as_known
from stillframe.spark.plans.combined import united
from stillframe.spark.plans.duplicates import deduplicated
from stillframe.spark.plans.file_names import with_file_names
from stillframe.spark.plans.generators import generated
from stillframe.spark.plans.grouped import aggregated
from stillframe.spark.plans.joins import joined_streams, told_apart
from stillframe.spark.plans.leaves import stream_of_leaf
from stillframe.spark.plans.lookups import joined_with_table
from stillframe.spark.plans.observed import Observing
from stillframe.spark.processors.stateful import (
    Initial,
    processor_of,
    transformed,
    with_group_state,
)
from stillframe.spark.refusals import refused_by_spark
from stillframe.spark.steps import analyzed, as_scala, children, class_name, sequence
from stillframe.spark.stream import (
    Stream,
    filtered,
    frame_of_columns,
    projected,
    watermarked,
)
from stillframe.spark.types import to_arrow_schema
from stillframe.spark.writer import StreamWriter

if TYPE_CHECKING:
    from stillframe.spark.session import Still


@as_known()
def stream_of(still: Still, frame: DataFrame) -> Stream:
    """What this streaming DataFrame would give if Spark ran it."""
    translation = _Translation(still)
    stream = translation.of(analyzed(frame))
    if translation.observers:
        raise BuildError(
            "what observe computes is told in the progress of a query, and a stream is none: say"
            " still.writeStream(df), or observe what stream.toDataFrame() gives"
        )
    return stream


@as_known()
def writer_of(still: Still, frame: DataFrame, *, is_unchanged: bool = False) -> StreamWriter:
    """The writer of what this DataFrame gives; of a program that was written for Spark or not.

    Sorting and limits are for a whole result. Where they stand last, Spark does them each time to
    the rows that the stream below them has given.
    """
    if not (isinstance(frame, DataFrame) and frame.isStreaming):
        return still.stream(frame).writeStream
    plan = analyzed(frame)
    translation = _Translation(still)
    query = translation.defining(plan)
    below = _below_whole_steps(query, plan)
    stream = translation.of(below)
    observers = tuple(translation.observers.values())
    if below is query:
        return StreamWriter(stream, observers=observers, is_unchanged=is_unchanged)
    return StreamWriter(
        stream,
        lambda rows: translation.finished(query, below, rows),
        observers=observers,
        is_unchanged=is_unchanged,
    )


_WHOLE = ("Sort", "GlobalLimit", "LocalLimit")
_BESIDE = ("Project", "SubqueryAlias")
"""What may stand between them and above."""


def _below_whole_steps(query: JavaObject, plan: JavaObject) -> JavaObject:
    """The query below the last sorting or limit that stands at its top; itself if there is none.
    `plan` has also what its WITH defines."""
    below = node = query
    if not any(class_name(each) in ("Sort", "Aggregate") for each in _nodes(plan)):
        return query  # rows that stay what they are can be counted as they come
    while class_name(node) in (*_WHOLE, *_BESIDE):
        if class_name(node) in _WHOLE:
            below = node.child()
        node = node.child()
    return below


def _nodes(plan: JavaObject) -> Iterator[JavaObject]:
    yield plan
    for child in children(plan):
        yield from _nodes(child)


class _Translation:
    """Of one plan."""

    def __init__(self, still: Still) -> None:
        self._still = still
        self._spark = still.spark
        self._jvm: Any = still.spark._jvm
        self._named: dict[int, Stream] = {}
        """The streams that the query's WITH defines, by Spark's numbers."""
        self._static: list[JavaObject] = []
        """What else it defines."""
        self.observers: dict[str, StreamWriter] = {}
        """Of what passes its `observe`s."""
        self._told: BuildError | None = None
        """What is wrong, with its place in the program if that is known."""

    def of(self, plan: JavaObject) -> Stream:
        """The stream that a subtree with a stream in it gives."""
        rule = _RULES.get(class_name(plan))
        try:
            if rule is None:
                raise self._refused(plan)
            return rule(self, plan)
        except BuildError as error:
            if error is self._told or type(error) is not BuildError:
                raise
            self._told = placed(str(error), parts_of(plan))
            raise self._told from error

    def _refused(self, plan: JavaObject) -> BuildError:
        said = refused_by_spark(self._jvm, plan)
        if said is None:
            step = plan.simpleString(200).strip().lstrip("~!")
            said = f"a stream cannot do this step of Spark's plan: {step}"
        return BuildError(f"{said}; do it in foreachBatch, or leave it out")

    def finished(self, plan: JavaObject, below: JavaObject, rows: DataFrame) -> DataFrame:
        """What the upper part of the plan makes of these rows, which are all there are."""
        local_relation = getattr(
            getattr(self._jvm.org.apache.spark.sql.catalyst.plans.logical, "LocalRelation$"),
            "MODULE$",
        )
        values = self._jvm.org.apache.spark.api.python.PythonUtils.toSeq(rows._jdf.collectAsList())
        leaf = local_relation.fromExternalRows(below.output(), values)
        return self._frame(self._replaced(plan, below, leaf))

    # --- Leaves

    def leaf(self, plan: JavaObject) -> Stream:
        return stream_of_leaf(self._still, plan)

    def with_definitions(self, plan: JavaObject) -> Stream:
        return self.of(self.defining(plan))

    def defining(self, plan: JavaObject) -> JavaObject:
        """The query of a plan; what its WITH defines, if it has one, is known from now on."""
        if class_name(plan) != "WithCTE":
            return plan
        *definitions, query = children(plan)
        for each in definitions:
            if each.isStreaming():
                self._named[int(each.id())] = self.of(each.child())
            else:
                self._static.append(each)
        return query

    def defined(self, plan: JavaObject) -> Stream:
        """A name of the WITH; each time it is used its columns have other ids."""
        frame = frame_of_columns(self._spark, plan.output())
        return self._named[int(plan.cteId())].with_frame(frame)

    def static(self, plan: JavaObject) -> DataFrame:
        """A subtree without a stream in it."""
        if self._static:
            logical = self._jvm.org.apache.spark.sql.catalyst.plans.logical
            plan = logical.WithCTE(plan, self._sequence(self._static))
        return self._frame(plan)

    # --- One child

    def only_child(self, plan: JavaObject) -> Stream:
        return self.of(plan.child())

    def observed(self, plan: JavaObject) -> Stream:
        child = self.of(plan.child())
        observing = Observing(self._spark, plan)
        if observing.name not in self.observers:  # a frame may be in a plan twice
            read = child.select(*(f"`{name}`" for name in observing.columns()))
            self.observers[observing.name] = StreamWriter(read).foreachBatch(observing)
        return child

    def project(self, plan: JavaObject) -> Stream:
        plan = with_file_names(self._jvm, plan)
        child = self.of(plan.child())
        return projected(child, self._over(plan, child))

    def filter(self, plan: JavaObject) -> Stream:
        joined = self._with_joins_for_subqueries(plan)
        if joined is not None:
            return self.of(joined)
        child = self.of(plan.child())
        return filtered(child, self._over(plan, child))

    def _with_joins_for_subqueries(self, plan: JavaObject) -> JavaObject | None:
        """IN and EXISTS are joins with a static DataFrame, as Spark's optimizer makes them of it;
        None: there are none in the condition."""
        catalyst = self._jvm.org.apache.spark.sql.catalyst
        has_any = catalyst.expressions.SubqueryExpression
        if not has_any.hasSubquery(plan.condition()):
            return None
        rules = catalyst.optimizer
        made = rules.RewriteNonCorrelatedExists.apply(plan)
        if has_any.hasInOrCorrelatedExistsSubquery(made.condition()):
            made = rules.RewritePredicateSubquery.apply(
                rules.PullupCorrelatedPredicates.apply(made)
            )
        return None if made.equals(plan) else made

    def watermark(self, plan: JavaObject) -> Stream:
        child = self.of(plan.child())
        node = self._jvm.org.apache.spark.sql.catalyst.plans.logical.EventTimeWatermark
        delay_us = int(node.getDelayMs(plan.delay())) * 1000
        time = plan.eventTime()
        if time.dataType().typeName() != "timestamp":
            raise BuildError(
                f"the event time {time.name()} is a {time.dataType().typeName()}, but a stream"
                " reads it from a column of timestamps: select the field into a column of its own"
            )
        return watermarked(child, WithWatermark(str(time.name()), delay_us), plan.output())

    def aggregate(self, plan: JavaObject) -> Stream:
        # A window's arithmetic stands below the grouping, and is read together with it.
        found = window_grouped_by(self._spark, plan)
        below = plan.child() if found is None else found.below
        child = self.of(below)
        frame = self._frame(self._replaced(plan, below, analyzed(child.frame)))
        return aggregated(child, child.node_by_ids, frame)

    def deduplicate(self, plan: JavaObject) -> Stream:
        child = self.of(plan.child())
        keys = tuple(str(key.name()) for key in sequence(plan.keys()))
        return deduplicated(child, keys, class_name(plan) == "DeduplicateWithinWatermark")

    def distinct(self, plan: JavaObject) -> Stream:
        child = self.of(plan.child())
        return deduplicated(child, tuple(child.columns), within=False)

    def limit(self, plan: JavaObject) -> Stream:
        rows_max = constant_of(plan.limitExpr())
        below = plan.child()
        if rows_max is None or class_name(below) != "LocalLimit":
            raise self._refused(plan)
        child = self.of(below.child())
        if child.is_updates:
            raise self._refused(plan)
        made = child.process(partial(Limiting, int(rows_max[0])), child.schema).parallelism(1)
        return made.with_frame(child.frame)

    def generate(self, plan: JavaObject) -> Stream:
        child = self.of(plan.child())
        stream = generated(child, plan, self._over(plan, child))
        if stream is None:
            raise self._refused(plan)
        return stream

    def expand(self, plan: JavaObject) -> Stream:
        """Each row for each window it is in, or for each grouping set."""
        below = plan.child()
        crossings = Crossings(self._spark)
        if class_name(below) == "Project":  # what is grouped by stands in it twice, by one name
            child = self.of(below.child())
            columns = columns_below(crossings, analyzed(self._over(below, child)))
        else:
            child = self.of(below)
            columns = columns_of(analyzed(child.frame))
        in_two = InTwo(crossings, Translator(columns))
        rows = [
            [in_two.translate(each) for each in sequence(row)]
            for row in sequence(plan.projections())
        ]
        front, rows = computed_in_front(crossings, child.node_by_ids, rows)
        outputs = [
            without_note(self._spark, each) if any(map(_is_null, of)) else each
            for each, of in zip(sequence(plan.output()), zip(*rows, strict=True), strict=True)
        ]
        named = [Named(str(each.name()), of) for each, of in zip(outputs, rows[0], strict=True)]
        names = [each.name for each in told_apart(tuple(named))]
        frame = frame_of_columns(
            self._spark,
            self._sequence(each.withName(name) for each, name in zip(outputs, names, strict=True)),
        )
        schema = to_arrow_schema(frame.schema)
        made = (tuple(Named(n, e) for n, e in zip(names, row, strict=True)) for row in rows)
        node = Node(MapInArrow(Expanding(tuple(made), schema), "expand"), schema, (front,))
        return child.after(node, frame)

    def map_in_arrow(self, plan: JavaObject) -> Stream:
        return self._mapped(plan, Stream.mapInArrow)

    def map_in_pandas(self, plan: JavaObject) -> Stream:
        return self._mapped(plan, Stream.mapInPandas)

    def _mapped(self, plan: JavaObject, method: Callable[..., Stream]) -> Stream:
        function = function_of(plan.functionExpr())
        stream = method(self.of(plan.child()), function, schema_of_plan(plan))
        return stream.with_frame(frame_of_columns(self._spark, plan.output()))

    def processed(self, plan: JavaObject, event_time: str = "") -> Stream:
        """A `StatefulProcessor`. Below it are the keys, and then all columns."""
        left, right = plan.left(), plan.right()
        child = self.of(left.child())
        keys = _first_names(left, plan.groupingAttributesLen())
        initial = None
        if plan.hasInitialState():
            named = _first_names(right, plan.initGroupingAttrsLen())
            initial = Initial(self.static(right.child()), named)
        stream = transformed(
            child,
            keys,
            processor_of(function_of(plan.functionExpr())),
            schema_of_plan(plan),
            str(plan.outputMode().toString()),
            _TIME_MODES[str(plan.timeMode().toString())],
            initial,
            event_time,
            in_pandas=_is_for_pandas(plan),
        )
        return stream.with_frame(frame_of_columns(self._spark, plan.output()))

    def event_time_of_processed(self, plan: JavaObject) -> Stream:
        stream = self.processed(plan.child(), str(plan.eventTime().name()))
        return stream.with_frame(frame_of_columns(self._spark, plan.output()))

    def with_group_state(self, plan: JavaObject) -> Stream:
        child = self.of(plan.child())
        stream = with_group_state(
            child,
            tuple(str(each.name()) for each in sequence(plan.groupingAttributes())),
            function_of(plan.functionExpr()),
            schema_of_plan(plan),
            StructType.fromJson(json.loads(plan.stateType().json())),
            str(plan.outputMode().toString()),
            str(plan.timeout().toString()),
        )
        return stream.with_frame(frame_of_columns(self._spark, plan.output()))

    # --- Several children

    def union(self, plan: JavaObject) -> Stream:
        parts = [self.of(self._streaming(child, plan)) for child in children(plan)]
        return united(parts, self._over(plan, *parts))

    def join(self, plan: JavaObject) -> Stream:
        left, right = plan.left(), plan.right()
        if not left.isStreaming():
            return self._joined_from_the_right(plan)
        first = self.of(left)
        if right.isStreaming():
            second = self.of(right)
            return joined_streams(first, second, self._over(plan, first, second))
        table = self.static(right)
        leaf = analyzed(frame_of_columns(self._spark, right.output()))
        return joined_with_table(
            first, table, self._with_children(plan, analyzed(first.frame), leaf)
        )

    def _joined_from_the_right(self, plan: JavaObject) -> Stream:
        """A stream that is joined to a table: the same as the table joined to the stream."""
        plans = self._jvm.org.apache.spark.sql.catalyst.plans
        kind = str(plan.joinType().sql())
        turned = {"INNER": "Inner$", "CROSS": "Cross$", "RIGHT OUTER": "LeftOuter$"}.get(kind)
        if turned is None:
            raise BuildError(
                f"{kind} join with a static DataFrame/Dataset on the left and a streaming"
                " DataFrame/Dataset on the right is not supported: a stream never ends, so nobody"
                " can say which rows of the DataFrame find no match; say 'right' or 'inner'"
            )
        kind_object = getattr(getattr(plans, turned), "MODULE$")
        stream, table = self.of(plan.right()), self.static(plan.left())
        leaf = analyzed(frame_of_columns(self._spark, plan.left().output()))
        other = plans.logical.Join(
            analyzed(stream.frame), leaf, kind_object, plan.condition(), plan.hint()
        )
        in_order = plans.logical.Project(plan.output(), other)
        return joined_with_table(stream, table, self._frame(in_order))

    def lateral(self, plan: JavaObject) -> Stream:
        """`LATERAL explode(...)` and the like: several rows of each, as with LATERAL VIEW."""
        logical = self._jvm.org.apache.spark.sql.catalyst.plans.logical
        kind, right = str(plan.joinType().sql()), plan.right().plan()
        named: list[JavaObject] | None = None
        while class_name(right) in ("SubqueryAlias", "Project"):
            if class_name(right) == "Project":
                if named is not None:
                    raise self._refused(plan)
                named = [self._without_outer(each) for each in sequence(right.projectList())]
            right = right.child()
        is_generator = class_name(right) == "Generate"
        if (
            not is_generator
            or class_name(right.child()) != "OneRowRelation"
            or plan.condition().isDefined()
            or kind not in ("INNER", "CROSS", "LEFT OUTER")
        ):
            raise self._refused(plan)
        made = logical.Generate(
            self._without_outer(right.generator()),
            self._sequence([]),
            bool(right.outer()) or kind == "LEFT OUTER",
            right.qualifier(),
            right.generatorOutput(),
            plan.left(),
        )
        shown = sequence(right.generatorOutput()) if named is None else named
        return self.of(
            logical.Project(self._sequence([*sequence(plan.left().output()), *shown]), made)
        )

    def _without_outer(self, node: JavaObject) -> JavaObject:
        """The expression over the columns that it calls those of an outer query."""
        if class_name(node) == "OuterReference":
            return node.e()
        below = children(node)
        if not below:
            return node
        return node.withNewChildren(self._sequence(map(self._without_outer, below)))

    def _streaming(self, child: JavaObject, plan: JavaObject) -> JavaObject:
        if not child.isStreaming():
            raise BuildError(
                f"a stream cannot be united with rows that are there already"
                f" ({child.simpleString(100).strip()}): make a stream of them, still.stream(df)"
            )
        return child

    # --- Steps over empty frames

    def _over(self, plan: JavaObject, *inputs: Stream) -> DataFrame:
        """The node over the frames of these streams in place of its children."""
        return self._with_children(plan, *(analyzed(each.frame) for each in inputs))

    def _with_children(self, plan: JavaObject, *leaves: JavaObject) -> DataFrame:
        return self._frame(plan.withNewChildren(self._sequence(leaves)))

    def _replaced(self, plan: JavaObject, below: JavaObject, leaf: JavaObject) -> JavaObject:
        """The plan, a chain down to `below`, with the leaf in its place."""
        (child,) = children(plan)
        if not child.equals(below):
            leaf = self._replaced(child, below, leaf)
        return plan.withNewChildren(self._sequence([leaf]))

    def _sequence(self, items: Any) -> JavaObject:
        return as_scala(self._jvm, items)

    def _frame(self, plan: JavaObject) -> DataFrame:
        of_rows = self._jvm.org.apache.spark.sql.classic.Dataset.ofRows
        return DataFrame(of_rows(self._spark._jsparkSession, plan), self._spark)


_TIME_MODES = {"NoTime": "none", "ProcessingTime": "processingTime", "EventTime": "eventTime"}


def _is_for_pandas(plan: JavaObject) -> bool:
    """PySpark 4.0 has this kind of function only, and says so by the node's name."""
    of_pandas_only = class_name(plan) == "TransformWithStateInPandas"
    return of_pandas_only or str(plan.userFacingDataType().toString()) == "pandas"


def _first_names(plan: JavaObject, number: int) -> tuple[str, ...]:
    return tuple(str(each.name()) for each in sequence(plan.output())[:number])


def _is_null(expression: Expression) -> bool:
    return isinstance(expression, Literal) and not expression.value.is_valid


_RULES: Mapping[str, Callable[[_Translation, JavaObject], Stream]] = {
    "StreamingRelation": _Translation.leaf,
    "StreamingRelationV2": _Translation.leaf,
    "WithCTE": _Translation.with_definitions,
    "CTERelationRef": _Translation.defined,
    "SubqueryAlias": _Translation.only_child,
    "View": _Translation.only_child,
    "ResolvedHint": _Translation.only_child,
    "PipeOperator": _Translation.only_child,
    # Where rows are is ours to say; what they are does not change.
    "Repartition": _Translation.only_child,
    "RepartitionByExpression": _Translation.only_child,
    "CollectMetrics": _Translation.observed,
    "Project": _Translation.project,
    "Filter": _Translation.filter,
    "EventTimeWatermark": _Translation.watermark,
    "Aggregate": _Translation.aggregate,
    "Deduplicate": _Translation.deduplicate,
    "DeduplicateWithinWatermark": _Translation.deduplicate,
    "Distinct": _Translation.distinct,
    "GlobalLimit": _Translation.limit,
    "Expand": _Translation.expand,
    "Generate": _Translation.generate,
    "MapInArrow": _Translation.map_in_arrow,
    "MapInPandas": _Translation.map_in_pandas,
    "TransformWithStateInPySpark": _Translation.processed,
    "TransformWithStateInPandas": _Translation.processed,
    "UpdateEventTimeWatermarkColumn": _Translation.event_time_of_processed,
    "FlatMapGroupsInPandasWithState": _Translation.with_group_state,
    "Union": _Translation.union,
    "Join": _Translation.join,
    "LateralJoin": _Translation.lateral,
}
"""From a node of Spark's plan to the stream it gives."""
