"""PySpark's `StatefulProcessor` over the keys of a stream: `groupBy(...).transformWithState(...)`.

Theory of operation: the processor travels in the plan as cloudpickle makes it, and every subtask
has a copy of its own (`processor_programs`). There it is given a handle of ours, which is a
`StatefulProcessorHandle` as PySpark has it (`processor_handle`); behind it are the states and
timers of the operator (`runtime/transforming`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyspark
from pyspark import cloudpickle
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructField, StructType

import stillframe
from stillframe.clock import SystemClock
from stillframe.errors import BuildError, StartRefused, StillframeError
from stillframe.graph.finality import has_watermark
from stillframe.graph.logical import Node, TimeMode, Transform
from stillframe.runtime.row_functions import name_of
from stillframe.runtime.transforming import KeyedStates
from stillframe.spark.expressions.windows import DELAY
from stillframe.spark.internals import TRIED
from stillframe.spark.plans.aggregations import aggregation_of
from stillframe.spark.plans.duplicates import event_time_of
from stillframe.spark.plans.grouped import refuse_grouped
from stillframe.spark.processors.group_states import TIME_MODES, WithGroupState, refuse_timeout
from stillframe.spark.processors.programs import ProcessorProgram
from stillframe.spark.stream import Stream, refuse_repeated
from stillframe.spark.types import empty_frame, parse_schema, to_arrow_schema
from stillframe.state.heap import HeapBackend

INITIAL_BYTES_MAX = 64 * 1024 * 1024
_MIB = 1024 * 1024
_TIME_MODES: dict[str, TimeMode] = {
    "none": "none",
    "processingtime": "processingTime",
    "eventtime": "eventTime",
}
_OUTPUT_MODES = ("append", "update", "complete")


def transformed(
    stream: Stream,
    keys: tuple[str, ...],
    processor: StatefulProcessor,
    output: StructType | str,
    output_mode: str,
    time_mode: str,
    initial: Initial | None = None,
    event_time: str = "",
    *,
    in_pandas: bool,
    name: str | None = None,
) -> Stream:
    """The stream as the processor makes it."""
    refuse_grouped(stream)
    method = "transformWithStateInPandas" if in_pandas else "transformWithState"
    mode = _time_mode_of(time_mode)
    _refuse_no_processor(processor, method)
    _refuse_output_mode(output_mode, method)
    name = name or type(processor).__name__
    declared = _with_event_time(parse_schema(stream.still.spark, output), event_time)
    made = to_arrow_schema(declared)
    refuse_repeated(made.names)
    zone = str(stream.still.spark.conf.get("spark.sql.session.timeZone"))
    pickled: bytes = cloudpickle.dumps(processor)  # type: ignore[no-untyped-call]
    make = ProcessorProgram(pickled, name, made, mode, zone, in_pandas)
    time = event_time_of(stream) if mode == "eventTime" else None
    if initial is not None:
        initial.refuse_other_keys(stream, keys)
    operator = Transform(
        make,
        name,
        keys,
        mode,
        None if time is None else time.name,
        initial,
        () if initial is None else initial.keys,
    )
    try_out(operator, stream.node.schema, "init")
    frame = empty_frame(stream.still.spark, declared)
    return Stream(stream.still, Node(operator, made, (stream.node,)), frame)


def with_group_state(
    stream: Stream,
    keys: tuple[str, ...],
    function: Callable[..., Any],
    output: StructType | str,
    state: StructType | str,
    output_mode: str,
    timeout: str,
) -> Stream:
    """The stream as a function with PySpark's `GroupState` makes it."""
    refuse_timeout(timeout)
    declared = parse_schema(stream.still.spark, state)
    is_timely = has_watermark(stream.node)
    columns = stream.node.schema.names
    processor = WithGroupState(function, declared, timeout, columns, has_watermark=is_timely)
    name = name_of(function)
    given = (processor, output, output_mode, TIME_MODES[timeout])
    return transformed(stream, keys, *given, in_pandas=True, name=name)


def _time_mode_of(given: str) -> TimeMode:
    mode = _TIME_MODES.get(str(given).lower())
    if mode is None:
        raise BuildError(
            f"Unknown time mode {given}. Accepted timeMode modes are 'none', 'processingTime',"
            " 'eventTime'"
        )
    return mode


def processor_of(function: Callable[..., Any]) -> Any:
    """The user's processor, of the function by which Spark calls it."""
    for held in _held_by(function):
        if isinstance(held, StatefulProcessor):  # PySpark 4.0
            return held
        processor = getattr(held, "_stateful_processor", None)
        if processor is not None:
            return processor
    raise StartRefused(
        f"PySpark {pyspark.__version__} calls a StatefulProcessor in a way that Stillframe"
        f" {stillframe.__version__} does not know: use PySpark {TRIED}, or a newer Stillframe"
    )


def _held_by(function: Any) -> Iterator[Any]:
    """What the function calls, directly or through what it wraps."""
    yield getattr(function, "__self__", None)
    for cell in getattr(function, "__closure__", None) or ():
        yield cell.cell_contents
        if callable(cell.cell_contents):
            yield from _held_by(cell.cell_contents)


def _refuse_no_processor(processor: object, method: str) -> None:
    if not isinstance(processor, StatefulProcessor):
        raise BuildError(
            f"{method} takes an object of a class that extends"
            f" pyspark.sql.streaming.StatefulProcessor, not {processor!r}"
        )


def _refuse_output_mode(given: str, method: str) -> None:
    mode = str(given).lower()
    if mode not in _OUTPUT_MODES:
        raise BuildError(
            f"Unknown output mode {given}. Accepted output modes are 'append', 'complete', 'update'"
        )
    if mode == "complete":
        raise BuildError(
            f"{method} with output mode Complete would have to emit all it has ever emitted with"
            " every checkpoint: use Append or Update"
        )


def _with_event_time(declared: StructType, name: str) -> StructType:
    """The output's schema, in which this column is noted to be the event time."""
    if not name:
        return declared
    if name not in declared.names:
        raise BuildError(
            f"eventTimeColumnName is {name!r}, and the output has {', '.join(declared.names)}:"
            " name one of its columns"
        )
    noted = {DELAY: 0}
    return StructType(
        [
            StructField(f.name, f.dataType, f.nullable, {**f.metadata, **noted})
            if f.name == name
            else f
            for f in declared.fields
        ]
    )


def try_out(operator: Transform, schema: pa.Schema, method: str) -> None:
    """Let a copy declare its states here, as Spark does, to find mistakes before anything runs."""
    program = operator.make()
    keys = pa.schema([schema.field(key) for key in operator.keys])
    states = KeyedStates(operator, HeapBackend(keys, 1), SystemClock())
    try:
        program.open(states)
        program.close()
    except StillframeError as error:
        raise BuildError(f"{operator.name} cannot be used: {error}") from error
    except Exception as error:
        raise BuildError(
            f"{operator.name}.{method}, which is also called here to know its states, raised"
            f" {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class Initial:
    """The rows a processor is told before the first of the stream; read when the job starts."""

    frame: DataFrame
    keys: tuple[str, ...]

    @classmethod
    def of(cls, grouped: GroupedData | None) -> Initial | None:
        if grouped is None:
            return None
        if not isinstance(grouped, GroupedData):
            raise BuildError(
                "initialState takes a grouped DataFrame, such as df.groupBy('id'), not"
                f" {type(grouped).__name__}"
            )
        return cls(grouped._df, tuple(aggregation_of(grouped.count()).keys))

    def refuse_other_keys(self, stream: Stream, keys: tuple[str, ...]) -> None:
        schema = to_arrow_schema(self.frame.schema)
        wanted = [stream.node.schema.field(key).type for key in keys]
        missing = [key for key in self.keys if key not in schema.names]
        if missing or [schema.field(key).type for key in self.keys] != wanted:
            raise BuildError(
                f"initialState is grouped by {', '.join(self.keys)}, and the stream by"
                f" {', '.join(keys)}: group both by columns of the same types"
            )

    def read(self) -> pa.Table:
        schema = to_arrow_schema(self.frame.schema)
        rows = self.frame.toArrow()
        if rows.nbytes > INITIAL_BYTES_MAX:
            raise StartRefused(
                f"the initial state has {rows.nbytes / _MIB:,.0f} MiB, and it travels with the"
                f" plan, up to {INITIAL_BYTES_MAX // _MIB} MiB: select fewer columns and rows"
            )
        nullable = pa.schema([pa.field(field.name, field.type) for field in schema])
        return rows.rename_columns(schema.names).cast(nullable)
