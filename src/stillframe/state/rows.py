"""Rows of a schema as Python values: checked when they come in, never changed while they are kept.

Theory of operation
-------------------
A row that is kept is *frozen*: a tuple of values that cannot change, in which a list is a tuple and
a map a tuple of pairs. So a row that a snapshot holds is the same however long the writing takes,
whatever is done to what was handed out. Handing out *thaws* it: lists and dicts are made anew each
time. A row of plain values is its own frozen form, and costs nothing on its way out.

What does not fit the schema is refused when it is put in, where the program that gave it can be
named, and not when a checkpoint is written. Programs put a row for every row they take, so for
schemas of plain values the look at a row is a function that is compiled for the schema, as
`namedtuple` and `dataclass` do: it answers tuples that can be kept as they are, and leaves all
others, and all errors, to the way value by value.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from stillframe.errors import UserCodeError

Row: TypeAlias = tuple[Any, ...]
RecordMaker: TypeAlias = Callable[[tuple[str, ...]], Callable[[Iterable[Any]], Any]]
"""Makes what makes a record with these fields out of its values."""

_NUMBERS = (int, float, np.integer, np.floating)
_NO_NUMBERS = (bool, np.timedelta64)
"""Which are subclasses of numbers all the same."""
_NAN = math.nan
"""The one that is kept: a NaN equals another only if it is the same object."""


class Unfit(Exception):
    """A value that is none of its type; turned into an error that names its place."""


def plain_tuples(names: tuple[str, ...]) -> Callable[[Iterable[Any]], Any]:
    """Records without names."""
    return tuple


class _Look(NamedTuple):
    """How values look to those they are handed out to."""

    records: RecordMaker
    named: bool


class RowType:
    """The rows of one schema; `records` makes what a nested struct is handed out as.

    With `named` the rows themselves are such records, and instants have their zone, UTC; otherwise
    both are as PySpark has them: plain tuples, and times of the machine's own zone without one.
    """

    def __init__(
        self, schema: pa.Schema, records: RecordMaker = plain_tuples, *, named: bool = False
    ) -> None:
        self.schema = schema
        self.type = pa.struct(list(schema))
        self._make = records(tuple(schema.names)) if named else tuple
        self._kinds = [_kind_of(field.type, _Look(records, named)) for field in schema]
        self._freezers = [
            _checked(kind.freeze, field.nullable)
            for kind, field in zip(self._kinds, schema, strict=True)
        ]
        self._has_plain_values = not any(kind.thaw for kind in self._kinds)
        self.is_plain = self._has_plain_values and not named
        """Whether a row can be handed out as it is kept."""
        self.frozen: Callable[[Any, str], Row] = _quick_look(schema, self._frozen)
        """The row as it is kept; `what` it is for, if it does not fit."""
        self.thaw: Callable[[Row], Any] | None = self._thaw()
        """As `thawed`; None where rows are handed out as they are kept."""

    def _thaw(self) -> Callable[[Row], Any] | None:
        if self.is_plain:
            return None
        return self._make if self._has_plain_values else self.thawed

    def _frozen(self, row: Any, what: str) -> Row:
        if not isinstance(row, tuple):
            row = self._as_tuple(row, what)
        if len(row) != len(self._freezers):
            raise UserCodeError(
                f"{what} is given {len(row)} values, {row!r}, but its schema has"
                f" {len(self._freezers)} ({self}): give a tuple with one value for each field"
            )
        try:
            return tuple([freeze(value) for freeze, value in zip(self._freezers, row, strict=True)])
        except Unfit as unfit:
            raise UserCodeError(
                f"{what} is given {row!r}, which does not fit its schema ({self}), as {unfit}:"
                " give a tuple with values of these types"
            ) from None

    def thawed(self, row: Row) -> Row:
        """The row as it is handed out: a copy as far as it could be changed."""
        if self.is_plain:
            return row
        if not self._has_plain_values:
            row = tuple(
                [
                    value if kind.thaw is None or value is None else kind.thaw(value)
                    for kind, value in zip(self._kinds, row, strict=True)
                ]
            )
        return cast(Row, self._make(row))

    def to_arrow(self, rows: Sequence[Row]) -> pa.StructArray:
        """Frozen rows as a column."""
        columns = zip(*rows, strict=True) if rows else [()] * len(self.schema)
        arrays = [
            pa.array(map(kind.dump, column) if kind.dump else column, field.type, size=len(rows))
            for column, kind, field in zip(columns, self._kinds, self.schema, strict=True)
        ]
        if not arrays:
            return pa.array([{}] * len(rows), self.type)
        return pa.StructArray.from_arrays(arrays, fields=list(self.schema))

    def from_arrow(self, column: pa.StructArray) -> list[Row]:
        """A column of this type as frozen rows."""
        columns = [
            list(map(kind.load, part.to_pylist())) if kind.load else part.to_pylist()
            for kind, part in zip(self._kinds, column.flatten(), strict=True)
        ]
        return list(zip(*columns, strict=True)) if columns else [()] * len(column)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {field.type}" for field in self.schema)

    def _as_tuple(self, row: Any, what: str) -> Row:
        if isinstance(row, list):
            return tuple(row)
        raise UserCodeError(
            f"{what} is given {row!r}, a {type(row).__name__}: give a tuple with one value for"
            f" each field of its schema ({self})"
        )


# --- rows that are kept as they came


def _quick_look(schema: pa.Schema, frozen: Callable[[Any, str], Row]) -> Callable[[Any, str], Row]:
    """As `frozen`, several times as fast for plain tuples that are their own frozen form."""
    looks = [_look_at(f"v{place}", field) for place, field in enumerate(schema)]
    if not looks or None in looks:
        return frozen
    values = "".join(f"v{place}, " for place in range(len(looks)))
    # Only numbers go into this text, nothing of what a user has written.
    code = f"""
def look(row, what):
    if row.__class__ is tuple and len(row) == {len(looks)}:
        {values}= row
        if {" and ".join(map(str, looks))}:
            return row
    return frozen(row, what)
"""
    known: dict[str, Any] = {
        "frozen": frozen,
        "date": datetime.date,
        "datetime": datetime.datetime,
        "timedelta": datetime.timedelta,
        "UTC": datetime.UTC,
    }
    exec(code, known)
    return cast(Callable[[Any, str], Row], known["look"])


def _look_at(name: str, field: pa.Field) -> str | None:
    """Whether a value is kept as it is, as an expression; None: it may have to be made anew."""
    type_ = field.type
    if pt.is_integer(type_):
        limit = 1 << (type_.bit_width - 1)
        look = f"{name}.__class__ is int and {-limit} <= {name} <= {limit - 1}"
    elif pt.is_float64(type_):
        look = f"{name}.__class__ is float and {name} == {name}"
    elif pt.is_timestamp(type_):
        zone = "UTC" if type_.tz else "None"
        look = f"{name}.__class__ is datetime and {name}.tzinfo is {zone}"
    else:
        found = next((kind for is_of, kind in _KEPT_AS_THEY_ARE if is_of(type_)), None)
        if found is None:
            return None
        look = f"{name}.__class__ is {found}"
    return f"({look} or {name} is None)" if field.nullable else f"({look})"


_KEPT_AS_THEY_ARE: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pt.is_boolean, "bool"),
    (pt.is_string, "str"),
    (pt.is_binary, "bytes"),
    (pt.is_date32, "date"),
    (pt.is_duration, "timedelta"),
)


# --- one kind of value after the other


class _Kind:
    """How the values of one type are frozen, thawed, written and read; None: as they are."""

    __slots__ = ("dump", "freeze", "load", "thaw")

    def __init__(
        self,
        freeze: Callable[[Any], Any],
        thaw: Callable[[Any], Any] | None = None,
        dump: Callable[[Any], Any] | None = None,
        load: Callable[[Any], Any] | None = None,
    ) -> None:
        self.freeze = freeze
        self.thaw = thaw
        self.dump = dump
        self.load = load


def _kind_of(type_: pa.DataType, look: _Look) -> _Kind:
    if pt.is_list(type_):
        return _list_kind(type_, look)
    if pt.is_map(type_):
        return _map_kind(type_, look)
    if pt.is_struct(type_):
        return _struct_kind(type_, look)
    if pt.is_timestamp(type_) and type_.tz:
        return _Kind(_instant, None if look.named else _in_local_time)
    if pt.is_floating(type_):
        return _Kind(_scalar(type_), load=_one_nan)
    return _Kind(_scalar(type_))


def _checked(freeze: Callable[[Any], Any], nullable: bool) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        if value is not None:
            return freeze(value)
        if nullable:
            return None
        raise Unfit("a field that is never null is None")

    return checked


def _list_kind(type_: pa.ListType, look: _Look) -> _Kind:
    field = type_.value_field
    inner = _kind_of(field.type, look)
    freeze = _checked(inner.freeze, field.nullable)
    thaw = _unless_none(inner.thaw)

    def frozen(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple | np.ndarray):
            raise Unfit(f"{value!r} is no list")
        return tuple([freeze(each) for each in value])

    return _Kind(
        frozen,
        lambda value: [thaw(each) for each in value] if thaw else list(value),
        _each(inner.dump),
        lambda value: None if value is None else tuple(map(_or_same(inner.load), value)),
    )


def _map_kind(type_: pa.MapType, look: _Look) -> _Kind:
    key, item = _kind_of(type_.key_type, look), _kind_of(type_.item_type, look)
    freeze_key = _checked(key.freeze, nullable=False)
    freeze_item = _checked(item.freeze, type_.item_field.nullable)
    thaw_key, thaw_item = _or_same(_unless_none(key.thaw)), _or_same(_unless_none(item.thaw))
    dump_key, dump_item = _or_same(key.dump), _or_same(item.dump)
    load_key, load_item = _or_same(key.load), _or_same(item.load)

    def frozen(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, Mapping):
            raise Unfit(f"{value!r} is no dict")
        return tuple([(freeze_key(k), freeze_item(v)) for k, v in value.items()])

    def loaded(value: Any) -> Any:
        return None if value is None else tuple([(load_key(k), load_item(v)) for k, v in value])

    def dumped(value: Any) -> Any:
        return None if value is None else [(dump_key(k), dump_item(v)) for k, v in value]

    return _Kind(
        frozen,
        lambda value: {thaw_key(k): thaw_item(v) for k, v in value},
        dumped,
        loaded,
    )


def _struct_kind(type_: pa.StructType, look: _Look) -> _Kind:
    inner = RowType(pa.schema(list(type_)), look.records, named=look.named)
    names = tuple(inner.schema.names)
    make = look.records(names)
    dumps = [_or_same(kind.dump) for kind in inner._kinds]
    loads = [_or_same(kind.load) for kind in inner._kinds]

    def frozen(value: Any) -> Row:
        if isinstance(value, Mapping):
            value = tuple([value.get(name) for name in names])
        return inner.frozen(value, "a struct")

    def dumped(value: Any) -> Any:
        if value is None:
            return None
        return {name: dump(each) for name, dump, each in zip(names, dumps, value, strict=True)}

    def loaded(value: Any) -> Any:
        if value is None:
            return None
        return tuple([load(value[name]) for name, load in zip(names, loads, strict=True)])

    thaw = inner.thawed if look.named else lambda value: make(inner.thawed(value))
    return _Kind(frozen, thaw, dumped, loaded)


def _unless_none(call: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    if call is None:
        return None
    return lambda value: None if value is None else call(value)


def _or_same(call: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return (lambda value: value) if call is None else call


def _each(call: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    if call is None:
        return None
    return lambda value: None if value is None else [call(each) for each in value]


# --- plain values


def _scalar(type_: pa.DataType) -> Callable[[Any], Any]:
    if pt.is_boolean(type_):
        return _boolean
    if pt.is_integer(type_):
        return _integer(-(1 << (type_.bit_width - 1)), (1 << (type_.bit_width - 1)) - 1)
    if pt.is_float64(type_):
        return _float
    if pt.is_float32(type_):
        return _float32
    if pt.is_string(type_):
        return _of(str, "text")
    if pt.is_binary(type_):
        return _bytes
    if pt.is_decimal(type_):
        return _decimal(type_)
    if pt.is_date32(type_):
        return _date
    if pt.is_timestamp(type_):
        return _local_time
    if pt.is_duration(type_):
        return _duration
    if pt.is_null(type_):
        return _nothing
    raise UserCodeError(f"a state cannot keep values of type {type_}: declare another type")


def _boolean(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise Unfit(f"{value!r} is no boolean")


def _integer(least: int, most: int) -> Callable[[Any], int]:
    def integer(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, _NO_NUMBERS) or not isinstance(value, int | np.integer):
                raise Unfit(f"{value!r} is no whole number")
            value = int(value)
        if least <= value <= most:
            return cast(int, value)
        raise Unfit(f"{value} is not between {least} and {most}")

    return integer


def _float(value: Any) -> float:
    if type(value) is not float:
        if isinstance(value, _NO_NUMBERS) or not isinstance(value, _NUMBERS):
            raise Unfit(f"{value!r} is no number")
        value = _double(value)
    return cast(float, _one_nan(value))


def _double(value: Any) -> float:
    """The same number, which a large whole one may not have."""
    try:
        made = float(value)
    except OverflowError:
        raise Unfit(f"{value} cannot be a double, as it is too large") from None
    if isinstance(value, int | np.integer) and int(made) != value:
        raise Unfit(f"{value} cannot be a double, the next one is {made:.0f}")
    return made


def _float32(value: Any) -> float:
    wide = _float(value)
    with np.errstate(over="ignore"):
        made = float(np.float32(wide))
    if math.isinf(made) and not math.isinf(wide):
        raise Unfit(f"{value!r} is too large for a float")
    return cast(float, _one_nan(made))


def _one_nan(value: Any) -> Any:
    """As a key of a dict NaN is found only if it is the same object."""
    return value if value == value else _NAN


def _of(kind: type, words: str) -> Callable[[Any], Any]:
    def same(value: Any) -> Any:
        if type(value) is kind:
            return value
        if isinstance(value, kind):
            return kind(value)
        raise Unfit(f"{value!r} is no {words}")

    return same


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise Unfit(f"{value!r} is no bytes")


def _decimal(type_: pa.DataType) -> Callable[[Any], decimal.Decimal]:
    unit = decimal.Decimal(1).scaleb(-type_.scale)
    context = decimal.Context(prec=type_.precision)

    def fitted(value: Any) -> decimal.Decimal:
        if not isinstance(value, decimal.Decimal):
            raise Unfit(f"{value!r} is no Decimal")
        try:
            made = value.quantize(unit, context=context)
        except decimal.InvalidOperation:
            made = None
        if made is None or made != value:
            raise Unfit(f"{value} has more digits than {type_}")
        return made

    return fitted


def _date(value: Any) -> datetime.date:
    if isinstance(value, datetime.datetime) or not isinstance(value, datetime.date):
        raise Unfit(f"{value!r} is no date")
    return value


def _instant(value: Any) -> datetime.datetime:
    if not isinstance(value, datetime.datetime):
        raise Unfit(f"{value!r} is no datetime")
    # As everywhere in PySpark, a time without a zone is one of the machine's own.
    return _python_time(value).astimezone(datetime.UTC)


def _in_local_time(value: datetime.datetime) -> datetime.datetime:
    """As PySpark hands instants out: without a zone, in the machine's own."""
    return value.astimezone().replace(tzinfo=None)


def _local_time(value: Any) -> datetime.datetime:
    if not isinstance(value, datetime.datetime) or value.tzinfo is not None:
        raise Unfit(f"{value!r} is no datetime without a time zone")
    return _python_time(value)


def _python_time(value: datetime.datetime) -> datetime.datetime:
    if getattr(value, "nanosecond", 0):
        raise Unfit(f"{value} has nanoseconds")
    to_python = getattr(value, "to_pydatetime", None)  # one of pandas
    return value if to_python is None else cast(datetime.datetime, to_python())


def _duration(value: Any) -> datetime.timedelta:
    if not isinstance(value, datetime.timedelta):
        raise Unfit(f"{value!r} is no timedelta")
    if getattr(value, "nanoseconds", 0):
        raise Unfit(f"{value} has nanoseconds")
    to_python = getattr(value, "to_pytimedelta", None)
    return value if to_python is None else cast(datetime.timedelta, to_python())


def _nothing(value: Any) -> None:
    raise Unfit(f"{value!r} is not None")
