"""Places in object storages: S3 and what speaks like it; GCS and Azure, which nobody has tried.

What is written goes to an unnamed temporary file of this machine first, and is put when it is
finished: an object appears as a whole, and a crash leaves nothing. There is no rename: `move`
copies within the storage and deletes the old object, so both are there for a moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from stillframe.errors import StorageError
from stillframe.storage.asking import Limits, Missing, Taken
from stillframe.storage.objects import Bucket, ObjectStore
from stillframe.storage.places import Draft, FileFacts, NameFilter, OpenFile, Place
from stillframe.storage.remote_files import RangedFile, StoreDraft

_COPY_BYTES = 8 << 20
"""More than a quick request has: a copy takes as long as its object is large."""


def open_bucket(root: str, settings: Mapping[str, str]) -> Place:
    """The place at `scheme://bucket`; nothing is connected to yet."""
    if root.startswith("s3://"):
        from stillframe.storage.s3 import open_s3

        return ObjectPlace(root, open_s3(root, settings))
    return ObjectPlace(root, _other_store(root))


def _other_store(root: str) -> ObjectStore:
    scheme, _, name = root.partition("://")
    limits = Limits()

    def connect(is_large: bool) -> Any:
        from obstore.store import from_url

        seconds = limits.body_seconds if is_large else limits.request_seconds
        return from_url(
            root,
            client_options={
                "connect_timeout": timedelta(seconds=limits.connect_seconds),
                "timeout": timedelta(seconds=seconds),
            },
        )

    return ObjectStore(scheme, "", Bucket(name, root, connect, limits), {})


class ObjectPlace(Place):
    """All objects of one bucket."""

    has_rename = False

    def __init__(self, root: str, store: ObjectStore) -> None:
        self._root = root
        self._store = store
        self._bucket = store.bucket

    @property
    def settings(self) -> Mapping[str, str]:
        return self._store.settings

    def walk(self, directory: str, skips: NameFilter) -> Iterator[FileFacts]:
        import obstore

        prefix = self._key(directory)

        def listed() -> list[FileFacts]:
            batches = obstore.list(self._bucket.client(), prefix or None)
            return [self._facts(each) for batch in batches for each in batch]

        below = f"{prefix}/" if prefix else ""
        for facts in self._bucket.ask("list", directory, listed):
            parts = self._key(facts.path).removeprefix(below).split("/")
            # Some tools mark a directory with an empty object, whose name ends with a slash.
            if self._key(facts.path) != prefix and not any(map(skips, parts)):
                yield facts

    def facts(self, path: str) -> FileFacts | None:
        try:
            found = self._head(path)
        except Missing:
            return None
        return self._facts(found)

    def has_directory(self, path: str) -> bool:
        return bool(self._store.list(self._key(path)))

    def open(self, path: str) -> OpenFile:
        try:
            found = self._head(path)
        except Missing:
            raise FileNotFoundError(2, "there is no such object", path) from None
        read_range = partial(self._read_range, path, found.get("e_tag"))
        return RangedFile(self, path, found["size"], read_range)

    def _read_range(self, path: str, tag: str | None, start: int, end: int) -> bytes:
        """These bytes of the object that had this tag when it was opened."""
        import obstore

        def got() -> bytes:
            client = self._bucket.client(end - start)  # each time: it may have newer credentials
            options: Any = {"range": (start, end)}
            if tag is not None:
                options["if_match"] = tag
            return obstore.get(client, self._key(path), options=options).bytes().to_bytes()

        try:
            return self._bucket.ask("read", path, got)
        except Missing:
            raise FileNotFoundError(2, "it was deleted while it was read", path) from None
        except Taken:
            raise StorageError(
                f"{path} was replaced while it was read: bring the old one back, or start the job"
                " again"
            ) from None

    def draft(self, path: str) -> Draft:
        return StoreDraft(self._store, self._key(path))

    def create_if_absent(self, path: str, data: bytes) -> bool:
        return self._store.create_if_absent(self._key(path), data)

    def move(self, path: str, target: str) -> bool:
        import obstore

        def copied() -> None:
            client = self._bucket.client(_COPY_BYTES)
            obstore.copy(client, self._key(path), self._key(target))

        try:
            self._bucket.ask("write", target, copied)
        except Missing:
            return False
        self.delete(path)
        return True

    def delete(self, path: str) -> None:
        self._store.delete(self._key(path))

    def _head(self, path: str) -> Any:
        return self._bucket.head("read", path, self._key(path))

    def _key(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    def _facts(self, found: Any) -> FileFacts:
        changed = int(found["last_modified"].timestamp() * 1000)
        return FileFacts(f"{self._root}/{found['path']}", found["size"], changed)
