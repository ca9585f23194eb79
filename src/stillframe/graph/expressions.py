"""Expressions over the columns of a batch: a small typed tree, free of Spark.

`spark/expressions.py` makes them from what Spark's analyzer understood; `runtime/expressions.py`
evaluates them on whole Arrow columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


Expression = Column | Literal | Call | RowFunction


@dataclass(frozen=True, slots=True)
class Named:
    """An expression and the name of the column it makes."""

    name: str
    expression: Expression
