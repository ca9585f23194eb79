"""Expressions over the columns of a batch: a small typed tree, free of Spark.

`spark/expressions/` makes them from what Spark's analyzer understood; `runtime/expressions.py`
evaluates them on whole Arrow columns. What it does not know is a `SparkResult`: Spark's own code
computes it, in a process beside the slot (`evaluator/`). Each kind may be a part of every other, so
a user's function may stand within what Spark computes, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the input, by name."""

    name: str
    type: pa.DataType


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant."""

    value: pa.Scalar

    @property
    def type(self) -> pa.DataType:
        return self.value.type


@dataclass(frozen=True, slots=True)
class Call:
    """A function of other expressions; the names it may have are listed in runtime/expressions."""

    function: str
    arguments: tuple[Expression, ...]
    type: pa.DataType


@dataclass(frozen=True, slots=True)
class RowFunction:
    """A Python function the user gave, called once per row with the arguments' values."""

    function: Callable[..., Any]
    arguments: tuple[Expression, ...]
    type: pa.DataType
    name: str
    given: tuple[Callable[[Any], Any] | None, ...] = ()
    """What is done to each argument's values before the function gets them; empty: nothing."""
    made: Callable[[pa.DataType, Sequence[Any]], pa.Array] | None = None
    """Makes a column of what the function returned, where that is not of its type already."""
    by_chance: bool = False
    """Whether it says something else for the same values when it is called again."""


@dataclass(frozen=True, slots=True)
class BatchFunction:
    """A Python function the user gave for whole columns: of pandas, or of Arrow."""

    function: Callable[[Sequence[pa.Array], int], pa.Array]
    """Called with the arguments' columns and the number of rows, of which there is at least one."""
    arguments: tuple[Expression, ...]
    type: pa.DataType
    name: str
    by_chance: bool = False


class ValueAtStart(Protocol):
    """One value that is found out when the job starts."""

    def read(self) -> pa.Scalar: ...


@dataclass(frozen=True, slots=True, eq=False)
class StartValue:
    """What a scalar subquery gives: in a plan that runs a `Literal` stands in its place."""

    source: ValueAtStart
    type: pa.DataType
    sql: str
    """In Spark's words, for people."""


@dataclass(frozen=True, slots=True)
class SparkProjection:
    """Expressions of one operator that Spark's own evaluator computes in one crossing.

    It travels in the plan and is never stored: what Java has serialized is for one version only.
    """

    inputs: tuple[Expression, ...]
    takes_time: bool
    """Whether the moment comes behind the inputs, as one more column, the same for all records."""
    input_schema: str
    """Of all that goes in, in Spark's JSON."""
    output_schema: str
    levels: tuple[bytes, ...] = field(repr=False)
    """Spark's bound expressions, as Java serializes them; each level reads what the one before it
    gives, the first one the inputs."""
    conf: tuple[tuple[str, str], ...] = field(repr=False)
    """The session's settings of Spark's SQL."""
    java_options: tuple[str, ...] = field(repr=False)
    """What Java must be started with for this version of Spark."""
    generator: bytes | None = field(default=None, repr=False)
    """What Spark makes one row of each input row by, in the place of levels."""
    aggregation: bytes | None = field(default=None, repr=False)
    """What Spark aggregates the rows of a batch by, in the place of levels; None: each input row is
    one row of the output."""


@dataclass(frozen=True, slots=True)
class SparkResult:
    """One column of what Spark's evaluator computes."""

    projection: SparkProjection
    place: int
    type: pa.DataType
    sql: str
    """In Spark's words, for people."""
    by_chance: bool = False


@dataclass(frozen=True, slots=True)
class SparkAggregate:
    """An aggregate that Spark's own code computes: crossings of rows that begin with the number of
    a group. It is the one parameter of a call of `by_spark`."""

    partial: SparkProjection
    """Of records: what each group has accumulated, in columns of `buffers`. The last column of a
    record says whether it counts."""
    merge: SparkProjection
    """The same of rows that have accumulated before."""
    final: SparkProjection
    """The aggregate of such rows."""
    buffers: pa.DataType
    """A struct with what is accumulated, in the form in which Spark keeps it."""
    version: str
    """Of Spark, without which nobody reads what is in them."""
    sql: str

    @property
    def crossings(self) -> tuple[SparkProjection, ...]:
        return self.partial, self.merge, self.final


Expression = Column | Literal | Call | RowFunction | BatchFunction | StartValue | SparkResult


@dataclass(frozen=True, slots=True)
class Named:
    """An expression and the name of the column it makes."""

    name: str
    expression: Expression


def parts_of(expression: Expression) -> tuple[Expression, ...]:
    """What it is computed of."""
    match expression:
        case Call() | RowFunction() | BatchFunction():
            return expression.arguments
        case SparkResult():
            return expression.projection.inputs
        case _:
            return ()


def all_parts(*expressions: Expression) -> Iterator[Expression]:
    """These and all that they are computed of, each once, what is computed before its parts."""
    seen: set[int] = set()
    waiting = list(reversed(expressions))
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:  # by identity, as what is shared is one object
            seen.add(id(part))
            yield part
            waiting.extend(reversed(parts_of(part)))


def names_in(expression: Expression) -> set[str]:
    """The columns that it looks at."""
    return {part.name for part in all_parts(expression) if isinstance(part, Column)}


def spark_results(*expressions: Expression) -> list[SparkResult]:
    """Those of their parts that Spark's evaluator computes."""
    return [part for part in all_parts(*expressions) if isinstance(part, SparkResult)]


def by_chance(*expressions: Expression) -> list[str]:
    """Those of their parts that are another value when they are computed again."""
    found = []
    for part in all_parts(*expressions):
        if isinstance(part, SparkResult) and part.by_chance:
            found.append(part.sql)
        elif isinstance(part, RowFunction | BatchFunction) and part.by_chance:
            found.append(part.name)
    return found


class Rewriting:
    """Expressions with some of their parts replaced; what they share, they share afterwards."""

    def __init__(self, replacement: Callable[[Expression], Expression | None]) -> None:
        """`replacement` answers what stands in the place of a part; None: it stays."""
        self._replacement = replacement
        # The key is kept beside what is made of it, so that its id stays its own.
        self._known: dict[int, tuple[object, Any]] = {}

    def __call__(self, expression: Expression) -> Expression:
        known = self._known.get(id(expression))
        if known is None:
            made = self._replacement(expression) or self._with_parts(expression)
            known = self._known[id(expression)] = (expression, made)
        made_before: Expression = known[1]
        return made_before

    def _with_parts(self, expression: Expression) -> Expression:
        match expression:
            case Call() | RowFunction() | BatchFunction():
                arguments = tuple(map(self, expression.arguments))
                is_same = _are_same(arguments, expression.arguments)
                return expression if is_same else replace(expression, arguments=arguments)
            case SparkResult():
                projection = self._projection(expression.projection)
                is_same = projection is expression.projection
                return expression if is_same else replace(expression, projection=projection)
            case _:
                return expression

    def _projection(self, projection: SparkProjection) -> SparkProjection:
        known = self._known.get(id(projection))
        if known is None:
            inputs = tuple(map(self, projection.inputs))
            is_same = _are_same(inputs, projection.inputs)
            made = projection if is_same else replace(projection, inputs=inputs)
            known = self._known[id(projection)] = (projection, made)
        made_before: SparkProjection = known[1]
        return made_before


def _are_same(one: tuple[Expression, ...], other: tuple[Expression, ...]) -> bool:
    return all(left is right for left, right in zip(one, other, strict=True))
