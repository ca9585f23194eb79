"""The background part of snapshots: two at a time, and cancelled when their checkpoint is given up.

Theory of operation
-------------------
An upload is all that one subtask has to write for one checkpoint. When the checkpoint is given up,
an upload writes nothing more: whoever writes through a `CancellableStore` is stopped between two
chunks, and what the upload has written is deleted. One that has not begun is begun all the same,
because what it was to write must be released; it ends at its first chunk.

A call of the storage that hangs cannot be interrupted. An upload that stands in one is left to
itself: nobody waits for its result, and its place is free for the next checkpoint. What it still
writes it deletes itself.

What a sink prepares is not cancelled, as it comes out with the next checkpoint, whose own
acknowledgement waits for it. So it comes first in each upload, before what may stand still.

Rules of this file
------------------
1. Whoever submits an upload hears of its results once, on any thread, also if it is cancelled.
2. No thread outlives `close`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from stillframe.errors import StorageError
from stillframe.ids import CheckpointId
from stillframe.runtime.operators import Background
from stillframe.runtime.task import answer_or_error
from stillframe.storage.around import StoreAround
from stillframe.storage.store import Chunk, Store, Written

_UPLOADS_MAX = 2
_STRANDED_MAX = 8
"""So many may be left to themselves; further ones keep their places, so that threads are few."""


class UploadCancelled(StorageError):
    """Its checkpoint was given up meanwhile."""


class _OfThread(threading.local):
    upload: Upload | None = None


_here = _OfThread()


class Upload:
    """What one subtask writes for one checkpoint; `kept` says which parts are not cancelled."""

    def __init__(
        self,
        checkpoint_id: CheckpointId | None,
        parts: Sequence[Background],
        kept: Sequence[bool],
        on_done: Callable[[Sequence[object]], None],
    ) -> None:
        """Without a checkpoint it cannot be given up."""
        self.checkpoint_id = checkpoint_id
        self.is_stranded = False
        self._parts = list(enumerate(parts))
        self._parts.sort(key=lambda part: not kept[part[0]])
        self._left_to_keep = sum(kept)
        self._results: list[object] = [UploadCancelled("its checkpoint was given up")] * len(parts)
        self._on_done = on_done
        self._lock = threading.Lock()
        self._is_done = False
        self._is_cancelled = False
        self._written: list[tuple[Store, str]] = []

    def run(self) -> None:
        """On a thread of its own."""
        _here.upload = self
        while self._parts:
            place, part = self._parts.pop(0)  # so that nothing holds it when it is done
            result = answer_or_error(part)
            del part
            with self._lock:
                self._results[place] = result
                self._left_to_keep = max(0, self._left_to_keep - 1)  # those come first
        self._tell()
        if self._is_cancelled:
            for store, path in self._written:
                _delete(store, path)

    def cancel(self) -> bool:
        """Write nothing more; whether its thread stands in a call and was left to itself."""
        with self._lock:
            self._is_cancelled = True
            is_waited_for = self._left_to_keep > 0
        return not is_waited_for and self._tell()

    def while_wanted(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Until it is cancelled."""
        for chunk in chunks:
            if self._is_cancelled:
                raise UploadCancelled("its checkpoint was given up")
            yield chunk

    def on_written(self, store: Store, path: str) -> None:
        with self._lock:
            self._written.append((store, path))
        if self._is_cancelled:
            raise UploadCancelled(f"{path} was written when its checkpoint had been given up")

    def _tell(self) -> bool:
        """Once; whether it was now."""
        with self._lock:
            if self._is_done:
                return False
            self._is_done = True
            results = tuple(self._results)
        self._on_done(results)
        return True


class CancellableStore(StoreAround):
    """What an upload writes through it, it writes only while that is wanted."""

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        upload = _here.upload
        if upload is None:
            return self._own.write(path, chunks)
        wanted = upload.while_wanted(chunks)
        written = self._own.write(path, wanted)
        upload.on_written(self._own, path)
        return written


class Uploads:
    """Runs uploads, in the order in which they come. Used by the loop thread alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Upload] = deque()
        self._running: dict[Upload, threading.Thread] = {}
        self._is_closed = False

    def submit(self, upload: Upload) -> None:
        with self._changed:
            self._waiting.append(upload)
            self._begin_next()

    def cancel(self, checkpoint_id: CheckpointId) -> None:
        """This checkpoint was given up."""
        with self._changed:
            running = [each for each in self._running if each.checkpoint_id == checkpoint_id]
            for upload in running:
                upload.is_stranded = upload.cancel() and self._stranded() < _STRANDED_MAX
            for upload in self._waiting:
                if upload.checkpoint_id == checkpoint_id:
                    upload.cancel()
            self._begin_next()

    def close(self) -> None:
        """Cancel all, forget those that have not begun, and wait for the threads."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            running = dict(self._running)
        for upload in running:
            upload.cancel()
        for thread in running.values():
            thread.join()

    def _stranded(self) -> int:
        return sum(each.is_stranded for each in self._running)

    def _begin_next(self) -> None:
        while self._waiting and len(self._running) - self._stranded() < _UPLOADS_MAX:
            upload = self._waiting.popleft()
            name = "stillframe-snapshot"
            thread = threading.Thread(target=self._run, args=(upload,), name=name, daemon=True)
            self._running[upload] = thread
            thread.start()

    def _run(self, upload: Upload) -> None:
        try:
            upload.run()
        finally:
            with self._changed:
                del self._running[upload]
                if not self._is_closed:
                    self._begin_next()


def _delete(store: Store, path: str) -> None:
    with contextlib.suppress(StorageError):
        store.delete(path)
