"""The timers of a subtask: one per key, time and clock; fired in order; found by key group."""

import itertools
from collections import Counter
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from stillframe.key_groups import hash_columns, key_group_range, key_groups_of
from stillframe.state.snapshots import read_keyed_snapshot, write_keyed_snapshot
from stillframe.state.timers import TimerTable
from stillframe.storage.local import LocalStore

GROUPS = 16
NAMED = pa.schema([("app", pa.string())])
PAIRS = pa.schema([("app", pa.string()), ("user", pa.int64())])
LAST_US = 2**63 - 1
_FILES = itertools.count()


class Timers:
    """A table, and what it is asked in plain Python."""

    def __init__(self, schema=NAMED, numbers_min=16_384):
        self.schema = schema
        self.table = TimerTable(schema, GROUPS, numbers_min)

    def register(self, *timers, clock="event"):
        self.table.register(*self.columns(timers), clock)

    def delete(self, *timers, clock="event"):
        self.table.delete(*self.columns(timers), clock)

    def take(self, until_us=LAST_US, rows_max=1024, clock="event"):
        return self.plainly(self.table.take(clock, until_us, rows_max))

    def take_all(self, until_us=LAST_US, rows_max=1024, clock="event"):
        taken = []
        while batch := self.take(until_us, rows_max, clock):
            taken += batch
        return taken

    def registered(self, *keys, clock="event"):
        asked = self.columns([(*self.key(each), 0) for each in keys])[0] if keys else None
        return self.plainly(self.table.registered(asked, clock))

    def key(self, key):
        return key if isinstance(key, tuple) else (key,)

    def columns(self, timers):
        columns = list(zip(*timers, strict=True)) or [()] * (len(self.schema) + 1)
        keys = [pa.array(c, f.type) for c, f in zip(columns[:-1], self.schema, strict=True)]
        return keys, np.array(columns[-1], dtype=np.int64)

    def plainly(self, batch):
        assert batch.schema.field("time").type == pa.timestamp("us", "UTC")
        columns = [*batch.columns[:-1], batch.column("time").cast(pa.int64())]
        return list(zip(*(column.to_pylist() for column in columns), strict=True))


def restored_from(store, timers, subtask=0, parallelism=1):
    frozen = timers.table.freeze()
    written = write_keyed_snapshot(store, f"1/{next(_FILES)}", frozen)
    return read_back(store, written, timers.schema, subtask, parallelism)


def read_back(store, written, schema, subtask=0, parallelism=1):
    buffer = store.read_verified(written.path, written.length_bytes, written.crc32)
    again = Timers(schema)
    owned = key_group_range(subtask, parallelism, GROUPS)
    for batch in read_keyed_snapshot(buffer, written.key_groups, owned):
        again.table.restore(batch)
    return again


def test_timers_are_taken_in_the_order_of_their_times_whenever_they_were_registered():
    timers = Timers()
    timers.register(("a", 30), ("b", 10))
    timers.register(("c", 20), ("d", -5))

    assert timers.take() == [("d", -5), ("b", 10), ("c", 20), ("a", 30)]
    assert timers.take() == []
    assert timers.table.next_us("event") is None


def test_only_those_until_the_given_time_are_taken():
    timers = Timers()
    timers.register(("a", 10), ("b", 11), ("c", 12))

    assert timers.take(until_us=11) == [("a", 10), ("b", 11)]
    assert timers.take(until_us=11) == []
    assert timers.table.next_us("event") == 12


def test_the_same_timer_registered_again_is_one_timer():
    timers = Timers()
    timers.register(("a", 10), ("a", 10), ("a", 11))
    timers.register(("a", 10))

    assert len(timers.table) == 2
    assert timers.take_all() == [("a", 10), ("a", 11)]


def test_a_timer_that_has_fired_may_be_registered_again():
    timers = Timers()
    timers.register(("a", 10))
    timers.take()
    timers.register(("a", 10))

    assert timers.take() == [("a", 10)]
    assert timers.take() == []


def test_a_timer_that_was_deleted_may_be_registered_again_and_fires_once():
    timers = Timers()
    timers.register(("a", 10), ("b", 10))
    timers.delete(("a", 10), ("a", 10), ("a", 99), ("nobody", 10))
    assert timers.registered() == [("b", 10)]
    timers.register(("a", 10))

    assert len(timers.table) == 2
    assert sorted(timers.take_all()) == [("a", 10), ("b", 10)]


def test_two_timers_of_one_key_are_never_taken_together():
    timers = Timers()
    timers.register(("a", 1), ("b", 2), ("a", 3), ("b", 4), ("b", 5))

    assert timers.take() == [("a", 1), ("b", 2)]
    timers.delete(("b", 4))
    assert timers.take() == [("a", 3), ("b", 5)]


def test_no_more_are_taken_than_asked_for():
    timers = Timers()
    timers.register(*((f"app-{i}", i) for i in range(100)))

    assert len(timers.take(rows_max=7)) == 7
    assert timers.take(rows_max=2) == [("app-7", 7), ("app-8", 8)]


def test_the_clocks_know_nothing_of_each_other():
    timers = Timers()
    timers.register(("a", 10))
    timers.register(("a", 10), ("a", 5), clock="processing")
    timers.delete(("a", 10))

    assert timers.take() == []
    assert timers.take_all(clock="processing") == [("a", 5), ("a", 10)]


def test_null_is_a_key_and_so_is_a_pair():
    timers = Timers(PAIRS)
    timers.register(("a", 1, 10), ("a", None, 10), (None, None, 10))

    assert set(timers.take()) == {("a", 1, 10), ("a", None, 10), (None, None, 10)}


def test_the_timers_of_some_keys_can_be_listed():
    timers = Timers()
    timers.register(("a", 30), ("b", 20), ("a", 10))

    assert timers.registered("a", "nobody") == [("a", 10), ("a", 30)]
    assert timers.registered("nobody") == []
    assert timers.registered() == [("a", 10), ("b", 20), ("a", 30)]


def test_a_frozen_table_does_not_show_what_happens_later(tmp_path):
    store = LocalStore(tmp_path)
    timers = Timers()
    timers.register(("a", 1), ("b", 2), ("c", 3))
    frozen = timers.table.freeze()
    timers.take(rows_max=1)
    timers.delete(("b", 2))
    timers.register(("d", 4))

    written = write_keyed_snapshot(store, "1/0", frozen)
    assert (len(frozen), written.rows) == (3, 3)
    assert read_back(store, written, NAMED).take_all() == [("a", 1), ("b", 2), ("c", 3)]


@pytest.mark.parametrize("parallelism", [1, 3, 16])
def test_timers_go_with_their_key_group_at_any_parallelism(tmp_path, parallelism):
    store = LocalStore(tmp_path)
    timers = Timers()
    kept = [(f"app-{i % 70}", i) for i in range(300)]
    timers.register(*kept)
    timers.register(("app-1", 7), clock="processing")
    found, by_clock = [], []
    for subtask in range(parallelism):
        again = restored_from(store, timers, subtask, parallelism)
        owned = key_group_range(subtask, parallelism, GROUPS)
        here = again.take_all()
        groups = key_groups_of(hash_columns([pa.array([app for app, _ in here])]), GROUPS)
        assert set(groups.tolist()) <= set(owned)
        found += here
        by_clock += again.take_all(clock="processing")

    assert Counter(found) == Counter(kept)
    assert by_clock == [("app-1", 7)]


def test_another_version_after_each_change_and_the_same_without():
    timers = Timers()
    seen = [timers.table.version]
    timers.register(("a", 1))
    seen.append(timers.table.version)
    timers.registered("a")
    timers.table.freeze()
    assert timers.table.version == seen[-1]
    timers.delete(("a", 1))
    seen.append(timers.table.version)
    timers.register(("b", 1))
    timers.take()
    seen.append(timers.table.version)

    assert len(set(seen)) == 4


def test_what_is_gone_does_not_take_room_for_ever():
    """As sessions do it: each record moves the timer of its key a little further."""
    timers = Timers(pa.schema([("user", pa.int64())]))
    users = pa.array(np.arange(1000))
    last = np.zeros(1000, dtype=np.int64)
    for round_ in range(200):
        timers.table.delete([users], last, "event")
        last = np.full(1000, round_) + np.arange(1000) % 7
        timers.table.register([users], last, "event")

    assert len(timers.table) == 1000
    assert timers.table.numbers < 40_000
    assert sorted(timers.take_all()) == list(zip(range(1000), last.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_it_is_what_a_set_of_timers_would_be(tmp_path, seed):
    random = Random(seed)
    store = LocalStore(tmp_path)
    timers = Timers(PAIRS, random.choice([10, 16_384]))
    model = {"event": set(), "processing": set()}
    keys = random.choice([2, 20, 400])
    latest = random.choice([5, 1000, 10**15])

    def some():
        return [
            (f"app-{random.randrange(keys)}", random.choice([None, 1, 2]), random.randrange(latest))
            for _ in range(random.choice([0, 1, 5, 300]))
        ]

    for step in range(60):
        clock = random.choice(["event", "event", "processing"])
        match random.choice(["register", "register", "delete", "take", "list", "restore"]):
            case "register":
                given = some()
                timers.register(*given, clock=clock)
                model[clock] |= set(given)
            case "delete":
                known = sorted(model[clock], key=repr)
                given = random.sample(known, len(known) // 3) + some()
                timers.delete(*given, clock=clock)
                model[clock] -= set(given)
            case "take":
                until_us, rows_max = random.randrange(latest), random.choice([1, 10, 1024])
                taken = timers.take(until_us, rows_max, clock)
                due = sorted(time for *_, time in model[clock] if time <= until_us)
                assert bool(taken) == bool(due)
                assert [time for *_, time in taken] == due[: len(taken)]
                assert len({each[:-1] for each in taken}) == len(taken) <= rows_max
                assert set(taken) <= model[clock]
                model[clock] -= set(taken)
            case "list":
                listed = timers.registered(clock=clock)
                assert set(listed) == model[clock]
                assert len(listed) == len(model[clock])
                assert listed == sorted(listed, key=lambda each: each[-1])
            case "restore" if step % 3 == 0:
                timers = restored_from(store, timers, parallelism=1, subtask=0)
        assert len(timers.table) == sum(map(len, model.values()))
        earliest = min((time for *_, time in model[clock]), default=None)
        assert timers.table.next_us(clock) == earliest
    for clock, left in model.items():
        assert Counter(timers.take_all(clock=clock)) == Counter(left)
