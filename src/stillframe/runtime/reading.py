"""Blocking readers in a thread of their own, a few batches ahead of the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import pyarrow as pa

from stillframe.api.sources import (
    BlockingReader,
    EndOfData,
    NothingYet,
    Polled,
    SourceReader,
    Split,
)

_AHEAD_BATCHES_MAX = 4
_OFFER_SECONDS = 0.1
_CLOSE_SECONDS = 5.0


class ThreadedReader(SourceReader):
    """Makes a blocking reader pollable; keeps the positions of what was really emitted."""

    def __init__(
        self, splits: Sequence[Split], reader: BlockingReader, wake: Callable[[], None]
    ) -> None:
        self._splits = {split.id: split for split in splits}
        self._reader = reader
        self._wake = wake
        self._ahead: queue.Queue[tuple[Split, pa.RecordBatch] | EndOfData | BaseException]
        self._ahead = queue.Queue(_AHEAD_BATCHES_MAX)
        self._closing = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="source", daemon=True)
        self._thread.start()

    def poll(self) -> Polled:
        if self._ended:
            return EndOfData()
        try:
            item = self._ahead.get_nowait()
        except queue.Empty:
            return NothingYet(retry_seconds=1.0)
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, EndOfData):
            self._ended = True
            return item
        split, batch = item
        self._splits[split.id] = split
        return batch

    def splits(self) -> list[Split]:
        return list(self._splits.values())

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._reader.close()

    def _read(self) -> None:
        try:
            for item in self._reader.read():
                if not self._offer(item):
                    return
            self._offer(EndOfData())
        except BaseException as error:  # the loop raises it where the job can see it
            self._offer(error)

    def _offer(self, item: tuple[Split, pa.RecordBatch] | EndOfData | BaseException) -> bool:
        while not self._closing.is_set():
            try:
                self._ahead.put(item, timeout=_OFFER_SECONDS)
            except queue.Full:
                continue
            self._wake()
            return True
        return False
