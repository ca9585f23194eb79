"""`stillframe inspect PATH`: what a job has left on disk, and whether it is whole.

Theory of operation. A path is first understood (a checkpoint's directory, a job's, or a location
with several jobs), then looked into, which gives plain findings; only at the end are they put into
words or JSON. The job log decides what is complete; nothing is ever written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from stillframe.cli.lookup import inspect_rows, wants_rows
from stillframe.clock import SystemClock
from stillframe.coordinator.history import format_bytes
from stillframe.coordinator.job_log import JobLog
from stillframe.coordinator.snapshots import Snapshots
from stillframe.errors import SnapshotDamaged, StorageError
from stillframe.ids import Attempt, CheckpointId
from stillframe.protocol.joblog import JobRecord
from stillframe.protocol.manifests import (
    DiskState,
    KeyedState,
    Manifest,
    OperatorSnapshot,
    decode_manifest,
)
from stillframe.runtime.disk import fetched
from stillframe.runtime.restoring import read_file
from stillframe.state.backends import EXPIRES, EXPIRES_TYPE
from stillframe.state.disk_reading import tables_in
from stillframe.state.snapshots import read_keyed_snapshot, schema_text
from stillframe.storage.paths import (
    LOG_DIRECTORY,
    SAVEPOINT_METADATA,
    checkpoint_of,
    metadata_path,
)
from stillframe.storage.store import Store, is_local_address, open_store

_POSITIONS_SHOWN_MAX = 8


def inspect(arguments: argparse.Namespace) -> int:
    """1 if anything is damaged; with a job file, if it does not fit."""
    if arguments.against is not None:
        from stillframe.cli.against import inspect_against

        return inspect_against(arguments)
    if wants_rows(arguments):
        return inspect_rows(arguments)
    place = _existing(arguments.path)
    if _is_savepoint(place):
        jobs = [_look_at_savepoint(place, arguments.rows)]
    else:
        jobs = [
            _look_into(job, only, arguments.rows, is_brief=is_brief)
            for job, only, is_brief in _understood(place)
        ]
    if arguments.json:
        print(json.dumps([job.to_json() for job in jobs], ensure_ascii=False, indent=1))
    else:
        print("\n\n".join("\n".join(_job_lines(job)) for job in jobs))
    return int(any(job.is_damaged for job in jobs))


_Which: TypeAlias = tuple[CheckpointId, Attempt]


def _understood(place: Store) -> list[tuple[Store, _Which | None, bool]]:
    """Job directories, the one checkpoint wanted of them, and whether a summary is enough."""
    above, _, name = place.address.rpartition("/")
    which = checkpoint_of(name)
    if which is not None:
        return [(open_store(above), which, False)]
    if _is_job(place):
        return [(place, None, False)]
    children = [place.below(name) for name in place.list("")]
    jobs = [child for child in children if _is_job(child)]
    if not jobs:
        raise StorageError(
            f"{place.address} holds neither a job log nor checkpoints: give a checkpoint (chk-7-1),"
            " a savepoint, a job's directory or a checkpointLocation"
        )
    return [(job, None, True) for job in jobs]


def _existing(given: str) -> Store:
    """The store at an address; a local one is looked for, with what links lead to."""
    place = open_store(given)
    if not is_local_address(given):
        return place
    path = Path(place.address).resolve()
    if not path.is_dir():
        raise StorageError(f"{path} is no directory: give a checkpoint, a job or a location")
    return open_store(str(path))


def _is_savepoint(place: Store) -> bool:
    """Whether it has metadata without being a checkpoint of a job."""
    is_checkpoint = checkpoint_of(place.address.rpartition("/")[2]) is not None
    return not is_checkpoint and SAVEPOINT_METADATA in place.list("")


def _is_job(place: Store) -> bool:
    try:
        children = place.list("")
    except StorageError:
        if is_local_address(place.address) and not Path(place.address).is_dir():
            return False  # a file beside the jobs
        raise
    return LOG_DIRECTORY in children or any(map(checkpoint_of, children))


# --- what is found -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateFound:
    """One keyed state of one operator, over all its subtasks."""

    name: str
    schema: str
    rows: int
    length_bytes: int
    sample: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "schema": self.schema,
            "rows": self.rows,
            "bytes": self.length_bytes,
            "sample": list(self.sample),
        }


@dataclass(frozen=True, slots=True)
class OperatorFound:
    uid: str
    name: str
    subtasks: int
    finished: int
    states: tuple[StateFound, ...]
    items: tuple[Any, ...]
    """Positions, for a source."""
    commits: int
    """Prepared with this checkpoint, to be made visible after it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "name": self.name,
            "subtasks": self.subtasks,
            "finished": self.finished,
            "states": [state.to_json() for state in self.states],
            "items": list(self.items),
            "pending_commits": self.commits,
        }


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    checkpoint_id: CheckpointId
    attempt: Attempt
    status: str
    """complete, not complete, or unknown where there is no job log."""
    manifest: Manifest | None
    operators: tuple[OperatorFound, ...]
    damage: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "checkpoint": self.checkpoint_id,
            "attempt": self.attempt,
            "status": self.status,
            "damage": list(self.damage),
            "operators": [operator.to_json() for operator in self.operators],
        }
        if self.manifest is not None:
            found |= {
                "epoch": self.manifest.epoch,
                "kind": self.manifest.kind,
                "triggered_at_ms": self.manifest.triggered_at_ms,
                "completed_at_ms": self.manifest.completed_at_ms,
                "max_parallelism": self.manifest.max_parallelism,
                "state_bytes": self.manifest.state_bytes(),
                "timings": [timings.to_json() for timings in self.manifest.timings],
            }
        return found


@dataclass(frozen=True, slots=True)
class JobFound:
    name: str
    address: str
    record: JobRecord | None
    checkpoints: tuple[CheckpointFound, ...]
    damage: tuple[str, ...]
    """Of the log itself."""
    is_brief: bool

    @property
    def is_damaged(self) -> bool:
        return bool(self.damage) or any(found.damage for found in self.checkpoints)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "job": self.name,
            "path": self.address,
            "damage": list(self.damage),
            "checkpoints": [checkpoint.to_json() for checkpoint in self.checkpoints],
        }
        if self.record is not None:
            found |= {
                "outcome": self.record.outcome,
                "attempt": self.record.attempt,
                "restored_from": self.record.restored_from,
                "written_at_ms": self.record.written_at_ms,
                "written_by": self.record.written_by,
            }
        return found


# --- looking -------------------------------------------------------------------------------------


def _look_at_savepoint(store: Store, sample_rows: int) -> JobFound:
    where = f"{store.address}/{SAVEPOINT_METADATA}"
    manifest = decode_manifest(store.read(SAVEPOINT_METADATA), where)
    files = _Files(store, manifest, sample_rows)
    operators = tuple(files.operators())
    found = CheckpointFound(
        manifest.checkpoint_id,
        manifest.attempt,
        "complete",
        manifest,
        operators,
        tuple(files.damage),
    )
    return JobFound(manifest.job, store.address, None, (found,), (), False)


def _look_into(store: Store, only: _Which | None, sample_rows: int, *, is_brief: bool) -> JobFound:
    address = store.address
    name = unquote(address.rpartition("/")[2])
    record, damage = _read_log(store, name)
    kept = record.checkpoints if record else ()
    complete = {(completed.checkpoint_id, completed.attempt) for completed in kept}
    on_disk = {which for child in store.list("") if (which := checkpoint_of(child))}
    wanted = sorted(on_disk | complete) if only is None else [only]
    checkpoints = tuple(_look_at_checkpoint(store, which, record, sample_rows) for which in wanted)
    named = [found.manifest.job for found in checkpoints if found.manifest]
    return JobFound(named[-1] if named else name, address, record, checkpoints, damage, is_brief)


def _read_log(store: Store, name: str) -> tuple[JobRecord | None, tuple[str, ...]]:
    try:
        return JobLog(store, name, SystemClock()).read(), ()
    except SnapshotDamaged as error:
        return None, (str(error),)


def _look_at_checkpoint(
    store: Store, which: _Which, record: JobRecord | None, sample_rows: int
) -> CheckpointFound:
    checkpoint_id, attempt = which
    completed = record.checkpoint(checkpoint_id) if record else None
    if completed is not None and completed.attempt != attempt:
        completed = None  # another attempt has completed one of the same number
    if record is None:
        status = "unknown, there is no job log beside it"
    else:
        status = "complete" if completed else "not complete"
    try:
        if completed is not None:
            manifest = Snapshots(store).read_manifest(completed)
        else:
            path = metadata_path(checkpoint_id, attempt)
            manifest = decode_manifest(store.read(path), f"{store.address}/{path}")
    except SnapshotDamaged as error:
        # Without a place in the log nobody has promised that it is whole.
        unreadable = () if record and not completed else (str(error),)
        return CheckpointFound(checkpoint_id, attempt, status, None, (), unreadable)
    files = _Files(store, manifest, sample_rows)
    operators = tuple(files.operators())
    damage = () if record and not completed else tuple(files.damage)
    return CheckpointFound(checkpoint_id, attempt, status, manifest, operators, damage)


class _Files:
    """Reads and verifies every file of a checkpoint, and gathers it by operator."""

    def __init__(self, store: Store, manifest: Manifest, sample_rows: int) -> None:
        self._store = store
        self._manifest = manifest
        self._sample_rows = sample_rows
        self.damage: list[str] = []

    def operators(self) -> Iterator[OperatorFound]:
        for described in self._manifest.operators:
            snapshots = self._manifest.snapshots_of(described.uid)
            yield OperatorFound(
                uid=described.uid,
                name=described.name,
                subtasks=described.parallelism,
                finished=sum(snapshot.finished for snapshot in snapshots),
                states=tuple(self._states(snapshots)),
                items=tuple(item for snapshot in snapshots for item in snapshot.items),
                commits=sum(len(snapshot.commits) for snapshot in snapshots),
            )

    def _states(self, snapshots: Sequence[OperatorSnapshot]) -> Iterator[StateFound]:
        by_name: dict[str, list[StateFound]] = {}
        for snapshot in snapshots:
            parts = [self._keyed(state) for state in snapshot.keyed]
            parts += self._tables(snapshot.disk) if snapshot.disk is not None else []
            for part in parts:
                by_name.setdefault(part.name, []).append(part)
            for state in snapshot.broadcast:
                part = self._keyed(state)  # every copy is verified, one is shown
                if state.redistribution != "copied" or state.name not in by_name:
                    by_name.setdefault(state.name, []).append(part)
        for name, found in sorted(by_name.items()):
            sample = [row for part in found for row in part.sample]
            yield StateFound(
                name=name,
                schema=found[0].schema,
                rows=sum(part.rows for part in found),
                length_bytes=sum(part.length_bytes for part in found),
                sample=tuple(sample[: self._sample_rows]),
            )

    def _keyed(self, state: KeyedState) -> StateFound:
        sample: list[dict[str, Any]] = []
        try:
            data = read_file(self._store, state.file)
            groups = range(self._manifest.max_parallelism)
            sample = self._sample(read_keyed_snapshot(data, state.key_groups, groups))
        except SnapshotDamaged as error:
            self.damage.append(str(error))
        length_bytes = state.file.length_bytes
        return StateFound(state.name, state.schema, state.rows, length_bytes, tuple(sample))

    def _tables(self, disk: DiskState) -> list[StateFound]:
        """The states in a database; its bytes count for the first of them."""
        found: list[StateFound] = []
        length_bytes = sum(each.file.length_bytes for each in disk.files)
        try:
            with fetched(self._store, disk) as directory:
                for table in tables_in(directory):
                    rows = sum(batch.num_rows for _, batch in table.batches_by_key_group())
                    sample = self._sample(batch for _, batch in table.batches_by_key_group())
                    schema = schema_text(table.snapshot_schema)
                    found.append(StateFound(table.name, schema, rows, length_bytes, tuple(sample)))
                    length_bytes = 0
        except SnapshotDamaged as error:
            self.damage.append(str(error))
        return found

    def _sample(self, batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for batch in map(_alive, batches):
            if len(rows) >= self._sample_rows:
                break
            rows += batch.slice(0, self._sample_rows - len(rows)).to_pylist()
        return [{name: _plain(value) for name, value in row.items()} for row in rows]


def _alive(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Without rows that have expired since: a job that is restored would not see them either."""
    if EXPIRES not in batch.schema.names:
        return batch
    now = pa.scalar(SystemClock().wall_ms()).cast(EXPIRES_TYPE)
    expires = batch.column(EXPIRES)
    return batch.filter(pc.or_kleene(expires.is_null(), pc.greater(expires, now)))


def _plain(value: Any) -> Any:
    """As JSON can hold it."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)


# --- in words ------------------------------------------------------------------------------------


def _job_lines(job: JobFound) -> Iterator[str]:
    yield f"job {job.name} in {job.address}"
    yield from (f"  DAMAGED: {damage}" for damage in job.damage)
    if job.record is not None:
        yield f"  {_standing(job.record)}"
    if not job.checkpoints:
        yield "  no checkpoints"
    for found in job.checkpoints:
        yield f"  {_checkpoint_line(found)}"
        yield from (f"    DAMAGED: {damage}" for damage in found.damage)
    if job.is_brief:
        return
    whole = [found for found in job.checkpoints if found.operators]
    complete = [found for found in whole if found.status == "complete"]
    for found in (complete or whole)[-1:]:
        yield from _operator_lines(found)


def _standing(record: JobRecord) -> str:
    since = "the beginning"
    if record.restored_from is not None:
        since = f"checkpoint {record.restored_from}"
    # Whether a driver runs it now, the log does not know.
    outcome = "not ended" if record.outcome == "running" else record.outcome
    return (
        f"{outcome}, attempt {record.attempt} from {since}, last heard of"
        f" {_time(record.written_at_ms)} ({record.written_by})"
    )


def _checkpoint_line(found: CheckpointFound) -> str:
    manifest = found.manifest
    if manifest is None:
        return (
            f"checkpoint {found.checkpoint_id}: {found.status}, attempt {found.attempt}, no"
            " readable metadata"
        )
    duration_ms = manifest.completed_at_ms - manifest.triggered_at_ms
    return (
        f"{manifest.kind} {found.checkpoint_id}: {found.status}, attempt {found.attempt}, epoch"
        f" {manifest.epoch}, {_time(manifest.completed_at_ms)}, {duration_ms} ms,"
        f" {format_bytes(manifest.state_bytes())} of state"
    )


def _operator_lines(found: CheckpointFound) -> Iterator[str]:
    yield f"  in checkpoint {found.checkpoint_id} of attempt {found.attempt}:"
    for operator in found.operators:
        ended = f", {operator.finished} finished" if operator.finished else ""
        yield f"    {operator.name}  [{operator.uid}]  {operator.subtasks} subtasks{ended}"
        for state in operator.states:
            yield (
                f"      state {state.name}: {state.rows} rows, {format_bytes(state.length_bytes)},"
                f" ({state.schema})"
            )
            yield from (f"        {json.dumps(row, ensure_ascii=False)}" for row in state.sample)
        yield from (f"      {line}" for line in _item_lines(operator.items))
        if operator.commits:
            yield f"      {operator.commits} pending commits"


def _item_lines(items: Sequence[Any]) -> Iterator[str]:
    for item in items[:_POSITIONS_SHOWN_MAX]:
        yield f"position {json.dumps(item, ensure_ascii=False)}"
    if len(items) > _POSITIONS_SHOWN_MAX:
        yield f"… and {len(items) - _POSITIONS_SHOWN_MAX} more positions"


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
