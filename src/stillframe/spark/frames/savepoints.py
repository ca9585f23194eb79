"""`stillframe.Savepoint`: a snapshot made by hand, of DataFrames, that a job can start from.

Theory of operation
-------------------
A savepoint in the making is a manifest, of nothing or of a snapshot there is, and the DataFrames
that replace some of its states. `write` copies the files that stay, has Spark write those of each
DataFrame, and puts the metadata last: before that there is no savepoint.

A DataFrame's rows are hashed by their keys as the engine does it, brought to the task that has
their subtask's key groups, sorted by key group there and written as any snapshot is, one key group
after the other; so no process ever holds more than the rows of one key group. A task that Spark
runs twice writes two files, of which the metadata names the one that was answered.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np
import pyarrow as pa
from pyspark.errors import PythonException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import IntegerType, StructField, StructType

from stillframe.clock import SystemClock
from stillframe.config import storage_settings
from stillframe.coordinator.located import LocatedSnapshot, locate, write_savepoint
from stillframe.errors import BuildError, DataError, StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.key_groups import (
    NO_COLUMNS_HASH,
    hash_columns,
    key_groups_of,
    subtask_of_key_group,
    unsupported_key_type,
)
from stillframe.protocol.manifests import (
    KeyedState,
    Manifest,
    OperatorDescription,
)
from stillframe.protocol.savepoints import (
    as_savepoint,
    with_state,
    without_operators,
    without_state,
)
from stillframe.runtime.deduplicating import Deduplicating
from stillframe.runtime.enriching import Enriching
from stillframe.runtime.operators import Aggregating
from stillframe.runtime.state_files import described_file
from stillframe.runtime.stored_states import StatePart, copied, state_parts
from stillframe.spark.frames.snapshot_source import named_operator, shape_of_parts
from stillframe.spark.types import to_arrow_schema
from stillframe.state.aggregates import canonical
from stillframe.state.key_places import key_places
from stillframe.state.reached import BEGINNING_US
from stillframe.state.shapes import (
    KEY,
    LIST_ELEMENT,
    LIST_INDEX,
    MAP_KEY,
    SHOWN_VALUE,
    Shape,
    StateKind,
    shape_of,
)
from stillframe.state.snapshots import write_keyed_snapshot
from stillframe.storage.paths import quoted_name
from stillframe.storage.store import Store, open_store

_FILES = "state"
_ONE_ROW_PER_KEY = (Aggregating.STATE, Deduplicating.STATE, Enriching.STATE)
_GROUP, _PART = "__stillframe_key_group", "__stillframe_subtask"


@dataclass(frozen=True)
class _Added:
    """A state that a DataFrame becomes."""

    described: OperatorDescription
    state: str
    frame: DataFrame
    shape: Shape


@dataclass(frozen=True)
class Savepoint:
    """A savepoint in the making. Every method answers another one; `write` makes it real."""

    _spark: SparkSession
    _found: LocatedSnapshot | None
    _manifest: Manifest
    _added: Mapping[tuple[OperatorUid, str], _Added] = field(default_factory=dict)

    @classmethod
    def new(cls, spark: SparkSession, max_parallelism: int = 128) -> Savepoint:
        """With nothing in it. `max_parallelism` has to be that of the job that starts from it."""
        if max_parallelism < 1:
            raise BuildError(f"max_parallelism is at least 1, not {max_parallelism}")
        empty = Manifest(
            job="",
            attempt=Attempt(1),
            checkpoint_id=CheckpointId(1),
            epoch=Epoch(0),
            kind="savepoint",
            triggered_at_ms=SystemClock().wall_ms(),
            completed_at_ms=SystemClock().wall_ms(),
            max_parallelism=max_parallelism,
            operators=(),
            snapshots=(),
        )
        return cls(spark, None, empty)

    @classmethod
    def of(cls, spark: SparkSession, path: str, checkpoint: int | None = None) -> Savepoint:
        """With all state of a snapshot: a job's directory (its newest checkpoint, or this one), a
        checkpoint's or a savepoint's.

        What its sinks have prepared stays behind: the job that prepared it commits it.
        """
        found = locate(path, storage_settings({}, spark.conf.getAll), checkpoint)
        return cls(spark, found, as_savepoint(found.manifest))

    def with_state(
        self,
        operator: str,
        state: str,
        frame: DataFrame,
        *,
        keys: Sequence[str] | None = None,
        kind: StateKind | None = None,
    ) -> Savepoint:
        """The rows of this DataFrame as a state of an operator, whatever it was before.

        `operator` is a uid. The columns are those that reading a snapshot shows; or, with `keys`,
        plain ones: these are the key and all others the value. `kind` is what a state is that is
        new: `value` (a program's, unless the columns say otherwise), `list`, `map`, or `columns`
        for whatever Stillframe keeps itself, such as aggregates.
        """
        described = self._described(operator)
        if keys is not None:
            frame = _in_structs(frame, keys, kind)
        like = self._kept_now(described.uid, state)
        shape = shape_of(to_arrow_schema(frame.schema), kind, like)
        for key in shape.key_fields:
            if reason := unsupported_key_type(key.type):
                raise BuildError(f"column {key.name!r} cannot be a key: {reason}")
        quoted_name(state, "state name")
        added = _Added(described, state, frame, shape)
        return replace(
            self,
            _manifest=without_state(self._manifest, described.uid, state),
            _added={**self._added, (described.uid, state): added},
        )

    def without_state(self, operator: str, state: str) -> Savepoint:
        """The operator forgets this state, and the job that starts from here starts it over."""
        uid = named_operator(self._known(), operator).uid
        if state not in self._parts(uid) and (uid, state) not in self._added:
            raise BuildError(f"operator {operator!r} has no state {state!r} to leave out")
        left = {place: added for place, added in self._added.items() if place != (uid, state)}
        return replace(self, _manifest=without_state(self._manifest, uid, state), _added=left)

    def without_operator(self, operator: str) -> Savepoint:
        """As if it had never been: a source begins at its beginning, all else is empty."""
        uid = named_operator(self._known(), operator).uid
        left = {place: added for place, added in self._added.items() if place[0] != uid}
        return replace(self, _manifest=without_operators(self._manifest, {uid}), _added=left)

    def write(self, path: str) -> None:
        """Make it, in a directory of its own that is empty or not there yet.

        A job starts from it with option `restoreFrom` (`stillframe run --restore`).
        """
        store = open_store(path, storage_settings({}, self._spark.conf.getAll))
        if store.list(""):
            raise StorageError(
                f"{store.address} is not empty: write a savepoint to a new directory"
            )
        try:
            manifest = self._written(store)
            _delete_unnamed(store, manifest)
        except BaseException:
            with suppress(StorageError):
                store.delete_directory(_FILES)
            raise
        write_savepoint(store, manifest)

    # --- what there is ---

    def _known(self) -> Manifest:
        """With the operators that come with a DataFrame."""
        there = {each.uid for each in self._manifest.operators}
        added = {each.described.uid: each.described for each in self._added.values()}
        new = [described for uid, described in added.items() if uid not in there]
        return replace(self._manifest, operators=(*self._manifest.operators, *new))

    def _described(self, operator: str) -> OperatorDescription:
        known = self._known()
        if any(operator in (each.uid, each.name) for each in known.operators):
            return named_operator(known, operator)
        quoted_name(operator, "operator uid")
        parts = min(self._spark.sparkContext.defaultParallelism, known.max_parallelism)
        return OperatorDescription(OperatorUid(operator), "savepoint", operator, parts)

    def _kept_now(self, uid: OperatorUid, state: str) -> Shape | None:
        """How the state is kept that is replaced."""
        if (uid, state) in self._added:
            return self._added[uid, state].shape
        parts = self._parts(uid).get(state)
        return shape_of_parts(self._found.store, parts) if self._found and parts else None

    def _parts(self, uid: OperatorUid) -> dict[str, list[StatePart]]:
        return state_parts(self._found.store, self._manifest, uid) if self._found else {}

    # --- writing ---

    def _written(self, store: Store) -> Manifest:
        manifest = self._manifest
        if self._found is not None:
            manifest = copied(self._found.store, manifest, store, _new_path)
        for added in self._added.values():
            known = len(manifest.snapshots_of(added.described.uid))
            count = known or added.described.parallelism
            parts = _write_frame(added, store, count, manifest.max_parallelism)
            manifest = with_state(manifest, added.described, added.state, parts, BEGINNING_US)
        return replace(manifest, completed_at_ms=SystemClock().wall_ms())


def _in_structs(frame: DataFrame, keys: Sequence[str], kind: StateKind | None) -> DataFrame:
    missing = [key for key in keys if key not in frame.columns]
    if missing or kind == "map":
        problem = f"there is no column {missing[0]!r}" if missing else "a map has keys of its own"
        raise BuildError(
            f"{problem}: give keys among {', '.join(frame.columns)}, or the columns {KEY} and"
            f" {SHOWN_VALUE} ({LIST_ELEMENT}; {MAP_KEY} and user_map_value) as structs"
        )
    values = [name for name in frame.columns if name not in keys]
    value = LIST_ELEMENT if kind == "list" else SHOWN_VALUE
    return frame.select(
        *([_struct(keys).alias(KEY)] if keys else []),
        *([_struct(values).alias(value)] if values else []),
    )


def _struct(names: Sequence[str]) -> Column:
    # Quoted: names such as `count(1)` and `avg(x).sum` are columns, not paths.
    return sql.struct(*(sql.col("`" + name.replace("`", "``") + "`") for name in names))


def _new_path() -> str:
    return f"{_FILES}/{uuid.uuid4().hex}.arrow"


def _delete_unnamed(store: Store, manifest: Manifest) -> None:
    """What tasks wrote that Spark ran twice."""
    named = {file.path for file in manifest.files()}
    for name in store.list(_FILES):
        if f"{_FILES}/{name}" not in named:
            with suppress(StorageError):
                store.delete(f"{_FILES}/{name}")


# --- a DataFrame as state files ------------------------------------------------------------------


def _write_frame(
    added: _Added, store: Store, count: int, max_parallelism: int
) -> list[tuple[KeyedState, ...]]:
    """Have Spark write the files of all subtasks; what there is for each of them."""
    shape = added.shape
    frame = added.frame
    order = [sql.col(_GROUP), *([sql.col(LIST_INDEX)] if LIST_INDEX in frame.columns else [])]
    numbered = StructType(
        [
            *frame.schema.fields,
            StructField(_GROUP, IntegerType()),
            StructField(_PART, IntegerType()),
        ]
    )
    written = (
        frame.mapInArrow(_numbering(shape, count, max_parallelism), numbered)
        .repartition(count, _PART)
        .sortWithinPartitions(*order)
        .mapInArrow(
            _writing(shape, added.state, store.address, dict(store.settings)),
            "subtask int, state string",
        )
    )
    try:
        rows = written.collect()
    except PythonException as error:
        raise _our_own(error) from error
    found: list[tuple[KeyedState, ...]] = [()] * count
    for subtask, state in rows:
        found[subtask] = (KeyedState.from_json(json.loads(state)),)
    return found


def _our_own(error: PythonException) -> Exception:
    """What an executor raised on purpose, without the pages of Python and Java around it."""
    told = re.search(r"^stillframe\.errors\.\w+: (.*)$", str(error), re.MULTILINE)
    return DataError(told[1]) if told else error


_OfBatches = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def _numbering(shape: Shape, count: int, max_parallelism: int) -> _OfBatches:
    """Called on executors: adds the key group of each row, and the subtask that owns it."""

    def number(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            kept = shape.keep(batch)
            keys = [canonical(kept.column(place)) for place in key_places(shape.kept) or ()]
            hashes = (
                hash_columns(keys)
                if keys
                else np.full(batch.num_rows, NO_COLUMNS_HASH, dtype=np.uint64)
            )
            groups = key_groups_of(hashes, max_parallelism)
            parts = subtask_of_key_group(groups, count, max_parallelism)
            names = [*batch.schema.names, _GROUP, _PART]
            columns = [*batch.columns, pa.array(groups), pa.array(parts.astype(np.int32))]
            yield pa.RecordBatch.from_arrays(columns, names=names)

    return number


def _writing(shape: Shape, state: str, address: str, settings: Mapping[str, str]) -> _OfBatches:
    """Called on executors: writes rows that come sorted, a file for each subtask among them."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        store = open_store(address, settings)
        for part, groups in groupby(_by_group(batches), key=lambda found: found[0]):
            of_part = ((group, rows) for _, group, rows in groups)
            written = write_keyed_snapshot(store, _new_path(), _SortedRows(shape, state, of_part))
            described = json.dumps(described_file(state, written).to_json())
            yield pa.RecordBatch.from_pydict(
                {"subtask": pa.array([part], pa.int32()), "state": [described]}
            )

    return write


def _by_group(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Subtask, key group and rows, of rows that come sorted by key group."""
    pieces: list[pa.RecordBatch] = []
    for batch in batches:
        groups = batch.column(_GROUP).to_numpy()
        cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), batch.num_rows]
        for begin, end in pairwise(cuts):
            piece = batch.slice(begin, end - begin)
            if pieces and piece.num_rows and _group_of(piece) != _group_of(pieces[0]):
                yield _run(pieces)
                pieces = []
            pieces += [piece] if piece.num_rows else []
    if pieces:
        yield _run(pieces)


def _group_of(piece: pa.RecordBatch) -> int:
    group: int = piece.column(_GROUP)[0].as_py()
    return group


def _run(pieces: Sequence[pa.RecordBatch]) -> tuple[int, int, pa.RecordBatch]:
    rows = pa.concat_batches(pieces)
    return rows.column(_PART)[0].as_py(), _group_of(rows), rows


class _SortedRows:
    """The rows of one subtask, as `write_keyed_snapshot` takes them."""

    def __init__(
        self, shape: Shape, state: str, groups: Iterator[tuple[int, pa.RecordBatch]]
    ) -> None:
        self.snapshot_schema = shape.kept
        self._shape = shape
        self._state = state
        self._groups = groups

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        for group, shown in self._groups:
            rows = self._shape.keep(shown)
            _refuse_repeated(rows, self._shape, self._state)
            yield group, rows


def _refuse_repeated(rows: pa.RecordBatch, shape: Shape, state: str) -> None:
    """A key that is there twice would have one of its two values, and nobody could say which."""
    identity = shape.identity
    if shape.kind == "columns" and state in _ONE_ROW_PER_KEY:
        identity = list(key_places(shape.kept) or ())
    if not identity:
        return
    columns = pa.Table.from_batches([rows.select(identity)]).flatten()
    counted = columns.group_by(columns.column_names).aggregate([([], "count_all")])
    twice = counted.filter(pa.compute.greater(counted.column("count_all"), 1))
    if twice.num_rows:
        key = twice.drop_columns(["count_all"]).slice(0, 1).to_pylist()[0]
        raise DataError(
            f"state {state!r} has {twice.column('count_all')[0]} rows for {key}: give one row for"
            " each key"
        )
