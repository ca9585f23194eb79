"""One database, and the states of handles in it: who writes when, and what a snapshot may hold."""

import datetime
import decimal
import math
import os
import shutil
import sys
import threading
import time

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillframe.errors import SnapshotDamaged, StartRefused, StorageError
from stillframe.state.backends import EXPIRES, VALUE, Declared, Kind
from stillframe.state.disk import Changes, Disk, DiskMemory
from stillframe.state.disk_layout import Layout, say_layout
from stillframe.state.disk_reading import tables_in
from stillframe.state.disk_rows import DiskBackend
from stillframe.state.heap import HeapBackend
from stillframe.state.key_timers import KeyTimers
from stillframe.state.row_codec import RowCodec
from stillframe.state.rows import RowType

MEMORY = DiskMemory(8 << 20)
GROUPS = 16
KEYS = pa.schema([("user", pa.int64())])
COUNT = RowType(pa.schema([("n", pa.int64())]))
COUNTS = Declared("counts", Kind.VALUE, COUNT)
VISITS = Declared("visits", Kind.LIST, COUNT)
PAGES = Declared("pages", Kind.MAP, COUNT, COUNT)
FADING = Declared("fading", Kind.VALUE, COUNT, expires=True)
FADING_VISITS = Declared("fading visits", Kind.LIST, COUNT, expires=True)
FADING_PAGES = Declared("fading pages", Kind.MAP, COUNT, COUNT, expires=True)


@pytest.fixture
def quick_turns():
    """Threads take turns a thousand times as often as they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def a_backend(directory, **settings):
    return DiskBackend(KEYS, GROUPS, directory, MEMORY, **settings)


def names_of(backend, users):
    numbers, names = backend.keys_of([pa.array(users, pa.int64())])
    return [names[number] for number in numbers.tolist()]


def rows_in(directory, name="counts"):
    """The rows of a state in a linked directory, as dicts."""
    (table,) = [table for table in tables_in(directory) if table.name == name]
    return [row for _, batch in table.batches_by_key_group() for row in batch.to_pylist()]


def counts_in(directory):
    return {row["user"]: row[VALUE]["n"] for row in rows_in(directory)}


# --- one database


def a_disk_with(directory, entries):
    disk = Disk.open(directory, MEMORY)
    changes = Changes()
    for key, value in entries.items():
        changes.put(key, value)
    disk.write(changes)
    return disk


def test_a_database_answers_what_was_written_in_its_order(tmp_path):
    disk = a_disk_with(tmp_path / "db", {b"a": b"1", b"b": b"2", b"c": b"3"})
    changes = Changes()
    changes.delete_range(b"a", b"c")
    changes.put(b"b", b"4")
    changes.delete(b"c")
    disk.write(changes)
    assert list(disk.scan(b"a", b"z")) == [(b"b", b"4")]
    assert disk.get_all([b"a", b"b", b"c"]) == [None, b"4", None]
    assert list(disk.scan(b"b", b"b")) == []
    disk.close()
    disk.close()
    with pytest.raises(StorageError, match="closed"):
        disk.get(b"a")


def test_entries_are_read_some_at_a_time_bounded_in_number_and_bytes(tmp_path):
    entries = {b"%04d" % number: b"of 12 bytes." for number in range(1000)}
    disk = a_disk_with(tmp_path / "db", entries)

    def lengths(entries_max, bytes_max, stop=b"\xff"):
        slices = list(disk.scan_slices(b"", stop, entries_max, bytes_max))
        assert [entry for each in slices for entry in each] == list(disk.scan(b"", stop))
        return [len(each) for each in slices]

    assert lengths(400, 1 << 20) == [400, 400, 200]
    assert lengths(1000, 1 << 20) == [1000]
    assert lengths(5, 1 << 20, b"0010") == [5, 5]
    assert lengths(1000, 1024) == [64] * 15 + [40]
    assert lengths(1000, 1) == [32] * 31 + [8]
    assert lengths(5, 5, b"0000") == []
    disk.close()


def test_a_link_taken_while_another_thread_writes_holds_whole_changes(tmp_path):
    disk = Disk.open(tmp_path / "db", MEMORY)
    written = [0]
    done = threading.Event()

    def write():
        while not done.is_set():
            number = written[0] + 1
            changes = Changes()
            changes.put(b"left", b"%d" % number)
            changes.put(b"right", b"%d" % number)
            disk.write(changes)
            written[0] = number

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for place in range(5):
            before = written[0]
            disk.link(tmp_path / f"linked-{place}")
            linked = Disk.open_to_read(tmp_path / f"linked-{place}", MEMORY)
            left, right = linked.get_all([b"left", b"right"])
            linked.close()
            assert left == right
            assert before == 0 or int(left) >= before
    finally:
        done.set()
        thread.join()
    disk.close()


def pieces(count, rows=250):
    """Changes of a quarter of a megabyte that cannot be compressed, each with its number."""
    for number in range(count):
        changes = Changes()
        for row in range(rows):
            changes.put(b"%06d-%04d" % (number, row), os.urandom(1000))
        changes.put(b"last", b"%d" % number)
        yield changes


def test_writes_for_which_memory_has_to_be_flushed_first_are_all_there(tmp_path):
    disk = Disk.open(tmp_path / "db", DiskMemory(4 << 20))
    for changes in pieces(160):
        disk.write(changes)

    assert disk.get(b"last") == b"159"
    assert sum(1 for _ in disk.scan(b"0", b"1")) == 160 * 250
    disk.close()


def test_a_link_taken_while_files_are_flushed_and_merged_is_a_whole_database(tmp_path):
    memory = DiskMemory(4 << 20)
    disk = Disk.open(tmp_path / "db", memory)
    written, done = [-1], threading.Event()

    def write():
        for number, changes in enumerate(pieces(2_000)):
            if done.is_set():
                return
            disk.write(changes)
            written[0] = number

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for place in range(8):
            before = written[0]
            disk.link(tmp_path / f"linked-{place}")
            linked = Disk.open(tmp_path / f"linked-{place}", memory)
            last = int(linked.get(b"last") or b"-1")
            rows = sum(1 for _ in linked.scan(b"0", b"1"))
            linked.close()
            assert last >= before
            assert rows == (last + 1) * 250
    finally:
        done.set()
        thread.join()
    disk.close()


def test_a_file_that_is_still_being_written_is_in_no_link(tmp_path):
    """It would be stored half done, and later checkpoints would share it by its name."""
    disk = a_disk_with(tmp_path / "db", {b"\0\1a": b"1"})
    disk.flush()
    (whole,) = (tmp_path / "db").glob("*.sst")
    (tmp_path / "db" / "000999.sst").touch()
    disk.link(tmp_path / "linked")
    assert [file.name for file in (tmp_path / "linked").glob("*.sst")] == [whole.name]
    disk.close()


def test_key_groups_are_taken_from_another_database_with_what_it_says_of_itself(tmp_path):
    entries = {b"\0\1a": b"1", b"\0\2a": b"2", b"\0\3a": b"3", b"\xff\xffname": b"x"}
    a_disk_with(tmp_path / "one", entries).link(tmp_path / "linked")
    disk = Disk.open(tmp_path / "other", MEMORY)
    disk.copy_groups(tmp_path / "linked", range(2, 3))
    assert dict(disk.scan(b"", b"\xff\xff\xff")) == {b"\0\2a": b"2", b"\xff\xffname": b"x"}
    disk.close()


def a_linked_database(tmp_path):
    entries = {b"%06d" % number: b"%d" % number * 20 for number in range(5000)}
    disk = a_disk_with(tmp_path / "db", entries)
    disk.link(tmp_path / "linked")
    disk.close()
    return tmp_path / "linked"


@pytest.mark.parametrize("ending", [".sst", "CURRENT", "MANIFEST-*"])
@pytest.mark.parametrize("harm", ["missing", "cut short"])
def test_a_database_with_a_file_missing_or_cut_short_is_not_opened(ending, harm, tmp_path):
    linked = a_linked_database(tmp_path)
    (file, *_) = linked.glob("*.sst" if ending == ".sst" else ending)
    data = file.read_bytes()
    file.unlink()
    if harm == "cut short":
        file.write_bytes(data[: len(data) // 3])
    for opened in (Disk.open, Disk.open_to_read):
        with pytest.raises(SnapshotDamaged, match=r"missing or damaged .*restore a checkpoint"):
            opened(linked, MEMORY)


def test_a_changed_byte_is_an_error_for_every_reader_and_never_an_end(tmp_path):
    linked = a_linked_database(tmp_path)
    (file,) = linked.glob("*.sst")
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 0xFF
    file.unlink()  # it is linked: the original stays whole
    file.write_bytes(data)
    disk = Disk.open_to_read(linked, DiskMemory(8 << 20))
    with pytest.raises(SnapshotDamaged, match="checksum"):
        list(disk.scan(b"", b"\xff"))
    with pytest.raises(SnapshotDamaged, match="checksum"):
        list(disk.scan_slices(b"", b"\xff", 100, 1 << 20))
    with pytest.raises(SnapshotDamaged, match="checksum"):
        disk.get_all([b"%06d" % number for number in range(5000)])
    disk.close()


# --- snapshots in flight


def test_a_snapshot_that_is_never_linked_is_in_the_next_one(tmp_path):
    backend = a_backend(tmp_path / "db")
    counts = backend.values(COUNTS)
    one, two = names_of(backend, [1, 2])
    counts.put(one, (10,), None)
    backend.freeze_all(0)
    counts.put(two, (20,), None)
    assert counts.get(one, 0) == (10,)
    backend.freeze_all(0).link(tmp_path / "linked")
    assert counts_in(tmp_path / "linked") == {1: 10, 2: 20}
    assert (counts.get(one, 0), counts.get(two, 0)) == ((10,), (20,))
    backend.close()


def test_two_snapshots_in_flight_each_hold_their_own(tmp_path):
    backend = a_backend(tmp_path / "db")
    counts, visits = backend.values(COUNTS), backend.lists(VISITS)
    (one,) = names_of(backend, [1])
    frozen = []
    for number in range(2):
        counts.put(one, (number,), None)
        visits.append(one, [(number,)], None)
        frozen.append(backend.freeze_all(0))
    counts.clear(one)
    visits.clear(one)
    for number, each in enumerate(frozen):
        each.link(tmp_path / f"linked-{number}")
    assert counts_in(tmp_path / "linked-0") == {1: 0}
    assert counts_in(tmp_path / "linked-1") == {1: 1}
    assert [row[VALUE]["n"] for row in rows_in(tmp_path / "linked-1", "visits")] == [0, 1]
    assert (counts.get(one, 0), visits.get(one, 0)) == (None, [])
    backend.close()


def test_a_snapshot_is_void_once_a_later_one_is_linked(tmp_path):
    backend = a_backend(tmp_path / "db")
    counts = backend.values(COUNTS)
    (one,) = names_of(backend, [1])
    counts.put(one, (1,), None)
    older = backend.freeze_all(0)
    counts.put(one, (2,), None)
    newer = backend.freeze_all(0)
    newer.link(tmp_path / "newer")
    with pytest.raises(StorageError, match="cannot be taken any more"):
        older.link(tmp_path / "older")
    assert not (tmp_path / "older").exists()
    assert counts_in(tmp_path / "newer") == {1: 2}
    backend.close()


def fill(backend, counts, users, value):
    for name in names_of(backend, users):
        counts.put(name, (value,), None)
    backend.tidy(0)


def test_what_is_spilled_stays_out_of_a_snapshot_that_waits(tmp_path):
    backend = a_backend(tmp_path / "db", buffer_bytes_max=10_000)
    counts = backend.values(COUNTS)
    fill(backend, counts, range(10), 1)
    waiting = backend.freeze_all(0)
    for value in range(2, 40):
        fill(backend, counts, range(value * 10), value)
    assert (tmp_path / f"db-{waiting.number}").exists()  # linked ahead of time
    waiting.link(tmp_path / "linked")
    assert counts_in(tmp_path / "linked") == dict.fromkeys(range(10), 1)
    backend.freeze_all(0).link(tmp_path / "next")
    assert counts_in(tmp_path / "next") == dict.fromkeys(range(390), 39)
    backend.close()


def test_a_buffer_is_spilled_bit_by_bit_while_no_snapshot_waits(tmp_path):
    backend = a_backend(tmp_path / "db", buffer_bytes_max=10_000)
    counts = backend.values(COUNTS)
    fill(backend, counts, range(1000), 1)
    while backend.parts:
        backend.tidy(0)
    assert not counts.buffer
    assert [counts.get(name, 0) for name in names_of(backend, range(1000))] == [(1,)] * 1000
    backend.close()


@pytest.mark.parametrize("is_released", [True, False])
def test_a_link_made_ahead_of_time_is_removed_with_its_snapshot(is_released, tmp_path):
    backend = a_backend(tmp_path / "db", buffer_bytes_max=0)
    counts = backend.values(COUNTS)
    fill(backend, counts, range(10), 1)
    waiting = backend.freeze_all(0)
    fill(backend, counts, range(10), 2)
    staged = tmp_path / f"db-{waiting.number}"
    assert staged.exists()
    if is_released:
        waiting.release()
        waiting.release()
    else:
        backend.freeze_all(0).link(tmp_path / "later")
    assert not staged.exists()
    with pytest.raises(StorageError, match="cannot be taken any more"):
        waiting.link(tmp_path / "linked")
    backend.close()


def test_freezing_many_rows_is_a_matter_of_references(tmp_path):
    backend = a_backend(tmp_path / "db", buffer_bytes_max=1 << 30)
    counts = backend.values(COUNTS)
    for name in names_of(backend, range(200_000)):
        counts.put(name, (1,), None)
    begun = time.thread_time()
    backend.freeze_all(0)
    assert time.thread_time() - begun < 0.02  # some 0.05 ms; a copy would take 10
    backend.close()


def test_states_read_the_same_while_snapshots_are_linked_in_the_background(tmp_path, quick_turns):
    backend = a_backend(tmp_path / "db", buffer_bytes_max=20_000)
    counts, visits = backend.values(COUNTS), backend.lists(VISITS)
    pages, fading = backend.maps(PAGES), backend.values(FADING)
    names = names_of(backend, range(50))
    failed = []

    def link(frozen, place):
        try:
            frozen.link(place)
            assert all(
                len(batch) for t in tables_in(place) for _, batch in t.batches_by_key_group()
            )
            shutil.rmtree(place)
        except BaseException as error:
            failed.append(error)

    for round_ in range(15):
        for number, name in enumerate(names):
            counts.put(name, (round_,), None)
            visits.append(name, [(round_,)], None)
            pages.put(name, (round_ % 3,), (round_,), None)
            # What expires is always put anew just as the hand comes to give it up.
            fading.put(name, (round_,), round_ + 1)
            assert len(visits.get(name, 0)) == round_ + 1, number
        frozen = backend.freeze_all(round_)
        thread = threading.Thread(target=link, args=(frozen, tmp_path / f"linked-{round_}"))
        thread.start()
        while thread.is_alive():
            backend.tidy(round_)
            for name in names:
                assert counts.get(name, 0) == (round_,)
                assert visits.get(name, 0) == [(n,) for n in range(round_ + 1)]
                assert len(list(pages.items(name, 0))) == min(round_ + 1, 3)
                assert fading.get(name, round_) == (round_,)
        thread.join()
    assert failed == []
    backend.close()


def test_rows_on_their_way_to_the_database_are_read_once(tmp_path):
    backend = a_backend(tmp_path / "db", buffer_bytes_max=0)
    visits = backend.lists(VISITS)
    (one,) = names_of(backend, [1])
    visits.append(one, [(1,), (2,)], None)
    for _ in range(4):  # in the buffer, in the line, in both the line and the database, in it alone
        assert visits.get(one, 0) == [(1,), (2,)]
        assert dict(visits.entries(0)) == {one: [(1,), (2,)]}
        backend.tidy(0)
    assert not backend.parts
    backend.close()


def test_a_list_is_read_whole_while_parts_move_to_the_database(tmp_path, quick_turns):
    backend = a_backend(tmp_path / "db")
    visits = backend.lists(VISITS)
    (one,) = names_of(backend, [1])
    for number in range(60):
        visits.append(one, [(number,)], None)
        frozen, place = backend.freeze_all(0), tmp_path / f"linked-{number}"
        thread = threading.Thread(target=frozen.link, args=(place,))
        thread.start()
        while thread.is_alive():
            assert len(visits.get(one, 0)) == number + 1
        thread.join()
    backend.close()


# --- what is in the database


def test_appending_to_a_list_adds_an_entry_and_rewrites_none(tmp_path):
    backend = a_backend(tmp_path / "db")
    visits = backend.lists(VISITS)
    (one,) = names_of(backend, [1])
    for number in range(3):
        visits.append(one, [(number,), (number,)], None)
        backend.freeze_all(0).link(tmp_path / f"linked-{number}")
    place = visits.place(one)
    assert len(list(backend.disk.scan(place, place + b"\xff"))) == 3
    visits.put(one, [(7,)], None)
    backend.freeze_all(0).link(tmp_path / "linked")
    assert len(list(backend.disk.scan(place, place + b"\xff"))) == 1
    assert [row[VALUE]["n"] for row in rows_in(tmp_path / "linked", "visits")] == [7]
    assert [row[VALUE]["n"] for row in rows_in(tmp_path / "linked-1", "visits")] == [0, 0, 1, 1]
    backend.close()


@pytest.mark.parametrize("is_linked", [True, False])
def test_what_was_cleared_stays_away_whatever_was_written_before(is_linked, tmp_path):
    backend = a_backend(tmp_path / "db")
    counts, visits, pages = backend.values(COUNTS), backend.lists(VISITS), backend.maps(PAGES)
    (one,) = names_of(backend, [1])
    for number in range(2):
        counts.put(one, (number,), None)
        visits.append(one, [(number,)], None)
        pages.put(one, (number,), (number,), None)
        if number == 0:
            backend.freeze_all(0).link(tmp_path / "linked")
    for table in (counts, visits, pages):
        table.clear(one)
    pages.put(one, (2,), (2,), None)
    frozen = backend.freeze_all(0)
    if is_linked:
        frozen.link(tmp_path / "cleared")
        assert counts_in(tmp_path / "cleared") == {}
        assert rows_in(tmp_path / "cleared", "visits") == []
    assert (counts.get(one, 0), visits.get(one, 0)) == (None, [])
    assert [pages.get(one, (number,), 0) for number in range(3)] == [None, None, (2,)]
    assert list(pages.items(one, 0)) == [((2,), (2,))]
    backend.close()


def test_what_has_expired_is_given_up_by_and_by_and_is_in_no_snapshot(tmp_path):
    backend = a_backend(tmp_path / "db")
    values, visits = backend.values(FADING), backend.lists(FADING_VISITS)
    pages = backend.maps(FADING_PAGES)
    names = names_of(backend, range(500))
    for number, name in enumerate(names):
        expires_ms = 100 if number % 5 else None
        values.put(name, (1,), expires_ms)
        visits.append(name, [(1,)], expires_ms)
        pages.put(name, (1,), (1,), expires_ms)
    backend.freeze_all(0).link(tmp_path / "before")
    assert len(rows_in(tmp_path / "before", "fading")) == 500
    backend.freeze_all(200).link(tmp_path / "expired")
    for name in ("fading", "fading visits", "fading pages"):
        assert [row[EXPIRES] for row in rows_in(tmp_path / "expired", name)] == [None] * 100
    for _ in range(20):
        backend.tidy(200)
    backend.freeze_all(200).link(tmp_path / "swept")
    assert len(list(backend.disk.scan(b"", b"\xff\xff"))) == 300
    assert values.get(names[0], 200) == (1,)
    backend.close()


def test_what_was_put_anew_is_not_given_up_with_what_has_expired(tmp_path):
    backend = a_backend(tmp_path / "db")
    values, pages = backend.values(FADING), backend.maps(FADING_PAGES)
    one, two = names_of(backend, [1, 2])
    for expires_ms in (100, 300):
        for name in (one, two):
            values.put(name, (1,), expires_ms)
            pages.put(name, (1,), (1,), expires_ms)
        if expires_ms == 100:
            backend.freeze_all(0).link(tmp_path / "linked")
    values.put(two, (1,), 100)
    backend.freeze_all(0)  # in the line, and not in the database
    backend.tidy(200)
    assert (values.get(one, 200), values.get(two, 200)) == ((1,), None)
    assert list(pages.items(one, 200)) == [((1,), (1,))]
    backend.close()


def test_a_dropped_state_is_gone_but_from_snapshots_taken_before(tmp_path):
    backend = a_backend(tmp_path / "db")
    counts, visits = backend.values(COUNTS), backend.lists(VISITS)
    (one,) = names_of(backend, [1])
    counts.put(one, (1,), None)
    visits.append(one, [(1,)], None)
    before = backend.freeze_all(0)
    backend.drop("counts")
    backend.drop("never declared")
    before.link(tmp_path / "before")
    backend.freeze_all(0).link(tmp_path / "after")
    assert counts_in(tmp_path / "before") == {1: 1}
    assert [table.name for table in tables_in(tmp_path / "after")] == ["visits"]
    counts = backend.values(COUNTS)
    assert counts.get(one, 0) is None
    assert visits.get(one, 0) == [(1,)]
    backend.close()


# --- a program that has changed


def a_database_of_counts(tmp_path):
    backend = a_backend(tmp_path / "db")
    counts, visits = backend.values(COUNTS), backend.lists(VISITS)
    for name in names_of(backend, range(100)):
        counts.put(name, (1,), None)
        visits.append(name, [(1,), (2,)], None)
    backend.freeze_all(0).link(tmp_path / "linked")
    backend.close()
    return tmp_path / "linked"


def test_a_database_goes_on_with_a_schema_that_has_grown(tmp_path):
    backend = a_backend(a_database_of_counts(tmp_path))
    grown = RowType(pa.schema([("note", pa.string()), ("n", pa.int64())]))
    counts = backend.values(Declared("counts", Kind.VALUE, grown, expires=True))
    visits = backend.lists(Declared("visits", Kind.LIST, grown))
    (name,) = names_of(backend, [50])
    assert counts.get(name, 0) == (None, 1)
    visits.append(name, [("new", 3)], None)
    assert visits.get(name, 0) == [(None, 1), (None, 2), ("new", 3)]
    backend.freeze_all(0).link(tmp_path / "grown")
    assert len(rows_in(tmp_path / "grown", "visits")) == 201
    backend.close()


def test_a_database_refuses_a_schema_that_does_not_fit_and_shows_both(tmp_path):
    backend = a_backend(a_database_of_counts(tmp_path))
    other = RowType(pa.schema([("n", pa.string())]))
    with pytest.raises(StartRefused, match=r"n: int64.*n: string"):
        backend.values(Declared("counts", Kind.VALUE, other))
    with pytest.raises(StartRefused, match=r"is a value in the checkpoint.*as a list"):
        backend.lists(Declared("counts", Kind.LIST, COUNT))
    backend.close()


def test_a_database_of_other_keys_or_of_pages_is_refused(tmp_path):
    linked = a_database_of_counts(tmp_path)
    with pytest.raises(StartRefused, match=r"kept by the keys user int64.*grouped by app string"):
        DiskBackend(pa.schema([("app", pa.string())]), GROUPS, linked, MEMORY)
    disk = Disk.open(tmp_path / "pages", MEMORY)
    changes = Changes()
    say_layout(changes, Layout.PAGES, KEYS)
    disk.write(changes)
    disk.flush()
    disk.close()
    with pytest.raises(StartRefused, match="written as pages"):
        a_backend(tmp_path / "pages")


def test_a_state_that_is_no_longer_declared_stays_in_the_database(tmp_path):
    backend = a_backend(a_database_of_counts(tmp_path))
    backend.freeze_all(0).link(tmp_path / "again")
    assert len(counts_in(tmp_path / "again")) == 100
    backend.close()


@pytest.mark.parametrize("kind", ["heap", "disk"])
def test_timers_are_found_again_in_the_states_that_have_come_back(kind, tmp_path):
    backend = HeapBackend(KEYS, GROUPS) if kind == "heap" else a_backend(tmp_path / "db")
    timers = KeyTimers(backend, "$timers")
    one, two, three = names_of(backend, [1, 2, 3])
    for name, time_ms in [(one, 30), (two, 10), (two, 20), (three, 5)]:
        timers.register(name, time_ms)
    timers.delete(three, 5)
    if kind == "disk":
        backend.freeze_all(0).link(tmp_path / "linked")
        backend.close()
        backend = a_backend(tmp_path / "linked")
        timers = KeyTimers(backend, "$timers")
        assert timers.next_ms() is None
        timers.rebuild()
        timers.register(three, 25)
        timers.rebuild()
        timers.delete(three, 25)
    else:
        timers.rebuild()
    assert timers.next_ms() == 10
    assert timers.due(100, 10) == [(two, 10), (two, 20), (one, 30)]
    backend.close()


# --- rows as bytes

NESTED = pa.schema(
    [
        ("whole", pa.int64()),
        ("number", pa.float64()),
        ("text", pa.string()),
        ("bytes", pa.binary()),
        ("yes", pa.bool_()),
        ("amount", pa.decimal128(20, 4)),
        ("day", pa.date32()),
        ("instant", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("span", pa.duration("us")),
        ("nothing", pa.null()),
        ("numbers", pa.list_(pa.float64())),
        ("by_name", pa.map_(pa.string(), pa.decimal128(20, 4))),
        ("nested", pa.struct([("x", pa.list_(pa.int64())), ("y", pa.struct([]))])),
    ]
)
ROWS = RowType(NESTED)
amounts = st.decimals(min_value=-(10**15), max_value=10**15, places=4)
values = st.tuples(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(),
    st.binary(),
    st.booleans(),
    amounts,
    st.dates(),
    st.datetimes(timezones=st.just(datetime.UTC)),
    st.datetimes(),
    st.timedeltas(),
    st.none(),
    st.lists(st.none() | st.floats()),
    st.dictionaries(st.text(), st.none() | amounts),
    st.tuples(st.none() | st.lists(st.integers(0, 9)), st.just(())),
)


@given(
    row=values, empty=st.sets(st.integers(0, len(NESTED) - 1)), expires=st.integers() | st.none()
)
@settings(deadline=None)
def test_a_row_comes_back_from_bytes_as_it_was(row, empty, expires):
    row = tuple(None if n in empty else value for n, value in enumerate(row))
    frozen = ROWS.frozen(row, "a state")
    expires = None if expires is None else max(min(expires, 2**62), -(2**62))
    codec = RowCodec(NESTED)
    assert codec.row(codec.encode(frozen)) == frozen
    assert codec.kept(codec.encode((frozen, expires))) == (frozen, expires)
    assert codec.rows(codec.encode([frozen, frozen])) == [frozen, frozen]
    assert codec.all_kept(codec.encode([(frozen, expires)])) == [(frozen, expires)]


def test_equal_user_keys_are_one_however_they_look(tmp_path):
    schema = pa.schema([("x", pa.float64()), ("y", pa.decimal128(5, 2))])
    codec = RowCodec(schema)
    row = RowType(schema)
    minus = row.frozen((-0.0, decimal.Decimal("-0.00")), "a key")
    plus = row.frozen((0.0, decimal.Decimal("0.00")), "a key")
    assert codec.encode_key(minus) == codec.encode_key(plus)
    assert codec.row(codec.encode((math.nan, None)))[0] is math.nan


def test_bytes_that_are_no_row_are_damage():
    with pytest.raises(SnapshotDamaged, match="no row of their schema"):
        RowCodec(NESTED).row(b"\x91\x01")
