"""The few things a local store asks of a file system, and the real one that does them.

The simulator puts a file system in memory here, one that forgets with the power what was not
flushed: so the store it drives is the one that runs for real.

Rules of this file
------------------
1. A path is absolute. What goes wrong is an `OSError`, as the operating system says it.
2. What was written counts as kept only after `NewFile.sync`; a name that was given, or taken away,
   only after `flush_directory` of the directory it is in. Until then the power may take it back.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import uuid
from typing import Protocol

import pyarrow as pa

_WRITE_BUFFER_BYTES = 256 * 1024
_DELETE_TRIES_MAX = 5


class NewFile(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview, /) -> object: ...

    def sync(self) -> None:
        """Wait until the disk has all that was written."""

    def close(self) -> None: ...


class FileSystem(Protocol):
    """Every method may be called by any thread."""

    def unused_name(self) -> str:
        """One that nobody else is given, on any machine."""

    def open_new(self, file: str) -> NewFile:
        """A file that was not there; there must be a directory for it."""

    def link(self, file: str, name: str) -> None:
        """Give a file another name; one that is taken is a `FileExistsError`."""

    def flush_directory(self, directory: str) -> None:
        """Wait until the disk has the names in a directory: those there are, and no others."""

    def make_directory(self, directory: str) -> None:
        """That it is there already is fine; the one above it must be."""

    def is_directory(self, directory: str) -> bool: ...

    def read(self, file: str) -> bytes: ...

    def read_expected(self, file: str, length_bytes: int) -> tuple[pa.Buffer | None, int]:
        """The file and how long it is; it may be None if that is not what was expected."""

    def list(self, directory: str) -> builtins.list[str]:
        """The names in a directory, in any order."""

    def unlink(self, file: str) -> None:
        """That it is gone already is fine."""

    def remove_tree(self, directory: str) -> None:
        """A directory and all below it; that it is gone already is fine."""


class RealFiles(FileSystem):
    """The file system of this machine."""

    def unused_name(self) -> str:
        return uuid.uuid4().hex

    def open_new(self, file: str) -> NewFile:
        return _RealFile(file)

    def link(self, file: str, name: str) -> None:
        os.link(file, name)

    def flush_directory(self, directory: str) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, directory: str) -> None:
        try:
            os.mkdir(directory)
        except OSError:
            # Not only if it exists: on a read-only file system that is not what is said.
            if not os.path.isdir(directory):
                raise

    def is_directory(self, directory: str) -> bool:
        return os.path.isdir(directory)

    def read(self, file: str) -> bytes:
        with open(file, "rb") as source:
            return source.read()

    def read_expected(self, file: str, length_bytes: int) -> tuple[pa.Buffer | None, int]:
        with open(file, "rb", 0) as source:
            seen_bytes = os.fstat(source.fileno()).st_size
            if seen_bytes != length_bytes:
                return None, seen_bytes
            buffer = pa.allocate_buffer(length_bytes)
            return buffer, _read_into(source, memoryview(buffer))

    def list(self, directory: str) -> builtins.list[str]:
        return os.listdir(directory)

    def unlink(self, file: str) -> None:
        try:
            os.unlink(file)
        except FileNotFoundError:
            return

    def remove_tree(self, directory: str) -> None:
        for _ in range(_DELETE_TRIES_MAX):
            try:
                shutil.rmtree(directory)
            except FileNotFoundError:
                if not os.path.exists(directory):
                    return
            except OSError as error:
                # A slot of the past may be adding a file while we remove the others.
                if error.errno != errno.ENOTEMPTY:
                    raise
        if os.path.exists(directory):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


class _RealFile(NewFile):
    def __init__(self, file: str) -> None:
        self._target = open(file, "xb", _WRITE_BUFFER_BYTES)  # noqa: SIM115 - see `close`

    def write(self, data: memoryview, /) -> object:
        return self._target.write(data)

    def sync(self) -> None:
        self._target.flush()
        os.fsync(self._target.fileno())

    def close(self) -> None:
        self._target.close()


def _read_into(source: io.FileIO, view: memoryview) -> int:
    """Fill the view, as far as the file goes; one read gives at most 2 GiB."""
    filled_bytes = 0
    while filled_bytes < view.nbytes:
        read_bytes = source.readinto(view[filled_bytes:])
        if not read_bytes:
            break
        filled_bytes += read_bytes
    return filled_bytes


REAL_FILES = RealFiles()
