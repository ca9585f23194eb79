"""The store contract: where snapshots and the job log live, and what may be relied on there.

Rules of this file
------------------
1. A path is relative to the store's root, with `/` between its parts: `chk-7/_metadata`.
2. A file is there as a whole or not at all, whatever dies and whenever; once written it is never
   changed, only deleted.
3. What goes wrong outside is a `StorageError` of one sentence that names the file.
"""

from __future__ import annotations

import builtins
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

import pyarrow as pa

from stillframe.errors import BuildError, SnapshotDamaged, StorageError

Chunk: TypeAlias = bytes | bytearray | memoryview | pa.Buffer


@dataclass(frozen=True, slots=True)
class Written:
    """What a file holds now; recorded, so that damage is seen when it is read."""

    length_bytes: int
    crc32: int
    data: bytes | None = field(default=None, repr=False, compare=False)
    """All of it, where the store keeps no file and leaves it to the caller to keep this."""


class Store(ABC):
    """A directory tree of files that are written once. Every method may be called by any thread."""

    @property
    def has_network(self) -> bool:
        """Whether files are sent to an object storage or HDFS, so that small ones are worth some
        work."""
        return True

    @property
    @abstractmethod
    def address(self) -> str:
        """What `open_store` needs to open this store again, also on another machine."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What `open_store` needs besides; there may be secrets in it, so it is never shown."""
        return {}

    @abstractmethod
    def below(self, directory: str) -> Store:
        """The same store, rooted at one of its directories, which need not exist yet."""

    @abstractmethod
    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        """Make a new file of these chunks, in order.

        When it returns the file is complete and durable; when it raises there is no such file
        (after `Unanswered` one may appear later: a sweep finds it).
        A file that is there already is left alone and is an error.
        """

    @abstractmethod
    def create_if_absent(self, path: str, data: bytes) -> bool:
        """Make a new file, whole and durable; False if there already was one of that name.

        Of any number of callers, on any machines, exactly one gets True. After a `StorageError`
        the file may be there or not: look before you conclude anything. Only `NotDone` says that
        this call has made none; after `Unanswered` it may even appear later.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The whole file, unverified; a missing one is a `SnapshotDamaged`."""

    @abstractmethod
    def read_verified(self, path: str, length_bytes: int, crc32: int) -> pa.Buffer:
        """The whole file if it is what was recorded, otherwise (or missing) `SnapshotDamaged`."""

    @abstractmethod
    def list(self, directory: str) -> builtins.list[str]:
        """The names of a directory's children, sorted; none if there is no such directory."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; that it is gone already is fine. See `settle` for how durably."""

    @abstractmethod
    def delete_directory(self, path: str) -> None:
        """Remove a directory and all below it, left-overs too; that it is gone already is fine."""

    def delete_unfinished(self, directory: str) -> None:  # noqa: B027 - most leave nothing behind
        """Remove what writers that died left behind in a directory; its files stay.

        One that is still at it fails: call this only where nobody should be writing any more.
        """

    def settle(self, directory: str) -> None:  # noqa: B027 - most delete for good
        """Wait until what was deleted in a directory cannot come back with the power.

        Those below it are not meant. That there is no such directory is fine.
        """


def wrong_length(where: str, seen_bytes: int, length_bytes: int, crc32: int) -> SnapshotDamaged:
    return SnapshotDamaged(
        f"{where} is damaged: it has {seen_bytes} bytes where {length_bytes} were recorded"
        f" (with checksum {crc32:08x})"
    )


def check_crc32(where: str, contents: pa.Buffer | bytes, crc32: int) -> None:
    """Raise `SnapshotDamaged` if these bytes are not those that were recorded."""
    seen_crc32 = zlib.crc32(contents)
    if seen_crc32 != crc32:
        raise SnapshotDamaged(
            f"{where} is damaged: its {len(contents)} bytes have checksum {seen_crc32:08x} where"
            f" {crc32:08x} was recorded"
        )


def never_overwritten(where: str) -> StorageError:
    return StorageError(
        f"cannot write {where}: there is such a file already, and a snapshot's files are never"
        " overwritten"
    )


def open_store(address: str, settings: Mapping[str, str] | None = None) -> Store:
    """The store at a plain path, or a `file:`, `s3:`, `s3a:` or `hdfs:` URL.

    Building it touches nothing. `settings` are Hadoop's names for what an address does not say,
    such as `fs.s3a.endpoint`; what neither says is taken from the environment of this process.
    """
    # Imported here because the stores are themselves built on this contract.
    match _scheme(address):
        case "s3" | "s3a":
            from stillframe.storage.s3 import open_s3

            return open_s3(address, settings or {})
        case "hdfs":
            from stillframe.storage.hdfs import open_hdfs

            return open_hdfs(address)
        case _:
            from stillframe.storage.local import LocalStore

            return LocalStore(_local_path(address))


# Two letters at least, so that `c:/x` stays a path; one slash, because Hadoop writes `file:/x` too.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def is_local_address(address: str) -> bool:
    """Whether the address is a directory of this machine, mounted ones included."""
    return _scheme(address) in ("", "file")


def canonical_address(address: str) -> str:
    """The one way to write where this is, whichever it was written in; nothing is opened for it.

    A directory of this machine is its absolute path with links followed, be it given as a relative
    one or as a `file:` URL; of others, slashes too many are gone and `s3a:` is `s3:`.
    """
    scheme = _scheme(address)
    if scheme not in ("s3", "s3a", "hdfs"):
        return os.path.realpath(_local_path(address))
    authority, _, path = address.partition(":")[2].removeprefix("//").partition("/")
    parts = [part for part in path.split("/") if part]
    return "/".join([f"{scheme.replace('s3a', 's3')}://{authority}", *parts])


def _scheme(address: str) -> str:
    found = _SCHEME.match(address)
    return found[1].lower() if found else ""


def _local_path(address: str) -> Path:
    if not address.strip():
        raise BuildError("the checkpoint location is empty: give a directory")
    scheme = _SCHEME.match(address)
    if not scheme:
        return Path(address)
    if scheme[1].lower() != "file":
        raise BuildError(
            f"the checkpoint location {address!r} is on {scheme[1]!r}, which is not supported:"
            " give a path, or a file://, s3://, s3a:// or hdfs:// URL"
        )
    # By hand, because a URL parser would cut a directory's name at `?` or `#`.
    machine, path = "", address[scheme.end() - 1 :]
    if path.startswith("//"):
        machine, slash, rest = path[2:].partition("/")
        path = slash + rest
    if machine not in ("", "localhost"):
        raise BuildError(
            f"the checkpoint location {address!r} names the machine {machine!r}, but a file://"
            " URL means a directory of this machine: write file:/// with three slashes"
        )
    return Path(unquote(path or "/"))
