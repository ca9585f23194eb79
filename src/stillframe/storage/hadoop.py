"""HDFS through `pyarrow.fs`, kept to what that offers. No server was at hand to test it on.

A file is written under a temporary name, which no listing shows, and moved to its final one when
it is whole; so it appears at once or not at all. What pyarrow.fs has nothing for:

1. *Exactly one creator.* Its `move` deletes a file that is in the way, and its streams overwrite,
   so `create_if_absent` can only look first. Two drivers that start the same job at the same
   moment are not told apart; one that comes later is. Nobody else may run the job meanwhile.
2. *Durability.* There is no call that waits until the disks have a file: what HDFS has
   acknowledged may be lost when all its machines lose their power at once.

Opening such a store says the first of these in the log. Everything but the connection is tested,
on pyarrow's local file system.
"""

from __future__ import annotations

import builtins
import logging
import posixpath
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa
from pyarrow import fs

from stillframe.errors import BuildError, SnapshotDamaged, StorageError
from stillframe.storage.store import Chunk, Store, Written

log = logging.getLogger("stillframe")

_TEMPORARY_PREFIX = ".tmp-"


def open_hdfs(address: str) -> HadoopStore:
    """The store at `hdfs://host:port/path`, or `hdfs:///path` where Hadoop knows the host."""
    rest = address.partition(":")[2]
    host, slash, path = rest.removeprefix("//").partition("/")
    parts = [part for part in path.split("/") if part]
    if not rest.startswith("//") or not slash or any(part in (".", "..") for part in parts):
        raise BuildError(
            f"the checkpoint location {address!r} is no directory of HDFS: write it as"
            " hdfs://host:port/path"
        )
    try:
        files = fs.HadoopFileSystem.from_uri(f"hdfs://{host or 'default'}")
    except (OSError, pa.ArrowException) as error:
        raise StorageError(
            f"cannot open {address}: pyarrow does not reach HDFS ({_first_line(error)}); set"
            " HADOOP_HOME, JAVA_HOME and CLASSPATH as its documentation says, or mount it"
        ) from error
    log.warning(
        "checkpoints go to %s through pyarrow.fs, which cannot tell two drivers apart that start"
        " a job at the same moment: run one driver per job",
        address,
    )
    return HadoopStore(files, f"hdfs://{host}", "/" + "/".join(parts))


class HadoopStore(Store):
    """Files below a directory of a pyarrow file system."""

    def __init__(self, files: fs.FileSystem, authority: str, root: str) -> None:
        self._files = files
        self._authority = authority
        self._root = root.rstrip("/")

    def __repr__(self) -> str:
        return f"HadoopStore({self.address!r})"

    @property
    def address(self) -> str:
        return self._authority + self._root

    def below(self, directory: str) -> HadoopStore:
        return HadoopStore(self._files, self._authority, self._locate(directory))

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        final = self._locate(path)
        with self._telling("write", final):
            written = self._publish(final, chunks)
        if written is None:
            raise StorageError(
                f"cannot write {self._authority}{final}: there is such a file already, and a"
                " snapshot's files are never overwritten"
            )
        return written

    def create_if_absent(self, path: str, data: bytes) -> bool:
        final = self._locate(path)
        with self._telling("create", final):
            return self._publish(final, [data]) is not None

    def read(self, path: str) -> bytes:
        file = self._locate(path)
        with (
            self._telling("read", file),
            self._missing_is_damage(file),
            self._files.open_input_stream(file, compression=None) as source,
        ):
            return bytes(source.read())

    def read_verified(self, path: str, length_bytes: int, crc32: int) -> pa.Buffer:
        file = self._locate(path)
        where = self._authority + file
        with (
            self._telling("read", file),
            self._missing_is_damage(file),
            self._files.open_input_file(file) as source,
        ):
            seen_bytes = source.size()
            buffer = source.read_buffer(length_bytes) if seen_bytes == length_bytes else None
        if buffer is None or buffer.size != length_bytes:
            raise SnapshotDamaged(
                f"{where} is damaged: it has {seen_bytes} bytes where {length_bytes} were recorded"
                f" (with checksum {crc32:08x})"
            )
        seen_crc32 = zlib.crc32(buffer)
        if seen_crc32 != crc32:
            raise SnapshotDamaged(
                f"{where} is damaged: its {length_bytes} bytes have checksum {seen_crc32:08x} where"
                f" {crc32:08x} was recorded"
            )
        return buffer

    def list(self, directory: str) -> builtins.list[str]:
        place = self._locate(directory) if directory else self._root
        with self._telling("list", place):
            names = self._names(place)
        return sorted(name for name in names if not name.startswith(_TEMPORARY_PREFIX))

    def delete(self, path: str) -> None:
        file = self._locate(path)
        with self._telling("delete", file), suppress(FileNotFoundError):
            if self._is_there(file):
                self._files.delete_file(file)

    def delete_directory(self, path: str) -> None:
        directory = self._locate(path)
        with self._telling("delete", directory), suppress(FileNotFoundError):
            if self._is_there(directory):
                self._files.delete_dir(directory)

    def delete_unfinished(self, directory: str) -> None:
        place = self._locate(directory)
        with self._telling("delete", place):
            for name in self._names(place):
                if name.startswith(_TEMPORARY_PREFIX):
                    self._files.delete_file(posixpath.join(place, name))

    def _locate(self, path: str) -> str:
        parts = path.split("/")
        assert not any(part in ("", ".", "..") for part in parts), f"not a path here: {path!r}"
        return f"{self._root}/{path}"

    def _is_there(self, path: str) -> bool:
        return bool(self._files.get_file_info(path).type != fs.FileType.NotFound)

    def _names(self, place: str) -> builtins.list[str]:
        selector = fs.FileSelector(place, allow_not_found=True)
        return [info.base_name for info in self._files.get_file_info(selector)]

    def _publish(self, final: str, chunks: Iterable[Chunk]) -> Written | None:
        """Write a whole file and move it into sight; None if there is one of that name."""
        if self._is_there(final):
            return None
        directory = posixpath.dirname(final)
        self._files.create_dir(directory, recursive=True)
        temporary = f"{directory}/{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            written = self._write_through(temporary, chunks)
            if self._is_there(final):
                return None
            self._files.move(temporary, final)
            return written
        finally:
            with suppress(OSError):
                if self._is_there(temporary):
                    self._files.delete_file(temporary)

    def _write_through(self, file: str, chunks: Iterable[Chunk]) -> Written:
        length_bytes = 0
        crc32 = 0
        with self._files.open_output_stream(file, compression=None) as target:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                target.write(view)
                crc32 = zlib.crc32(view, crc32)
                length_bytes += view.nbytes
        return Written(length_bytes, crc32)

    @contextmanager
    def _telling(self, doing: str, path: str) -> Iterator[None]:
        """Turn what pyarrow says into one sentence that names the path."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise StorageError(
                f"cannot {doing} {self._authority}{path}: {_first_line(error)}"
            ) from error

    @contextmanager
    def _missing_is_damage(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise SnapshotDamaged(
                f"{self._authority}{path} is missing: it was deleted, or never written"
            ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
