"""Sums and averages of decimals, exact, on whole columns.

Theory of operation
-------------------
A decimal is an integer of 128 bits and a scale that all of a column share. Numpy has no such
integers, so a sum is kept as four digits of 32 bits, each in 64: many can be added to each without
a carry. After a batch the carries are moved up, and all digits but the highest are below 2**32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import DataError
from stillframe.key_groups import Positions, fixed_width_values, validity
from stillframe.state.columns import Array, ColumnSpec
from stillframe.state.folding import Accumulator, Touched
from stillframe.state.key_index import fixed_width_array

_DIGITS = 4
_DIGIT_BITS = 32
_DIGIT_MAX = 2**_DIGIT_BITS - 1
_HIGHEST_MAX = 10**38 >> 96
"""Above it a sum may have more than 38 decimal digits."""


class SumOfDecimals(Accumulator):
    columns = (*(ColumnSpec(np.int64, 0) for _ in range(_DIGITS)), ColumnSpec(np.bool_, False))

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        assert column is not None
        rows = _add(arrays[:_DIGITS], touched, column)
        arrays[_DIGITS][rows] = True

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        digits = [part + other for part, other in zip(parts, others, strict=True)][:_DIGITS]
        return [*_carried(digits), parts[_DIGITS] | others[_DIGITS]]

    def result(self, parts: Sequence[Array]) -> pa.Array:
        return _decimals(parts[:_DIGITS], parts[_DIGITS], self.call)

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        seen = np.asarray(columns[0].is_valid())
        return [*(np.where(seen, digit, 0) for digit in _digits_of(columns[0])), seen]


class AverageOfDecimals(Accumulator):
    """The sum and how many there were; a quotient is rounded half up, as Spark's."""

    columns = (*(ColumnSpec(np.int64, 0) for _ in range(_DIGITS)), ColumnSpec(np.int64, 0))

    def __init__(self, call: AggregateCall, input_type: pa.DataType) -> None:
        super().__init__(call)
        self._sums = AggregateCall(
            "sum", call.input, call.name, pa.decimal128(38, input_type.scale)
        )

    def fold(self, arrays: Sequence[Array], touched: Touched, column: pa.Array | None) -> None:
        assert column is not None
        rows = _add(arrays[:_DIGITS], touched, column)
        np.add.at(arrays[_DIGITS], rows, 1)

    def merge(self, arrays: Sequence[Array], touched: Touched, columns: Sequence[pa.Array]) -> None:
        _add(arrays[:_DIGITS], touched, columns[0])
        np.add.at(arrays[_DIGITS], touched.rows, fixed_width_values(columns[1]))

    def combined(self, parts: Sequence[Array], others: Sequence[Array]) -> list[Array]:
        added = [part + other for part, other in zip(parts, others, strict=True)]
        return [*_carried(added[:_DIGITS]), added[_DIGITS]]

    def result(self, parts: Sequence[Array]) -> pa.Array:
        counts = parts[_DIGITS]
        sums = sum(
            digit.astype(object) << _DIGIT_BITS * place
            for place, digit in enumerate(parts[:_DIGITS])
        )
        widened = np.abs(sums) * 10 ** (self.call.type.scale - self._sums.type.scale)
        divisors = np.maximum(counts, 1).astype(object)
        quotients = (2 * widened + divisors) // (2 * divisors) * np.where(sums < 0, -1, 1)
        digits = [
            (quotients >> _DIGIT_BITS * place) & _DIGIT_MAX for place in range(_DIGITS - 1)
        ] + [quotients >> _DIGIT_BITS * (_DIGITS - 1)]
        return _decimals([digit.astype(np.int64) for digit in digits], counts > 0, self.call)

    def snapshot_fields(self) -> list[pa.Field]:
        name = self.call.name
        return [
            pa.field(f"{name}.sum", self._sums.type),
            pa.field(f"{name}.non_null_count", pa.int64()),
        ]

    def to_snapshot(self, parts: Sequence[Array]) -> list[pa.Array]:
        counts = parts[_DIGITS]
        everywhere = np.ones(len(counts), dtype=np.bool_)
        return [
            _decimals(parts[:_DIGITS], everywhere, self._sums),
            fixed_width_array(counts, None, pa.int64()),
        ]

    def from_snapshot(self, columns: Sequence[pa.Array]) -> list[Array]:
        return [*_digits_of(columns[0]), fixed_width_values(columns[1])]


def _add(digits: Sequence[Array], touched: Touched, column: pa.Array) -> Positions:
    """Add what is not null to the rows' sums; these rows, one for each value."""
    rows, valid = touched.rows, validity(column)
    values = _digits_of(column)
    if valid is not None:
        rows, values = rows[valid], [value[valid] for value in values]
    for digit, value in zip(digits, values, strict=True):
        np.add.at(digit, rows, value)
    after = _carried([digit.take(touched.distinct) for digit in digits])
    for digit, carried in zip(digits, after, strict=True):
        digit[touched.distinct] = carried
    return rows


def _digits_of(column: pa.Array) -> list[Array]:
    """The lowest first; the highest has the sign."""
    if not len(column):
        return [np.empty(0, dtype=np.int64) for _ in range(_DIGITS)]
    halves = np.frombuffer(
        column.buffers()[1], dtype=np.int64, count=2 * len(column), offset=16 * column.offset
    )
    low, high = halves[0::2], halves[1::2]
    return [
        low & _DIGIT_MAX,
        (low >> _DIGIT_BITS) & _DIGIT_MAX,
        high & _DIGIT_MAX,
        high >> _DIGIT_BITS,
    ]


def _carried(digits: Sequence[Array]) -> list[Array]:
    """The same numbers, with all digits but the highest in their range."""
    made, carry = [], np.zeros_like(digits[0])
    for digit in digits[:-1]:
        whole = digit + carry
        made.append(whole & _DIGIT_MAX)
        carry = whole >> _DIGIT_BITS
    return [*made, digits[-1] + carry]


def _decimals(digits: Sequence[Array], valid: Array, call: AggregateCall) -> pa.Array:
    halves = np.empty(2 * len(valid), dtype=np.int64)
    halves[0::2] = digits[0] | (digits[1] << _DIGIT_BITS)
    halves[1::2] = digits[2] | (digits[3] << _DIGIT_BITS)
    bits = pa.array(valid).buffers()[1] if not valid.all() else None
    made = pa.Array.from_buffers(call.type, len(valid), [bits, pa.py_buffer(halves)])
    highest = np.abs(digits[3])
    if bool((highest >= _HIGHEST_MAX).any()):
        try:
            made.validate(full=True)
            is_whole = bool((highest < 2 ** (_DIGIT_BITS - 1)).all())
        except pa.ArrowInvalid:
            is_whole = False
        if not is_whole:
            raise DataError(
                f"{call.name} has more digits than a {call.type} holds: cast {call.input} to a"
                " decimal with fewer digits, or to a double"
            )
    return made
