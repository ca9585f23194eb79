"""Operators that hand batches to each other by a plain call."""

import pyarrow as pa
import pytest

from stillframe.graph.plan import Edge, PlannedOperator, Rebalance
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.elements import EndOfRecords, LatencyMarker
from stillframe.runtime.operators import RunningOperator
from stillframe.runtime.outputs import EdgeOutput

SCHEMA = pa.schema([("id", pa.int64())])


class Noting(RunningOperator):
    """Notes what it gets, then answers what its function makes of it."""

    def __init__(self, makes=lambda batch: [batch]):
        self.got = []
        self.makes = makes
        self.is_closed = False
        self.last_words = ()
        self.had_before_finish = None

    def finish(self):
        self.had_before_finish = len(self.got)
        return self.last_words

    def process(self, batch):
        self.got.append(batch["id"].to_pylist())
        return self.makes(batch)

    def close(self):
        self.is_closed = True


def chain(operators, chained, edges=None, channels=()):
    planned = [
        PlannedOperator("uid", None, SCHEMA, SCHEMA, follows, (edges or {}).get(place, ()))
        for place, follows in enumerate(chained)
    ]
    outputs = {
        index: EdgeOutput(
            Edge(index, f"edge-{index}", 0, 1, Rebalance(), SCHEMA, 1, 1, index), 0, [channel], 128
        )
        for index, channel in enumerate(channels)
    }
    return Chain(planned, operators, outputs)


def batch(*ids):
    return pa.record_batch([list(ids)], schema=SCHEMA)


def test_a_batch_goes_down_every_branch_of_the_tree():
    head, left, right, leaf = (Noting() for _ in range(4))

    chain([head, left, right, leaf], [(1, 2), (3,), (), ()]).process(batch(1, 2))

    assert [each.got for each in (head, left, right, leaf)] == [[[1, 2]]] * 4


def test_every_batch_an_operator_makes_goes_on():
    head, leaf = Noting(lambda records: [records.slice(0, 1), records.slice(1)]), Noting()

    chain([head, leaf], [(1,), ()]).process(batch(1, 2, 3))

    assert leaf.got == [[1], [2, 3]]


def test_an_empty_batch_goes_nowhere():
    channel = LocalChannel(1 << 20)
    head, leaf = Noting(lambda records: [records.slice(0, 0)]), Noting()

    chain([head, leaf], [(1,), ()], {0: (0,)}, [channel]).process(batch(1))

    assert leaf.got == []
    assert channel.is_empty()


def test_a_chain_has_room_only_if_all_its_edges_have():
    wide, narrow = LocalChannel(1 << 20), LocalChannel(1)
    tree = chain([Noting()], [()], {0: (0, 1)}, [wide, narrow])

    assert tree.has_room()
    tree.process(batch(1))
    assert not tree.has_room()
    narrow.take()
    assert tree.has_room()


def test_a_marker_goes_out_on_every_edge_of_every_operator():
    channels = [LocalChannel(1), LocalChannel(1)]
    tree = chain([Noting(), Noting()], [(1,), ()], {0: (0,), 1: (1,)}, channels)

    tree.broadcast(EndOfRecords())

    assert [channel.take() for channel in channels] == [EndOfRecords()] * 2


def test_an_operators_last_words_reach_its_followers_before_they_finish():
    head, middle, leaf = Noting(), Noting(), Noting()
    head.last_words = [batch(1), batch(2)]
    middle.last_words = [batch(3)]
    channel = LocalChannel(1 << 20)
    tree = chain([head, middle, leaf], [(1,), (2,), ()], {2: (0,)}, [channel])

    tree.finish()

    assert (head.had_before_finish, middle.had_before_finish, leaf.had_before_finish) == (0, 2, 3)
    assert leaf.got == [[1], [2], [3]]
    sent = []
    while not channel.is_empty():
        sent.append(channel.take()["id"].to_pylist())
    assert sent == [[1], [2], [3]]


def test_every_operator_is_closed_even_if_one_cannot():
    class Stubborn(Noting):
        def close(self):
            raise OSError("it does not close")

    last = Noting()
    tree = chain([Stubborn(), last], [(1,), ()])

    with pytest.raises(OSError, match="it does not close"):
        tree.close()
    assert last.is_closed


def taken_from(way):
    while not way.is_empty():
        yield way.take()


def test_a_marker_goes_one_way_at_every_fork_and_with_time_all_of_them():
    """Sent all ways at once, markers would double at every fork of a long job."""
    ways = [LocalChannel(1 << 20) for _ in range(2)]
    forked = chain([Noting()], [()], {0: (0, 1)}, ways)
    for number in range(40):
        forked.on_latency(LatencyMarker(3, number), 40)

    taken = [[each.sent_at_ms for each in taken_from(way)] for way in ways]
    assert sorted(taken[0] + taken[1]) == list(range(40))
    assert min(map(len, taken)) > 5


def test_no_marker_goes_round_a_cycle():
    back = LocalChannel(1 << 20)
    edge = Edge(0, "back", 0, 0, Rebalance(), SCHEMA, 1, 1, 0, is_feedback=True, loops=(0,))
    planned = [PlannedOperator("uid", None, SCHEMA, SCHEMA, (), (0,))]
    looping = Chain(planned, [Noting()], {0: EdgeOutput(edge, 0, [back], 128)})
    looping.on_latency(LatencyMarker(3, 0), 40)

    assert back.is_empty()
