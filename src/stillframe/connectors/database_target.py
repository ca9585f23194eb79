"""Writes staged rows to a database, with their mark, in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.api.sinks import Target
from stillframe.connectors.database_options import Table
from stillframe.connectors.database_session import Refused, Session
from stillframe.ids import CheckpointId, Mark, OperatorUid, Writer, incarnation_in

_CHUNK_ROWS_MAX = 65_536
"""As many as a batch of a source has."""
_PLACE = "__place"

Refuse = Callable[[pa.RecordBatch, str], None]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows, and what puts them into the table, in this order."""

    rows: pa.RecordBatch
    steps: Sequence[Callable[[], None]]


class DatabaseTarget(Target):
    """A session for each part. What a database refuses is found by halving, and left out.

    While the database takes one chunk, a thread makes the next one ready.
    """

    def __init__(self, table: Table, open_session: Callable[[], Session]) -> None:
        self._table = table
        self._open_session = open_session
        self._session: Session | None = None

    def begin(self, writer: Writer) -> CheckpointId | None:
        self.close()
        self._session = self._open_session()
        found = self._session.begin(str(writer))
        return None if found is None else CheckpointId(found)

    def write(self, mark: Mark, rows: Iterator[pa.RecordBatch], refuse: Refuse) -> None:
        session, refusals = self._session, _Refusals()
        assert session is not None, "begin comes first"
        session.get_ready()
        ready = (
            self._ready(session, each)
            for each in chunks(rows, _CHUNK_ROWS_MAX, session.chunk_bytes_max)
        )
        with ThreadPoolExecutor(1, "stillframe-encoding") as pool:
            for chunk in one_ahead(ready, pool):
                self._take(session, chunk, refusals)
        refusals.tell(refuse)
        session.commit(str(mark.writer), mark.checkpoint_id)
        self.close()

    def _take(self, session: Session, whole: _Chunk, refusals: _Refusals) -> None:
        """What is refused as a whole is tried in halves, in order, down to the rows."""
        waiting = [whole]
        while waiting:
            chunk = waiting.pop()
            try:
                with session.undone_if_refused():
                    for step in chunk.steps:
                        step()
            except Refused as error:
                rows = chunk.rows
                if rows.num_rows == 1:
                    refusals.add(rows, error)
                else:
                    half = rows.num_rows // 2
                    halves = rows.slice(half), rows.slice(0, half)
                    waiting += [self._ready(session, each) for each in halves]

    def _ready(self, session: Session, rows: pa.RecordBatch) -> _Chunk:
        """Without a word to the database."""
        table = self._table
        if not table.keys:
            return _Chunk(rows, [session.loading(rows)])
        steps = []
        newest = newest_of(rows, table.keys)
        if table.delete_column is not None:
            goes = pc.fill_null(newest.column(table.delete_column), False)
            gone, newest = newest.filter(goes), newest.filter(pc.invert(goes))
            if gone.num_rows:
                steps.append(partial(session.delete, gone.select(list(table.keys))))
        if newest.num_rows:
            steps.append(partial(session.merge, newest.select(table.columns.names)))
        return _Chunk(rows, steps)

    def forget(self, writer: Writer) -> None:
        with closing(self._open_session()) as session:
            session.forget(str(writer))

    def incarnations(self, uid: OperatorUid) -> Set[str]:
        with closing(self._open_session()) as session:
            found = (incarnation_in(writer, uid) for writer in session.writers(uid))
            return {each for each in found if each is not None}

    def abandon(self) -> None:
        self.close()

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


class _Refusals:
    """Rows that were refused, by the kind of reason: a file of them each, not one for each row."""

    def __init__(self) -> None:
        self._rows: dict[str, list[pa.RecordBatch]] = {}
        self._reasons: dict[str, str] = {}

    def add(self, row: pa.RecordBatch, error: Refused) -> None:
        self._rows.setdefault(error.code, []).append(row)
        self._reasons.setdefault(error.code, str(error))

    def tell(self, refuse: Refuse) -> None:
        for code, rows in self._rows.items():
            first = f" (that is the first of {len(rows)} such rows)" if len(rows) > 1 else ""
            refuse(joined(rows), self._reasons[code] + first)


def one_ahead(items: Iterator[_Chunk], pool: Executor) -> Iterator[_Chunk]:
    """The same, of which the next one is made while this one is used."""
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item


def chunks(
    batches: Iterator[pa.RecordBatch], rows_max: int, bytes_max: int
) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that are neither small nor large."""
    gathered: list[pa.RecordBatch] = []
    for batch in batches:
        per_row = batch.nbytes / max(batch.num_rows, 1)
        step = max(1, min(rows_max, int(bytes_max / max(per_row, 1))))
        for at in range(0, batch.num_rows, step):
            piece = batch.slice(at, step)
            rows = sum(each.num_rows for each in gathered) + piece.num_rows
            if gathered and (
                rows > rows_max or sum(each.nbytes for each in gathered) + piece.nbytes > bytes_max
            ):
                yield joined(gathered)
                gathered = []
            gathered.append(piece)
    if gathered:
        yield joined(gathered)


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches)


def newest_of(rows: pa.RecordBatch, keys: tuple[str, ...]) -> pa.RecordBatch:
    """Of rows with the same keys the last one, in their order."""
    places = pa.table(rows.select(list(keys))).append_column(
        _PLACE, pa.array(np.arange(rows.num_rows))
    )
    # In this thread: Arrow's own may be taken by the records that flow meanwhile.
    grouped = places.group_by(list(keys), use_threads=False)
    last = grouped.aggregate([(_PLACE, "max")]).column(f"{_PLACE}_max")
    if len(last) == rows.num_rows:
        return rows
    return rows.take(pa.array(np.sort(last.to_numpy())))
