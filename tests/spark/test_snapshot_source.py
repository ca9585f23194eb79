"""The data source as Spark drives it, process after process, without a JVM."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from stillframe.api.aggregates import AggregateCall
from stillframe.coordinator.located import write_savepoint
from stillframe.errors import BuildError, SnapshotDamaged
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import Manifest, OperatorDescription, OperatorSnapshot
from stillframe.runtime.state_files import described_file
from stillframe.spark.frames.snapshot_source import SnapshotSource
from stillframe.spark.types import from_arrow_schema
from stillframe.state.aggregates import AggregateTable
from stillframe.state.shapes import Shape
from stillframe.state.snapshots import write_keyed_snapshot
from stillframe.storage.store import Store, open_store

SCHEMA = pa.schema([("app", pa.string()), ("x", pa.float64())])
CALLS = [AggregateCall("max", "x", "max(x)", pa.float64())]
GROUPS = 16


def make_savepoint(store: Store, *besides: str) -> None:
    """Two subtasks with the same columns and other keys; states `besides` look the same."""
    snapshots = []
    for subtask, app in enumerate(["a", "b"]):
        table = AggregateTable(SCHEMA, ["app"], CALLS, GROUPS)
        table.update(pa.record_batch({"app": [app], "x": [1.5]}, schema=SCHEMA))
        written = write_keyed_snapshot(store, f"state/{subtask}", table.freeze())
        keyed = tuple(described_file(name, written) for name in ("aggregates", *besides))
        snapshots.append(OperatorSnapshot(OperatorUid("top"), SubtaskIndex(subtask), keyed=keyed))
    source = OperatorSnapshot(OperatorUid("read"), SubtaskIndex(0), items=({"id": "p"},))
    operators = (
        OperatorDescription(OperatorUid("read"), "read", "read files", 1),
        OperatorDescription(OperatorUid("top"), "aggregate", "max(x) by app", 2),
    )
    manifest = Manifest(
        "views",
        Attempt(1),
        CheckpointId(4),
        Epoch(3),
        "savepoint",
        triggered_at_ms=0,
        completed_at_ms=0,
        max_parallelism=GROUPS,
        operators=operators,
        snapshots=(source, *snapshots),
    )
    write_savepoint(store, manifest)


def of_session(settings: dict[str, str], directory: str = "") -> type[SnapshotSource]:
    """The class as a session registers it."""
    return type("_OfSession", (SnapshotSource,), {"settings": settings, "directory": directory})


def rows_read(kind: type[SnapshotSource], **options: str) -> list[dict[str, object]]:
    """All rows, each step in what could be another process."""
    made = cloudpickle.loads(cloudpickle.dumps(kind))(options)
    source = cloudpickle.loads(cloudpickle.dumps(made))
    schema = source.schema()
    assert isinstance(schema, StructType)
    reader = cloudpickle.loads(cloudpickle.dumps(source.reader(schema)))
    partitions = cloudpickle.loads(cloudpickle.dumps(reader.partitions()))
    batches = [batch for each in partitions for batch in reader.read(each)]
    wanted = to_arrow_schema(schema, timezone="UTC")
    assert all(batch.schema.equals(wanted) for batch in batches), "otherwise Spark refuses it"
    return [row for batch in batches for row in batch.to_pylist()]


def test_it_is_read_by_processes_that_share_nothing_with_the_driver(tmp_path: Path) -> None:
    make_savepoint(open_store(str(tmp_path / "sp")))

    found = rows_read(of_session({}, str(tmp_path)), path="sp", operator="top")

    assert [(row["key"], row["value"]) for row in found] == [
        ({"app": "a"}, {"max(x)": 1.5}),
        ({"app": "b"}, {"max(x)": 1.5}),
    ]


def test_a_name_will_do_where_only_one_operator_has_it(tmp_path: Path) -> None:
    make_savepoint(open_store(str(tmp_path)))

    by_name = rows_read(SnapshotSource, path=str(tmp_path), operator="max(x) by app")

    assert by_name == rows_read(SnapshotSource, path=str(tmp_path), operator="top")


def test_timers_do_not_stand_in_the_way_of_the_only_state(tmp_path: Path) -> None:
    make_savepoint(open_store(str(tmp_path)), "$event_timers", "$processing_timers")

    found = rows_read(SnapshotSource, path=str(tmp_path), operator="top")

    assert found == rows_read(
        SnapshotSource, path=str(tmp_path), operator="top", state="aggregates"
    )


def test_the_table_of_what_there_is_names_sources_too(tmp_path: Path) -> None:
    make_savepoint(open_store(str(tmp_path)))
    source = SnapshotSource({"path": str(tmp_path)})

    reader = source.reader(StructType())
    found = list(reader.read(reader.partitions()[0] if reader.partitions() else None))

    assert [(row[0], row[3], row[4], row[6]) for row in found] == [
        ("read", None, "items", 1),
        ("top", "aggregates", "columns", 2),
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "needs a path"),
        ({"state": "aggregates"}, "nobody says whose"),
        ({"operator": "top", "state": "sums"}, "has no state 'sums': .* one of: aggregates"),
        ({"operator": "read"}, "has 0 states: it keeps none"),
        ({"operator": "bottom"}, r"no operator 'bottom' in the savepoint of job 'views': .*top \("),
        ({"checkpoint": "newest"}, "option checkpoint is a whole number"),
    ],
)
def test_options_that_lead_nowhere_are_told_with_those_that_do(tmp_path, options, told):
    make_savepoint(open_store(str(tmp_path)))
    path = {} if told == "needs a path" else {"path": str(tmp_path)}

    with pytest.raises(BuildError, match=told):
        SnapshotSource({**path, **options}).schema()


def test_a_damaged_file_is_noticed_where_it_is_read(tmp_path: Path) -> None:
    make_savepoint(open_store(str(tmp_path)))
    file = tmp_path / "state/1"
    file.write_bytes(file.read_bytes()[:-9])

    with pytest.raises(SnapshotDamaged, match="state/1"):
        rows_read(SnapshotSource, path=str(tmp_path), operator="top")


def test_what_belongs_to_no_key_group_has_none() -> None:
    table = AggregateTable(SCHEMA, ["app"], CALLS, GROUPS)
    table.update(pa.record_batch({"app": ["a"], "x": [1.5]}, schema=SCHEMA))
    frozen = table.freeze()
    shape = Shape(frozen.snapshot_schema)

    assert shape.show(frozen.rows(), None).column("key_group").to_pylist() == [None]
    assert from_arrow_schema(shape.shown)["key_group"].nullable


@pytest.mark.s3
def test_a_snapshot_on_s3_is_read_with_what_the_session_said_of_it(s3_bucket, s3_settings) -> None:
    address = f"s3a://{s3_bucket}/savepoint"
    make_savepoint(open_store(address, s3_settings))

    by_session = rows_read(of_session(dict(s3_settings)), path=address, operator="top")
    by_options = rows_read(SnapshotSource, path=address, operator="top", **s3_settings)

    assert len(by_session) == 2
    assert by_options == by_session
