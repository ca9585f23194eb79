"""A subtask fed by channels, stepped by hand: what it waits for, holds, gives up and passes on."""

from dataclasses import replace

import pyarrow as pa
import pytest

from stillframe.protocol.measures import LATENCY_BOUNDS_MS, Aligning, ChannelMeasures
from stillframe.runtime.elements import CancelBarrier, EndOfRecords, LatencyMarker

SCHEMA = pa.schema([("id", pa.int64())])


def batch(*ids):
    return pa.record_batch([list(ids)], schema=SCHEMA)


def test_only_the_channel_that_is_early_is_held(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(inner.barrier(1))
    early.send(batch(100))
    late.send(batch(1))
    late.send(batch(2))
    inner.run()

    assert inner.summing.sum == 3
    assert not early.is_empty(), "what follows the barrier waits"
    late.send(inner.barrier(1))
    inner.run()
    assert inner.summing.sum == 103


def test_the_snapshot_is_taken_before_the_barrier_goes_on_and_holds_nothing_that_follows(new_inner):
    inner = new_inner()
    sent_before = []
    inner.summing.on_snapshot = lambda: sent_before.extend(inner.sent())
    inner.inputs[0].send(batch(1))
    for channel in inner.inputs:
        channel.send(inner.barrier(1))
        channel.send(batch(100))
    inner.run()
    inner.events.write(inner.subtask, 1)

    assert sent_before == [[1]]
    assert inner.sent() == [inner.barrier(1), [100], [100]]
    _, [snapshot], _ = inner.events.acknowledgement()
    assert snapshot.items == ({"sum": 1},)


def test_how_long_the_barriers_waited_for_each_other_is_measured(new_inner):
    inner = new_inner()
    first = inner.barrier(1)
    inner.clock.advance(0.1)
    inner.inputs[0].send(first)
    inner.run()
    inner.clock.advance(0.4)
    inner.inputs[1].send(first)
    inner.run()
    inner.events.write(inner.subtask, 1)

    timings = inner.events.take()[-1][3]
    assert (timings.start_delay_ms, timings.alignment_ms) == (100, 400)
    assert timings.arrivals == (("in", 0, 100.0), ("in", 1, 500.0))


def test_while_a_barrier_is_missing_it_is_told_on_which_channel_and_since_when(new_inner):
    inner = new_inner()
    inner.clock.advance(0.1)
    inner.inputs[1].send(inner.barrier(1))
    assert inner.subtask.measures(0).aligning is None
    inner.run()

    told = inner.subtask.measures(0).aligning
    assert told == Aligning(1, 1, 2, inner.clock.wall_ms(), (("in", 0),))
    inner.inputs[0].send(inner.barrier(1))
    inner.run()
    assert inner.subtask.measures(0).aligning is None


def test_a_marker_has_taken_as_long_as_records_and_goes_on_behind_them(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(inner.barrier(1))
    early.send(batch(1))
    early.send(LatencyMarker(7, inner.clock.wall_ms()))
    inner.run()
    assert inner.subtask.measures(0).latency == (), "its channel is held"
    inner.clock.advance(0.3)
    late.send(inner.barrier(1))
    inner.run()

    [told] = inner.subtask.measures(0).latency
    assert (told.source_task, sum(told.counts), told.sum_ms) == (7, 1, 300)
    assert told.counts[LATENCY_BOUNDS_MS.index(500)] == 1
    assert (told.quantile_ms(0.5), told.quantile_ms(0.99)) == (500, 500)
    barrier, records, marker = inner.sent()
    assert (barrier.checkpoint_id, records, marker.source_task) == (1, [1], 7)


def test_a_clock_that_is_behind_makes_no_marker_take_less_than_no_time(new_inner):
    inner = new_inner()
    inner.inputs[0].send(LatencyMarker(7, inner.clock.wall_ms() + 40))
    inner.inputs[0].send(LatencyMarker(7, inner.clock.wall_ms() - 10**9))
    inner.run()

    [told] = inner.subtask.measures(0).latency
    assert (told.counts[0], told.counts[-1], told.sum_ms) == (1, 1, 10**9)
    assert told.quantile_ms(0.99) is None, "longer than all bounds"


def test_of_each_channel_it_is_known_what_came_what_waits_and_whether_it_is_held(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(batch(1, 2, 3))
    early.send(inner.barrier(1))
    early.send(batch(4))
    late.send(batch(5))
    inner.run()

    first, second = inner.subtask.channel_measures()
    size = batch(1).nbytes
    assert first == ChannelMeasures("in", 0, 3, 3 * size, early.queued_bytes, True)
    assert first.queued_bytes >= size
    assert second == ChannelMeasures("in", 1, 1, size, 0, False)


def test_what_overtakes_is_told_of_every_channel_also_after_the_snapshot(new_inner):
    inner = new_inner()
    barrier = replace(inner.barrier(1), alignment_timeout_ms=0)
    inner.inputs[0].send(barrier)
    inner.run()
    inner.clock.advance(0.4)
    inner.inputs[1].send(barrier)
    inner.run()

    arrivals = timings_of(inner, 1).arrivals
    assert [(source, at) for _, source, at in arrivals] == [(0, 0.0), (1, 400.0)]


def timings_of(inner, checkpoint_id):
    """What its acknowledgement says it cost; both background parts run to their ends."""
    inner.events.write(inner.subtask, checkpoint_id)
    if checkpoint_id in inner.events.channel_writes:
        inner.events.write_channels(inner.subtask, checkpoint_id)
    [said] = [each for each in inner.events.take() if each[0] == "acknowledged"]
    return said[3]


@pytest.mark.parametrize("together_rows_max", [1, 4_096])
@pytest.mark.parametrize("mode", ["exactly-once", "at-least-once"])
def test_what_was_taken_between_the_first_barrier_and_the_last_is_counted(
    new_inner, mode, together_rows_max
):
    inner = new_inner(mode=mode, together_rows_max=together_rows_max)
    early, late = inner.inputs
    late.send(batch(1, 2, 3, 4, 5))
    inner.run()
    early.send(inner.barrier(1))
    inner.run()
    between = [batch(6), batch(7, 8)]
    for each in between:
        late.send(each)
    inner.run()
    late.send(inner.barrier(1))
    late.send(batch(9))
    inner.run()

    timings = timings_of(inner, 1)
    assert timings.processed_bytes == sum(each.nbytes for each in between)
    assert timings.in_flight_bytes == 0
    inner.barriers(2)
    assert timings_of(inner, 2).processed_bytes == 0, "of the next one nothing"


def test_a_barrier_that_waits_behind_records_has_come(new_inner):
    inner = new_inner()
    inner.inputs[0].send(batch(1, 2))
    inner.barriers(1)

    assert timings_of(inner, 1).processed_bytes == batch(1, 2).nbytes


def test_what_is_recorded_for_a_barrier_that_overtook_is_also_processed_meanwhile(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(batch(1, 2))
    early.send(inner.barrier(1, 0))
    inner.run()
    late.send(batch(3))
    inner.run()
    late.send(inner.barrier(1, 0))
    late.send(batch(4))
    inner.run()

    timings = timings_of(inner, 1)
    assert timings.processed_bytes == batch(1, 2).nbytes + batch(3).nbytes
    assert timings.in_flight_bytes > 0


def test_what_was_processed_for_a_checkpoint_that_was_given_up_is_forgotten(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(inner.barrier(1))
    late.send(batch(1, 2))
    inner.run()
    inner.subtask.on_abort(1)
    late.send(inner.barrier(1))
    inner.barriers(2)

    assert timings_of(inner, 2).processed_bytes == 0


def test_channels_are_read_in_turn(new_inner):
    inner = new_inner()
    for channel, first in zip(inner.inputs, (1, 10), strict=True):
        for ids in range(first, first + 3):
            channel.send(batch(ids))
    inner.run()

    assert inner.sent() == [[1], [10], [2], [11], [3], [12]]


def test_an_inner_subtask_takes_nothing_while_its_output_has_no_room(new_inner):
    inner = new_inner(buffer_bytes=1)
    inner.inputs[0].send(batch(1))
    inner.inputs[0].send(batch(2))
    inner.run()

    assert inner.summing.sum == 1
    inner.out.take()
    inner.run()
    assert inner.summing.sum == 3


def test_a_subtask_is_drained_once_when_all_its_inputs_are(new_inner):
    inner = new_inner()
    inner.inputs[0].send(EndOfRecords())
    inner.run()
    assert inner.events.take() == []
    inner.inputs[1].send(batch(1))
    inner.inputs[1].send(EndOfRecords())
    inner.run()

    assert inner.events.take() == [("drained",)]
    assert inner.sent() == [[1], EndOfRecords()]


def test_a_drained_subtask_still_aligns(new_inner):
    inner = new_inner()
    for channel in inner.inputs:
        channel.send(EndOfRecords())
    inner.barriers(1)

    assert inner.events.take() == [("drained",), ("started", 1)]


def test_a_channel_whose_records_end_while_another_is_held_is_waited_for_all_the_same(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(inner.barrier(1))
    early.send(batch(100))
    late.send(batch(1))
    late.send(EndOfRecords())
    inner.run()

    assert inner.summing.sum == 1, "the end of records is no barrier"
    late.send(inner.barrier(1))
    inner.run()
    inner.events.write(inner.subtask, 1)
    _, [snapshot], _ = inner.events.acknowledgement()
    assert snapshot.items == ({"sum": 1},)
    assert inner.summing.sum == 101


def test_an_abort_releases_what_was_held_and_the_late_barrier_is_ignored(new_inner):
    inner = new_inner()
    early, late = inner.inputs
    early.send(inner.barrier(1))
    early.send(batch(5))
    inner.run()

    inner.subtask.on_abort(1)
    inner.run()
    assert inner.summing.sum == 5
    late.send(inner.barrier(1))
    inner.run()
    assert ("started", 1) not in inner.events.take()
    inner.barriers(2)
    assert ("started", 2) in inner.events.take()


@pytest.mark.parametrize("mode", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize("alignment_timeout_ms", [None, 0, 200])
@pytest.mark.parametrize("is_late", [False, True])
def test_nothing_is_kept_of_a_checkpoint_that_was_given_up(
    new_inner, mode, alignment_timeout_ms, is_late
):
    inner = new_inner(mode=mode)
    early, late = inner.inputs
    barrier = inner.barrier(1, None if mode == "at-least-once" else alignment_timeout_ms)
    if is_late:
        inner.subtask.on_abort(1)
    early.send(barrier)
    inner.run()
    assert bool(list(inner.subtask.holdings())) is not is_late
    inner.subtask.on_abort(1)

    assert list(inner.subtask.holdings()) == []
    late.send(barrier)
    late.send(inner.barrier(2, barrier.alignment_timeout_ms))
    inner.run()
    assert {checkpoint_id for checkpoint_id, _ in inner.subtask.holdings()} <= {2}


def test_the_barrier_that_ends_a_recording_begins_no_alignment(new_inner):
    inner = new_inner()
    for channel in inner.inputs:
        channel.send(inner.barrier(1, 0))
        inner.run()
    inner.events.write(inner.subtask, 1)

    assert list(inner.subtask.holdings()) == []


def test_a_barrier_that_was_cancelled_upstream_is_not_waited_for(new_inner):
    inner = new_inner()
    inner.inputs[0].send(inner.barrier(1))
    inner.inputs[1].send(CancelBarrier(1))
    inner.inputs[0].send(batch(5))
    inner.run()

    assert inner.summing.sum == 5
    assert inner.events.take()[0][:2] == ("declined", 1)


def test_a_subtask_finishes_its_operators_once_and_sends_their_last_words_before_the_end(new_inner):
    inner = new_inner()
    inner.summing.last_words = [batch(99)]
    for channel in inner.inputs:
        channel.send(EndOfRecords())
    inner.run()
    inner.barriers(1)

    assert inner.summing.finished == 1
    assert inner.sent() == [[99], EndOfRecords(), inner.barrier(1)]


def test_a_snapshot_says_whether_the_records_had_ended_before_it(new_inner):
    inner = new_inner()
    finished = []
    for checkpoint_id in (1, 2):
        inner.barriers(checkpoint_id)
        for channel in inner.inputs:
            channel.send(EndOfRecords())
        inner.run()
        inner.events.write(inner.subtask, checkpoint_id)
        finished.append(inner.events.acknowledgement()[1][0].finished)

    assert finished == [False, True]


def test_a_subtask_restored_at_its_end_is_not_finished_again(new_inner):
    inner = new_inner(has_finished=True)
    inner.summing.last_words = [batch(99)]
    for channel in inner.inputs:
        channel.send(EndOfRecords())
    inner.run()

    assert inner.summing.finished == 0
    assert inner.sent() == [EndOfRecords()]
    assert inner.events.take() == [("drained",)]


# --- held ---


@pytest.mark.parametrize("mode", ["exactly-once", "at-least-once"])
def test_behind_a_barrier_that_holds_nothing_moves_but_further_barriers(new_inner, mode):
    inner = new_inner(mode=mode)
    for channel, number in zip(inner.inputs, (1, 2), strict=True):
        for element in (batch(number), inner.barrier(1, holds=True), inner.barrier(2), batch(9)):
            channel.send(element)
    inner.run()

    assert inner.sent() == [[1], [2], inner.barrier(1, holds=True), inner.barrier(2)]
    assert inner.written(1) == inner.written(2) == (3, {})
    inner.subtask.on_complete(2, 2)
    inner.run()
    assert inner.sent() == [], "also when the last checkpoint is complete"


def test_what_was_held_goes_on_when_that_checkpoint_is_given_up_and_not_before(new_inner):
    inner = new_inner()
    for channel in inner.inputs:
        for element in (inner.barrier(1, holds=True), inner.barrier(2), batch(9)):
            channel.send(element)
    inner.run()
    inner.subtask.on_abort(2)
    inner.run()
    assert inner.summing.got == []
    inner.subtask.on_abort(1)
    inner.run()

    assert inner.summing.got == [9, 9]


def test_a_barrier_that_was_given_up_before_it_came_holds_nothing(new_inner):
    inner = new_inner()
    inner.subtask.on_abort(1)
    for channel in inner.inputs:
        channel.send(inner.barrier(1, holds=True))
        channel.send(batch(9))
    inner.run()

    assert inner.summing.got == [9, 9]


def test_records_that_have_ended_are_not_finished_behind_a_barrier_that_holds(new_inner):
    inner = new_inner(mode="at-least-once")
    inner.summing.last_words = [batch(99)]
    early, late = inner.inputs
    for element in (inner.barrier(1, holds=True), EndOfRecords()):
        early.send(element)
    for element in (EndOfRecords(), inner.barrier(1, holds=True)):
        late.send(element)
    inner.run()
    assert inner.sent() == [inner.barrier(1, holds=True)]
    inner.subtask.on_abort(1)

    assert inner.sent() == [[99], EndOfRecords()]


# --- at least once ---


def test_at_least_once_holds_no_channel_and_overtakes_nothing(new_inner):
    inner = new_inner(mode="at-least-once")
    early, late = inner.inputs
    early.send(inner.barrier(1))
    early.send(batch(10))
    inner.run()
    assert inner.summing.got == [10]
    late.send(inner.barrier(1))
    inner.run()

    assert inner.written(1) == (10, {}), "perhaps twice, never lost"


def test_at_least_once_does_not_finish_before_a_snapshot_that_replays_what_came_before_the_end(
    new_inner,
):
    inner = new_inner(mode="at-least-once")
    inner.summing.last_words = [batch(99)]
    early, late = inner.inputs
    for element in (inner.barrier(1), batch(10), EndOfRecords()):
        early.send(element)
    late.send(EndOfRecords())
    inner.run()
    assert inner.sent() == [[10]], "10 is behind the barrier and comes again after a restore"
    late.send(inner.barrier(1))
    inner.run()

    assert inner.sent() == [inner.barrier(1), [99], EndOfRecords()]
    inner.events.write(inner.subtask, 1)
    assert not inner.events.acknowledgement()[1][0].finished


def test_at_least_once_finishes_when_the_barrier_it_waited_for_was_cancelled(new_inner):
    inner = new_inner(mode="at-least-once")
    early, late = inner.inputs
    early.send(inner.barrier(1))
    for channel in (early, late):
        channel.send(EndOfRecords())
    inner.run()
    assert inner.sent() == []
    inner.subtask.on_abort(1)

    assert EndOfRecords() in inner.sent()
