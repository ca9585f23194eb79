"""Places on HDFS, for files of sources and sinks: a rename there happens at once, as on a disk.

What is written goes to an unnamed temporary file of this machine first, as for a bucket, so that a
crash leaves nothing under the file's name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from stillframe.storage.asking import Answer, Missing
from stillframe.storage.hdfs import TEMPORARY_PREFIX, open_hdfs
from stillframe.storage.places import Draft, FileFacts, NameFilter, OpenFile, Place
from stillframe.storage.remote_files import RangedFile, StoreDraft

if TYPE_CHECKING:
    from hdfs_native import FileReader, FileStatus


class HdfsPlace(Place):
    """All files of one cluster."""

    has_rename = True

    def __init__(self, root: str) -> None:
        self._root = root
        self._store = open_hdfs(f"{root}/")
        self._cluster = self._store.cluster

    def walk(self, directory: str, skips: NameFilter) -> Iterator[FileFacts]:
        top = self._path(directory)

        def listed() -> list[FileStatus]:
            return list(self._cluster.client().list_status(top or "/", recursive=True))

        try:
            found = self._ask("list", directory, listed, self._cluster.limits.body_seconds)
        except Missing:
            return
        for status in found:
            parts = status.path.removeprefix(f"{top}/").split("/")
            is_ours = not status.isdir and not parts[-1].startswith(TEMPORARY_PREFIX)
            if is_ours and not any(map(skips, parts)):
                yield self._facts(status)

    def facts(self, path: str) -> FileFacts | None:
        status = self._status(path)
        return None if status is None or status.isdir else self._facts(status)

    def has_directory(self, path: str) -> bool:
        status = self._status(path)
        return status is not None and status.isdir

    def open(self, path: str) -> OpenFile:
        read = partial(self._cluster.client().read, self._path(path))
        try:
            source = self._ask("read", path, read)
        except Missing:
            raise FileNotFoundError(2, "there is no such file", path) from None
        return RangedFile(self, path, len(source), partial(self._read_range, path, source))

    def _read_range(self, path: str, source: FileReader, start: int, end: int) -> bytes:
        read = partial(source.read_range, start, end - start)
        try:
            return self._ask("read", path, read, self._cluster.limits.body_seconds)
        except Missing:
            raise FileNotFoundError(2, "it was deleted while it was read", path) from None

    def draft(self, path: str) -> Draft:
        return StoreDraft(self._store, self._key(path))

    def create_if_absent(self, path: str, data: bytes) -> bool:
        return self._store.create_if_absent(self._key(path), data)

    def make_directory(self, path: str) -> None:
        make = self._cluster.client().mkdirs
        self._ask("write", path, lambda: make(self._path(path), create_parent=True))

    def move(self, path: str, target: str) -> bool:
        self.make_directory(os.path.dirname(target))
        rename = self._cluster.client().rename
        try:
            self._ask("write", target, lambda: rename(self._path(path), self._path(target), True))
        except Missing:
            return False
        return True

    def delete(self, path: str) -> None:
        self._store.delete(self._key(path))

    def _ask(
        self, doing: str, path: str, call: Callable[[], Answer], seconds: float | None = None
    ) -> Answer:
        return self._cluster.ask(doing, path, lambda: self._cluster.run(call, seconds))

    def _status(self, path: str) -> FileStatus | None:
        look = self._cluster.client().get_file_info
        try:
            return self._ask("read", path, lambda: look(self._path(path)))
        except Missing:
            return None

    def _facts(self, status: FileStatus) -> FileFacts:
        return FileFacts(f"{self._root}{status.path}", status.length, status.modification_time)

    def _path(self, path: str) -> str:
        return path.removeprefix(self._root).rstrip("/")

    def _key(self, path: str) -> str:
        return self._path(path).lstrip("/")
