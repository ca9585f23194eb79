"""PySpark's `StatefulProcessor` over the keys of a stream: `groupBy(...).transformWithState(...)`.

Theory of operation: the processor travels in the plan as cloudpickle makes it, and every subtask
has a copy of its own (`processor_programs`). There it is given a handle of ours, which is a
`StatefulProcessorHandle` as PySpark has it (`processor_handle`); behind it are the states and
timers of the operator (`runtime/transforming`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructField, StructType

from stillframe.clock import SystemClock
from stillframe.errors import BuildError, StartRefused, StillframeError
from stillframe.graph.logical import Node, TimeMode, Transform
from stillframe.runtime.transforming import KeyedStates
from stillframe.spark.aggregations import aggregation_of
from stillframe.spark.duplicates import event_time_of
from stillframe.spark.processed import keys_of_grouping
from stillframe.spark.processor_programs import ProcessorProgram
from stillframe.spark.stream import Stream, refuse_repeated
from stillframe.spark.types import empty_frame, parse_schema, to_arrow_schema
from stillframe.spark.windows import DELAY
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
    grouped: Any,
    processor: StatefulProcessor,
    output: StructType | str,
    output_mode: str,
    time_mode: str,
    initial: GroupedData | None,
    event_time: str,
    *,
    in_pandas: bool,
) -> Stream:
    """The stream as the processor makes it; `grouped` is what Spark makes of the grouping."""
    method = "transformWithStateInPandas" if in_pandas else "transformWithState"
    keys = keys_of_grouping(stream, grouped, method)
    mode = _time_mode_of(time_mode)
    _refuse_no_processor(processor, method)
    _refuse_output_mode(output_mode, method)
    declared = _with_event_time(parse_schema(stream.still.spark, output), event_time)
    made = to_arrow_schema(declared)
    refuse_repeated(made.names)
    zone = str(stream.still.spark.conf.get("spark.sql.session.timeZone"))
    pickled: bytes = cloudpickle.dumps(processor)  # type: ignore[no-untyped-call]
    make = ProcessorProgram(pickled, type(processor).__name__, made, mode, zone, in_pandas)
    time = event_time_of(stream) if mode == "eventTime" else None
    begun = _Initial.of(initial, stream, keys)
    operator = Transform(
        make,
        type(processor).__name__,
        keys,
        mode,
        None if time is None else time.name,
        begun,
        () if begun is None else begun.keys,
    )
    try_out(operator, stream.node.schema, "init")
    frame = empty_frame(stream.still.spark, declared)
    return Stream(stream.still, Node(operator, made, (stream.node,)), frame)


def _time_mode_of(given: str) -> TimeMode:
    mode = _TIME_MODES.get(str(given).lower())
    if mode is None:
        raise BuildError(
            f"Unknown time mode {given}. Accepted timeMode modes are 'none', 'processingTime',"
            " 'eventTime'"
        )
    return mode


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
class _Initial:
    """The rows a processor is told before the first of the stream; read when the job starts."""

    frame: DataFrame
    keys: tuple[str, ...]

    @classmethod
    def of(
        cls, grouped: GroupedData | None, stream: Stream, keys: tuple[str, ...]
    ) -> _Initial | None:
        if grouped is None:
            return None
        if not isinstance(grouped, GroupedData):
            raise BuildError(
                "initialState takes a grouped DataFrame, such as df.groupBy('id'), not"
                f" {type(grouped).__name__}"
            )
        found = aggregation_of(grouped.count())
        frame: DataFrame = grouped._df
        schema = to_arrow_schema(frame.schema)
        wanted = [stream.node.schema.field(key).type for key in keys]
        missing = [key for key in found.keys if key not in schema.names]
        if missing or [schema.field(key).type for key in found.keys] != wanted:
            raise BuildError(
                f"initialState is grouped by {', '.join(found.keys)}, and the stream by"
                f" {', '.join(keys)}: group both by columns of the same types"
            )
        return cls(frame, tuple(found.keys))

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
