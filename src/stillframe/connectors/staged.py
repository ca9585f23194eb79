"""Whole epochs handed to a function on the driver: what `foreachBatch` and the memory sink use.

The slots stage each epoch as Parquet files in a directory they share with the driver. When the
checkpoint is complete, the driver calls the handler with the epoch's number and its files, and
removes the files when it returns.

The files are also the memory of what has been handled: they are removed from the last to the
first, and only after the handler has returned. So a repeated commit that finds the list cut off
at its end knows that the epoch was handled, and one that finds a hole knows that a file was lost.
A crash between the handler and the first removal calls the handler once more with the same
number: exactly-once needs a handler that ignores a number it has seen, as with Spark's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pyarrow as pa

from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkGuarantee,
    SinkWriter,
    committables_of,
)
from stillframe.connectors.file_encoders import Encoding
from stillframe.connectors.file_sink import sweep_staging
from stillframe.connectors.staged_files import StagingWriter
from stillframe.errors import StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, Mark, OperatorUid
from stillframe.storage.places import Place, address_of, place_of

Handler = Callable[[Epoch, Mark, list[str]], None]
"""Gets an epoch's number, the mark it is known by in other systems, and its Parquet files, by
address; on the driver, in order."""


@dataclass(frozen=True)
class StagedSink(Sink):
    """Stages epochs for a handler on the driver. The handler does not travel to executors."""

    commits_at_coordinator: ClassVar[bool] = True

    directory: str
    handler: Handler | None = field(compare=False, repr=False)
    schema: pa.Schema
    description: str = "staged"
    is_whole: bool = False
    guarantee: SinkGuarantee = "at-least-once"
    weakness: str | None = "is given its last epoch again after a failure, with the same number"
    tied_to: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """How the place of the directory is reached; there may be secrets in it."""

    def kept_by_driver(self) -> StagedSink:
        """The same with a handler that ignores what it has seen, and forgets it with the driver."""
        why = "is kept by the driver and starts over with the next one"
        return replace(self, guarantee="at-most-once", weakness=why)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handler": None}

    def open_writer(self, context: SinkContext) -> SinkWriter:
        root = address_of(self.directory)
        return _EpochWriter(place_of(root, self.settings), root, self.schema, context)

    def open_committer(self, context: CommitterContext) -> Committer:
        assert self.handler is not None, "the handler stayed on the driver: commit there"
        root = address_of(self.directory)
        return _HandingCommitter(place_of(root, self.settings), root, self.handler)

    def describe(self) -> str:
        return self.description


class _EpochWriter(StagingWriter):
    """Says of each file in which directory it is: the job may give its sink another one later."""

    def __init__(self, place: Place, root: str, schema: pa.Schema, context: SinkContext) -> None:
        super().__init__(place, root, Encoding("parquet"), schema, context, publishes=False)
        self._directory = os.path.basename(root)

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        prepare = super().rotate(checkpoint_id)
        return lambda: [{**each, "directory": self._directory} for each in prepare()]


class _HandingCommitter(Committer):
    def __init__(self, place: Place, root: str, handler: Handler) -> None:
        self._place = place
        self._root = root
        self._handler = handler

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        committables = committables_of(prepared)
        files = [f"{self._root_of(each)}/{each['staged']}" for each in committables]
        present = [file for file in files if self._place.facts(file) is not None]
        if present == files:
            self._handler(epoch, prepared[0].mark, files)
        elif present != files[: len(present)]:
            lost = next(file for file in files if file not in present)
            raise StorageError(
                f"epoch {epoch} was staged in {len(files)} files, of which {lost} is gone:"
                " somebody removed it; bring it back, or restore an earlier checkpoint"
            )
        for file in reversed(present):
            self._place.delete(file)
        for directory in {os.path.dirname(file) for file in present}:
            self._place.settle(directory)

    def _root_of(self, committable: Committable) -> str:
        """Beside this sink's own, if it was staged under another uid. (Older ones do not say.)"""
        name = committable.get("directory")
        if name is None:
            return self._root
        return f"{os.path.dirname(self._root)}/{name}"

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        """Also beside this sink's own directory: a file's name says which sink staged it."""
        sweep_staging(
            self._place, os.path.dirname(self._root), job, uid, older_than, keep, below=""
        )
