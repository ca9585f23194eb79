"""State handles on the heap: what is written is read, expires, is snapshotted and comes back."""

import datetime
import decimal
import math
import time
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from stillframe.errors import BuildError, StartRefused, UserCodeError
from stillframe.state.backends import EXPIRES, USER_KEY, VALUE, Declared, Kind
from stillframe.state.handles import (
    AggregatingHandle,
    ListHandle,
    MapHandle,
    ReducingHandle,
    Scene,
    ValueHandle,
)
from stillframe.state.heap import HeapBackend
from stillframe.state.key_timers import KeyTimers
from stillframe.state.rows import RowType

APP = pa.schema([("app", pa.string())])
COUNT = pa.schema([("n", pa.int64())])


def value_of(schema, ttl_ms=None, key_schema=APP):
    backend = HeapBackend(key_schema, 16)
    scene = Scene()
    table = backend.values(Declared("v", Kind.VALUE, RowType(schema), expires=ttl_ms is not None))
    _, names = backend.keys_of([pa.array(["a"])])
    scene.enter(names[0])
    return ValueHandle(scene, table, ttl_ms), scene, backend


NESTED = pa.schema(
    [
        ("b", pa.bool_()),
        ("i", pa.int32()),
        ("f", pa.float32()),
        ("d", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("day", pa.date32()),
        ("bytes", pa.binary()),
        ("took", pa.duration("us")),
        ("visits", pa.list_(pa.struct([("page", pa.int32()), ("tags", pa.list_(pa.string()))]))),
        ("by", pa.map_(pa.string(), pa.struct([("xs", pa.list_(pa.float64()))]))),
    ]
)
NOON = datetime.datetime(2024, 5, 1, 12)
FULL = (
    True,
    7,
    0.5,
    decimal.Decimal("1.50"),
    NOON,
    NOON,
    datetime.date(2024, 5, 1),
    b"\x00\xff",
    datetime.timedelta(seconds=1, microseconds=1),
    [(1, ["x", None]), None, (2, [])],
    {"a": ([1.5, None],), "b": None},
)
EMPTY = (None,) * len(NESTED)


@pytest.mark.parametrize("row", [FULL, EMPTY])
def test_values_of_all_types_come_back_as_they_were_also_from_a_snapshot(row):
    handle, _, backend = value_of(NESTED)
    handle.update(row)
    assert handle.get() == row
    (table,) = backend.tables
    batches = [batch for _, batch in table.freeze(0).batches_by_key_group()]
    assert [batch.schema.names for batch in batches] == [["app", VALUE]]
    again, _, backend = value_of(NESTED)
    backend.tables[0].restore(batches[0])
    assert again.get() == row


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (pa.field("n", pa.int32()), 2**31, "is not between"),
        (pa.field("n", pa.int64()), "7", "no whole number"),
        (pa.field("n", pa.int64()), True, "no whole number"),
        (pa.field("n", pa.int64()), 1.5, "no whole number"),
        (pa.field("n", pa.int64()), 1.0, "no whole number"),
        (pa.field("n", pa.int64()), float("nan"), "no whole number"),
        (pa.field("n", pa.int64()), decimal.Decimal("1.5"), "no whole number"),
        (pa.field("n", pa.int64()), np.timedelta64(1, "ns"), "no whole number"),
        (pa.field("n", pa.float64()), np.timedelta64(1, "ns"), "no number"),
        (pa.field("n", pa.float64()), True, "no number"),
        (pa.field("n", pa.float64()), 2**60 + 1, "cannot be a double"),
        (pa.field("n", pa.float64()), 2**2000, "cannot be a double"),
        (pa.field("n", pa.float32()), 1e300, "too large"),
        (pa.field("n", pa.decimal128(4, 2)), decimal.Decimal("1.005"), "more digits"),
        (pa.field("n", pa.decimal128(4, 2)), decimal.Decimal("NaN"), "more digits"),
        (pa.field("n", pa.timestamp("us", "UTC")), pd.Timestamp(5, tz="UTC"), "nanoseconds"),
        (pa.field("n", pa.duration("us")), pd.Timedelta(5), "nanoseconds"),
        (pa.field("n", pa.float64()), "x", "no number"),
        (pa.field("n", pa.string()), 7, "no text"),
        (pa.field("n", pa.bool_()), 1, "no boolean"),
        (pa.field("n", pa.decimal128(4, 2)), decimal.Decimal("123.4"), "more digits"),
        (pa.field("n", pa.date32()), NOON, "no date"),
        (pa.field("n", pa.timestamp("us", "UTC")), 5, "no datetime"),
        (pa.field("n", pa.list_(pa.int32())), 5, "no list"),
        (pa.field("n", pa.map_(pa.string(), pa.int32())), [], "no dict"),
        (pa.field("n", pa.int64(), nullable=False), None, "never null"),
        (pa.field("n", pa.list_(pa.field("e", pa.int32(), False))), [None], "never null"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_written_and_not_in_a_checkpoint(field, value, why):
    handle, _, _ = value_of(pa.schema([field]))
    with pytest.raises(UserCodeError, match=f"value state v is given .*{why}"):
        handle.update((value,))
    assert not handle.exists()


def test_a_row_has_as_many_values_as_its_schema_has_fields():
    handle, _, _ = value_of(COUNT)
    with pytest.raises(UserCodeError, match=r"is given 2 values, \(1, 2\), but its schema has 1"):
        handle.update((1, 2))
    with pytest.raises(UserCodeError, match="a int: give a tuple"):
        handle.update(1)
    handle.update([3])
    assert handle.get() == (3,)


def test_without_a_key_at_work_there_is_no_state():
    handle, scene, _ = value_of(COUNT)
    scene.leave()
    with pytest.raises(UserCodeError, match="Implicit key not found"):
        handle.get()


def test_a_value_is_not_there_from_the_moment_it_expires_and_a_write_makes_it_live_again():
    handle, scene, _ = value_of(COUNT, ttl_ms=10)
    scene.now_ms = 100
    handle.update((1,))
    scene.now_ms = 109
    assert handle.get() == (1,)
    handle.update((2,))
    scene.now_ms = 118
    assert handle.get() == (2,)
    scene.now_ms = 119
    assert handle.get() is None
    assert not handle.exists()


def test_what_has_expired_is_given_up_in_small_steps_without_anybody_asking_for_it():
    backend = HeapBackend(pa.schema([("n", pa.int64())]), 16)
    table = backend.values(Declared("v", Kind.VALUE, RowType(COUNT), expires=True))
    scene = Scene()
    handle = ValueHandle(scene, table, 10)
    numbers, names = backend.keys_of([pa.array(range(5_000))])
    for number in numbers.tolist():
        scene.enter(names[number])
        handle.update((number,))
    scene.leave()
    assert table.places.occupied == 5_000
    left = []
    for _ in range(30):
        backend.tidy(1_000)
        left.append(table.places.occupied)
    assert left[0] == 5_000 - 256
    assert left[-1] == 0
    assert not list(table.freeze(1_000).batches_by_key_group())


def test_an_element_of_a_list_and_a_user_key_of_a_map_expire_each_by_themselves():
    backend, scene = HeapBackend(APP, 16), Scene()
    expiring = partial(Declared, value=RowType(COUNT), expires=True)
    lists = ListHandle(scene, backend.lists(expiring("l", Kind.LIST)), 10)
    user_key = RowType(pa.schema([("u", pa.string())]))
    maps = MapHandle(scene, backend.maps(expiring("m", Kind.MAP, user_key=user_key)), 10)
    scene.enter(backend.keys_of([pa.array(["a"])])[1][0])
    for now_ms, user in ((0, "u"), (5, "v")):
        scene.now_ms = now_ms
        lists.append((now_ms,))
        maps.put((user,), (now_ms,))
    scene.now_ms = 12
    assert list(lists.get()) == [(5,)]
    assert dict(maps.items()) == {("v",): (5,)}
    assert not maps.contains(("u",))
    backend.tidy(12)
    lists.append((12,))
    assert list(lists.get()) == [(5,), (12,)]
    scene.now_ms = 30
    assert not lists.exists()
    assert not maps.exists()


def refreshing(ttl_ms=100):
    """Handles of all kinds for which reads count, with something in them since time 0."""
    backend, scene = HeapBackend(APP, 16), Scene()
    expiring = partial(Declared, value=RowType(COUNT), expires=True)
    value = ValueHandle(scene, backend.values(expiring("v", Kind.VALUE)), ttl_ms, refreshes=True)
    lists = ListHandle(scene, backend.lists(expiring("l", Kind.LIST)), ttl_ms, refreshes=True)
    user_key = RowType(pa.schema([("u", pa.string())]))
    table = backend.maps(expiring("m", Kind.MAP, user_key=user_key))
    maps = MapHandle(scene, table, ttl_ms, refreshes=True)
    scene.enter(backend.keys_of([pa.array(["a"])])[1][0])
    value.update((1,))
    lists.extend([(1,), (2,)])
    maps.put(("u",), (1,))
    maps.put(("v",), (2,))
    return scene, backend, (value, lists, maps)


def test_a_row_that_is_read_in_time_lives_on_and_one_that_is_only_looked_for_does_not():
    scene, _, (value, lists, maps) = refreshing()
    for now_ms in range(60, 600, 60):
        scene.now_ms = now_ms
        assert value.get() == (1,)
        assert list(lists.get()) == [(1,), (2,)]
        assert maps.get(("u",)) == (1,)
        assert maps.contains(("v",)) == (now_ms < 100)

    for now_ms in range(600, 900, 60):
        scene.now_ms = now_ms
        found = [value.exists(), lists.exists(), maps.contains(("u",))]
        assert found == [now_ms < 640] * 3
    assert value.get() is None
    assert not list(lists.get())
    assert not dict(maps.items())


def test_to_look_through_a_map_makes_all_that_is_left_of_it_live_on():
    scene, _, (_, _, maps) = refreshing()
    scene.now_ms = 50
    maps.put(("w",), (3,))
    scene.now_ms = 99
    assert len(dict(maps.items())) == 3
    scene.now_ms = 198
    assert sorted(user_key for (user_key,), _ in maps.items()) == ["u", "v", "w"]


def test_a_read_is_written_down_when_the_row_gains_more_than_a_tenth_of_its_time():
    scene, backend, (value, lists, maps) = refreshing()

    def versions_after_reads(now_ms):
        scene.now_ms = now_ms
        value.get(), list(lists.get()), maps.get(("u",)), dict(maps.items())
        return [table.version for table in backend.tables]

    first = versions_after_reads(0)
    assert versions_after_reads(10) == first
    second = versions_after_reads(11)
    assert all(now > before for now, before in zip(second, first, strict=True))
    assert versions_after_reads(21) == second


def test_what_had_no_time_to_live_is_not_given_one_by_a_read():
    scene, backend, (value, _, _) = refreshing()
    scene.settle()
    backend.tables[0].put(scene.key, (7,), None)
    scene.now_ms = 50
    assert value.get() == (7,)
    scene.now_ms = 10**9
    assert value.get() == (7,)


def test_named_rows_and_structs_are_records_and_keep_the_zone_of_instants():
    schema = pa.schema(
        [("at", pa.timestamp("us", "UTC")), ("by", pa.struct([("user", pa.string())]))]
    )

    def records(names):
        return lambda values: dict(zip(names, values, strict=True))

    named = RowType(schema, records, named=True)
    noon = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)

    kept = named.frozen((noon, {"user": "u"}), "it")

    assert named.thawed(kept) == {"at": noon, "by": {"user": "u"}}
    assert named.thawed(named.from_arrow(named.to_arrow([kept]))[0])["at"].tzinfo is not None
    assert RowType(schema).thawed(kept)[0].tzinfo is None


def test_what_is_in_hand_is_put_back_whoever_looks_and_stays_with_its_own_key():
    backend, scene = HeapBackend(APP, 16), Scene()
    table = backend.values(Declared("v", Kind.VALUE, RowType(COUNT)))
    handle = ValueHandle(scene, table)
    numbers, names = backend.keys_of([pa.array(["a", "b"])])
    a, b = (names[number] for number in numbers.tolist())
    versions = [table.version]
    scene.enter(a)
    handle.update((1,))
    frozen = [table.freeze(0)]
    handle.update((2,))
    versions.append(table.version)
    frozen.append(table.freeze(0))
    scene.enter(b)
    assert handle.get() is None
    handle.update((3,))
    handle.clear()
    scene.enter(a)
    assert handle.get() == (2,)
    handle.clear()
    assert not handle.exists()
    scene.leave()
    with pytest.raises(UserCodeError, match="Implicit key not found"):
        handle.exists()
    versions.append(table.version)
    frozen.append(table.freeze(0))

    assert versions == sorted(set(versions))
    kept = [[batch[VALUE].to_pylist() for _, batch in f.batches_by_key_group()] for f in frozen]
    assert kept == [[[{"n": 1}]], [[{"n": 2}]], []]


def test_to_read_what_is_there_changes_nothing():
    handle, scene, backend = value_of(COUNT)
    handle.update((1,))
    (table,) = backend.tables
    before = table.version
    scene.enter(scene.key)
    assert handle.get() == (1,)
    scene.leave()
    assert table.version == before


QUICK = pa.schema(
    [
        ("b", pa.bool_()),
        ("i", pa.int16()),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("took", pa.duration("us")),
    ]
)
PLAIN = (
    True,
    -(2**15),
    0.5,
    "x",
    b"y",
    datetime.date(2024, 5, 1),
    NOON.replace(tzinfo=datetime.UTC),
    NOON,
    datetime.timedelta(seconds=1),
)


def test_a_row_that_fits_as_it_is_is_kept_as_it_is():
    kind = RowType(QUICK)
    assert kind.frozen(PLAIN, "it") is PLAIN
    nothing = (None,) * len(PLAIN)
    assert kind.frozen(nothing, "it") is nothing


class Text(str):
    """A text that is more than one."""


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 1),
        (1, 2**15),
        (1, True),
        (1, 1.0),
        (2, "x"),
        (3, b"x"),
        (4, "x"),
        (5, NOON),
        (6, 5),
        (7, NOON.replace(tzinfo=datetime.UTC)),
        (8, 1),
    ],
)
def test_what_does_not_fit_is_refused_in_every_place_of_a_row(place, value):
    row = (*PLAIN[:place], value, *PLAIN[place + 1 :])
    with pytest.raises(UserCodeError, match=r"it is given .* does not fit its schema"):
        RowType(QUICK).frozen(row, "it")


@pytest.mark.parametrize(
    ("place", "given", "kept"),
    [
        (1, np.int16(7), 7),
        (2, 3, 3.0),
        (3, Text("x"), "x"),
        (4, bytearray(b"y"), b"y"),
        (6, NOON.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=2))), None),
    ],
)
def test_what_fits_in_another_form_is_kept_in_ours(place, given, kept):
    row = (*PLAIN[:place], given, *PLAIN[place + 1 :])
    found = RowType(QUICK).frozen(row, "it")[place]
    assert found == (given if kept is None else kept)
    assert type(found) is type(PLAIN[place])
    assert place != 6 or found.tzinfo is datetime.UTC


def test_a_nan_is_always_the_same_one():
    kind = RowType(pa.schema([("f", pa.float64())]))
    assert kind.frozen((float("nan"),), "it")[0] is kind.frozen((-float("nan"),), "it")[0]


def test_an_empty_list_is_no_list():
    backend, scene = HeapBackend(APP, 16), Scene()
    handle = ListHandle(scene, backend.lists(Declared("l", Kind.LIST, RowType(COUNT))))
    scene.enter(backend.keys_of([pa.array(["a"])])[1][0])
    for write in (handle.put, handle.extend):
        with pytest.raises(UserCodeError, match="Cannot write empty list values"):
            write([])
    assert not handle.exists()


def test_reducing_and_aggregating_state_keep_one_row():
    total, _, _ = value_of(COUNT)
    reducing = ReducingHandle(total, lambda a, b: (a[0] + b[0],))
    assert reducing.get() is None
    for n in (1, 2, 3):
        reducing.add((n,))
    assert reducing.get() == (6,)
    reducing.clear()
    assert not reducing.exists()

    kept, _, _ = value_of(pa.schema([("sum", pa.float64()), ("n", pa.int64())]))
    mean = AggregatingHandle(
        kept,
        lambda before, x: (x, 1) if before is None else (before[0] + x, before[1] + 1),
        lambda row: row[0] / row[1],
    )
    assert mean.get() is None
    for x in (1.0, 2.0, 6.0):
        mean.add(x)
    assert mean.get() == 3.0


def test_a_state_has_one_name():
    backend = HeapBackend(APP, 16)
    backend.values(Declared("v", Kind.VALUE, RowType(COUNT)))
    with pytest.raises(BuildError, match="State variable with name v has already been defined"):
        backend.lists(Declared("v", Kind.LIST, RowType(COUNT)))


def test_keys_without_state_give_their_numbers_back():
    backend = HeapBackend(pa.schema([("n", pa.int64())]), 16, numbers_min=64)
    table = backend.values(Declared("v", Kind.VALUE, RowType(COUNT)))
    timers = KeyTimers(backend, "$timers")
    for first in range(0, 10_000, 100):
        numbers, names = backend.keys_of([pa.array(range(first, first + 100))])
        for number in numbers.tolist():
            table.put(names[number], (number,), None)
            table.clear(names[number])
        timers.register(names[int(numbers[0])], first)
        if first:
            timers.delete(*timers.due(first, 1)[0])
        renamed = backend.tidy(0)
        if renamed is not None:
            timers.rename(renamed)
    assert backend.numbers <= 400
    ((key, time_ms),) = timers.due(10_000, 10)
    assert (backend.columns_of([key])[0].to_pylist(), time_ms) == ([9_900], 9_900)


def test_freezing_a_million_keys_takes_a_moment():
    backend = HeapBackend(pa.schema([("n", pa.int64())]), 128)
    table = backend.values(Declared("v", Kind.VALUE, RowType(COUNT)))
    numbers, _ = backend.keys_of([pa.array(range(1_000_000))])
    row = (1,)
    for number in numbers.tolist():
        table.put(number, row, None)
    began = time.thread_time()
    frozen = table.freeze(0)
    assert time.thread_time() - began < 0.01
    assert len(frozen) == 1_000_000


@pytest.mark.parametrize("is_renumbered", [False, True])
def test_what_is_frozen_stays_as_it_was_while_its_key_goes_on(is_renumbered):
    backend, scene = HeapBackend(APP, 16, numbers_min=1), Scene()
    user_key = RowType(pa.schema([("u", pa.string())]))
    value = ValueHandle(scene, backend.values(Declared("v", Kind.VALUE, RowType(COUNT))))
    lists = ListHandle(scene, backend.lists(Declared("l", Kind.LIST, RowType(COUNT))))
    table = backend.maps(Declared("m", Kind.MAP, RowType(COUNT), user_key))
    maps = MapHandle(scene, table)
    names = backend.keys_of([pa.array([*map(str, range(100)), "a"])])[1]

    def change(n):
        value.update((n,))
        lists.append((n,))
        maps.put((str(n),), (n,))

    scene.enter(names[100])
    change(1)
    change(2)
    frozen = [each.freeze(0) for each in backend.tables]
    if is_renumbered:
        renamed = backend.tidy(0)
        assert renamed is not None
        scene.enter(renamed[100])
    change(3)
    again = [each.freeze(0) for each in backend.tables]
    change(4)
    maps.remove(("2",))
    lists.clear()
    for tables, numbers in ((frozen, [1, 2]), (again, [1, 2, 3])):
        batches = [[batch for _, batch in each.batches_by_key_group()] for each in tables]
        found = [[row["n"] for row in batch[VALUE].to_pylist()] for (batch,) in batches]
        assert found == [numbers[-1:], numbers, numbers]


# --- another program


def one_snapshot(schema, row, kind=Kind.VALUE):
    backend, scene = HeapBackend(APP, 16), Scene()
    table = backend.values(Declared("v", kind, RowType(schema)))
    scene.enter(backend.keys_of([pa.array(["a"])])[1][0])
    ValueHandle(scene, table).update(row)
    ((_, batch),) = table.freeze(0).batches_by_key_group()
    return batch


BEFORE = pa.schema([("n", pa.int32()), ("old", pa.string()), ("xs", pa.list_(pa.float32()))])


def test_a_field_may_be_added_or_dropped_and_a_number_widened():
    now = pa.schema([("xs", pa.list_(pa.float64())), ("new", pa.string()), ("n", pa.int64())])
    batch = one_snapshot(BEFORE, (7, "x", [0.5, None]))
    handle, _, backend = value_of(now)
    backend.tables[0].restore(batch)
    assert handle.get() == ([0.5, None], None, 7)


@pytest.mark.parametrize(
    "now",
    [
        pa.schema([("n", pa.int16())]),
        pa.schema([("n", pa.string())]),
        pa.schema([pa.field("new", pa.string(), nullable=False)]),
    ],
)
def test_any_other_change_is_refused_with_both_schemas(now):
    batch = one_snapshot(BEFORE, (7, "x", None))
    _, _, backend = value_of(now)
    with pytest.raises(StartRefused, match=r"struct<n: int32.*cannot become struct<"):
        backend.tables[0].restore(batch)


def test_a_state_stays_what_it_was():
    batch = one_snapshot(COUNT, (7,))
    backend = HeapBackend(APP, 16)
    table = backend.lists(Declared("v", Kind.LIST, RowType(COUNT)))
    with pytest.raises(StartRefused, match=r"'v' is a value .* declares it as a list"):
        table.restore(batch)


def test_a_time_to_live_may_be_added_and_what_was_there_stays():
    batch = one_snapshot(COUNT, (7,))
    handle, scene, backend = value_of(COUNT, ttl_ms=5)
    backend.tables[0].restore(batch)
    scene.now_ms = 10**13
    assert handle.get() == (7,)


def test_a_snapshot_shows_keys_user_keys_values_and_when_they_expire():
    backend, scene = HeapBackend(APP, 16), Scene()
    user_key = RowType(pa.schema([("u", pa.string())]))
    table = backend.maps(Declared("m", Kind.MAP, RowType(COUNT), user_key, expires=True))
    scene.enter(backend.keys_of([pa.array(["a"])])[1][0])
    MapHandle(scene, table, 5).put(("u",), (1,))
    ((_, batch),) = table.freeze(0).batches_by_key_group()
    assert batch.schema.names == ["app", USER_KEY, VALUE, EXPIRES]
    assert batch.to_pylist() == [
        {
            "app": "a",
            USER_KEY: {"u": "u"},
            VALUE: {"n": 1},
            EXPIRES: datetime.datetime(1970, 1, 1, 0, 0, 0, 5000, tzinfo=datetime.UTC),
        }
    ]


def test_a_map_finds_a_row_by_nan_also_after_a_restore():
    def by_number():
        backend = HeapBackend(APP, max_parallelism=4)
        number = RowType(pa.schema([("x", pa.float64()), ("xs", pa.list_(pa.float32()))]))
        table = backend.maps(Declared("m", Kind.MAP, RowType(COUNT), number))
        scene = Scene()
        _, keys = backend.keys_of([pa.array(["a"])])
        scene.enter(keys[0])
        return MapHandle(scene, table), table

    handle, table = by_number()
    handle.put((math.nan, [math.nan]), (7,))
    assert handle.get((float("nan"), [float("nan")])) == (7,)

    again, restored = by_number()
    for _, batch in table.freeze(0).batches_by_key_group():
        restored.restore(batch)
    assert again.get((math.nan, [math.nan])) == (7,)
