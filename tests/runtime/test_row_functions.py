"""The user's functions, called as the slots call them."""

from __future__ import annotations

import copy
import datetime
import decimal
import math
import pickle
from collections import namedtuple
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stillframe.errors import DataError, UserCodeError
from stillframe.runtime.row_functions import (
    ArrowFunction,
    PandasFunction,
    RowFlatMap,
    RowMap,
    batch_of,
    fitted,
    python_values,
)

CLICKS = pa.record_batch({"app_id": ["chess", "go", "chess"], "n": [1, 2, 3]})
NAMED = pa.schema([("name", pa.string()), ("twice", pa.int64())])


def rows(function: Any, batch: pa.RecordBatch = CLICKS) -> list[tuple[Any, ...]]:
    table = pa.Table.from_batches(list(function(iter([batch]))), function.schema)
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


NOT_UTF8 = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())


def bad_batch(batches: Any) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        yield pa.record_batch({"name": NOT_UTF8, "twice": pa.array([1])})


def bad_frame(frames: Any) -> Iterator[pd.DataFrame]:
    for _ in frames:
        yield pd.DataFrame({"name": ["half a pair: \ud83d"], "twice": [1]})


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            ArrowFunction(bad_batch, NAMED),
            r"function bad_batch gave back .* not UTF-8, b'caf\\xe9'",
        ),
        (PandasFunction(bad_frame, NAMED, "UTC"), "bad_frame gave back values for column name"),
        (RowMap(lambda row: ("\ud83d", 1), NAMED), "gave back values for column name that are no"),
        (RowMap(lambda row: (b"\xe9", 1), NAMED), "gave back values for column name that are no"),
        (RowFlatMap(lambda row: [("\ud83d", 1)], NAMED), "gave back values for column name"),
    ],
    ids=["arrow", "pandas", "rows", "rows of bytes", "flat rows"],
)
def test_text_that_is_not_utf8_does_not_get_past_the_function_that_made_it(
    function: Any, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        rows(function)


class Made(NamedTuple):
    twice: int
    name: str


def double(row: Any) -> tuple[str, int]:
    return row.app_id, row["n"] * 2


def test_a_row_has_its_fields_by_name_by_key_and_by_place() -> None:
    function = RowMap(lambda row: (row.app_id, row["n"] + row[1]), NAMED)
    assert rows(function) == [("chess", 2), ("go", 4), ("chess", 6)]


def test_a_column_that_is_called_count_is_found_by_its_name() -> None:
    batch = pa.record_batch({"count": [7], "two words": ["x"]})
    function = RowMap(lambda row: (row["two words"], row.count), NAMED)
    assert rows(function, batch) == [("x", 7)]


def test_an_unknown_field_is_named_beside_those_there_are() -> None:
    with pytest.raises(UserCodeError, match="no field 'app' in this row: it has app_id, n"):
        rows(RowMap(lambda row: (row["app"], 1), NAMED))


def test_a_row_tells_what_it_holds() -> None:
    seen: list[str] = []
    function = RowMap(lambda row: seen.append(repr(row)), NAMED)
    assert rows(function) == []
    assert seen[0] == "Row(app_id='chess', n=1)"


def test_none_drops_the_row() -> None:
    function = RowMap(lambda row: None if row.n == 2 else double(row), NAMED)
    assert rows(function) == [("chess", 2), ("chess", 6)]


def test_a_dict_a_named_tuple_and_a_row_are_taken_by_name() -> None:
    backwards = namedtuple("Backwards", ["twice", "name"])
    for made in (lambda row: {"twice": 5, "name": "x"}, lambda row: backwards(5, "x")):
        assert rows(RowMap(made, NAMED)) == [("x", 5)] * 3
    assert rows(RowMap(lambda row: row, CLICKS.schema)) == [("chess", 1), ("go", 2), ("chess", 3)]


def test_a_flat_map_gives_any_number_of_rows() -> None:
    def repeat(row: Any) -> Iterator[tuple[str, int]]:
        for _ in range(row.n - 1):
            yield row.app_id, row.n

    assert rows(RowFlatMap(repeat, NAMED)) == [("go", 2), ("chess", 3), ("chess", 3)]


def test_a_flat_map_that_gives_no_iterable_of_rows_is_told_so() -> None:
    def single(row: Any) -> dict[str, Any]:
        return {"name": "x", "twice": 1}

    with pytest.raises(DataError, match=r"function single gave back .* wants an iterable"):
        rows(RowFlatMap(single, NAMED))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (("x",), r"declared name string, twice int64 but gave back 1 values"),
        (5, r"gave back 5, which is no tuple, dict or Row"),
        ({"name": "x"}, r"gave back fields name"),
        ({"name": "x", "twice": 1, "more": 2}, r"gave back fields name, twice, more"),
        (("x", "y"), r"column twice that are no int64"),
        ((1, 1), r"column name that are no string"),
    ],
)
def test_a_result_that_does_not_fit_names_the_function_and_both_schemas(
    made: Any, message: str
) -> None:
    def wrong(row: Any) -> Any:
        return made

    with pytest.raises(DataError, match=message) as raised:
        rows(RowMap(wrong, NAMED))
    assert "function wrong" in str(raised.value)


def test_null_in_a_column_that_is_never_null_is_refused() -> None:
    schema = pa.schema([pa.field("name", pa.string(), nullable=False)])
    with pytest.raises(DataError, match="null for column name, which is declared as never null"):
        rows(RowMap(lambda row: (None,), schema))


def test_a_long_batch_is_emitted_in_large_parts_and_keeps_its_order() -> None:
    batch = pa.record_batch({"app_id": ["x"] * 100_000, "n": list(range(100_000))})
    made = list(RowMap(double, NAMED)(iter([batch])))
    assert [each.num_rows for each in made] == [32_768, 32_768, 32_768, 1_696]
    assert [n for each in made for n in each["twice"].to_pylist()] == list(range(0, 200_000, 2))


def test_rows_that_are_large_are_not_gathered_without_end() -> None:
    batch = pa.record_batch({"n": range(20_000)})
    made = list(RowMap(lambda row: ("x" * 5_000, row.n), NAMED)(iter([batch])))
    assert [each.num_rows for each in made] == [4_096] * 4 + [20_000 - 4 * 4_096]


@pytest.mark.parametrize(
    "made",
    [
        lambda row: (row.app_id, row.n),
        lambda row: [row.app_id, row.n],
        lambda row: {"twice": row.n, "name": row.app_id},
        lambda row: namedtuple("Made", ["twice", "name"])(row.n, row.app_id),
        lambda row: Made(row.n, row.app_id),
        lambda row: (row.app_id, row.n) if row.n < 3 else Made(row.n, row.app_id),
    ],
)
def test_records_of_one_kind_and_of_several_become_the_same_columns(made: Any) -> None:
    assert rows(RowMap(made, NAMED)) == [("chess", 1), ("go", 2), ("chess", 3)]


def test_a_row_may_be_given_back_with_something_replaced_and_copied() -> None:
    schema = pa.schema([("n", pa.int64()), ("app_id", pa.string())])

    def replaced(row: Any) -> Any:
        assert copy.deepcopy(row) == row == copy.copy(row)
        assert type(copy.copy(row)) is type(row)
        return row._replace(n=row.n * 10)

    assert rows(RowMap(replaced, schema)) == [(10, "chess"), (20, "go"), (30, "chess")]


def test_a_row_function_travels_by_pickle() -> None:
    travelled = pickle.loads(pickle.dumps(RowMap(double, NAMED)))
    assert rows(travelled) == [("chess", 2), ("go", 4), ("chess", 6)]


def test_an_arrow_function_may_yield_another_type_of_the_same_meaning() -> None:
    def small(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            names = batch["app_id"].cast(pa.large_string()).dictionary_encode()
            yield pa.record_batch({"name": names, "twice": batch["n"].cast(pa.int16())})

    assert rows(ArrowFunction(small, NAMED)) == [("chess", 1), ("go", 2), ("chess", 3)]


def test_an_arrow_function_is_given_instants_in_the_zone_of_the_session() -> None:
    moment = pa.array([0], pa.timestamp("us", "UTC"))
    schema = pa.schema([("at", moment.type), ("hour", pa.int64())])

    def hours(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch({"at": batch["at"], "hour": pc.hour(batch["at"])})

    function = ArrowFunction(hours, schema, "Asia/Kathmandu")
    assert rows(function, pa.record_batch({"at": moment})) == [(moment[0].as_py(), 5)]


def test_an_arrow_function_that_yields_text_for_a_number_is_refused() -> None:
    def text(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch({"name": batch["app_id"], "twice": batch["app_id"]})

    message = "function text declared name string, twice int64 but gave back .* twice string"
    with pytest.raises(DataError, match=message):
        rows(ArrowFunction(text, NAMED))


def test_an_arrow_function_that_yields_a_table_is_refused() -> None:
    def table(batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        yield pa.Table.from_batches(batches)

    with pytest.raises(DataError, match="yielded a Table: mapInArrow wants"):
        rows(ArrowFunction(table, NAMED))


@pytest.mark.slow
def test_more_text_than_a_batch_holds_is_refused_in_one_sentence() -> None:
    text = "x" * 500_000_000
    function = RowFlatMap(lambda row: [(text, 1)] * 5, NAMED)

    with pytest.raises(DataError, match=r"5 values for column name .* more than the 2 GB that a"):
        list(function(iter([CLICKS.slice(0, 1)])))


def test_pandas_columns_are_matched_by_name() -> None:
    def swap(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            yield pd.DataFrame({"twice": frame.n * 2, "name": frame.app_id})

    assert rows(PandasFunction(swap, NAMED, "UTC")) == [("chess", 2), ("go", 4), ("chess", 6)]


def test_pandas_columns_without_names_are_matched_by_place_and_a_frame_of_nothing_is_no_rows() -> (
    None
):
    def unnamed(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            yield pd.DataFrame()
            yield pd.DataFrame(list(zip(frame.app_id, frame.n * 2, strict=True)))

    assert rows(PandasFunction(unnamed, NAMED, "UTC")) == [("chess", 2), ("go", 4), ("chess", 6)]

    def too_many(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame([(1, 2, 3)])

    with pytest.raises(DataError, match="gave back columns 0, 1, 2"):
        rows(PandasFunction(too_many, NAMED, "UTC"))


def test_pandas_sees_timestamps_in_the_sessions_time_zone_and_without_one() -> None:
    at = pa.field("at", pa.timestamp("us", tz="UTC"))
    noon = datetime.datetime(2026, 7, 1, 12, tzinfo=datetime.UTC)
    batch = pa.record_batch([pa.array([noon, None], at.type)], schema=pa.schema([at]))
    seen: list[Any] = []

    def watch(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            seen.extend(frame["at"])
            yield frame

    function = PandasFunction(watch, batch.schema, "Asia/Shanghai")
    assert rows(function, batch) == [(noon,), (None,)]
    assert seen[0] == pd.Timestamp(2026, 7, 1, 20)


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.timestamp("us")], ids=str)
@pytest.mark.parametrize(("year", "unit"), [(2024, "ns"), (2500, "us")])
def test_pandas_sees_nanoseconds_as_in_pyspark_but_in_years_that_have_none(
    kind: pa.DataType, year: int, unit: str
) -> None:
    """A program that divides them as whole numbers by 10**9 must not be off by a thousand."""
    batch = pa.record_batch({"at": pa.array([datetime.datetime(year, 7, 1), None], kind)})
    frames: list[pd.DataFrame] = []

    def noted(given: Any) -> Any:
        for frame in given:
            frames.append(frame)
            yield frame

    [made] = PandasFunction(noted, batch.schema, "Asia/Tokyo")(iter((batch,)))
    assert frames[0]["at"].dtype == f"datetime64[{unit}]"
    assert made.equals(batch)


def test_a_pandas_frame_with_other_columns_is_refused() -> None:
    def other(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        yield from frames

    with pytest.raises(DataError, match=r"function other declared .* gave back columns app_id, n"):
        rows(PandasFunction(other, NAMED, "UTC"))


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, -1, 2**63 - 1]),
        pa.array([1.5, float("inf")]),
        pa.array([1, None]),
        pa.array([-62_135_596_800_000_000, -1, 253_402_300_799_999_999], pa.timestamp("us", "UTC")),
        pa.array([5, None], pa.timestamp("us", "UTC")),
        pa.array([5], pa.timestamp("us")),
        pa.array([5_000_000], pa.timestamp("us", "Europe/Vienna")),
        pa.array([1, 2, 3], pa.timestamp("us", "UTC")).slice(1),
        pa.array(["a", "b"]),
    ],
    ids=lambda column: f"{column.type}, {len(column)}",
)
def test_values_are_those_that_arrow_gives_down_to_the_zone(column):
    values = python_values(column)

    assert repr(values) == repr(column.to_pylist())


def test_an_instant_that_python_cannot_say_is_refused_as_arrow_does():
    with pytest.raises(OverflowError):
        python_values(pa.array([253_402_300_800_000_000], pa.timestamp("us", "UTC")))


# --- values that do not fit exactly

D = decimal.Decimal
MOMENT = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
UNFIT: list[tuple[pa.DataType, Any, str]] = [
    *((kind, 1.5, "1.5 is a float") for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    (pa.int64(), 1.0, "1.0 is a float"),
    (pa.int64(), True, "bool"),
    (pa.int64(), np.True_, "bool"),
    (pa.int64(), math.nan, "nan"),
    (pa.int64(), np.float64(2), "float64"),
    (pa.int64(), D("1.5"), r"Decimal\('1.5'\) is a Decimal"),
    (pa.int64(), D("1"), "is a Decimal"),
    (pa.int64(), "1", "'1'"),
    (pa.int64(), np.timedelta64(1, "ns"), "is a timedelta64"),
    (pa.int64(), 2**70, "too (large|big)"),
    (pa.int32(), 2**40, "too large"),
    (pa.float64(), True, "True is a bool"),
    (pa.float64(), 2**60 + 1, "outside of the range exactly representable"),
    (pa.float64(), D("1.5"), "Decimal"),
    (pa.float32(), 1e300, r"1e\+300 is too large"),
    (pa.decimal128(10, 2), D("1.005"), "data loss"),
    (pa.decimal128(10, 2), 1.5, "float"),
    (pa.bool_(), 1, "1 with type int"),
    (pa.string(), 1, "int"),
    (pa.date32(), MOMENT, "is a datetime"),
    (pa.date32(), 5, "5 is a int"),
    (pa.timestamp("us", "UTC"), 5, "5 is a int"),
    (pa.timestamp("us", "UTC"), 1.5, "1.5 is a float"),
    (pa.timestamp("us", "UTC"), pd.Timestamp(5, tz="UTC"), "5 nanoseconds|000000005"),
    (pa.duration("us"), 5, "5 is a int"),
    (pa.list_(pa.int64()), [1, 1.5], "1.5 is a float"),
    (pa.list_(pa.list_(pa.int64())), [[1], None, [True]], "bool"),
    (pa.struct([("n", pa.int64())]), {"n": 1.5}, "1.5 is a float"),
    (pa.struct([("n", pa.int64())]), (D("1.5"),), "is a Decimal"),
    (pa.map_(pa.string(), pa.int64()), {"a": 1.5}, "1.5 is a float"),
    (pa.map_(pa.int64(), pa.string()), [(1.5, "a")], "1.5 is a float"),
]


@pytest.mark.parametrize(("kind", "value", "says"), UNFIT, ids=str)
@pytest.mark.parametrize("others", [0, 3], ids=["alone", "among others"])
def test_a_value_that_does_not_fit_its_type_exactly_is_refused(
    kind: pa.DataType, value: Any, says: str, others: int
) -> None:
    schema = pa.schema([("x", kind)])
    made = [(None,)] * others + [(value,)]

    with pytest.raises(DataError, match=f"function f gave back values for column x .*({says})"):
        batch_of(made, schema, "f")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [1, None, np.int32(2), np.int64(3)]),
        (pa.int64(), []),
        (pa.int8(), [1, 2, -128]),
        (pa.int64(), [2**63 - 1, -(2**63)]),
        (pa.float64(), [1, 1.5, None, np.float32(0.5), np.int64(2), math.inf, -math.inf]),
        (pa.float32(), [0.1, math.inf, 1]),
        (pa.date32(), [MOMENT.date(), None]),
        (pa.timestamp("us", "UTC"), [MOMENT, None, pd.Timestamp(MOMENT)]),
        (pa.duration("us"), [datetime.timedelta(1)]),
        (pa.decimal128(10, 2), [D("1.50"), 1, None]),
        (pa.list_(pa.int64()), [[1, None], None, (2,), np.array([3])]),
        (pa.struct([("n", pa.int64())]), [{"n": 1}, None, {}]),
        (pa.map_(pa.string(), pa.int64()), [{"a": 1}, [("b", 2)], None]),
    ],
    ids=str,
)
def test_values_that_fit_are_those_they_were(kind: pa.DataType, values: list[Any]) -> None:
    schema = pa.schema([("x", kind)])

    made = batch_of([(value,) for value in values], schema, "f")

    assert made.column(0).equals(pa.array(values, kind))


@pytest.mark.parametrize(
    "values",
    [[1.5, 2.0], [True, False], pd.Series([1, 1.5], dtype=object), pd.Series([D("1.5")])],
    ids=["floats", "booleans", "objects", "decimals"],
)
def test_a_frame_with_values_that_do_not_fit_exactly_is_refused(values: Any) -> None:
    schema = pa.schema([("x", pa.int64())])
    frame = pd.DataFrame({"x": values})
    function = PandasFunction(lambda frames: (frame for _ in frames), schema, "UTC")

    with pytest.raises(DataError, match="gave back values for column x that are no int64"):
        list(function(iter((CLICKS,))))


NOON = pd.Timestamp("2024-02-29 12:00")


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        (pa.date32(), [NOON], "2024-02-29 12:00:00 has a time of day"),
        (pa.timestamp("us"), [2], "2 is a int64"),
        (pa.timestamp("us", "UTC"), [2], "2 is a int64"),
        (pa.duration("us"), [2], "2 is a int64"),
        (pa.int64(), [NOON], r"2024-02-29 12:00:00 is a datetime64\[.s\]"),
        (pa.int64(), [pd.Timedelta("1s")], r"0 days 00:00:01 is a timedelta64\[.s\]"),
        (pa.bool_(), [2], "2 is a int64"),
        (pa.bool_(), [1.5], "1.5 is a float64"),
        (pa.float32(), [1e300], r"1e\+300 is too large"),
        (pa.int64(), [2.0**60, None], "1152921504606846976.0 .* beyond 2[*][*]53"),
        (pa.int64(), [np.timedelta64(1, "ns"), None], "is a timedelta64"),
    ],
    ids=str,
)
def test_a_frame_with_columns_that_do_not_fit_exactly_is_refused(
    kind: pa.DataType, values: Any, says: str
) -> None:
    is_object = any(isinstance(value, np.timedelta64) for value in values)
    frame = pd.DataFrame({"x": pd.Series(values, dtype=object if is_object else None)})
    function = PandasFunction(lambda frames: [frame], pa.schema([("x", kind)]), "UTC")

    with pytest.raises(DataError, match=f"gave back values for column x .*({says})"):
        list(function(iter((CLICKS,))))


def test_days_that_pandas_holds_as_times_fit_a_date() -> None:
    frame = pd.DataFrame({"x": [NOON.normalize(), None]})
    function = PandasFunction(lambda frames: [frame], pa.schema([("x", pa.date32())]), "UTC")

    [made] = function(iter((CLICKS,)))
    assert made.column(0).to_pylist() == [datetime.date(2024, 2, 29), None]


def test_whole_numbers_that_pandas_holds_as_floats_because_some_are_missing_fit() -> None:
    schema = pa.schema([("x", pa.int64())])
    frame = pd.DataFrame({"x": [1, None, 3]})
    function = PandasFunction(lambda frames: (frame for _ in frames), schema, "UTC")

    [made] = function(iter((CLICKS,)))
    assert made.column(0).to_pylist() == [1, None, 3]


@pytest.mark.parametrize(
    "column",
    [pa.array([[1.0]]), pa.array([[True]]), pa.array([{"n": 1.0}]), pa.array([{"m": 1}])],
    ids=str,
)
def test_a_batch_with_other_nested_types_is_refused(column: pa.Array) -> None:
    is_list = pa.types.is_list(column.type)
    declared = pa.list_(pa.int64()) if is_list else pa.struct([("n", pa.int64())])
    made = pa.RecordBatch.from_arrays([column], ["x"])

    with pytest.raises(DataError, match="make the two agree"):
        fitted(made, pa.schema([("x", declared)]), "f")
