"""Reductions with names hold what a plain dict would, on the heap, in pages, and on the way."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stillframe.errors import DataError, StartRefused, UserCodeError
from stillframe.key_groups import key_group_range
from stillframe.state import pages as pages_module
from stillframe.state import reductions as reductions_module
from stillframe.state.backends import Backend, Declared, Kind
from stillframe.state.disk import Disk, DiskMemory
from stillframe.state.disk_reading import tables_in
from stillframe.state.disk_rows import DiskBackend
from stillframe.state.handles import NamedReducingHandle, ReducingHandle, Scene, ValueHandle
from stillframe.state.heap import HeapBackend
from stillframe.state.reductions import reductions_of
from stillframe.state.rows import RowType
from stillframe.state.snapshots import read_keyed_snapshot, write_keyed_snapshot
from stillframe.storage.local import LocalStore

GROUPS = 8
KEYS = pa.schema([("n", pa.int64()), ("name", pa.string())])
ROW = pa.schema(
    [
        ("n", pa.int64()),  # as a column of the key: that is another matter
        ("f", pa.float64()),
        ("least", pa.int32()),
        ("last", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
    ]
)
FUNCTIONS = {"n": "sum", "f": "sum", "least": "min", "last": "max", "day": "min"}
MEMORY = DiskMemory(8 << 20)
NUMBERS = itertools.count()


@dataclass
class Place:
    """Where backends are made: `kind` is heap, disk, or one of these that is always short."""

    kind: str
    directory: Path

    def backend(self, linked: list[Path] | None = None, owned: range = range(GROUPS)) -> Any:
        if self.kind == "heap":
            return HeapBackend(KEYS, GROUPS)
        if self.kind == "heap that renumbers":
            return HeapBackend(KEYS, GROUPS, numbers_min=1)
        directory = self.new("database")
        if linked:
            disk = Disk.open(directory, MEMORY)
            for each in linked:
                disk.copy_groups(each, owned)
            disk.close()
        front_bytes = {"disk": None, "disk that always spills": 0, "disk of some": 560_000}
        return DiskBackend(KEYS, GROUPS, directory, MEMORY, front_bytes[self.kind])

    def new(self, what: str) -> Path:
        return self.directory / f"{what}-{next(NUMBERS)}"

    @property
    def is_on_disk(self) -> bool:
        return self.kind.startswith("disk")

    def frozen(self, backend: Any) -> Any:
        return backend.freeze_all(0) if self.is_on_disk else backend.tables[0].freeze(0)

    def written(self, frozen: Any) -> tuple[Path | None, list[Any]]:
        """A snapshot: the database, where there is one, and its rows in a file."""
        linked = None
        tables = [frozen]
        if self.is_on_disk:
            linked = self.new("linked")
            frozen.link(linked)
            tables = list(tables_in(linked))
        store = LocalStore(self.directory)
        files = []
        for table in tables:
            done = write_keyed_snapshot(store, f"file-{next(NUMBERS)}", table)
            files.append((store.read(done.path), done.key_groups, done.rows))
        frozen.release()
        return linked, files


PLACES = ["heap", "heap that renumbers", "disk", "disk that always spills", "disk of some"]


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


class Program:
    """One reducing state of a backend."""

    def __init__(
        self,
        backend: Backend[Any],
        schema: pa.Schema = ROW,
        reduce: Any = FUNCTIONS,
        name: str = "reduced",
    ) -> None:
        self.backend = backend
        self.scene: Scene[Any] = Scene()
        declared = Declared(name, Kind.VALUE, RowType(schema, named=True))
        self.table = backend.reduced(declared, reductions_of(name, schema, reduce))
        self.handle = NamedReducingHandle(self.scene, self.table)

    def each_of(self, keys: list[int]) -> Iterator[int]:
        """As a batch: all keys are asked for at once, then one after the other is at work."""
        columns = [pa.array(keys, pa.int64()), pa.array([f"name-{key}" for key in keys])]
        numbers, names = self.backend.keys_of(columns)
        for number, key in zip(numbers.tolist(), keys, strict=True):
            self.scene.enter(names[number])
            yield key

    def add(self, *added: tuple[int, tuple[Any, ...]]) -> None:
        rows = iter(added)
        for _ in self.each_of([key for key, _ in added]):
            self.handle.add(next(rows)[1])

    def clear(self, *keys: int) -> None:
        for _ in self.each_of(list(keys)):
            self.handle.clear()

    def seen(self, keys: Any) -> dict[int, Any]:
        found = {key: self.handle.get() for key in self.each_of(list(keys))}
        return {key: row for key, row in found.items() if row is not None}


# --- against a plain dict

ALL_KEYS = range(150)
keys = st.integers(0, ALL_KEYS.stop - 1)


def a_change(random: Random) -> tuple[int, Any]:
    """A key, and a row to add to it; None clears it."""
    key = random.choice(ALL_KEYS)
    if random.random() < 0.2:
        return key, None
    row = (
        random.randint(-(2**40), 2**40),
        random.randint(-8, 8) / 4,
        random.randint(-5, 5),
        datetime.fromtimestamp(random.randint(-(2**31), 2**32), UTC),
        date.fromordinal(random.randint(1, 2**20)),
    )
    return key, tuple(value if random.random() < 0.8 else None for value in row)


def reduced(kept: Any, more: Any) -> Any:
    if kept is None:
        return more
    functions = {"sum": sum, "min": min, "max": max}
    made = []
    for field, ours, theirs in zip(ROW.names, kept, more, strict=True):
        there = [each for each in (ours, theirs) if each is not None]
        made.append(functions[FUNCTIONS[field]](there) if there else None)
    return tuple(made)


class AgainstAPlainDict(RuleBasedStateMachine):
    place: Place

    def __init__(self) -> None:
        super().__init__()
        self.program = Program(self.place.backend())
        self.model: dict[int, Any] = {}
        self.frozen: list[tuple[Any, dict[int, Any]]] = []

    def teardown(self) -> None:
        self.program.backend.close()

    @rule(random=st.integers(0, 2**32).map(Random), looks=st.booleans())
    def change(self, random: Random, looks: bool) -> None:
        batch = [a_change(random) for _ in range(random.randint(1, 60))]
        todo = iter(batch)
        for key in self.program.each_of([key for key, _ in batch]):
            _, row = next(todo)
            if row is None:
                self.program.handle.clear()
                self.model.pop(key, None)
            else:
                self.program.handle.add(row)
                self.model[key] = reduced(self.model.get(key), row)
            if looks:
                assert self.program.handle.get() == self.model.get(key)

    @rule(first=keys, step=st.sampled_from([1, 3]))
    def add_to_many(self, first: int, step: int) -> None:
        row = (1, 0.25, first, None, date(2024, 1, 1))
        chosen = list(ALL_KEYS)[first::step]
        self.program.add(*((key, row) for key in chosen))
        for key in chosen:
            self.model[key] = reduced(self.model.get(key), row)

    @rule(first=keys)
    def clear_many(self, first: int) -> None:
        chosen = list(ALL_KEYS)[first:]
        self.program.clear(*chosen)
        for key in chosen:
            self.model.pop(key, None)

    @rule()
    def tidy(self) -> None:
        self.program.backend.tidy(0)

    @rule()
    def look(self) -> None:
        assert self.program.seen(ALL_KEYS) == self.model

    @precondition(lambda self: len(self.frozen) < 3)
    @rule()
    def freeze(self) -> None:
        self.frozen.append((self.place.frozen(self.program.backend), dict(self.model)))

    @precondition(lambda self: self.frozen)
    @rule()
    def give_up(self) -> None:
        self.frozen.pop(0)[0].release()

    @precondition(lambda self: self.frozen)
    @rule(
        parallelism=st.sampled_from([1, 2, 3]),
        into=st.sampled_from(["heap", "disk"]),
        by_files=st.booleans(),
    )
    def write_and_restore(self, parallelism: int, into: str, by_files: bool) -> None:
        frozen, expected = self.frozen.pop(0)
        snapshot = self.place.written(frozen)
        assert sum(rows for _, _, rows in snapshot[1]) == len(expected)
        programs = restored(Place(into, self.place.directory), snapshot, parallelism, by_files)
        found: dict[int, Any] = {}
        for program in programs:
            seen = program.seen(ALL_KEYS)
            assert not found.keys() & seen.keys()
            found |= seen
            program.backend.close()
        assert found == expected

    @precondition(lambda self: not self.frozen)
    @rule(by_files=st.booleans())
    def restart(self, by_files: bool) -> None:
        snapshot = self.place.written(self.place.frozen(self.program.backend))
        self.program.backend.close()
        (self.program,) = restored(self.place, snapshot, 1, by_files)
        assert self.program.seen(ALL_KEYS) == self.model


def restored(place: Place, snapshot: Any, parallelism: int, by_files: bool) -> list[Program]:
    linked, files = snapshot
    by_files |= linked is None or not place.is_on_disk
    programs = []
    for subtask in range(parallelism):
        owned = key_group_range(subtask, parallelism, GROUPS)
        program = Program(place.backend([] if by_files else [linked], owned))
        for buffer, key_groups, _ in files if by_files else ():
            for batch in read_keyed_snapshot(pa.py_buffer(buffer), key_groups, owned):
                program.table.restore(batch)
        programs.append(program)
    return programs


@pytest.mark.parametrize("folded_keys", [1, 8_192])
@pytest.mark.parametrize("kind", PLACES)
def test_reductions_are_those_of_a_plain_dict_through_snapshots_and_rescaling(
    kind: str, folded_keys: int, quick_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reductions_module, "_FOLDED_KEYS", folded_keys)
    monkeypatch.setattr(pages_module, "PAGE_ROWS_MAX", 4)
    monkeypatch.setattr(pages_module, "_ROWS_READ_AT_ONCE", 64)
    monkeypatch.setattr(pages_module, "_ROWS_WRITTEN_AT_ONCE", 16)
    machine = type("Machine", (AgainstAPlainDict,), {"place": Place(kind, quick_disk)})
    checks = settings(
        max_examples=8,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=checks)


# --- stories

TOTAL = pa.schema([("n", pa.int64())])
BOTH_KINDS = ["heap", "disk"]


def begun(kind: str, directory: Path, schema: pa.Schema, reduce: Any, **settings: Any) -> Program:
    return Program(Place(kind, directory).backend(), schema, reduce, **settings)


@pytest.mark.parametrize("kind", BOTH_KINDS)
def test_what_is_null_counts_for_nothing_but_the_key_is_there(kind: str, tmp_path: Path) -> None:
    program = begun(kind, tmp_path, TOTAL, "sum")

    program.add((1, (None,)), (2, (None,)), (2, (3,)), (2, (None,)))
    program.table.fold()
    program.add((2, (None,)))

    assert program.seen([1, 2, 3]) == {1: (None,), 2: (3,)}
    program.backend.close()


@pytest.mark.parametrize("kind", BOTH_KINDS)
def test_nan_is_larger_than_any_number_before_and_after_a_fold(kind: str, tmp_path: Path) -> None:
    schema = pa.schema([("least", pa.float32()), ("most", pa.float64())])
    program = begun(kind, tmp_path, schema, {"least": "min", "most": "max"})

    for value in (math.nan, 1.5, -math.inf):
        program.add((1, (value, value)))
        program.table.fold()
    program.add((2, (math.nan, 1.0)), (2, (2.0, math.nan)), (2, (3.0, 3.0)))

    least, most = program.seen([1])[1]
    assert least == -math.inf
    assert math.isnan(most)
    least, most = program.seen([2])[2]
    assert least == 2.0
    assert math.isnan(most)
    program.backend.close()


@pytest.mark.parametrize("folds_between", [False, True])
@pytest.mark.parametrize("kind", BOTH_KINDS)
def test_a_sum_that_leaves_the_range_of_a_long_is_an_error_that_names_the_state(
    kind: str, folds_between: bool, tmp_path: Path
) -> None:
    program = begun(kind, tmp_path, TOTAL, "sum", name="clicks")
    program.add((1, (2**63 - 1,)))
    if folds_between:
        program.table.fold()

    def add_more() -> None:
        program.add((1, (1,)))
        program.table.fold()

    with pytest.raises(DataError, match="state clicks has left the range of a 64-bit integer"):
        add_more()
    program.backend.close()


@pytest.mark.parametrize("kind", BOTH_KINDS)
def test_a_cleared_key_is_in_no_snapshot_and_begins_anew(kind: str, tmp_path: Path) -> None:
    place = Place(kind, tmp_path)
    program = Program(place.backend(), TOTAL, "sum")
    program.add(*((key, (key,)) for key in range(100)))
    place.written(place.frozen(program.backend))

    program.clear(*range(98))
    assert program.seen(range(100)) == {98: (98,), 99: (99,)}
    _, files = place.written(place.frozen(program.backend))
    assert [rows for _, _, rows in files] == [2]

    program.clear(98, 99)
    _, files = place.written(place.frozen(program.backend))
    assert sum(rows for _, _, rows in files) == 0

    program.add((5, (1,)))
    assert program.seen(range(100)) == {5: (1,)}
    program.backend.close()


def test_keys_that_come_and_go_leave_nothing_behind_in_the_pages(tmp_path: Path) -> None:
    place = Place("disk that always spills", tmp_path)
    program = Program(place.backend(), TOTAL, "sum")
    for first in range(0, 4_000, 100):
        program.add(*((key, (key,)) for key in range(first, first + 100)))
        program.backend.tidy(0)
        program.clear(*range(first, first + 100))
        program.backend.tidy(0)

    assert program.table._pages.key_count < 400
    program.backend.close()


@pytest.mark.parametrize("kind", BOTH_KINDS)
def test_a_snapshot_holds_what_was_there_then_whatever_comes_before_it_is_written(
    kind: str, tmp_path: Path
) -> None:
    place = Place(kind, tmp_path)
    program = Program(place.backend(), TOTAL, "sum")
    program.add((1, (1,)), (2, (2,)))
    frozen = place.frozen(program.backend)
    program.add((1, (10,)), (3, (3,)))
    program.clear(2)
    program.table.fold()

    _, files = place.written(frozen)

    kept = {}
    for buffer, key_groups, _ in files:
        for batch in read_keyed_snapshot(pa.py_buffer(buffer), key_groups, range(GROUPS)):
            kept |= {row["n"]: row["__value"] for row in batch.to_pylist()}
    assert kept == {1: {"n": 1}, 2: {"n": 2}}
    assert program.seen([1, 2, 3]) == {1: (11,), 3: (3,)}
    program.backend.close()


def test_a_state_that_has_not_changed_has_the_same_version(tmp_path: Path) -> None:
    program = begun("heap", tmp_path, TOTAL, "sum")
    versions = [program.table.version]
    for change in (lambda: program.add((1, (1,))), lambda: program.clear(1)):
        change()
        versions.append(program.table.version)
        program.table.fold()
        assert program.table.version == versions[-1]
    assert len(set(versions)) == 3


def handle_of_a_function(backend: Any) -> tuple[Scene[Any], ReducingHandle[Any]]:
    scene: Scene[Any] = Scene()
    declared = Declared("reduced", Kind.VALUE, RowType(TOTAL))
    value = ValueHandle(scene, backend.values(declared))
    return scene, ReducingHandle(value, lambda a, b: (a[0] + b[0],))


@pytest.mark.parametrize("front_bytes", [None, 0])
def test_a_database_goes_from_a_function_to_a_name_and_back(
    front_bytes: int | None, tmp_path: Path
) -> None:
    backend = DiskBackend(KEYS, GROUPS, tmp_path / "one", MEMORY, front_bytes)
    scene, handle = handle_of_a_function(backend)
    columns = [pa.array(range(50), pa.int64()), pa.array([f"name-{key}" for key in range(50)])]
    numbers, names = backend.keys_of(columns)
    for key, number in enumerate(numbers.tolist()):
        scene.enter(names[number])
        handle.add((key,))
    backend.freeze_all(0).link(tmp_path / "two")
    backend.close()

    named = Program(DiskBackend(KEYS, GROUPS, tmp_path / "two", MEMORY, front_bytes), TOTAL, "sum")
    assert named.seen(range(60)) == {key: (key,) for key in range(50)}
    named.add((7, (100,)))
    named.clear(8)
    named.backend.freeze_all(0).link(tmp_path / "three")
    named.backend.close()

    backend = DiskBackend(KEYS, GROUPS, tmp_path / "three", MEMORY, front_bytes)
    scene, handle = handle_of_a_function(backend)
    numbers, names = backend.keys_of(columns)
    found = {}
    for key, number in enumerate(numbers.tolist()):
        scene.enter(names[number])
        found[key] = handle.get()
    assert found == {key: (key,) for key in range(50)} | {7: (107,), 8: None}
    backend.freeze_all(0).link(tmp_path / "four")
    assert [table.name for table in tables_in(tmp_path / "four")] == ["reduced"]
    backend.close()


@pytest.mark.parametrize("kind", BOTH_KINDS)
def test_a_field_may_become_wider_and_another_be_added(kind: str, tmp_path: Path) -> None:
    place = Place(kind, tmp_path)
    before = Program(place.backend(), pa.schema([("least", pa.int32())]), "min")
    before.add(*((key, (-key,)) for key in range(40)))
    linked, files = place.written(place.frozen(before.backend))
    before.backend.close()

    wider = pa.schema([("least", pa.int64()), ("n", pa.int64())])
    reduce = {"n": "sum", "least": "min"}
    after = Program(place.backend([linked] if linked else None), wider, reduce)
    for buffer, key_groups, _ in files if linked is None else ():
        for batch in read_keyed_snapshot(pa.py_buffer(buffer), key_groups, range(GROUPS)):
            after.table.restore(batch)
    after.add((3, (-(2**40), 1)))

    expected = {key: (-key, None) for key in range(40)} | {3: (-(2**40), 1)}
    assert after.seen(range(50)) == expected
    after.backend.close()


def test_another_type_is_refused_with_both_schemas(tmp_path: Path) -> None:
    place = Place("disk", tmp_path)
    before = Program(place.backend(), TOTAL, "sum")
    before.add((1, (1,)))
    linked, _ = place.written(place.frozen(before.backend))
    before.backend.close()
    backend = place.backend([linked])

    with pytest.raises(StartRefused, match=r"struct<n: int64>.*struct<n: date32\[day\]>"):
        Program(backend, pa.schema([("n", pa.date32())]), "min")
    backend.close()


def test_a_dropped_state_is_gone_from_the_database(tmp_path: Path) -> None:
    program = begun("disk", tmp_path, TOTAL, "sum")
    program.add((1, (1,)))
    program.backend.freeze_all(0).link(tmp_path / "with")
    program.backend.drop("reduced")
    program.backend.freeze_all(0).link(tmp_path / "without")

    assert [table.name for table in tables_in(tmp_path / "with")] == ["reduced"]
    assert tables_in(tmp_path / "without") == []
    program.backend.close()


@pytest.mark.parametrize(
    ("schema", "reduce", "words"),
    [
        (TOTAL, "mean", "no 'mean' among 'sum', 'min' and 'max'"),
        (pa.schema([("n", pa.int32())]), "sum", "a sum is a long or a double.*not as int32"),
        (pa.schema([("n", pa.string())]), "max", "max is not made of string"),
        (pa.schema([("n", pa.date32())]), "sum", "a sum is a long or a double"),
        (ROW, {"n": "sum"}, "fields n, f, least, last, day and reductions of n:"),
        (TOTAL, {"m": "sum"}, "fields n and reductions of m:"),
        (pa.schema([]), "sum", "fields none and reductions of none"),
    ],
)
def test_a_reduction_that_cannot_be_kept_is_refused(
    schema: pa.Schema, reduce: Any, words: str
) -> None:
    with pytest.raises(UserCodeError, match=f"state clicks .*{words}"):
        reductions_of("clicks", schema, reduce)
