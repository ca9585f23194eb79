"""One text as rows, exactly as Spark's JacksonParser makes them: the slow way.

Theory of operation
-------------------
A value is converted as its column's type asks. One that does not fit makes the record malformed;
its column is null, and the others keep their values. Which others, after a text that is not even
JSON, depends on where the parser stands, so that this file walks over the tokens in the order in
which Spark does, and catches errors where Spark catches them:

- an object catches the errors of its members and goes on with the next;
- a map goes on, too, to have read all of its members, and is null then;
- an array does not, and its members that follow are met by the object around it.

`_Partial` is an error that brings a value with it, of which some part is null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from stillframe.json_texts import moments
from stillframe.json_texts.rules import JsonRules
from stillframe.json_texts.tokens import NotJson, Token, Tokens

Value = Any
"""What pyarrow makes a value of a column's type of: times and dates are whole numbers."""
_Reader = Callable[[Tokens], Value]

_NUMBERS = (Token.INTEGER, Token.FRACTION)
_NOT_FINITE = {
    "NaN": math.nan,
    "+INF": math.inf,
    "+Infinity": math.inf,
    "Infinity": math.inf,
    "-INF": -math.inf,
    "-Infinity": -math.inf,
}
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?", re.ASCII)
_DECIMALS = Context(prec=80, rounding=ROUND_HALF_UP, Emax=10**9, Emin=-(10**9))


class DoesNotFit(Exception):
    """A value is not one of its column's type."""


class _Partial(Exception):
    def __init__(self, value: Value, cause: Exception) -> None:
        super().__init__(str(cause))
        self.value = value
        self.cause = cause


@dataclass(frozen=True, slots=True)
class TextRows:
    """The rows of one text; none for a blank one, several for an array of objects."""

    rows: Sequence[Sequence[Value]]
    why_malformed: str | None = None


class RowReader:
    """Reads texts of one schema."""

    def __init__(self, schema: pa.Schema, rules: JsonRules) -> None:
        self._rules = rules
        self._width = len(schema)
        self._fields = _fields(list(schema), rules)

    def read(self, text: bytes) -> TextRows:
        tokens = Tokens(text, self._rules)
        try:
            if tokens.next() is None:
                return TextRows([])
            return TextRows(self._rows(tokens))
        except _Partial as partial:
            return TextRows(partial.value, str(partial.cause))
        except (NotJson, DoesNotFit) as error:
            return TextRows([[None] * self._width], str(error))

    def _rows(self, tokens: Tokens) -> list[list[Value]]:
        if tokens.token is Token.START_OBJECT:
            try:
                return [_read_object(tokens, self._fields)]
            except _Partial as partial:
                raise _Partial([partial.value], partial.cause) from None
        if tokens.token is Token.START_ARRAY:
            rows: list[list[Value]] = _read_array(tokens, self._row_of_array)
            return rows
        raise DoesNotFit(f"it is {_described(tokens)} and not an object")

    def _row_of_array(self, tokens: Tokens) -> list[Value]:
        if tokens.token is not Token.START_OBJECT:
            raise DoesNotFit(f"an array has {_described(tokens)} and not an object")
        return _read_object(tokens, self._fields)


# --- nested values


_Fields = dict[str, tuple[int, _Reader]]


def _fields(fields: Sequence[pa.Field], rules: JsonRules) -> _Fields:
    return {field.name: (at, _reader(field.type, rules)) for at, field in enumerate(fields)}


def _read_object(tokens: Tokens, fields: _Fields) -> list[Value]:
    row: list[Value] = [None] * len(fields)
    error: Exception | None = None
    while tokens.next() not in (None, Token.END_OBJECT):
        known = fields.get(tokens.name) if tokens.name is not None else None
        if known is None:
            tokens.skip_children()
            continue
        at, read = known
        try:
            row[at] = read(tokens)
        except _Partial as partial:
            error = error or _of_field(tokens, partial.cause)
            row[at] = partial.value
        except (NotJson, DoesNotFit) as raised:
            error = error or _of_field(tokens, raised)
            tokens.skip_children()
    if error is not None:
        raise _Partial(row, error)
    return row


def _of_field(tokens: Tokens, error: Exception) -> Exception:
    return type(error)(f"{tokens.name}: {error}") if tokens.name is not None else error


def _read_array(tokens: Tokens, read: _Reader) -> list[Value]:
    values: list[Value] = []
    error: Exception | None = None
    while tokens.next() not in (None, Token.END_ARRAY):
        try:
            values.append(read(tokens))
        except _Partial as partial:
            error = error or partial.cause
            values.append(partial.value)
    if error is not None:
        raise _Partial(values, error)
    return values


def _read_map(tokens: Tokens, read: _Reader) -> list[tuple[str, Value]]:
    pairs: list[tuple[str, Value]] = []
    partly: Exception | None = None
    error: Exception | None = None
    while tokens.next() not in (None, Token.END_OBJECT):
        key = tokens.name or ""
        try:
            pairs.append((key, read(tokens)))
        except _Partial as partial:
            partly = partly or partial.cause
            pairs.append((key, partial.value))
        except (NotJson, DoesNotFit) as raised:
            error = error or raised
            tokens.skip_children()
    if error is not None:
        raise error
    if partly is not None:
        raise _Partial(pairs, partly)
    return pairs


# --- values by their column's type


def _reader(type_: pa.DataType, rules: JsonRules) -> _Reader:
    """Reads the value that a name, or a place in an array, stands in front of."""
    convert = _converter(type_, rules)

    def read(tokens: Tokens) -> Value:
        if tokens.token is Token.NAME:
            tokens.next()
        if tokens.token is None or tokens.token is Token.NULL:
            return None
        return convert(tokens)

    return read


def _converter(type_: pa.DataType, rules: JsonRules) -> _Reader:
    types = pa.types
    if types.is_struct(type_):
        fields = _fields(type_.fields, rules)
        return lambda tokens: _struct(tokens, type_, fields)
    if types.is_list(type_):
        element = _reader(type_.value_type, rules)
        return lambda tokens: _read_array(_starting(tokens, Token.START_ARRAY, type_), element)
    if types.is_map(type_):
        item = _reader(type_.item_type, rules)
        return lambda tokens: _read_map(_starting(tokens, Token.START_OBJECT, type_), item)
    if types.is_string(type_):
        return _string if rules.as_written else _compact_string
    if types.is_binary(type_):
        return lambda tokens: _binary(tokens, type_)
    if types.is_null(type_):
        return lambda tokens: None
    if types.is_boolean(type_):
        return lambda tokens: _boolean(tokens, type_)
    if types.is_integer(type_):
        return lambda tokens: _integer(tokens, type_)
    if types.is_floating(type_):
        return lambda tokens: _floating(tokens, type_, rules)
    if types.is_decimal(type_):
        return lambda tokens: _decimal(tokens, type_)
    if types.is_date(type_):
        return lambda tokens: _moment(tokens, type_, moments.date_of)
    assert types.is_timestamp(type_), type_
    if type_.tz is None:
        return lambda tokens: _moment(tokens, type_, moments.wall_clock_of)
    return lambda tokens: _instant(tokens, type_, rules.zone)


def _struct(tokens: Tokens, type_: pa.DataType, fields: _Fields) -> dict[str, Value]:
    try:
        values = _read_object(_starting(tokens, Token.START_OBJECT, type_), fields)
    except _Partial as partial:
        raise _Partial(dict(zip(fields, partial.value, strict=True)), partial.cause) from None
    return dict(zip(fields, values, strict=True))


def _starting(tokens: Tokens, wanted: Token, type_: pa.DataType) -> Tokens:
    if tokens.token is not wanted:
        raise _unfit(tokens, type_)
    return tokens


def _string(tokens: Tokens) -> str:
    return tokens.string() if tokens.token is Token.STRING else tokens.raw()


_BETWEEN_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*")|\s+', re.DOTALL)


def _compact_string(tokens: Tokens) -> str:
    """What Spark does where it no longer has the text: without the spaces between tokens."""
    if tokens.token is Token.STRING:
        return tokens.string()
    return _BETWEEN_STRINGS.sub(lambda found: found[1] or "", tokens.raw())


def _binary(tokens: Tokens, type_: pa.DataType) -> bytes:
    if tokens.token is not Token.STRING:
        raise _unfit(tokens, type_)
    return tokens.base64()


def _boolean(tokens: Tokens, type_: pa.DataType) -> bool:
    if tokens.token is Token.TRUE or tokens.token is Token.FALSE:
        return tokens.token is Token.TRUE
    raise _unfit(tokens, type_)


def _integer(tokens: Tokens, type_: pa.DataType) -> int:
    if tokens.token is not Token.INTEGER:
        raise _unfit(tokens, type_)
    number = int(tokens.number())
    limit: int = 1 << (type_.bit_width - 1)
    if type_.bit_width == 8 and limit <= number < 2 * limit:
        return number - 2 * limit  # Jackson takes a byte for one without a sign, too
    if not -limit <= number < limit:
        raise _unfit(tokens, type_)
    return number


def _floating(tokens: Tokens, type_: pa.DataType, rules: JsonRules) -> float:
    if tokens.token is Token.STRING:
        text = tokens.string()
        if text not in _NOT_FINITE or not rules.non_numeric_numbers:
            raise _unfit(tokens, type_)
        return _NOT_FINITE[text]
    if tokens.token not in _NUMBERS:
        raise _unfit(tokens, type_)
    text = tokens.number()
    if text in _NOT_FINITE:
        return _NOT_FINITE[text]
    if tokens.token is Token.INTEGER and not text.strip("-0"):
        return 0.0  # as a whole number, zero has no sign
    if pa.types.is_float32(type_):
        # Straight from the text: rounded twice, it could become its neighbour.
        number: float = pa.scalar(text).cast(pa.float32()).as_py()
        return number
    return float(text)


def _decimal(tokens: Tokens, type_: pa.DataType) -> Decimal:
    if tokens.token is Token.STRING:
        text = tokens.string().replace(",", "")
    elif tokens.token in _NUMBERS:
        text = tokens.number()
    else:
        raise _unfit(tokens, type_)
    if _DECIMAL.fullmatch(text) is None:
        raise _unfit(tokens, type_)
    try:
        fitted = Decimal(text).quantize(Decimal(1).scaleb(-type_.scale), context=_DECIMALS)
    except InvalidOperation:
        raise _unfit(tokens, type_) from None
    if len(fitted.as_tuple().digits) > type_.precision:
        raise _unfit(tokens, type_)
    return fitted


def _moment(tokens: Tokens, type_: pa.DataType, parse: Callable[[str], int]) -> int:
    if tokens.token is not Token.STRING or not tokens.string():
        raise _unfit(tokens, type_)
    try:
        return parse(tokens.string())
    except moments.NoMoment:
        raise _unfit(tokens, type_) from None


def _instant(tokens: Tokens, type_: pa.DataType, zone: str) -> int:
    if tokens.token is not Token.INTEGER:
        return _moment(tokens, type_, lambda text: moments.instant_of(text, zone))
    seconds = _integer(tokens, pa.int64())
    # Java's long runs over without a word.
    return (seconds * 1_000_000 + (1 << 63)) % (1 << 64) - (1 << 63)


def _unfit(tokens: Tokens, type_: pa.DataType) -> DoesNotFit:
    return DoesNotFit(f"{_described(tokens)} is not {_named(type_)}")


_NAMES = {
    pa.bool_(): "a boolean",
    pa.int8(): "a byte",
    pa.int16(): "a short",
    pa.int32(): "an int",
    pa.int64(): "a long",
    pa.float32(): "a float",
    pa.float64(): "a double",
    pa.date32(): "a date",
    pa.binary(): "binary (Base64)",
    pa.timestamp("us"): "a timestamp_ntz",
    pa.timestamp("us", "UTC"): "a timestamp",
}


def _named(type_: pa.DataType) -> str:
    """As Spark calls it."""
    if pa.types.is_struct(type_) or pa.types.is_map(type_):
        return f"an object ({'a struct' if pa.types.is_struct(type_) else 'a map'})"
    if pa.types.is_list(type_):
        return "an array"
    if pa.types.is_decimal(type_):
        return f"a decimal({type_.precision},{type_.scale})"
    return _NAMES.get(type_, str(type_))


def _described(tokens: Tokens) -> str:
    """The value that is met; a string is read for it, as Spark does for its own message."""
    if tokens.token is Token.STRING:
        return repr(tokens.string()[:40])
    if tokens.token in _NUMBERS:
        return tokens.number()[:40]
    return str(tokens.token.value) if tokens.token is not None else "nothing"
