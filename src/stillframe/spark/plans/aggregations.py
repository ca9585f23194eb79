"""Reads what Spark's analyzer made of a grouping: keys, aggregates, and the window among the keys.

Theory of operation: Spark's result columns may compute anything of the keys and the aggregates, as
in `sum(x) / count(*) + 1`. So a grouping becomes three steps: what the keys and the aggregates read
is computed per record; records are aggregated; the result columns are computed of that. While the
result columns are translated, a key or an aggregate that is met on the way becomes a column of the
second step, and what it reads one of the first.

Rules of this file:
- a key or an aggregate that Spark takes for the same as another is computed once;
- what is not native of the first step and of the last is computed by Spark's own evaluator there;
- columns of the steps get names that people read, in plans and errors; they never repeat in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import pyarrow as pa
from py4j.java_gateway import JavaObject
from pyarrow import types
from pyspark.sql import DataFrame, SparkSession

from stillframe.api.aggregates import AggregateCall
from stillframe.graph.expressions import Call, Column, Expression, Literal, Named
from stillframe.graph.logical import WINDOW, SessionWindow, Window
from stillframe.spark.expressions.aggregate_functions import (
    FunctionRead,
    pair_type,
    read_for_spark,
    read_function,
)
from stillframe.spark.expressions.evaluated import Crossings, InTwo, columns_below
from stillframe.spark.expressions.nodes import (
    name_or_sql,
    text_literal,
    type_of,
    without_alias,
)
from stillframe.spark.expressions.reading import Translator, refused_plan
from stillframe.spark.expressions.rules import Translating
from stillframe.spark.expressions.window_rules import (
    bound_of,
    is_window_type,
    last_moment_of,
    length_of,
    microsecond_before,
    window_of,
)
from stillframe.spark.expressions.windows import (
    WALL_CLOCK_WINDOW_TYPE,
    WINDOW_TYPE,
    FoundSession,
    FoundWindow,
    event_times_of,
    is_event_time,
    is_session,
    is_window,
    window_grouped_by,
)
from stillframe.spark.plans.gaps import gap_of, positive_gap
from stillframe.spark.steps import (
    ExprId,
    analyzed,
    below_aliases,
    children,
    class_name,
    id_of,
    sequence,
)
from stillframe.spark.types import TIMESTAMP
from stillframe.state.accumulators import unsupported


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


def aggregation_of(frame: DataFrame, *, by_event_time: bool = True) -> Aggregation:
    """The grouping of `groupBy(...).agg(...)`, `count()`, `sum(...)`, …

    `by_event_time`: whether a key that is the event time itself is a window of one microsecond.
    """
    plan = below_aliases(analyzed(frame))
    if class_name(plan) != "Aggregate":
        raise refused_plan(plan)
    found = window_grouped_by(frame.sparkSession, plan)
    below = plan.child() if found is None else found.below
    read, shown = Crossings(frame.sparkSession), Crossings(frame.sparkSession)
    grouping = _Grouping(
        frame.sparkSession,
        InTwo(read, Translator(columns_below(read, below))),
        event_times_of(below) if by_event_time else (),
    )
    outputs = sequence(plan.aggregateExpressions())
    keys = [without_alias(key) for key in sequence(plan.groupingExpressions())]
    if found is not None:
        grouping.add_window(found)
    # What the window is made of comes first: names are told apart from it.
    for key in sorted(keys, key=grouping.is_timely, reverse=True):
        grouping.add_key(key, outputs)
    results = InTwo(shown, grouping)
    after = [results.translate(output) for output in outputs]
    return Aggregation(
        _named(grouping.before, read.settled(grouping.before.values())),
        tuple(grouping.keys),
        tuple(grouping.calls),
        _named((str(output.name()) for output in outputs), shown.settled(after)),
        grouping.window,
        grouping.is_watermarked,
    )


def _named(names: Iterable[str], made: list[Expression]) -> tuple[Named, ...]:
    return tuple(Named(name, each) for name, each in zip(names, made, strict=True))


def _is_made_window(key: JavaObject) -> bool:
    """Whether it is a column of windows that were made before the grouping."""
    is_column = class_name(key) == "AttributeReference"
    return is_column and (is_window(key) or is_session(key)) and is_window_type(type_of(key))


class _Grouping(Translator):
    """Translates Spark's result columns over the keys and the aggregates, and collects both."""

    def __init__(
        self, spark: SparkSession, source: Translating, event_times: Collection[ExprId]
    ) -> None:
        """`source` translates what is computed for each record."""
        super().__init__({})
        self._spark = spark
        self._event_times = event_times
        self._source = source
        self._key_nodes: list[tuple[JavaObject, Expression]] = []
        self._call_nodes: list[tuple[JavaObject, Column]] = []
        self._input_nodes: list[tuple[JavaObject, str]] = []
        self.before: dict[str, Expression] = {}
        self.keys: list[str] = []
        self.calls: list[AggregateCall] = []
        self.window: Window | SessionWindow | None = None
        self.is_watermarked = False
        self._shows_wall_clock = False
        self._taken: tuple[str, ...] = ()
        """Names that what comes out of the aggregation has besides its keys and aggregates."""

    def add_window(self, found: FoundWindow | FoundSession) -> None:
        self.is_watermarked = found.is_watermarked
        name = name_or_sql(found.time)
        self.before[name] = self._source.translate(found.time)
        self._input_nodes.append((found.time, name))
        if found.is_wall_clock:
            time = self.before[name]
            name = self._new_name(f"{name} of UTC", self.before)
            self.before[name] = Call("cast", (time, text_literal("UTC")), TIMESTAMP)
            self._shows_wall_clock = True
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
            return positive_gap(found, gap)
        name = self._new_name(str(children(found.adding)[1].sql()), self.before)
        self.before[name] = gap
        return name

    def add_key(self, node: JavaObject, outputs: list[JavaObject]) -> None:
        if any(known.semanticEquals(node) for known, _ in self._key_nodes):
            return
        expression = self._source.translate(node)
        if _is_made_window(node):
            self._add_made_window(node, expression)
            return
        if self.window is None and self._is_event_time(node):
            self._add_event_time(node, expression)
            return
        if types.is_floating(expression.type):
            expression = Call("normalize_float", (expression,), expression.type)
        key = self._named_key(self._key_name(node, outputs), expression)
        self._key_nodes.append((node, key))

    def is_timely(self, node: JavaObject) -> tuple[bool, bool]:
        return _is_made_window(node), self._is_event_time(node)

    def _is_event_time(self, node: JavaObject) -> bool:
        is_column = class_name(node) == "AttributeReference"
        return is_column and id_of(node) in self._event_times and type_of(node) == TIMESTAMP

    def _named_key(self, wanted: str, expression: Expression) -> Column:
        name = self._new_name(wanted, [*self.before, *self._taken])
        self.before[name] = expression
        self.keys.append(name)
        return Column(name, expression.type)

    def _add_event_time(self, node: JavaObject, time: Expression) -> None:
        """Group by each moment, the end of a window of one microsecond: when event time has come to
        it, no more records of it are in time."""
        name = f"before {name_or_sql(node)}"
        self.is_watermarked = True
        self._taken = (WINDOW,)
        self.before[name] = microsecond_before(time)
        self.window = Window(name, 1, 1)
        self._key_nodes.append((node, bound_of(Column(WINDOW, WINDOW_TYPE), "end")))

    def _add_made_window(self, node: JavaObject, window: Expression) -> None:
        """Group by windows that were made before: each closes at its end, and sessions are joined.

        A window that begins at another moment is another group, whatever its end. So the start is
        a key, and what event time passes is a window of one microsecond, the last of the made one.
        """
        name = name_or_sql(node)
        if self.window is not None or not (is_session(node) or is_event_time(node)):
            bounds = (self._named_key(f"{name}.{b}", bound_of(window, b)) for b in ("start", "end"))
            self._key_nodes.append((node, window_of(*bounds)))
            return
        self.is_watermarked = is_event_time(node)
        self._taken = (WINDOW,)
        if is_session(node):
            names = (f"{name}.start", f"length of {name}")
            made = (bound_of(window, "start"), length_of(window))
            self.before |= dict(zip(names, made, strict=True))
            self.window = SessionWindow(*names)
            self._key_nodes.append((node, Column(WINDOW, WINDOW_TYPE)))
            return
        moment = f"window_time({name})"
        self.before[moment] = last_moment_of(window)
        self.window = Window(moment, 1, 1)
        start = self._named_key(f"{name}.start", bound_of(window, "start"))
        end = bound_of(Column(WINDOW, WINDOW_TYPE), "end")
        self._key_nodes.append((node, window_of(start, end)))

    @staticmethod
    def _key_name(node: JavaObject, outputs: list[JavaObject]) -> str:
        for output in outputs:
            if without_alias(output).semanticEquals(node):
                return str(output.name())
        return name_or_sql(node)

    @staticmethod
    def _new_name(wanted: str, taken: Iterable[str]) -> str:
        names = set(taken)
        return next(
            name
            for name in (wanted, *(f"{wanted}_{index}" for index in range(2, len(names) + 3)))
            if name not in names
        )

    def given(self, node: JavaObject) -> Expression | None:
        for known, column in self._key_nodes:
            if known.semanticEquals(node):
                if column.type == WINDOW_TYPE and self._shows_wall_clock:
                    return Call("without_zone", (column,), WALL_CLOCK_WINDOW_TYPE)
                return column
        if class_name(node) == "AggregateExpression":
            return self._aggregate(node)
        return super().given(node)

    def _aggregate(self, node: JavaObject) -> Column:
        for known, column in self._call_nodes:
            if known.semanticEquals(node):
                return column
        taken = [*self._taken, *self.keys, *(call.name for call in self.calls)]
        name = self._new_name(name_or_sql(node), taken)
        before, inputs = dict(self.before), list(self._input_nodes)
        call = self._call(node, name, read_function(self._spark, node))
        if self._is_unsupported(call):
            self.before, self._input_nodes = before, inputs
            call = self._call(node, name, read_for_spark(self._spark, node))
        self.calls.append(call)
        column = Column(name, call.type)
        self._call_nodes.append((node, column))
        return column

    def _call(self, node: JavaObject, name: str, read: FunctionRead) -> AggregateCall:
        given = (read.parameters, read.is_distinct)
        return AggregateCall(read.function, self._input(node, read), name, type_of(node), *given)

    def _is_unsupported(self, call: AggregateCall) -> bool:
        """Whether we have no form for it because of the type that it reads."""
        if call.function == "by_spark" or call.input is None:
            return False
        return unsupported(call, self.before[call.input].type) is not None

    def _input(self, node: JavaObject, read: FunctionRead) -> str | None:
        """The column it reads, of those before; None: it counts records."""
        arguments = read.arguments
        if read.function == "count" and not read.is_distinct:
            arguments = [each for each in arguments if each.nullable()]
        condition = node.filter().get() if node.filter().isDefined() else None
        if read.function == "by_spark":
            return self._input_by_spark(node, arguments, condition)
        if not arguments and condition is None:
            return None
        if condition is None and len(arguments) == 1:
            return self._read(arguments[0])
        values = [self._source.translate(each) for each in arguments]
        wanted = [] if condition is None else [self._source.translate(condition)]
        if read.function == "count" and not read.is_distinct:
            if len(values) > 1:
                wanted = [*(Call("is_not_null", (each,), _BOOL) for each in values), *wanted]
            value = _where(wanted, values[0] if len(values) == 1 else _ONE)
        elif read.reads_what_counts:
            value = _struct([values[0], _where(wanted, _ONE)])
        else:
            if wanted:  # an aggregate that reads several columns passes over null in the last
                values[-1] = _where(wanted, values[-1])
            value = values[0] if len(values) == 1 else _struct(values)
        name = self._new_name(f"what {name_or_sql(node)} reads", self.before)
        self.before[name] = value
        return name

    def _input_by_spark(
        self, node: JavaObject, arguments: list[JavaObject], condition: JavaObject | None
    ) -> str:
        """All that it reads, and whether the record counts."""
        counts = _TRUE if condition is None else self._source.translate(condition)
        values = [*(self._source.translate(each) for each in arguments), counts]
        name = self._new_name(f"what {name_or_sql(node)} reads", self.before)
        self.before[name] = _struct(values)
        return name

    def _read(self, argument: JavaObject) -> str:
        keys = ((node, key.name) for node, key in self._key_nodes if isinstance(key, Column))
        for known, name in (*self._input_nodes, *keys):
            if known.semanticEquals(argument):
                return name
        name = self._new_name(name_or_sql(argument), self.before)
        self.before[name] = self._source.translate(argument)
        self._input_nodes.append((argument, name))
        return name


_BOOL = pa.bool_()
_ONE = Literal(pa.scalar(1, pa.int32()))
_TRUE = Literal(pa.scalar(True))


def _where(wanted: list[Expression], value: Expression) -> Expression:
    """The value where all of these are true, and null elsewhere."""
    every = functools.reduce(lambda one, other: Call("and", (one, other), _BOOL), wanted)
    null = Literal(pa.scalar(None, value.type))
    return Call("case", (every, value, null), value.type)


def _struct(values: list[Expression]) -> Expression:
    return Call("struct", tuple(values), pair_type([each.type for each in values]))
