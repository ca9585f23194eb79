"""A job's own store that also shows the savepoint from which the job starts.

So that whoever restores state need not know where it comes from: a path below `savepoint/` means a
file of the savepoint, or of another job's checkpoint, wherever that lies. It is read and nothing
else; the job's own files are all others, and the first checkpoint of the job has everything itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from stillframe.storage.around import StoreAround
from stillframe.storage.paths import SAVEPOINT_DIRECTORY
from stillframe.storage.store import Chunk, Store, Written

_PREFIX = f"{SAVEPOINT_DIRECTORY}/"


def path_in_savepoint(path: str) -> str:
    """Where a job sees the file that has this path in the savepoint."""
    return _PREFIX + path


def is_in_savepoint(path: str) -> bool:
    """Whether a file is not the job's own: no checkpoint of the job may refer to it."""
    return path.startswith(_PREFIX)


class StoreWithSavepoint(StoreAround):
    """`own` in all respects, but for reading what is the savepoint's."""

    def __init__(self, own: Store, savepoint: Store) -> None:
        super().__init__(own)
        self._savepoint = savepoint

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        return self._own.write(_own(path), chunks)

    def create_if_absent(self, path: str, data: bytes) -> bool:
        return self._own.create_if_absent(_own(path), data)

    def read(self, path: str) -> bytes:
        store, path = self._place_of(path)
        return store.read(path)

    def read_verified(self, path: str, length_bytes: int, crc32: int) -> pa.Buffer:
        store, path = self._place_of(path)
        return store.read_verified(path, length_bytes, crc32)

    def delete(self, path: str) -> None:
        self._own.delete(_own(path))

    def delete_directory(self, path: str) -> None:
        self._own.delete_directory(_own(path))

    def delete_unfinished(self, directory: str) -> None:
        self._own.delete_unfinished(_own(directory))

    def _place_of(self, path: str) -> tuple[Store, str]:
        if path.startswith(_PREFIX):
            return self._savepoint, path.removeprefix(_PREFIX)
        return self._own, path


def _own(path: str) -> str:
    assert not path.startswith(_PREFIX), f"a savepoint is never changed: {path}"
    return path
