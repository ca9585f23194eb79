"""A user's function over the keys of a stream, `groupBy(...).process(...)`, or without keys.

By key it is a `KeyedFunction`, which gets whole batches, or a `KeyProcessor`, which gets the rows
of one key after the other. Which of them is known where the job is built: they are operators of two
kinds. Without keys it is a `StreamFunction`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from stillframe.api.functions import KeyedFunction
from stillframe.api.processors import KeyProcessor
from stillframe.api.stream_functions import StreamFunction
from stillframe.errors import BuildError, StillframeError
from stillframe.graph import expressions as graph
from stillframe.graph.logical import Node, Process, ProcessStream, Transform
from stillframe.ids import Attempt, OperatorUid, SubtaskIndex
from stillframe.key_groups import unsupported_key_type
from stillframe.runtime.key_processing import KeyProgram
from stillframe.runtime.row_functions import name_of
from stillframe.runtime.stream_processing import StreamProcessing
from stillframe.spark.plans.aggregations import aggregation_of
from stillframe.spark.stream import Stream, refuse_repeated
from stillframe.spark.types import empty_frame, parse_schema, to_arrow_schema


def processed(
    stream: Stream,
    grouped: Any,
    function: Callable[[], KeyedFunction] | Callable[[], KeyProcessor],
    schema: str | StructType,
) -> Stream:
    """The stream as the function makes it; `grouped` is what Spark makes of the grouping."""
    keys = keys_of_grouping(stream, grouped, "process")
    kinds = (KeyProcessor, KeyedFunction)
    refuse_no_function(function, kinds, "process")
    declared = parse_schema(stream.still.spark, schema)
    made = to_arrow_schema(declared)
    refuse_repeated(made.names)
    operator: Process | Transform
    if issubclass(_class_made_by(function, kinds, "process"), KeyProcessor):
        operator = _transform(function, keys, made, stream)
    else:
        operator = Process(cast(Callable[[], KeyedFunction], function), name_of(function), keys)
    frame = empty_frame(stream.still.spark, declared)
    return Stream(stream.still, Node(operator, made, (stream.node,)), frame)


def processed_whole(
    stream: Stream, function: Callable[[], StreamFunction], schema: str | StructType
) -> tuple[ProcessStream, pa.Schema, DataFrame]:
    """The operator that calls a function without keys, what it emits, and an empty frame of that.

    A copy is opened here, to find mistakes before anything runs.
    """
    refuse_no_function(function, StreamFunction, "process")
    declared = parse_schema(stream.still.spark, schema)
    made = to_arrow_schema(declared)
    refuse_repeated(made.names)
    name = name_of(_unwrapped(function))
    operator = ProcessStream(function, name, to_arrow_schema)
    place = (OperatorUid("tried"), SubtaskIndex(0), 1, Attempt(1))
    try:
        StreamProcessing(*place, operator, made, None, {}).close()
    except StillframeError as error:
        raise BuildError(
            f"{name}, which is also made and opened here to know its states, cannot be used:"
            f" {error}"
        ) from error
    return operator, made, empty_frame(stream.still.spark, declared)


def _transform(function: Any, keys: tuple[str, ...], made: pa.Schema, stream: Stream) -> Transform:
    from stillframe.spark.processors.stateful import try_out

    name = name_of(_unwrapped(function))
    operator = Transform(KeyProgram(function, name, made, to_arrow_schema), name, keys, "both")
    try_out(operator, stream.node.schema, "open")
    return operator


def _class_made_by(function: Any, kinds: tuple[type, ...], method: str) -> type:
    """A class says so itself; anything else is called once, here, and what it makes is let go."""
    made = _unwrapped(function)
    if isinstance(made, type):
        return made
    try:
        found = type(function())
    except Exception as error:
        raise BuildError(
            f"{name_of(function)}, which is also called here to know what it makes, raised"
            f" {type(error).__name__}: {error}; give {method} the class, or a partial of it"
        ) from error
    if not issubclass(found, kinds):
        raise BuildError(
            f"{name_of(function)} made a {found.__name__}: {method} takes what makes a"
            f" {_in_words(kinds)}"
        )
    return found


def _unwrapped(function: Any) -> Any:
    return _unwrapped(function.func) if isinstance(function, partial) else function


def _in_words(kinds: tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)


def keys_of_grouping(stream: Stream, grouped: Any, method: str) -> tuple[str, ...]:
    """The columns it is grouped by, as Spark understood them."""
    found = aggregation_of(grouped.count(), by_event_time=False)
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


def refuse_no_function(function: object, kinds: type | tuple[type, ...], method: str) -> None:
    """What makes an object of one of these kinds is wanted by this method."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(function, kinds):
        raise BuildError(
            f"{method} takes what makes a {type(function).__name__}, as every subtask has its own,"
            " not an object that is there already: give the class, or a function that calls it"
        )
    if not callable(function):
        raise BuildError(f"{method} takes a subclass of {_in_words(kinds)}, not {function!r}")
    function = _unwrapped(function)
    if not isinstance(function, type):
        return
    if not issubclass(function, kinds):
        raise BuildError(
            f"{method} takes a subclass of {_in_words(kinds)}, not the class {function.__name__}"
        )
    if inspect.isabstract(function):
        missing = ", ".join(sorted(getattr(function, "__abstractmethods__", ())))
        raise BuildError(f"{function.__name__} does not say what to do in {missing}: write it")
