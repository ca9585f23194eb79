"""What sinks have prepared, on the store that has the job's checkpoints: `prepared/<uid>/…`."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import cast

import pyarrow as pa

from stillframe.ids import OperatorUid
from stillframe.json_values import JsonObject
from stillframe.storage.paths import PREPARED_DIRECTORY, quoted_name
from stillframe.storage.store import Store


class StagedFiles:
    """The staging area of one job; `api.sinks.Staging` says what is promised."""

    def __init__(self, store: Store) -> None:
        """`store` is rooted at the job's own directory."""
        self._store = store

    @property
    def has_network(self) -> bool:
        return self._store.has_network

    def directory(self, uid: OperatorUid) -> str:
        return quoted_name(uid, "operator uid")

    def write(self, name: str, chunks: Iterable[pa.Buffer]) -> JsonObject:
        written = self._store.write(_path(name), chunks)
        return {"name": name, "length_bytes": written.length_bytes, "crc32": written.crc32}

    def read(self, written: JsonObject) -> pa.Buffer:
        length_bytes, crc32 = cast(int, written["length_bytes"]), cast(int, written["crc32"])
        return self._store.read_verified(_path(str(written["name"])), length_bytes, crc32)

    def note(self, name: str) -> None:
        self._store.create_if_absent(_path(name), b"")

    def delete(self, name: str) -> None:
        self._store.delete(_path(name))

    def delete_unfinished(self, directory: str) -> None:
        self._store.delete_unfinished(_path(directory))

    def names(self, directory: str) -> Set[str]:
        return {f"{directory}/{file}" for file in self._store.list(_path(directory))}


def _path(name: str) -> str:
    return f"{PREPARED_DIRECTORY}/{name}"
