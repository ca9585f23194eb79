"""A store in a local directory, or one that every machine has mounted: atomic and durable.

Theory of operation
-------------------
A file is written under a temporary name beside its final one, flushed to the disk, and then given
its final name with a hard link, which fails if that name exists: the whole file appears at once,
for exactly one of those who try. (A rename would silently replace the other's file.) Then the
directory is flushed, or the name itself could be lost with the power. A new directory counts only
when its parent has been flushed, for the same reason.

A crash leaves at worst a temporary file, whose name starts with `.tmp-`: no listing shows it, and
it goes away with its directory or by `delete_unfinished`.

A deletion is not waited for: after a loss of power the file may be there again, and whoever deletes
deletes it once more, unless nobody would. For that there is `settle`.
"""

from __future__ import annotations

import builtins
import errno
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from stillframe.errors import SnapshotDamaged, StorageError
from stillframe.storage.files import REAL_FILES, FileSystem, NewFile
from stillframe.storage.store import (
    Chunk,
    Store,
    Written,
    check_crc32,
    never_overwritten,
    wrong_length,
)

TEMPORARY_PREFIX = ".tmp-"
_KNOWN_DIRECTORIES_MAX = 1024

_NO_SPACE = "no space left on device; free some, or choose another checkpoint location"
_NO_ACCESS = "permission denied; let this user write there, or choose another checkpoint location"
_REASONS = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: f"{_NO_SPACE} (the user's quota is used up)",
    errno.EFBIG: f"{_NO_SPACE} (files of this size are not allowed)",
    errno.EACCES: _NO_ACCESS,
    errno.EPERM: _NO_ACCESS,
    errno.EROFS: "the file system is read-only; choose another checkpoint location",
    errno.ENOTDIR: "a part of the path is a file and not a directory; move it out of the way",
    errno.EISDIR: "it is a directory and not a file; move it out of the way",
    errno.EIO: "the device reported an input/output error; check the disk",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
}

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL)
"""Said by directories in which nobody like us has made anything: not ours to flush."""


class LocalStore(Store):
    """Files below a directory of the local file system."""

    def __init__(self, root: Path, files: FileSystem = REAL_FILES) -> None:
        # Absolute, because a slot that opens the same address has another working directory.
        self._root = os.path.abspath(root)
        self._files = files
        self._known_directories: set[str] = set()

    def __repr__(self) -> str:
        return f"LocalStore({self.address!r})"

    @property
    def has_network(self) -> bool:
        return False

    @property
    def address(self) -> str:
        return self._root

    def below(self, directory: str) -> LocalStore:
        return LocalStore(Path(self._locate(directory)), self._files)

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        final = self._locate(path)
        with _telling("write", final), self._written_beside(final, chunks) as (temporary, written):
            try:
                self._files.link(temporary, final)
            except FileExistsError:
                raise never_overwritten(final) from None
            try:
                self._flush_name(final)
            except OSError:
                self._files.unlink(final)
                raise
        return written

    def create_if_absent(self, path: str, data: bytes) -> bool:
        final = self._locate(path)
        with _telling("create", final), self._written_beside(final, [data]) as (temporary, _):
            try:
                self._files.link(temporary, final)
            except FileExistsError:
                return False
            # Should this fail, the file stays: somebody may have seen it already, and a name that
            # was taken once must not become free again.
            self._flush_name(final)
        return True

    def read(self, path: str) -> bytes:
        file = self._locate(path)
        with _telling("read", file), _missing_is_damage(file):
            return self._files.read(file)

    def read_verified(self, path: str, length_bytes: int, crc32: int) -> pa.Buffer:
        file = self._locate(path)
        with _telling("read", file), _missing_is_damage(file):
            buffer, seen_bytes = self._files.read_expected(file, length_bytes)
        if buffer is None or seen_bytes != length_bytes:
            raise wrong_length(file, seen_bytes, length_bytes, crc32)
        check_crc32(file, buffer, crc32)
        return buffer

    def list(self, directory: str) -> builtins.list[str]:
        place = self._locate(directory) if directory else self._root
        with _telling("list", place):
            names = self._names(place)
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def delete(self, path: str) -> None:
        file = self._locate(path)
        with _telling("delete", file):
            self._files.unlink(file)

    def delete_directory(self, path: str) -> None:
        directory = self._locate(path)
        with _telling("delete", directory):
            self._files.remove_tree(directory)

    def delete_unfinished(self, directory: str) -> None:
        place = self._locate(directory)
        with _telling("delete", place):
            for name in self._names(place):
                if name.startswith(TEMPORARY_PREFIX):
                    self._files.unlink(os.path.join(place, name))

    def settle(self, directory: str) -> None:
        place = self._locate(directory) if directory else self._root
        with _telling("flush", place), suppress(FileNotFoundError):
            self._files.flush_directory(place)

    def _locate(self, path: str) -> str:
        parts = path.split("/")
        assert not any(part in ("", ".", "..") for part in parts), f"not a path here: {path!r}"
        return os.path.join(self._root, path)

    def _names(self, place: str) -> builtins.list[str]:
        try:
            return self._files.list(place)
        except FileNotFoundError:
            return []

    @contextmanager
    def _written_beside(self, final: str, chunks: Iterable[Chunk]) -> Iterator[tuple[str, Written]]:
        """A new file in the final one's directory, which the disk has; gone afterwards."""
        temporary = os.path.join(
            os.path.dirname(final), TEMPORARY_PREFIX + self._files.unused_name()
        )
        target = self._open_new(temporary)
        try:
            yield temporary, _write_through(target, chunks)
        finally:
            # Left-overs are harmless, and what went wrong before is the better story.
            with suppress(OSError):
                self._files.unlink(temporary)

    def _open_new(self, file: str) -> NewFile:
        directory = os.path.dirname(file)
        self._make_directory(directory)
        try:
            return self._files.open_new(file)
        except FileNotFoundError:  # known, but deleted since
            self._known_directories.clear()
            self._make_directory(directory)
            return self._files.open_new(file)

    def _flush_name(self, file: str) -> None:
        """Make the name of a file durable."""
        self._files.flush_directory(os.path.dirname(file))

    def _make_directory(self, directory: str) -> None:
        """Make a directory and those above it, durably.

        One that is there may have been made a moment ago by somebody who has yet to flush its
        parent, so from the root down a parent is flushed at first sight, whoever made the child.
        """
        if directory in self._known_directories:
            return
        if directory == self._root:
            self._make_with_parents(directory)
        else:
            self._make_directory(os.path.dirname(directory))
            self._files.make_directory(directory)
            self._flush_name(directory)
        if len(self._known_directories) >= _KNOWN_DIRECTORIES_MAX:
            self._known_directories.clear()
        self._known_directories.add(directory)

    def _make_with_parents(self, directory: str) -> None:
        if self._files.is_directory(directory):
            self._flush_found(directory)
            return
        self._make_with_parents(os.path.dirname(directory))
        self._files.make_directory(directory)
        self._flush_name(directory)

    def _flush_found(self, directory: str) -> None:
        """Whoever made this one may have died, or failed, before its name was flushed."""
        try:
            self._flush_name(directory)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise


def _write_through(target: NewFile, chunks: Iterable[Chunk]) -> Written:
    """Write all chunks and wait until the disk has them."""
    length_bytes = 0
    crc32 = 0
    with closing(target):
        for chunk in chunks:
            view = memoryview(chunk)
            target.write(view)
            crc32 = zlib.crc32(view, crc32)
            length_bytes += view.nbytes
        target.sync()
    return Written(length_bytes, crc32)


@contextmanager
def _telling(doing: str, path: str) -> Iterator[None]:
    """Turn what the operating system says into one sentence that names the path."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise StorageError(f"cannot {doing} {path}: {reason}") from error


@contextmanager
def _missing_is_damage(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise SnapshotDamaged(
            f"{path} is missing: it was deleted, or never written, or this machine does not see"
            " the same files as the one that wrote it"
        ) from error
