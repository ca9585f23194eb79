"""The user's functions, made to fit: each becomes a function from Arrow batches to Arrow batches.

These objects travel to the executors inside the plan and work there without pyspark. Whatever a
function gives back is checked against the schema that was declared for it.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.types as pt

from stillframe.errors import DataError
from stillframe.key_groups import fixed_width_values
from stillframe.runtime.exact_values import exact_array, exact_series
from stillframe.runtime.nested_in_pandas import from_series, is_nested, to_series
from stillframe.texts import refuse_bad_text
from stillframe.user_code import fail, lazily, shown
from stillframe.zones import common_name, type_in_zone

if TYPE_CHECKING:
    import pandas

Batches = Iterator[pa.RecordBatch]

_INSTANT = pa.timestamp("us", "UTC")
_EPOCH = datetime(1970, 1, 1, tzinfo=ZoneInfo("UTC"))
"""With the zone that Arrow gives its own."""
SLICE_ROWS = 4_096
"""So many rows are Python objects at a time: more of them would leave the processor's caches."""
_BATCH_ROWS = 32_768
"""What row functions answer is put together up to this many rows: whoever takes a batch apart by
keys has something to do for each key of each batch."""
_BATCH_BYTES = 16 * 1024 * 1024
"""And up to this size."""


def name_of(function: Callable[..., Any]) -> str:
    """What people call this function."""
    return getattr(function, "__name__", type(function).__name__)


@dataclass(frozen=True, slots=True)
class ArrowFunction:
    """`mapInArrow`: the function already speaks Arrow. Instants have the session's time zone, as in
    PySpark; what it yields is checked."""

    function: Callable[[Batches], Iterable[pa.RecordBatch]]
    schema: pa.Schema
    time_zone: str = "UTC"

    def __call__(self, batches: Batches) -> Batches:
        for made in lazily(self.function(map(self._in_zone, batches))):
            if not isinstance(made, pa.RecordBatch):
                raise DataError(
                    f"function {name_of(self.function)} yielded a {type(made).__name__}:"
                    " mapInArrow wants pyarrow.RecordBatch objects"
                )
            yield fitted(made, self.schema, name_of(self.function))

    def _in_zone(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        types = (type_in_zone(field.type, self.time_zone) for field in batch.schema)
        fields = (field.with_type(type_) for field, type_ in zip(batch.schema, types, strict=True))
        schema = pa.schema(fields)
        return batch if schema.equals(batch.schema) else batch.cast(schema)


@dataclass(frozen=True, slots=True)
class PandasFunction:
    """`mapInPandas`: timestamps are naive and in the session's time zone, as in PySpark."""

    function: Callable[[Iterator[pandas.DataFrame]], Iterable[pandas.DataFrame]]
    schema: pa.Schema
    time_zone: str

    def __call__(self, batches: Batches) -> Batches:
        for frame in lazily(self.function(map(self.to_pandas, batches))):
            yield self.from_pandas(frame)

    def to_pandas(self, batch: pa.RecordBatch) -> pandas.DataFrame:
        frame, zone = _in_pandas(batch), common_name(self.time_zone)
        for field in batch.schema:
            if _is_instant(field.type):
                local = frame[field.name].dt.tz_convert(zone)
                frame[field.name] = local.dt.tz_localize(None)
            elif is_nested(field.type):
                frame[field.name] = to_series(batch.column(field.name), zone)
        return frame

    def from_pandas(self, frame: pandas.DataFrame) -> pa.RecordBatch:
        name = name_of(self.function)
        columns = getattr(frame, "columns", None)
        if columns is None:
            raise DataError(
                f"function {name} yielded a {type(frame).__name__}: mapInPandas wants"
                " pandas.DataFrame objects"
            )
        labels, names = columns.tolist(), self.schema.names
        if not labels and not len(frame):
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        if not any(isinstance(label, str) for label in labels) and len(labels) == len(names):
            frame = frame.set_axis(names, axis="columns")  # by place, as in Spark
        elif sorted(map(str, labels)) != sorted(names):
            raise _mismatch(name, self.schema, f"columns {', '.join(map(str, columns))}")
        arrays = [column_of(name, field, self._series(frame, field)) for field in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _series(self, frame: pandas.DataFrame, field: pa.Field) -> pandas.Series:
        series = frame[field.name]
        if _is_instant(field.type) and series.dtype.kind == "M" and series.dt.tz is None:
            # ambiguous=False is PySpark's choice for the hour that a clock change repeats.
            return series.dt.tz_localize(common_name(self.time_zone), ambiguous=False)
        if is_nested(field.type):
            return from_series(series, field.type, common_name(self.time_zone))
        return series


def _in_pandas(batch: pa.RecordBatch) -> pandas.DataFrame:
    """Times in nanoseconds, as in PySpark, so that they are the same as whole numbers."""
    try:
        return batch.to_pandas(coerce_temporal_nanoseconds=True)
    except pa.ArrowInvalid:  # of a year that nanoseconds do not reach
        return batch.to_pandas()


@dataclass(frozen=True, slots=True)
class RowMap:
    """`map_rows`: one record in, one record out, or None to drop it."""

    function: Callable[[Any], Any]
    schema: pa.Schema

    def __call__(self, batches: Batches) -> Batches:
        return _by_slices(self._made, batches, self.schema, name_of(self.function))

    def _made(self, rows: Iterable[Any]) -> list[Any]:
        function = self.function
        # Not by `map`, for which a StopIteration would be the end of the rows.
        return [made for row in rows if (made := function(row)) is not None]


@dataclass(frozen=True, slots=True)
class RowFlatMap:
    """`flat_map_rows`: one record in, any number out."""

    function: Callable[[Any], Iterable[Any]]
    schema: pa.Schema

    def __call__(self, batches: Batches) -> Batches:
        return _by_slices(self._made, batches, self.schema, name_of(self.function))

    def _made(self, rows: Iterable[Any]) -> list[Any]:
        made: list[Any] = []
        for row in rows:
            results = self.function(row)
            if type(results) not in _PLAIN:
                results = self._checked(results)
            made.extend(results)
        return made

    def _checked(self, results: Any) -> Iterable[Any]:
        if results is None or isinstance(results, str | bytes | Mapping):
            raise DataError(
                f"function {name_of(self.function)} gave back {results!r}: flat_map_rows"
                " wants an iterable of records, such as a list of tuples"
            )
        return lazily(results)


_PLAIN = (list, tuple)


def _by_slices(
    make: Callable[[Iterable[Any]], list[Any]], batches: Batches, schema: pa.Schema, name: str
) -> Batches:
    return joined(_sliced(make, batches, schema, name))


def _sliced(
    make: Callable[[Iterable[Any]], list[Any]], batches: Batches, schema: pa.Schema, name: str
) -> Batches:
    for batch in batches:
        record = record_maker(tuple(batch.schema.names))
        for start in range(0, batch.num_rows, SLICE_ROWS):
            slice_ = batch.slice(start, SLICE_ROWS)
            rows = map(record, zip(*map(python_values, slice_.columns), strict=True))
            try:
                made = make(rows)
            except (Exception, SystemExit) as error:
                taken = start + slice_.num_rows - sum(1 for _ in rows)
                fail(f"function {name}", error, *at_row(batch, taken - 1))
            yield batch_of(made, schema, name)


def at_row(batch: pa.RecordBatch, place: int) -> tuple[str, range, str]:
    """Which record of the batch an error is about, for those who are told: in words, where it is,
    and the record itself."""
    made = record_maker(tuple(batch.schema.names))(batch.slice(place, 1).to_pylist()[0].values())
    row = shown(made)
    return f"record {place + 1} of {batch.num_rows}: {row}", range(place, place + 1), row


def in_batch(batch: pa.RecordBatch) -> tuple[str, range, str | None]:
    """The same where the code is given whole batches."""
    if not batch.num_rows:
        return "a batch without records", range(0), None
    first, _, row = at_row(batch, 0)
    return f"a batch of {batch.num_rows} records, {first}", range(batch.num_rows), row


class Record(tuple[Any, ...]):
    """One row: a named tuple whose fields also go by `row["app_id"]`, whatever their names are.

    Its class is called with one iterable of values. That is tuple's own way, which takes no Python
    call, unlike a named tuple's; there is a record for every row and for every state that is read.
    """

    __slots__ = ()
    __new__ = tuple.__new__
    __fields__: tuple[str, ...] = ()
    """The names of the columns; a `pyspark.sql.Row` keeps them here too."""
    __places__: Mapping[Any, int] = {}
    """Where each of them is."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return tuple.__getitem__(self, key)
        if key not in self.__places__:
            raise KeyError(f"no field {key!r} in this row: it has {', '.join(self.__fields__)}")
        return tuple.__getitem__(self, self.__places__[key])

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (tuple(self),)

    def as_dict(self) -> dict[str, Any]:
        return {name: self[place] for place, name in enumerate(self.__fields__)}

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"


@lru_cache(maxsize=64)
def record_maker(names: tuple[str, ...]) -> Callable[[Iterable[Any]], Any]:
    """Makes records with these fields out of their values."""
    # A named tuple reads its fields without a Python call; those with no good name get `_3`.
    fields = namedtuple("Row", names, rename=True)  # type: ignore[misc]
    # The first of two columns of one name, as `index` would find it.
    places = {name: place for place, name in reversed(list(enumerate(names)))}
    about = {"__slots__": (), "__fields__": names, "__places__": places}
    # The record first: by it the class is made an object of, and not by what a named tuple has.
    return cast(Callable[[Iterable[Any]], Any], type("Row", (Record, fields), about))


def python_values(column: pa.Array) -> Sequence[Any]:
    """As `to_pylist`, many times as fast for the most common columns."""
    kind = column.type
    if not column.null_count:
        if pt.is_integer(kind) or pt.is_float64(kind):
            return cast(Sequence[Any], fixed_width_values(column).tolist())
        if kind == _INSTANT:
            since = fixed_width_values(column).view("timedelta64[us]").tolist()
            return list(map(_EPOCH.__add__, since))
    return cast(Sequence[Any], column.to_pylist())


def joined(batches: Iterable[pa.RecordBatch]) -> Batches:
    """The same rows in larger batches; what comes alone is left as it is."""
    gathered: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        gathered.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
        if rows >= _BATCH_ROWS or size_bytes >= _BATCH_BYTES:
            yield from _together(gathered)
            gathered, rows, size_bytes = [], 0, 0
    yield from _together(gathered)


def _together(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) <= 1:
        return batches
    return cast(list[pa.RecordBatch], pa.Table.from_batches(batches).combine_chunks().to_batches())


def batch_of(made: Sequence[Any], schema: pa.Schema, function: str) -> pa.RecordBatch:
    columns = _columns_alike(made, schema)
    if columns is None:
        rows = [_values(result, schema, function) for result in made]
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [
        column_of(function, field, values) for field, values in zip(schema, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _columns_alike(made: Sequence[Any], schema: pa.Schema) -> Sequence[Sequence[Any]] | None:
    """The columns of records that are all of one common kind; None: look at each by itself."""
    kinds = set(map(type, made))
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind is tuple or kind is list:
        try:
            columns = list(zip(*made, strict=True))
        except ValueError:  # some are longer than others
            return None
        return columns if len(columns) == len(schema) else None
    if not issubclass(kind, tuple | dict) or set(map(len, made)) != {len(schema)}:
        return None
    if kind is dict:
        try:
            return [list(map(itemgetter(name), made)) for name in schema.names]
        except KeyError:
            return None
    return _columns_of_named(made, kind, schema)


def _columns_of_named(made: Sequence[Any], kind: type, schema: pa.Schema) -> list[Any] | None:
    """Of named tuples that cannot have names of their own, unlike a `pyspark.sql.Row`."""
    names = getattr(kind, "__fields__", None) or getattr(kind, "_fields", None)
    if not isinstance(names, tuple) or kind.__dictoffset__ or set(names) != set(schema.names):
        return None
    by_name = dict(zip(names, zip(*made, strict=True), strict=True))
    return [by_name[name] for name in schema.names]


def _values(result: Any, schema: pa.Schema, function: str) -> Sequence[Any]:
    """The values of one record in the order of the schema: by name where it has names."""
    names = getattr(result, "__fields__", None) or getattr(result, "_fields", None)
    if isinstance(result, Mapping):
        by_name = result
    elif names is not None and isinstance(result, tuple):
        by_name = dict(zip(names, result, strict=True))
    elif isinstance(result, tuple | list):
        if len(result) != len(schema):
            raise _mismatch(function, schema, f"{len(result)} values, {result!r}")
        return result
    else:
        raise _mismatch(function, schema, f"{result!r}, which is no tuple, dict or Row")
    if len(by_name) != len(schema) or any(name not in by_name for name in schema.names):
        raise _mismatch(function, schema, f"fields {', '.join(map(str, by_name))}")
    return [by_name[name] for name in schema.names]


def column_of(function: str, field: pa.Field, values: Any) -> pa.Array:
    make = exact_array if isinstance(values, Sequence) else exact_series
    try:
        array = make(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"function {function} gave back values for column {field.name} that are no"
            f" {field.type} ({error}): correct the function or its declared schema"
        ) from error
    if isinstance(array, pa.ChunkedArray):
        raise DataError(
            f"function {function} gave back {len(array)} values for column {field.name} that take"
            f" {array.nbytes} bytes, more than the 2 GB that a column of one batch holds: give back"
            " fewer rows at a time, or keep such values in files and give back their names"
        )
    _refuse_null(function, field, array)
    return array


def fitted(made: pa.RecordBatch, schema: pa.Schema, function: str) -> pa.RecordBatch:
    """This batch with exactly the declared schema, if the difference is none of meaning."""
    fits = made if made.schema.equals(schema) else _made_to_fit(made, schema, function)
    for place, field in enumerate(schema):
        if not field.nullable:
            _refuse_null(function, field, fits.column(place))
    refuse_bad_text(
        fits, f"what function {function} gave back", "give back UTF-8, or declare a binary column"
    )
    return fits


def _made_to_fit(made: pa.RecordBatch, schema: pa.Schema, function: str) -> pa.RecordBatch:
    if made.schema.names != schema.names:
        raise _mismatch(function, schema, _described(made.schema))
    for found, declared in zip(made.schema, schema, strict=True):
        if not _same_meaning(found.type, declared.type):
            raise _mismatch(function, schema, _described(made.schema))
    return _cast(made, schema, function)


def _cast(made: pa.RecordBatch, schema: pa.Schema, function: str) -> pa.RecordBatch:
    columns = zip(made.columns, schema, strict=True)
    try:
        arrays = [column.cast(field.type) for column, field in columns]
    except pa.ArrowException as error:
        raise _mismatch(function, schema, f"{_described(made.schema)} ({error})") from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _same_meaning(found: pa.DataType, declared: pa.DataType) -> bool:
    """Whether one type holds the other's values as they are; a number is never made a text."""
    types = pa.types
    if found.equals(declared) or types.is_null(found):
        return True
    if types.is_dictionary(found):
        return _same_meaning(found.value_type, declared)
    if types.is_integer(found) and types.is_integer(declared):
        return bool(found.bit_width <= declared.bit_width)
    if types.is_floating(found) and types.is_floating(declared):
        return bool(found.bit_width <= declared.bit_width)
    if types.is_timestamp(found) and types.is_timestamp(declared):
        return (found.tz is None) == (declared.tz is None)
    if _is_text(found) or _is_bytes(found):
        return _is_text(declared) if _is_text(found) else _is_bytes(declared)
    return found.id == declared.id and types.is_nested(found) and _same_parts(found, declared)


def _same_parts(found: pa.DataType, declared: pa.DataType) -> bool:
    """Of two structs, lists or maps."""
    ours, theirs = (list(map(kind.field, range(kind.num_fields))) for kind in (found, declared))
    if len(ours) != len(theirs):
        return False
    are_named = pa.types.is_struct(found)
    return all(
        _same_meaning(our.type, their.type) and (our.name == their.name or not are_named)
        for our, their in zip(ours, theirs, strict=True)
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_instant(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) and kind.tz is not None)


def _refuse_null(function: str, field: pa.Field, column: pa.Array) -> None:
    if not field.nullable and column.null_count:
        raise DataError(
            f"function {function} gave back null for column {field.name}, which is declared as"
            " never null: correct the function or its declared schema"
        )


def _mismatch(function: str, schema: pa.Schema, seen: str) -> DataError:
    return DataError(
        f"function {function} declared {_described(schema)} but gave back {seen}: make the two"
        " agree"
    )


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
