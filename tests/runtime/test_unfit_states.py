"""Which states of a snapshot a plan cannot go on with, as the driver tells before the start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from stillframe import StreamFunction, SubtaskStates
from stillframe.api.aggregates import AggregateCall
from stillframe.api.functions import KeyedFunction
from stillframe.connectors.discard import DiscardSink
from stillframe.errors import StartRefused
from stillframe.graph.logical import (
    Aggregate,
    Connect,
    DropDuplicates,
    Enrich,
    Join,
    JoinSide,
    Node,
    Operator,
    Process,
    ProcessStream,
    Read,
    SessionWindow,
    Window,
    Write,
)
from stillframe.graph.plan import Plan, build_plan
from stillframe.ids import OperatorUid
from stillframe.protocol.fit import Evolves, Mismatch
from stillframe.protocol.manifests import Manifest, OperatorSnapshot
from stillframe.protocol.restore import SubtaskState
from stillframe.runtime.building import Site, Surroundings
from stillframe.runtime.state_files import described_file
from stillframe.runtime.unfit_states import unfit_states
from stillframe.runtime.windowing import empty_windows, output_schema
from stillframe.state.aggregates import AggregateTable
from stillframe.state.backends import Declared, Kind
from stillframe.state.duplicates import SeenKeys
from stillframe.state.joins import JoinRows
from stillframe.state.rows import RowType
from stillframe.state.snapshots import write_keyed_snapshot
from stillframe.state.timers import TimerTable
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

    assert unfit_states(plan_of(made), manifest, store, {}) == []


@pytest.mark.parametrize("window", WINDOWS)
def test_other_keys_are_told_with_both_schemas(store, window):
    manifest = snapshot_of(store, aggregate(window))

    [mismatch] = unfit_states(plan_of(aggregate(window, keys=("n",))), manifest, store, {})

    assert isinstance(mismatch, Mismatch)
    assert mismatch.operator == "count"
    assert mismatch.what.startswith("operator count: the state of operator 'count' has the columns")
    assert mismatch.remedy.startswith("group by the same keys in the same order")


@pytest.mark.parametrize("window", WINDOWS)
def test_an_aggregate_that_comes_or_goes_is_said_and_is_no_mismatch(store, window):
    both, one = aggregate(window, calls=(COUNT, SUM)), aggregate(window)

    grown = unfit_states(plan_of(both), snapshot_of(store, one), store, {"sum": 7})
    shrunk = unfit_states(
        plan_of(one), snapshot_of(store.below("two"), both), store.below("two"), {}
    )

    new = "sum is new and begins with 7 for what was kept before"
    assert grown == [Evolves(OperatorUid("count"), new)]
    gone = "sum is not kept any more and left behind"
    assert shrunk == [Evolves(OperatorUid("count"), gone)]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (Window("at", 10, 10), Window("at", 20, 20), "windows of 10 µs in the snapshot"),
        (Window("at", 10, 5), Window("at", 10, 10), "windows of 10 µs every 5 µs in the snapshot"),
        (
            Window("at", 10, 10),
            Window("at", 10, 10, 3),
            "windows of 10 µs moved by 3 µs",
        ),
        (Window("at", 60_000_000, 60_000_000), Window("at", 10, 10), "windows of 60 s in"),
    ],
    ids=str,
)
def test_a_window_of_another_length_is_told_though_its_columns_are_the_same(
    store, before, now, said
):
    manifest = snapshot_of(store, Aggregate(("key",), (COUNT,), before, emits_closed=True))
    changed = Aggregate(("key",), (COUNT,), now, emits_closed=True)

    [mismatch] = unfit_states(plan_of(changed), manifest, store, {})

    assert said in mismatch.what
    assert mismatch.remedy == "group and aggregate as before, or give the operator another uid"


def test_a_window_that_begins_a_whole_slide_later_is_the_same(store):
    manifest = snapshot_of(store, aggregate("side by side"))
    moved = Aggregate(("key",), (COUNT,), Window("at", 10, 10, 20), emits_closed=True)

    assert unfit_states(plan_of(moved), manifest, store, {}) == []


def test_sessions_know_when_they_end_so_their_gap_may_change(store):
    manifest = snapshot_of(store, aggregate("sessions"))
    longer = Aggregate(("key",), (COUNT,), SessionWindow("at", 99), emits_closed=True)

    assert unfit_states(plan_of(longer), manifest, store, {}) == []


SECOND = pa.schema([pa.field(f"{field.name}_2", field.type) for field in SCHEMA])
JOINED = pa.schema([*SCHEMA, *SECOND])


def remedies(
    store: Store, operator: Operator, kept: dict[str, pa.Schema], how: str | None = None
) -> list[str]:
    """What to do about each state that does not fit, of a snapshot that has these.

    `how`: they have no keys, and are given to subtasks in this way."""
    return [mismatch.remedy for mismatch in found(store, operator, kept, how)]


def found(
    store: Store, operator: Operator, kept: dict[str, pa.Schema], how: str | None = None
) -> list[Mismatch]:
    reads = [
        Node(Read(ScriptedSource(schema, ((),))), schema, given_uid=uid)
        for uid, schema in (("first", SCHEMA), ("second", SECOND))
    ]
    has_one = isinstance(operator, DropDuplicates | Process | ProcessStream)
    schema, inputs = (SCHEMA, reads[:1]) if has_one else (JOINED, reads)
    node = Node(operator, schema, tuple(inputs), given_uid="it")
    plan = build_plan("views", [Node(Write(DiscardSink()), schema, (node,))], 1)
    written = {
        name: write_keyed_snapshot(store, f"shared/1/it-0-{name}-1.arrow", Empty(each))
        for name, each in kept.items()
    }
    states = tuple(described_file(name, file) for name, file in written.items())
    snapshot = OperatorSnapshot(OperatorUid("it"), 0, keyed=states)
    if how is not None:
        dealt = tuple(replace(state, redistribution=how) for state in states)
        snapshot = OperatorSnapshot(OperatorUid("it"), 0, broadcast=dealt)
    manifest = Manifest("views", 1, 1, 0, "checkpoint", 0, 0, 128, (), (snapshot,))
    return unfit_states(plan, manifest, store, {})


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


AGAIN = "key by what it was, or give the operator another uid"
BY_KEY = pa.schema([("n", pa.int64()), ("key", pa.string())])


def of_no_use() -> KeyedFunction:
    raise AssertionError("what such a function keeps is not declared: nobody has to make it")


@pytest.mark.parametrize(
    "operator",
    [Process(of_no_use, "it", ("key",)), Connect(of_no_use, "it", ("key",))],
    ids=lambda operator: type(operator).__name__,
)
def test_rows_of_a_function_are_compared_by_their_keys_alone(store, operator):
    more = BY_KEY.append(pa.field("more", pa.float64()))
    as_numbers = BY_KEY.set(1, pa.field("key", pa.int64()))
    timers = TimerTable(pa.schema([("key", pa.int64())]), 1).snapshot_schema

    assert remedies(store.below("same"), operator, {"function": more}) == []
    assert remedies(store.below("types"), operator, {"function": as_numbers}) == [AGAIN]
    assert remedies(store.below("gone"), operator, {"function": BY_KEY.remove(1)}) == [AGAIN]
    both = {"function": as_numbers, "timers": timers}
    assert remedies(store.below("both"), operator, both) == [
        AGAIN,
        "key as before, or give the operator another uid",
    ]


def test_a_stream_connected_by_key_has_not_the_state_of_one_that_was_broadcast(store):
    by_key = Connect(of_no_use, "it", ("key",))
    broadcast = Connect(of_no_use, "it", None)

    assert remedies(store.below("1"), broadcast, {"function": SCHEMA}, "copied") == []
    for place, operator, how in (("2", by_key, "copied"), ("3", broadcast, None)):
        [mismatch] = found(store.below(place), operator, {"function": SCHEMA}, how)
        assert "state by key" in mismatch.what
        assert "broadcast state" in mismatch.what


class Remembers(StreamFunction):
    def open(self, states: SubtaskStates) -> None:
        states.list("rows", "n long")
        states.union_list("all", "n long")
        states.broadcast("rules", "id int", "text string")

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield batch


def rows_of(schema: pa.Schema, kind: Kind = Kind.LIST, key: pa.Schema | None = None) -> pa.Schema:
    declared = Declared("any", kind, RowType(schema), None if key is None else RowType(key))
    return declared.snapshot_schema(pa.schema([]))


LONG, TEXT = pa.schema([("n", pa.int64())]), pa.schema([("n", pa.string())])


def test_all_states_of_a_stream_function_that_do_not_fit_are_told_at_once(store):
    operator = ProcessStream(Remembers, "it")
    kept = {"rows": rows_of(TEXT), "all": rows_of(LONG), "rules": rows_of(LONG)}

    told = found(store, operator, kept, "dealt")

    assert [mismatch.what.split(",")[0] for mismatch in told] == [
        "operator it: state 'rows' has the schema struct<n: string> in the checkpoint",
        "operator it: state 'all' is a list in the checkpoint",
        "operator it: state 'rules' is a list in the checkpoint",
    ]


def test_a_stream_function_that_keeps_what_it_kept_fits(store):
    operator = ProcessStream(Remembers, "it")
    rules = rows_of(pa.schema([("text", pa.string())]), Kind.MAP, pa.schema([("id", pa.int32())]))

    assert found(store.below("1"), operator, {"rows": rows_of(LONG)}, "dealt") == []
    assert found(store.below("2"), operator, {"all": rows_of(LONG)}, "united") == []
    assert found(store.below("3"), operator, {"rules": rules}, "copied") == []


def test_a_function_that_cannot_be_opened_on_the_driver_is_left_to_the_slots(store):
    class NeedsAnExecutor(Remembers):
        def open(self, states: SubtaskStates) -> None:
            raise FileNotFoundError("only there")

    operator = ProcessStream(NeedsAnExecutor, "it")

    assert found(store, operator, {"rows": rows_of(TEXT)}, "dealt") == []


def test_what_the_driver_refuses_a_slot_refuses_too(store):
    before = Aggregate(("key",), (COUNT,), Window("at", 10, 10), emits_closed=True)
    after = Aggregate(("key",), (COUNT,), Window("at", 20, 20), emits_closed=True)
    [snapshot] = snapshot_of(store, before).snapshots
    starting = {(snapshot.uid, snapshot.subtask): SubtaskState(keyed=snapshot.keyed)}

    def rows_in_a_slot(made: Aggregate) -> int:
        plan = plan_of(made)
        [(task, planned)] = [each for each in plan.operators() if each[1].uid == "count"]
        around = Surroundings(
            plan, 0, 1, starting, store, None, 1, None, None, None, None, "aligned"
        )
        return sum(batch.num_rows for batch in Site(around, planned, task, 0).restored_rows())

    assert rows_in_a_slot(before) == 0
    with pytest.raises(StartRefused, match="windows of 10 µs in the snapshot"):
        rows_in_a_slot(after)


def test_a_file_that_cannot_be_read_is_left_to_who_restores_it(store):
    manifest = snapshot_of(store, aggregate("none"))
    for file in manifest.files():
        store.delete(file.path)

    assert unfit_states(plan_of(aggregate("none", calls=(SUM,))), manifest, store, {}) == []


def test_an_operator_that_is_new_has_nothing_to_fit(store):
    nothing = Manifest("views", 1, 1, 0, "checkpoint", 0, 0, 128, (), ())

    assert unfit_states(plan_of(aggregate("none")), nothing, store, {}) == []
