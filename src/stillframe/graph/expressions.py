"""Expressions over the columns of a batch: a small typed tree, free of Spark.

`spark/expressions.py` makes them from what Spark's analyzer understood; `runtime/expressions.py`
evaluates them on whole Arrow columns. What it does not know is a `SparkResult`: Spark's own code
computes it, in a process beside the slot (`spark/evaluated.py`, `evaluator/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True, slots=True)
class SparkProjection:
    """All expressions of one operator that Spark's own evaluator computes, in one crossing.

    It travels in the plan and is never stored: what Java has serialized is for one version only.
    """

    inputs: tuple[Column, ...]
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


@dataclass(frozen=True, slots=True)
class SparkResult:
    """One column of what Spark's evaluator computes."""

    projection: SparkProjection
    place: int
    type: pa.DataType
    sql: str
    """In Spark's words, for people."""


Expression = Column | Literal | Call | RowFunction | SparkResult


@dataclass(frozen=True, slots=True)
class Named:
    """An expression and the name of the column it makes."""

    name: str
    expression: Expression


def spark_results(expression: Expression) -> Iterator[SparkResult]:
    """Those of its parts that Spark's evaluator computes."""
    match expression:
        case SparkResult():
            yield expression
        case Call(arguments=arguments) | RowFunction(arguments=arguments):
            for argument in arguments:
                yield from spark_results(argument)
