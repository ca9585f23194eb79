"""Files of places that are reached across a network: read in ranges, written as a whole."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from stillframe.errors import Unanswered
from stillframe.storage.asking import WHOLE_BYTES_MAX
from stillframe.storage.places import Draft, OpenFile, Place
from stillframe.storage.store import Store

_CHUNK_BYTES = 8 << 20
_AHEAD_BYTES = 4 << 20


class RangedFile(OpenFile):
    """Reads ranges, somewhat more than it is asked for."""

    def __init__(
        self, place: Place, path: str, size_bytes: int, read_range: Callable[[int, int], bytes]
    ) -> None:
        """`read_range` answers the bytes from the first place to the one before the second."""
        super().__init__()
        self._place = place
        self._path = path
        self._size_bytes = size_bytes
        self._read_range = read_range
        self._at = 0
        self._ahead_at, self._ahead = 0, b""
        self._lock = threading.Lock()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        with self._lock:
            wanted = min(len(view), self._size_bytes - self._at)
            if wanted <= 0:
                return 0
            skip = self._at - self._ahead_at
            if not 0 <= skip < len(self._ahead):
                end = min(self._at + max(wanted, _AHEAD_BYTES), self._size_bytes)
                self._ahead = self._read_range(self._at, end)
                self._ahead_at, skip = self._at, 0
            piece = self._ahead[skip : skip + wanted]
            view[: len(piece)] = piece
            self._at += len(piece)
            return len(piece)

    def size_now(self) -> int:
        facts = self._place.facts(self._path)
        return 0 if facts is None else facts.size_bytes


class StoreDraft(Draft):
    """In an unnamed temporary file of this machine; put into a store when it is finished."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self.file = tempfile.TemporaryFile("w+b", prefix="stillframe-")  # noqa: SIM115

    def finish(self) -> int:
        with self.file as file:
            file.flush()
            size_bytes = file.seek(0, os.SEEK_END)
            try:
                return self._put()
            except Unanswered:
                if size_bytes <= WHOLE_BYTES_MAX:
                    raise
                # A store does not try a large file again: it can read it only once. We can read it
                # again, and there may be newer credentials by now.
                return self._put()

    def _put(self) -> int:
        self.file.seek(0)
        chunks = iter(lambda: self.file.read(_CHUNK_BYTES), b"")
        return self._store.write(self._key, chunks).length_bytes

    def discard(self) -> None:
        self.file.close()
