"""Reads what Spark's analyzer made of an operation and translates it for our slots.

Theory of operation: the caller applies the user's operation to an empty DataFrame of the stream's
schema. Spark resolves names, types and implicit casts and raises its own errors. What it
understood, the analyzed plan, is walked here on the JVM side and becomes a tree of
`graph.expressions`. The plan's JSON form would be one call instead of many, but it says neither
whether a cast or an addition is ANSI, legacy or "try", nor which common expression is meant.

Each class of Spark's nodes has a rule: those for conditions and numbers are in `number_rules`, for
strings in `text_rules`, for dates and times in `time_rules`. What a grouping is made of is read by
`aggregations`.

Rules of this file:
- a column is known by Spark's expression id, never by its name: names may repeat, differ in case
  from the stream's, or have been reused by `withColumn`;
- a part that is the same for every row is computed here, by Spark;
- what is not known to give Spark's result is refused, with the expression in SQL words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql.types import CalendarIntervalType, YearMonthIntervalType
from pyspark.util import PythonEvalType

from stillframe.errors import BuildError
from stillframe.graph.expressions import (
    BatchFunction,
    Call,
    Column,
    Expression,
    Literal,
    Named,
    RowFunction,
    StartValue,
)
from stillframe.spark.expressions.batch_udfs import batch_udf_of
from stillframe.spark.expressions.nodes import (
    constant_of,
    literal_of,
    refused,
    spark_type_of,
    type_of,
)
from stillframe.spark.expressions.number_rules import NUMBER_RULES
from stillframe.spark.expressions.rules import Translating
from stillframe.spark.expressions.subqueries import ScalarOfPlan
from stillframe.spark.expressions.text_rules import TEXT_RULES
from stillframe.spark.expressions.time_rules import TIME_RULES
from stillframe.spark.expressions.udf_values import argument_of, results_as
from stillframe.spark.expressions.window_rules import WINDOW_RULES
from stillframe.spark.expressions.windows import is_for_window
from stillframe.spark.steps import (
    ExprId,
    analyzed,
    below_aliases,
    children,
    class_name,
    id_of,
    is_leaf,
    sequence,
)

COLUMN_NOTE = "stillframe.column"
"""In the metadata of a column: its name in the stream, where Spark has two of one name."""
GROUP_BY_WINDOW = "say groupBy(window(...)) and take window.start and window.end of what comes out"
"""What to do, for errors about windows."""


# --- Operations


def projection_of(frame: DataFrame) -> tuple[Named, ...]:
    """The columns of `select`, `withColumn`, `drop`, … over the columns of the empty frame."""
    plan = analyzed(frame)
    columns = columns_of(plan)
    outputs = sequence(plan.output())
    return tuple(Named(output.name(), columns[id_of(output)]) for output in outputs)


def condition_of(frame: DataFrame) -> Expression:
    """The condition of `filter` or `where`; several are joined by AND."""
    conditions, leaf = conditions_of(frame)
    translator = Translator(dict(leaf_columns(leaf)))
    return all_of([translator.translate(condition) for condition in conditions])


def conditions_of(frame: DataFrame) -> tuple[list[JavaObject], JavaObject]:
    """Those of its filters, the first one written first, and the leaf that they are over."""
    conditions = []
    plan = below_aliases(analyzed(frame))
    while class_name(plan) == "Filter":
        conditions.append(plan.condition())
        plan = below_aliases(plan.child())
    if not conditions or not is_leaf(plan):
        raise refused_plan(plan)
    # The last filter is the outermost.
    return conditions[::-1], plan


def all_of(conditions: Iterable[Expression]) -> Expression:
    return reduce(lambda one, two: Call("and", (one, two), pa.bool_()), conditions)


def translated(node: JavaObject, columns: dict[ExprId, Expression]) -> Expression:
    """The expression over columns whose meaning is known by their ids."""
    return Translator(columns).translate(node)


# --- The plan


def columns_of(plan: JavaObject) -> dict[ExprId, Expression]:
    """What each column that comes out of the plan is, over the columns of the stream below it."""
    plan = below_aliases(plan)
    if is_leaf(plan):
        return dict(leaf_columns(plan))
    translator = Translator(columns_of(below_projection(plan)))
    return {id_of(output): translator.translate(output) for output in sequence(plan.projectList())}


def below_projection(plan: JavaObject) -> JavaObject:
    """What the plan is a projection of; it must be one."""
    if is_for_window(plan):
        raise BuildError(
            f"a stream computes window(...) only where it groups by it: {GROUP_BY_WINDOW}"
        )
    if class_name(plan) != "Project":
        raise refused_plan(plan)
    return below_aliases(plan.child())


def leaf_columns(plan: JavaObject) -> dict[ExprId, Column]:
    """The columns of a stream, by Spark's ids."""
    outputs = sequence(plan.output())
    names = [output.name() for output in outputs]
    if len(set(names)) < len(names):
        names = [_name_within(output) for output in outputs]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise BuildError(
            f"the stream has more than one column named {min(repeated)}: "
            "rename one of them where it is made, with alias(...)"
        )
    return {
        id_of(output): Column(name, type_of(output))
        for output, name in zip(outputs, names, strict=True)
    }


def _name_within(output: JavaObject) -> str:
    metadata = output.metadata()
    noted = metadata.contains(COLUMN_NOTE)
    return str(metadata.getString(COLUMN_NOTE) if noted else output.name())


def refused_plan(plan: JavaObject) -> BuildError:
    """The error for an operation that a stream has not."""
    description = plan.simpleString(200).strip()
    return BuildError(
        f"a stream cannot do this operation itself: {description}; "
        "do it before still.stream(...), or in mapInArrow"
    )


# --- Expressions


class Translator:
    """Translates expressions over columns whose meaning is known by their ids."""

    def __init__(self, columns: dict[ExprId, Expression]) -> None:
        self._columns = columns
        self._shared: dict[int, Expression] = {}

    def given(self, node: JavaObject) -> Expression | None:
        """What the node is, if it is not computed of what is below it; None: it is."""
        return self._column(node) if class_name(node) == "AttributeReference" else None

    def translate(self, node: JavaObject) -> Expression:
        given = self.given(node)
        if given is not None:
            return given
        name = class_name(node)
        if name == "Alias":
            return self.translate(node.child())
        if not isinstance(spark_type_of(node), CalendarIntervalType | YearMonthIntervalType):
            folded = self._folded(node)
            if folded is not None:
                return folded
        rule = _RULES.get(name)
        return rule(self, node) if rule is not None else self._replaced(node)

    def _column(self, node: JavaObject) -> Expression:
        column = self._columns.get(id_of(node))
        if column is None:  # no other column appears between the stream and its grouping
            raise refused(node, f"is a window, and not grouped by as such ({GROUP_BY_WINDOW})")
        return column

    def _folded(self, node: JavaObject) -> Literal | None:
        constant = constant_of(node)
        if constant is None:
            return None
        try:
            return literal_of(node, constant[0])
        except TypeError:
            raise refused(node) from None

    def _replaced(self, node: JavaObject) -> Expression:
        """Many of Spark's functions are only names for other expressions."""
        try:
            replacement = node.replacement()
        except Py4JError:
            raise refused(node) from None
        return self.translate(replacement)

    def children(self, node: JavaObject) -> tuple[Expression, ...]:
        """Those of the node, translated."""
        return tuple(self.translate(child) for child in children(node))

    def share(self, node: JavaObject) -> Expression:
        """A `With`: common expressions, computed once, and the expression that uses them."""
        for definition in sequence(node.defs()):
            self._shared[definition.id().id()] = self.translate(definition.child())
        return self.translate(node.child())

    def shared(self, node: JavaObject) -> Expression:
        return self._shared[node.id().id()]


# --- Structs, subqueries and the user's functions


def _struct_field(translator: Translating, node: JavaObject) -> Expression:
    ordinal = Literal(pa.scalar(int(node.ordinal()), pa.int32()))
    return Call("struct_field", (translator.translate(node.child()), ordinal), type_of(node))


def _scalar_subquery(translator: Translating, node: JavaObject) -> Expression:
    plan = node.plan()
    if not node.outerAttrs().isEmpty():
        raise refused(node, "asks another plan for each row, which a stream does not run")
    if plan.isStreaming():
        raise refused(node, "asks a stream, which never has a last answer")
    of = sequence(plan.output())[0].name()
    return StartValue(ScalarOfPlan(plan), type_of(node), f"subquery {of}")


_ROW_FUNCTIONS = (PythonEvalType.SQL_BATCHED_UDF, PythonEvalType.SQL_ARROW_BATCHED_UDF)


def python_function(translator: Translating, node: JavaObject) -> Expression:
    """A Python UDF, called in the slot; its arguments are whatever `translator` makes of them."""
    if any(class_name(child) == "NamedArgumentExpression" for child in children(node)):
        raise refused(node, "has named arguments, which a stream does not pass on")
    arguments, type_, name = translator.children(node), type_of(node), str(node.name())
    if node.evalType() not in _ROW_FUNCTIONS:
        function = batch_udf_of(node, function_of(node))
        return BatchFunction(function, arguments, type_, name, not node.udfDeterministic())
    given = tuple(argument_of(spark_type_of(child)) for child in children(node))
    by_arrow = node.evalType() == PythonEvalType.SQL_ARROW_BATCHED_UDF
    return RowFunction(
        function_of(node),
        arguments,
        type_,
        name,
        given if any(given) else (),
        partial(results_as, spark_type_of(node)) if by_arrow else None,
        not node.udfDeterministic(),
    )


def function_of(node: JavaObject) -> Callable[..., Any]:
    """What the user wrote, of a function that Spark calls in Python."""
    command = bytes(node.func().command().unsafeArray())
    unpickled = cloudpickle.loads(command)
    if not isinstance(unpickled, tuple) or not callable(unpickled[0]):
        raise refused(node, "holds more data than Spark sends with a function")
    function: Callable[..., Any] = unpickled[0]
    return function


_RULES: dict[str, Callable[[Translator, JavaObject], Expression]] = {
    **NUMBER_RULES,
    **TEXT_RULES,
    **TIME_RULES,
    **WINDOW_RULES,
    "With": Translator.share,
    "CommonExpressionRef": Translator.shared,
    "GetStructField": _struct_field,
    "ScalarSubquery": _scalar_subquery,
    "PythonUDF": python_function,
}
