"""What every backend has to do, told with handles, against plain dicts."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

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

from stillframe.key_groups import key_group_range
from stillframe.state.backends import Declared, Kind
from stillframe.state.handles import ListHandle, MapHandle, Scene, ValueHandle
from stillframe.state.heap import HeapBackend
from stillframe.state.rows import RowType
from stillframe.state.snapshots import read_keyed_snapshot, write_keyed_snapshot
from stillframe.storage.local import LocalStore

BACKENDS = {
    "heap": HeapBackend,
    "heap that renumbers": partial(HeapBackend, numbers_min=1),
}
GROUPS = 16
KEYS = pa.schema([("app", pa.string()), ("day", pa.int32())])
COUNT = pa.schema([("n", pa.int64()), ("tags", pa.list_(pa.string()))])
USER = pa.schema([("user", pa.string())])
TTL_MS = 100
_FILES = itertools.count()


@dataclass
class Program:
    """Three states of each kind that has one, without and with a time to live."""

    make: Callable
    backend: object = None
    scene: Scene = field(default_factory=Scene)

    def __post_init__(self):
        self.backend = self.make(KEYS, GROUPS)
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
                found[key, "map" + suffix] = dict(getattr(self, "map" + suffix).items())
        return found

    def freeze(self):
        tables = self.backend.tables
        return [(table.declared.name, table.freeze(self.scene.now_ms)) for table in tables]


def written(frozen, directory):
    """The frozen states as files, and what a checkpoint keeps of each."""
    store = LocalStore(directory)
    files = []
    for name, table in frozen:
        if len(table):
            done = write_keyed_snapshot(store, f"snapshot-{next(_FILES)}", table)
            files.append((name, store.read(done.path), done.key_groups))
        table.release()
    return files


def restored(make, files, parallelism=1, now_ms=0):
    """A program for each subtask, with what the files hold of its key groups."""
    programs = []
    for subtask in range(parallelism):
        program = Program(make)
        program.scene.now_ms = now_ms
        owned = key_group_range(subtask, parallelism, GROUPS)
        tables = {table.declared.name: table for table in program.backend.tables}
        for name, buffer, key_groups in files:
            for batch in read_keyed_snapshot(pa.py_buffer(buffer), key_groups, owned):
                tables[name].restore(batch)
        programs.append(program)
    return programs


ALL_KEYS = [(app, day) for app in ("a", "b", None) for day in (1, 2, None)]
rows = st.tuples(
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3),
)
users = st.tuples(st.none() | st.sampled_from(["u", "v", "w"]))
keys = st.sampled_from(ALL_KEYS)
suffixes = st.sampled_from(["", "_ttl"])


class AgainstPlainDicts(RuleBasedStateMachine):
    """Random changes, snapshots that are written later, restores at another parallelism."""

    make: Callable
    directory: object

    def __init__(self):
        super().__init__()
        self.program = Program(type(self).make)
        self.model = {}
        self.frozen = []

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

    @rule(key=keys, name=st.sampled_from(["value", "list", "map"]), suffix=suffixes)
    def clear(self, key, name, suffix):
        self.program.enter(key)
        getattr(self.program, name + suffix).clear()
        self.model[name + suffix, key] = []

    @rule(later_ms=st.sampled_from([1, TTL_MS // 2, TTL_MS]))
    def wait(self, later_ms):
        self.program.scene.now_ms += later_ms
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
        self.frozen.append((self.program.freeze(), self.expected(), now_ms))

    @precondition(lambda self: self.frozen)
    @rule(parallelism=st.sampled_from([1, 2, 3, 16]))
    def write_and_restore(self, parallelism):
        frozen, expected, now_ms = self.frozen.pop(0)
        files = written(frozen, self.directory)
        make = type(self).make
        seen = [program.seen(ALL_KEYS) for program in restored(make, files, parallelism, now_ms)]
        nothing = (None, [], {})
        for place, wanted in expected.items():
            found = [each[place] for each in seen if each[place] not in nothing]
            assert found == ([] if wanted in nothing else [wanted]), place

    @precondition(lambda self: not self.frozen)
    @rule()
    def restart(self):
        now_ms = self.program.scene.now_ms
        expected = self.expected()
        files = written(self.program.freeze(), self.directory)
        (self.program,) = restored(type(self).make, files, 1, now_ms)
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


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_does_what_plain_dicts_would_through_snapshots_and_rescaling(name, tmp_path):
    means = {"make": staticmethod(BACKENDS[name]), "directory": tmp_path}
    machine = type("Machine", (AgainstPlainDicts,), means)
    checks = settings(
        max_examples=25,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=checks)
