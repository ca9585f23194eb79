"""Spark's own log of what a file sink has written: `<path>/_spark_metadata`.

Where there is one, `spark.read` takes the list of files from it and lists nothing: it sees whole
epochs. Entries are numbered from 0 without gaps; each names the files of one epoch. Every tenth is
compact: it names all files so far, and those before the compact one before it are deleted.

An entry is created if absent, so that of two drivers one writes it; the other looks again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

from stillframe.errors import DataError
from stillframe.json_values import JsonObject
from stillframe.storage.places import FileFacts, Place, is_unnamed

LOG_DIRECTORY = "_spark_metadata"
_VERSION = "v1"
_COMPACT_EVERY = 10
_BLOCK_BYTES = 32 << 20
_UNNAMED_SECONDS_MAX = 600.0
"""How long an entry may take until it has its name: another job may write here too."""


class SinkLog:
    """Used by one thread."""

    def __init__(self, place: Place, root: str, retention_seconds: float | None = None) -> None:
        self._place = place
        self._root = root
        self._retention_seconds = retention_seconds
        self._next = 0
        self._entries: list[JsonObject] = []
        self._paths: set[str] = set()

    def look(self) -> None:
        """Read what is there, if there is more than before."""
        names = self._names()
        following = max(names, default=-1) + 1
        if following == self._next:
            return
        begin = max((n for n, name in names.items() if name.endswith(".compact")), default=0)
        numbers = range(begin, following)
        if lacking := [number for number in numbers if number not in names]:
            raise DataError(
                f"{self._root}/{LOG_DIRECTORY} has no entry {lacking[0]}, but later ones: bring it"
                " back, or give the sink another path"
            )
        self._entries = [each for number in numbers for each in self._read(names[number])]
        self._paths = {str(each["path"]) for each in self._entries}
        self._next = following

    @property
    def files(self) -> Mapping[str, int]:
        """The names of all files, without their directories, and when each was changed last."""
        return {
            unquote(str(each["path"])).rpartition("/")[2]: _changed_at_ms(each)
            for each in self._entries
        }

    def holds(self, path: str) -> bool:
        return self._url(path) in self._paths

    def add(self, files: Sequence[FileFacts]) -> None:
        """Name these, all or none; those that are named already are left alone."""
        while new := [file for file in files if not self.holds(file.path)]:
            added = [self._entry(file) for file in new]
            is_compact = (self._next + 1) % _COMPACT_EVERY == 0
            told = [*self._retained(), *added] if is_compact else added
            text = "\n".join([_VERSION, *(json.dumps(each) for each in told)])
            name = f"{self._next}.compact" if is_compact else str(self._next)
            if self._place.create_if_absent(self._file(name), text.encode()):
                self._entries = told if is_compact else [*self._entries, *added]
                self._paths = {str(each["path"]) for each in self._entries}
                self._next += 1
                if is_compact:
                    self._delete_before(self._next - 1 - _COMPACT_EVERY)
            else:
                self.look()  # another driver was quicker

    def sweep(self) -> None:
        """Remove what drivers that were killed while they wrote an entry have left."""
        limit_ms = (time.time() - _UNNAMED_SECONDS_MAX) * 1000
        directory = f"{self._root}/{LOG_DIRECTORY}"
        for file in list(self._place.walk(directory, lambda name: False)):
            name = file.path.rpartition("/")[2]
            if is_unnamed(name) and file.changed_at_ms < limit_ms:
                self._place.delete(file.path)

    def _retained(self) -> list[JsonObject]:
        if self._retention_seconds is None:
            return self._entries
        limit_ms = (time.time() - self._retention_seconds) * 1000
        return [each for each in self._entries if _changed_at_ms(each) >= limit_ms]

    def _delete_before(self, number: int) -> None:
        for each, name in self._names().items():
            if each < number:
                self._place.delete(self._file(name))

    def _names(self) -> dict[int, str]:
        found: dict[int, str] = {}
        directory = f"{self._root}/{LOG_DIRECTORY}"
        for file in self._place.walk(directory, lambda name: name.startswith(".")):
            name = file.path.rpartition("/")[2]
            if match := re.fullmatch(r"(\d+)(\.compact)?", name, re.ASCII):
                found[int(match[1])] = name
        return found

    def _read(self, name: str) -> list[JsonObject]:
        with self._place.open(self._file(name)) as file:
            version, *lines = file.readall().decode().split("\n")
        if version != _VERSION:
            raise DataError(
                f"{self._file(name)} has the version {version!r}, but {_VERSION} is known here:"
                " give the sink another path"
            )
        return [json.loads(line) for line in lines if line]

    def _file(self, name: str) -> str:
        return f"{self._root}/{LOG_DIRECTORY}/{name}"

    def _entry(self, file: FileFacts) -> JsonObject:
        return {
            "path": self._url(file.path),
            "size": file.size_bytes,
            "isDir": False,
            "modificationTime": file.changed_at_ms,
            "blockReplication": 1,
            "blockSize": _BLOCK_BYTES,
            "action": "add",
        }

    def _url(self, path: str) -> str:
        """As Spark finds it."""
        if path.startswith("/"):
            return f"file://{quote(path, safe='/=,+@~!$&()*;:-._')}"
        scheme, _, rest = path.partition("://")
        # Hadoop's name for S3.
        return f"{scheme.replace('s3', 's3a')}://{quote(rest, safe='/=,+@~!$&()*;:-._')}"


def _changed_at_ms(entry: JsonObject) -> int:
    at = entry["modificationTime"]
    assert isinstance(at, int)
    return at
