"""PySpark's `StatefulProcessor` over the keys of a stream: `groupBy(...).transformWithState(...)`.

Theory of operation
-------------------
The processor travels in the plan as cloudpickle makes it, and every subtask has a copy of its own.
There it is given a handle of ours, which is a `StatefulProcessorHandle` as PySpark has it; behind
it are the states and timers of the operator (`runtime/transforming`). Rows are made of whole
columns, for all keys of a batch at once; a key's rows are then a slice of each list.

What Spark does once per micro-batch and key is done here once per batch and key.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import zoneinfo
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyspark import cloudpickle
from pyspark.sql import DataFrame, GroupedData, Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
    ValueState,
)
from pyspark.sql.types import StructField, StructType

from stillframe.api.ddl import schema_of_ddl
from stillframe.api.programs import Fired, Groups, KeyedProgram, States
from stillframe.clock import SystemClock
from stillframe.errors import BuildError, DataError, StartRefused, StillframeError, UserCodeError
from stillframe.graph.logical import Node, TimeMode, Transform
from stillframe.runtime import row_functions
from stillframe.runtime.key_processing import rows_by_key
from stillframe.runtime.row_functions import PandasFunction, column_of, joined
from stillframe.runtime.transforming import KeyedStates
from stillframe.spark.aggregations import aggregation_of
from stillframe.spark.duplicates import event_time_of
from stillframe.spark.processed import keys_of_grouping
from stillframe.spark.stream import Stream, refuse_repeated
from stillframe.spark.types import empty_frame, parse_schema, to_arrow_schema
from stillframe.spark.windows import DELAY
from stillframe.state.handles import (
    AggregatingHandle,
    ListHandle,
    MapHandle,
    ReducingHandle,
    ValueHandle,
)
from stillframe.state.heap import HeapBackend

if TYPE_CHECKING:
    import pandas

INITIAL_BYTES_MAX = 64 * 1024 * 1024
_MIB = 1024 * 1024
_OUTPUT_ROWS = 4_096
"""So many rows are gathered before they go on."""
_SMALL_FRAME_ROWS = 64
_TIME_MODES: dict[str, TimeMode] = {
    "none": "none",
    "processingtime": "processingTime",
    "eventtime": "eventTime",
}
_OUTPUT_MODES = ("append", "update", "complete")
_FIELDS = attrgetter("__fields__")


# --- what is built


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


# --- what runs on executors


@dataclass(frozen=True)
class ProcessorProgram:
    """Makes a program of the processor; travels in the plan."""

    pickled: bytes
    name: str
    schema: pa.Schema
    time_mode: TimeMode
    time_zone: str
    in_pandas: bool

    def __call__(self) -> KeyedProgram:
        processor = cloudpickle.loads(self.pickled)
        return (_PandasProgram if self.in_pandas else _RowProgram)(processor, self)


class _Program(KeyedProgram):
    """What both ways to see rows have in common."""

    sees_batches = True

    def __init__(self, processor: StatefulProcessor, about: ProcessorProgram) -> None:
        self._processor = processor
        self._about = about
        self._states: States

    def open(self, states: States) -> None:
        self._states = states
        self._processor.init(ProcessorHandle(states))

    def close(self) -> None:
        self._processor.close()

    def fire(self, fired: Fired) -> Iterator[pa.RecordBatch]:
        handle_timer = self._processor.handleExpiredTimer
        values, output = self._timer_values(), self._output()
        make = row_maker(tuple(fired.keys.schema.names))
        keys = self._keys(fired)
        for place in fired:
            info = ExpiredTimerInfo(fired.times_ms[place])
            made = handle_timer(key=make(keys[place]), timerValues=values, expiredTimerInfo=info)
            yield from output.taking(made)
        yield from output.rest()

    def _timer_values(self) -> TimerValues:
        if self._about.time_mode == "none":
            return TimerValues(-1, -1)
        return TimerValues(self._states.now_ms, self._states.watermark_ms)

    def _output(self) -> _Output:
        return (_PandasOutput if self._about.in_pandas else _RowOutput)(self._about)

    def _keys(self, groups: Groups | Fired) -> list[tuple[Any, ...]]:
        return list(zip(*map(self._values, groups.keys.columns), strict=True))

    def _values(self, column: pa.Array) -> Sequence[Any]:
        return python_values(column, self._about.time_zone)


class _RowProgram(_Program):
    """`transformWithState`: rows as `Row` objects."""

    def handle(self, groups: Groups) -> Iterator[pa.RecordBatch]:
        return joined(self._handled(groups))

    def _handled(self, groups: Groups) -> Iterator[pa.RecordBatch]:
        handle_rows = self._processor.handleInputRows
        values, output = self._timer_values(), self._output()
        keys = self._keys(groups)
        for place, rows in self._rows_by_key(groups):
            yield from output.taking(handle_rows(keys[place], rows, values))
        yield from output.rest()

    def handle_initial(self, groups: Groups) -> None:
        values, keys = self._timer_values(), self._keys(groups)
        for place, rows in self._rows_by_key(groups):
            for row in rows:
                self._processor.handleInitialState(keys[place], row, values)

    def _rows_by_key(self, groups: Groups) -> Iterator[tuple[int, Iterator[Any]]]:
        return rows_by_key(groups, row_maker(groups.names), self._values)


class _PandasProgram(_Program):
    """`transformWithStateInPandas`: the rows of a key as a DataFrame."""

    def handle(self, groups: Groups) -> Iterator[pa.RecordBatch]:
        handle_rows = self._processor.handleInputRows
        values, output = self._timer_values(), self._output()
        keys = self._keys(groups)
        for place, frame in self._frames_by_key(groups):
            yield from output.taking(handle_rows(keys[place], iter((frame,)), values))
        yield from output.rest()

    def handle_initial(self, groups: Groups) -> None:
        values, keys = self._timer_values(), self._keys(groups)
        for place, frame in self._frames_by_key(groups):
            self._processor.handleInitialState(keys[place], frame, values)

    def _frames_by_key(self, groups: Groups) -> Iterator[tuple[int, pandas.DataFrame]]:
        whole = pandas_function(self._about).to_pandas(groups.rows())
        for place, start, stop in groups:
            # Which copies: what a processor changes in its frame is not seen by another key.
            yield place, whole.iloc[start:stop].reset_index(drop=True)


def pandas_function(about: ProcessorProgram) -> PandasFunction:
    """What turns rows into frames and back."""
    named = functools.partial(_never_called)
    named.__name__ = about.name  # type: ignore[attr-defined]
    return PandasFunction(named, about.schema, about.time_zone)


def _never_called(frames: Any) -> Any:
    raise AssertionError("only its name is wanted")


# --- what comes out


class _Output:
    """Gathers what a processor answers, for many keys, and makes batches of it."""

    def __init__(self, about: ProcessorProgram) -> None:
        self._about = about
        self._made: list[Any] = []

    def taking(self, made: Iterable[Any] | None) -> Iterator[pa.RecordBatch]:
        if made is None:
            raise UserCodeError(
                f"{self._about.name} answered None where an iterator of rows is wanted: yield rows,"
                " or return iter([])"
            )
        return self._taking(iter(made))

    def rest(self) -> Iterator[pa.RecordBatch]:
        if self._made:
            made, self._made = self._made, []
            yield from self._batches(made)

    def _taking(self, made: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError

    def _batches(self, made: list[Any]) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError


class _RowOutput(_Output):
    """Rows, whose fields are found by their names; one that is not there is null, as in Spark."""

    def _taking(self, made: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        while True:
            self._made.extend(islice(made, _OUTPUT_ROWS - len(self._made)))
            if len(self._made) < _OUTPUT_ROWS:
                return
            yield from self.rest()

    def _batches(self, made: list[Any]) -> Iterator[pa.RecordBatch]:
        schema, name = self._about.schema, self._about.name
        fields = self._fields_of(made)
        columns: list[Sequence[Any]]
        if fields is not None and not any(pt.is_nested(field.type) for field in schema):
            found = dict(zip(fields, zip(*made, strict=True), strict=True))
            nothing = (None,) * len(made)
            columns = [found.get(field, nothing) for field in schema.names]
        else:
            dicts = [row.asDict(True) for row in made]
            columns = [[each.get(field) for each in dicts] for field in schema.names]
        arrays = [
            column_of(name, field, values) for field, values in zip(schema, columns, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _fields_of(self, made: list[Any]) -> Sequence[str] | None:
        """The fields that all rows have in the same order; None if they differ."""
        with contextlib.suppress(AttributeError):
            if all(issubclass(kind, Row) for kind in set(map(type, made))):
                fields = list(map(_FIELDS, made))
                return fields[0] if fields.count(fields[0]) == len(fields) else None
        self._refuse(made)
        return None

    def _refuse(self, made: list[Any]) -> None:
        for row in made:
            if not isinstance(row, Row) or not hasattr(row, "__fields__"):
                names = self._about.schema.names
                raise DataError(
                    f"{self._about.name} yielded {row!r}: transformWithState wants pyspark.sql.Row"
                    f" objects with the fields {', '.join(names)}, such as Row({names[0]}=...)"
                )


class _PandasOutput(_Output):
    """Frames; small ones are put together first, as each by itself costs the most."""

    def __init__(self, about: ProcessorProgram) -> None:
        super().__init__(about)
        self._rows = 0

    def _taking(self, made: Iterator[Any]) -> Iterator[pa.RecordBatch]:
        for frame in made:
            self._made.append(frame)
            self._rows += _rows_in(frame)
            if self._rows >= _OUTPUT_ROWS:
                self._rows = 0
                yield from self.rest()

    def _batches(self, made: list[Any]) -> Iterator[pa.RecordBatch]:
        convert = pandas_function(self._about).from_pandas
        small: list[Any] = []
        for frame in made:
            if self._is_small(frame):
                small.append(frame)
                continue
            if small:
                yield convert(self._together(small))
                small = []
            yield convert(frame)
        if small:
            yield convert(self._together(small))

    def _is_small(self, frame: Any) -> bool:
        """Not one whose columns are wrong: it is converted by itself, to be refused."""
        columns = getattr(frame, "columns", None)
        if columns is None or len(frame) > _SMALL_FRAME_ROWS:
            return False
        return set(columns.tolist()) == set(self._about.schema.names)

    def _together(self, frames: list[Any]) -> pandas.DataFrame:
        """By their values: `concat` would take a tenth of a millisecond for each of them."""
        import pandas

        return pandas.DataFrame(
            {
                name: pandas.Series([value for frame in frames for value in frame[name].tolist()])
                for name in self._about.schema.names
            }
        )


def _rows_in(frame: Any) -> int:
    return len(frame) if hasattr(frame, "columns") else 1


# --- rows as PySpark has them


@functools.lru_cache(maxsize=64)
def row_maker(names: tuple[str, ...]) -> Callable[[Iterable[Any]], Any]:
    """Makes `Row` objects with these fields out of their values.

    They are of a class of their own, which knows the names: `Row` would keep them in every object,
    and look for `row.app_id` in Python code.
    """
    getters = namedtuple("Row", names, rename=True)  # type: ignore[misc]
    fields = {
        name: vars(getters)[name]
        for name in names
        if name in vars(getters) and not hasattr(Row, name)
    }
    made = type("Row", (Row,), {"__slots__": (), "__fields__": list(names), **fields})
    return cast(Callable[[Iterable[Any]], Any], functools.partial(tuple.__new__, made))


def python_values(column: pa.Array, time_zone: str) -> Sequence[Any]:
    """The column as PySpark gives it to Python: instants in the session's time zone."""
    if pt.is_dictionary(column.type):
        values = python_values(column.dictionary, time_zone)
        return [None if at is None else values[at] for at in column.indices.to_pylist()]
    wanted = _in_zone(column.type, time_zone)
    is_instant = pt.is_timestamp(wanted) and wanted.tz
    if is_instant and wanted != pa.timestamp("us", "UTC") and not column.null_count:
        return _instants(column, time_zone)
    return row_functions.python_values(
        column if wanted.equals(column.type) else column.cast(wanted)
    )


def _instants(column: pa.TimestampArray, time_zone: str) -> list[datetime.datetime]:
    """As `to_pylist` of the same in the zone, three times as fast."""
    zone = zoneinfo.ZoneInfo(time_zone)
    there = column.cast(pa.timestamp("us", time_zone))
    local = pc.local_timestamp(there)
    times = [time.replace(tzinfo=zone) for time in local.to_numpy().tolist()]
    if time_zone != "UTC":
        earlier = pc.assume_timezone(local, time_zone, ambiguous="earliest")
        for again in np.flatnonzero(np.asarray(pc.not_equal(earlier, there))).tolist():
            times[again] = times[again].replace(fold=1)  # in the hour that a clock change repeats
    return times


def _in_zone(type_: pa.DataType, time_zone: str) -> pa.DataType:
    if pt.is_timestamp(type_) and type_.tz:
        return pa.timestamp(type_.unit, time_zone)
    if pt.is_list(type_):
        field = type_.value_field
        return pa.list_(field.with_type(_in_zone(field.type, time_zone)))
    if pt.is_map(type_):
        item = type_.item_field.with_type(_in_zone(type_.item_type, time_zone))
        return pa.map_(_in_zone(type_.key_type, time_zone), item)
    if pt.is_struct(type_):
        return pa.struct([field.with_type(_in_zone(field.type, time_zone)) for field in type_])
    return type_


# --- the handle and what it hands out


class ProcessorHandle(StatefulProcessorHandle):
    """PySpark's handle, over our states."""

    def __init__(self, states: States) -> None:
        self._states = states

    def getValueState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ValueState:
        return ProcessorValueState(self._value(stateName, schema, ttlDurationMs))

    def getListState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ListState:
        declared = arrow_schema_of(stateName, schema)
        return ProcessorListState(self._states.list(stateName, declared, ttlDurationMs, row_maker))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        user_key = arrow_schema_of(stateName, userKeySchema)
        declared = arrow_schema_of(stateName, valueSchema)
        return ProcessorMapState(
            self._states.map(stateName, user_key, declared, ttlDurationMs, row_maker),
            row_maker(tuple(declared.names)),
        )

    def getReducingState(
        self,
        stateName: str,
        schema: StructType | str,
        reduce: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]],
        ttlDurationMs: int | None = None,
    ) -> ReducingHandle[Any]:
        """Our own: `add` puts `reduce` of what is there and what is added in its place."""
        return ReducingHandle(self._value(stateName, schema, ttlDurationMs), reduce)

    def getAggregatingState(
        self,
        stateName: str,
        schema: StructType | str,
        add: Callable[[tuple[Any, ...] | None, Any], tuple[Any, ...]],
        result: Callable[[tuple[Any, ...]], Any],
        ttlDurationMs: int | None = None,
    ) -> AggregatingHandle[Any]:
        """Our own: `schema` is that of the accumulator, which `add` makes anew with each value
        (of None at first), and of which `result` makes what `get` answers."""
        return AggregatingHandle(self._value(stateName, schema, ttlDurationMs), add, result)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._states.register_timer(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._states.delete_timer(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        return self._states.timers()

    def deleteIfExists(self, stateName: str) -> None:
        self._states.delete(stateName)

    def _value(self, name: str, schema: StructType | str, ttl_ms: int | None) -> ValueHandle[Any]:
        declared = arrow_schema_of(name, schema)
        return cast(ValueHandle[Any], self._states.value(name, declared, ttl_ms, row_maker))


def arrow_schema_of(state: str, schema: StructType | str) -> pa.Schema:
    """A schema as PySpark takes it; no JVM is asked, as executors have none."""
    if isinstance(schema, StructType):
        return to_arrow_schema(schema)
    if isinstance(schema, str):
        return schema_of_ddl(schema)
    raise UserCodeError(
        f"the schema of state {state} is a StructType or a DDL string, not {schema!r}: write for"
        ' example "count long"'
    )


class ProcessorValueState(ValueState):
    def __init__(self, handle: ValueHandle[Any]) -> None:
        self._handle = handle

    def exists(self) -> bool:
        return self._handle.exists()

    def get(self) -> tuple[Any, ...] | None:
        return self._handle.get()

    def update(self, newValue: tuple[Any, ...]) -> None:
        self._handle.update(newValue)

    def clear(self) -> None:
        self._handle.clear()


class ProcessorListState(ListState):
    def __init__(self, handle: ListHandle[Any]) -> None:
        self._handle = handle

    def exists(self) -> bool:
        return self._handle.exists()

    def get(self) -> Iterator[tuple[Any, ...]]:
        return self._handle.get()

    def put(self, newState: list[tuple[Any, ...]]) -> None:
        self._handle.put(newState)

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        self._handle.append(newState)

    def appendList(self, newState: list[tuple[Any, ...]]) -> None:
        self._handle.extend(newState)

    def clear(self) -> None:
        self._handle.clear()


class ProcessorMapState(MapState):
    def __init__(self, handle: MapHandle[Any], make: Callable[[Iterable[Any]], Any]) -> None:
        self._handle = handle
        self._make = make

    def exists(self) -> bool:
        return self._handle.exists()

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        found = self._handle.get(key)
        return None if found is None else self._make(found)

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        return self._handle.contains(key)

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        self._handle.put(key, value)

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        return self._handle.items()

    def keys(self) -> Iterator[tuple[Any, ...]]:
        return (user_key for user_key, _ in self._handle.items())

    def values(self) -> Iterator[tuple[Any, ...]]:
        return (value for _, value in self._handle.items())

    def removeKey(self, key: tuple[Any, ...]) -> None:
        self._handle.remove(key)

    def clear(self) -> None:
        self._handle.clear()
