"""Places: where sources read files and sinks write them, by one small contract.

A file is named by its full address, as text: `/data/a.json` on a disk, `s3://bucket/data/a.json` in
a bucket. Parts of an address are put together with `/`, and `os.path.join`, `dirname` and
`basename` do the right thing with both. `address_of` makes such an address of what users write,
`place_of` answers the place that has it.

How a place is added
--------------------
1. Write a class with the methods of `Place` in a file of its own; it is built from an address and
   the settings that travel with a job, must not connect before its first call, and is never
   pickled (the address and the settings are).
2. Give its scheme to `_KINDS`, with the one way in which its addresses are written.
3. Add it to the fixture `place` of `tests/storage/test_places.py`, which holds every place to the
   contract.

Rules of this file
------------------
1. Every method may be called by any thread.
2. What is missing is a `FileNotFoundError` unless a method says otherwise. Other troubles are
   `OSError` (of a disk) or `StorageError`.
3. A file is there as a whole or not at all; once `finish` or `create_if_absent` has returned it is
   durable.
"""

from __future__ import annotations

import io
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, ClassVar

from stillframe.errors import BuildError
from stillframe.storage.renewed import Renewed

NameFilter = Callable[[str], bool]
"""Says of one part of a path that it is passed over, with all below it."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a listing says of a file."""

    path: str
    size_bytes: int
    changed_at_ms: int


class OpenFile(io.RawIOBase):
    """A file that is read: `read`, `seek` and `tell`, and how long the file is now.

    Of a file that is replaced while it is read, the bytes are of the one that was opened, or
    reading raises.
    """

    def size_now(self) -> int:
        raise NotImplementedError


class Draft(ABC):
    """A file that is being written and does not count yet. Used by one thread at a time."""

    file: BinaryIO
    """Where its bytes go."""

    @abstractmethod
    def finish(self) -> int:
        """Make it durable under its address; answers its size in bytes. Called once."""

    @abstractmethod
    def discard(self) -> None:
        """Give up what was written; must not raise. A crash may leave it: for a sweep."""


class Place(ABC):
    """Files of one disk, bucket or file system."""

    has_rename: ClassVar[bool]
    """Whether `move` happens at once. Otherwise it copies, and may be seen half done."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What `place_of` needs to open it on another machine; there may be secrets in it."""
        return {}

    # --- looking ---

    @abstractmethod
    def walk(self, directory: str, skips: NameFilter) -> Iterator[FileFacts]:
        """Every file below, at any depth; none if there is no such directory."""

    @abstractmethod
    def facts(self, path: str) -> FileFacts | None:
        """Of this file; None if there is none, or if it is a directory."""

    @abstractmethod
    def has_directory(self, path: str) -> bool: ...

    @abstractmethod
    def open(self, path: str) -> OpenFile: ...

    # --- changing ---

    @abstractmethod
    def draft(self, path: str) -> Draft:
        """Begin a new file, in a directory that need not exist. Nobody else has this name."""

    @abstractmethod
    def create_if_absent(self, path: str, data: bytes) -> bool:
        """Make a new file; False if there is one. Of any number of callers one gets True."""

    def note(self, path: str) -> None:
        """Make an empty file; that there is one already is fine. `settle` makes it durable."""
        self.create_if_absent(path, b"")

    def make_directory(self, path: str) -> None:  # noqa: B027 - many have none
        """So that one who may not write there learns it early."""

    @abstractmethod
    def move(self, path: str, target: str) -> bool:
        """Give a file another address; False if it is not there. To repeat it is harmless."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; that it is gone already is fine."""

    def settle(self, directory: str) -> None:  # noqa: B027 - most do so at once
        """Make what was moved into or out of a directory durable."""


def address_of(path: str) -> str:
    """The one address of what users write: `dir`, `/dir`, `file:///dir`, `s3a://bucket/dir`."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", path)
    scheme = found[1].lower() if found else "file"
    if not path.strip():
        raise BuildError("a path is empty: say which file or directory is meant")
    if scheme == "file":
        return os.path.abspath(re.sub(r"^[Ff][Ii][Ll][Ee]:/+", "/", path))
    if scheme not in _KINDS:
        known = ", ".join(f"{each}://" for each in _KINDS)
        raise BuildError(
            f"{path} is on {scheme!r}, which is not supported here: give a path, a file:// URL or"
            f" one of {known}; or read and write it with Spark, through still.stream and"
            " foreachBatch"
        )
    authority, _, rest = path[len(scheme) + 1 :].removeprefix("//").partition("/")
    parts = [part for part in rest.split("/") if part]
    if not authority or ("@" in authority and not scheme.startswith("abfs")):
        raise BuildError(
            f"an address with {scheme}: is no bucket and path, or has keys in it: write it as"
            f" {scheme}://bucket/path and give keys as settings of the session"
        )
    return "/".join([f"{_KINDS[scheme]}://{authority}", *parts])


_KINDS: Mapping[str, str] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "abfs": "abfs",
    "abfss": "abfss",
    "az": "az",
    "hdfs": "hdfs",
}
"""The schemes that are understood, and how each is written in addresses."""


def is_on_disk(address: str) -> bool:
    """Whether an address, of `address_of`, is a path of this machine."""
    return address.startswith("/")


def place_of(address: str, settings: Mapping[str, str] | None = None) -> Place:
    """The place that has this address, which `address_of` has made."""
    if is_on_disk(address):
        return DISK
    scheme, _, rest = address.partition("://")
    given = settings.given if isinstance(settings, Renewed) else settings or {}
    known = tuple(sorted(given.items()))
    return _opened(f"{scheme}://{rest.partition('/')[0]}", known, os.getpid())


@lru_cache(64)
def _opened(root: str, settings: tuple[tuple[str, str], ...], process: int) -> Place:
    """One for each process: a connection does not survive a fork."""
    # Here because they are themselves built on this contract.
    if root.startswith("hdfs://"):
        from stillframe.storage.hdfs_places import HdfsPlace

        return HdfsPlace(root)
    from stillframe.storage.object_places import open_bucket

    return open_bucket(root, dict(settings))


# --- the local file system -------------------------------------------------------------------


def is_unnamed(name: str) -> bool:
    """Whether a file on a disk is called this until it is whole and has its name."""
    return re.fullmatch(r"\.[0-9a-f]{16}\.tmp", name) is not None


def _unnamed() -> str:
    return f".{secrets.token_hex(8)}.tmp"


class LocalPlace(Place):
    """A disk, or a file system that all machines have mounted."""

    has_rename = True

    def walk(self, directory: str, skips: NameFilter) -> Iterator[FileFacts]:
        for at, directories, names in os.walk(directory, followlinks=True):
            directories[:] = [name for name in directories if not skips(name)]
            for name in names:
                if not skips(name) and (facts := self.facts(os.path.join(at, name))):
                    yield facts

    def facts(self, path: str) -> FileFacts | None:
        try:
            found = os.stat(path)
        except OSError:
            return None  # gone since it was listed, or a link that leads nowhere
        if os.path.isdir(path):
            return None
        return FileFacts(path, found.st_size, found.st_mtime_ns // 1_000_000)

    def has_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def open(self, path: str) -> OpenFile:
        return _LocalFile(path)

    def draft(self, path: str) -> Draft:
        return _LocalDraft(path)

    def create_if_absent(self, path: str, data: bytes) -> bool:
        beside = f"{os.path.dirname(path)}/{_unnamed()}"
        draft = _LocalDraft(beside)
        try:
            draft.file.write(data)
            draft.finish()
            os.link(beside, path)
        except FileExistsError:
            return False
        finally:
            draft.discard()
        self.settle(os.path.dirname(path))
        return True

    def note(self, path: str) -> None:
        self.make_directory(os.path.dirname(path))
        with open(path, "ab"):
            pass

    def make_directory(self, path: str) -> None:
        if os.path.isdir(path):
            return
        self.make_directory(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path)
        self.settle(os.path.dirname(path))

    def move(self, path: str, target: str) -> bool:
        self.make_directory(os.path.dirname(target))
        try:
            os.rename(path, target)
        except FileNotFoundError:
            return False
        return True

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)

    def settle(self, directory: str) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _LocalFile(OpenFile, io.FileIO):
    def __init__(self, path: str) -> None:
        io.FileIO.__init__(self, path, "rb")

    def size_now(self) -> int:
        return os.fstat(self.fileno()).st_size


class _LocalDraft(Draft):
    def __init__(self, path: str) -> None:
        self._path = path
        DISK.make_directory(os.path.dirname(path))
        self.file = open(path, "xb")  # noqa: SIM115 closed by finish or discard

    def finish(self) -> int:
        with self.file as file:
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        DISK.settle(os.path.dirname(self._path))
        return size_bytes

    def discard(self) -> None:
        with suppress(OSError):
            self.file.close()
        with suppress(OSError):
            os.unlink(self._path)


DISK = LocalPlace()
