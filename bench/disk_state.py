"""Running aggregates on disk beside those on the heap, on one core and a second for snapshots; and
states of handles that are larger than their memory.

    python bench/disk_state.py [--quick]

Five tables, each made in one run so that its ratios mean something: records per second without and
with a snapshot every second, what a freeze costs the loop, how large the new files of a snapshot
are when a part of the keys has changed, and how a state runs that is four times as large as the
memory it may use: first one of aggregates, then the states of a `KeyProcessor`. The last two are
processes of their own, as what others have left would hide how much they take.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
from keyed_state import BATCH_ROWS, COUNT, MAX_PARALLELISM, all_keys, app_names, batches
from keyed_state import sparse_integers as integers

from stillframe import KeyProcessor
from stillframe.clock import SystemClock
from stillframe.config import StateSettings
from stillframe.graph.logical import Transform
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.runtime.disk import DiskRoom
from stillframe.runtime.kept_states import StatesOnDisk
from stillframe.runtime.key_processing import KeyProgram
from stillframe.runtime.transforming import Transforming
from stillframe.state.aggregates import AggregateTable
from stillframe.state.disk import Disk, DiskMemory
from stillframe.state.disk_pages import PagedAggregates
from stillframe.state.disk_rows import DiskBackend
from stillframe.storage.local import LocalStore

MEGABYTE = 1 << 20
MEMORY_BYTES = 64 * MEGABYTE
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])


@contextmanager
def on_disk(
    schema: pa.Schema, front_bytes_max: int, memory_bytes: int = MEMORY_BYTES
) -> Iterator[tuple[PagedAggregates, Path]]:
    directory = Path(tempfile.mkdtemp(prefix="disk-state-"))
    disk = Disk.open(directory / "database", DiskMemory(memory_bytes))
    owned = range(MAX_PARALLELISM)
    table = PagedAggregates(schema, ["k"], [COUNT], MAX_PARALLELISM, disk, owned, front_bytes_max)
    try:
        yield table, directory
    finally:
        table.close()
        shutil.rmtree(directory)


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# --- throughput, with and without snapshots


class Snapshots:
    """Takes a snapshot every second and finishes it on another thread."""

    def __init__(self, freeze: Callable, finish: Callable) -> None:
        self._freeze = freeze
        self._finish = finish
        self._due = time.perf_counter() + 1
        self._working: threading.Thread | None = None
        self.freeze_ms: list[float] = []

    def take_if_due(self) -> None:
        if time.perf_counter() < self._due or (self._working and self._working.is_alive()):
            return
        self._due += 1
        begin = time.perf_counter()
        frozen = self._freeze()
        self.freeze_ms.append((time.perf_counter() - begin) * 1_000)
        self._working = threading.Thread(target=self._finish, args=(frozen,))
        self._working.start()

    def wait(self) -> None:
        if self._working:
            self._working.join()


def sorted_by_key_group(frozen) -> None:
    """What the heap does for a snapshot, without the writing."""
    for _ in frozen.batches_by_key_group():
        pass
    frozen.release()


def linked_in(directory: Path) -> Callable:
    def link(frozen) -> None:
        target = directory / f"link-{time.monotonic_ns()}"
        frozen.link(target)
        shutil.rmtree(target)

    return link


def records_per_second(table, steady: list, seconds: float, snapshots: Snapshots | None) -> float:
    begin, rounds = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        table.update(steady[rounds % len(steady)])
        rounds += 1
        if snapshots:
            snapshots.take_if_due()
    rate = rounds * BATCH_ROWS / (time.perf_counter() - begin)
    if snapshots:
        snapshots.wait()
    return rate


def throughput(title: str, make_keys: Callable, keys: int, seconds: float, rounds: int) -> None:
    filling, steady = all_keys(make_keys, keys), batches(make_keys, keys, 32)
    schema = filling[0].schema
    heap = AggregateTable(schema, ["k"], [COUNT], MAX_PARALLELISM)
    with on_disk(schema, 1 << 30) as (disk, directory):
        for batch in filling:
            heap.update(batch)
            disk.update(batch)
        finish_disk = linked_in(directory)
        finish_disk(disk.freeze())
        tables = {"heap": (heap, sorted_by_key_group), "disk": (disk, finish_disk)}
        rates: dict[str, list[float]] = {}
        freeze_ms: list[float] = []
        # In turns, so that what else the machine does is shared by all.
        for _ in range(rounds):
            for name, (table, _) in tables.items():
                alone = records_per_second(table, steady, 1, None)
                rates.setdefault(name, []).append(alone)
            for name, (table, finish) in tables.items():
                snapshots = Snapshots(table.freeze, finish)
                beside = records_per_second(table, steady, seconds, snapshots)
                rates.setdefault(f"{name} with snapshots", []).append(beside)
                freeze_ms += snapshots.freeze_ms if name == "disk" else []
    rate = {name: float(np.median(values)) / 1e6 for name, values in rates.items()}
    print(
        f"{title:18s} heap {rate['heap']:5.1f} M/s, with snapshots"
        f" {rate['heap with snapshots'] / rate['heap']:4.0%} of it |"
        f" disk {rate['disk']:5.1f} M/s ({rate['disk'] / rate['heap']:4.0%} of the heap),"
        f" with snapshots {rate['disk with snapshots'] / rate['disk']:4.0%} of it |"
        f" freeze {np.median(freeze_ms):5.2f} ms, at most {max(freeze_ms):5.2f}"
    )


# --- how large the new files are


def new_file_bytes(table: PagedAggregates, directory: Path, known: set[str]) -> tuple[int, float]:
    target = directory / f"link-{time.monotonic_ns()}"
    begin = time.perf_counter()
    table.freeze().link(target)
    seconds = time.perf_counter() - begin
    files = {file.name: file.stat().st_size for file in target.glob("*.sst")}
    added = sum(size for name, size in files.items() if name not in known)
    known.update(files)
    shutil.rmtree(target)
    return added, seconds


def curve(keys: int, repeats: int) -> None:
    random, everything = np.random.default_rng(3), np.arange(keys) * 7_919 + 13
    with on_disk(SCHEMA, 1 << 30) as (table, directory):
        known: set[str] = set()
        for part in np.array_split(random.permutation(everything), keys // BATCH_ROWS + 1):
            table.update(pa.record_batch({"k": part, "v": part}))
        whole, seconds = new_file_bytes(table, directory, known)
        print(f"{keys:,} keys: first snapshot {whole / 1e6:6.1f} MB in {seconds:4.2f} s")
        for share in (0.0001, 0.001, 0.01, 0.1, 1.0):
            sizes, times = [], []
            for _ in range(repeats):
                changed = random.choice(everything, int(keys * share), replace=False)
                for part in np.array_split(changed, len(changed) // BATCH_ROWS + 1):
                    table.update(pa.record_batch({"k": part, "v": part}))
                size, seconds = new_file_bytes(table, directory, known)
                sizes.append(size)
                times.append(seconds)
            print(
                f"  {share:7.2%} changed: median {np.median(sizes) / 1e6:6.2f} MB"
                f" ({np.median(sizes) / whole:6.1%} of all), mean {np.mean(sizes) / 1e6:6.2f} MB,"
                f" linked in {np.median(times):4.2f} s"
            )


# --- more than fits


def warm_up() -> None:
    """Run all code once: what it loads and sets aside is not state."""
    with on_disk(SCHEMA, MEGABYTE) as (table, directory):
        for _ in range(2):
            for part in np.array_split(np.arange(90_000), 3):
                table.update(pa.record_batch({"k": part, "v": part}))
            linked_in(directory)(table.freeze())


def larger_than_memory(front_bytes_max: int, keys: int, seconds: float) -> None:
    random = np.random.default_rng(4)
    warm_up()
    before = resident_megabytes()
    with on_disk(SCHEMA, front_bytes_max, front_bytes_max) as (table, directory):
        begin = time.perf_counter()
        for first in range(0, keys, BATCH_ROWS):
            part = np.arange(first, min(first + BATCH_ROWS, keys)) * 7_919 + 13
            table.update(pa.record_batch({"k": part, "v": part}))
        rate = keys / (time.perf_counter() - begin) / 1e6
        print(
            f"{keys:,} keys, {front_bytes_max / 1e6:.0f} MB for the front and as much for RocksDB:"
            f" filled at {rate:4.2f} M/s, resident +{resident_megabytes() - before:4.0f} MB"
        )
        snapshots = Snapshots(table.freeze, linked_in(directory))
        begin = time.perf_counter()
        for step in range(4):
            rounds = 0
            largest = 0.0
            while time.perf_counter() - begin < seconds * (step + 1) / 4:
                part = random.integers(0, keys, BATCH_ROWS) * 7_919 + 13
                table.update(pa.record_batch({"k": part, "v": part}))
                rounds += 1
                largest = max(largest, resident_megabytes() - before)
                if step >= 2:
                    snapshots.take_if_due()
            rate = rounds * BATCH_ROWS / (seconds / 4) / 1e6
            beside = "with snapshots" if step >= 2 else "alone"
            print(f"  random keys, {beside:14s}: {rate:4.2f} M/s, resident +{largest:4.0f} MB")
        snapshots.wait()


# --- states of handles


PAYLOADS = pa.schema([("k", pa.int64()), ("payload", pa.binary())])
PAYLOAD_BYTES = 100
HANDLED_ROWS = 4_096


class Keeping(KeyProcessor):
    """Keeps the payloads of a key in states of all kinds."""

    def open(self, states) -> None:
        self.newest = states.value("newest", "payload binary, count long")
        self.all = states.list("all", "payload binary")
        self.placed = states.map("placed", "place long", "payload binary")

    def process(self, key, rows) -> None:
        for row in rows:
            found = self.newest.get()
            count = 1 if found is None else found.count + 1
            self.newest.update((row.payload, count))
            self.all.append((row.payload[::-1],))
            self.placed.put((count % 3,), (row.payload[1:],))


class Checkpoints:
    """Of one operator; each is complete when the next one begins."""

    def __init__(self, operator: Transforming) -> None:
        self._operator = operator
        self._number = 0
        self._written: object = None

    def freeze(self) -> Callable:
        if self._written is not None:
            self._operator.described(CheckpointId(self._number), self._written)
            self._operator.completed(CheckpointId(self._number))
        self._number += 1
        return self._operator.snapshot(CheckpointId(self._number))

    def finish(self, write: Callable) -> None:
        self._written = write()


@contextmanager
def handles_on_disk(limit_bytes: int) -> Iterator[tuple[Transforming, Path]]:
    directory = Path(tempfile.mkdtemp(prefix="disk-state-"))
    settings = StateSettings(
        "rocksdb", rocksdb_bytes_max=limit_bytes, directory=str(directory / "working")
    )
    room = DiskRoom.open(settings, "bench", None, Attempt(1), SlotIndex(0), databases=1)
    place = (OperatorUid("keeping"), SubtaskIndex(0), Attempt(1))
    store = LocalStore(directory / "checkpoints")
    database, snapshots = room.open_database(*place, range(MAX_PARALLELISM), store, ())
    keys, bytes_max = pa.schema([PAYLOADS.field("k")]), room.buffer_bytes_max
    backend = DiskBackend(keys, MAX_PARALLELISM, database, room.memory, bytes_max)
    transform = Transform(KeyProgram(Keeping, "Keeping", keys), "Keeping", ("k",))
    kept = StatesOnDisk(*place, store, backend, snapshots)
    operator = Transforming(transform, PAYLOADS, keys, kept, MAX_PARALLELISM, SystemClock())
    try:
        yield operator, database
    finally:
        operator.close()
        shutil.rmtree(directory)


def payloads(keys: np.ndarray) -> pa.RecordBatch:
    made = [os.urandom(PAYLOAD_BYTES) for _ in range(len(keys))]
    return pa.record_batch([pa.array(keys * 7_919 + 13), pa.array(made)], schema=PAYLOADS)


def handle(operator: Transforming, keys: np.ndarray) -> None:
    for _ in operator.process(payloads(keys)):
        pass


def database_megabytes(database: Path) -> float:
    return sum(file.stat().st_size for file in database.glob("*.sst")) / 1e6


def warm_up_handles() -> None:
    with handles_on_disk(MEGABYTE) as (operator, _):
        checkpoints = Checkpoints(operator)
        for first in range(0, 10 * HANDLED_ROWS, HANDLED_ROWS):
            handle(operator, np.arange(first, first + HANDLED_ROWS))
            checkpoints.finish(checkpoints.freeze())


def handles(limit_bytes: int, seconds: float) -> None:
    """Fill the states to more than four times the limit, then change what is there."""
    random, keys = np.random.default_rng(5), 4 * limit_bytes // (3 * PAYLOAD_BYTES)
    warm_up_handles()
    before = resident_megabytes()
    with handles_on_disk(limit_bytes) as (operator, database):
        checkpoints = Checkpoints(operator)
        snapshots = Snapshots(checkpoints.freeze, checkpoints.finish)

        def run(title: str, batches: Iterator[np.ndarray]) -> None:
            begin, rows, largest = time.perf_counter(), 0, 0.0
            for batch in batches:
                handle(operator, batch)
                snapshots.take_if_due()
                rows += len(batch)
                largest = max(largest, resident_megabytes() - before)
            rate = rows / (time.perf_counter() - begin) / 1e3
            print(
                f"  {title:12s}: {rate:4.0f} k rows/s, database"
                f" {database_megabytes(database):4.0f} MB, resident at most +{largest:4.0f} MB"
            )

        def for_seconds(most: float) -> Iterator[np.ndarray]:
            end = time.perf_counter() + most
            while time.perf_counter() < end:
                yield random.integers(0, keys, HANDLED_ROWS)

        print(
            f"value, list and map of {keys:,} keys, {limit_bytes / 1e6:.0f} MB for all of it,"
            " a snapshot every second"
        )
        for quarter in np.array_split(np.arange(keys), 4):
            run("new keys", iter(np.array_split(quarter, len(quarter) // HANDLED_ROWS + 1)))
        for _ in range(3):
            run("random keys", for_seconds(seconds / 3))
        snapshots.wait()


def in_its_own_process(measure: Callable, *given: float) -> None:
    process = multiprocessing.get_context("spawn").Process(target=measure, args=given)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less than two minutes")
    quick = parser.parse_args().quick
    in_its_own_process(larger_than_memory, 32 * MEGABYTE, 2_200_000, 12 if quick else 60)
    in_its_own_process(handles, (16 if quick else 64) * MEGABYTE, 9 if quick else 60)
    curve(1_000_000, 3 if quick else 12)
    seconds, rounds = (2.5, 3) if quick else (4, 8)
    throughput("1,000 strings", app_names, 1_000, seconds, rounds)
    throughput("1,000,000 int64", integers, 1_000_000, seconds, rounds)


if __name__ == "__main__":
    main()
