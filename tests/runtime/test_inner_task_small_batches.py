"""A subtask that takes small batches together, stepped by hand: only what belongs together."""

import pyarrow as pa

from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.connecting import TwoInputOperator
from stillframe.runtime.inputs import ChannelPlace

SCHEMA = pa.schema([("id", pa.int64())])


def batch(*ids):
    return pa.record_batch([list(ids)], schema=SCHEMA)


def test_small_batches_that_wait_go_through_the_chain_as_one(new_inner):
    inner = new_inner(together_rows_max=100)
    inner.inputs[0].send(batch(1))
    inner.inputs[0].send(batch(2, 3))
    inner.inputs[1].send(batch(10))
    inner.run()

    assert inner.sent() == [[1, 2, 3, 10]]
    assert inner.subtask.counters.records_in == 4


def test_no_more_rows_or_bytes_are_taken_together_than_one_step_should_take(new_inner):
    inner = new_inner(together_rows_max=3)
    for first in (1, 3, 5):
        inner.inputs[0].send(batch(first, first + 1))
    inner.inputs[1].send(batch(7, 8, 9, 10))
    inner.run()
    assert sorted(inner.sent()) == [[1, 2], [3, 4], [5, 6], [7, 8, 9, 10]]

    inner = new_inner(together_rows_max=1_000_000)
    for _ in range(3):
        inner.inputs[0].send(batch(*range(20_000)))  # 160 kB each
    inner.run()
    assert [len(sent) for sent in inner.sent()] == [20_000] * 3


def test_nothing_is_taken_from_behind_a_barrier_with_what_is_before_it(new_inner):
    inner = new_inner(together_rows_max=100)
    early, late = inner.inputs
    early.send(batch(1))
    early.send(inner.barrier(1))
    early.send(batch(100))
    late.send(batch(2))
    late.send(batch(3))
    inner.run()
    late.send(batch(4))
    inner.run()
    assert inner.summing.got == [1, 2, 3, 4], "what follows the barrier waits"

    late.send(inner.barrier(1))
    late.send(batch(200))
    inner.run()

    assert inner.written(1) == (10, {})
    assert inner.sent() == [[1, 2, 3], [4], inner.barrier(1), [100, 200]]


def test_what_is_taken_together_is_recorded_by_the_channel_that_it_came_on(new_inner):
    inner = new_inner([LocalChannel(1 << 20) for _ in range(3)], together_rows_max=100)
    first, second, third = inner.inputs
    first.send(inner.barrier(1, 0))
    inner.run()
    first.send(batch(1))
    second.send(batch(20))
    second.send(batch(21))
    third.send(batch(30))
    inner.run()
    second.send(inner.barrier(1, 0))
    third.send(inner.barrier(1, 0))
    inner.run()

    assert inner.written(1) == (0, {("in", 1): [20, 21], ("in", 2): [30]})
    assert inner.sent() == [inner.barrier(1, 0), [1, 20, 21, 30]]


def test_records_and_partial_aggregates_are_not_taken_together(new_inner):
    inner = new_inner(together_rows_max=100)
    inner.inputs[0].send(batch(1))
    inner.inputs[0].send(batch(2).replace_schema_metadata({"kind": "partial"}))
    inner.inputs[0].send(batch(3).replace_schema_metadata({"kind": "partial"}))
    inner.run()

    assert inner.sent() == [[1], [2, 3]]


def test_the_two_inputs_of_a_function_are_not_taken_together(new_inner):
    class Apart(TwoInputOperator):
        def __init__(self):
            self.first, self.second = [], []

        def process(self, batch):
            self.first.append(batch["id"].to_pylist())
            return ()

        def process_second(self, batch):
            self.second.append(batch["id"].to_pylist())
            return ()

        def snapshot(self, checkpoint_id, savepoint=None):
            raise AssertionError("no checkpoint is taken here")

        described = snapshot

    apart = Apart()
    places = [ChannelPlace(("left", 0), 0), ChannelPlace(("right", 0), 1)]
    inner = new_inner(places=places, head=apart, together_rows_max=100)
    for channel, first in zip(inner.inputs, (1, 10), strict=True):
        channel.send(batch(first))
        channel.send(batch(first + 1))
    inner.run()

    assert (apart.first, apart.second) == ([[1, 2]], [[10, 11]])
