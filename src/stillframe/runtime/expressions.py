"""Evaluates expressions on whole Arrow columns, in the slots, without Spark.

Theory of operation: a tree is evaluated bottom-up, each node once per batch, however often it is
used. `case`, `coalesce`, `and` and `or` may guard a part that would fail on some rows
(`when(x != 0, 10 / x)`). Evaluating every part on every row is fastest and nearly always right, so
that is tried first; if it fails, each part is evaluated again on just the rows that need it.

The names a `Call` may have are those in `runtime/functions` and the four above. What is a
`SparkResult` is computed by Spark's own code beside the slot, all of one operator's at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC
from functools import reduce
from operator import length_hint
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from stillframe.errors import DataError, UserCodeError
from stillframe.evaluator.beside import Evaluator
from stillframe.evaluator.crossing import RowRefused
from stillframe.graph.expressions import (
    BatchFunction,
    Call,
    Column,
    Expression,
    Literal,
    Named,
    RowFunction,
    SparkProjection,
    SparkResult,
    StartValue,
)
from stillframe.runtime.functions import FUNCTIONS, Datum, as_array
from stillframe.runtime.row_functions import SLICE_ROWS, at_row, python_values
from stillframe.runtime.times import INSTANT
from stillframe.user_code import fail


def evaluate(
    expression: Expression, batch: pa.RecordBatch, evaluator: Evaluator | None = None
) -> pa.Array:
    """The expression's value for each record of the batch."""
    return _Evaluation(batch, evaluator).array(expression)


def project(
    columns: tuple[Named, ...],
    batch: pa.RecordBatch,
    schema: pa.Schema,
    evaluator: Evaluator | None = None,
) -> pa.RecordBatch:
    """A batch of `schema` with the computed columns."""
    evaluation = _Evaluation(batch, evaluator)
    arrays = [
        _as_type(evaluation.array(column.expression), field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    if not arrays:
        return batch.select([])
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def filter_batch(
    condition: Expression, batch: pa.RecordBatch, evaluator: Evaluator | None = None
) -> pa.RecordBatch:
    """The records for which the condition is true; neither false nor null is."""
    kept = evaluate(condition, batch, evaluator)
    return batch if kept.true_count == batch.num_rows else batch.filter(kept)


def describe(expression: Expression) -> str:
    """The expression in a few words, for messages."""
    match expression:
        case Column(name):
            return name
        case Literal(value):
            return repr(value.as_py())
        case Call("cast", (argument, *_), type_):
            return f"cast({describe(argument)} as {type_})"
        case Call(function, arguments):
            return _called_with(function, arguments)
        case RowFunction(name=name, arguments=arguments):
            return _called_with(name, arguments)
        case BatchFunction(name=name, arguments=arguments):
            return _called_with(name, arguments)
        case SparkResult(sql=sql) | StartValue(sql=sql):
            return sql
    raise AssertionError(f"no kind of expression: {expression!r}")


def _called_with(function: str, arguments: Sequence[Expression]) -> str:
    return f"{function}({', '.join(map(describe, arguments))})"


class _Evaluation:
    """The values of expressions over one batch."""

    def __init__(
        self,
        batch: pa.RecordBatch,
        evaluator: Evaluator | None,
        *,
        is_part: bool = False,
        now_us: int | None = None,
    ) -> None:
        self._batch = batch
        self._evaluator = evaluator
        self._now_us = now_us or time.time_ns() // 1000
        """What Spark's clocks say, of all that is computed of the batch."""
        self._is_part = is_part
        """Whether places in it are none in the batch that came."""
        # By identity: a shared part of the tree is one object, and comparing trees is slow.
        # The expression is kept beside its value so that its id stays its own.
        self._known: dict[int, tuple[Expression, Datum]] = {}
        self._crossed: dict[int, list[pa.Array]] = {}
        """What Spark's evaluator has computed, by the identity of the projection."""

    def array(self, expression: Expression) -> pa.Array:
        return as_array(self._datum(expression), self._batch.num_rows)

    def _datum(self, expression: Expression) -> Datum:
        known = self._known.get(id(expression))
        if known is not None:
            return known[1]
        datum = self._computed(expression)
        self._known[id(expression)] = (expression, datum)
        return datum

    def _computed(self, expression: Expression) -> Datum:
        match expression:
            case Column(name, type_):
                return _as_type(self._batch.column(name), type_)
            case Literal(value):
                return value
            case RowFunction():
                return self._call_per_row(expression)
            case BatchFunction():
                return self._call_per_batch(expression)
            case SparkResult():
                return self._by_spark(expression)
            case StartValue():
                raise AssertionError(f"{expression.sql} is read before the plan is made")
            case Call(function) if function in _GUARDS:
                return self._guarded(expression)
            case Call(function) if function in _DECIDED_BY:
                return self._unless_decided(expression)
            case Call("in"):
                return self._in_one_after_the_other(expression)
            case Call():
                return self._call(expression)

    def _call(self, call: Call) -> Datum:
        arguments = [self._datum(argument) for argument in call.arguments]
        if arguments and all(isinstance(argument, pa.Scalar) for argument in arguments):
            arguments[0] = as_array(arguments[0], self._batch.num_rows)
        try:
            return _as_type(FUNCTIONS[call.function](call.type, *arguments), call.type)
        except (pa.ArrowInvalid, OverflowError) as error:
            raise _cannot_compute(call, error) from error

    def _by_spark(self, result: SparkResult) -> pa.Array:
        if not self._batch.num_rows:
            return pa.array([], result.type)
        projection = result.projection
        if id(projection) not in self._crossed:
            self._crossed[id(projection)] = self._columns_by_spark(projection, result)
        return _as_type(self._crossed[id(projection)][result.place], result.type)

    def _columns_by_spark(self, projection: SparkProjection, one: SparkResult) -> list[pa.Array]:
        assert self._evaluator is not None, f"there is no evaluator of Spark's for {one.sql}"
        inputs = [self.array(part) for part in projection.inputs]
        if projection.takes_time:
            now = pa.scalar(self._now_us, pa.int64()).cast(INSTANT)
            inputs.append(pa.repeat(now, self._batch.num_rows))
        try:
            return self._evaluator.columns(projection, inputs, self._batch.num_rows)
        except RowRefused as refused:
            place = refused.place
            at = "" if place is None else f" at {at_row(self._batch, place)[0]}"
            raise DataError(
                f"{one.sql}, or what Spark's evaluator computes with it, cannot be computed{at}:"
                f" {refused}; filter out such records or guard the expression with when(...)"
            ) from refused

    def _unless_decided(self, call: Call) -> Datum:
        """Where one argument is null, Spark does not look at the other, which may fail."""
        try:
            return self._call(call)
        except DataError:
            known = self.array(call.arguments[_DECIDED_BY[call.function]]).is_valid()
            if known.true_count == len(known):
                raise
        rows = np.flatnonzero(_mask(known, null_is=False))
        values = self._on_rows(call, rows)
        return pc.replace_with_mask(pa.nulls(len(known), call.type), known, values)

    def _in_one_after_the_other(self, call: Call) -> Datum:
        """Behind an item that is the value, Spark looks at no other, which may fail."""
        try:
            return self._call(call)
        except DataError:
            value, *items = call.arguments
            are_equal = [Call("equal", (value, item), call.type) for item in items]
            either = reduce(lambda one, two: Call("or", (one, two), call.type), are_equal)
            return self._datum(either)

    def _guarded(self, call: Call) -> Datum:
        try:
            values = [self.array(argument) for argument in call.arguments]
        except DataError:
            return _GUARDS[call.function][1](self, call)
        return _GUARDS[call.function][0](values)

    def _call_per_row(self, call: RowFunction) -> pa.Array:
        columns = [self.array(argument) for argument in call.arguments]
        starts = range(0, self._batch.num_rows, SLICE_ROWS) or [0]
        return pa.concat_arrays([self._called(call, columns, start) for start in starts])

    def _called(self, call: RowFunction, columns: list[pa.Array], start: int) -> pa.Array:
        """For the rows of one slice, from `start` on."""
        count = min(SLICE_ROWS, self._batch.num_rows - start)
        arguments = [_python_values(column.slice(start, count)) for column in columns]
        for place, given in enumerate(call.given):
            if given is not None:
                arguments[place] = list(map(given, arguments[place]))
        left = iter(arguments[0] if arguments else range(count))
        try:
            if arguments:
                values = list(map(call.function, left, *arguments[1:]))
            else:
                values = [call.function() for _ in left]
            if len(values) < count:
                raise StopIteration  # which `map` takes for its end
        except (Exception, SystemExit) as error:
            place = start + count - length_hint(left) - 1
            record, rows, row = at_row(self._batch, place)
            known = None if self._is_part else rows
            fail(f"function {call.name}", error, record, known, row, function=call.function)
        try:
            return _arrow_values(values, call)
        except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserCodeError(
                f"function {call.name} was declared to return {call.type} but returned "
                f"something else ({error}): return that type or declare another one"
            ) from error

    def _call_per_batch(self, call: BatchFunction) -> pa.Array:
        rows = self._batch.num_rows
        if not rows:
            return pa.array([], call.type)
        columns = [self.array(argument) for argument in call.arguments]
        try:
            made = call.function(columns, rows)
        except (Exception, SystemExit) as error:
            fail(f"function {call.name}", error)
        return _as_type(made, call.type)

    # The careful way: each part only on the rows that need it.

    def _on_rows(self, expression: Expression, rows: npt.NDArray[np.int64]) -> pa.Array:
        part = self._batch.take(pa.array(rows, pa.int64()))
        here = _Evaluation(part, self._evaluator, is_part=True, now_us=self._now_us)
        return here.array(expression)

    def case_by_rows(self, call: Call) -> pa.Array:
        remaining = np.arange(self._batch.num_rows, dtype=np.int64)
        order: list[npt.NDArray[np.int64]] = []
        values: list[pa.Array] = []
        *pairs, otherwise = call.arguments
        for condition, value in zip(pairs[::2], pairs[1::2], strict=True):
            true = _mask(self._on_rows(condition, remaining), null_is=False)
            order.append(remaining[true])
            values.append(self._on_rows(value, remaining[true]))
            remaining = remaining[~true]
        order.append(remaining)
        values.append(self._on_rows(otherwise, remaining))
        places = np.argsort(np.concatenate(order))
        return pa.concat_arrays(values).take(pa.array(places))

    def coalesce_by_rows(self, call: Call) -> pa.Array:
        *first, last = call.arguments
        pairs = [
            part
            for argument in first
            for part in (Call("is_not_null", (argument,), pa.bool_()), argument)
        ]
        return self.case_by_rows(Call("case", (*pairs, last), call.type))

    def and_by_rows(self, call: Call) -> pa.Array:
        return self._second_where_first_leaves_open(call, pc.and_kleene, decided_by=False)

    def or_by_rows(self, call: Call) -> pa.Array:
        return self._second_where_first_leaves_open(call, pc.or_kleene, decided_by=True)

    def _second_where_first_leaves_open(
        self, call: Call, combine: Callable[..., pa.Array], *, decided_by: bool
    ) -> pa.Array:
        first, second = call.arguments
        left = self.array(first)
        is_open = _mask(left, null_is=not decided_by) != decided_by
        values = self._on_rows(second, np.flatnonzero(is_open))
        right = pc.replace_with_mask(
            pa.repeat(decided_by, self._batch.num_rows), pa.array(is_open), values
        )
        return combine(left, right)


def _eager_case(values: list[pa.Array]) -> pa.Array:
    *pairs, otherwise = values
    conditions = pa.StructArray.from_arrays(
        pairs[::2], names=[str(index) for index in range(len(pairs) // 2)]
    )
    return pc.case_when(conditions, *pairs[1::2], otherwise)


_Eager = Callable[[list[pa.Array]], pa.Array]
_ByRows = Callable[[_Evaluation, Call], pa.Array]

_GUARDS: dict[str, tuple[_Eager, _ByRows]] = {
    "case": (_eager_case, _Evaluation.case_by_rows),
    "coalesce": (lambda values: pc.coalesce(*values), _Evaluation.coalesce_by_rows),
    "and": (lambda values: pc.and_kleene(*values), _Evaluation.and_by_rows),
    "or": (lambda values: pc.or_kleene(*values), _Evaluation.or_by_rows),
}

_LEFT, _RIGHT = 0, 1
_DECIDED_BY = {
    **dict.fromkeys(("equal", "less", "less_equal", "greater", "greater_equal"), _LEFT),
    **dict.fromkeys(("add", "subtract", "multiply"), _LEFT),
    **dict.fromkeys(("add_days", "subtract_days", "days_between"), _LEFT),
    **dict.fromkeys(("divide", "integral_divide", "remainder", "pmod"), _RIGHT),
}
"""Null where this argument is, whatever the other would be. Spark looks at a divisor first."""

FUNCTION_NAMES = frozenset(FUNCTIONS) | frozenset(_GUARDS)
"""Every name a `Call` may have."""


def _mask(condition: pa.Array, *, null_is: bool) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = pc.fill_null(condition, null_is).to_numpy(zero_copy_only=False)
    return mask


def _python_values(array: pa.Array) -> Sequence[Any]:
    """What a user's function gets; a timestamp as PySpark hands it out: the machine's own time."""
    values = python_values(array)
    if array.type != INSTANT:
        return values
    return [None if at is None else at.astimezone().replace(tzinfo=None) for at in values]


def _arrow_values(values: list[Any], call: RowFunction) -> pa.Array:
    if call.type == INSTANT:
        # Without a zone it is the machine's own time, as it was on the way in.
        values = [None if at is None else at.astimezone(UTC) for at in values]
    if call.made is None:
        return pa.array(values, call.type)
    # Arrow takes bytes for text, and Spark does not.
    if not pt.is_string(call.type) or set(map(type, values)) <= _TEXT_OR_NULL:
        try:
            return pa.array(values, call.type)
        except (pa.ArrowException, TypeError, ValueError, AttributeError):
            pass  # as of most functions it is not
    return call.made(call.type, values)


_TEXT_OR_NULL = {str, type(None)}


def _as_type(datum: Datum, type_: pa.DataType) -> Datum:
    if datum.type == type_:
        return datum
    if isinstance(datum, pa.ChunkedArray):
        datum = datum.combine_chunks()
    try:
        return datum.cast(type_)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"a column of type {datum.type} does not fit the declared type {type_} ({error}): "
            "correct the schema or the data"
        ) from error


def _cannot_compute(call: Call, error: Exception) -> DataError:
    reason = str(error)
    if "divide by zero" in reason:
        reason = "division by zero"
    elif "overflow" in reason or "not in range" in reason or "fit" in reason:
        reason = f"overflow of {call.type} ({reason})"
    return DataError(
        f"{describe(call)} cannot be computed: {reason}; "
        "filter out such records or guard the expression with when(...)"
    )
