"""Records under way, restored with another number of subtasks than there were."""

from collections import Counter

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.plan_descriptions import describe_edges, describe_operators
from stillframe.errors import SnapshotDamaged
from stillframe.graph.logical import Aggregate, Connect, MapInArrow, Node, Read, Write
from stillframe.graph.plan import Broadcast, Forward, HashBy, Rebalance, build_plan
from stillframe.key_groups import hash_columns, key_group_range, key_groups_of
from stillframe.protocol.manifests import ChannelState, FileHandle, Manifest
from stillframe.protocol.restore import starting_channels
from stillframe.runtime.restoring import restored_batches
from stillframe.runtime.task import described_channels
from stillframe.state.channel_log import Overtaken, write_channel_log
from stillframe.state.partials import PartialAggregates, is_partial
from stillframe.storage.inline import InlineStore
from stillframe.storage.local import LocalStore

SCHEMA = pa.schema([("app", pa.string()), ("id", pa.int64())])
COUNT = AggregateCall("count", None, "count", pa.int64())
COUNTS = pa.schema([("app", pa.string()), ("count", pa.int64())])


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def batch(*ids):
    return pa.record_batch([[f"app-{i % 40}" for i in ids], list(ids)], schema=SCHEMA)


def read(uid, parallelism):
    return Node(Read(ClickSource(records=1)), SCHEMA, (), uid, parallelism)


def job(kind, sources, targets):
    """A plan with an edge of this kind from `sources` subtasks to `targets`; it is the last."""
    source = read("a", sources)
    if kind == "hash":
        node = Node(Aggregate(("app",), (COUNT,)), COUNTS, (source,), "b", targets)
    elif kind == "broadcast":
        first = read("first", targets)
        node = Node(Connect(object, "f", None), SCHEMA, (first, source), "b", targets)
    else:
        node = Node(MapInArrow(iter, "m"), SCHEMA, (source,), "b", targets)
    plan = build_plan("views", [Node(Write(DiscardSink()), node.schema, (node,), "w")], 1)
    return plan, plan.edges[-1]


def manifest_of(store, plan, edge, channels):
    """A checkpoint with these batches under way, by (source, target, whether it is input)."""
    states = []
    for (source, target, is_input), batches in channels.items():
        under_way = Overtaken(edge.name, source, target, is_input, batches)
        log = write_channel_log(store, f"log-{source}-{target}-{is_input}", [under_way])
        file = FileHandle(log.path, log.length_bytes, log.crc32)
        states += [
            ChannelState(
                edge.name,
                source,
                target,
                "input" if is_input else "output",
                file,
                run.offset_bytes,
                run.length_bytes,
                run.rows,
            )
            for run in log.runs
        ]
    return Manifest(
        job="views",
        attempt=1,
        checkpoint_id=6,
        epoch=5,
        kind="checkpoint",
        triggered_at_ms=0,
        completed_at_ms=0,
        max_parallelism=128,
        operators=describe_operators(plan),
        snapshots=(),
        channels=tuple(states),
    )


def restored(store, plan, edge, manifest):
    """For each subtask, what it gets, by the sender in whose channel it stands."""
    starting = starting_channels(describe_edges(plan), manifest)
    return [
        restored_batches(store, plan, edge, target, starting)
        for target in range(edge.target_parallelism)
    ]


def ids_of(by_source):
    return [i for batches in by_source.values() for each in batches for i in each["id"].to_pylist()]


def owner_of(app, parallelism):
    [group] = key_groups_of(hash_columns([pa.array([app])]), 128)
    return next(s for s in range(parallelism) if group in key_group_range(s, parallelism, 128))


@pytest.mark.parametrize("now", [1, 2, 3, 5])
def test_a_hashed_record_goes_to_the_subtask_that_owns_its_key_now_and_to_no_other(store, now):
    plan, edge = job("hash", 2, 3)
    assert edge.partitioning == HashBy(("app",))
    rows = [batch(i) for i in range(60)]
    channels = {}
    for i, row in enumerate(rows):
        place = (i % 2, owner_of(row["app"][0].as_py(), 3), True)
        channels.setdefault(place, []).append(row)
    manifest = manifest_of(store, plan, edge, channels)

    plan, edge = job("hash", 2, now)
    got = restored(store, plan, edge, manifest)

    assert Counter(i for part in got for i in ids_of(part)) == Counter(range(60))
    for subtask, part in enumerate(got):
        assert all(owner_of(f"app-{i % 40}", now) == subtask for i in ids_of(part))


@pytest.mark.parametrize("now", [1, 3])
def test_partial_aggregates_go_by_their_keys_too(store, now):
    combined = PartialAggregates(SCHEMA, ("app",), (COUNT,)).combine(batch(*range(4_000)))
    assert is_partial(combined)
    plan, edge = job("hash", 2, 2)
    channels = {(0, 0, True): [combined.slice(0, 17)], (0, 1, False): [combined.slice(17)]}
    manifest = manifest_of(store, plan, edge, channels)

    plan, edge = job("hash", 2, now)
    got = restored(store, plan, edge, manifest)

    parts = [each for part in got for batches in part.values() for each in batches]
    assert all(map(is_partial, parts))
    assert sorted(app for each in parts for app in each["app"].to_pylist()) == sorted(
        combined["app"].to_pylist()
    )


def test_records_on_their_way_to_an_aggregate_over_everything_have_no_key_to_go_by(store):
    node = Node(Aggregate((), (COUNT,)), COUNTS, (read("a", 2),), "b")
    plan = build_plan("views", [Node(Write(DiscardSink()), COUNTS, (node,), "w")], 2)
    [edge] = plan.edges
    manifest = manifest_of(store, plan, edge, {(0, 0, True): [batch(1)], (1, 0, True): [batch(2)]})

    [got] = restored(store, plan, edge, manifest)
    assert sorted(ids_of(got)) == [1, 2]


@pytest.mark.parametrize(("sources", "targets"), [(1, 1), (2, 1), (3, 5), (3, 2), (2, 3)])
def test_a_record_that_anyone_may_get_goes_to_exactly_one(store, sources, targets):
    """From 2 to 3 it was in turn; now it may be from each to its namesake, or the other way."""
    for former_sources, former_targets in ((2, 3), (3, 3)):
        plan, edge = job("any", former_sources, former_targets)
        same = former_sources == former_targets
        assert edge.partitioning == (Forward() if same else Rebalance())
        channels = {
            (s, t, True): [batch(s * 10 + t)]
            for s in range(former_sources)
            for t in edge.targets_of(s)
        }
        manifest = manifest_of(store.below(f"{former_sources}"), plan, edge, channels)

        plan, edge = job("any", sources, targets)
        got = restored(store.below(f"{former_sources}"), plan, edge, manifest)

        sent = [
            i for batches in channels.values() for each in batches for i in each["id"].to_pylist()
        ]
        assert Counter(i for part in got for i in ids_of(part)) == Counter(sent)
        for target, part in enumerate(got):
            assert set(part) <= set(edge.sources_of(target)), "each in a channel that there is"


@pytest.mark.parametrize("now", [1, 2, 3, 7])
def test_of_a_broadcast_every_subtask_gets_each_record_its_copy_has_not_seen_once(store, now):
    plan, edge = job("broadcast", 1, 3)
    assert edge.partitioning == Broadcast()
    # The first copy has seen all but 9, the second all, the third none but 7.
    channels = {(0, 0, True): [batch(9)], (0, 2, True): [batch(8)], (0, 2, False): [batch(9)]}
    manifest = manifest_of(store, plan, edge, channels)

    plan, edge = job("broadcast", 1, now)
    got = [ids_of(part) for part in restored(store, plan, edge, manifest)]

    assert got == [[[9], [], [8, 9]][subtask % 3] for subtask in range(now)]


def test_what_had_reached_the_receiver_is_processed_before_what_had_not(store):
    plan, edge = job("any", 2, 1)
    channels = {
        (0, 0, False): [batch(3), batch(4)],
        (0, 0, True): [batch(1), batch(2)],
        (1, 0, True): [batch(10)],
    }
    manifest = manifest_of(store, plan, edge, channels)

    [got] = restored(store, plan, edge, manifest)
    assert {source: ids_of({source: part}) for source, part in got.items()} == {
        0: [1, 2, 3, 4],
        1: [10],
    }

    plan, edge = job("any", 1, 1)
    [got] = restored(store, plan, edge, manifest)
    assert ids_of(got) == [1, 2, 3, 4, 10], "each former sender's stay together"


def test_a_damaged_file_is_told(store, tmp_path):
    plan, edge = job("any", 1, 2)
    manifest = manifest_of(store, plan, edge, {(0, 0, True): [batch(1)]})
    (tmp_path / "log-0-0-True").write_bytes(b"nothing of the kind")

    with pytest.raises(SnapshotDamaged):
        restored(store, plan, edge, manifest)


def test_records_under_way_that_are_kept_in_the_metadata_are_a_file_for_each_channel(store):
    plan, edge = job("hash", 2, 2)
    overtaken = [
        Overtaken(edge.name, 0, 0, True, [batch(1, 2), batch(3)]),
        Overtaken(edge.name, 1, 0, True, [batch(4)]),
    ]
    inline = InlineStore(store, 1 << 20)

    first, second = described_channels(write_channel_log(inline, "a-0", overtaken))

    assert [len(each.file.data) for each in (first, second)] == [
        first.file.length_bytes,
        second.file.length_bytes,
    ]
    assert (first.offset_bytes, second.offset_bytes) == (0, 0)
    assert first.file != second.file
    channels = {(edge.name, 0): (first, second)}
    assert sorted(ids_of(restored_batches(None, plan, edge, 0, channels))) == [
        i for i in (1, 2, 3, 4) if owner_of(f"app-{i}", 2) == 0
    ]
