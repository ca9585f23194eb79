"""Sinks for systems with transactions: the epoch is staged, then written with a mark, once.

What is decided is in `protocol/outside.py`; what a class for another system has to do is in
`api.sinks.Target`. Here is all the rest: staging, looking, receipts, rows that are refused.

Rules of this file
------------------
1. A file's name begins with the attempt that wrote it, so that a sweep knows whose it is.
2. A committable names all its files. The receipt is written when the transaction is done, then the
   staged files are deleted; never in another order.
3. Rows that the other system refuses are kept before its transaction is done: a crash in between
   keeps them twice, and never not at all. No sweep deletes them.
4. Where marks expire, a writer has a mark and a note of it before any of its rows are written.
"""

from __future__ import annotations

import logging
import re
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkWriter,
    Staging,
    Target,
)
from stillframe.connectors.staged_rows import RowStreams
from stillframe.errors import (
    DataError,
    OutputRefused,
    StillframeError,
    StorageError,
    Unavailable,
)
from stillframe.ids import (
    NO_CHECKPOINT,
    Attempt,
    CheckpointId,
    Epoch,
    Mark,
    OperatorUid,
    SubtaskIndex,
    Writer,
)
from stillframe.json_values import JsonObject
from stillframe.protocol.outside import Part, decide
from stillframe.secrets import masked

log = logging.getLogger("stillframe")

_PART_BYTES = 16 << 20
_PARTS_UNDER_WAY_MAX = 2
_REFUSED_BECAUSE = "_refused_because"

OnRefused = Literal["fail", "go on"]


class TransactionalSink(Sink):
    """A sink whose target takes rows and a mark in one transaction. Exactly-once.

    Implement `open_target` and `describe`, and `check_batch` for what the target may refuse. Each
    epoch is staged beside the checkpoint, so no transaction is open while records flow.
    """

    on_refused: OnRefused = "fail"
    """What the job does when rows are refused after their checkpoint is complete."""

    marks_expire: ClassVar[bool] = False
    """Whether the target forgets marks by itself. Then a mark that was there and is gone ends the
    job, with a question, where a part may have been written before. Such a target takes a mark for
    no checkpoint, without rows."""

    def mark_in_words(self, writer: Writer) -> str:
        """Where a person would look for it."""
        return f"mark of {writer}"

    @abstractmethod
    def open_target(self) -> Target:
        """A connection to the other system. Called where the sink commits, by the thread that
        commits; once more after an error."""

    def check_batch(self, batch: pa.RecordBatch) -> None:
        """Raise `DataError` for rows that the target will not take.

        Called on the loop thread for each batch, so on whole columns: types, sizes, keys. What is
        not found here is refused when the checkpoint is complete, and kept aside.
        """

    def open_writer(self, context: SinkContext) -> SinkWriter:
        return StagingWriter(required_staging(context.staging, self), context, self.check_batch)

    def open_committer(self, context: CommitterContext) -> Committer:
        return TransactionalCommitter(self, context)


def required_staging(staging: Staging | None, sink: Sink) -> Staging:
    if staging is None:
        raise DataError(
            f"the sink {sink.describe()} stages its rows with the checkpoints, and there are none:"
            " set checkpointLocation and checkpointInterval"
        )
    return staging


# --- Staging ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Epoch:
    number: int
    gathered: list[pa.RecordBatch] = field(default_factory=list)
    gathered_bytes: int = 0
    rows: int = 0
    parts: list[Future[JsonObject]] = field(default_factory=list)


class StagingWriter(SinkWriter):
    """Stages an epoch as Arrow files; large ones in parts, while records flow."""

    part_bytes: ClassVar[int] = _PART_BYTES

    def __init__(
        self,
        staging: Staging,
        context: SinkContext,
        check_batch: Callable[[pa.RecordBatch], None] = lambda batch: None,
        pool: Executor | None = None,
        draw_token: Callable[[], str] = lambda: secrets.token_hex(4),
    ) -> None:
        """`pool` writes the parts, in their order; None: a thread of its own does."""
        self._staging = staging
        self._directory = staging.directory(context.uid)
        self._prefix = f"{context.attempt}-{context.subtask}-{draw_token()}"
        self._check_batch = check_batch
        self._streams = RowStreams(is_compressed=staging.has_network)
        self._pool = pool or ThreadPoolExecutor(1, "stillframe-staging")
        self._epoch = _Epoch(0)

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        self._check_batch(batch)
        epoch = self._epoch
        epoch.gathered.append(batch)
        epoch.gathered_bytes += batch.nbytes
        epoch.rows += batch.num_rows
        if epoch.gathered_bytes >= self.part_bytes:
            if len(epoch.parts) >= _PARTS_UNDER_WAY_MAX:
                epoch.parts[-_PARTS_UNDER_WAY_MAX].result()  # storage is behind: records wait
            self._write_part(epoch)

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        ended, self._epoch = self._epoch, _Epoch(self._epoch.number + 1)
        if ended.gathered:
            self._write_part(ended)
        return lambda: self._prepared(ended)

    def _prepared(self, ended: _Epoch) -> Sequence[Committable]:
        if not ended.parts:
            return []
        written = [part.result() for part in ended.parts]
        return [
            {
                "directory": self._directory,
                "parts": written,
                "receipt": f"{self._directory}/{self._prefix}-{ended.number}.done",
                "rows": ended.rows,
                "bytes": sum(cast(int, each["length_bytes"]) for each in written),
            }
        ]

    def _write_part(self, epoch: _Epoch) -> None:
        batches, epoch.gathered, epoch.gathered_bytes = epoch.gathered, [], 0
        name = f"{self._directory}/{self._prefix}-{epoch.number}-{len(epoch.parts)}.arrow"
        epoch.parts.append(self._pool.submit(self._staged, name, batches))

    def _staged(self, name: str, batches: list[pa.RecordBatch]) -> JsonObject:
        return self._staging.write(name, [self._streams.encoded(batches)])

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


# --- Committing ------------------------------------------------------------------------------


class TransactionalCommitter(Committer):
    """Writes what is staged, with its mark, unless it has been written."""

    def __init__(self, sink: TransactionalSink, context: CommitterContext) -> None:
        self._sink = sink
        self._given_staging = context.staging
        self._accepts_missing = context.accepts_missing
        self._attempt = context.attempt
        """Where the coordinator commits: the one that the last sweep made room for."""
        self._tried: Mark | None = None
        """The newest part that was tried here."""
        self._target: Target | None = None
        self._settled: list[str] = []
        """Where the coordinator commits: receipts that the next commit makes superfluous."""

    @property
    def _staging(self) -> Staging:
        return required_staging(self._given_staging, self._sink)

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        for part in prepared:
            if part.committables:
                self._commit_part(epoch, part)

    def _commit_part(self, epoch: Epoch, part: Prepared) -> None:
        receipts = [str(each["receipt"]) for each in part.committables]
        names = self._names(part)
        refused = self._brought_about(part, names, has_receipt=receipts[0] in names)
        refused |= {name for name in names if name.startswith(_refused_prefix(part))}
        if receipts[0] not in names:
            self._staging.note(receipts[0])
        for name in part_names(part.committables):
            self._staging.delete(name)
        if self._sink.commits_at_coordinator:
            self._delete([each for each in self._settled if each != receipts[0]])
            self._settled = [receipts[0]]
        if refused and receipts[0] not in names:
            self._tell(epoch, sorted(refused))

    def _brought_about(self, part: Prepared, names: Set[str], *, has_receipt: bool) -> Set[str]:
        """See to it that the part is committed; answers where rows of it are kept now."""
        mark, target = part.mark, None
        try:
            newest = None
            if not has_receipt:
                target = self._opened()
                newest = target.begin(mark.writer)
            decision = decide(
                mark.checkpoint_id,
                newest,
                has_receipt=has_receipt,
                is_staged=names >= set(part_names(part.committables)),
                had_mark=_noted(part) in names,
                may_be_tried=self._may_be_tried(part),
            )
            if target is not None and decision is Part.TO_WRITE:
                if self._sink.marks_expire:
                    self._see_to_a_mark(target, part, newest, names)
                self._tried = mark
                refused = _Refusals(self._staging, part)
                target.write(mark, self._rows(part), refused.keep)
                return refused.names
            if target is not None:
                target.abandon()
        except BaseException as error:
            self._give_up(target)
            if isinstance(error, ConnectionError | TimeoutError):
                said = f"{self._sink.describe()} cannot be reached ({error})"
                raise Unavailable(said) from error
            raise
        if decision is not Part.DONE and not self._is_accepted(part):
            if decision is Part.IN_DOUBT:
                raise DataError(self._doubt_in_words(part))
            raise StorageError(self._lost_in_words(part))
        return set()

    def _may_be_tried(self, part: Prepared) -> bool:
        """Not what this attempt has prepared: nobody else has had it."""
        prepared_in = {_attempt_of(str(each["receipt"])) for each in part.committables}
        return prepared_in != {self._attempt} or self._tried == part.mark

    def _see_to_a_mark(
        self, target: Target, part: Prepared, newest: CheckpointId | None, names: Set[str]
    ) -> None:
        """So that one which is missing later has been forgotten."""
        if newest is None:
            refused = _Refusals(self._staging, part)
            target.write(Mark(part.mark.writer, NO_CHECKPOINT), iter(()), refused.keep)
            target.begin(part.mark.writer)
        if _noted(part) not in names:
            self._staging.note(_noted(part))

    def _opened(self) -> Target:
        if self._target is None:
            self._target = self._sink.open_target()
        return self._target

    def _give_up(self, target: Target | None) -> None:
        """The next try begins with a connection of its own."""
        self._target = None
        if target is not None:
            target.abandon()
            target.close()

    def _names(self, part: Prepared) -> Set[str]:
        directories = {str(each["directory"]) for each in part.committables}
        return {name for each in directories for name in self._staging.names(each)}

    def _rows(self, part: Prepared) -> Iterator[pa.RecordBatch]:
        for committable in part.committables:
            for written in cast(Sequence[JsonObject], committable["parts"]):
                with pa.ipc.open_stream(self._staging.read(written)) as stream:
                    yield from stream

    def _tell(self, epoch: Epoch, kept: Sequence[str]) -> None:
        rows = sum(_rows_in_name(name) for name in kept)
        said = (
            f"{self._sink.describe()} refused {rows} rows of epoch {epoch}, which are kept in"
            f" prepared/{kept[0]}{f' and {len(kept) - 1} more files' if len(kept) > 1 else ''} with"
            f" the reason in column {_REFUSED_BECAUSE}; the other rows are committed"
        )
        if self._sink.on_refused == "fail":
            raise OutputRefused(f"{said}: look at them, then start the job again, it goes on")
        log.error("%s", said)

    def _is_accepted(self, part: Prepared) -> bool:
        """Whether somebody has said, by name and number of rows, that the job goes on without."""
        accepted = all(_named(each) in self._accepts_missing for each in part.committables)
        if accepted:
            log.warning("the job goes on without %s: acceptMissingOutput names it", part.mark)
        return accepted

    def _rows_in_words(self, part: Prepared) -> str:
        rows = sum(cast(int, each["rows"]) for each in part.committables)
        return (
            f"{rows} rows that {self._sink.describe()} was to get with checkpoint"
            f" {part.mark.checkpoint_id}"
        )

    def _doubt_in_words(self, part: Prepared) -> str:
        return (
            f"{self._rows_in_words(part)} may have been written or not: the"
            f" {self._sink.mark_in_words(part.mark.writer)}, which would tell, was there and is"
            f" gone; look whether these rows are there; if not, delete the file"
            f" prepared/{_noted(part)} of the job, and they are written; if they are, go on without"
            f" them: option acceptMissingOutput={_option(part)}"
        )

    def _lost_in_words(self, part: Prepared) -> str:
        return (
            f"{self._rows_in_words(part)} are gone: no mark says that they were written, and the"
            f" staged files are missing: restore the files, or go on without these rows: option"
            f" acceptMissingOutput={_option(part)}"
        )

    def forget(self, committables: Sequence[Committable]) -> None:
        self._delete([str(each["receipt"]) for each in committables])

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._staging.delete(name)

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        if self._given_staging is None:
            return
        if self._sink.commits_at_coordinator:
            self._attempt = older_than
        kept = {str(each["receipt"]) for each in keep} | set(part_names(keep))
        names = sorted(self._staging.names(self._staging.directory(uid)) - kept)
        attempts = {name: _attempt_of(name) for name in names}
        self._discard(uid, [name for name, of in attempts.items() if of and of < older_than])

    def _discard(self, uid: OperatorUid, names: Sequence[str]) -> None:
        """These are of older attempts, and nobody needs them."""
        self._delete(names)

    def end_writers(self, uid: OperatorUid, needed: Set[Writer]) -> None:
        if self._given_staging is None or not self._sink.marks_expire:
            return
        for name in sorted(self._staging.names(self._staging.directory(uid))):
            writer = _writer_noted(name, uid)
            if writer is None or writer in needed:
                continue
            try:
                self._opened().forget(writer)
            except (StillframeError, OSError) as error:
                self._give_up(self._target)
                log.warning("the mark of %s is left where it is: %s", writer, error)
                return
            self._staging.delete(name)  # without a mark it says nothing of what is written now
        self._tell_of_others(uid, {writer.incarnation for writer in needed})

    def _tell_of_others(self, uid: OperatorUid, ours: Set[str]) -> None:
        """Marks of another incarnation are not compared. But a person may wonder about rows that
        this job has not written."""
        try:
            others = self._opened().incarnations(uid) - ours
        except (StillframeError, OSError) as error:
            self._give_up(self._target)
            log.warning("who else has written to %s is not known: %s", self._sink.describe(), error)
            return
        if others:
            log.warning(
                "%s has marks of other incarnations of sink %s (%s): a job that began with another"
                " job log has written there; its rows stay, and its marks are not compared",
                self._sink.describe(),
                uid,
                ", ".join(sorted(others)),
            )

    def close(self) -> None:
        if self._target is not None:
            self._target.close()


def part_names(committables: Sequence[Committable]) -> list[str]:
    return [
        str(written["name"])
        for each in committables
        for written in cast(Sequence[JsonObject], each["parts"])
    ]


def _named(committable: Committable) -> str:
    return f"{committable['receipt']}:{committable['rows']}"


def _option(part: Prepared) -> str:
    return ",".join(_named(each) for each in part.committables)


def _attempt_of(name: str) -> Attempt | None:
    """That wrote this file."""
    found = re.search(r"/(\d+)-[^/]+$", name)
    return Attempt(int(found[1])) if found else None


def _noted(part: Prepared) -> str:
    """The note that the writer of this part has had a mark."""
    writer, directory = part.mark.writer, part.committables[0]["directory"]
    return f"{directory}/marked-{writer.incarnation}-{_subtask_of(writer)}"


def _writer_noted(name: str, uid: OperatorUid) -> Writer | None:
    """Whose note this is, if it is one."""
    found = re.search(r"/marked-(.*)-(\d+|all)$", name)
    if found is None:
        return None
    subtask = None if found[2] == "all" else SubtaskIndex(int(found[2]))
    return Writer(found[1], uid, subtask)


def _subtask_of(writer: Writer) -> str:
    return "all" if writer.subtask is None else str(writer.subtask)


# --- Refused rows ----------------------------------------------------------------------------


def _refused_prefix(part: Prepared) -> str:
    """By the mark, so that a repeated commit finds what the first one kept."""
    directory = str(part.committables[0]["directory"])
    return f"{directory}/refused-{_in_name(part.mark)}-"


def _in_name(mark: Mark) -> str:
    return f"{_subtask_of(mark.writer)}-{mark.checkpoint_id}"


def _rows_in_name(name: str) -> int:
    found = re.search(r"-(\d+)rows-[0-9a-f]+\.parquet$", name)
    return int(found[1]) if found else 0


class _Refusals:
    """Rows of one part that the other system does not take, kept as Parquet files."""

    def __init__(self, staging: Staging, part: Prepared) -> None:
        self._staging = staging
        self._prefix = _refused_prefix(part)
        self.names: set[str] = set()

    def keep(self, rows: pa.RecordBatch, reason: str) -> None:
        because = pa.array([masked(reason)] * rows.num_rows, pa.string())
        table = pa.table(rows).append_column(_REFUSED_BECAUSE, because)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        name = f"{self._prefix}{rows.num_rows}rows-{secrets.token_hex(4)}.parquet"
        self._staging.write(name, [sink.getvalue()])
        self.names.add(name)
