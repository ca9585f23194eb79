"""A subtask whose barriers overtake records, stepped by hand: what it writes down as under way."""

import pyarrow as pa
import pytest

from stillframe.runtime.channels import LocalChannel, ReplayingInput
from stillframe.runtime.elements import Barrier

SCHEMA = pa.schema([("id", pa.int64())])


def batch(*ids):
    return pa.record_batch([list(ids)], schema=SCHEMA)


def test_an_overtaking_barrier_is_acted_on_while_the_output_has_no_room(new_inner, new_wire):
    inner = new_inner(out=new_wire(buffer_bytes=1))
    for number in (1, 2, 3):
        inner.inputs[0].send(batch(number))
    inner.run()
    assert inner.summing.got == [1], "the output is full"

    inner.barriers(1, alignment_timeout_ms=0)

    assert inner.written(1) == (1, {("in", 0): [2, 3], ("out", 0): [1]})
    assert inner.out.leave() == [inner.barrier(1, 0), [1]]


def test_what_a_barrier_overtook_is_processed_later_exactly_once(new_inner):
    inner = new_inner()
    inner.inputs[0].send(batch(1))
    inner.inputs[0].send(batch(2))
    inner.inputs[0].send(inner.barrier(1, 0))
    inner.inputs[0].send(batch(3))
    inner.inputs[1].send(inner.barrier(1, 0))
    inner.run()

    assert inner.written(1) == (0, {("in", 0): [1, 2]})
    assert inner.summing.got == [1, 2, 3]
    assert inner.sent() == [inner.barrier(1, 0), [1], [2], [3]]


def test_what_comes_before_a_later_barrier_is_recorded_and_processed(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(inner.barrier(1, 0))
    inner.run()
    late.send(batch(1))
    inner.run()
    late.send(batch(2))
    late.send(inner.barrier(1, 0))
    late.send(batch(3))
    early.send(batch(10))
    inner.run()

    assert inner.written(1) == (0, {("in", 1): [1, 2]})
    assert sorted(inner.summing.got) == [1, 2, 3, 10]


def test_it_is_not_acknowledged_before_the_last_barrier_has_come(new_inner):
    inner = new_inner()
    inner.inputs[0].send(inner.barrier(1, 0))
    inner.run()
    inner.events.write(inner.subtask, 1)
    assert inner.events.take() == [("started", 1)]

    inner.inputs[1].send(inner.barrier(1, 0))
    inner.run()
    assert inner.events.acknowledgement()[0] == 1


def test_patience_runs_out_in_the_middle_of_an_alignment(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    sent = inner.barrier(1, alignment_timeout_ms=200)
    early.send(sent)
    early.send(batch(10))
    inner.run()
    late.send(batch(1))
    inner.run()
    assert inner.subtask.idle_seconds_max() == pytest.approx(0.2)
    assert inner.events.take() == []

    inner.clock.advance(0.2)
    inner.run()
    assert inner.events.take() == [("started", 1)]
    late.send(batch(2))
    inner.run()
    late.send(sent)
    inner.run()

    assert inner.written(1) == (1, {("in", 1): [2]})
    overtaking = Barrier(1, sent.triggered_at_ms, alignment_timeout_ms=0)
    assert inner.sent() == [[1], overtaking, [10], [2]], "further on it overtakes"


def test_patience_counts_for_a_barrier_that_waits_behind_records_too(new_inner, new_wire):
    inner = new_inner(out=new_wire(buffer_bytes=1))
    for number in (1, 2):
        inner.inputs[0].send(batch(number))
    sent = inner.barrier(1, alignment_timeout_ms=200)
    for channel in inner.inputs:
        channel.send(sent)
    inner.run()
    assert inner.events.take() == [], "the second batch is in the way"

    inner.clock.advance(0.2)
    inner.run()

    assert inner.written(1) == (1, {("in", 0): [2], ("out", 0): [1]})


def test_barriers_that_come_in_time_overtake_nothing(new_inner):
    inner = new_inner()
    inner.inputs[0].send(batch(1))
    inner.barriers(1, alignment_timeout_ms=200)

    assert inner.written(1) == (1, {})
    assert inner.sent() == [[1], inner.barrier(1, 200)]


def test_where_nothing_can_be_stuck_on_its_way_out_there_is_nothing_to_wait_for(new_inner):
    inner = new_inner()
    for channel in inner.inputs:
        channel.send(inner.barrier(1, 200))
    inner.subtask.step()
    inner.subtask.step()
    inner.events.write(inner.subtask, 1)

    assert inner.events.acknowledgement()[0] == 1


def test_an_aligned_barrier_that_is_stuck_on_its_way_out_is_hastened(new_inner, new_wire):
    inner = new_inner(out=new_wire())
    inner.inputs[0].send(batch(1))
    hastened = inner.barrier(1, 0)
    inner.barriers(1, alignment_timeout_ms=200)
    inner.inputs[0].send(batch(2))
    inner.run()
    inner.events.write(inner.subtask, 1)
    assert inner.events.take() == [("started", 1)]
    assert inner.subtask.idle_seconds_max() == pytest.approx(0.2)

    inner.clock.advance(0.2)
    inner.run()

    inner.events.write_channels(inner.subtask, 1)
    assert inner.log.kept == {1: {("out", 0, 0): [1]}}
    assert inner.out.leave() == [hastened, [1], [2]]


def test_a_stale_barrier_with_patience_does_not_keep_the_loop_busy(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(inner.barrier(1, 200))
    inner.run()
    inner.subtask.on_abort(1)
    inner.run()
    inner.clock.advance(0.3)
    late.send(inner.barrier(1, 200))
    inner.run()

    inner.clock.advance(0.3)
    inner.run()
    assert inner.subtask.idle_seconds_max() == 1.0


def test_an_overtaking_barrier_releases_a_channel_held_for_an_older_checkpoint(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(inner.barrier(1))
    early.send(batch(10))
    inner.run()
    early.send(inner.barrier(2, 0))
    late.send(inner.barrier(2, 0))
    inner.run()

    told = inner.events.take()
    assert told[0][:2] == ("declined", 1)
    assert ("started", 2) in told
    assert inner.summing.got == [10]
    inner.events.write_channels(inner.subtask, 2)
    assert inner.log.kept == {2: {("in", 0, 0): [10]}}


def test_a_cancelled_recording_is_forgotten_and_its_late_barrier_changes_nothing(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(inner.barrier(1, 0))
    inner.run()
    late.send(batch(1))
    inner.run()
    inner.subtask.on_abort(1)
    inner.events.write(inner.subtask, 1)
    late.send(batch(2))
    late.send(inner.barrier(1, 0))
    inner.run()

    assert [each for each in inner.events.take() if each[0] in ("recorded", "acknowledged")] == []
    assert inner.summing.got == [1, 2]
    inner.inputs[1].send(batch(3))
    inner.barriers(2, alignment_timeout_ms=0)
    assert inner.written(2) == (3, {("in", 1): [3]})


def test_files_of_a_checkpoint_that_is_given_up_after_its_channels_are_written_go(new_inner):
    inner = new_inner()
    inner.inputs[0].send(batch(1))
    inner.barriers(1, alignment_timeout_ms=0)
    inner.events.write_channels(inner.subtask, 1)
    inner.subtask.on_abort(1)

    assert ("unwanted", ("shared/1/uid-0-channels-1",)) in inner.events.take()


def test_channels_written_after_the_checkpoint_was_given_up_go_too(new_inner):
    inner = new_inner()
    inner.inputs[0].send(batch(1))
    inner.barriers(1, alignment_timeout_ms=0)
    inner.subtask.on_abort(1)
    inner.events.take()
    inner.events.write_channels(inner.subtask, 1)

    assert inner.events.take() == [("unwanted", ("shared/1/uid-0-channels-1",))]


# --- what a checkpoint says was under way ---


def test_replayed_batches_come_before_all_else_of_their_channel(new_inner):
    channel = LocalChannel(1 << 20)
    inner = new_inner(channels=[ReplayingInput(channel, [batch(1), batch(2)])])
    channel.send(batch(3))
    inner.run()

    assert inner.summing.got == [1, 2, 3]


def test_replayed_batches_that_still_wait_are_part_of_the_next_overtaking_checkpoint(new_inner):
    channel = LocalChannel(1 << 20)
    inner = new_inner(channels=[ReplayingInput(channel, [batch(1), batch(2)])])
    inner.subtask.step()
    channel.send(batch(3))
    channel.send(inner.barrier(1, 0))
    inner.run()

    assert inner.written(1) == (1, {("in", 0): [2, 3]})
    assert inner.summing.got == [1, 2, 3]


def test_an_aligned_barrier_waits_behind_replayed_batches(new_inner):
    channel = LocalChannel(1 << 20)
    inner = new_inner(channels=[ReplayingInput(channel, [batch(1), batch(2)])])
    channel.send(inner.barrier(1))
    inner.run()

    assert inner.written(1) == (3, {})
