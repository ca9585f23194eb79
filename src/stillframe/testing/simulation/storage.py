"""A file system in memory that fails on demand, and forgets with the power what was not flushed.

Theory of operation
-------------------
The store is the one that runs for real (`storage/local.py`); only the files below it are ours. What
somebody sees is what is in the page cache. What would survive is kept beside it: for each file,
whether its bytes were synced, and for each directory, what the disk has under the names that have
changed since the directory was flushed. When the power is lost, chance decides for every such name
and every such file on its own what the disk had already got.

An operation is asked about before it is done, so whoever uses the store can die between any two.
After the last one of `write` or `create_if_absent`, which removes a temporary name, there is
nothing that could be lost by dying.
"""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeAlias

import pyarrow as pa

from stillframe.storage.files import FileSystem, NewFile
from stillframe.storage.local import LocalStore
from stillframe.testing.simulation.world import World

JOB_DIRECTORY = "/checkpoints/job"
"""Where the job's store is; nothing of it is there in the beginning."""


class Died(BaseException):
    """The process that was using the store is dead; nothing of it goes on."""


Trouble = Callable[[str, str], None]
"""Asked before each operation (its name and its path); raises what goes wrong, if anything."""


class _File:
    __slots__ = ("data", "is_synced")

    def __init__(self) -> None:
        self.data = b""
        self.is_synced = False


class _Directory:
    __slots__ = ("entries", "unflushed")

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}
        self.unflushed: dict[str, _Entry | None] = {}
        """By name: what the disk has where that is not what is seen; None: nothing."""

    def put(self, name: str, entry: _Entry) -> None:
        self.unflushed.setdefault(name, self.entries.get(name))
        self.entries[name] = entry

    def remove(self, name: str) -> _Entry:
        entry = self.entries.pop(name)
        self.unflushed.setdefault(name, entry)
        return entry


_Entry: TypeAlias = _File | _Directory


class Disk:
    """What is stored; it survives everybody, and a loss of power as far as it was flushed."""

    def __init__(self) -> None:
        self.power_losses = 0
        self.names_given = 0
        self.directories = {"/": _Directory()}
        """By their paths: all that can be reached."""

    # --- for those who look on, with paths below the job's directory ---

    def paths(self) -> list[str]:
        """Every file of the job."""
        start = len(JOB_DIRECTORY) + 1
        return [
            f"{path}/{name}"[start:]
            for path, directory in self.directories.items()
            if path.startswith(JOB_DIRECTORY)
            for name, entry in directory.entries.items()
            if isinstance(entry, _File)
        ]

    def names(self, directory: str) -> list[str]:
        found = self.directories.get(f"{JOB_DIRECTORY}/{directory}")
        return list(found.entries) if found else []

    def read(self, path: str) -> bytes | None:
        file = self._file(f"{JOB_DIRECTORY}/{path}")
        return file.data if file else None

    def rot(self, path: str) -> None:
        """Change a file behind everybody's back."""
        file = self._file(f"{JOB_DIRECTORY}/{path}")
        assert file is not None
        data = bytearray(file.data)
        data[len(data) // 2] ^= 0x55
        file.data = bytes(data)

    def shut_out(self) -> None:
        """Whoever is at work on it now gets no further, as after a loss of power."""
        self.power_losses += 1

    def remove(self, path: str) -> None:
        """A directory with all that is in it, for good; by its whole path."""
        self.move(path, None)

    def move(self, path: str, to: str | None) -> None:
        above, _, name = path.rpartition("/")
        if path not in self.directories:
            return
        directory = self.directories[above or "/"]
        entry = directory.entries.pop(name)
        directory.unflushed.pop(name, None)
        if to is not None:
            directory.entries[to.rpartition("/")[2]] = entry
        for each in [each for each in self.directories if f"{each}/".startswith(f"{path}/")]:
            found = self.directories.pop(each)
            if to is not None:
                self.directories[to + each[len(path) :]] = found

    def lose_power(self, random: Random) -> None:
        """Forget what was not flushed, or some of it: nobody had been told that it is kept."""
        self.power_losses += 1
        root = self.directories["/"]
        self.directories = {}
        self._recover("/", root, random)

    def _recover(self, path: str, directory: _Directory, random: Random) -> None:
        for name, entry in directory.unflushed.items():
            if random.random() < 0.5:
                continue
            if entry is not None:
                directory.entries[name] = entry
            else:
                directory.entries.pop(name, None)
        directory.unflushed.clear()
        self.directories[path] = directory
        for name, entry in directory.entries.items():
            if isinstance(entry, _Directory):
                self._recover(os.path.join(path, name), entry, random)
            elif not entry.is_synced:
                data, entry.is_synced = entry.data, True
                entry.data = random.choice([b"", data[: len(data) // 2], bytes(len(data)), data])

    def _file(self, path: str) -> _File | None:
        above, _, name = path.rpartition("/")
        directory = self.directories.get(above)
        entry = directory.entries.get(name) if directory else None
        return entry if isinstance(entry, _File) else None


class SimulatedFiles(FileSystem):
    """One process's view of the disk; it ends with the process, and with the power."""

    def __init__(self, world: World, disk: Disk, trouble: Trouble) -> None:
        self.world = world
        self._disk = disk
        self._trouble = trouble
        self._power_losses = disk.power_losses
        self._is_dead = False

    def unused_name(self) -> str:
        self._disk.names_given += 1  # a seed gives the same names again
        return str(self._disk.names_given)

    def open_new(self, file: str) -> NewFile:
        self.before("open", file)
        directory, name = self._place(file)
        if name in directory.entries:
            raise _error(errno.EEXIST)
        new = _File()
        directory.put(name, new)
        return _OpenFile(self, file, new)

    def link(self, file: str, name: str) -> None:
        self.before("link", name)
        target, new = self._place(name)
        if new in target.entries:
            raise _error(errno.EEXIST)
        target.put(new, self._found(file))

    def flush_directory(self, directory: str) -> None:
        self.before("flush", directory)
        self._directory(directory).unflushed.clear()

    def make_directory(self, directory: str) -> None:
        self.before("make", directory)
        if directory in self._disk.directories:
            return
        above, name = self._place(directory)
        new = self._disk.directories[directory] = _Directory()
        above.put(name, new)

    def is_directory(self, directory: str) -> bool:
        return directory in self._disk.directories

    def read(self, file: str) -> bytes:
        self.before("read", file)
        return self._found(file).data

    def read_expected(self, file: str, length_bytes: int) -> tuple[pa.Buffer | None, int]:
        data = self.read(file)
        return pa.py_buffer(data), len(data)

    def list(self, directory: str) -> builtins.list[str]:
        self.before("list", directory)
        return list(self._directory(directory).entries)

    def unlink(self, file: str) -> None:
        self.before("delete", file)
        directory, name = self._place(file)
        if name in directory.entries:
            directory.remove(name)

    def remove_tree(self, directory: str) -> None:
        """Name by name: whoever does it can die halfway."""
        for name, entry in list(self._disk_entries(directory).items()):
            path = f"{directory}/{name}"
            if isinstance(entry, _Directory):
                self.remove_tree(path)
            else:
                self.unlink(path)
        if directory in self._disk.directories:
            self.before("delete", directory)
            above, name = self._place(directory)
            above.remove(name)
            del self._disk.directories[directory]

    def before(self, operation: str, path: str) -> None:
        """Nothing more is done by the dead, whatever they were about to tidy up."""
        if self._is_dead or self._power_losses != self._disk.power_losses:
            raise Died
        try:
            self._trouble(operation, path)
        except Died:
            self._is_dead = True
            raise

    def _place(self, path: str) -> tuple[_Directory, str]:
        above, name = os.path.split(path)
        return self._directory(above), name

    def _directory(self, path: str) -> _Directory:
        directory = self._disk.directories.get(path)
        if directory is None:
            raise _error(errno.ENOENT)
        return directory

    def _disk_entries(self, path: str) -> dict[str, _Entry]:
        directory = self._disk.directories.get(path)
        return directory.entries if directory else {}

    def _found(self, path: str) -> _File:
        directory, name = self._place(path)
        entry = directory.entries.get(name)
        if not isinstance(entry, _File):
            raise _error(errno.ENOENT)
        return entry


class _OpenFile(NewFile):
    def __init__(self, files: SimulatedFiles, path: str, file: _File) -> None:
        self._files = files
        self._path = path
        self._file = file
        self._chunks: list[bytes] = []

    def write(self, data: memoryview, /) -> None:
        self._chunks.append(bytes(data))

    def sync(self) -> None:
        self._files.before("write", self._path)  # what is only in the cache is no use to anybody
        self.close()
        self._files.before("sync", self._path)
        self._file.is_synced = True

    def close(self) -> None:
        self._file.data += b"".join(self._chunks)
        self._chunks.clear()


def simulated_store(
    world: World, disk: Disk, trouble: Trouble, directory: str = JOB_DIRECTORY
) -> LocalStore:
    """One process's view of a directory, the job's or another."""
    return LocalStore(Path(directory), SimulatedFiles(world, disk, trouble))


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
