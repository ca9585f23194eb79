"""What our slots do not know of an operator's expressions, made ready for Spark's own evaluator.

Theory of operation: each expression is translated by `expressions`. One that it refuses is Spark's
as a whole, and becomes a column of a `SparkProjection`: Spark's expressions after those rules of
its optimizer without which they cannot be evaluated, bound to the places of their inputs,
serialized by Java. A slot has a JVM beside it that evaluates them (`evaluator/`). A filter is the
projection of one boolean column.

What such an expression is not computed of by Spark is *cut out* and becomes one of its inputs: a
column of the stream, a key or an aggregate of a grouping, a subquery, a Python function. The
arguments of that function are translated like any other expression, so there may be several
crossings, one after the other. Until all expressions of an operator are known, a column with a name
of our own stands in the place of each result (`Crossings.settled`): so those that can be computed
together are.

Rules of this file:
- what is native stays native, beside a column that is not;
- clock functions become a column that the slot gives, before constants are folded: otherwise the
  moment at which the job was built would be a constant;
- what needs more than a row and a moment (a file's name, a partition's number, another plan for
  each row) is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.types import DataType, StructField, StructType, TimestampType

from stillframe.errors import BuildError, telling_line
from stillframe.graph.expressions import (
    Column,
    Expression,
    Named,
    Rewriting,
    SparkProjection,
    SparkResult,
    StartValue,
    all_parts,
)
from stillframe.graph.logical import Node, Project
from stillframe.secrets import is_secret_name
from stillframe.spark.expressions.nodes import refused, spark_type_of, type_of, without_alias
from stillframe.spark.expressions.reading import (
    Translator,
    all_of,
    below_projection,
    conditions_of,
    leaf_columns,
    python_function,
)
from stillframe.spark.steps import (
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
    crossings = Crossings(frame.sparkSession)
    known, outputs = columns_below(crossings, plan), sequence(plan.output())
    made = crossings.settled(known[id_of(output)] for output in outputs)
    return tuple(
        Named(str(output.name()), each) for output, each in zip(outputs, made, strict=True)
    )


def condition_in_two(frame: DataFrame) -> Expression:
    """The condition of `filter` or `where`; several are joined by AND."""
    conditions, leaf = conditions_of(frame)
    crossings = Crossings(frame.sparkSession)
    in_two = InTwo(crossings, Translator(dict(leaf_columns(leaf))))
    [condition] = crossings.settled([all_of([in_two.translate(each) for each in conditions])])
    return condition


def columns_below(crossings: Crossings, plan: JavaObject) -> Columns:
    """What each column that comes out of a projection is, over the columns of the stream below."""
    plan = below_aliases(plan)
    if is_leaf(plan):
        return dict(leaf_columns(plan))
    in_two = InTwo(crossings, Translator(columns_below(crossings, below_projection(plan))))
    return {id_of(output): in_two.translate(output) for output in sequence(plan.projectList())}


def computed_in_front(
    crossings: Crossings, upstream: Node, rows: list[list[Expression]]
) -> tuple[Node, list[list[Expression]]]:
    """For an operator that has no evaluator of Spark's: a node that has such results in columns
    behind its own, and the same expressions over that."""
    settled = iter(crossings.settled(each for row in rows for each in row))
    hidden: dict[int, Named] = {}

    def replacement(part: Expression) -> Expression | None:
        if not isinstance(part, SparkResult | StartValue):
            return None
        named = hidden.setdefault(id(part), Named(f"stillframe computed {len(hidden)}", part))
        return Column(named.name, part.type)

    over = Rewriting(replacement)
    left = [[over(next(settled)) for _ in row] for row in rows]
    if not hidden:
        return upstream, left
    own = [Named(field.name, Column(field.name, field.type)) for field in upstream.schema]
    made = [(each.name, each.expression.type) for each in hidden.values()]
    schema = pa.schema([*upstream.schema, *(pa.field(*each) for each in made)])
    return Node(Project((*own, *hidden.values())), schema, (upstream,)), left


_BOUND_TO_FILES = "needs to know which file and partition of Spark's a record is from"
_OTHER_PLANS = "asks another plan for each row, which a stream does not run"
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
    "LateralSubquery": _OTHER_PLANS,
}

_CLOCKS = {
    "CurrentTimestamp": "now",
    "Now": "now",
    "CurrentDate": "CAST(now AS date)",
    "LocalTimestamp": "CAST(now AS timestamp_ntz)",
}
"""What Spark's clocks are, made of the moment that the slot gives."""


class InTwo:
    """Translates expressions of one operator: natively, and what is not native for Spark."""

    def __init__(self, crossings: Crossings, native: Translator) -> None:
        self._crossings = crossings
        self._native = native

    def translate(self, node: JavaObject) -> Expression:
        try:
            return self._native.translate(node)
        except BuildError:
            return self.by_spark(node)

    def children(self, node: JavaObject) -> tuple[Expression, ...]:
        return tuple(self.translate(child) for child in children(node))

    def by_spark(self, node: JavaObject) -> Expression:
        """As Spark's evaluator computes it, also if it is native."""
        node = without_alias(node)
        given = self._given(node)
        if given is not None:
            return given
        type_ = type_of(node)
        return self._crossings.result(self._cut(node), type_, str(node.sql()))

    def _given(self, node: JavaObject) -> Expression | None:
        """What is an input, where Spark's evaluator computes what is above it."""
        given = self._native.given(node)
        if given is not None:
            return given
        match class_name(node):
            case "PythonUDF":
                return python_function(self, node)
            case "ScalarSubquery":
                return self._native.translate(node)
            case _:
                return None

    def _cut(self, node: JavaObject) -> JavaObject:
        """The node over what is given, each of which is an attribute in Spark's words."""
        if class_name(node) in _REFUSED:
            raise refused(node, _REFUSED[class_name(node)])
        given = self._given(node)
        if given is not None:
            return self._crossings.input(node, given)
        return _over(self._crossings.jvm, node, self._cut)


@dataclass(frozen=True, slots=True)
class _Result:
    """A column that Spark's evaluator is to give."""

    made: JavaObject
    """Over the attributes of inputs."""
    type: pa.DataType
    sql: str
    stage: int
    """How many crossings it takes, with those whose results it reads."""


@dataclass(frozen=True, slots=True)
class _Input:
    """What a result is computed of."""

    node: JavaObject
    attribute: JavaObject
    """What stands for it in Spark's words."""
    id: ExprId
    """That of the attribute."""
    expression: Expression

    def is_for(self, node: JavaObject) -> bool:
        if class_name(node) == "AttributeReference":
            return self.id == id_of(node)
        return bool(self.node.semanticEquals(node))


class Crossings:
    """What one operator wants of Spark's evaluator."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.jvm: Any = spark._jvm
        self._results: dict[str, _Result] = {}
        self._inputs: list[_Input] = []

    def result(self, made: JavaObject, type_: pa.DataType, sql: str) -> Column:
        """What stands for this expression, which is over inputs, until all is settled."""
        stage = 1 + max(map(self._stage, self._read_by(made)), default=0)
        name = f"stillframe result {len(self._results)}"
        self._results[name] = _Result(made, type_, sql, stage)
        return Column(name, type_)

    def input(self, node: JavaObject, expression: Expression) -> JavaObject:
        """The attribute that stands for this part of an expression."""
        result = self._results.get(expression.name) if isinstance(expression, Column) else None
        if result is not None and result.made.deterministic():
            return result.made  # so that it is no crossing of its own
        for known in self._inputs:
            if known.is_for(node):
                return known.attribute
        attribute = node
        if class_name(node) != "AttributeReference":
            attribute = attribute_of(self._spark, spark_type_of(node))
        self._inputs.append(_Input(node, attribute, id_of(attribute), expression))
        return attribute

    def settled(self, expressions: Iterable[Expression]) -> list[Expression]:
        """These, which are all of the operator's, with Spark's results in them."""
        whole = list(expressions)
        wanted = self._wanted(whole)
        known: dict[str, Expression] = {}
        rewriting = Rewriting(lambda e: known.get(e.name) if isinstance(e, Column) else None)
        for stage in sorted({each.stage for each in wanted.values()}):
            chosen = {name: each for name, each in wanted.items() if each.stage == stage}
            made = [each.made for each in chosen.values()]
            given = [(each.attribute, rewriting(each.expression)) for each in self._read_by(*made)]
            projection = _Preparation(self._spark).projection(made, given)
            for place, (name, each) in enumerate(chosen.items()):
                by_chance = not each.made.deterministic()
                known[name] = SparkResult(projection, place, each.type, each.sql, by_chance)
        return list(map(rewriting, whole))

    def _wanted(self, expressions: list[Expression]) -> dict[str, _Result]:
        """Those that stand in these, and those that they are computed of."""
        found: dict[str, _Result] = {}
        for part in all_parts(*expressions):
            if isinstance(part, Column) and part.name in self._results:
                result = self._results[part.name]
                read = [each.expression for each in self._read_by(result.made)]
                found |= {part.name: result} | self._wanted(read)
        return {name: each for name, each in self._results.items() if name in found}

    def _stage(self, read: _Input) -> int:
        names = (part.name for part in all_parts(read.expression) if isinstance(part, Column))
        return max((self._results[n].stage for n in names if n in self._results), default=0)

    def _read_by(self, *made: JavaObject) -> list[_Input]:
        wanted = {id_of(each) for node in made for each in sequence(node.references().toSeq())}
        return [each for each in self._inputs if each.id in wanted]


def _over(jvm: Any, node: JavaObject, change: Callable[[JavaObject], JavaObject]) -> JavaObject:
    """The node over what `change` makes of its children."""
    before = children(node)
    after = [change(child) for child in before]
    if all(one is other for one, other in zip(before, after, strict=True)):
        return node
    return node.withNewChildren(as_scala(jvm, after))


class _Preparation:
    """Of one crossing."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        jvm: Any = spark._jvm
        self._jvm = jvm
        self._catalyst = self._jvm.org.apache.spark.sql.catalyst
        self._now = empty_frame(spark, StructType([StructField("now", TimestampType())]))
        self._takes_time = False

    def projection(
        self, made: list[JavaObject], given: list[tuple[JavaObject, Expression]]
    ) -> SparkProjection:
        """Of these expressions over the attributes of what is given."""
        attributes = [attribute for attribute, _ in given]
        rules = self._catalyst.optimizer
        catalog = self._spark._jsparkSession.sessionState().catalogManager()
        plan = self._plan(self._named(made), attributes)
        for rule in (rules.ReplaceExpressions, rules.ReplaceCurrentLike(catalog)):
            plan = rule.apply(plan)
        named = [self._swapped(each) for each in sequence(plan.projectList())]
        if self._takes_time:
            attributes += sequence(analyzed(self._now).output())
        plan = self._plan(named, attributes)
        for rule in (
            rules.RewriteWithExpression,
            rules.ReplaceUpdateFieldsExpression,
            rules.ConstantFolding,
            rules.NormalizeFloatingNumbers,
        ):
            plan = rule.apply(plan)
        return SparkProjection(
            inputs=tuple(expression for _, expression in given),
            takes_time=self._takes_time,
            input_schema=schema_of_columns(attributes),
            output_schema=schema_of_columns(made),
            levels=tuple(self._levels(plan)),
            conf=tuple(settings_of(self._spark)),
            java_options=java_options_of(self._jvm),
        )

    def _named(self, made: list[JavaObject]) -> list[JavaObject]:
        """Each with a name, as a projection wants it."""
        columns = [lit(True).alias(str(place)) for place in range(len(made))]
        aliases = sequence(analyzed(self._now.select(*columns)).projectList())
        return [
            alias.withNewChildren(as_scala(self._jvm, [each]))
            for alias, each in zip(aliases, made, strict=True)
        ]

    def _plan(self, named: list[JavaObject], attributes: list[JavaObject]) -> JavaObject:
        logical = self._catalyst.plans.logical
        relation = getattr(getattr(logical, "LocalRelation$"), "MODULE$")
        leaf = relation.apply(as_scala(self._jvm, attributes))
        return logical.Project(as_scala(self._jvm, named), leaf)

    def _swapped(self, node: JavaObject) -> JavaObject:
        """The node with the slot's moment in the place of clocks."""
        name = class_name(node)
        if name in _CLOCKS:
            self._takes_time = True
            return without_alias(_only(self._now.selectExpr(_CLOCKS[name])))
        if name == "CurrentTimeZone":
            zone = self._spark.conf.get("spark.sql.session.timeZone")
            return without_alias(_only(self._now.select(lit(zone))))
        return _over(self._jvm, node, self._swapped)

    def _levels(self, plan: JavaObject) -> Iterator[bytes]:
        """The projections of the plan, each bound to what is below it; the innermost first."""
        expressions = self._catalyst.expressions
        attributes = getattr(getattr(expressions, "package$"), "MODULE$").AttributeSeq
        for project in reversed(list(_chain(plan))):
            # A record may be null where it was declared not to be.
            below = [each.withNullability(True) for each in sequence(project.child().output())]
            bound = expressions.BindReferences.bindReferences(
                project.projectList(), attributes(as_scala(self._jvm, below))
            )
            yield serialized(self._jvm, bound, project.simpleString(200).strip())


def attribute_of(spark: SparkSession, type_: DataType) -> JavaObject:
    """An attribute of this type that no other is taken for."""
    schema = StructType([StructField("given", type_)])
    [attribute] = sequence(analyzed(empty_frame(spark, schema)).output())
    return attribute


def serialized(jvm: Any, made: JavaObject, what: str) -> bytes:
    into = jvm.java.io.ByteArrayOutputStream()
    try:
        jvm.java.io.ObjectOutputStream(into).writeObject(made)
    except Py4JJavaError as error:
        raise BuildError(
            f"a stream cannot send {what} to its slots ({telling_line(str(error))}): compute it"
            " before still.stream(...), or in mapInArrow"
        ) from error
    return bytes(into.toByteArray())


def settings_of(spark: SparkSession) -> Iterator[tuple[str, str]]:
    """What of the session's settings an expression may look at."""
    jvm: Any = spark._jvm
    found = spark._jsparkSession.sessionState().conf().getAllConfs()
    settings = jvm.scala.jdk.javaapi.CollectionConverters.asJava(found)
    for name, value in sorted(dict(settings).items()):
        is_of_catalogs = name.startswith("spark.sql.catalog.")
        if name.startswith("spark.sql.") and not is_of_catalogs and not is_secret_name(name):
            yield name, value


def java_options_of(jvm: Any) -> tuple[str, ...]:
    return tuple(jvm.org.apache.spark.launcher.JavaModuleOptions.defaultModuleOptionArray())


def _chain(plan: JavaObject) -> Iterator[JavaObject]:
    """The projections of which the plan is made, down to its leaf."""
    while not is_leaf(plan):
        if class_name(plan) != "Project":
            raise AssertionError(f"Spark made another step of a projection: {plan}")
        yield plan
        plan = plan.child()


def _only(frame: DataFrame) -> JavaObject:
    """The one expression that the frame selects."""
    [made] = sequence(analyzed(frame).projectList())
    return made


def schema_of_columns(columns: list[JavaObject]) -> str:
    """In Spark's JSON; names are places."""
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
