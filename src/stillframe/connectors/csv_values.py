"""Columns of texts as columns of their declared types, as Spark's CSV reader converts them.

Arrow casts what surely means the same to both; texts of other forms are looked at one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.connectors.csv_tokens import SPARKS_SIGNS, Signs
from stillframe.json_texts import moments
from stillframe.json_texts.columns import TimeColumns
from stillframe.json_texts.rules import Mode

_Mask = npt.NDArray[np.bool_]

_JAVA_INTEGER = re.compile(r"[+-]?\d+")
_JAVA_FLOAT = re.compile(r"[+-]?(NaN|Infinity|((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)[fFdD]?)", re.ASCII)
_JAVA_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?", re.ASCII)
_DECIMALS = Context(prec=80, rounding=ROUND_HALF_UP, Emax=10**9, Emin=-(10**9))
_BLANKS = "".join(map(chr, range(33)))


@dataclass(frozen=True, slots=True)
class CsvRules:
    """How lines are read: Spark's options. The defaults are Spark's, but for the zone."""

    signs: Signs = SPARKS_SIGNS
    has_header: bool = False
    comment: str | None = None
    null_value: str = ""
    empty_value: str = ""
    trims_left: bool = False
    trims_right: bool = False
    not_finite: Mapping[str, float] = field(
        default_factory=lambda: {"NaN": math.nan, "Inf": math.inf, "-Inf": -math.inf}
    )
    zone: str = "UTC"
    mode: Mode = "PERMISSIVE"
    corrupt_column: str = "_corrupt_record"


class _Unfit(ValueError):
    """A text is no value of its column's type."""


class ValueReader:
    """Converts the columns of one schema."""

    def __init__(self, rules: CsvRules) -> None:
        self._rules = rules
        self._times = TimeColumns(rules.zone)

    def read(self, texts: pa.Array, type_: pa.DataType) -> tuple[pa.Array, _Mask | None]:
        """The values, null where a text is none of this type; and where that is."""
        if pa.types.is_string(type_):
            return texts, None
        made, doubts = self._columnar(texts, type_)
        if doubts is None or not doubts.any():
            return made, None
        return self._one_by_one(texts, type_, made, doubts)

    def _columnar(self, texts: pa.Array, type_: pa.DataType) -> tuple[pa.Array, _Mask | None]:
        types = pa.types
        if types.is_timestamp(type_):
            return self._times.timestamps(texts, type_)
        if types.is_date(type_):
            return self._sure(texts, type_, "^[0-9]{4}-[0-9]{2}-[0-9]{2}$")
        if types.is_boolean(type_):
            return self._sure(texts, type_, "^(true|false)$")
        if types.is_integer(type_):
            digits = {8: 2, 16: 4, 32: 9, 64: 18}[type_.bit_width]
            return self._sure(texts, type_, f"^-?[0-9]{{1,{digits}}}$")
        if types.is_floating(type_):
            return self._sure(texts, type_, r"^-?[0-9]{1,15}(\.[0-9]{1,15})?$")
        whole = type_.precision - type_.scale
        if not whole > 0 or type_.scale < 0:
            return pa.nulls(len(texts), type_), texts.is_valid().to_numpy(zero_copy_only=False)
        fraction = f"(\\.[0-9]{{1,{type_.scale}}})?" if type_.scale else ""
        return self._sure(texts, type_, f"^-?[0-9]{{1,{whole}}}{fraction}$")

    def _sure(
        self, texts: pa.Array, type_: pa.DataType, pattern: str
    ) -> tuple[pa.Array, _Mask | None]:
        is_sure = pc.match_substring_regex(texts, pattern)
        if pc.all(is_sure, min_count=0).as_py():
            try:
                return texts.cast(type_), None
            except pa.ArrowInvalid:  # such as the 30th of February
                pass
            is_sure = pc.and_(is_sure, False)
        doubts: _Mask = pc.fill_null(pc.invert(is_sure), False).to_numpy(zero_copy_only=False)
        kept = pc.if_else(pa.array(~doubts), texts, pa.scalar(None, texts.type))
        try:
            return kept.cast(type_), doubts
        except pa.ArrowInvalid:
            return pa.nulls(len(texts), type_), texts.is_valid().to_numpy(zero_copy_only=False)

    def _one_by_one(
        self, texts: pa.Array, type_: pa.DataType, made: pa.Array, doubts: _Mask
    ) -> tuple[pa.Array, _Mask | None]:
        convert = self._converter(type_)
        places = np.flatnonzero(doubts)
        values: list[Any] = []
        unfit = np.zeros(len(texts), dtype=np.bool_)
        for place, text in zip(places, texts.take(pa.array(places)).to_pylist(), strict=True):
            value = None
            if text is not None:
                try:
                    value = convert(text)
                except (_Unfit, moments.NoMoment):
                    unfit[place] = True
            values.append(value)
        others = pa.array(values, _plain(type_)).cast(type_)
        fixed = pc.replace_with_mask(made, pa.array(doubts), others)
        return fixed, unfit if unfit.any() else None

    def _converter(self, type_: pa.DataType) -> Callable[[str], Any]:
        types = pa.types
        if types.is_boolean(type_):
            return _boolean
        if types.is_integer(type_):
            return lambda text: _integer(text, type_.bit_width)
        if types.is_floating(type_):
            return lambda text: self._floating(text, is_single=types.is_float32(type_))
        if types.is_decimal(type_):
            return lambda text: _decimal(text, type_)
        if types.is_date(type_):
            return moments.day_of
        if type_.tz is None:
            return moments.wall_clock_of
        return lambda text: moments.instant_of(text, self._rules.zone)

    def _floating(self, text: str, *, is_single: bool) -> float:
        if text in self._rules.not_finite:
            return self._rules.not_finite[text]
        trimmed = text.strip(_BLANKS)
        found = _JAVA_FLOAT.fullmatch(trimmed)
        if found is None:
            raise _Unfit(text)
        digits = trimmed if found[2] is None else trimmed.rstrip("fFdD")
        if not is_single or found[2] is None:
            return float(digits)
        # Straight from the text: rounded twice, it could become its neighbour.
        number: float = pa.scalar(digits.lstrip("+")).cast(pa.float32()).as_py()
        return number


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(type_):
        return pa.int64()
    return pa.int32() if pa.types.is_date(type_) else type_


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise _Unfit(text)


def _integer(text: str, bits: int) -> int:
    if _JAVA_INTEGER.fullmatch(text) is None:
        raise _Unfit(text)
    number = int(text)
    if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
        raise _Unfit(text)
    return number


def _decimal(text: str, type_: pa.DataType) -> Decimal | None:
    plain = text.replace(",", "")
    if _JAVA_DECIMAL.fullmatch(plain) is None:
        raise _Unfit(text)
    try:
        fitted = Decimal(plain).quantize(Decimal(1).scaleb(-type_.scale), context=_DECIMALS)
    except InvalidOperation:
        raise _Unfit(text) from None
    if len(fitted.as_tuple().digits) > type_.precision:
        raise _Unfit(text)
    return fitted
