"""One RocksDB database on local disk: raw bytes in, raw bytes out.

Theory of operation
-------------------
A database is a working copy, never the durable one: it has no log of writes, and what a machine
loses is restored from a checkpoint. What is written sits in memory until it is *flushed* into a
file; files never change, so a snapshot of all that was written is a flush and a directory of hard
links to the files (`link`).

Keys start with the key group as two bytes, so that a range of key groups is a range of keys. Keys
that start with ff ff are about the database itself.

Rules of this file
------------------
1. Threads may read, write and link at the same time; who closes sees to it that nobody else is at
   work. A scan sees what was there when it began, and keeps the files open until it has ended.
2. Nothing waits for the disk while it holds Python's lock: a slot that does sends no heartbeat. A
   write holds the lock for all of its bytes (0.7 MB in a millisecond), so big changes are cut into
   pieces. RocksDB lets a write wait, under the lock, until memory has been flushed or files have
   been merged: so that is waited for here, before. Its own way to link all files syncs them to the
   disk under the lock, which takes as long as a busy disk takes: `link` does it here. Flushing and
   closing let other threads run.
3. RocksDB's own iterator ends at a damaged block as if there were no more; a scan asks it why.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import rocksdict

from stillframe.errors import SnapshotDamaged, StorageError

METADATA: Final = b"\xff\xff"
"""What the keys start with that are about the database itself."""
PAST_METADATA: Final = b"\xff\xff\xff"
PIECE_BYTES: Final = 256 << 10
"""So much is written at once: a third of a millisecond in which no other thread runs."""

_MEMORY_BYTES_MIN: Final = 4 << 20
_BLOCK_BYTES: Final = 16 << 10
_FILTER_BITS_PER_KEY: Final = 10
_OPEN_FILES_MAX: Final = 256
_MEMTABLE_BYTES_MAX: Final = 64 << 20
_FILE_BYTES: Final = 32 << 20
_LOG_BYTES_MAX: Final = 1 << 20
_READ_AHEAD_BYTES: Final = 256 << 10
_STALL_LOOK_SECONDS: Final = 0.005
_STALL_SECONDS_MAX: Final = 600.0
_DELAY_SECONDS_MAX: Final = 10.0
_LINK_TRIES_MAX: Final = 20
_CURRENT: Final = "CURRENT"
_SETTINGS: Final = "rocksdict-config.json"
_AT_ONCE: Final = 32
"""So many entries are read before anybody looks how large the last of them is."""


def group_prefix(group: int) -> bytes:
    """What the keys of this key group start with."""
    return group.to_bytes(2, "big")


class DiskMemory:
    """The memory that all databases of a slot share: what is read, and what waits to be flushed.

    What waits is counted as a part of the cache, and may become half of it. The cache has three
    quarters of the memory: the rest is for what RocksDB takes while it writes and merges files, and
    for what the allocator holds and nobody uses.
    """

    def __init__(self, limit_bytes: int, *, merges_files: bool = True) -> None:
        """Files are merged in the background, at moments nobody knows, unless that is refused."""
        self.limit_bytes = max(limit_bytes, _MEMORY_BYTES_MIN)
        self.merges_files = merges_files
        cache_bytes = self.limit_bytes * 3 // 4
        self.cache = rocksdict.Cache(cache_bytes)
        self.waiting = rocksdict.WriteBufferManager.new_write_buffer_manager_with_cache(
            cache_bytes // 2, False, self.cache
        )


class Changes:
    """Puts and deletes in their order, to be written at once; good for one write."""

    __slots__ = ("_batch", "delete", "delete_range", "put")

    def __init__(self) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        self._batch = batch
        # The batch's own methods: one call less for each entry.
        self.put = batch.put
        self.delete = batch.delete
        self.delete_range = batch.delete_range
        """Of all keys from the first up to, and without, the second."""

    @property
    def size_bytes(self) -> int:
        return int(self._batch.size_in_bytes())

    def __len__(self) -> int:
        return len(self._batch)


class Disk:
    """One database."""

    def __init__(self, database: rocksdict.Rdict, directory: Path) -> None:
        self.directory = directory
        self._database = database
        self._unlogged = rocksdict.WriteOptions()
        # The stubs call it a method; it is a property.
        self._unlogged.disable_wal = True  # type: ignore[method-assign,assignment]

    @classmethod
    def open(cls, directory: Path, memory: DiskMemory) -> Disk:
        """What is there, or a new one in a directory that is empty or missing."""
        directory.mkdir(parents=True, exist_ok=True)
        is_new = not any(directory.iterdir())
        return cls(_opened(directory, _options(memory, is_new), _read_write()), directory)

    @classmethod
    def open_to_read(cls, directory: Path, memory: DiskMemory) -> Disk:
        """What is there, without a change to any of its files; others may do so too."""
        return cls(_opened(directory, _options(memory, False), _read_only()), directory)

    # --- reading

    def get(self, key: bytes) -> bytes | None:
        try:
            return self._database.get(key)
        except Exception as error:
            raise self._failed("read", error) from error

    def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        try:
            return self._database.get(list(keys))  # type: ignore[return-value]
        except Exception as error:
            raise self._failed("read", error) from error

    def scan(self, first: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The entries from the first key up to, and without, the second, in their order."""
        bounded = _bounded(stop)
        last = first
        for entry in self._entries(first, bounded):
            last = entry[0]
            yield entry
        self._raise_if_cut_short(last, bounded)

    def scan_slices(
        self, first: bytes, stop: bytes, entries_max: int, bytes_max: int
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """As `scan`, some entries at a time: as many as that, or until they have roughly so many
        bytes. For who reads all there is: the cache is left to others."""
        bounded = _bounded(stop)
        bounded.fill_cache(False)  # type: ignore[call-arg]  # the stubs forget what it takes
        bounded.set_readahead_size(_READ_AHEAD_BYTES)
        last = first
        entries = self._entries(first, bounded)
        while found := _next_slice(entries, entries_max, bytes_max):
            last = found[-1][0]
            yield found
        self._raise_if_cut_short(last, bounded)

    def _entries(self, first: bytes, bounded: rocksdict.ReadOptions) -> Any:
        """RocksDB's own iterator."""
        try:
            return self._database.items(from_key=first, read_opt=bounded)
        except Exception as error:
            raise self._failed("read", error) from error

    def _raise_if_cut_short(self, last: bytes, bounded: rocksdict.ReadOptions) -> None:
        """Read on from the last entry there was, and ask whether that worked."""
        try:
            entry = self._database.iter(bounded)
            entry.seek(last)
            if entry.valid():
                entry.next()
            entry.status()
        except Exception as error:
            raise self._failed("read", error) from error

    # --- writing

    def write(self, changes: Changes) -> None:
        """All of them, or none if it fails."""
        self._await_room(changes.size_bytes)
        try:
            self._database.write(changes._batch, self._unlogged)
        except Exception as error:
            raise self._failed("written", error) from error

    def _await_room(self, size_bytes: int) -> None:
        """Until a write of this size would not have to wait any more."""
        deadline = time.monotonic() + _STALL_SECONDS_MAX
        while self._figure("is-write-stopped"):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"the state database in {self.directory} has taken no write for"
                    f" {_STALL_SECONDS_MAX:g} s: see that its disk has room and works"
                )
            time.sleep(_STALL_LOOK_SECONDS)
        bytes_per_second = self._figure("actual-delayed-write-rate")
        if bytes_per_second:
            time.sleep(min(size_bytes / bytes_per_second, _DELAY_SECONDS_MAX))

    def _figure(self, name: str) -> int:
        try:
            return int(self._database.property_int_value(f"rocksdb.{name}") or 0)
        except Exception as error:
            raise self._failed("written", error) from error

    def flush(self) -> None:
        """Make files of all that was written. Other threads run meanwhile."""
        try:
            self._database.flush(True)
        except Exception as error:
            raise self._failed("flushed", error) from error

    def link(self, directory: Path) -> None:
        """Make this directory, which must not be there, a database of all that was written.

        Nothing of it is synced to the disk: it is there to be stored elsewhere.
        """
        self.flush()
        try:
            directory.mkdir(parents=True)
            for tries_left in reversed(range(_LINK_TRIES_MAX)):
                self._link_once(directory)
                try:
                    named = _files_of(directory)
                    break
                except SnapshotDamaged:
                    if not tries_left:
                        raise
            for file in directory.glob("*.sst"):
                if file.name not in named:
                    file.unlink()
        except StorageError:
            raise
        except Exception as error:
            raise self._failed(f"linked to {directory}", error) from error

    def _link_once(self, directory: Path) -> None:
        """Link what is there, and a copy of the manifest, which says what makes up the database.

        It grows with each change, and a merge may drop files and make others at any moment: so
        they are linked before it is copied and after. What the copy names may still be missing;
        and what it does not name may be there, half written, which nobody may store.
        """
        self._link_rows(directory)
        for old in directory.glob("MANIFEST-*"):
            old.unlink()
        manifest = (self.directory / _CURRENT).read_text().strip()
        for name in (manifest, _CURRENT, _SETTINGS):
            shutil.copyfile(self.directory / name, directory / name)
        self._link_rows(directory)

    def _link_rows(self, directory: Path) -> None:
        for file in self.directory.glob("*.sst"):
            # It may be there already, or have been dropped since.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(file, directory / file.name)

    def copy_groups(self, source: Path, groups: range) -> None:
        """Take the entries of these key groups from another database, and what it says of itself:
        of several that differ in that, the last one is believed."""
        memory = DiskMemory(_MEMORY_BYTES_MIN)
        other = Disk.open_to_read(source, memory)
        try:
            spans = [(METADATA, PAST_METADATA)]
            if groups:
                spans.append((group_prefix(groups.start), group_prefix(groups.stop)))
            for first, stop in spans:
                self._take(other.scan(first, stop))
        finally:
            other.close()

    def _take(self, entries: Iterator[tuple[bytes, bytes]]) -> None:
        changes = Changes()
        for key, value in entries:
            changes.put(key, value)
            if changes.size_bytes >= PIECE_BYTES:
                self.write(changes)
                changes = Changes()
        self.write(changes)

    def close(self) -> None:
        """May be called twice. What was not flushed may be gone: who needs it has linked it."""
        try:
            self._database.close()
        except rocksdict.DbClosedError:
            return
        except Exception as error:
            raise self._failed("closed", error) from error

    def _failed(self, done: str, error: Exception) -> StorageError:
        return _failure(self.directory, done, error)


def _bounded(stop: bytes) -> rocksdict.ReadOptions:
    bounded = rocksdict.ReadOptions()
    bounded.set_iterate_upper_bound(stop)
    return bounded


def _files_of(directory: Path) -> set[str]:
    """The files of sorted rows that its manifest names; each of them is there and as long as it
    says. Milliseconds, however much they hold."""
    disk = Disk.open_to_read(directory, DiskMemory(_MEMORY_BYTES_MIN))
    try:
        return {str(file["name"]).lstrip("/") for file in disk._database.live_files()}
    finally:
        disk.close()


def _next_slice(entries: Any, entries_max: int, bytes_max: int) -> list[tuple[bytes, bytes]]:
    """Of the entries that come next; none if there are no more."""
    found: list[tuple[bytes, bytes]] = []
    size_bytes = 0
    while len(found) < entries_max and size_bytes < bytes_max:
        some = list(itertools.islice(entries, min(_AT_ONCE, entries_max - len(found))))
        if not some:
            break
        found += some
        size_bytes += len(some) * sum(map(len, some[-1]))
    return found


def _failure(directory: Path, done: str, error: Exception) -> StorageError:
    words = " ".join(str(error).split())
    if "Corruption" in words or "No such file" in words or "CURRENT" in words:
        return SnapshotDamaged(
            f"the state database in {directory} cannot be {done}, as a file of it is missing or"
            f" damaged ({words}): restore a checkpoint"
        )
    return StorageError(
        f"the state database in {directory} cannot be {done} ({words}): see that its disk has room"
        " and works"
    )


def _opened(
    directory: Path, options: rocksdict.Options, access: rocksdict.AccessType
) -> rocksdict.Rdict:
    try:
        return rocksdict.Rdict(str(directory), options, access_type=access)
    except Exception as error:
        raise _failure(directory, "opened", error) from error


def _read_write() -> rocksdict.AccessType:
    return rocksdict.AccessType.read_write()


def _read_only() -> rocksdict.AccessType:
    return rocksdict.AccessType.read_only(error_if_log_file_exist=False)


def _options(memory: DiskMemory, is_new: bool) -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(is_new)
    options.set_block_based_table_factory(_blocks(memory))
    options.set_write_buffer_manager(memory.waiting)
    options.set_write_buffer_size(min(memory.limit_bytes // 4, _MEMTABLE_BYTES_MAX))
    options.set_target_file_size_base(_FILE_BYTES)
    options.set_disable_auto_compactions(not memory.merges_files)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    # Files are merged with those of their size. By levels, every fourth snapshot rewrites all that
    # is there: with 1 % of a million keys changed each time, a snapshot has 36 % new bytes on
    # average, and 9 % this way.
    options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
    # An open file holds memory beside the cache.
    options.set_max_open_files(_OPEN_FILES_MAX)
    options.set_max_background_jobs(2)
    options.set_max_log_file_size(_LOG_BYTES_MAX)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


def _blocks(memory: DiskMemory) -> rocksdict.BlockBasedOptions:
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(memory.cache)
    blocks.set_block_size(_BLOCK_BYTES)
    blocks.set_bloom_filter(_FILTER_BITS_PER_KEY, False)
    # Else they are held beside the cache, and grow with the state.
    blocks.set_cache_index_and_filter_blocks(True)
    # In pieces: of a file with millions of keys either is larger than the cache may be, and a
    # filter that is made in one piece takes eight bytes for each key until the file is written.
    blocks.set_index_type(rocksdict.BlockBasedIndexType.two_level_index_search())
    blocks.set_partition_filters(True)
    blocks.set_pin_top_level_index_and_filter(True)
    return blocks
