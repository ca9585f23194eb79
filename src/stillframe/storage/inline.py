"""A store whose new files are no files: what is written is answered, for who keeps it elsewhere.

That is the backend `memory`: a snapshot goes into the acknowledgement and from there into the
checkpoint's metadata. It is for small state, so there is a limit; what is longer is refused, which
fails that checkpoint and not the job.
"""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Iterable, Mapping

import pyarrow as pa

from stillframe.errors import NotDone
from stillframe.storage.paths import CHANNELS, state_of_path
from stillframe.storage.store import Chunk, Store, Written


class InlineStore(Store):
    """Another store, to which nothing is written through this one; all else is done there."""

    def __init__(self, behind: Store, length_bytes_max: int) -> None:
        self._behind = behind
        self._length_bytes_max = length_bytes_max

    @property
    def address(self) -> str:
        return self._behind.address

    @property
    def settings(self) -> Mapping[str, str]:
        return self._behind.settings

    def below(self, directory: str) -> Store:
        return InlineStore(self._behind.below(directory), self._length_bytes_max)

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        """The answer has the bytes; they are nowhere else."""
        pieces: list[Chunk] = []
        length_bytes = 0
        for chunk in chunks:
            length_bytes += memoryview(chunk).nbytes
            if length_bytes <= self._length_bytes_max:
                pieces.append(chunk)
            else:
                pieces.clear()  # only its length is still wanted
        if length_bytes > self._length_bytes_max:
            raise NotDone(_refusal(path, length_bytes, self._length_bytes_max))
        data = b"".join(pieces)
        return Written(length_bytes, zlib.crc32(data), data)

    def create_if_absent(self, path: str, data: bytes) -> bool:
        return self._behind.create_if_absent(path, data)

    def read(self, path: str) -> bytes:
        return self._behind.read(path)

    def read_verified(self, path: str, length_bytes: int, crc32: int) -> pa.Buffer:
        return self._behind.read_verified(path, length_bytes, crc32)

    def list(self, directory: str) -> builtins.list[str]:
        return self._behind.list(directory)

    def delete(self, path: str) -> None:
        self._behind.delete(path)

    def delete_directory(self, path: str) -> None:
        self._behind.delete_directory(path)

    def delete_unfinished(self, directory: str) -> None:
        self._behind.delete_unfinished(directory)

    def settle(self, directory: str) -> None:
        self._behind.settle(directory)


def _refusal(path: str, length_bytes: int, length_bytes_max: int) -> str:
    return (
        f"{_what(path)} takes {length_bytes} bytes, more than the {length_bytes_max} that"
        " stateBackend=memory keeps in an acknowledgement: set stateBackend=fs or"
        " stateBackend=rocksdb, or a larger memoryStateMax"
    )


def _what(path: str) -> str:
    named = state_of_path(path)
    if named is None:
        return path
    uid, subtask, state = named
    whose = f"operator {uid!r} in subtask {subtask}"
    return (
        f"what was under way around {whose}" if state == CHANNELS else f"state {state!r} of {whose}"
    )
