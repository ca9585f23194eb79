"""Aggregates on disk hold what a table on the heap holds, whatever is in memory of them."""

from __future__ import annotations

import itertools
import math
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import DataError, StartRefused, StorageError
from stillframe.key_groups import hash_batch, key_group_range, key_groups_of
from stillframe.runtime.kept_columns import KeptColumns
from stillframe.state import pages as pages_module
from stillframe.state.aggregates import AggregateTable
from stillframe.state.disk import Disk, DiskMemory
from stillframe.state.disk_pages import PagedAggregates
from stillframe.state.disk_reading import tables_in

MAX_PARALLELISM = 8
EVERYTHING = range(MAX_PARALLELISM)
NO_LIMIT = 1 << 40
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("number", pa.int32()),
        ("f", pa.float64()),
        ("i", pa.int64()),
        ("s", pa.string()),
    ]
)


def call(function: str, column: str | None, type_: pa.DataType | None = None) -> AggregateCall:
    type_ = SCHEMA.field(column).type if type_ is None else type_
    return AggregateCall(function, column, f"{function}({column or 1})", type_)


CALLS = [
    call("count", None, pa.int64()),
    call("count", "i", pa.int64()),
    call("sum", "i", pa.int64()),
    call("avg", "i", pa.float64()),
    call("sum", "f", pa.float64()),
    *(call(function, column) for function in ("min", "max") for column in "ifs"),
]
KEYS = [["name"], ["number"], ["name", "number"], ["f"], []]
LIMITS = [0, 300_000, NO_LIMIT]
"""A front that is always too large, one of some hundred keys, one that is never too large."""


@pytest.fixture
def small_pages(monkeypatch):
    """Four rows in a page, so that there are many, and read and written a few at a time."""
    monkeypatch.setattr(pages_module, "PAGE_ROWS_MAX", 4)
    monkeypatch.setattr(pages_module, "_ROWS_READ_AT_ONCE", 64)
    monkeypatch.setattr(pages_module, "_ROWS_WRITTEN_AT_ONCE", 32)


class Place:
    """Directories for one test, and what is opened in them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = itertools.count()
        self._memory = DiskMemory(16 << 20)
        self._opened: list[Disk] = []

    def fresh(self) -> Path:
        return self.directory / str(next(self._numbers))

    def disk(self, directory: Path | None = None) -> Disk:
        disk = Disk.open(directory or self.fresh(), self._memory)
        self._opened.append(disk)
        return disk

    def aggregates(
        self,
        keys: list[str],
        limit: int = NO_LIMIT,
        disk: Disk | None = None,
        owned: range = EVERYTHING,
    ) -> PagedAggregates:
        disk = disk or self.disk()
        return PagedAggregates(SCHEMA, keys, CALLS, MAX_PARALLELISM, disk, owned, limit)

    def linked(self, frozen) -> Path:
        directory = self.fresh()
        frozen.link(directory)
        frozen.release()
        return directory

    def close(self) -> None:
        for disk in self._opened:
            disk.close()


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    place.close()


def heap(keys: list[str]) -> AggregateTable:
    return AggregateTable(SCHEMA, keys, CALLS, MAX_PARALLELISM)


def random_batch(random: np.random.Generator, rows: int, kinds: int) -> pa.RecordBatch:
    def with_nulls(values, type_):
        mask = random.random(rows) < 0.1
        return pa.array(values, type_, mask=mask)

    numbers = random.integers(0, kinds, rows)
    floats = np.array([math.nan, -0.0, 0.0, math.inf, 1.5])[numbers % 5] * (numbers // 5 + 1)
    columns = [
        with_nulls(np.array([f"name {n}" * (n % 3) for n in numbers], dtype=object), pa.string()),
        with_nulls(numbers % 97, pa.int32()),
        with_nulls(floats, pa.float64()),
        with_nulls(random.integers(-(2**40), 2**40, rows), pa.int64()),
        with_nulls(np.array([f"é{n % 13}" for n in numbers], dtype=object), pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def rows_in(batch: pa.RecordBatch) -> list[tuple]:
    """As text, so that NaN equals NaN. Sums are made in the same order, so they are the same."""
    rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
    return [tuple(map(repr, row)) for row in rows]


def comparable(batch: pa.RecordBatch) -> list[tuple]:
    return sorted(rows_in(batch))


def everything_in(aggregates: PagedAggregates) -> list[tuple]:
    return sorted(itertools.chain(*map(comparable, aggregates.results())))


def snapshot_of(table: AggregateTable) -> list[tuple]:
    return comparable(table.freeze().rows())


def opened(place: Place, directory: Path, keys: list[str]) -> list[tuple]:
    aggregates = place.aggregates(keys, disk=place.disk(directory))
    held = everything_in(aggregates)
    assert len(aggregates) == len(held)
    return held


# --- the same as on the heap


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("keys", KEYS, ids=",".join)
def test_updates_answer_what_a_table_on_the_heap_answers(place, keys, limit):
    random = np.random.default_rng(limit + len(keys))
    aggregates, table = place.aggregates(keys, limit), heap(keys)
    for step in range(12):
        batch = random_batch(random, int(random.integers(0, 200)), int(random.integers(1, 900)))
        assert rows_in(aggregates.update(batch)) == rows_in(table.update(batch))
        assert len(aggregates) == len(table)
        if step % 3 == 2:
            place.linked(aggregates.freeze())
    assert everything_in(aggregates) == comparable(table.results())


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("limit", LIMITS)
def test_partial_aggregates_are_merged_as_on_the_heap(place, limit):
    random = np.random.default_rng(3)
    aggregates, table = place.aggregates(["name"], limit), heap(["name"])
    for _ in range(6):
        of_one_batch = heap(["name"])
        of_one_batch.update(random_batch(random, 150, 400))
        partials = of_one_batch.freeze().rows()
        assert rows_in(aggregates.merge(partials)) == rows_in(table.merge(partials))
    assert everything_in(aggregates) == comparable(table.results())


@pytest.mark.parametrize("limit", LIMITS)
def test_pages_of_ordinary_size_hold_what_the_heap_holds(place, limit):
    random = np.random.default_rng(4)
    aggregates, table = place.aggregates(["i"], limit), heap(["i"])
    for kinds in (20_000, 20_000, 50, 20_000):
        batch = random_batch(random, 15_000, kinds)
        batch = batch.set_column(3, "i", pa.array(random.integers(0, kinds, 15_000)))
        assert rows_in(aggregates.update(batch)) == rows_in(table.update(batch))
        assert opened(place, place.linked(aggregates.freeze()), ["i"]) == comparable(
            table.results()
        )


def test_a_sum_that_leaves_64_bits_is_an_error_though_its_first_part_was_on_disk(place):
    aggregates = place.aggregates(["name"], limit=0)
    batch = pa.RecordBatch.from_pylist([{"name": "a", "i": 2**63 - 1}], schema=SCHEMA)
    aggregates.update(batch)
    with pytest.raises(DataError, match=r"sum\(i\) has left the range of a 64-bit integer"):
        aggregates.update(batch)


def test_the_version_changes_with_every_change_and_with_nothing_else(place):
    aggregates = place.aggregates(["name"], limit=0)
    seen = [aggregates.version]
    for _ in range(3):
        aggregates.update(random_batch(np.random.default_rng(5), 9, 3))
        seen.append(aggregates.version)
    assert len(set(seen)) == 4
    place.linked(aggregates.freeze())
    aggregates.update(random_batch(np.random.default_rng(5), 0, 3))
    assert aggregates.version == seen[-1]


# --- snapshots


ODDS = [0.35, 0.3, 0.15, 0.1, 0.1]


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("seed", range(4))
def test_every_snapshot_that_is_linked_holds_what_was_there_at_its_barrier(place, seed, limit):
    """Linked at once, late, out of order, or never: then it is released, or just forgotten."""
    random = np.random.default_rng(seed)
    keys = KEYS[seed % len(KEYS)]
    aggregates, table = place.aggregates(keys, limit), heap(keys)
    waiting: list[tuple] = []
    linked = 0
    for _ in range(60):
        step = random.choice(["update", "freeze", "link", "link a later one", "give up"], p=ODDS)
        if step == "update":
            batch = random_batch(random, int(random.integers(1, 120)), 300)
            aggregates.update(batch)
            table.update(batch)
        elif step == "freeze":
            waiting.append((aggregates.freeze(), comparable(table.results())))
        elif step == "give up" and waiting:
            frozen, _ = waiting.pop(int(random.integers(len(waiting))))
            if random.random() < 0.5:
                frozen.release()
        elif step.startswith("link") and waiting:
            if step != "link":
                del waiting[:-1]
            frozen, expected = waiting.pop(0)
            assert opened(place, place.linked(frozen), keys) == expected
            linked += 1
    assert linked > 3
    assert everything_in(aggregates) == comparable(table.results())


def test_two_snapshots_in_flight_are_linked_one_after_the_other(place):
    random = np.random.default_rng(6)
    aggregates, table = place.aggregates(["number"]), heap(["number"])
    waiting = []
    for _ in range(2):
        batch = random_batch(random, 500, 97)
        aggregates.update(batch)
        table.update(batch)
        waiting.append((aggregates.freeze(), comparable(table.results())))
    aggregates.update(random_batch(random, 500, 97))
    for frozen, expected in waiting:
        assert opened(place, place.linked(frozen), ["number"]) == expected


def test_a_snapshot_cannot_be_linked_after_a_later_one(place):
    aggregates = place.aggregates(["name"])
    aggregates.update(random_batch(np.random.default_rng(7), 10, 5))
    older, newer = aggregates.freeze(), aggregates.freeze()
    place.linked(newer)
    with pytest.raises(StorageError, match="because a later one has been: take another checkpoint"):
        place.linked(older)


def test_a_full_front_waits_for_nobody_and_links_the_snapshot_itself(place):
    random = np.random.default_rng(8)
    limit = 400_000
    aggregates, table = place.aggregates(["i"], limit), heap(["i"])
    batches = (
        random_batch(random, 2_000, 10).set_column(3, "i", pa.array(np.arange(n, n + 2_000)))
        for n in itertools.count(0, 2_000)
    )

    def update() -> None:
        batch = next(batches)
        aggregates.update(batch)
        table.update(batch)

    update()
    frozen, expected = aggregates.freeze(), comparable(table.results())
    largest = 0
    for _ in range(12):
        update()
        largest = max(largest, aggregates.state_bytes)
    beside = list(place.directory.glob("*.ahead-*"))
    assert largest <= limit
    assert len(beside) == 1
    assert opened(place, place.linked(frozen), ["i"]) == expected
    assert not list(place.directory.glob("*.ahead-*"))
    assert everything_in(aggregates) == comparable(table.results())


def test_what_was_linked_ahead_for_a_snapshot_nobody_wants_is_removed(place):
    aggregates = place.aggregates(["name"], limit=0)
    aggregates.update(random_batch(np.random.default_rng(9), 10, 5))
    frozen = aggregates.freeze()
    aggregates.update(random_batch(np.random.default_rng(9), 10, 5))
    assert list(place.directory.glob("*.ahead-*"))
    frozen.release()
    frozen.release()
    assert not list(place.directory.glob("*.ahead-*"))


@pytest.mark.parametrize("limit", [500_000, NO_LIMIT])
def test_links_on_other_threads_see_no_change_that_came_after_their_barrier(place, limit):
    """Every key is counted once in each round, so a snapshot holds one count for all of them."""
    random = np.random.default_rng(10)
    numbers = np.arange(20_000)
    schema = pa.schema([("k", pa.int64())])
    count = [AggregateCall("count", None, "n", pa.int64())]
    aggregates = PagedAggregates(
        schema, ["k"], count, MAX_PARALLELISM, place.disk(), EVERYTHING, limit
    )
    linked: list[tuple[int, Path]] = []

    def link(frozen, round_: int) -> None:
        linked.append((round_, place.linked(frozen)))

    threads = []
    for round_ in range(1, 7):
        for part in np.array_split(random.permutation(numbers), 8):
            aggregates.update(pa.record_batch({"k": part}))
        if threads:
            threads[-1].join(timeout=60)
        threads.append(threading.Thread(target=link, args=(aggregates.freeze(), round_)))
        threads[-1].start()
    threads[-1].join(timeout=60)
    assert [round_ for round_, _ in linked] == list(range(1, 7))
    for round_, directory in linked:
        restored = PagedAggregates(
            schema, ["k"], count, MAX_PARALLELISM, place.disk(directory), EVERYTHING, limit
        )
        counts = [batch["n"].to_pylist() for batch in restored.results()]
        assert list(itertools.chain(*counts)) == [round_] * len(numbers)


@pytest.mark.usefixtures("small_pages")
def test_a_page_that_is_read_whole_after_a_barrier_was_not_whole_at_the_barrier(place):
    def numbers(*values: int) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([{"i": value} for value in values], schema=SCHEMA)

    table = heap(["i"])
    table.update(numbers(*range(6_000)))
    filled = place.aggregates(["i"])
    filled.update(numbers(*range(6_000)))
    directory = place.linked(filled.freeze())
    # There is room for some 1,200 rows, which are fewer than the pages of the first batch have.
    aggregates = place.aggregates(["i"], limit=900_000, disk=place.disk(directory))
    aggregates.update(numbers(*range(0, 6_000, 8)))
    table.update(numbers(*range(0, 6_000, 8)))
    frozen, expected = aggregates.freeze(), comparable(table.results())
    for value in range(1, 6_000, 400):
        aggregates.update(numbers(value))
    assert 300_000 < aggregates.state_bytes < 450_000, "the front has not been written"
    assert opened(place, place.linked(frozen), ["i"]) == expected


def test_a_page_is_divided_between_places_and_never_within_one():
    places = np.repeat(np.array([3, 5, 9], dtype=np.uint64), [400, 500, 300])
    starts = np.array([0])
    assert pages_module._cuts(places, starts).tolist() == [0, 400, 900]
    assert pages_module._cuts(places[:400], starts).tolist() == [0]


def test_a_freeze_costs_the_same_for_few_keys_and_for_many(place):
    schema = pa.schema([("k", pa.int64())])
    count = [AggregateCall("count", None, "n", pa.int64())]

    def freeze_seconds(keys: int) -> float:
        aggregates = PagedAggregates(
            schema, ["k"], count, MAX_PARALLELISM, place.disk(), EVERYTHING, NO_LIMIT
        )
        aggregates.update(pa.record_batch({"k": np.arange(keys)}))
        times = []
        for _ in range(9):
            begin = time.thread_time()
            frozen = aggregates.freeze()
            times.append(time.thread_time() - begin)
            frozen.release()
        return min(times)

    freeze_seconds(100)
    assert freeze_seconds(400_000) < max(0.002, 4 * freeze_seconds(100))


def test_a_link_adds_files_as_large_as_what_changed(place):
    schema = pa.schema([("k", pa.int64())])
    count = [AggregateCall("count", None, "n", pa.int64())]
    aggregates = PagedAggregates(
        schema, ["k"], count, MAX_PARALLELISM, place.disk(), EVERYTHING, NO_LIMIT
    )
    numbers = np.random.default_rng(11).integers(0, 2**60, 100_000)
    known: set[str] = set()

    def added_bytes() -> int:
        directory = place.linked(aggregates.freeze())
        files = {file.name: file.stat().st_size for file in directory.glob("*.sst")}
        added = sum(size for name, size in files.items() if name not in known)
        known.update(files)
        return added

    aggregates.update(pa.record_batch({"k": numbers}))
    everything = added_bytes()
    aggregates.update(pa.record_batch({"k": numbers[:1_000]}))
    assert 0 < added_bytes() < everything / 8
    assert added_bytes() == 0


# --- restoring


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("limit", LIMITS)
def test_state_is_rescaled_by_key_group_ranges_and_goes_on(place, limit):
    random = np.random.default_rng(12)
    keys = ["name", "number"]
    table = heap(keys)
    directories: list[Path] = []
    for parallelism in (2, 3, 1, 4):
        subtasks = []
        for subtask in range(parallelism):
            owned = key_group_range(subtask, parallelism, MAX_PARALLELISM)
            disk = place.disk()
            for directory in directories:
                disk.copy_groups(directory, owned)
            subtasks.append(place.aggregates(keys, limit, disk, owned))
        assert sum(map(len, subtasks)) == len(table)
        for _ in range(3):
            batch = random_batch(random, 100, 250)
            table.update(batch)
            groups = key_groups_of(hash_batch(batch, keys), MAX_PARALLELISM)
            for subtask, aggregates in enumerate(subtasks):
                owned = key_group_range(subtask, parallelism, MAX_PARALLELISM)
                mine = (groups >= owned.start) & (groups < owned.stop)
                aggregates.update(batch.filter(pa.array(mine)))
        assert sorted(itertools.chain(*map(everything_in, subtasks))) == comparable(table.results())
        directories = [place.linked(aggregates.freeze()) for aggregates in subtasks]


def test_key_groups_that_are_not_owned_any_more_are_gone_from_a_database_that_is_opened(place):
    aggregates = place.aggregates(["name"])
    aggregates.update(random_batch(np.random.default_rng(13), 300, 200))
    directory = place.linked(aggregates.freeze())
    half = place.aggregates(["name"], disk=place.disk(directory), owned=range(2, 5))
    assert 0 < len(half) < len(aggregates)
    again = place.linked(half.freeze())
    assert opened(place, again, ["name"]) == everything_in(half)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("keys", KEYS, ids=",".join)
def test_a_snapshot_of_the_heap_is_restored_to_disk(place, keys, limit):
    random = np.random.default_rng(14)
    table, aggregates = heap(keys), place.aggregates(keys, limit)
    table.update(random_batch(random, 600, 900))
    for _, batch in table.freeze().batches_by_key_group():
        aggregates.restore(batch)
    assert len(aggregates) == len(table)
    batch = random_batch(random, 200, 900)
    assert rows_in(aggregates.update(batch)) == rows_in(table.update(batch))
    assert everything_in(aggregates) == comparable(table.results())


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("keys", KEYS, ids=",".join)
def test_a_linked_directory_is_read_by_key_group_and_restored_to_the_heap(place, keys, limit):
    random = np.random.default_rng(15)
    aggregates, table = place.aggregates(keys, limit), heap(keys)
    for _ in range(4):
        batch = random_batch(random, 200, 400)
        aggregates.update(batch)
        table.update(batch)
        directory = place.linked(aggregates.freeze())
    [read] = tables_in(directory)
    assert read.name == "aggregates"
    assert read.snapshot_schema.equals(table.snapshot_schema, check_metadata=True)
    expected = dict(table.freeze().batches_by_key_group())
    batches = dict(read.batches_by_key_group())
    assert list(batches) == sorted(expected)
    for group, batch in batches.items():
        assert comparable(batch) == comparable(expected[group])
    assert [group for group, _ in read.batches_by_key_group(range(2, 5))] == [
        group for group in batches if group in range(2, 5)
    ]
    restored = heap(keys)
    for batch in batches.values():
        restored.restore(batch)
    assert comparable(restored.results()) == comparable(table.results())


def test_a_database_with_narrower_columns_is_taken_over_and_one_with_others_is_refused(place):
    def counted(type_: pa.DataType, column: str, disk: Disk) -> PagedAggregates:
        schema = pa.schema([(column, type_)])
        count = [AggregateCall("count", None, "n", pa.int64())]
        what = (schema, [column], count, MAX_PARALLELISM)
        fit = KeptColumns(AggregateTable(*what).snapshot_schema, "top").fitted
        return PagedAggregates(*what, disk, EVERYTHING, 0, fit)

    narrow = counted(pa.int32(), "k", place.disk())
    narrow.update(pa.record_batch({"k": pa.array(range(2_000), pa.int32())}))
    directory = place.linked(narrow.freeze())
    disk = place.disk(directory)
    wide = counted(pa.int64(), "k", disk)
    result = wide.update(pa.record_batch({"k": pa.array([7, 2**40])}))
    assert result.to_pylist() == [{"k": 7, "n": 2}, {"k": 2**40, "n": 1}]
    assert len(wide) == 2_001
    with pytest.raises(StartRefused, match="has the columns k int64, n int64 in the snapshot"):
        counted(pa.int64(), "other", disk)
