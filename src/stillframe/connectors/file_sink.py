"""Files of a table, committed in two phases: staged, then moved into sight.

Theory of operation. A writer stages each epoch in `<path>/_stillframe/staging/`, which Spark and
pyarrow do not read because of the underscore. At the barrier the files are closed and made durable
in the background; their names are the committables. When the checkpoint is complete the files are
moved into `<path>/`, which may be repeated. Then a receipt, an empty file of the staged one's name,
is put into `<path>/_stillframe/receipts/`. It stays until a completed checkpoint no longer holds
this commit: a consumer may take a published file away at once.

On a disk a move is a rename, which happens at once or not at all. An object store copies: a file
appears as a whole, but the files of an epoch one after the other. Who must see whole epochs asks
for Spark's log of files (`sink_log`), which the driver writes when all files of an epoch are there.

Rules of this file:
1. A staged file's name says whose it is (job, operator, attempt, epoch of the writer, subtask);
   a published file's name says job, operator, checkpoint, subtask and attempt, and sorts by them.
2. Both end in a few random letters, so that a job started afresh on an old directory can neither
   overwrite what is there nor mistake it for its own.
3. A file of an epoch that was not acknowledged is garbage: the next attempt sweeps it away.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import pyarrow as pa

from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkWriter,
    committables_of,
)
from stillframe.connectors.csv_writing import CsvWriting
from stillframe.connectors.file_encoders import Encoding, FileFormat
from stillframe.connectors.sink_log import LOG_DIRECTORY, SinkLog
from stillframe.connectors.staged_files import (
    RECEIPTS,
    STAGING,
    Layout,
    StagedName,
    StagingWriter,
    saying,
)
from stillframe.errors import BuildError, StorageError
from stillframe.ids import Attempt, Epoch, OperatorUid
from stillframe.storage.places import Place, address_of, is_on_disk, place_of

log = logging.getLogger("stillframe")

_AT_ONCE_MAX = 8
_USUAL_CSV = CsvWriting()
_USUAL_LAYOUT = Layout()


@dataclass(frozen=True)
class FileSink(Sink):
    """A directory of files that Spark, pyarrow and others read as one table."""

    path: str
    format: FileFormat
    schema: pa.Schema
    zone: str = "UTC"
    """In which times are written as text."""
    compression: str | None = None
    csv: CsvWriting = _USUAL_CSV
    layout: Layout = _USUAL_LAYOUT
    settings: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """How the place of the files is reached; there may be secrets in it."""

    @property
    def encoding(self) -> Encoding:
        return Encoding(self.format, self.zone, self.compression, self.csv)

    def check(self) -> None:
        """Raise BuildError for what can be seen to be wrong on the driver, before anything runs."""
        path = address_of(self.path)
        self.layout.check(self.schema)
        self.encoding.check(self.layout.inside(self.schema))
        if is_on_disk(path) and os.path.lexists(path) and not os.path.isdir(path):
            raise BuildError(f"{path} is a file: a file sink needs a directory, give another path")
        try:
            has_log = place_of(path, self.settings).has_directory(f"{path}/{LOG_DIRECTORY}")
        except StorageError as error:
            raise BuildError(str(error)) from None
        if has_log and not self.commits_at_coordinator:
            raise BuildError(
                f"{path} has Spark's log of files, {LOG_DIRECTORY}, and spark.read would not see"
                " files that it does not name: set sparkMetadata to true, or give another path"
            )

    def open_writer(self, context: SinkContext) -> SinkWriter:
        root = address_of(self.path)
        place = place_of(root, self.settings)
        return StagingWriter(
            place, root, self.encoding, self.schema, context, publishes=True, layout=self.layout
        )

    def open_committer(self, context: CommitterContext) -> Committer:
        root = address_of(self.path)
        return FileCommitter(place_of(root, self.settings), root, context.accepts_missing)

    def describe(self) -> str:
        return f"{self.format} {self.path}"

    def logged(self, retention_seconds: float | None) -> LoggedFileSink:
        """The same with Spark's log of files."""
        told: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(FileSink)}
        return LoggedFileSink(**told, retention_seconds=retention_seconds)


@dataclass(frozen=True)
class LoggedFileSink(FileSink):
    """Names its files in Spark's own log, so that `spark.read` sees whole epochs."""

    commits_at_coordinator: ClassVar[bool] = True

    retention_seconds: float | None = None
    """How old a file may be that the log still names; None: any age."""

    def open_committer(self, context: CommitterContext) -> Committer:
        root = address_of(self.path)
        place = place_of(root, self.settings)
        sink_log = SinkLog(place, root, self.retention_seconds)
        return LoggedFileCommitter(place, root, context.accepts_missing, sink_log)


class FileCommitter(Committer):
    """Moves staged files into sight, and notes that it did."""

    def __init__(self, place: Place, root: str, accepts_missing: Collection[str] = ()) -> None:
        self._place = place
        self._root = root
        self._accepts_missing = accepts_missing

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        committables = committables_of(prepared)
        if not committables:
            return
        published = self._of_all(self._publish, committables)
        missing = [
            each for each, is_there in zip(committables, published, strict=True) if not is_there
        ]
        refused = [each for each in missing if not self._is_accepted(each)]
        with saying(self._root):
            # First: after a loss of power a receipt must not be all that is left.
            for directory in {os.path.dirname(self._target(each)) for each in committables}:
                self._settle(directory)
            self._note([each for each in committables if each not in refused])
        if refused:
            raise StorageError(_missing_in_words(self._root, refused))

    def forget(self, committables: Sequence[Committable]) -> None:
        for committable in committables:
            with suppress(OSError, StorageError):  # the next sweep finds it
                self._place.delete(self._receipt(committable))

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        for directory in (STAGING, RECEIPTS):
            sweep_staging(self._place, self._root, job, uid, older_than, keep, directory)

    def _of_all(
        self, act: Callable[[Committable], Any], committables: Sequence[Committable]
    ) -> list[Any]:
        """In turn where it is quick, some at once where each has to be asked for."""
        if self._place.has_rename or len(committables) == 1:
            return [act(each) for each in committables]
        with ThreadPoolExecutor(_AT_ONCE_MAX, "stillframe-commit") as pool:
            return list(pool.map(act, committables))

    def _publish(self, committable: Committable) -> bool:
        """Whether it is published: now, or before, by us or by another who repeats the commit."""
        target = self._target(committable)
        with saying(target):
            if self._place.move(f"{self._root}/{committable['staged']}", target):
                return True
            return self._is_noted(committable) or self._place.facts(target) is not None

    def _settle(self, directory: str) -> None:
        while True:
            self._place.settle(directory)
            if directory == self._root or not directory.startswith(self._root):
                return
            directory = os.path.dirname(directory)

    def _target(self, committable: Committable) -> str:
        return f"{self._root}/{committable['target']}"

    def _receipt(self, committable: Committable) -> str:
        name = os.path.basename(str(committable["staged"]))
        return f"{self._root}/{RECEIPTS}/{name}"

    def _is_noted(self, committable: Committable) -> bool:
        return self._place.facts(self._receipt(committable)) is not None

    def _note(self, published: Sequence[Committable]) -> None:
        if published:
            self._of_all(lambda each: self._place.note(self._receipt(each)), published)
            self._place.settle(f"{self._root}/{RECEIPTS}")

    def _is_accepted(self, missing: Committable) -> bool:
        """Whether somebody has said, by name and number of rows, that the job goes on without."""
        if _named_with_rows(missing) not in self._accepts_missing:
            return False
        log.warning(
            "the job goes on without %s and its %s rows: acceptMissingOutput names it",
            missing["target"],
            missing["rows"],
        )
        return True


def _named_with_rows(committable: Committable) -> str:
    return f"{committable['target']}:{committable['rows']}"


def _missing_in_words(root: str, missing: Sequence[Committable]) -> str:
    first, others = missing[0], len(missing) - 1
    more, verb = (f" and {others} more", "are") if others else ("", "is")
    option = f"acceptMissingOutput={','.join(map(_named_with_rows, missing))}"
    return (
        f"output file {first['target']} ({first['rows']} rows){more} of a completed checkpoint"
        f" {verb} missing from {root}, and {first['staged']} is gone too: restore the file, or go"
        f" on without its rows: option {option}"
    )


class LoggedFileCommitter(FileCommitter):
    """Has Spark's log for receipts. On the driver, for all subtasks at once."""

    def __init__(
        self, place: Place, root: str, accepts_missing: Collection[str], sink_log: SinkLog
    ) -> None:
        super().__init__(place, root, accepts_missing)
        self._log = sink_log
        self._has_looked = False

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        if not self._has_looked:
            self._log.look()
            self._has_looked = True
        super().commit(epoch, prepared)

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        super().sweep(job, uid, older_than, keep)
        with saying(self._root):
            self._log.sweep()

    def _is_noted(self, committable: Committable) -> bool:
        return self._log.holds(self._target(committable))

    def _note(self, published: Sequence[Committable]) -> None:
        found = self._of_all(lambda each: self._place.facts(self._target(each)), published)
        self._log.add([facts for facts in found if facts is not None])


def sweep_staging(
    place: Place,
    root: str,
    job: str,
    uid: OperatorUid,
    older_than: Attempt,
    keep: Sequence[Committable],
    below: str = STAGING,
) -> None:
    """Remove what older attempts of this job and operator staged, but not what `keep` names."""
    directory = f"{root}/{below}".rstrip("/")
    kept = {os.path.basename(str(committable["staged"])) for committable in keep}
    with saying(directory):
        for file in list(place.walk(directory, lambda name: False)):
            file_name = os.path.basename(file.path)
            name = StagedName.parse(file_name)
            if name is None or (name.job, name.uid) != (job, uid) or file_name in kept:
                continue
            if name.attempt < older_than:
                place.delete(file.path)
