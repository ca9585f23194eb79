"""Which record takes which channel."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from stillframe.graph.plan import Edge, HashBy, Rebalance
from stillframe.key_groups import hash_columns, key_group_range, key_groups_of
from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.elements import EndOfRecords
from stillframe.runtime.outputs import EdgeOutput

SCHEMA = pa.schema([("app", pa.string()), ("id", pa.int64())])


def output(partitioning, targets):
    channels = [LocalChannel(1 << 20) for _ in range(targets)]
    edge = Edge(0, 0, 1, partitioning, SCHEMA, 1, targets, 0)
    return EdgeOutput(edge, channels, 128), channels


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
