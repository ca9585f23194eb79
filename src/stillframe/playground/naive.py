"""A sink without two phases: it shows its rows every half second, whatever becomes of them.

It keeps to the public contract of sinks and leaves out what makes one exact: rows are visible
before their checkpoint is complete. After a restart they come again, and are there twice. They are
never lost, because a barrier shows the rest before the checkpoint can be complete.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Sink,
    SinkContext,
    SinkGuarantee,
    SinkWriter,
)
from stillframe.connectors.discard import NothingToCommit
from stillframe.ids import CheckpointId

_SHOW_SECONDS = 0.5


@dataclass(frozen=True)
class NaiveSink(Sink):
    """Parquet files in a directory, each visible as soon as it is written."""

    path: str
    show_seconds: float = _SHOW_SECONDS
    guarantee: SinkGuarantee = "at-least-once"
    weakness: str | None = "shows rows before their checkpoint is complete"

    def open_writer(self, context: SinkContext) -> SinkWriter:
        name = f"{context.attempt}-{context.subtask}"
        return _NaiveWriter(Path(self.path), name, self.show_seconds)

    def open_committer(self, context: CommitterContext) -> Committer:
        return NothingToCommit()

    def describe(self) -> str:
        return f"naive {self.path}"


class _NaiveWriter(SinkWriter):
    def __init__(self, directory: Path, name: str, show_seconds: float) -> None:
        self._directory = directory
        self._name = name
        self._show_seconds = show_seconds
        self._sequence = itertools.count()
        self._rows: list[pa.RecordBatch] = []
        self._shown_seconds = time.monotonic()
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows.append(batch)
        if time.monotonic() >= self._shown_seconds + self._show_seconds:
            self._shown_seconds = time.monotonic()
            self._show(self._taken())

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        rows = self._taken()

        def show() -> Sequence[Committable]:
            self._show(rows)
            return ()

        return show

    def close(self) -> None:
        self._rows.clear()

    def _taken(self) -> list[pa.RecordBatch]:
        rows, self._rows = self._rows, []
        return rows

    def _show(self, rows: list[pa.RecordBatch]) -> None:
        if rows:
            name = f"{self._name}-{next(self._sequence):06d}.parquet"
            pq.write_table(pa.Table.from_batches(rows), self._directory / f".{name}")
            os.replace(self._directory / f".{name}", self._directory / name)
