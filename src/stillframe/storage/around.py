"""A store around another one: what it does not do in its own way, the other one does."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping

import pyarrow as pa

from stillframe.storage.store import Chunk, Store, Written


class StoreAround(Store):
    """`own` in all respects."""

    def __init__(self, own: Store) -> None:
        self._own = own

    @property
    def has_network(self) -> bool:
        return self._own.has_network

    @property
    def address(self) -> str:
        return self._own.address

    @property
    def settings(self) -> Mapping[str, str]:
        return self._own.settings

    def below(self, directory: str) -> Store:
        return self._own.below(directory)

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        return self._own.write(path, chunks)

    def create_if_absent(self, path: str, data: bytes) -> bool:
        return self._own.create_if_absent(path, data)

    def read(self, path: str) -> bytes:
        return self._own.read(path)

    def read_verified(self, path: str, length_bytes: int, crc32: int) -> pa.Buffer:
        return self._own.read_verified(path, length_bytes, crc32)

    def list(self, directory: str) -> builtins.list[str]:
        return self._own.list(directory)

    def delete(self, path: str) -> None:
        self._own.delete(path)

    def delete_directory(self, path: str) -> None:
        self._own.delete_directory(path)

    def delete_unfinished(self, directory: str) -> None:
        self._own.delete_unfinished(directory)

    def settle(self, directory: str) -> None:
        self._own.settle(directory)
