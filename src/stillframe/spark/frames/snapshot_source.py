"""`spark.read.format("stillframe").load(path)`: what a job knew, as a DataFrame.

Theory of operation
-------------------
Spark makes the source in Python processes of its own: one that asks for the columns, one that asks
for the partitions, and then one for each of them on the executors. None of these has a session. So
what the session knows (Hadoop's settings for a storage, what a relative path is relative to) goes
with the class that is registered.

Without options there is a row for each state. With `operator`, and `state` where it has several,
there is a row for each entry, in the columns of `state/shapes`; each subtask's part is a partition.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache, wraps
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import pyarrow as pa
from pyspark.sql import DataFrameReader, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from stillframe.config import is_storage_setting, parse_count, refuse_unknown, storage_settings
from stillframe.coordinator.located import LocatedSnapshot, locate
from stillframe.errors import BuildError
from stillframe.protocol.manifests import Manifest, OperatorDescription
from stillframe.runtime.stored_states import (
    StatePart,
    batches_of,
    holds_state,
    schema_of,
    state_parts,
)
from stillframe.spark.deployment.checks import refuse_without_spark
from stillframe.spark.types import from_arrow_schema
from stillframe.state.shapes import Shape
from stillframe.storage.store import Store, is_local_address, open_store

FORMAT = "stillframe"
_OPTIONS = ("path", "operator", "state", "checkpoint")
_STATES_DDL = (
    "operator string, operator_name string, operator_kind string, state string, kind string,"
    " schema string, rows long, bytes long, subtasks int, key_groups int"
)


_waiting: WeakSet[SparkSession] = WeakSet()
"""Sessions that register the source when it is asked for."""
_registered: WeakKeyDictionary[SparkSession, Mapping[str, object]] = WeakKeyDictionary()
"""What each session's source knows."""


def register_when_asked(spark: SparkSession) -> None:
    """Have `spark.read.format("stillframe")` of this session register the source first.

    Not at once: Spark starts a Python process for the first source that is registered and waits
    for it, more than a second, and most jobs read no snapshot.
    """
    _hook_reader()
    _waiting.add(spark)


@cache
def _hook_reader() -> None:
    """PySpark asks nobody about a format that it does not know, so we look at each name first."""
    plain = DataFrameReader.format

    @wraps(plain)
    def looking(self: DataFrameReader, source: str) -> DataFrameReader:
        if source == FORMAT and self._spark in _waiting:
            register(self._spark)
        return plain(self, source)

    DataFrameReader.format = looking  # type: ignore[method-assign]


def register(spark: SparkSession) -> None:
    """Have this session read the format `stillframe`, in SQL too."""
    refuse_without_spark(spark)
    known = {"settings": storage_settings({}, spark.conf.getAll), "directory": os.getcwd()}
    if _registered.get(spark) == known:
        return  # Spark warns of each that is replaced
    # Spark looks in the active session whether the name is taken, which may be another one.
    active = SparkSession.getActiveSession() or spark
    _activate(spark)
    try:
        # Not found under its name in this module, so it travels with what it knows.
        spark.dataSource.register(type("_OfSession", (SnapshotSource,), known))
    finally:
        _activate(active)
    _registered[spark] = known


def _activate(spark: SparkSession) -> None:
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)  # type: ignore[union-attr]


class SnapshotSource(DataSource):
    """Made by Spark, in processes that have nothing but the options."""

    settings: ClassVar[Mapping[str, str]] = {}
    directory: ClassVar[str] = ""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        given = dict(options)
        refuse_unknown(
            (name for name in given if not is_storage_setting(name)), _OPTIONS, "format stillframe"
        )
        self._operator = given.get("operator")
        self._state = given.get("state")
        if self._state is not None and self._operator is None:
            raise BuildError(
                f"option state is {self._state!r}, and nobody says whose: give option operator too"
            )
        found = _located(given, self.settings, self.directory)
        # A store may hold connections, and this travels from process to process.
        self._place = found.store.address, dict(found.store.settings)
        self._manifest = found.manifest

    @property
    def _found(self) -> LocatedSnapshot:
        return LocatedSnapshot(open_store(*self._place), self._manifest)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType | str:
        if self._operator is None:
            return _STATES_DDL
        parts = chosen_parts(self._found, self._operator, self._state)
        return from_arrow_schema(shape_of_parts(self._found.store, parts).shown)

    def reader(self, schema: StructType) -> DataSourceReader:
        found = self._found
        if self._operator is None:
            return _StatesReader(*self._place, found.manifest)
        parts = chosen_parts(found, self._operator, self._state)
        return _EntriesReader(found.store, parts, found.manifest.max_parallelism, schema)


def _located(
    options: Mapping[str, str], settings: Mapping[str, str], directory: str
) -> LocatedSnapshot:
    path = options.get("path")
    if not path:
        raise BuildError("format stillframe needs a path: load(...) a job's directory")
    if is_local_address(path) and "://" not in path and not path.startswith("file:"):
        path = os.path.join(directory, path)
    number = options.get("checkpoint")
    checkpoint = None if number is None else parse_count("checkpoint", number)
    given = storage_settings(options, {})
    return locate(path, {**settings, **given}, checkpoint)


# --- what there is -------------------------------------------------------------------------------


def named_operator(manifest: Manifest, wanted: str) -> OperatorDescription:
    """The operator of this uid, or of this name if it is the only one."""
    by_uid = [each for each in manifest.operators if each.uid == wanted]
    found = by_uid or [each for each in manifest.operators if each.name == wanted]
    if len(found) == 1:
        return found[0]
    keeping = [each for each in manifest.operators if holds_state(manifest, each.uid)]
    there = ", ".join(f"{each.uid} ({each.name})" for each in found or keeping)
    problem = "there are several operators named" if found else "there is no operator"
    raise BuildError(
        f"{problem} {wanted!r} in {manifest.title}: give option operator one of these uids:"
        f" {there or 'none'}"
    )


def chosen_parts(found: LocatedSnapshot, operator: str, state: str | None) -> list[StatePart]:
    """The parts of the one state that is meant."""
    described = named_operator(found.manifest, operator)
    by_name = state_parts(found.store, found.manifest, described.uid)
    # Timers are asked for by their names: a database has tables for them, with rows or without.
    declared = [name for name in by_name if not name.startswith("$")] or list(by_name)
    if state is None and len(declared) == 1:
        return by_name[declared[0]]
    if state in by_name:
        return by_name[state]
    problem = f"has no state {state!r}" if state is not None else f"has {len(by_name)} states"
    what_to_do = f"give option state one of: {', '.join(by_name)}" if by_name else "it keeps none"
    raise BuildError(f"operator {operator!r} {problem}: {what_to_do}")


def shape_of_parts(store: Store, parts: list[StatePart]) -> Shape:
    # All parts have the same columns: the smallest is the quickest to read.
    smallest = min(parts, key=lambda part: part.length_bytes)
    return Shape(schema_of(store, smallest))


class _StatesReader(DataSourceReader):
    """A row for each state of each operator."""

    def __init__(self, address: str, settings: Mapping[str, str], manifest: Manifest) -> None:
        self._address = address
        self._settings = settings
        self._manifest = manifest

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        store = open_store(self._address, self._settings)
        for described in self._manifest.operators:
            yield from self._items(described)
            for name, parts in state_parts(store, self._manifest, described.uid).items():
                rows = [part.rows for part in parts]
                shape = shape_of_parts(store, parts)
                yield (
                    str(described.uid),
                    described.name,
                    described.kind,
                    name,
                    shape.kind,
                    from_arrow_schema(shape.shown).simpleString(),
                    None if None in rows else sum(row or 0 for row in rows),
                    sum(part.length_bytes for part in parts),
                    len(parts),
                    sum(part.key_groups for part in parts),
                )

    def _items(self, described: OperatorDescription) -> Iterator[tuple[Any, ...]]:
        """What is dealt out one by one, such as the splits of a source: told, not read."""
        snapshots = self._manifest.snapshots_of(described.uid)
        counts = [len(snapshot.items) for snapshot in snapshots]
        if sum(counts):
            of = (str(described.uid), described.name, described.kind)
            yield (*of, None, "items", None, sum(counts), None, len(counts), None)


class _PartPartition(InputPartition):
    def __init__(self, part: StatePart) -> None:
        super().__init__(part)
        self.part = part


class _EntriesReader(DataSourceReader):
    """A row for each entry of a state. Sent to the executors."""

    def __init__(
        self, store: Store, parts: list[StatePart], max_parallelism: int, schema: StructType
    ) -> None:
        self._address = store.address
        self._settings = dict(store.settings)
        self._parts = parts
        self._max_parallelism = max_parallelism
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [_PartPartition(part) for part in self._parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _PartPartition)
        store = open_store(self._address, self._settings)
        wanted = to_arrow_schema(self._schema, timezone="UTC")
        part = partition.part
        shape = Shape(schema_of(store, part))
        for key_group, batch in batches_of(store, part, self._max_parallelism):
            yield shape.show(batch, key_group).cast(wanted)
