"""A store in memory that fails on demand, within what its contract allows, and once beyond it."""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from stillframe.errors import SnapshotDamaged, StorageError
from stillframe.storage.store import Chunk, Store, Written
from stillframe.testing.simulation.world import World


class Died(BaseException):
    """The process that was using the store is dead; nothing of it goes on."""


@dataclass(slots=True)
class Disk:
    """What is stored; it survives everybody."""

    files: dict[str, bytes] = field(default_factory=dict)

    def rot(self, path: str) -> None:
        """Change a file behind everybody's back."""
        data = bytearray(self.files[path])
        data[len(data) // 2] ^= 0x55
        self.files[path] = bytes(data)


Trouble = Callable[[str, str], None]
"""Asked before each operation (its name and its path); raises what goes wrong, if anything."""


class SimulatedStore(Store):
    """One user's view of the disk, rooted at the job's directory."""

    def __init__(self, world: World, disk: Disk, trouble: Trouble) -> None:
        self._world = world
        self._disk = disk
        self._trouble = trouble

    @property
    def address(self) -> str:
        return "simulated"

    def below(self, directory: str) -> Store:
        raise AssertionError("the simulation gives the job's own directory")

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        data = b"".join(bytes(chunk) for chunk in chunks)
        self._trouble("write", path)
        if path in self._disk.files:
            raise StorageError(f"{path} exists and is never overwritten")
        self._disk.files[path] = data
        try:
            self._trouble("wrote", path)
        except BaseException:
            if self._world.chance(0.5):  # nobody was told that it is whole
                self._disk.files[path] = data[: len(data) // 2]
            raise
        return Written(len(data), zlib.crc32(data))

    def create_if_absent(self, path: str, data: bytes) -> bool:
        self._trouble("create", path)
        if path in self._disk.files:
            return False
        self._disk.files[path] = data
        self._trouble("created", path)
        return True

    def read(self, path: str) -> bytes:
        self._trouble("read", path)
        if path not in self._disk.files:
            raise SnapshotDamaged(f"{path} is missing")
        return self._disk.files[path]

    def read_verified(self, path: str, length_bytes: int, crc32: int) -> pa.Buffer:
        data = self.read(path)
        if len(data) != length_bytes or zlib.crc32(data) != crc32:
            raise SnapshotDamaged(f"{path} is damaged")
        return pa.py_buffer(data)

    def list(self, directory: str) -> builtins.list[str]:
        self._trouble("list", directory)
        prefix = f"{directory}/" if directory else ""
        below = (path[len(prefix) :] for path in self._disk.files if path.startswith(prefix))
        return sorted({name.split("/", 1)[0] for name in below})

    def delete(self, path: str) -> None:
        self._trouble("delete", path)
        self._disk.files.pop(path, None)

    def delete_directory(self, path: str) -> None:
        self._trouble("delete", path)
        for name in [name for name in self._disk.files if name.startswith(f"{path}/")]:
            del self._disk.files[name]
