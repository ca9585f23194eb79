"""Which states of a snapshot a plan cannot go on with, as the driver tells before the start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.graph.logical import (
    Aggregate,
    DropDuplicates,
    Enrich,
    Join,
    JoinSide,
    Node,
    Read,
    SessionWindow,
    Window,
    Write,
)
from stillframe.graph.plan import Plan, build_plan
from stillframe.ids import OperatorUid
from stillframe.protocol.manifests import Manifest, OperatorSnapshot
from stillframe.runtime.state_files import described_file
from stillframe.runtime.unfit_states import unfit_states
from stillframe.runtime.windowing import empty_windows, output_schema
from stillframe.state.aggregates import AggregateTable
from stillframe.state.duplicates import SeenKeys
from stillframe.state.joins import JoinRows
from stillframe.state.snapshots import write_keyed_snapshot
from stillframe.storage.store import Store, open_store
from stillframe.testing.sources import ScriptedSource

SCHEMA = pa.schema([("key", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
COUNT = AggregateCall("count", None, "count", pa.int64())
SUM = AggregateCall("sum", "n", "sum", pa.int64())
WINDOWS = {
    "none": None,
    "side by side": Window("at", 10, 10),
    "sliding": Window("at", 10, 5),
    "sessions": SessionWindow("at", 10),
}


class Empty:
    """A state as it would be written, without rows."""

    def __init__(self, schema: pa.Schema) -> None:
        self.snapshot_schema = schema

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        yield 0, pa.RecordBatch.from_pylist([], schema=self.snapshot_schema)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def aggregate(window: str, keys=("key",), calls=(COUNT,)) -> Aggregate:
    return Aggregate(keys, calls, WINDOWS[window], emits_closed=window != "none")


def plan_of(made: Aggregate) -> Plan:
    read = Node(Read(ScriptedSource(SCHEMA, ((),))), SCHEMA)
    if made.window is None:
        named = [SCHEMA.field(key) for key in made.keys]
        schema = pa.schema([*named, *((call.name, call.type) for call in made.calls)])
    else:
        schema = output_schema(SCHEMA, made)
    counted = Node(made, schema, (read,), given_uid="count")
    return build_plan("views", [Node(Write(DiscardSink()), schema, (counted,))], 1)


def snapshot_of(store: Store, made: Aggregate) -> Manifest:
    if made.window is None:
        kept = AggregateTable(SCHEMA, made.keys, made.calls, 128).snapshot_schema
    else:
        kept = empty_windows(SCHEMA, made, 128).snapshot_schema
    written = write_keyed_snapshot(store, "shared/1/count-0-aggregates-1.arrow", Empty(kept))
    state = described_file("aggregates", written)
    snapshot = OperatorSnapshot(OperatorUid("count"), 0, keyed=(state,))
    return Manifest("views", 1, 1, 0, "checkpoint", 0, 0, 128, (), (snapshot,))


@pytest.mark.parametrize("window", WINDOWS)
def test_an_aggregate_that_has_not_changed_fits_and_no_file_is_read(store, tmp_path, window):
    made = aggregate(window)
    manifest = snapshot_of(store, made)
    for file in manifest.files():
        store.delete(file.path)

    assert unfit_states(plan_of(made), manifest, store) == []


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("changed", [{"calls": (COUNT, SUM)}, {"keys": ("n",)}], ids=str)
def test_one_that_has_changed_is_told_with_both_schemas(store, window, changed):
    manifest = snapshot_of(store, aggregate(window))

    [mismatch] = unfit_states(plan_of(aggregate(window, **changed)), manifest, store)

    assert mismatch.operator == "count"
    assert mismatch.what.startswith("operator count: the state of operator 'count' has the columns")
    assert mismatch.remedy == "group and aggregate as before, or give the operator another uid"


SECOND = pa.schema([pa.field(f"{field.name}_2", field.type) for field in SCHEMA])
JOINED = pa.schema([*SCHEMA, *SECOND])


def remedies(
    store: Store, operator: DropDuplicates | Enrich | Join, kept: dict[str, pa.Schema]
) -> list[str]:
    """What to do about each state that does not fit, of a snapshot that has these."""
    reads = [
        Node(Read(ScriptedSource(schema, ((),))), schema, given_uid=uid)
        for uid, schema in (("first", SCHEMA), ("second", SECOND))
    ]
    has_one = isinstance(operator, DropDuplicates)
    schema, inputs = (SCHEMA, reads[:1]) if has_one else (JOINED, reads)
    node = Node(operator, schema, tuple(inputs), given_uid="it")
    plan = build_plan("views", [Node(Write(DiscardSink()), schema, (node,))], 1)
    written = {
        name: write_keyed_snapshot(store, f"shared/1/it-0-{name}-1.arrow", Empty(each))
        for name, each in kept.items()
    }
    states = tuple(described_file(name, file) for name, file in written.items())
    snapshot = OperatorSnapshot(OperatorUid("it"), 0, keyed=states)
    manifest = Manifest("views", 1, 1, 0, "checkpoint", 0, 0, 128, (), (snapshot,))
    return [mismatch.remedy for mismatch in unfit_states(plan, manifest, store)]


def with_numbers_as_keys(schema: pa.Schema) -> pa.Schema:
    return schema.set(0, pa.field(schema.names[0], pa.list_(pa.int64())))


def test_the_sides_of_a_join_are_compared_each_by_itself(store):
    join = Join("inner", JoinSide(("key",), "at"), JoinSide(("key_2",), "at_2"), 0, 10)
    left = JoinRows(SCHEMA, ("key",), "at", 128).snapshot_schema
    right = JoinRows(SECOND, ("key_2",), "at_2", 128).snapshot_schema

    assert remedies(store.below("same"), join, {"left": left, "right": right}) == []
    changed = {"left": left, "right": with_numbers_as_keys(right)}
    assert remedies(store.below("changed"), join, changed) == [
        "join as before, or give the operator another uid"
    ]


def test_keys_that_were_seen_are_compared_with_those_that_are_looked_for(store):
    drop = DropDuplicates(("key",))
    same = SeenKeys(SCHEMA, ("key",), 128).freeze().snapshot_schema
    more = SeenKeys(SCHEMA, ("key", "n"), 128).freeze().snapshot_schema

    assert remedies(store.below("same"), drop, {"seen": same}) == []
    assert remedies(store.below("more"), drop, {"seen": more}) == [
        "deduplicate as before, or give the operator another uid"
    ]


def test_rows_to_look_up_are_compared_with_what_the_second_stream_has(store):
    enrich = Enrich("inner", ("key",), ("key_2",), None)

    assert remedies(store.below("same"), enrich, {"newest": SECOND}) == []
    assert remedies(store.below("changed"), enrich, {"newest": with_numbers_as_keys(SECOND)}) == [
        "look up as before, or give the operator another uid"
    ]


def test_a_file_that_cannot_be_read_is_left_to_who_restores_it(store):
    manifest = snapshot_of(store, aggregate("none"))
    for file in manifest.files():
        store.delete(file.path)

    assert unfit_states(plan_of(aggregate("none", calls=(SUM,))), manifest, store) == []


def test_an_operator_that_is_new_has_nothing_to_fit(store):
    nothing = Manifest("views", 1, 1, 0, "checkpoint", 0, 0, 128, (), ())

    assert unfit_states(plan_of(aggregate("none")), nothing, store) == []
