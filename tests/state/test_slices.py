"""States on their way into a snapshot, slice by slice: the same rows, whoever kept them."""

import datetime
import decimal
import math

import pyarrow as pa
import pytest

from stillframe.errors import SnapshotDamaged
from stillframe.key_groups import hash_columns, key_groups_of
from stillframe.state.backends import EXPIRES, USER_KEY, VALUE, Declared, Kind
from stillframe.state.disk import Changes, DiskMemory
from stillframe.state.disk_reading import tables_in
from stillframe.state.disk_rows import DiskBackend
from stillframe.state.heap import HeapBackend
from stillframe.state.rows import RowType
from stillframe.state.slices import (
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    SLICE_BYTES_MAX,
    SLICE_ENTRIES_MAX,
    Pace,
    Slice,
    batches_of,
)
from stillframe.state.snapshots import read_keyed_snapshot, write_keyed_snapshot
from stillframe.storage.local import LocalStore

GROUPS = 4
KEYS = pa.schema([("app", pa.string()), ("user", pa.int64())])
COUNT = RowType(pa.schema([("n", pa.int64())]))
NAME = RowType(pa.schema([("name", pa.string()), ("x", pa.float64())]))
NESTED = RowType(
    pa.schema(
        [
            ("x", pa.float64()),
            ("price", pa.decimal128(10, 2)),
            ("at", pa.timestamp("us", "UTC")),
            ("bytes", pa.binary()),
            ("visits", pa.list_(pa.struct([("page", pa.int32()), ("took", pa.float32())]))),
            ("by", pa.map_(pa.string(), pa.list_(pa.int64()))),
        ]
    )
)
NOON = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)
FULL = (
    0.5,
    decimal.Decimal("1.50"),
    NOON,
    b"\x00\xff",
    ((1, 0.5), None, (None, None)),
    (("a", (1, None)), ("b", None)),
)
NOTHING = (None,) * len(FULL)
MANY = 2 * SLICE_ENTRIES_MAX + 7
"""Keys of a key group, if there is but one: several slices, and the last is not full."""
NOW_MS = 1_000


class Kept:
    """One state, kept on the heap or in a database."""

    def __init__(self, where, directory, declared, groups=GROUPS, keys=KEYS):
        self.directory = directory
        self.declared = declared
        self.is_on_disk = where == "disk"
        if self.is_on_disk:
            memory = DiskMemory(8 << 20)
            self.backend = DiskBackend(keys, groups, directory / "database", memory)
        else:
            self.backend = HeapBackend(keys, groups)
        declare = {
            Kind.VALUE: self.backend.values,
            Kind.LIST: self.backend.lists,
            Kind.MAP: self.backend.maps,
        }
        self.table = declare[declared.kind](declared)
        self.key_types = [field.type for field in keys]

    def keys(self, *columns):
        arrays = [pa.array(c, type_) for c, type_ in zip(columns, self.key_types, strict=True)]
        numbers, names = self.backend.keys_of(arrays)
        return [names[number] for number in numbers.tolist()]

    def some_keys(self, count):
        """Some of them without an app, one without a user."""
        apps = [None if number % 5 == 0 else "a" * (number % 7) for number in range(count)]
        return self.keys(apps, [*range(1, count), None])

    def frozen(self):
        """What a snapshot is made of."""
        if not self.is_on_disk:
            return self.table.freeze(NOW_MS)
        linked = self.directory / "linked"
        self.backend.freeze_all(NOW_MS).link(linked)
        (table,) = tables_in(linked)
        return table

    def rows(self):
        """Of a snapshot, each group's in their order, and sorted by key."""
        batches = [batch for _, batch in self.frozen().batches_by_key_group()]
        assert all(batch.num_rows for batch in batches)
        found = [row for batch in batches for row in batch.to_pylist()]
        return sorted(found, key=lambda row: (row["user"] is None, row["user"]))


@pytest.fixture(params=["heap", "disk"])
def keep(request, tmp_path):
    made = []

    def keep(declared, **settings):
        made.append(Kept(request.param, tmp_path, declared, **settings))
        return made[-1]

    yield keep
    for each in made:
        each.backend.close()


def users_of(rows):
    return [row["user"] for row in rows]


def numbers_of(rows):
    return [row[VALUE]["n"] for row in rows]


# --- all kinds of states


def test_the_values_of_more_keys_than_a_slice_has_are_all_there_with_their_keys(keep):
    kept = keep(Declared("v", Kind.VALUE, COUNT), groups=1)
    for number, key in enumerate(kept.some_keys(MANY), 1):
        kept.table.put(key, (number if number % 3 else None,), None)
    rows = kept.rows()
    assert users_of(rows) == [*range(1, MANY), None]
    assert numbers_of(rows) == [n if n % 3 else None for n in range(1, MANY + 1)]
    apps = [None if n % 5 == 0 else "a" * (n % 7) for n in range(MANY)]
    assert [row["app"] for row in rows] == apps
    assert set(rows[0]) == {"app", "user", VALUE}


def test_a_list_has_a_row_for_each_element_in_their_order_however_often_it_was_added_to(keep):
    kept = keep(Declared("l", Kind.LIST, COUNT))
    keys = kept.some_keys(MANY)
    for round_ in range(3):
        for number, key in enumerate(keys, 1):
            kept.table.append(key, [(number * 10 + round_,)] * (number % 4), None)
    rows = kept.rows()
    users = [*range(1, MANY), None]
    counts = [n % 4 for n in range(1, MANY + 1)]
    expected = [
        (user, n * 10 + round_)
        for n, (user, count) in enumerate(zip(users, counts, strict=True), 1)
        for round_ in range(3)
        for _ in range(count)
    ]
    assert list(zip(users_of(rows), numbers_of(rows), strict=True)) == expected


def test_the_rows_of_a_map_are_with_their_own_user_keys(keep):
    kept = keep(Declared("m", Kind.MAP, COUNT, NAME))
    for number, key in enumerate(kept.some_keys(MANY), 1):
        for name in ("", "ü" * (number % 3 + 1), None)[: number % 4]:
            kept.table.put(key, (name, number / 2), (number,), None)
    found = {(row["user"], row[USER_KEY]["name"]): row for row in kept.rows()}
    expected = [
        (None if n == MANY else n, name)
        for n in range(1, MANY + 1)
        for name in ("", "ü" * (n % 3 + 1), None)[: n % 4]
    ]
    assert set(found) == set(expected)
    assert len(found) == len(expected)
    for (user, _), row in found.items():
        number = MANY if user is None else user
        assert (row[USER_KEY]["x"], row[VALUE]["n"]) == (number / 2, number)


@pytest.mark.parametrize("groups", [1, 7, 128])
@pytest.mark.parametrize("kind", list(Kind))
def test_every_batch_is_of_one_key_group_and_groups_come_in_their_order(keep, kind, groups):
    declared = Declared("s", kind, COUNT, COUNT if kind is Kind.MAP else None)
    kept = keep(declared, groups=groups)
    for number, key in enumerate(kept.some_keys(MANY), 1):
        for each in range(1 if kind is Kind.VALUE else number % 3):
            place = (key, (each,)) if kind is Kind.MAP else (key,)
            put = kept.table.append if kind is Kind.LIST else kept.table.put
            put(*place, [(number,)] if kind is Kind.LIST else (number,), None)
    batches = list(kept.frozen().batches_by_key_group())

    for group, batch in batches:
        hashes = hash_columns([batch.column("app"), batch.column("user")])
        assert set(key_groups_of(hashes, groups).tolist()) == {group}
    named = [group for group, _ in batches]
    assert named == sorted(named)


@pytest.mark.parametrize("kind", list(Kind))
def test_what_has_expired_is_left_out_and_what_stays_says_until_when(keep, kind):
    kept = keep(Declared("s", kind, COUNT, COUNT if kind is Kind.MAP else None, expires=True))
    until = [None, NOW_MS - 1, NOW_MS, NOW_MS + 1]
    for number, key in enumerate(kept.some_keys(MANY), 1):
        for each in range(1 if kind is Kind.VALUE else 3):
            place = (key, (each,)) if kind is Kind.MAP else (key,)
            put = kept.table.append if kind is Kind.LIST else kept.table.put
            row = (number * 10 + each,)
            put(*place, [row] if kind is Kind.LIST else row, until[(number + each) % 4])
    expected = {
        n * 10 + each: until[(n + each) % 4]
        for n in range(1, MANY + 1)
        for each in range(1 if kind is Kind.VALUE else 3)
        if until[(n + each) % 4] in (None, NOW_MS + 1)
    }
    at = {NOW_MS + 1: datetime.datetime(1970, 1, 1, 0, 0, 1, 1000, datetime.UTC), None: None}
    rows = kept.rows()
    assert numbers_of(rows) == list(expected)
    assert [row[EXPIRES] for row in rows] == [at[each] for each in expected.values()]
    for row in rows:
        number = row[VALUE]["n"]
        assert row["user"] == (None if number // 10 == MANY else number // 10)
        assert kind is not Kind.MAP or row[USER_KEY]["n"] == number % 10


@pytest.mark.parametrize("kind", list(Kind))
def test_a_state_of_which_all_has_expired_has_no_rows(keep, kind):
    kept = keep(Declared("s", kind, COUNT, COUNT if kind is Kind.MAP else None, expires=True))
    for key in kept.some_keys(MANY):
        match kind:
            case Kind.VALUE:
                kept.table.put(key, (1,), 5)
            case Kind.LIST:
                kept.table.append(key, [(1,)], 5)
            case Kind.MAP:
                kept.table.put(key, (1,), (1,), 5)
    assert list(kept.frozen().batches_by_key_group()) == []


@pytest.mark.parametrize("expires", [False, True])
@pytest.mark.parametrize("kind", [Kind.VALUE, Kind.LIST])
def test_nested_values_and_nulls_come_back_from_a_snapshot_as_they_were(keep, kind, expires):
    kept = keep(Declared("s", kind, NESTED, expires=expires), groups=1)
    nan = (math.nan, None, None, b"", ((None, math.nan),), ())
    put_in = [FULL, NOTHING, nan, (-math.inf, *NOTHING[1:])] * (SLICE_ENTRIES_MAX // 3)
    for row, key in zip(put_in, kept.some_keys(len(put_in)), strict=True):
        if kind is Kind.VALUE:
            kept.table.put(key, row, None)
        else:
            kept.table.append(key, [row, NOTHING], None)
    found = {}
    for _, batch in kept.frozen().batches_by_key_group():
        rows = NESTED.from_arrow(batch.column(VALUE))
        for user, row in zip(batch["user"].to_pylist(), rows, strict=True):
            found.setdefault(user, []).append(row)
    users = [*range(1, len(put_in)), None]
    more = [] if kind is Kind.VALUE else [NOTHING]
    # Every NaN that is read is one and the same, and so is equal to itself in a tuple.
    assert found == {user: [row, *more] for user, row in zip(users, put_in, strict=True)}


def test_a_value_without_fields_is_there_or_not(keep):
    kept = keep(Declared("v", Kind.VALUE, RowType(pa.schema([]))))
    keys = kept.some_keys(MANY)
    for key in keys[1:]:
        kept.table.put(key, (), None)
    assert users_of(kept.rows()) == [*range(2, MANY), None]


def test_keys_that_were_cleared_are_in_no_snapshot(keep):
    kept = keep(Declared("v", Kind.VALUE, COUNT))
    keys = kept.some_keys(MANY)
    for number, key in enumerate(keys, 1):
        kept.table.put(key, (number,), None)
    for key in keys[::2]:
        kept.table.clear(key)
    assert numbers_of(kept.rows()) == list(range(2, MANY + 1, 2))


def test_a_state_that_is_empty_has_no_batch(keep):
    assert list(keep(Declared("v", Kind.VALUE, COUNT)).frozen().batches_by_key_group()) == []


# --- bounds


@pytest.mark.parametrize("kind", [Kind.VALUE, Kind.LIST])
def test_a_key_group_with_many_bytes_becomes_several_batches_that_are_read_as_one(
    keep, kind, tmp_path
):
    """A tenth of a batch in each value."""
    state = Declared("s", kind, RowType(pa.schema([("n", pa.int64()), ("data", pa.binary())])))
    kept = keep(state, groups=1)
    size_bytes = BATCH_BYTES_MAX // 10
    keys = kept.keys(["a"] * 45, range(45))
    for number, key in enumerate(keys):
        row = (number, bytes([number]) * size_bytes)
        if kind is Kind.VALUE:
            kept.table.put(key, row, None)
        else:
            kept.table.append(key, [row], None)
    frozen = kept.frozen()
    sizes_bytes = [batch.nbytes for _, batch in frozen.batches_by_key_group()]
    assert len(sizes_bytes) > 1
    assert max(sizes_bytes) < 5 * BATCH_BYTES_MAX  # 32 values are taken without a look
    store = LocalStore(tmp_path / "store")
    written = write_keyed_snapshot(store, "s", frozen)
    assert written.rows == 45
    assert written.key_groups == (0,) * len(sizes_bytes)
    buffer = store.read_verified("s", written.length_bytes, written.crc32)
    rows = [
        row
        for batch in read_keyed_snapshot(buffer, written.key_groups, range(1))
        for row in batch.column(VALUE).to_pylist()
    ]
    assert sorted(row["n"] for row in rows) == list(range(45))
    assert all(row["data"] == bytes([row["n"]]) * size_bytes for row in rows)


def slice_of(rows):
    return Slice(range(len(rows)), [1] * len(rows), pa.array(rows, pa.int64()))


def as_batch(made):
    return pa.RecordBatch.from_pydict({"n": made.values})


def test_slices_become_batches_in_their_order_and_an_empty_one_becomes_none():
    slices = [slice_of([]), slice_of([1, 2]), slice_of([]), slice_of([3])]
    assert [b.to_pydict() for b in batches_of(slices, as_batch)] == [{"n": [1, 2, 3]}]
    assert list(batches_of([slice_of([])], as_batch)) == []
    half = slice_of(list(range(BATCH_ROWS_MAX // 2)))
    lengths = [len(batch) for batch in batches_of([half] * 5, as_batch)]
    assert lengths == [BATCH_ROWS_MAX, BATCH_ROWS_MAX, BATCH_ROWS_MAX // 2]


def test_the_pace_slackens_where_entries_are_large_and_recovers():
    def made(rows, bytes_each):
        return Slice(range(rows), [1] * rows, pa.array([b"x" * bytes_each] * rows))

    pace = Pace()
    paces = []
    for bytes_each in [10] * 6 + [SLICE_BYTES_MAX // 64] * 3 + [SLICE_BYTES_MAX] + [10] * 8:
        pace.saw(made(pace.entries, bytes_each))
        paces.append(pace.entries)
    assert paces[5] == SLICE_ENTRIES_MAX
    assert paces[8] in range(60, 65)
    assert paces[9] == 1
    assert paces[-1] == SLICE_ENTRIES_MAX


def test_long_keys_count_as_bytes_of_a_batch_of_a_database(tmp_path):
    kept = Kept("disk", tmp_path, Declared("v", Kind.VALUE, COUNT), groups=1)
    apps = [f"{number:05}" * (BATCH_BYTES_MAX // 500) for number in range(300)]
    for number, key in enumerate(kept.keys(apps, range(300))):
        kept.table.put(key, (number,), None)
    batches = [batch for _, batch in kept.frozen().batches_by_key_group()]
    assert [len(batch) for batch in batches] == [128, 128, 44]
    assert sorted(app for batch in batches for app in batch["app"].to_pylist()) == apps
    kept.backend.close()


# --- damage


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("expires", [False, True])
def test_an_entry_that_is_no_row_is_damage_also_in_the_middle_of_a_slice(tmp_path, kind, expires):
    user_key = COUNT if kind is Kind.MAP else None
    kept = Kept("disk", tmp_path, Declared("s", kind, COUNT, user_key, expires), groups=1)
    for number, key in enumerate(kept.some_keys(MANY), 1):
        match kind:
            case Kind.VALUE:
                kept.table.put(key, (number,), None)
            case Kind.LIST:
                kept.table.append(key, [(number,)], None)
            case Kind.MAP:
                kept.table.put(key, (number,), (number,), None)
    kept.backend.settle()
    entries = list(kept.backend.disk.scan(b"\0\0", b"\0\1"))
    assert len(entries) == MANY
    changes = Changes()
    changes.put(entries[SLICE_ENTRIES_MAX + 100][0], b"\x91\xa3abc")
    kept.backend.disk.write(changes)
    table = kept.frozen()
    with pytest.raises(SnapshotDamaged, match="5 bytes of state are no row of their schema"):
        list(table.batches_by_key_group())
    kept.backend.close()


def test_a_row_in_two_entries_is_damage_though_it_is_whole_if_they_are_joined(tmp_path):
    kept = Kept("disk", tmp_path, Declared("v", Kind.VALUE, NAME), groups=1)
    for key in kept.keys(["a", "a"], [1, 2]):
        kept.table.put(key, ("x", 1.0), None)
    kept.backend.settle()
    (first, data), (second, _) = kept.backend.disk.scan(b"\0\0", b"\0\1")
    changes = Changes()
    changes.put(first, data[:-3])
    changes.put(second, data[-3:] + data)
    kept.backend.disk.write(changes)
    with pytest.raises(SnapshotDamaged, match="are no row of their schema"):
        list(kept.frozen().batches_by_key_group())
    kept.backend.close()
