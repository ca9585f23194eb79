"""What `window(...)` and `window_time(...)` are in Spark's plans: arithmetic on microseconds.

A window that is grouped by where it is made is not computed (`windows`). One that is selected is,
with a record in each window it is in, and so is the last moment of a window, its event time.
"""

from __future__ import annotations

import pyarrow as pa
from py4j.java_gateway import JavaObject

from stillframe.graph.expressions import Call, Expression, Literal
from stillframe.spark.expressions.nodes import refused, text_literal, type_of
from stillframe.spark.expressions.rules import Rule, Translating
from stillframe.spark.expressions.windows import WINDOW_TYPE
from stillframe.spark.steps import children
from stillframe.spark.types import TIMESTAMP

_BOUNDS = ("start", "end")


def is_window_type(type_: pa.DataType) -> bool:
    """Whether it is the type of windows, whatever it says about nulls."""
    is_pair = pa.types.is_struct(type_) and type_.num_fields == len(_BOUNDS)
    return is_pair and all(
        (field.name, field.type) == (bound, TIMESTAMP)
        for field, bound in zip(type_, _BOUNDS, strict=True)
    )


def bound_of(window: Expression, bound: str) -> Expression:
    """Where a window starts, or where it ends."""
    place = Literal(pa.scalar(_BOUNDS.index(bound), pa.int32()))
    return Call("struct_field", (window, place), TIMESTAMP)


def last_moment_of(window: Expression) -> Expression:
    """The event time of a window's row: one microsecond before the window ends."""
    return microsecond_before(bound_of(window, "end"))


def microsecond_before(moment: Expression) -> Expression:
    interval = (Literal(pa.scalar(part, pa.int64())) for part in (0, 0, -1))
    return Call("add_interval", (moment, *interval, text_literal("UTC")), TIMESTAMP)


def length_of(window: Expression) -> Expression:
    """In microseconds."""
    start, end = (Call("unix_micros", (bound_of(window, bound),), pa.int64()) for bound in _BOUNDS)
    return Call("subtract", (end, start), pa.int64())


def window_of(start: Expression, end: Expression) -> Expression:
    return Call("struct", (start, end), WINDOW_TYPE)


def _microseconds(translator: Translating, node: JavaObject) -> Expression:
    """Of a moment, or back."""
    (given,) = translator.children(node)
    made = type_of(node)
    if given.type == TIMESTAMP and made == pa.int64():
        return Call("unix_micros", (given,), made)
    if given.type == pa.int64() and made == TIMESTAMP:
        return Call("micros_to_timestamp", (given,), made)
    raise refused(node)


def _struct(translator: Translating, node: JavaObject) -> Expression:
    """Names and values in turn; the names are in the type."""
    values = children(node)[1::2]
    return Call("struct", tuple(map(translator.translate, values)), type_of(node))


def _as_it_is(translator: Translating, node: JavaObject) -> Expression:
    (given,) = translator.children(node)
    return given


WINDOW_RULES: dict[str, Rule] = {
    "PreciseTimestampConversion": _microseconds,
    "KnownNullable": _as_it_is,
    "CreateNamedStruct": _struct,
}
