"""Tables that streams are joined with, read again every `refreshInterval`.

Theory of operation. A thread of the driver runs the DataFrames again. If they give other rows, the
job rests (`coordinator/rescaling`): its last checkpoint holds all that was read, and the next
attempt goes on from there with the new rows. So in every slot the records before that checkpoint
are joined with the older rows, and all others with the newer ones. An attempt after a failure has
the rows of the attempt before it; a new driver begins with what it reads.

Whatever goes wrong with reading leaves the job as it is, with a warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from stillframe.config import JobConfig
from stillframe.coordinator.job import Job
from stillframe.coordinator.replanned import Refreshed
from stillframe.coordinator.rescaling import RescaleFailed, RescaleOutcome
from stillframe.errors import StartRefused
from stillframe.graph.logical import Lookup, Node, moved, walk
from stillframe.runtime.lookups import one_batch
from stillframe.secrets import masked
from stillframe.spark.plans.lookups import TableOfFrame, with_tables_read

_LOOK_SECONDS = 0.5
log = logging.getLogger("stillframe")


def refresh_seconds(sinks: Sequence[Node], config: JobConfig) -> float | None:
    """How often the tables of this job are read again; None: only at its start.

    Raises StartRefused where it could not go on with other rows. What stops when it has read what
    is there reads its tables once.
    """
    seconds = config.refresh_interval_seconds
    has_tables = any(isinstance(node.operator, Lookup) for node in walk(sinks))
    if seconds is None or not has_tables or config.available_now:
        return None
    if config.checkpoint_location is None or config.checkpoint_interval_seconds is None:
        raise StartRefused(
            "refreshInterval has the job go on from a checkpoint with the new rows of its tables,"
            " and it takes none: set checkpointLocation and checkpointInterval"
        )
    if config.checkpoint_mode == "at-most-once":
        raise StartRefused(
            "refreshInterval has the job go on from a checkpoint, and with checkpointMode"
            " at-most-once it would skip what has been read and not emitted yet: use another"
            " checkpointMode"
        )
    return seconds


class Tables:
    """The graph of a job with the rows of its tables in it, as they were read last."""

    def __init__(self, sinks: Sequence[Node], seconds: float | None) -> None:
        """`seconds`: how often they are to be read again."""
        self._unread = [lookup.table for _, lookup in _lookups_in(sinks)]
        self.graph = with_tables_read(sinks, seconds)

    def read_again(self) -> bool:
        """Whether a table has other rows than before; then the graph has them."""
        changed: dict[int, pa.Table] = {}
        for (node, lookup), table in zip(_lookups_in(self.graph), self._unread, strict=True):
            if isinstance(table, TableOfFrame):
                rows = table.read_again()
                if not _same_rows(lookup.table, rows):
                    changed[id(node)] = rows
        if changed:
            self.graph = _with_rows(self.graph, changed)
        return bool(changed)


class Refreshing(threading.Thread):
    """Reads the tables of one job again, for as long as the job runs."""

    def __init__(self, job: Job, tables: Tables, seconds: float) -> None:
        super().__init__(name=f"stillframe-tables-{job.plan.job}", daemon=True)
        self._job = job
        self._tables = tables
        self._seconds = seconds

    def run(self) -> None:
        has_changed = False
        while self._runs_after(self._seconds):
            try:
                has_changed |= self._tables.read_again()
                if has_changed:
                    has_changed = not self._is_taken_in()
            except Exception as error:
                if not self._job.is_alive():
                    return
                said = masked(f"{type(error).__name__}: {error}".partition("\n")[0])
                log.warning(
                    "job %r goes on with the tables it has, because they could not be read again:"
                    " %s",
                    *(self._job.plan.job, said),
                )

    def _runs_after(self, seconds: float) -> bool:
        self._job.join(seconds)
        return self._job.is_alive()

    def _is_taken_in(self) -> bool:
        outcomes: list[RescaleOutcome] = []
        is_answered = threading.Event()

        def note(outcome: RescaleOutcome) -> None:
            outcomes.append(outcome)
            is_answered.set()

        self._job.request_refresh(note)
        while not is_answered.wait(_LOOK_SECONDS) and self._job.is_alive():
            pass
        match outcomes:
            case [Refreshed()]:
                return True
            case [RescaleFailed(reason)] if self._job.is_alive():
                log.warning("job %r: %s", self._job.plan.job, reason)
        return False


def _lookups_in(sinks: Sequence[Node]) -> list[tuple[Node, Lookup]]:
    return [(node, node.operator) for node in walk(sinks) if isinstance(node.operator, Lookup)]


def _with_rows(sinks: Sequence[Node], rows: Mapping[int, pa.Table]) -> list[Node]:
    """The graph with these rows in its tables, by the identity of the nodes."""
    made: dict[int, Node] = {}
    for node in walk(sinks):
        fed = moved(node, made)
        if id(node) in rows:
            assert isinstance(fed.operator, Lookup)
            renewed = replace(fed.operator, table=rows[id(node)])
            fed = Node(renewed, fed.schema, fed.inputs, fed.given_uid, fed.parallelism)
        made[id(node)] = fed
    return [made[id(sink)] for sink in sinks]


def _same_rows(before: pa.Table, after: pa.Table) -> bool:
    """Whether they have the same rows in any order; not known of arrays, structs and maps that
    come in another order, which count as changed."""
    if before.num_rows != after.num_rows:
        return False
    if _are_alike(before, after):
        return True
    by_all = [(name, "ascending") for name in before.schema.names]
    try:
        return _are_alike(before.sort_by(by_all), after.sort_by(by_all))
    except pa.ArrowException:
        return False


def _are_alike(before: pa.Table, after: pa.Table) -> bool:
    if before.equals(after):
        return True
    # By their bytes, too: NaN equals nothing.
    bytes_before, bytes_after = (one_batch(each).serialize() for each in (before, after))
    return bool(bytes_before.equals(bytes_after))
