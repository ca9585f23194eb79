"""What every backend has to do, told with handles, against plain dicts."""

import copy
import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

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
from tries import tries

from stillframe.key_groups import (
    hash_columns,
    key_group_range,
    key_groups_of,
    subtask_of_key_group,
)
from stillframe.state.backends import Declared, Kind
from stillframe.state.disk import Disk, DiskMemory
from stillframe.state.disk_reading import tables_in
from stillframe.state.disk_rows import DiskBackend
from stillframe.state.handles import ListHandle, MapHandle, Scene, ValueHandle
from stillframe.state.heap import HeapBackend
from stillframe.state.rows import RowType
from stillframe.state.snapshots import read_keyed_snapshot, write_keyed_snapshot
from stillframe.storage.local import LocalStore

GROUPS = 16
KEYS = pa.schema([("app", pa.string()), ("day", pa.int32())])
COUNT = pa.schema([("n", pa.int64()), ("tags", pa.list_(pa.string()))])
USER = pa.schema([("user", pa.string())])
TTL_MS = 100
_FILES = itertools.count()


MEMORY = DiskMemory(8 << 20)


@dataclass
class Heap:
    """How the heap is made, snapshotted and restored."""

    make: Callable = HeapBackend
    is_on_disk = False

    def begun(self, directory, snapshots, owned):
        """A backend with what the snapshots hold of these key groups."""
        return self.make(KEYS, GROUPS)

    def frozen(self, backend, now_ms):
        return [(table.declared.name, table.freeze(now_ms)) for table in backend.tables]

    def snapshot(self, frozen, directory):
        """Written, as later and elsewhere."""
        files = files_of([(name, table) for name, table in frozen if len(table)], directory)
        self.forget(frozen)
        return Snapshot(files)

    def forget(self, frozen):
        for _, table in frozen:
            table.release()


@dataclass
class OnDisk:
    """How a database is: a snapshot is a directory of links, from which others take key groups."""

    make: Callable = DiskBackend
    is_on_disk = True

    def begun(self, directory, snapshots, owned):
        linked = [snapshot.linked for snapshot in snapshots if snapshot.linked]
        place = directory / f"database-{next(_FILES)}"
        if linked:
            disk = Disk.open(place, MEMORY)
            for each in linked:
                disk.copy_groups(each, owned)
            disk.close()
        return self.make(KEYS, GROUPS, place, MEMORY)

    def frozen(self, backend, now_ms):
        return backend.freeze_all(now_ms)

    def snapshot(self, frozen, directory):
        linked = directory / f"linked-{next(_FILES)}"
        frozen.link(linked)
        frozen.release()
        return Snapshot(
            files_of([(table.name, table) for table in tables_in(linked)], directory), linked
        )

    def forget(self, frozen):
        frozen.release()


@dataclass
class Snapshot:
    """The rows by key group, in the form all backends read; and the database, if there is one."""

    files: list
    linked: Path | None = None


BACKENDS = {
    "heap": Heap(),
    "heap that renumbers": Heap(partial(HeapBackend, numbers_min=1)),
    "disk": OnDisk(),
    "disk that always spills": OnDisk(partial(DiskBackend, buffer_bytes_max=0)),
}


def files_of(tables, directory):
    """Each as a file, and what a checkpoint keeps of it."""
    store = LocalStore(directory)
    files = []
    for name, table in tables:
        done = write_keyed_snapshot(store, f"snapshot-{next(_FILES)}", table)
        files.append((name, store.read(done.path), done.key_groups))
    return files


@dataclass
class Program:
    """Three states of each kind that has one, without and with a time to live."""

    backend: object
    scene: Scene = field(default_factory=Scene)

    def __post_init__(self):
        for suffix, ttl_ms in (("", None), ("_ttl", TTL_MS)):
            self.declare(suffix, ttl_ms)

    def declare(self, suffix, ttl_ms):
        def declared(name, kind, user_key=None):
            return Declared(name + suffix, kind, RowType(COUNT), user_key, ttl_ms is not None)

        values = self.backend.values(declared("value", Kind.VALUE))
        lists = self.backend.lists(declared("list", Kind.LIST))
        maps = self.backend.maps(declared("map", Kind.MAP, RowType(USER)))
        setattr(self, "value" + suffix, ValueHandle(self.scene, values, ttl_ms))
        setattr(self, "list" + suffix, ListHandle(self.scene, lists, ttl_ms))
        setattr(self, "map" + suffix, MapHandle(self.scene, maps, ttl_ms))

    def enter(self, key):
        columns = [pa.array([part], f.type) for part, f in zip(key, KEYS, strict=True)]
        numbers, names = self.backend.keys_of(columns)
        self.scene.enter(names[int(numbers[0])])

    def seen(self, keys):
        """All that a program can see of these keys."""
        found = {}
        for key in keys:
            self.enter(key)
            for suffix in ("", "_ttl"):
                found[key, "value" + suffix] = getattr(self, "value" + suffix).get()
                found[key, "list" + suffix] = list(getattr(self, "list" + suffix).get())
                mapped = getattr(self, "map" + suffix)
                found[key, "map" + suffix] = dict(mapped.items())
                one_by_one = {user: mapped.get(user) for user in ALL_USERS if mapped.contains(user)}
                assert one_by_one == found[key, "map" + suffix]
        return found


def restored(kind, snapshots, directory, parallelism=1, now_ms=0, by_files=True):
    """A program for each subtask, with what the snapshots hold of its key groups."""
    programs = []
    for subtask in range(parallelism):
        owned = key_group_range(subtask, parallelism, GROUPS)
        program = Program(kind.begun(directory, [] if by_files else snapshots, owned))
        program.scene.now_ms = now_ms
        tables = {table.declared.name: table for table in program.backend.tables}
        files = [file for snapshot in snapshots if by_files for file in snapshot.files]
        for name, buffer, key_groups in files:
            for batch in read_keyed_snapshot(pa.py_buffer(buffer), key_groups, owned):
                tables[name].restore(batch)
        programs.append(program)
    return programs


def seen_by_all(programs):
    """What the subtasks see together, each key by one of them; they are closed."""
    seen = [program.seen(ALL_KEYS) for program in programs]
    for program in programs:
        program.backend.close()
    nothing = (None, [], {})
    together = {}
    for place in seen[0]:
        found = [each[place] for each in seen if each[place] not in nothing]
        assert len(found) <= 1, place
        together[place] = found[0] if found else next(e[place] for e in seen)
    return together


ALL_KEYS = [("a", 1), ("b", 1), (None, None)]
ALL_USERS = [("u",), ("v",), ("w",), (None,)]
rows = st.tuples(
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3),
)
users = st.sampled_from(ALL_USERS)
keys = st.sampled_from(ALL_KEYS)
suffixes = st.sampled_from(["", "_ttl"])


class AgainstPlainDicts(RuleBasedStateMachine):
    """Random changes, snapshots that are written later, restores at another parallelism."""

    kind: Heap | OnDisk
    directory: Path

    def __init__(self):
        super().__init__()
        (self.program,) = restored(self.kind, [], self.directory)
        self.model = {}
        self.frozen = []

    def teardown(self):
        self.program.backend.close()

    # --- the model: name and key -> [(user key, row, expires)]

    def entries(self, name, key):
        now = self.program.scene.now_ms
        kept = self.model.get((name, key), [])
        return [each for each in kept if each[2] is None or each[2] > now]

    def expires(self, suffix):
        return self.program.scene.now_ms + TTL_MS if suffix else None

    def expected(self):
        found = {}
        for key in ALL_KEYS:
            for suffix in ("", "_ttl"):
                value = self.entries("value" + suffix, key)
                found[key, "value" + suffix] = value[0][1] if value else None
                listed = self.entries("list" + suffix, key)
                found[key, "list" + suffix] = [row for _, row, _ in listed]
                mapped = self.entries("map" + suffix, key)
                found[key, "map" + suffix] = {user: row for user, row, _ in mapped}
        return copy.deepcopy(found)

    @rule(key=keys, suffix=suffixes, row=rows)
    def update(self, key, suffix, row):
        self.program.enter(key)
        getattr(self.program, "value" + suffix).update(row)
        self.model["value" + suffix, key] = [(None, copy.deepcopy(row), self.expires(suffix))]
        spoil(row)

    @rule(
        key=keys, suffix=suffixes, added=st.lists(rows, min_size=1, max_size=3), put=st.booleans()
    )
    def append(self, key, suffix, added, put):
        self.program.enter(key)
        handle = getattr(self.program, "list" + suffix)
        (handle.put if put else handle.extend)(added)
        new = [(None, copy.deepcopy(row), self.expires(suffix)) for row in added]
        before = [] if put else self.entries("list" + suffix, key)
        self.model["list" + suffix, key] = before + new
        for row in added:
            spoil(row)

    @rule(key=keys, suffix=suffixes, user=users, row=rows)
    def put(self, key, suffix, user, row):
        self.program.enter(key)
        getattr(self.program, "map" + suffix).put(user, row)
        others = [each for each in self.entries("map" + suffix, key) if each[0] != user]
        new = (user, copy.deepcopy(row), self.expires(suffix))
        self.model["map" + suffix, key] = [*others, new]

    @rule(key=keys, suffix=suffixes, user=users)
    def remove(self, key, suffix, user):
        self.program.enter(key)
        getattr(self.program, "map" + suffix).remove(user)
        left = [each for each in self.entries("map" + suffix, key) if each[0] != user]
        self.model["map" + suffix, key] = left

    @rule(key=keys, names=st.sets(st.sampled_from(["value", "list", "map"])), suffix=suffixes)
    def clear(self, key, names, suffix):
        self.program.enter(key)
        for name in names:
            getattr(self.program, name + suffix).clear()
            self.model[name + suffix, key] = []

    @rule(later_ms=st.sampled_from([1, TTL_MS // 2, TTL_MS]))
    def wait(self, later_ms):
        self.program.scene.now_ms += later_ms
        for _ in range(4):
            self.program.backend.tidy(self.program.scene.now_ms)

    @rule()
    def look(self):
        seen = self.program.seen(ALL_KEYS)
        assert seen == self.expected()
        for found in seen.values():  # what was handed out is nobody else's
            spoil(found)
        assert self.program.seen(ALL_KEYS) == self.expected()

    @precondition(lambda self: len(self.frozen) < 3)
    @rule()
    def freeze(self):
        now_ms = self.program.scene.now_ms
        frozen = self.kind.frozen(self.program.backend, now_ms)
        self.frozen.append((frozen, self.expected(), now_ms))

    @precondition(lambda self: self.frozen)
    @rule(is_said=st.booleans())
    def give_up(self, is_said):
        frozen, _, _ = self.frozen.pop(0)
        if is_said:
            self.kind.forget(frozen)

    @precondition(lambda self: self.frozen)
    @rule(
        parallelism=st.sampled_from([1, 2, 3]),
        into=st.sampled_from(["heap", "disk"]),
        by_files=st.booleans(),
    )
    def write_and_restore(self, parallelism, into, by_files):
        frozen, expected, now_ms = self.frozen.pop(0)
        snapshot = self.kind.snapshot(frozen, self.directory)
        by_files |= snapshot.linked is None or into == "heap"
        means = (BACKENDS[into], [snapshot], self.directory, parallelism, now_ms, by_files)
        assert seen_by_all(restored(*means)) == expected

    @precondition(lambda self: not self.frozen)
    @rule(by_files=st.booleans())
    def restart(self, by_files):
        now_ms = self.program.scene.now_ms
        expected = self.expected()
        frozen = self.kind.frozen(self.program.backend, now_ms)
        snapshot = self.kind.snapshot(frozen, self.directory)
        self.program.backend.close()
        by_files |= not self.kind.is_on_disk
        means = (self.kind, [snapshot], self.directory, 1, now_ms, by_files)
        (self.program,) = restored(*means)
        assert self.program.seen(ALL_KEYS) == expected


def spoil(value):
    """Change in place whatever of it can be changed."""
    if isinstance(value, list):
        for each in value:
            spoil(each)
        value.append("spoilt")
    if isinstance(value, tuple):
        for each in value:
            spoil(each)
    if isinstance(value, dict):
        for each in value.values():
            spoil(each)
        value["spoilt"] = None


@pytest.fixture
def quick_disk(tmp_path):
    """A directory in memory where there is one: hundreds of databases are made here."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_does_what_plain_dicts_would_through_snapshots_and_rescaling(name, quick_disk):
    means = {"kind": BACKENDS[name], "directory": quick_disk}
    machine = type("Machine", (AgainstPlainDicts,), means)
    checks = settings(
        max_examples=tries(40),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=checks)


def a_row_of(key, number):
    return (number, [str(key[0]), None])


@pytest.mark.parametrize(
    ("name", "by_files"),
    [("heap", True), ("disk", True), ("disk", False)],
    ids=["heap", "disk by files", "disk by key groups"],
)
def test_a_job_is_rescaled_from_two_to_three_to_one_to_four_without_a_row_lost(
    name, by_files, quick_disk
):
    kind = BACKENDS[name]
    lists = {key: [] for key in ALL_KEYS}
    snapshots = []
    for round_, parallelism in enumerate([2, 3, 1, 4]):
        programs = restored(kind, snapshots, quick_disk, parallelism, 0, by_files)
        for key in ALL_KEYS:
            program = programs[owner_of(key, parallelism)]
            program.enter(key)
            program.list.append(a_row_of(key, round_))
            program.map.put(ALL_USERS[round_], a_row_of(key, round_))
            lists[key].append(a_row_of(key, round_))
        frozen = [kind.frozen(program.backend, 0) for program in programs]
        snapshots = [kind.snapshot(each, quick_disk) for each in frozen]
        seen = seen_by_all(programs)
        for key in ALL_KEYS:
            assert seen[key, "list"] == lists[key]
            assert seen[key, "map"] == dict(zip(ALL_USERS, lists[key], strict=False))


def owner_of(key, parallelism):
    columns = [pa.array([part], f.type) for part, f in zip(key, KEYS, strict=True)]
    group = int(key_groups_of(hash_columns(columns), GROUPS)[0])
    return subtask_of_key_group(group, parallelism, GROUPS)
