"""The evaluator on its own, without Spark."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from stillframe.errors import DataError, UserCodeError
from stillframe.graph.expressions import Call, Column, Expression, Literal, Named, RowFunction
from stillframe.runtime.expressions import (
    FUNCTION_NAMES,
    describe,
    evaluate,
    filter_batch,
    project,
)
from stillframe.runtime.row_functions import SLICE_ROWS

INT = pa.int64()
BOOL = pa.bool_()
X = Column("x", INT)
BATCH = pa.record_batch(
    {
        "x": pa.array([1, 0, None, 4], INT),
        "s": pa.array(["a", "", None, "ü"]),
        "d": pa.array([math.nan, -0.0, None, 1.5]),
    }
)
S = Column("s", pa.string())
D = Column("d", pa.float64())


def constant(value: Any, type_: pa.DataType = INT) -> Literal:
    return Literal(pa.scalar(value, type_))


def call(function: str, *arguments: Expression, type: pa.DataType = INT) -> Call:
    return Call(function, arguments, type)


def test_a_column_and_a_constant_have_one_value_per_record() -> None:
    assert evaluate(X, BATCH).to_pylist() == [1, 0, None, 4]
    assert evaluate(constant(7), BATCH).to_pylist() == [7, 7, 7, 7]


def test_an_empty_batch_gives_an_empty_column_of_the_right_type() -> None:
    tenth = call("integral_divide", constant(10), X)
    for expression in (X, constant(7), tenth, call("case", constant(True, BOOL), tenth, X)):
        result = evaluate(expression, BATCH.slice(0, 0))
        assert isinstance(result, pa.Array)
        assert (len(result), result.type) == (0, INT)


def test_a_column_of_a_narrower_type_than_declared_is_widened() -> None:
    batch = pa.record_batch({"x": pa.array([1], pa.int32())})
    assert evaluate(X, batch).type == INT


def test_a_column_that_does_not_fit_its_declared_type_is_an_error() -> None:
    batch = pa.record_batch({"x": pa.array([1.5])})
    with pytest.raises(DataError, match="does not fit the declared type int64"):
        evaluate(X, batch)


@pytest.mark.parametrize(
    ("function", "with_itself"),
    [("null_safe_equal", True), ("equal", None), ("less", None), ("less_equal", None)],
)
def test_a_column_of_no_type_is_null_and_is_compared_as_that(function, with_itself) -> None:
    void = Column("v", pa.null())
    batch = pa.record_batch({"v": pa.nulls(2), "x": pa.array([1, None], INT)})

    for one, other in ((void, void), (void, Literal(pa.scalar(None)))):
        compared = evaluate(call(function, one, other, type=BOOL), batch)
        assert compared.to_pylist() == [with_itself, with_itself]
    with_numbers = evaluate(call(function, void, X, type=BOOL), batch).to_pylist()
    assert with_numbers == ([False, True] if with_itself else [None, None])


def test_a_function_of_constants_only_has_one_value_per_record() -> None:
    assert evaluate(call("add", constant(1), constant(2)), BATCH).to_pylist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (call("integral_divide", constant(10), X), "division by zero"),
        (call("remainder", constant(10), X), "division by zero"),
        (call("add", X, constant(2**63 - 1)), "overflow of int64"),
        (call("cast", S, constant("UTC", pa.string())), "the value 'a' is no int64"),
        (
            call("cast", D, constant("UTC", pa.string()), type=pa.int32()),
            "the value nan does not fit int32",
        ),
    ],
)
def test_what_cannot_be_computed_is_one_sentence(expression: Call, reason: str) -> None:
    with pytest.raises(DataError) as failure:
        evaluate(expression, BATCH)
    message = str(failure.value)
    assert message.startswith(f"{describe(expression)} cannot be computed: ")
    assert reason in message
    assert "\n" not in message


IS_ZERO = call("equal", X, constant(0), type=BOOL)
TENTH = call("integral_divide", constant(10), X)
MANY = call("less", constant(5), TENTH, type=BOOL)


def test_a_branch_is_not_evaluated_for_the_rows_it_is_not_for() -> None:
    case = call("case", IS_ZERO, constant(-1), TENTH)
    assert evaluate(case, BATCH).to_pylist() == [10, -1, None, 2]


def test_every_value_finds_its_own_row_again() -> None:
    batch = pa.record_batch({"x": pa.array([1, 2, 0, 5, 0], INT)})
    case = call("case", IS_ZERO, constant(-1), TENTH)
    assert evaluate(case, batch).to_pylist() == [10, 5, -1, 2, -1]


def test_a_branch_that_fails_on_its_own_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="division by zero"):
        evaluate(call("case", IS_ZERO, TENTH, constant(-1)), BATCH)


def test_the_first_matching_branch_wins_and_null_does_not_match() -> None:
    small = call("less", X, constant(4), type=BOOL)
    case = call("case", IS_ZERO, constant(0), small, constant(1), constant(2))
    assert evaluate(case, BATCH).to_pylist() == [1, 0, 2, 2]


def test_coalesce_looks_further_only_where_it_must() -> None:
    zero_or_null = call("case", IS_ZERO, constant(-1), constant(None))
    assert evaluate(call("coalesce", zero_or_null, TENTH), BATCH).to_pylist() == [10, -1, None, 2]


def test_and_and_or_look_at_the_right_side_only_where_it_matters() -> None:
    not_zero = call("not", IS_ZERO, type=BOOL)
    assert evaluate(call("and", not_zero, MANY, type=BOOL), BATCH).to_pylist() == [
        True,
        False,
        None,
        False,
    ]
    assert evaluate(call("or", IS_ZERO, MANY, type=BOOL), BATCH).to_pylist() == [
        True,
        True,
        None,
        False,
    ]


def test_logic_has_three_values() -> None:
    batch = pa.record_batch({"p": [True, False, None]})
    p, null = Column("p", BOOL), constant(None, BOOL)
    assert evaluate(call("and", p, null, type=BOOL), batch).to_pylist() == [None, False, None]
    assert evaluate(call("or", p, null, type=BOOL), batch).to_pylist() == [True, None, None]


def test_nan_equals_itself_and_is_the_largest_number() -> None:
    nan = constant(math.nan, pa.float64())
    assert evaluate(call("equal", D, nan, type=BOOL), BATCH).to_pylist() == [
        True,
        False,
        None,
        False,
    ]
    assert evaluate(call("less", D, nan, type=BOOL), BATCH).to_pylist() == [
        False,
        True,
        None,
        True,
    ]


def test_a_key_has_one_zero_and_one_nan() -> None:
    result = evaluate(call("normalize_float", D, type=pa.float64()), BATCH).to_pylist()
    assert math.copysign(1, result[1]) == 1
    assert math.isnan(result[0])
    assert result[2:] == [None, 1.5]


def test_decimals_are_rounded_half_up_and_checked() -> None:
    batch = pa.record_batch({"p": pa.array([Decimal("9.95"), Decimal("-0.05")])})
    price = Column("p", pa.decimal128(3, 2))
    rounded = call("round_decimal", price, type=pa.decimal128(3, 1))
    assert evaluate(rounded, batch).to_pylist() == [Decimal("10.0"), Decimal("-0.1")]
    with pytest.raises(DataError, match="cannot be computed"):
        evaluate(call("round_decimal", price, type=pa.decimal128(2, 1)), batch)


def test_a_filter_drops_false_and_null() -> None:
    positive = call("less", constant(0), X, type=BOOL)
    assert filter_batch(positive, BATCH).column("x").to_pylist() == [1, 4]


def test_a_filter_that_keeps_everything_copies_nothing() -> None:
    assert filter_batch(constant(True, BOOL), BATCH) is BATCH


def test_a_projection_makes_the_columns_of_its_schema_also_when_names_repeat() -> None:
    columns = (Named("x", X), Named("x", call("add", X, constant(1))))
    schema = pa.schema([("x", INT), ("x", INT)])
    made = project(columns, BATCH, schema)
    assert made.schema == schema
    assert made.column(1).to_pylist() == [2, 1, None, 5]


def test_a_projection_of_nothing_keeps_the_number_of_records() -> None:
    assert project((), BATCH, pa.schema([])).num_rows == 4


def test_a_row_function_sees_each_record_once_however_often_its_result_is_used() -> None:
    seen = []

    def double(number: int | None) -> int | None:
        seen.append(number)
        return None if number is None else 2 * number

    doubled = RowFunction(double, (X,), INT, "double")
    columns = (Named("a", doubled), Named("b", call("add", doubled, doubled)))
    made = project(columns, BATCH, pa.schema([("a", INT), ("b", INT)]))
    assert made.column("b").to_pylist() == [4, 0, None, 16]
    assert seen == [1, 0, None, 4]


def test_a_row_function_without_arguments_is_called_for_each_record() -> None:
    assert evaluate(RowFunction(lambda: 1, (), INT, "one"), BATCH).to_pylist() == [1] * 4


@pytest.mark.parametrize("rows", [0, 1, SLICE_ROWS, 2 * SLICE_ROWS + 1])
def test_a_row_function_is_called_for_each_record_of_a_batch_of_any_size(rows: int) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(range(rows), INT)], names=["x"])
    numbers, added = iter(range(rows)), lambda one, other: one + other

    twice = evaluate(RowFunction(added, (X, X), INT, "added"), batch)
    counted = evaluate(RowFunction(lambda: next(numbers), (), INT, "counted"), batch)

    assert twice.to_pylist() == [2 * n for n in range(rows)]
    assert counted.to_pylist() == list(range(rows))


def test_a_row_function_that_raises_is_named_with_its_error() -> None:
    def invert(number: int) -> int:
        return 1 // number

    with pytest.raises(UserCodeError, match="function invert raised ZeroDivisionError: "):
        evaluate(RowFunction(invert, (X,), INT, "invert"), BATCH)


def test_a_row_function_that_returns_another_type_than_declared_is_named() -> None:
    with pytest.raises(UserCodeError, match="function name was declared to return int64"):
        evaluate(RowFunction(lambda number: "one", (X,), INT, "name"), BATCH)


def test_case_changes_of_letters_beyond_ascii_are_whole() -> None:
    batch = pa.record_batch({"s": ["straße", None, "straße", "ΑΣ"]})
    assert evaluate(call("upper", S, type=pa.string()), batch).to_pylist() == [
        "STRASSE",
        None,
        "STRASSE",
        "ΑΣ",
    ]


def test_a_skipped_hour_is_read_with_the_offset_before_the_change() -> None:
    clock, instant = pa.timestamp("us"), pa.timestamp("us", tz="UTC")
    batch = pa.record_batch({"s": ["2024-03-10 02:30:00", "2024-11-03 01:30:00"]})
    zone = constant("America/New_York", pa.string())
    at = call("cast", call("cast", S, zone, type=clock), zone, type=instant)
    shown = call("cast", at, constant("UTC", pa.string()), type=pa.string())
    assert evaluate(shown, batch).to_pylist() == ["2024-03-10 07:30:00", "2024-11-03 05:30:00"]


def test_the_names_of_functions_are_known() -> None:
    assert {"add", "case", "cast", "matches"} <= FUNCTION_NAMES


def test_the_evaluator_does_not_bring_pyspark_with_it() -> None:
    program = "import stillframe.runtime.expressions, sys; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_a_row_function_meets_timestamps_in_the_machines_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instant = pa.timestamp("us", tz="UTC")
    batch = pa.record_batch({"at": pa.array([0, None, 1_500_000], pa.int64()).cast(instant)})
    seen = []

    def same(at: Any) -> Any:
        seen.append(at)
        return at

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        result = evaluate(RowFunction(same, (Column("at", instant),), instant, "same"), batch)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert result.equals(batch.column("at"))
    assert seen[:2] == [datetime(1970, 1, 1, 9), None]
