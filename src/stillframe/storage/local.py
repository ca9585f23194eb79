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
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from stillframe.errors import SnapshotDamaged, StorageError
from stillframe.storage.store import Chunk, Store, Written

_TEMPORARY_PREFIX = ".tmp-"
_WRITE_BUFFER_BYTES = 256 * 1024
_KNOWN_DIRECTORIES_MAX = 1024
_DELETE_TRIES_MAX = 5

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


class LocalStore(Store):
    """Files below a directory of the local file system."""

    def __init__(self, root: Path) -> None:
        # Absolute, because a slot that opens the same address has another working directory.
        self._root = Path(os.path.abspath(root))
        self._known_directories: set[Path] = set()

    def __repr__(self) -> str:
        return f"LocalStore({self.address!r})"

    @property
    def address(self) -> str:
        return str(self._root)

    def below(self, directory: str) -> LocalStore:
        return LocalStore(self._locate(directory))

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        final = self._locate(path)
        with _telling("write", final), self._temporary_beside(final) as temporary:
            written = _write_through(temporary, chunks)
            try:
                os.link(temporary, final)
            except FileExistsError:
                raise StorageError(
                    f"cannot write {final}: there is such a file already, and a snapshot's files"
                    " are never overwritten"
                ) from None
            try:
                _flush_directory(final.parent)
            except OSError:
                final.unlink(missing_ok=True)
                raise
        return written

    def create_if_absent(self, path: str, data: bytes) -> bool:
        final = self._locate(path)
        with _telling("create", final), self._temporary_beside(final) as temporary:
            _write_through(temporary, [data])
            try:
                os.link(temporary, final)
            except FileExistsError:
                return False
            # Should this fail, the file stays: somebody may have seen it already, and a name that
            # was taken once must not become free again.
            _flush_directory(final.parent)
        return True

    def read(self, path: str) -> bytes:
        file = self._locate(path)
        with _telling("read", file), _missing_is_damage(file):
            return file.read_bytes()

    def read_verified(self, path: str, length_bytes: int, crc32: int) -> pa.Buffer:
        file = self._locate(path)
        with _telling("read", file), _missing_is_damage(file), file.open("rb", 0) as source:
            seen_bytes = os.fstat(source.fileno()).st_size
            if seen_bytes == length_bytes:
                buffer = pa.allocate_buffer(length_bytes)
                seen_bytes = _read_into(source, memoryview(buffer))
        if seen_bytes != length_bytes:
            raise SnapshotDamaged(
                f"{file} is damaged: it has {seen_bytes} bytes where {length_bytes} were recorded"
                f" (with checksum {crc32:08x})"
            )
        seen_crc32 = zlib.crc32(buffer)
        if seen_crc32 != crc32:
            raise SnapshotDamaged(
                f"{file} is damaged: its {length_bytes} bytes have checksum {seen_crc32:08x} where"
                f" {crc32:08x} was recorded"
            )
        return buffer

    def list(self, directory: str) -> builtins.list[str]:
        place = self._locate(directory) if directory else self._root
        with _telling("list", place):
            try:
                names = os.listdir(place)
            except FileNotFoundError:
                return []
        return sorted(name for name in names if not name.startswith(_TEMPORARY_PREFIX))

    def delete(self, path: str) -> None:
        file = self._locate(path)
        with _telling("delete", file):
            file.unlink(missing_ok=True)

    def delete_directory(self, path: str) -> None:
        directory = self._locate(path)
        with _telling("delete", directory):
            _remove_tree(directory)

    def delete_unfinished(self, directory: str) -> None:
        place = self._locate(directory)
        with _telling("delete", place):
            for file in place.glob(f"{_TEMPORARY_PREFIX}*"):
                file.unlink(missing_ok=True)

    def _locate(self, path: str) -> Path:
        parts = path.split("/")
        assert not any(part in ("", ".", "..") for part in parts), f"not a path here: {path!r}"
        return self._root.joinpath(*parts)

    @contextmanager
    def _temporary_beside(self, final: Path) -> Iterator[Path]:
        """The name of a new empty file in the final one's directory; gone afterwards."""
        temporary = final.parent / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        self._make_directory(final.parent)
        try:
            temporary.touch(exist_ok=False)
        except FileNotFoundError:  # known, but deleted since
            self._known_directories.clear()
            self._make_directory(final.parent)
            temporary.touch(exist_ok=False)
        try:
            yield temporary
        finally:
            # Left-overs are harmless, and what went wrong before is the better story.
            with suppress(OSError):
                temporary.unlink()

    def _make_directory(self, directory: Path) -> None:
        """Make a directory and those above it, durably.

        One that is there may have been made a moment ago by somebody who has yet to flush its
        parent, so from the root down a parent is flushed at first sight, whoever made the child.
        """
        if directory in self._known_directories:
            return
        if directory == self._root:
            _make_with_parents(directory)
        else:
            self._make_directory(directory.parent)
            directory.mkdir(exist_ok=True)
            _flush_directory(directory.parent)
        if len(self._known_directories) >= _KNOWN_DIRECTORIES_MAX:
            self._known_directories.clear()
        self._known_directories.add(directory)


def _make_with_parents(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_with_parents(directory.parent)
    directory.mkdir(exist_ok=True)
    _flush_directory(directory.parent)


def _write_through(file: Path, chunks: Iterable[Chunk]) -> Written:
    """Write all chunks and wait until the disk has them."""
    length_bytes = 0
    crc32 = 0
    with file.open("wb", _WRITE_BUFFER_BYTES) as target:
        for chunk in chunks:
            view = memoryview(chunk)
            target.write(view)
            crc32 = zlib.crc32(view, crc32)
            length_bytes += view.nbytes
        target.flush()
        os.fsync(target.fileno())
    return Written(length_bytes, crc32)


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_into(source: io.FileIO, view: memoryview) -> int:
    """Fill the view, as far as the file goes; one read gives at most 2 GiB."""
    filled_bytes = 0
    while filled_bytes < view.nbytes:
        read_bytes = source.readinto(view[filled_bytes:])
        if not read_bytes:
            break
        filled_bytes += read_bytes
    return filled_bytes


def _remove_tree(directory: Path) -> None:
    for _ in range(_DELETE_TRIES_MAX):
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            if not directory.exists():
                return
        except OSError as error:
            # A slot of the past may be adding a file while we remove the others.
            if error.errno != errno.ENOTEMPTY:
                raise
    if directory.exists():
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


@contextmanager
def _telling(doing: str, path: Path) -> Iterator[None]:
    """Turn what the operating system says into one sentence that names the path."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise StorageError(f"cannot {doing} {path}: {reason}") from error


@contextmanager
def _missing_is_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise SnapshotDamaged(
            f"{path} is missing: it was deleted, or never written, or this machine does not see"
            " the same files as the one that wrote it"
        ) from error
