"""Which record takes which channel."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.graph.logical import Aggregate
from stillframe.graph.plan import Broadcast, Edge, Forward, HashBy, Rebalance
from stillframe.key_groups import hash_columns, key_group_range, key_groups_of
from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.elements import Barrier, EndOfRecords
from stillframe.runtime.frames import HEADER, Decoder, Encoder, FrameType
from stillframe.runtime.outputs import EdgeOutput
from stillframe.state.partials import PartialAggregates, is_partial

SCHEMA = pa.schema([("app", pa.string()), ("id", pa.int64())])


def output(partitioning, targets):
    channels = [LocalChannel(1 << 20) for _ in range(targets)]
    edge = Edge(0, "in>out", 0, 1, partitioning, SCHEMA, 1, targets, 0)
    return EdgeOutput(edge, 0, channels, 128), channels


def records(count):
    return pa.record_batch(
        [[f"app-{i % 40}" for i in range(count)], list(range(count))], schema=SCHEMA
    )


def received(channels):
    return [[] if c.is_empty() else c.take()["id"].to_pylist() for c in channels]


def test_whole_batches_go_to_the_subtasks_in_turn():
    edge, channels = output(Rebalance(), 3)
    for _ in range(4):
        edge.send(records(5))

    assert [sum(1 for _ in iter_batches(channel)) for channel in channels] == [2, 1, 1]


def iter_batches(channel):
    while not channel.is_empty():
        yield channel.take()


@pytest.mark.parametrize("targets", [2, 3, 7])
def test_a_record_goes_to_the_subtask_that_owns_its_key_group(targets):
    edge, channels = output(HashBy(("app",)), targets)
    batch = records(1000)
    edge.send(batch)

    groups = key_groups_of(hash_columns([batch["app"]]), 128)
    ids = received(channels)
    assert Counter(i for part in ids for i in part) == Counter(range(1000))
    for subtask, part in enumerate(ids):
        owned = key_group_range(subtask, targets, 128)
        assert np.isin(groups[part], list(owned)).all()
        assert part == sorted(part), "the order within a channel is kept"


def test_every_subtask_gets_all_of_a_broadcast():
    edge, channels = output(Broadcast(), 3)
    edge.send(records(5))

    assert received(channels) == [list(range(5))] * 3


def test_what_is_forwarded_goes_to_the_subtask_of_the_same_number(new_wire):
    edge = Edge(0, "in>out", 0, 1, Forward(), SCHEMA, 4, 4, 0)
    channel = new_wire()
    forward = EdgeOutput(edge, 2, [channel], 128)
    forward.send(records(5))
    forward.send(records(3))

    assert [*forward.overtake(Barrier(1, 0, 0))] == [(2, [records(5), records(3)])]
    assert channel.leave() == [Barrier(1, 0, 0), [*range(5)], [*range(3)]]


def test_what_a_barrier_overtakes_is_told_by_receiver(new_wire):
    wires = [new_wire() for _ in range(3)]
    edge = Edge(0, "in>out", 0, 1, Rebalance(), SCHEMA, 1, 3, 0)
    spread = EdgeOutput(edge, 0, wires, 128)
    for count in (1, 2, 3, 4):
        spread.send(records(count))
    spread.broadcast(Barrier(1, 0, 200))
    wires[1].leave()

    assert spread.holds(1)
    assert [*spread.hasten(1)] == [(0, [records(1), records(4)]), (1, []), (2, [records(3)])]


def test_with_one_subtask_every_record_goes_to_it_as_it_is():
    edge, [channel] = output(HashBy(("app",)), 1)
    batch = records(10)
    edge.send(batch)

    assert channel.take() is batch


def test_a_subtask_without_records_gets_no_empty_batch():
    edge, channels = output(HashBy(("app",)), 50)
    edge.send(records(1))

    assert sum(not channel.is_empty() for channel in channels) == 1


def test_one_full_channel_is_enough_to_have_no_room():
    edge, channels = output(Rebalance(), 2)
    channels[1].send(records(100_000))

    assert not edge.has_room()


def test_a_marker_goes_to_every_subtask():
    edge, channels = output(HashBy(("app",)), 3)
    edge.broadcast(EndOfRecords())

    assert [channel.take() for channel in channels] == [EndOfRecords()] * 3


def combined_output(schema, key, targets):
    """As `output`, of an edge to an aggregate that counts by this key."""
    calls = (AggregateCall("count", None, "count", pa.int64()),)
    channels = [LocalChannel(1 << 20) for _ in range(targets)]
    aggregate = Aggregate((key,), calls)
    edge = Edge(0, "in>out", 0, 1, HashBy((key,)), schema, 1, targets, 0, combines=aggregate)
    combiner = PartialAggregates(schema, (key,), calls)
    return EdgeOutput(edge, 0, channels, 128, combiner), channels


@pytest.mark.parametrize("targets", [1, 3])
def test_what_a_batch_adds_to_a_key_goes_to_the_subtask_that_owns_its_key_group(targets):
    edge, channels = combined_output(SCHEMA, "app", targets)
    edge.send(records(4_000))

    rows = []
    for subtask, channel in enumerate(channels):
        sent = channel.take()
        assert is_partial(sent)
        groups = key_groups_of(hash_columns([sent["app"]]), 128)
        assert np.isin(groups, list(key_group_range(subtask, targets, 128))).all()
        rows += zip(sent["app"].to_pylist(), sent["count"].to_pylist(), strict=True)
    assert sorted(rows) == sorted((f"app-{i}", 100) for i in range(40))


def test_an_aggregate_may_have_the_name_of_its_key():
    schema = pa.schema([("count", pa.int64())])
    edge, channels = combined_output(schema, "count", 2)
    edge.send(pa.record_batch([pa.array(list(range(10)) * 400)], schema=schema))

    assert sum(channel.take().num_rows for channel in channels) == 10


def test_partial_aggregates_are_known_as_such_in_another_slot():
    edge, channels = combined_output(SCHEMA, "app", 1)
    edge.send(records(4_000))
    sent = channels[0].take()

    [frame] = Encoder(1).encode(sent)
    payload = b"".join(bytes(part) for part in frame.parts)[HEADER.size :]
    received = Decoder().decode(FrameType.BATCH, pa.py_buffer(payload))

    assert is_partial(received)
    assert received.equals(sent)


def test_batches_without_a_value_fill_a_channel_too():
    channel = LocalChannel(10_000)
    empty = records(5).select([])
    sent = 0
    while channel.has_room():
        channel.send(empty)
        sent += 1

    assert 1 < sent < 100
    channel.take()
    assert channel.has_room()
