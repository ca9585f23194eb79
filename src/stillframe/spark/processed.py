"""A user's function over the keys of a stream: `groupBy(...).process(...)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pyspark.sql.types import StructType

from stillframe.api.functions import KeyedFunction, TwoInputFunction
from stillframe.errors import BuildError
from stillframe.graph import expressions as graph
from stillframe.graph.logical import Node, Process
from stillframe.key_groups import unsupported_key_type
from stillframe.runtime.row_functions import name_of
from stillframe.spark.aggregations import aggregation_of
from stillframe.spark.stream import Stream, refuse_repeated
from stillframe.spark.types import empty_frame, parse_schema, to_arrow_schema


def processed(
    stream: Stream,
    grouped: Any,
    function: Callable[[], KeyedFunction],
    schema: str | StructType,
) -> Stream:
    """The stream as the function makes it; `grouped` is what Spark makes of the grouping."""
    keys = keys_of_grouping(stream, grouped, "process")
    refuse_no_function(function, KeyedFunction, "process")
    declared = parse_schema(stream.still.spark, schema)
    made = to_arrow_schema(declared)
    refuse_repeated(made.names)
    operator = Process(function, name_of(function), keys)
    frame = empty_frame(stream.still.spark, declared)
    return Stream(stream.still, Node(operator, made, (stream.node,)), frame)


def keys_of_grouping(stream: Stream, grouped: Any, method: str) -> tuple[str, ...]:
    """The columns it is grouped by, as Spark understood them."""
    found = aggregation_of(grouped.count())
    if found.window is not None:
        raise BuildError(
            f"{method} groups by keys, not by a window: leave the window out and register timers"
            " for the times at which the function has something to say"
        )
    before = {column.name: column.expression for column in found.before}
    keys = [_as_it_comes(before[key]) for key in found.keys]
    if not keys:
        raise BuildError(f"{method} needs keys to part the rows by: name columns in groupBy(...)")
    for key in keys:
        if not isinstance(key, graph.Column):
            raise BuildError(
                f"{method} groups by columns as they are, not by what is computed of them: compute"
                " the key in a column of its own with withColumn(...) first"
            )
        if unsupported_key_type(stream.node.schema.field(key.name).type) is not None:
            raise BuildError(
                f"{method} by {key.name!r} is not possible, as rows are not told apart by a"
                f" {dict(stream.dtypes)[key.name]}: cast it to a string or a number"
            )
    return tuple(key.name for key in keys if isinstance(key, graph.Column))


def _as_it_comes(key: graph.Expression) -> graph.Expression:
    """Zeros of either sign, which grouping makes one, come to one subtask anyway."""
    if isinstance(key, graph.Call) and key.function == "normalize_float":
        return key.arguments[0]
    return key


def refuse_no_function(
    function: object, kind: type[KeyedFunction | TwoInputFunction], method: str
) -> None:
    """What makes an object of this kind is wanted by this method."""
    if isinstance(function, kind):
        raise BuildError(
            f"{method} takes what makes a {type(function).__name__}, as every subtask has its own,"
            " not an object that is there already: give the class, or a function that calls it"
        )
    if not callable(function):
        raise BuildError(f"{method} takes a subclass of {kind.__name__}, not {function!r}")
    if not isinstance(function, type):
        return
    if not issubclass(function, kind):
        raise BuildError(
            f"{method} takes a subclass of {kind.__name__}, not the class {function.__name__}"
        )
    if inspect.isabstract(function):
        missing = ", ".join(sorted(function.__abstractmethods__))
        raise BuildError(f"{function.__name__} does not say what to do in {missing}: write it")
