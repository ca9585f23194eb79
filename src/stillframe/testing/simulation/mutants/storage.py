"""Mistakes in how files come to be on a disk, and to stay there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from stillframe.storage import local
from stillframe.storage.local import LocalStore
from stillframe.testing.simulation.mutants.mutant import Mutant, nothing
from stillframe.testing.simulation.storage import Died


def _unverified(original: Any) -> Any:
    def read_verified(self: Any, path: str, length_bytes: int, crc32: int) -> Any:
        import pyarrow as pa

        return pa.py_buffer(self.read(path))

    return read_verified


class _Lazy:
    """Another's files or file, of which what it would wait for is done a little later, or never."""

    def __init__(self, whole: Any, world: Any) -> None:
        self._whole = whole
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def open_new(self, file: str) -> Any:
        return _Lazy(self._whole.open_new(file), self._world)

    def sync(self) -> None:
        self._later(self._whole.sync)

    def flush_directory(self, directory: str) -> None:
        self._later(self._whole.flush_directory, directory)

    def _later(self, action: Any, *arguments: Any) -> None:
        def act() -> None:
            with suppress(OSError, Died):
                action(*arguments)

        if self._world is not None:
            self._world.soon(act, 1.0)


def _durable_later(original: Any) -> Any:
    def write(self: Any, path: str, chunks: Any) -> Any:
        if path.endswith("_metadata"):
            return original(self, path, chunks)
        files = _Lazy(self._files, self._files.world)
        return original(LocalStore(self.address, files), path, chunks)

    return write


def _without_sync(original: Any) -> Any:
    return lambda target, chunks: original(_Lazy(target, None), chunks)


STORAGE_MUTANTS: Mapping[str, Mutant] = {
    "ignore-checksums": Mutant(
        "a damaged file is restored from",
        LocalStore, "read_verified", _unverified,
    ),
    "metadata-before-files": Mutant(
        "a state file counts as written while the disk is still at it",
        LocalStore, "write", _durable_later,
    ),
    "skip-the-sync": Mutant(
        "a file gets its name before the disk has its bytes",
        local, "_write_through", _without_sync,
    ),
    "forget-to-flush-the-directory": Mutant(
        "a file gets its name and the disk may not know it",
        LocalStore, "_flush_name", nothing,
    ),
    "trust-a-directory-that-is-there": Mutant(
        "the name of a directory is flushed only by those who make it, who may die before",
        LocalStore, "_flush_found", nothing,
    ),
}  # fmt: skip
