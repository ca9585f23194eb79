"""All aggregates in all places: running, restored, combined, in windows, in sessions, on disk.

In each they are what a model in plain Python says, with Spark's meanings.
"""

from __future__ import annotations

import datetime
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.api.windows import SessionWindow, Window
from stillframe.key_groups import hash_columns, key_group_range, key_groups_of
from stillframe.state import lists, partials
from stillframe.state.accumulators import unsupported
from stillframe.state.aggregates import AggregateTable
from stillframe.state.disk import Disk, DiskMemory
from stillframe.state.disk_pages import PagedAggregates
from stillframe.state.panes import WindowedPartials
from stillframe.state.partials import PartialAggregates, is_partial
from stillframe.state.sessions import SessionTable
from stillframe.state.windows import WindowTables
from stillframe.state.xxhash import xxhash64

MAX_PARALLELISM = 8
UTC = pa.timestamp("us", "UTC")
PLACE = pa.struct([("city", pa.string()), ("x", pa.float64())])
NUMBERS = pa.list_(pa.int32())
DECIMAL = pa.decimal128(12, 2)
SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("t", UTC),
        ("i", pa.int64()),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("m", DECIMAL),
        ("place", PLACE),
        ("numbers", NUMBERS),
        ("pair", pa.struct([("one", pa.float64()), ("two", pa.float64())])),
        ("named", pa.struct([("value", pa.string()), ("by", pa.float64())])),
        ("placed", pa.struct([("value", pa.int64()), ("by", PLACE)])),
    ]
)
Record = dict[str, Any]
Model = Callable[[list[Any]], Any]


# --- the model


def rank(value: Any) -> Any:
    """Null first, NaN last."""
    if isinstance(value, dict):
        return [rank(each) for each in value.values()]
    if isinstance(value, list):
        return [rank(each) for each in value]
    if value is None:
        return (0,)
    is_nan = isinstance(value, float) and math.isnan(value)
    return (2,) if is_nan else (1, value)


def known(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def once(values: list[Any]) -> list[Any]:
    kept: dict[Any, Any] = {}
    for value in known(values):
        kept.setdefault(str(rank(value)), value)
    return sorted(kept.values(), key=rank)


def extreme(which: Callable[..., Any]) -> Model:
    return lambda values: which(known(values), key=rank, default=None)


def by(which: Callable[..., Any]) -> Model:
    """Of several that are as high, the last."""

    def model(pairs: list[Any]) -> Any:
        counted = [pair for pair in pairs if pair["by"] is not None]
        best = which((rank(pair["by"]) for pair in counted), default=None)
        return next((p["value"] for p in reversed(counted) if rank(p["by"]) == best), None)

    return model


def bits(what: Callable[[int, int], int]) -> Model:
    def model(values: list[Any]) -> Any:
        made = None
        for value in known(values):
            made = value if made is None else what(made, value)
        return made

    return model


def powers(values: list[float], exponent: int) -> float:
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** exponent for value in values)


def skewness(values: list[Any]) -> Any:
    values = known(values)
    squares = powers(values, 2) if values else 0
    return math.sqrt(len(values)) * powers(values, 3) / squares**1.5 if squares else None


def kurtosis(values: list[Any]) -> Any:
    values = known(values)
    squares = powers(values, 2) if values else 0
    return len(values) * powers(values, 4) / squares**2 - 3 if squares else None


def of_pairs(final: Callable[[int, float, float, float, float, float], Any]) -> Model:
    def model(pairs: list[Any]) -> Any:
        both = [(p["one"], p["two"]) for p in pairs if None not in (p["one"], p["two"])]
        if not both:
            return None
        one, two = zip(*both, strict=True)
        means = statistics.fmean(one), statistics.fmean(two)
        products = math.fsum((a - means[0]) * (b - means[1]) for a, b in both)
        return final(len(both), *means, powers(one, 2), powers(two, 2), products)

    return model


def percentile(share: float) -> Model:
    def model(values: list[Any]) -> Any:
        ordered = sorted(map(float, known(values)))
        if not ordered:
            return None
        place = (len(ordered) - 1) * share
        low, high = math.floor(place), math.ceil(place)
        if low == high:
            return ordered[low]
        return (high - place) * ordered[low] + (place - low) * ordered[high]

    return model


def at_rank(share: float) -> Model:
    def model(values: list[Any]) -> Any:
        ordered = sorted(known(values), key=rank)
        return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else None

    return model


def mode(values: list[Any]) -> Any:
    often = Counter(map(str, map(rank, known(values))))
    most = max(often.values(), default=0)
    return next((v for v in once(values) if often[str(rank(v))] == most), None)


def total(values: list[Any]) -> Any:
    return sum(once(values)) if once(values) else None


def counted(values: list[Any]) -> int:
    """Few are counted by which registers are empty."""
    words = xxhash64(pa.array(once(values), pa.string()), 42) if once(values) else []
    empty = 512 - len({int(word) >> 55 for word in words})
    return math.floor(512 * math.log(512 / empty) + 0.5)


NO_TABLES = (9, 400.0, (1.0, 2.0), (0.0, 0.0))


def call(
    function: Any,
    column: str,
    type_: pa.DataType | None = None,
    *given: Any,
    distinct: bool = False,
) -> AggregateCall:
    word = "DISTINCT " if distinct else ""
    name = f"{function}({word}{column}{given or ''})"
    made = SCHEMA.field(column).type if type_ is None else type_
    return AggregateCall(function, column, name, made, given, distinct)


DOUBLE, LONG = pa.float64(), pa.int64()
CASES: list[tuple[AggregateCall, Model]] = [
    (call("first", "i", None, False, False), lambda values: values[0]),
    (call("last", "place", None, False, False), lambda values: values[-1]),
    (call("first", "s", None, True, False), lambda values: next(iter(known(values)), None)),
    (
        call("last", "numbers", None, True, False),
        lambda values: next(iter(known(values)[::-1]), None),
    ),
    (
        call("first", "placed", LONG, False, True),
        lambda v: next((p["value"] for p in v if p["by"]), None),
    ),
    *((call("min", column), extreme(min)) for column in ("place", "numbers")),
    *((call("max", column), extreme(max)) for column in ("place", "numbers")),
    (call("min_by", "named", pa.string()), by(min)),
    (call("max_by", "named", pa.string()), by(max)),
    (call("max_by", "placed", LONG), by(max)),
    (call("bit_and", "i"), bits(lambda a, b: a & b)),
    (call("bit_or", "i"), bits(lambda a, b: a | b)),
    (call("bit_xor", "i"), bits(lambda a, b: a ^ b)),
    (call("squares", "i", DOUBLE), lambda v: powers(known(v), 2) if known(v) else None),
    (call("skewness", "i", DOUBLE), skewness),
    (call("kurtosis", "i", DOUBLE), kurtosis),
    (call("covar_pop", "pair", DOUBLE), of_pairs(lambda n, a, b, aa, bb, ab: ab / n)),
    (
        call("covar_samp", "pair", DOUBLE),
        of_pairs(lambda n, a, b, aa, bb, ab: ab / (n - 1) if n > 1 else None),
    ),
    (
        call("regr_slope", "pair", DOUBLE),
        of_pairs(lambda n, a, b, aa, bb, ab: ab / bb if bb else None),
    ),
    (
        call("regr_intercept", "pair", DOUBLE),
        of_pairs(lambda n, a, b, aa, bb, ab: a - ab / bb * b if bb else None),
    ),
    (
        call("corr", "pair", DOUBLE),
        of_pairs(lambda n, a, b, aa, bb, ab: ab / math.sqrt(aa * bb) if n > 1 else None),
    ),
    (call("collect_list", "s", pa.list_(pa.string())), known),
    (call("collect_list", "place", pa.list_(PLACE)), known),
    (call("collect_set", "f", pa.list_(DOUBLE)), once),
    (call("collect_set", "numbers", pa.list_(NUMBERS)), once),
    (call("listagg", "s", None, "-", None), lambda v: "-".join(known(v)) if known(v) else None),
    (
        call("listagg", "s", None, ",", "desc", distinct=True),
        lambda v: ",".join(once(v)[::-1]) if once(v) else None,
    ),
    (call("count", "s", LONG, False, distinct=True), lambda values: len(once(values))),
    (
        call("count", "pair", LONG, True, distinct=True),
        lambda values: len(once([v for v in values if None not in v.values()])),
    ),
    (call("count", "place", LONG, False, distinct=True), lambda values: len(once(values))),
    (call("sum", "i", LONG, distinct=True), total),
    (call("sum", "m", pa.decimal128(22, 2), distinct=True), total),
    (
        call("avg", "i", DOUBLE, distinct=True),
        lambda values: statistics.fmean(once(values)) if once(values) else None,
    ),
    (call("approx_count_distinct", "s", LONG, *NO_TABLES), counted),
    (call("percentile", "i", DOUBLE, (0.5,), False, False), percentile(0.5)),
    (
        call("percentile", "m", pa.list_(DOUBLE), (0.1, 0.75), True, False),
        lambda v: [percentile(0.1)(v), percentile(0.75)(v)] if known(v) else None,
    ),
    (call("percentile_approx", "i", None, (0.3,), False, 10_000), at_rank(0.3)),
    (call("percentile_disc", "i", DOUBLE, (0.3,), False, False), at_rank(0.3)),
    (call("mode", "s", None, False), mode),
    (call("mode", "place", None, False), mode),
]
CALLS = [each for each, _ in CASES]
UNORDERED = [each.function == "collect_set" for each in CALLS]


def modelled(records: list[Record]) -> list[Any]:
    return [model([record[each.input] for record in records]) for each, model in CASES]


def comparable(values: list[Any]) -> list[Any]:
    made = []
    for value, is_unordered in zip(values, UNORDERED, strict=True):
        ordered = sorted(value, key=rank) if is_unordered else value
        made.append(f"{ordered:.9g}" if isinstance(ordered, float) else str(ordered))
    return made


# --- records


def drawn(seed: int, count: int, keys: str = "abcde") -> list[Record]:
    draw = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if draw.random() < 0.15 else value

    def place() -> Record:
        return {"city": maybe(draw.choice("xyz")), "x": maybe(draw.choice([1.5, math.nan, -2.0]))}

    def pair() -> Record:
        return {"one": maybe(float(draw.randint(0, 9))), "two": maybe(float(draw.randint(0, 9)))}

    return [
        {
            "k": draw.choice(keys),
            "i": maybe(draw.randint(-20, 20)),
            "f": maybe(draw.choice([0.0, 1.25, math.nan, math.inf])),
            "s": maybe(draw.choice(["", "b", "a longer text than a stripe of the hash has", "é"])),
            "m": maybe(Decimal(draw.randint(-300, 300)).scaleb(-2)),
            "place": maybe(place()),
            "numbers": maybe([maybe(n) for n in range(draw.randint(0, 3))]),
            "pair": pair(),
            "named": {"value": maybe(draw.choice("pqr")), "by": maybe(float(draw.randint(0, 5)))},
            "placed": {"value": maybe(draw.randint(0, 9)), "by": maybe(place())},
        }
        for _ in range(count)
    ]


def batches_of(seed: int, count: int = 8, rows: int = 30) -> list[list[Record]]:
    """With event times that ascend, so that the order of windows is that of records."""
    records = drawn(seed, count * rows)
    for number, record in enumerate(records):
        record["t"] = datetime.datetime.fromtimestamp(number, datetime.UTC)
    return [records[start : start + rows] for start in range(0, len(records), rows)]


def batch_of(records: list[Record]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(records, schema=SCHEMA)


def by_key(records: list[Record]) -> dict[Any, list[str]]:
    grouped: dict[Any, list[Record]] = {}
    for record in records:
        grouped.setdefault(record["k"], []).append(record)
    return {key: comparable(modelled(some)) for key, some in grouped.items()}


def rows_in(batch: pa.RecordBatch, keys: int = 1) -> dict[Any, list[str]]:
    rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
    return {row[keys - 1]: comparable(list(row[keys:])) for row in rows}


def table() -> AggregateTable:
    return AggregateTable(SCHEMA, ["k"], CALLS, MAX_PARALLELISM)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are made shorter every few records, and small batches are combined."""
    monkeypatch.setattr(lists, "_SHORTENED_FROM", 50)
    monkeypatch.setattr(partials, "_RECORDS_MIN", 2)


# --- places


def test_running_aggregates_are_the_models_and_a_frozen_view_stays_as_it_was() -> None:
    running, seen, views = table(), list[Record](), []
    for records in batches_of(1):
        seen += records
        touched = {record["k"] for record in records}
        expected = {key: values for key, values in by_key(seen).items() if key in touched}
        assert rows_in(running.update(batch_of(records))) == expected
        views.append((running.freeze(), by_key(seen)))
    for frozen, expected in views:
        restored = table()
        for _, rows in frozen.batches_by_key_group():
            restored.restore(rows)
        assert rows_in(restored.results()) == expected


def test_aggregates_that_are_rescaled_go_on_as_if_nothing_had_happened() -> None:
    before, after = drawn(2, 90), drawn(3, 90)
    running = table()
    running.update(batch_of(before))
    groups = dict(running.freeze().batches_by_key_group())
    found: dict[Any, list[str]] = {}
    for subtask in range(3):
        owned = key_group_range(subtask, 3, MAX_PARALLELISM)
        restored = table()
        for group in owned:
            if group in groups:
                restored.restore(groups[group])
        rows = batch_of(after)
        mine = np.isin(key_groups_of(hash_columns([rows.column("k")]), MAX_PARALLELISM), owned)
        restored.update(rows.filter(pa.array(mine)))
        found |= rows_in(restored.results())
    assert found == by_key(before + after)


def test_what_is_combined_before_it_is_sent_makes_the_same() -> None:
    combining, running, seen = PartialAggregates(SCHEMA, ["k"], CALLS), table(), list[Record]()
    for records in batches_of(4):
        combined = combining.combine(batch_of(records))
        assert is_partial(combined)
        running.merge(combined)
        seen += records
    assert rows_in(running.results()) == by_key(seen)


SECOND = 1_000_000


@pytest.mark.parametrize("slide", [60, 20])
@pytest.mark.parametrize("emits_closed", [True, False])
@pytest.mark.parametrize("combines", [True, False])
def test_windows_have_the_aggregates_of_their_records(
    slide: int, emits_closed: bool, combines: bool
) -> None:
    window = Window("t", 60 * SECOND, slide * SECOND)
    tables = WindowTables(SCHEMA, ["k"], CALLS, window, MAX_PARALLELISM, emits_closed=emits_closed)
    combining = WindowedPartials(SCHEMA, ["k"], CALLS, window)
    seen, outputs = list[Record](), []
    for records in batches_of(5):
        rows = batch_of(records)
        outputs += tables.add(combining.combine(rows) if combines else rows, None).outputs
        seen += records
    if emits_closed:
        frozen = dict(tables.freeze().batches_by_key_group())
        tables = WindowTables(SCHEMA, ["k"], CALLS, window, MAX_PARALLELISM, emits_closed=True)
        for rows in frozen.values():
            tables.restore(rows)
        outputs = list(tables.close(10**12))
    found = {}
    for output in outputs:
        starts = [each["start"].timestamp() for each in output.column(0).to_pylist()]
        rows = zip(starts, *(column.to_pylist() for column in output.columns[1:]), strict=True)
        found |= {row[:2]: comparable(list(row[2:])) for row in rows}
    expected = {}
    for start in range(-60, len(seen), slide):
        inside = [r for r in seen if start <= r["t"].timestamp() < start + 60]
        expected |= {(start, key): values for key, values in by_key(inside).items()}
    assert found == expected


def test_sessions_that_grow_together_have_the_aggregates_of_their_records() -> None:
    """But for those by the order of records: nobody knows which of two sessions was earlier."""
    sessions = SessionTable(SCHEMA, ["k"], CALLS, SessionWindow("t", 5 * SECOND), MAX_PARALLELISM)
    [records] = batches_of(6, 1, 120)
    for record in records:
        record["k"] = "a"
    early, late, between = records[:40:3], records[60:90:3], records[40:60:3]
    for some in (early, late):
        sessions.add(batch_of(some), None)
    rows = dict(sessions.freeze().batches_by_key_group())
    sessions = SessionTable(SCHEMA, ["k"], CALLS, SessionWindow("t", 5 * SECOND), MAX_PARALLELISM)
    for batch in rows.values():
        sessions.restore(batch)
    sessions.add(batch_of(between), None)
    [output] = sessions.close(10**12)
    found = rows_in(output, 2)["a"]
    expected = comparable(modelled(early + late + between))
    by_order = ("first", "last", "collect_list", "listagg", "min_by", "max_by")
    same = [each.function not in by_order or each.is_distinct for each in CALLS]
    assert [f for f, s in zip(found, same, strict=True) if s] == [
        e for e, s in zip(expected, same, strict=True) if s
    ]


@pytest.mark.parametrize("front_bytes_max", [0, 1 << 40])
def test_aggregates_on_disk_are_those_on_the_heap(tmp_path: Path, front_bytes_max: int) -> None:
    memory, seen = DiskMemory(16 << 20), list[Record]()
    what = (SCHEMA, ["k"], CALLS, MAX_PARALLELISM)
    paged = PagedAggregates(
        *what, Disk.open(tmp_path / "a", memory), range(MAX_PARALLELISM), front_bytes_max
    )
    for number, records in enumerate(batches_of(7)):
        paged.update(batch_of(records))
        seen += records
        if number == 4:
            paged.freeze().link(tmp_path / "b")
            paged.close()
            paged = PagedAggregates(
                *what, Disk.open(tmp_path / "b", memory), range(MAX_PARALLELISM), front_bytes_max
            )
    found: dict[Any, list[str]] = {}
    for batch in paged.results():
        found |= rows_in(batch)
    paged.close()
    assert found == by_key(seen)


# --- single meanings


def test_lists_are_appended_to_and_what_was_there_is_not_looked_at() -> None:
    """Ten times as much is appended in about ten times the parts, in the order it came."""
    calls = [call("collect_list", "i", pa.list_(LONG))]
    running = AggregateTable(SCHEMA.empty_table().select(["k", "i"]).schema, ["k"], calls, 8)
    for number in range(200):
        running.take_in(pa.record_batch({"k": ["a", "b"], "i": [number, -number]}), partial=False)
    [held] = running.parts()
    depth, each = 0, held[0]
    while each:
        depth, each = depth + 1, each[0]
    assert depth == 200
    assert rows_in_lists(running) == {"a": list(range(200)), "b": [-n for n in range(200)]}


def rows_in_lists(running: AggregateTable) -> dict[str, list[int]]:
    keys, found = (column.to_pylist() for column in running.results().columns)
    return dict(zip(keys, found, strict=True))


def test_a_set_takes_no_more_memory_than_its_values() -> None:
    calls = [call("count", "i", LONG, False, distinct=True)]
    running = AggregateTable(pa.schema([("k", pa.string()), ("i", LONG)]), ["k"], calls, 8)
    sizes = []
    for _ in range(100):
        running.take_in(pa.record_batch({"k": ["a"] * 40, "i": range(40)}), partial=False)
        sizes.append(running.state_bytes)
    assert max(sizes[10:]) <= max(sizes[:10]) + 1_000
    assert running.results().column(1).to_pylist() == [40]


def test_numbers_that_are_all_the_same_have_no_skewness_however_they_are_rounded() -> None:
    calls = [call(function, "f", DOUBLE) for function in ("skewness", "kurtosis", "squares")]
    running = AggregateTable(pa.schema([("k", pa.string()), ("f", DOUBLE)]), ["k"], calls, 8)
    for _ in range(3):
        made = running.update(pa.record_batch({"k": ["a"] * 7, "f": [0.1] * 7}))
    assert [column.to_pylist() for column in made.columns[1:]] == [[None], [None], [0.0]]


def test_hashes_are_those_of_xxh64() -> None:
    texts = ["", "a", "abc", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
    known_hashes = [0xEF46DB3751D8E999, 0xD24EC4F1A98C6E5B, 0x44BC2CF5AD770999, 0xFD5E2CE9520872DD]
    hashes = xxhash64(pa.array(["left out", *texts]).slice(1), 0)
    assert hashes.tolist() == known_hashes


def test_what_a_kind_of_aggregate_does_not_read_is_said() -> None:
    made = pa.map_(pa.string(), LONG)
    assert unsupported(AggregateCall("first", "v", "first(v)", made, (True, False)), made) is None
    for function in ("collect_set", "mode", "bit_and", "percentile", "approx_count_distinct"):
        said = unsupported(AggregateCall(function, "v", "x", made), made)
        assert said == f"{function} of type map<string, int64> is not supported"
    counted_once = AggregateCall("count", "v", "x", LONG, (), True)
    assert "not told apart" in str(unsupported(counted_once, made))
