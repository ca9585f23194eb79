"""A `StatefulProcessor` as the program that a `Transform` calls, on executors.

Theory of operation: rows are made of whole columns, for all keys of a batch at once; a key's rows
are then a slice of each list. What Spark does once per micro-batch and key is done here once per
batch and key.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    TimerValues,
)

from stillframe.api.programs import Fired, Groups, KeyedProgram, States
from stillframe.errors import DataError, UserCodeError
from stillframe.graph.logical import TimeMode
from stillframe.runtime.key_processing import at_row_of_key, at_timer, rows_by_key
from stillframe.runtime.row_functions import PandasFunction, column_of, joined
from stillframe.spark.processors.handle import ProcessorHandle
from stillframe.spark.processors.rows import python_values, row_maker
from stillframe.user_code import fail, lazily

if TYPE_CHECKING:
    import pandas

_OUTPUT_ROWS = 4_096
"""So many rows are gathered before they go on."""
_SMALL_FRAME_ROWS = 64
_FIELDS = attrgetter("__fields__")


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

    def on_snapshot(self, checkpoint_id: int) -> None:
        self._tell("on_snapshot", checkpoint_id)

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._tell("on_checkpoint_complete", checkpoint_id)

    def _tell(self, method: str, checkpoint_id: int) -> None:
        """Of what PySpark's class has not, and the user's may have."""
        told = getattr(self._processor, method, None)
        if told is not None:
            told(checkpoint_id)

    def close(self) -> None:
        self._processor.close()

    def fire(self, fired: Fired) -> Iterator[pa.RecordBatch]:
        handle_timer = self._processor.handleExpiredTimer
        values, output = self._timer_values(), self._output()
        make = row_maker(tuple(fired.keys.schema.names))
        keys, place = self._keys(fired), 0
        try:
            for place in fired:
                info = ExpiredTimerInfo(fired.times_ms[place])
                key = make(keys[place])
                made = handle_timer(key=key, timerValues=values, expiredTimerInfo=info)
                yield from output.taking(made)
        except (Exception, SystemExit) as error:
            fail(self._about.name, error, at_timer(fired, place))
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
        keys, place, rows = self._keys(groups), 0, iter(())
        try:
            for place, rows in self._rows_by_key(groups):
                yield from output.taking(handle_rows(keys[place], rows, values))
        except (Exception, SystemExit) as error:
            fail(self._about.name, error, *at_row_of_key(groups, place, rows))
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
        keys, place = self._keys(groups), 0
        try:
            for place, frame in self._frames_by_key(groups):
                yield from output.taking(handle_rows(keys[place], iter((frame,)), values))
        except (Exception, SystemExit) as error:
            fail(self._about.name, error, *at_row_of_key(groups, place, iter(())))
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
        return self._taking(iter(lazily(made)))

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
        for given in made:
            frame = self._as_declared(given)
            if frame is None:
                continue
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
            yield from map(convert, self._together(small))
            small = []
            yield convert(frame)
        yield from map(convert, self._together(small))

    def _as_declared(self, frame: Any) -> Any:
        """As Spark reads a frame: labels that are no texts say nothing, and columns that are not
        declared are passed over. None: there are no rows."""
        columns = getattr(frame, "columns", None)
        if columns is None:
            return frame
        if not len(frame):
            return None
        labels, names = columns.tolist(), self._about.schema.names
        if len(labels) < len(names):
            return frame
        if not any(isinstance(label, str) for label in labels):
            return frame.iloc[:, : len(names)].set_axis(names, axis="columns")
        return frame[names] if set(names) < set(labels) else frame

    def _is_small(self, frame: Any) -> bool:
        """Not one whose columns are wrong: it is converted by itself, to be refused."""
        columns, names = getattr(frame, "columns", None), self._about.schema.names
        if columns is None or len(frame) > _SMALL_FRAME_ROWS:
            return False
        return len(columns) == len(names) and set(columns.tolist()) == set(names)

    def _together(self, frames: list[Any]) -> Iterator[pandas.DataFrame]:
        """By their values: `concat` would take a tenth of a millisecond for each of them.

        Only frames of the same dtypes, one after the other, are put together. Whole numbers beside
        a missing one would all become floats.
        """
        import pandas

        names = self._about.schema.names
        columns = ([frame[name] for name in names] for frame in frames)
        for dtypes, run in groupby(columns, lambda each: [column.dtype for column in each]):
            alike = zip(*run, strict=True)
            yield pandas.DataFrame(
                {
                    name: pandas.Series(
                        [value for column in parts for value in column.tolist()], dtype=dtype
                    )
                    for name, dtype, parts in zip(names, dtypes, alike, strict=True)
                }
            )


def _rows_in(frame: Any) -> int:
    return len(frame) if hasattr(frame, "columns") else 1
