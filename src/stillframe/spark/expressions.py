"""Reads what Spark's analyzer made of an operation and translates it for our slots.

Theory of operation: the caller applies the user's operation to an empty DataFrame of the stream's
schema. Spark resolves names, types and implicit casts and raises its own errors. What it
understood, the analyzed plan, is walked here on the JVM side and becomes a tree of
`graph.expressions`. The plan's JSON form would be one call instead of many, but it says neither
whether a cast or an addition is ANSI, legacy or "try", nor which common expression is meant.

Rules of this file:
- a column is known by Spark's expression id, never by its name: names may repeat, differ in case
  from the stream's, or have been reused by `withColumn`;
- a part that is the same for every row is computed here, by Spark;
- what is not known to give Spark's result is refused, with the expression in SQL words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from py4j.java_gateway import JavaObject, get_field
from py4j.protocol import Py4JError
from pyarrow import types
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import (
    CalendarIntervalType,
    DataType,
    DayTimeIntervalType,
    YearMonthIntervalType,
    _parse_datatype_json_value,
)
from pyspark.util import PythonEvalType

from stillframe.api.aggregates import AggregateCall, AggregateFunction
from stillframe.errors import BuildError
from stillframe.graph.expressions import Call, Column, Expression, Literal, Named, RowFunction
from stillframe.graph.logical import WINDOW, SessionWindow, Window
from stillframe.runtime import casts
from stillframe.spark.patterns import UnknownPattern, like_to_re2, rlike_to_re2
from stillframe.spark.plans import ExprId, below_aliases, children, class_name, id_of, sequence
from stillframe.spark.types import TIMESTAMP, TIMESTAMP_NTZ, to_arrow_type
from stillframe.spark.windows import (
    WINDOW_TYPE,
    FoundSession,
    FoundWindow,
    is_for_window,
    window_below,
)


@dataclass(frozen=True)
class Aggregation:
    """A grouping in three steps that the slots can run one after the other."""

    before: tuple[Named, ...]
    """The keys and what the aggregates read, computed per record."""
    keys: tuple[str, ...]
    calls: tuple[AggregateCall, ...]
    after: tuple[Named, ...]
    """Spark's result columns, computed from the keys and the aggregates."""
    window: Window | SessionWindow | None = None
    is_watermarked: bool = False
    """Whether the event time of the window is the one that the stream's watermark is about."""


def projection_of(frame: DataFrame) -> tuple[Named, ...]:
    """The columns of `select`, `withColumn`, `drop`, … over the columns of the empty frame."""
    plan = _analyzed(frame)
    columns = _columns_of(plan)
    outputs = sequence(plan.output())
    return tuple(Named(output.name(), columns[id_of(output)]) for output in outputs)


def condition_of(frame: DataFrame) -> Expression:
    """The condition of `filter` or `where`; several are joined by AND."""
    conditions = []
    plan = below_aliases(_analyzed(frame))
    while class_name(plan) == "Filter":
        conditions.append(plan.condition())
        plan = below_aliases(plan.child())
    if not conditions or not _is_leaf(plan):
        raise _refused_plan(plan)
    translator = _Translator(_leaf_columns(plan))
    # The last filter is the outermost: the first one written comes first.
    first, *rest = [translator.translate(condition) for condition in reversed(conditions)]
    for condition in rest:
        first = Call("and", (first, condition), pa.bool_())
    return first


def aggregation_of(frame: DataFrame) -> Aggregation:
    """The grouping of `groupBy(...).agg(...)`, `count()`, `sum(...)`, …"""
    plan = below_aliases(_analyzed(frame))
    if class_name(plan) != "Aggregate":
        raise _refused_plan(plan)
    found = window_below(frame.sparkSession, plan.child())
    grouping = _Grouping(_columns_of(plan.child() if found is None else found.below))
    outputs = sequence(plan.aggregateExpressions())
    keys = [_without_alias(key) for key in sequence(plan.groupingExpressions())]
    if found is not None:
        grouping.add_window(found, keys)
    for key in keys:
        grouping.add_key(key, outputs)
    after = tuple(Named(output.name(), grouping.translate(output)) for output in outputs)
    before = tuple(Named(name, expression) for name, expression in grouping.before.items())
    return Aggregation(
        before,
        tuple(grouping.keys),
        tuple(grouping.calls),
        after,
        grouping.window,
        found is not None and found.is_watermarked,
    )


def columns_of(plan: JavaObject) -> dict[ExprId, Expression]:
    """What each column that comes out of the plan is, over the columns of the stream below it."""
    return _columns_of(plan)


def translated(node: JavaObject, columns: dict[ExprId, Expression]) -> Expression:
    """The expression over columns whose meaning is known by their ids."""
    return _Translator(columns).translate(node)


# The plan


def _analyzed(frame: DataFrame) -> JavaObject:
    return frame._jdf.queryExecution().analyzed()


def _is_leaf(plan: JavaObject) -> bool:
    return bool(plan.children().isEmpty())


def _columns_of(plan: JavaObject) -> dict[ExprId, Expression]:
    """What each column that comes out of the plan is, over the columns of the empty frame."""
    plan = below_aliases(plan)
    if _is_leaf(plan):
        return _leaf_columns(plan)
    if is_for_window(plan):
        raise BuildError(
            f"a stream computes window(...) only where it groups by it: {_GROUP_BY_WINDOW}"
        )
    if class_name(plan) != "Project":
        raise _refused_plan(plan)
    translator = _Translator(_columns_of(plan.child()))
    return {id_of(output): translator.translate(output) for output in sequence(plan.projectList())}


_GROUP_BY_WINDOW = "say groupBy(window(...)) and take window.start and window.end of what comes out"


def _leaf_columns(plan: JavaObject) -> dict[ExprId, Expression]:
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
        id_of(output): Column(name, _type_of(output))
        for output, name in zip(outputs, names, strict=True)
    }


COLUMN_NOTE = "stillframe.column"
"""In the metadata of a column: its name in the stream, where Spark has two of one name."""


def _name_within(output: JavaObject) -> str:
    metadata = output.metadata()
    noted = metadata.contains(COLUMN_NOTE)
    return str(metadata.getString(COLUMN_NOTE) if noted else output.name())


def _refused_plan(plan: JavaObject) -> BuildError:
    description = plan.simpleString(200).strip()
    return BuildError(
        f"a stream cannot do this operation itself: {description}; "
        "do it before still.stream(...), or in mapInArrow"
    )


# Nodes


def _without_alias(node: JavaObject) -> JavaObject:
    return node.child() if class_name(node) == "Alias" else node


def _spark_type_of(node: JavaObject) -> DataType:
    return _parse_datatype_json_value(json.loads(node.dataType().json()))


def _type_of(node: JavaObject) -> pa.DataType:
    return to_arrow_type(_spark_type_of(node))


def _refused(
    node: JavaObject, why: str = "is outside what a stream evaluates itself"
) -> BuildError:
    return BuildError(
        f"the expression {node.sql()} {why}: compute it before still.stream(...), or in mapInArrow"
    )


def _mode_of(node: JavaObject) -> str:
    """ANSI, LEGACY or TRY; where the node says it has changed between Spark's versions."""
    for read in (
        lambda: node.evalMode().toString(),
        lambda: node.evalContext().evalMode().toString(),
        lambda: "ANSI" if node.failOnError() else "LEGACY",
    ):
        try:
            return str(read())
        except Py4JError:
            continue
    raise _refused(node)


_NAMES_OF_UTC = {"Z": "UTC", "GMT": "UTC", "UTC": "UTC", "Etc/UTC": "UTC", "+00:00": "UTC"}


def _zone_of(node: JavaObject) -> Literal:
    option = node.timeZoneId()
    zone = "UTC" if option.isEmpty() else str(option.get())
    zone = _NAMES_OF_UTC.get(zone, zone)
    try:
        pc.local_timestamp(pa.array([0], pa.timestamp("us", tz=zone)))
    except pa.ArrowInvalid:
        why = f"needs the time zone {zone}, which Arrow does not know"
        raise _refused(node, why) from None
    return _text(zone)


def _text(value: str) -> Literal:
    return Literal(pa.scalar(value, pa.string()))


# Constants


_CHANGING = ("Current", "Now", "LocalTime", "Rand", "Uuid", "Input")


def _subtree(node: JavaObject) -> Iterator[JavaObject]:
    yield node
    for child in children(node):
        yield from _subtree(child)


def _constant(node: JavaObject) -> JavaObject | None:
    """The node's value in Spark's internal form, if it is the same for every row, in a list."""
    if class_name(node) == "Literal":
        return [node.value()]
    if not node.foldable() or not node.deterministic():
        return None
    # Spark folds current_timestamp() to the start of a query; a stream has no such moment.
    if any(class_name(part).startswith(_CHANGING) for part in _subtree(node)):
        return None
    try:
        return [node.eval(None)]
    except (Py4JError, PySparkException):
        # Either it is a name for other expressions, or it fails: that is for the rows to find.
        return None


def _literal(node: JavaObject, value: Any) -> Literal:
    return Literal(_scalar(value, _type_of(node)))


def _scalar(value: Any, type_: pa.DataType) -> pa.Scalar:
    if value is None:
        return pa.scalar(None, type_)
    if types.is_string(type_):
        return pa.scalar(value.toString(), type_)
    if types.is_decimal(type_):
        return pa.scalar(Decimal(value.toString()), type_)
    if types.is_nested(type_):
        raise TypeError(str(type_))
    if types.is_temporal(type_):
        integer = pa.int32() if types.is_date32(type_) else pa.int64()
        return pa.scalar(value, integer).cast(type_)
    return pa.scalar(value, type_)


# Expressions


class _Translator:
    """Translates expressions over columns whose meaning is known by their ids."""

    def __init__(self, columns: dict[ExprId, Expression]) -> None:
        self._columns = columns
        self._shared: dict[int, Expression] = {}

    def translate(self, node: JavaObject) -> Expression:
        name = class_name(node)
        if name == "Alias":
            return self.translate(node.child())
        if name == "AttributeReference":
            return self._column(node)
        if not isinstance(_spark_type_of(node), CalendarIntervalType | YearMonthIntervalType):
            folded = self._folded(node)
            if folded is not None:
                return folded
        rule = _RULES.get(name)
        return rule(self, node) if rule is not None else self._replaced(node)

    def _column(self, node: JavaObject) -> Expression:
        column = self._columns.get(id_of(node))
        if column is None:  # no other column appears between the stream and its grouping
            raise _refused(node, f"is a window, and not grouped by as such ({_GROUP_BY_WINDOW})")
        return column

    def _folded(self, node: JavaObject) -> Literal | None:
        constant = _constant(node)
        if constant is None:
            return None
        try:
            return _literal(node, constant[0])
        except TypeError:
            raise _refused(node) from None

    def _replaced(self, node: JavaObject) -> Expression:
        """Many of Spark's functions are only names for other expressions."""
        try:
            replacement = node.replacement()
        except Py4JError:
            raise _refused(node) from None
        return self.translate(replacement)

    def children(self, node: JavaObject) -> tuple[Expression, ...]:
        return tuple(self.translate(child) for child in children(node))

    def share(self, node: JavaObject) -> Expression:
        """A `With`: common expressions, computed once, and the expression that uses them."""
        for definition in sequence(node.defs()):
            self._shared[definition.id().id()] = self.translate(definition.child())
        return self.translate(node.child())

    def shared(self, node: JavaObject) -> Expression:
        return self._shared[node.id().id()]


_Rule = Callable[[_Translator, JavaObject], Expression]


def _simple(function: str) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        return Call(function, translator.children(node), _type_of(node))

    return rule


def _in_zone(function: str) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        arguments = (*translator.children(node), _zone_of(node))
        return Call(function, arguments, _type_of(node))

    return rule


def _case(translator: _Translator, node: JavaObject) -> Expression:
    parts = translator.children(node)
    type_ = _type_of(node)
    if len(parts) % 2 == 0:
        parts = (*parts, Literal(pa.scalar(None, type_)))
    return Call("case", parts, type_)


def _nanvl(translator: _Translator, node: JavaObject) -> Expression:
    value, otherwise = translator.children(node)
    return Call("case", (Call("is_nan", (value,), pa.bool_()), otherwise, value), value.type)


def _comparison(function: str, *, swapped: bool = False) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        left, right = translator.children(node)
        if types.is_nested(left.type):
            raise _refused(node)
        arguments = (right, left) if swapped else (left, right)
        return Call(function, arguments, pa.bool_())

    return rule


def _in(translator: _Translator, node: JavaObject) -> Expression:
    arguments = translator.children(node)
    if types.is_nested(arguments[0].type) or node.legacyNullInEmptyBehavior():
        raise _refused(node)
    return Call("in", arguments, pa.bool_())


def _extreme(function: str) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        type_ = _type_of(node)
        # Spark takes NaN for the largest number, Arrow for none.
        if types.is_floating(type_) or types.is_nested(type_) or types.is_boolean(type_):
            raise _refused(node)
        return Call(function, translator.children(node), type_)

    return rule


def _arithmetic(function: str) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        arguments = translator.children(node)
        type_ = _type_of(node)
        _refuse_unless_numeric(node, type_, arguments)
        mode = _mode_of(node)
        if types.is_floating(type_) or mode == "ANSI":
            return Call(function, arguments, type_)
        if mode == "LEGACY" and types.is_integer(type_):
            return Call(f"{function}_wrapping", arguments, type_)
        raise _refused(node, _MODE_REFUSED.format(mode=mode))

    return rule


_MODE_REFUSED = "runs in Spark's {mode} mode, but a stream evaluates it only in ANSI mode"


def _refuse_unless_numeric(
    node: JavaObject, type_: pa.DataType, arguments: Iterable[Expression]
) -> None:
    if types.is_decimal(type_):
        # Arrow computes with at most 76 digits, and rounding needs one of them.
        if sum(argument.type.precision for argument in arguments) < 75:
            return
    elif types.is_integer(type_) or types.is_floating(type_):
        return
    raise _refused(node)


def _division(function: str) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        dividend, divisor = translator.children(node)
        type_ = _type_of(node)
        if any(types.is_decimal(argument.type) for argument in (dividend, divisor)):
            raise _refused(node)
        mode = _mode_of(node)
        if mode == "LEGACY":
            divisor = Call("null_if_zero", (divisor,), divisor.type)
        elif mode != "ANSI":
            raise _refused(node, _MODE_REFUSED.format(mode=mode))
        return Call(function, (dividend, divisor), type_)

    return rule


def _whole(function: str) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        (argument,) = translator.children(node)
        if types.is_integer(argument.type):
            return argument
        if not types.is_float64(argument.type) or _mode_of(node) != "ANSI":
            raise _refused(node)
        return Call(function, (argument,), _type_of(node))

    return rule


def _round(translator: _Translator, node: JavaObject) -> Expression:
    argument, given = translator.children(node)
    (scale,) = _literal_arguments(node, [given])
    type_ = _type_of(node)
    if types.is_integer(type_) and scale >= 0:
        return argument
    if not types.is_decimal(type_) or scale < 0:
        raise _refused(node)
    return Call("round_decimal", (argument,), type_)


def _cast(translator: _Translator, node: JavaObject) -> Expression:
    argument = translator.translate(node.child())
    type_ = _type_of(node)
    if argument.type == type_:
        return argument
    if not casts.castable(argument.type, type_):
        raise _refused(node)
    mode = _mode_of(node)
    if mode != "ANSI" and not casts.cannot_fail(argument.type, type_):
        raise _refused(node, _MODE_REFUSED.format(mode=mode))
    return Call("cast", (argument, _zone_of(node)), type_)


# Strings


def _literal_arguments(node: JavaObject, arguments: Iterable[Expression]) -> list[Any]:
    """The values of arguments that Arrow takes only as constants."""
    values = []
    for argument in arguments:
        if not isinstance(argument, Literal) or not argument.value.is_valid:
            raise _refused(node, "needs constants here to be evaluated in a stream")
        values.append(argument.value.as_py())
    return values


def _with_constants(function: str) -> _Rule:
    """The first argument a column of strings, the others constants."""

    def rule(translator: _Translator, node: JavaObject) -> Expression:
        arguments = translator.children(node)
        _literal_arguments(node, arguments[1:])
        if not types.is_string(arguments[0].type):
            raise _refused(node)
        return Call(function, arguments, _type_of(node))

    return rule


def _strings(function: str) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        arguments = translator.children(node)
        if not all(types.is_string(argument.type) for argument in arguments):
            raise _refused(node)
        return Call(function, arguments, _type_of(node))

    return rule


def _concat(translator: _Translator, node: JavaObject) -> Expression:
    type_ = _type_of(node)
    if types.is_nested(type_):
        raise _refused(node)
    return Call("concat", translator.children(node), type_)


def _trim(function: str) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        text, *given = translator.children(node)
        _literal_arguments(node, given)
        characters = given[0] if given else _text(" ")
        return Call(function, (text, characters), pa.string())

    return rule


def _pad(function: str) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        arguments = translator.children(node)
        _, by = _literal_arguments(node, arguments[1:])
        if len(by) > 1 or not types.is_string(arguments[0].type):
            raise _refused(node, "can pad with one character only in a stream")
        return Call(function, arguments, pa.string())

    return rule


def _replace(translator: _Translator, node: JavaObject) -> Expression:
    arguments = translator.children(node)
    search, _ = _literal_arguments(node, arguments[1:])
    return Call("replace", arguments, pa.string()) if search else arguments[0]


def _concat_ws(translator: _Translator, node: JavaObject) -> Expression:
    separator, *parts = translator.children(node)
    _literal_arguments(node, [separator])
    parts = [part for part in parts if not _is_null_literal(part)]
    if not parts or not all(types.is_string(part.type) for part in parts):
        raise _refused(node)
    return Call("concat_ws", (separator, *parts), pa.string())


def _is_null_literal(expression: Expression) -> bool:
    return isinstance(expression, Literal) and not expression.value.is_valid


def _like(translator: _Translator, node: JavaObject) -> Expression:
    escape = str(node.escapeChar())
    return _matching(translator, node, lambda pattern: like_to_re2(pattern, escape))


def _rlike(translator: _Translator, node: JavaObject) -> Expression:
    return _matching(translator, node, rlike_to_re2)


def _matching(
    translator: _Translator, node: JavaObject, to_re2: Callable[[str], str]
) -> Expression:
    text, given = translator.children(node)
    (pattern,) = _literal_arguments(node, [given])
    try:
        re2 = to_re2(pattern)
        pc.match_substring_regex(pa.array([""]), re2)
    except (UnknownPattern, pa.ArrowInvalid):
        raise _refused(node, "has a pattern that a stream cannot match as Spark does") from None
    return Call("matches", (text, _text(re2)), pa.bool_())


# Dates and times


_UNITS = {
    **dict.fromkeys(("year", "yyyy", "yy"), "year"),
    "quarter": "quarter",
    **dict.fromkeys(("month", "mon", "mm"), "month"),
    "week": "week",
}
_CLOCK_UNITS = {
    **_UNITS,
    **dict.fromkeys(("day", "dd"), "day"),
    **{unit: unit for unit in ("hour", "minute", "second", "millisecond", "microsecond")},
}


def _unit(node: JavaObject, given: Expression, known: dict[str, str]) -> Literal:
    (name,) = _literal_arguments(node, [given])
    unit = known.get(name.lower())
    if unit is None:
        raise _refused(node, f"has the unknown unit {name!r}")
    return _text(unit)


def _truncate_timestamp(translator: _Translator, node: JavaObject) -> Expression:
    given, moments = translator.children(node)
    unit = _unit(node, given, _CLOCK_UNITS)
    return Call("truncate", (moments, unit, _zone_of(node)), _type_of(node))


def _truncate_date(translator: _Translator, node: JavaObject) -> Expression:
    dates, given = translator.children(node)
    return Call("truncate_date", (dates, _unit(node, given, _UNITS)), pa.date32())


def _unix_timestamp(translator: _Translator, node: JavaObject) -> Expression:
    moments = translator.translate(children(node)[0])
    if types.is_date32(moments.type):
        moments = Call("cast", (moments, _zone_of(node)), TIMESTAMP)
    if moments.type != TIMESTAMP:
        raise _refused(node)
    return Call("unix_timestamp", (moments,), pa.int64())


def _from_unix(function: str) -> _Rule:
    def rule(translator: _Translator, node: JavaObject) -> Expression:
        (number,) = translator.children(node)
        if not types.is_integer(number.type):
            raise _refused(node)
        return Call(function, (number,), TIMESTAMP)

    return rule


def _add_interval(translator: _Translator, node: JavaObject) -> Expression:
    moments, interval = children(node)
    parts = [Literal(pa.scalar(part, pa.int64())) for part in _interval_parts(node, interval)]
    type_ = _type_of(node)
    zone = _text("UTC") if type_ == TIMESTAMP_NTZ else _zone_of(node)
    return Call("add_interval", (translator.translate(moments), *parts, zone), type_)


_DAY_MICROS = 86_400_000_000


def _interval_parts(node: JavaObject, interval: JavaObject) -> tuple[int, int, int]:
    """Months, days and microseconds of a constant interval."""
    constant = _constant(interval)
    if constant is None or constant[0] is None:
        raise _refused(node, "needs a constant interval to be evaluated in a stream")
    value = constant[0]
    match _spark_type_of(interval):
        case YearMonthIntervalType():
            return int(value), 0, 0
        case DayTimeIntervalType():
            days = abs(int(value)) // _DAY_MICROS * (1 if value >= 0 else -1)
            return 0, days, int(value) - days * _DAY_MICROS
        case _:
            return _parts_of_interval(value)


def _parts_of_interval(value: JavaObject) -> tuple[int, int, int]:
    names = ("months", "days", "microseconds")
    months, days, micros = (int(get_field(value, name)) for name in names)
    return months, days, micros


def gap_of(translator: _Translator, adding: JavaObject) -> Expression:
    """By how many microseconds this makes a moment later; null where it makes it null."""
    moments, _ = children(adding)
    return _Gaps(translator, adding, translator.translate(moments)).of(adding.children(), 1)


class _Gaps:
    """Intervals in microseconds: constants, chosen among such row by row, or made of numbers."""

    def __init__(self, translator: _Translator, adding: JavaObject, moments: Expression) -> None:
        self._translator = translator
        self._adding = adding
        self._moments = moments

    def of(self, nodes: JavaObject, place: int, cast: JavaObject | None = None) -> Expression:
        """Of one of these nodes; `cast` is what makes an interval of it, which is a text then."""
        node = nodes.apply(place)
        whole = node if cast is None else cast.withNewChildren(nodes.slice(place, place + 1))
        if (interval := _constant(whole)) is not None:
            return self._constant(interval[0])
        match class_name(node):
            case "Cast" if cast is None:
                return self.of(node.children(), 0, node)
            case "CaseWhen" | "If":
                return self._chosen(node.children(), cast)
            case "Coalesce":
                parts = node.children()
                gaps = (self.of(parts, place, cast) for place in range(parts.size()))
                return Call("coalesce", tuple(gaps), pa.int64())
            case "MakeInterval":
                return self._made(children(node))
        raise _refused(
            node,
            "is no gap that a stream can compute (say a text, such as '5 minutes', choose among"
            " such with when(...).otherwise(...), or say make_interval(...) of whole numbers)",
        )

    def _constant(self, interval: JavaObject | None) -> Expression:
        if interval is None:
            return Literal(pa.scalar(None, pa.int64()))
        months, days, micros = _parts_of_interval(interval)
        zone = _zone_of(self._adding)
        if not months and (not days or zone.value.as_py() == "UTC"):
            return Literal(pa.scalar(days * _DAY_MICROS + micros, pa.int64()))
        # A day may have 23 hours, and a month has as many days as it has.
        parts = [Literal(pa.scalar(part, pa.int64())) for part in (months, days, micros)]
        later = Call("add_interval", (self._moments, *parts, zone), self._moments.type)
        times = (Call("unix_micros", (each,), pa.int64()) for each in (later, self._moments))
        return Call("subtract", tuple(times), pa.int64())

    def _chosen(self, parts: JavaObject, cast: JavaObject | None) -> Expression:
        """Conditions and values take turns; at the end there may be a value for all others."""
        count = parts.size()
        chosen = [
            self.of(parts, place, cast)
            if place % 2 or place == count - 1
            else self._translator.translate(parts.apply(place))
            for place in range(count)
        ]
        if count % 2 == 0:
            chosen.append(Literal(pa.scalar(None, pa.int64())))
        return Call("case", tuple(chosen), pa.int64())

    def _made(self, parts: list[JavaObject]) -> Expression:
        *calendar, hours, minutes, seconds = parts
        if any(_constant(part) != [0] for part in calendar):
            raise _refused(self._adding, "adds what is longer than hours, row by row")
        units = ((hours, 3_600_000_000), (minutes, 60_000_000), (seconds, 1_000_000))
        first, *rest = (self._times(part, micros) for part, micros in units)
        for product in rest:
            first = Call("add", (first, product), pa.int64())
        return first

    def _times(self, part: JavaObject, micros: int) -> Expression:
        if class_name(part) == "Cast":  # seconds are decimals
            part = part.child()
        number = self._translator.translate(part)
        if isinstance(number, Literal):
            value = number.value.as_py()
            micros_made = None if value is None else int(value * micros)
            return Literal(pa.scalar(micros_made, pa.int64()))
        if not types.is_integer(number.type):
            raise _refused(part, "is not a whole number, and a gap is made of such in a stream")
        if number.type != pa.int64():
            number = Call("cast", (number, _text("UTC")), pa.int64())
        return Call("multiply", (number, Literal(pa.scalar(micros, pa.int64()))), pa.int64())


def _positive_gap(found: FoundSession, gap: Literal) -> int:
    gap_us = gap.value.as_py()
    if gap_us is None or gap_us <= 0:
        raise BuildError(
            f"session_window has the gap {children(found.adding)[1].sql()}, with which no record is"
            " in a session: give a positive one, such as '5 minutes'"
        )
    return int(gap_us)


def _add_months(translator: _Translator, node: JavaObject) -> Expression:
    dates, interval = children(node)
    constant = _constant(interval)
    if constant is None or constant[0] is None:
        raise _refused(node, "needs a constant number of months to be evaluated in a stream")
    months = Literal(pa.scalar(int(constant[0]), pa.int64()))
    return Call("add_months", (translator.translate(dates), months), pa.date32())


# Structs and the user's functions


def _struct_field(translator: _Translator, node: JavaObject) -> Expression:
    ordinal = Literal(pa.scalar(int(node.ordinal()), pa.int32()))
    return Call("struct_field", (translator.translate(node.child()), ordinal), _type_of(node))


_ROW_FUNCTIONS = (PythonEvalType.SQL_BATCHED_UDF, PythonEvalType.SQL_ARROW_BATCHED_UDF)


def _python_udf(translator: _Translator, node: JavaObject) -> Expression:
    if node.evalType() not in _ROW_FUNCTIONS:
        raise _refused(node, "is a pandas function, which a stream does not call")
    if any(class_name(child) == "NamedArgumentExpression" for child in children(node)):
        raise _refused(node, "has named arguments, which a stream does not pass on")
    return RowFunction(
        _function_of(node), translator.children(node), _type_of(node), str(node.name())
    )


def _function_of(node: JavaObject) -> Callable[..., Any]:
    command = bytes(node.func().command().unsafeArray())
    unpickled = cloudpickle.loads(command)
    if not isinstance(unpickled, tuple) or not callable(unpickled[0]):
        raise _refused(node, "holds more data than Spark sends with a function")
    function: Callable[..., Any] = unpickled[0]
    return function


_RULES: dict[str, _Rule] = {
    "With": _Translator.share,
    "CommonExpressionRef": _Translator.shared,
    "Add": _arithmetic("add"),
    "Subtract": _arithmetic("subtract"),
    "Multiply": _arithmetic("multiply"),
    "UnaryMinus": _arithmetic("negate"),
    "Abs": _arithmetic("abs"),
    "UnaryPositive": lambda translator, node: translator.translate(node.child()),
    "Divide": _division("divide"),
    "IntegralDivide": _division("integral_divide"),
    "Remainder": _division("remainder"),
    "Pmod": _division("pmod"),
    "Floor": _whole("floor"),
    "Ceil": _whole("ceil"),
    "Round": _round,
    "Greatest": _extreme("greatest"),
    "Least": _extreme("least"),
    "EqualTo": _comparison("equal"),
    "EqualNullSafe": _comparison("null_safe_equal"),
    "LessThan": _comparison("less"),
    "LessThanOrEqual": _comparison("less_equal"),
    "GreaterThan": _comparison("less", swapped=True),
    "GreaterThanOrEqual": _comparison("less_equal", swapped=True),
    "In": _in,
    "And": _simple("and"),
    "Or": _simple("or"),
    "Not": _simple("not"),
    "IsNull": _simple("is_null"),
    "IsNotNull": _simple("is_not_null"),
    "IsNaN": _simple("is_nan"),
    "NaNvl": _nanvl,
    "Coalesce": _simple("coalesce"),
    "CaseWhen": _case,
    "If": _case,
    "Cast": _cast,
    "Length": _simple("length"),
    "Upper": _strings("upper"),
    "Lower": _strings("lower"),
    "StringTrim": _trim("trim"),
    "StringTrimLeft": _trim("ltrim"),
    "StringTrimRight": _trim("rtrim"),
    "Substring": _with_constants("substring"),
    "Concat": _concat,
    "ConcatWs": _concat_ws,
    "StartsWith": _with_constants("starts_with"),
    "EndsWith": _with_constants("ends_with"),
    "Contains": _with_constants("contains"),
    "Like": _like,
    "RLike": _rlike,
    "StringReplace": _replace,
    "StringLPad": _pad("lpad"),
    "StringRPad": _pad("rpad"),
    "Year": _simple("year"),
    "Quarter": _simple("quarter"),
    "Month": _simple("month"),
    "DayOfMonth": _simple("day"),
    "DayOfYear": _simple("day_of_year"),
    "DayOfWeek": _simple("day_of_week"),
    "WeekDay": _simple("weekday"),
    "WeekOfYear": _simple("week_of_year"),
    "Hour": _in_zone("hour"),
    "Minute": _in_zone("minute"),
    "Second": _in_zone("second"),
    "TruncTimestamp": _truncate_timestamp,
    "TruncDate": _truncate_date,
    "DateAdd": _simple("add_days"),
    "DateSub": _simple("subtract_days"),
    "DateDiff": _simple("days_between"),
    "AddMonths": _add_months,
    "DateAddYMInterval": _add_months,
    "TimestampAddInterval": _add_interval,
    "TimestampAddYMInterval": _add_interval,
    "UnixTimestamp": _unix_timestamp,
    "ToUnixTimestamp": _unix_timestamp,
    "UnixSeconds": _simple("unix_seconds"),
    "UnixMillis": _simple("unix_millis"),
    "UnixMicros": _simple("unix_micros"),
    "SecondsToTimestamp": _from_unix("seconds_to_timestamp"),
    "MillisToTimestamp": _from_unix("millis_to_timestamp"),
    "MicrosToTimestamp": _from_unix("micros_to_timestamp"),
    "GetStructField": _struct_field,
    "PythonUDF": _python_udf,
}


# Grouping


_AGGREGATES: dict[str, AggregateFunction] = {
    "Count": "count",
    "Sum": "sum",
    "Min": "min",
    "Max": "max",
    "Average": "avg",
}


class _Grouping(_Translator):
    """Translates Spark's result columns over the keys and the aggregates, and collects both."""

    def __init__(self, source: dict[ExprId, Expression]) -> None:
        super().__init__({})
        self._source = _Translator(source)
        self._key_nodes: list[tuple[JavaObject, Column]] = []
        self._call_nodes: list[tuple[JavaObject, Column]] = []
        self._input_nodes: list[tuple[JavaObject, str]] = []
        self.before: dict[str, Expression] = {}
        self.keys: list[str] = []
        self.calls: list[AggregateCall] = []
        self.window: Window | SessionWindow | None = None
        self._taken: tuple[str, ...] = ()
        """Names that what comes out of the aggregation has besides its keys and aggregates."""

    def add_window(self, found: FoundWindow | FoundSession, keys: list[JavaObject]) -> None:
        if not any(found.is_at(key) for key in keys):
            raise _refused(
                found.column, f"is a window, and not grouped by as such ({_GROUP_BY_WINDOW})"
            )
        name = str(_name_or_sql(found.time))
        self.before[name] = self._source.translate(found.time)
        self._input_nodes.append((found.time, name))
        self._key_nodes.append((found.column, Column(WINDOW, WINDOW_TYPE)))
        self._taken = (WINDOW,)
        if isinstance(found, FoundSession):
            self.window = SessionWindow(name, self._gap(found))
        else:
            self.window = Window(name, found.size_us, found.slide_us, found.start_us)

    def _gap(self, found: FoundSession) -> int | str:
        """In microseconds, if it is the same for every record; else the column that has it."""
        gap = gap_of(self._source, found.adding)
        if isinstance(gap, Literal):
            return _positive_gap(found, gap)
        name = self._new_name(str(children(found.adding)[1].sql()), self.before)
        self.before[name] = gap
        return name

    def add_key(self, node: JavaObject, outputs: list[JavaObject]) -> None:
        if any(known.semanticEquals(node) for known, _ in self._key_nodes):
            return
        expression = self._source.translate(node)
        if types.is_floating(expression.type):
            expression = Call("normalize_float", (expression,), expression.type)
        name = self._new_name(self._key_name(node, outputs), [*self.before, *self._taken])
        self.before[name] = expression
        self.keys.append(name)
        self._key_nodes.append((node, Column(name, expression.type)))

    @staticmethod
    def _key_name(node: JavaObject, outputs: list[JavaObject]) -> str:
        for output in outputs:
            if _without_alias(output).semanticEquals(node):
                return str(output.name())
        return str(node.sql())

    @staticmethod
    def _new_name(wanted: str, taken: Iterable[str]) -> str:
        names = set(taken)
        return next(
            name
            for name in (wanted, *(f"{wanted}_{index}" for index in range(2, len(names) + 3)))
            if name not in names
        )

    def translate(self, node: JavaObject) -> Expression:
        for known, column in self._key_nodes:
            if known.semanticEquals(node):
                return column
        if class_name(node) == "AggregateExpression":
            return self._aggregate(node)
        return super().translate(node)

    def _aggregate(self, node: JavaObject) -> Column:
        for known, column in self._call_nodes:
            if known.semanticEquals(node):
                return column
        function = node.aggregateFunction()
        kind = self._kind(node, function)
        taken = [*self._taken, *self.keys, *(call.name for call in self.calls)]
        name = self._new_name(str(node.sql()), taken)
        call = AggregateCall(kind, self._input(node, function), name, _type_of(node))
        self.calls.append(call)
        column = Column(name, call.type)
        self._call_nodes.append((node, column))
        return column

    @staticmethod
    def _kind(node: JavaObject, function: JavaObject) -> AggregateFunction:
        kind = _AGGREGATES.get(class_name(function))
        if kind is None or node.isDistinct() or node.filter().isDefined():
            raise BuildError(
                f"the aggregate {node.sql()} is not among those a stream keeps: use count, sum, "
                "min, max or avg without DISTINCT and FILTER, or compute it from the result"
            )
        is_float = types.is_floating(_type_of(function))
        if kind in ("sum", "avg"):
            mode = _mode_of(function)
            if mode == "TRY" or (mode != "ANSI" and not is_float):
                raise _refused(node, _MODE_REFUSED.format(mode=mode))
        return kind

    def _input(self, node: JavaObject, function: JavaObject) -> str | None:
        arguments = children(function)
        if class_name(function) == "Count" and not any(a.nullable() for a in arguments):
            return None
        if len(arguments) != 1:
            raise _refused(node, "counts several columns, which a stream does not")
        (argument,) = arguments
        for known, name in (*self._input_nodes, *((n, c.name) for n, c in self._key_nodes)):
            if known.semanticEquals(argument):
                return name
        name = self._new_name(str(_name_or_sql(argument)), self.before)
        self.before[name] = self._source.translate(argument)
        self._input_nodes.append((argument, name))
        return name


def _name_or_sql(node: JavaObject) -> Any:
    return node.name() if class_name(node) == "AttributeReference" else node.sql()
