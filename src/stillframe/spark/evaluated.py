"""What our slots do not know of a projection or a filter, made ready for Spark's own evaluator.

Theory of operation: each column of a projection is translated by `expressions`. Those that it
refuses become one `SparkProjection`: Spark's expressions after those rules of its optimizer without
which they cannot be evaluated, bound to the places of their input columns, serialized by Java. A
slot has a JVM beside it that evaluates them (`evaluator/`). A filter is the projection of one
boolean column.

Rules of this file:
- what is native stays native, beside a column that is not;
- clock functions become a column that the slot gives, before constants are folded: otherwise the
  moment at which the job was built would be a constant;
- what needs more than a row and a moment (a file's name, a partition's number, another plan, a
  Python function) is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.types import StructField, StructType, TimestampType

from stillframe.errors import BuildError, telling_line
from stillframe.graph.expressions import Column, Expression, Named, SparkProjection, SparkResult
from stillframe.secrets import is_secret_name
from stillframe.spark.expressions import (
    Translator,
    all_of,
    below_projection,
    conditions_of,
    leaf_columns,
)
from stillframe.spark.nodes import refused, type_of, without_alias
from stillframe.spark.plans import (
    ExprId,
    analyzed,
    as_scala,
    below_aliases,
    children,
    class_name,
    id_of,
    is_leaf,
    sequence,
)
from stillframe.spark.types import empty_frame

Columns = dict[ExprId, Expression]


def columns_in_two(frame: DataFrame) -> tuple[Named, ...]:
    """The columns of `select`, `withColumn`, …: native ones, and beside them Spark's."""
    plan = analyzed(frame)
    known, refusals = _translated(plan)
    outputs = sequence(plan.output())
    if not all(id_of(output) in known for output in outputs):
        known |= computed_by_spark(frame.sparkSession, plan, refusals)
    return tuple(Named(output.name(), known[id_of(output)]) for output in outputs)


def condition_in_two(frame: DataFrame) -> Expression:
    """The condition of `filter` or `where`; several are joined by AND."""
    conditions, leaf = conditions_of(frame)
    translator = Translator(dict(leaf_columns(leaf)))

    def of(condition: JavaObject) -> Expression:
        try:
            return translator.translate(condition)
        except BuildError as refusal:
            return _Preparation(frame.sparkSession, {}).of_condition(condition, leaf, refusal)

    return all_of(map(of, conditions))


def computed_by_spark(
    spark: SparkSession, plan: JavaObject, refusals: dict[ExprId, BuildError]
) -> Columns:
    """Those columns of the projection that have been refused, for Spark's evaluator."""
    return _Preparation(spark, refusals).of_projection(plan)


def _translated(plan: JavaObject) -> tuple[Columns, dict[ExprId, BuildError]]:
    """What is native of the columns that come out of the plan, and why the others are not."""
    plan = below_aliases(plan)
    if is_leaf(plan):
        return dict(leaf_columns(plan)), {}
    below, _ = _translated(below_projection(plan))
    translator = Translator(below)
    known: Columns = {}
    refusals: dict[ExprId, BuildError] = {}
    for output in sequence(plan.projectList()):
        try:
            known[id_of(output)] = translator.translate(output)
        except BuildError as refusal:
            refusals[id_of(output)] = refusal
    return known, refusals


_BOUND_TO_FILES = "needs to know which file and partition of Spark's a record is from"
_OTHER_PLANS = "asks another plan, which a stream does not run"
_REFUSED = {
    "InputFileName": _BOUND_TO_FILES,
    "InputFileBlockStart": _BOUND_TO_FILES,
    "InputFileBlockLength": _BOUND_TO_FILES,
    "MonotonicallyIncreasingID": _BOUND_TO_FILES,
    "SparkPartitionID": _BOUND_TO_FILES,
    "CurrentTime": "is a clock that a stream has not (current_timestamp() it has)",
    "Exists": _OTHER_PLANS,
    "ListQuery": _OTHER_PLANS,
    "InSubquery": _OTHER_PLANS,
    "ScalarSubquery": _OTHER_PLANS,
    "LateralSubquery": _OTHER_PLANS,
}

_CLOCKS = {
    "CurrentTimestamp": "now",
    "Now": "now",
    "CurrentDate": "CAST(now AS date)",
    "LocalTimestamp": "CAST(now AS timestamp_ntz)",
}
"""What Spark's clocks are, made of the moment that the slot gives."""


class _Preparation:
    """Of what one operator wants of Spark's evaluator."""

    def __init__(self, spark: SparkSession, refusals: dict[ExprId, BuildError]) -> None:
        self._spark = spark
        self._refusals = refusals
        jvm: Any = spark._jvm
        self._jvm = jvm
        self._catalyst = self._jvm.org.apache.spark.sql.catalyst
        self._now = empty_frame(spark, StructType([StructField("now", TimestampType())]))
        self._takes_time = False

    def of_projection(self, plan: JavaObject) -> Columns:
        """The columns of the projection that are refused elsewhere."""
        lists, needed = [], set(self._refusals)
        plan = below_aliases(plan)
        while not is_leaf(plan):
            chosen = [each for each in sequence(plan.projectList()) if id_of(each) in needed]
            needed = {id_of(each) for made in chosen for each in _references(made)}
            lists.append(chosen)
            plan = below_projection(plan)
        return self._results(lists, plan)

    def of_condition(
        self, condition: JavaObject, leaf: JavaObject, refusal: BuildError
    ) -> Expression:
        named = _only(self._now.select(lit(True).alias("kept")))
        alias = named.withNewChildren(self._sequence([condition]))
        self._refusals = {id_of(alias): refusal}
        [result] = self._results([[alias]], leaf).values()
        return result

    def _results(self, lists: list[list[JavaObject]], leaf: JavaObject) -> Columns:
        """`lists` are projections, each over the next, the last over the leaf."""
        outputs = lists[0]
        for made in outputs:
            self._refuse(made, made)
        wanted = {id_of(each) for made in lists[-1] for each in _references(made)}
        inputs = [each for each in sequence(leaf.output()) if id_of(each) in wanted]
        names = leaf_columns(leaf)
        projection = self._projection(lists, inputs, [names[id_of(each)] for each in inputs])
        return {
            id_of(made): SparkResult(projection, place, type_of(made), without_alias(made).sql())
            for place, made in enumerate(outputs)
        }

    def _refuse(self, node: JavaObject, whole: JavaObject) -> None:
        name = class_name(node)
        if name == "PythonUDF":
            if without_alias(whole).equals(node):
                raise self._refusals[id_of(whole)]
            raise refused(
                without_alias(whole),
                f"calls the Python function {node.name()} within what only Spark's own evaluator"
                " computes",
                "select what the function gives into a column of its own first",
            )
        if name in _REFUSED:
            raise refused(node, _REFUSED[name])
        for child in children(node):
            self._refuse(child, whole)

    def _projection(
        self, lists: list[list[JavaObject]], inputs: list[JavaObject], columns: list[Column]
    ) -> SparkProjection:
        rules = self._catalyst.optimizer
        catalog = self._spark._jsparkSession.sessionState().catalogManager()
        plan = self._plan(lists, inputs)
        for rule in (rules.ReplaceExpressions, rules.ReplaceCurrentLike(catalog)):
            plan = rule.apply(plan)
        plan = self._with_clock(plan, inputs)
        if self._takes_time:
            inputs = [*inputs, *sequence(analyzed(self._now).output())]
        for rule in (
            rules.RewriteWithExpression,
            rules.ReplaceUpdateFieldsExpression,
            rules.ConstantFolding,
            rules.NormalizeFloatingNumbers,
        ):
            plan = rule.apply(plan)
        return SparkProjection(
            inputs=tuple(columns),
            takes_time=self._takes_time,
            input_schema=_schema(inputs),
            output_schema=_schema(lists[0]),
            levels=tuple(self._levels(plan)),
            conf=tuple(self._conf()),
            java_options=tuple(
                self._jvm.org.apache.spark.launcher.JavaModuleOptions.defaultModuleOptionArray()
            ),
        )

    def _plan(self, lists: list[list[JavaObject]], inputs: list[JavaObject]) -> JavaObject:
        logical = self._catalyst.plans.logical
        plan = getattr(getattr(logical, "LocalRelation$"), "MODULE$").apply(self._sequence(inputs))
        for made in reversed(lists):
            plan = logical.Project(self._sequence(made), plan)
        return plan

    def _with_clock(self, plan: JavaObject, inputs: list[JavaObject]) -> JavaObject:
        """The plan over one more column, if there is a clock in it, which reads that then."""
        lists = [
            [self._swapped(made) for made in sequence(each.projectList())] for each in _chain(plan)
        ]
        if not self._takes_time:
            return self._plan(lists, inputs)
        [now] = sequence(analyzed(self._now).output())
        return self._plan([lists[0], *([*made, now] for made in lists[1:])], [*inputs, now])

    def _swapped(self, node: JavaObject) -> JavaObject:
        name = class_name(node)
        if name in _CLOCKS:
            self._takes_time = True
            return without_alias(_only(self._now.selectExpr(_CLOCKS[name])))
        if name == "CurrentTimeZone":
            zone = self._spark.conf.get("spark.sql.session.timeZone")
            return without_alias(_only(self._now.select(lit(zone))))
        before = children(node)
        after = [self._swapped(child) for child in before]
        if all(one is other for one, other in zip(before, after, strict=True)):
            return node
        return node.withNewChildren(self._sequence(after))

    def _levels(self, plan: JavaObject) -> Iterator[bytes]:
        """The projections of the plan, each bound to what is below it; the innermost first."""
        expressions = self._catalyst.expressions
        attributes = getattr(getattr(expressions, "package$"), "MODULE$").AttributeSeq
        for project in reversed(list(_chain(plan))):
            # A record may be null where it was declared not to be.
            below = [each.withNullability(True) for each in sequence(project.child().output())]
            bound = expressions.BindReferences.bindReferences(
                project.projectList(), attributes(self._sequence(below))
            )
            yield self._serialized(bound, project)

    def _serialized(self, bound: JavaObject, project: JavaObject) -> bytes:
        into = self._jvm.java.io.ByteArrayOutputStream()
        try:
            self._jvm.java.io.ObjectOutputStream(into).writeObject(bound)
        except Py4JJavaError as error:
            raise BuildError(
                f"a stream cannot send {project.simpleString(200).strip()} to its slots"
                f" ({telling_line(str(error))}): compute it before still.stream(...), or in"
                " mapInArrow"
            ) from error
        return bytes(into.toByteArray())

    def _conf(self) -> Iterator[tuple[str, str]]:
        """What of the session's settings an expression may look at."""
        found = self._spark._jsparkSession.sessionState().conf().getAllConfs()
        settings = self._jvm.scala.jdk.javaapi.CollectionConverters.asJava(found)
        for name, value in sorted(dict(settings).items()):
            is_of_catalogs = name.startswith("spark.sql.catalog.")
            if name.startswith("spark.sql.") and not is_of_catalogs and not is_secret_name(name):
                yield name, value

    def _sequence(self, items: Iterable[JavaObject]) -> JavaObject:
        return as_scala(self._jvm, items)


def _chain(plan: JavaObject) -> Iterator[JavaObject]:
    """The projections of which the plan is made, down to its leaf."""
    while not is_leaf(plan):
        if class_name(plan) != "Project":
            raise AssertionError(f"Spark made another step of a projection: {plan}")
        yield plan
        plan = plan.child()


def _references(node: JavaObject) -> list[JavaObject]:
    return sequence(node.references().toSeq())


def _only(frame: DataFrame) -> JavaObject:
    """The one expression that the frame selects."""
    [made] = sequence(analyzed(frame).projectList())
    return made


def _schema(columns: list[JavaObject]) -> str:
    fields = [
        {
            "name": str(place),
            "type": json.loads(column.dataType().json()),
            "nullable": True,
            "metadata": {},
        }
        for place, column in enumerate(columns)
    ]
    return json.dumps({"type": "struct", "fields": fields})
