"""A subtask fed by channels, stepped by hand: what it waits for, holds, records and passes on."""

from random import Random

import pyarrow as pa
import pytest

from stillframe.errors import UserCodeError
from stillframe.runtime.channels import LocalChannel, ReplayingInput
from stillframe.runtime.connecting import TwoInputOperator
from stillframe.runtime.elements import Barrier, CancelBarrier, EndOfRecords, Lap
from stillframe.runtime.inner_task import ChannelPlace
from stillframe.runtime.spilling import FeedbackInput

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


# --- barriers that overtake ------------------------------------------------------------------


def written(inner, checkpoint_id):
    """Both background parts run to their ends; what was under way, by sender or receiver."""
    inner.events.write(inner.subtask, checkpoint_id)
    if checkpoint_id in inner.events.channel_writes:
        inner.events.write_channels(inner.subtask, checkpoint_id)
    acknowledged, [snapshot], _ = inner.events.acknowledgement()
    assert acknowledged == checkpoint_id
    under_way = inner.log.kept.get(checkpoint_id, {})
    return snapshot.items[0]["sum"], {
        (edge, source if edge == "in" else target): ids
        for (edge, source, target), ids in under_way.items()
    }


def test_an_overtaking_barrier_is_acted_on_while_the_output_has_no_room(new_inner, new_wire):
    inner = new_inner(out=new_wire(buffer_bytes=1))
    for number in (1, 2, 3):
        inner.inputs[0].send(batch(number))
    inner.run()
    assert inner.summing.got == [1], "the output is full"

    inner.barriers(1, alignment_timeout_ms=0)

    assert written(inner, 1) == (1, {("in", 0): [2, 3], ("out", 0): [1]})
    assert inner.out.leave() == [inner.barrier(1, 0), [1]]


def test_what_a_barrier_overtook_is_processed_later_exactly_once(new_inner):
    inner = new_inner()
    inner.inputs[0].send(batch(1))
    inner.inputs[0].send(batch(2))
    inner.inputs[0].send(inner.barrier(1, 0))
    inner.inputs[0].send(batch(3))
    inner.inputs[1].send(inner.barrier(1, 0))
    inner.run()

    assert written(inner, 1) == (0, {("in", 0): [1, 2]})
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

    assert written(inner, 1) == (0, {("in", 1): [1, 2]})
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

    assert written(inner, 1) == (1, {("in", 1): [2]})
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

    assert written(inner, 1) == (1, {("in", 0): [2], ("out", 0): [1]})


def test_barriers_that_come_in_time_overtake_nothing(new_inner):
    inner = new_inner()
    inner.inputs[0].send(batch(1))
    inner.barriers(1, alignment_timeout_ms=200)

    assert written(inner, 1) == (1, {})
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
    assert written(inner, 2) == (3, {("in", 1): [3]})


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


def test_at_least_once_holds_no_channel_and_overtakes_nothing(new_inner):
    inner = new_inner(mode="at-least-once")
    early, late = inner.inputs
    early.send(inner.barrier(1))
    early.send(batch(10))
    inner.run()
    assert inner.summing.got == [10]
    late.send(inner.barrier(1))
    inner.run()

    assert written(inner, 1) == (10, {}), "perhaps twice, never lost"


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


# --- what a checkpoint says was under way ----------------------------------------------------


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

    assert written(inner, 1) == (1, {("in", 0): [2, 3]})
    assert inner.summing.got == [1, 2, 3]


def test_an_aligned_barrier_waits_behind_replayed_batches(new_inner):
    channel = LocalChannel(1 << 20)
    inner = new_inner(channels=[ReplayingInput(channel, [batch(1), batch(2)])])
    channel.send(inner.barrier(1))
    inner.run()

    assert written(inner, 1) == (3, {})


# --- cycles ----------------------------------------------------------------------------------


class Cycle:
    """The head of a cycle, what enters it, and what comes back."""

    def __init__(self, new_inner, restored=(), **more):
        self.entry = LocalChannel(1 << 20)
        self.back = LocalChannel(1 << 20)
        places = [ChannelPlace(("in", 0)), ChannelPlace(("in", 1), is_feedback=True, loops=(0,))]
        channels = [self.entry, FeedbackInput(ReplayingInput(self.back, restored))]
        self.head = new_inner(channels=channels, places=places, loops=(0,), **more)

    def turn(self):
        """Everything the head has sent comes back; what it was."""
        self.head.run()
        sent = [] if self.head.out.is_empty() else [self.head.out.take()]
        while not self.head.out.is_empty():
            sent.append(self.head.out.take())
        for element in sent:
            self.back.send(element)
        self.head.run()
        return sent

    def laps_to_the_end(self):
        """Go round until the cycle has ended; how many laps that took."""
        laps = 0
        for _ in range(20):
            self.head.clock.advance(0.01)
            sent = self.turn()
            laps += sum(isinstance(each, Lap) for each in sent)
            if EndOfRecords() in sent:
                return laps
        raise AssertionError("it goes round for ever")


def test_what_comes_back_is_recorded_until_the_barrier_has_gone_round(new_inner):
    cycle = Cycle(new_inner)
    head = cycle.head
    cycle.entry.send(batch(1))
    cycle.entry.send(head.barrier(1))
    head.run()
    assert head.sent() == [[1], head.barrier(1)]
    cycle.back.send(batch(20))
    head.run()
    cycle.back.send(batch(21))
    cycle.back.send(head.barrier(1))
    cycle.back.send(batch(22))
    head.run()

    assert written(head, 1) == (1, {("in", 1): [20, 21]})
    assert head.summing.got == [1, 20, 21, 22]


def test_two_checkpoints_of_a_cycle_are_recorded_at_once(new_inner):
    cycle = Cycle(new_inner)
    head = cycle.head
    cycle.entry.send(head.barrier(1))
    head.run()
    cycle.back.send(batch(1))
    head.run()
    cycle.entry.send(head.barrier(2))
    head.run()
    for element in (batch(2), head.barrier(1), batch(3), head.barrier(2), batch(4)):
        cycle.back.send(element)
    head.run()

    for checkpoint_id, of_state, under_way in ((1, 0, [1, 2]), (2, 1, [2, 3])):
        assert written(head, checkpoint_id) == (of_state, {("in", 1): under_way})


def test_a_full_output_does_not_keep_the_head_from_taking_back(new_inner, new_wire):
    """The cycle could otherwise fill up and wait for itself."""
    cycle = Cycle(new_inner, out=new_wire(buffer_bytes=1))
    cycle.entry.send(batch(1))
    cycle.head.run()
    for number in range(10, 200):
        cycle.back.send(batch(number))
    assert not cycle.head.out.has_room()
    cycle.head.run()

    assert cycle.back.is_empty()
    assert cycle.back.has_room()
    assert cycle.head.summing.got == [1], "it is only put aside"


def test_what_was_put_aside_is_part_of_a_checkpoint_like_all_that_comes_back(new_inner, new_wire):
    cycle = Cycle(new_inner, out=new_wire(buffer_bytes=1))
    cycle.entry.send(batch(1))
    cycle.head.run()
    cycle.back.send(batch(2))
    cycle.head.run()
    cycle.entry.send(cycle.head.barrier(1, 0))
    cycle.head.run()
    cycle.back.send(cycle.head.barrier(1, 0))
    cycle.head.run()

    assert written(cycle.head, 1) == (1, {("in", 1): [2], ("out", 0): [1]})


def test_what_a_checkpoint_says_came_back_is_replayed(new_inner):
    cycle = Cycle(new_inner, restored=[batch(7)])
    cycle.head.run()

    assert cycle.head.summing.got == [7]


def test_a_cycle_ends_when_its_inputs_have_and_nothing_goes_round(new_inner):
    cycle = Cycle(new_inner)
    cycle.head.run()
    assert cycle.head.sent() == [], "no lap before the end of what enters"
    cycle.entry.send(EndOfRecords())

    assert 2 <= cycle.laps_to_the_end() <= 4
    assert cycle.head.events.take() == [("drained",)]
    assert cycle.head.summing.finished == 1


def test_a_record_that_goes_round_keeps_the_cycle_alive(new_inner):
    cycle = Cycle(new_inner)
    cycle.entry.send(batch(1))
    cycle.entry.send(EndOfRecords())
    for _ in range(12):
        cycle.head.clock.advance(0.01)
        cycle.turn()

    assert cycle.head.events.take() == []
    assert len(cycle.head.summing.got) > 10


def test_an_idle_cycle_waits_between_its_laps(new_inner):
    cycle = Cycle(new_inner)
    cycle.entry.send(EndOfRecords())
    cycle.turn()

    assert cycle.turn() == [], "the first lap is back, the next is not due"
    assert 0 < cycle.head.subtask.idle_seconds_max() < 0.1
    cycle.head.clock.advance(0.01)
    assert [type(each) for each in cycle.turn()] == [Lap]


def test_records_that_come_back_after_the_end_are_a_mistake_that_is_named(new_inner):
    cycle = Cycle(new_inner)
    cycle.entry.send(EndOfRecords())
    cycle.laps_to_the_end()
    cycle.back.send(batch(1))

    sentence = "sum got records back after its cycle had run empty: a function within a cycle must"
    with pytest.raises(UserCodeError, match=sentence):
        cycle.head.run()


def test_a_cycle_restored_at_its_end_is_not_finished_again(new_inner):
    cycle = Cycle(new_inner, has_finished=True)
    cycle.entry.send(EndOfRecords())
    cycle.laps_to_the_end()

    assert cycle.head.summing.finished == 0


def body_of(new_inner):
    """A subtask on the way round: one channel of the cycle, one from outside."""
    places = [ChannelPlace(("in", 0), loops=(5,)), ChannelPlace(("in", 1))]
    return new_inner(places=places, loops=(5,))


def test_a_lap_goes_on_along_the_cycle_and_keeps_its_place_among_the_records(new_inner):
    body = body_of(new_inner)
    body.inputs[0].send(batch(1))
    body.inputs[0].send(Lap(5, 1, True))
    body.inputs[0].send(batch(2))
    body.run()

    assert body.sent() == [[1], Lap(5, 1, False), [2]], "an input from outside is open"


def test_a_lap_is_quiet_on_its_way_if_the_input_from_outside_had_ended_by_the_lap_before(new_inner):
    body = body_of(new_inner)
    body.inputs[1].send(EndOfRecords())
    body.run()
    for number in (1, 2):
        body.inputs[0].send(Lap(5, number, True))
    body.run()

    assert body.sent() == [Lap(5, 1, False), Lap(5, 2, True)]


def test_no_lap_is_quiet_on_its_way_while_an_input_from_outside_is_open(new_inner):
    body = body_of(new_inner)
    for number in (1, 2, 3):
        body.inputs[0].send(Lap(5, number, True))
        body.run()

    assert body.sent() == [Lap(5, number, False) for number in (1, 2, 3)]


def test_a_lap_does_not_leave_its_cycle(new_inner):
    outside = new_inner(places=[ChannelPlace(("in", i), loops=(5,)) for i in range(2)])
    for channel in outside.inputs:
        channel.send(Lap(5, 1, True))
    outside.run()

    assert outside.sent() == []


# --- any schedule ----------------------------------------------------------------------------


CHECKPOINTS = 5


class Fed:
    """A subtask whose channels are fed, and whose output leaves, at random; records are numbers."""

    def __init__(self, random, new_inner, new_wire, timeout_ms):
        self.random = random
        self.timeout_ms = timeout_ms
        plain, feedback = random.randint(1, 3), random.randint(0, 2)
        self.feeds = [LocalChannel(1 << 20) for _ in range(plain + feedback)]
        self.feedback = range(plain, plain + feedback)
        self.wire = new_wire(buffer_bytes=random.choice([1, 40, 1000]))
        self.inner = new_inner(
            channels=[
                FeedbackInput(feed) if index in self.feedback else feed
                for index, feed in enumerate(self.feeds)
            ],
            places=[
                ChannelPlace(("in", index), is_feedback=index in self.feedback)
                for index in range(len(self.feeds))
            ],
            out=self.wire,
        )
        self.inner.summing.on_snapshot = self.on_snapshot
        self.barriers_to_send = [[] for _ in self.feeds]
        self.sent = [[] for _ in self.feeds]
        self.sent_before = {}
        self.left = []
        self.left_before = {}
        self.state_at = {}
        self.triggered = 0
        self.acknowledged = 0
        self.in_flight_max = 1 if timeout_ms is not None else random.randint(1, 3)

    def trigger(self):
        in_flight = self.triggered - self.acknowledged
        if self.triggered == CHECKPOINTS or in_flight == self.in_flight_max:
            return
        self.triggered += 1
        barrier = self.inner.barrier(self.triggered, self.timeout_ms)
        for barriers in self.barriers_to_send[: self.feedback.start]:
            barriers.append(barrier)

    def on_snapshot(self):
        self.state_at[len(self.state_at) + 1] = list(self.inner.summing.got)

    def send(self):
        index = self.random.randrange(len(self.feeds))
        if self.barriers_to_send[index] and self.random.random() < 0.4:
            barrier = self.barriers_to_send[index].pop(0)
            self.sent_before[barrier.checkpoint_id, index] = list(self.sent[index])
            self.feeds[index].send(barrier)
        elif len(self.sent[index]) < 200:
            self.sent[index].append(index * 1000 + len(self.sent[index]))
            self.feeds[index].send(batch(self.sent[index][-1]))

    def leave(self):
        for element in self.wire.leave(min(1, len(self.wire.waiting))):
            if isinstance(element, list):
                self.left += element
                continue
            self.left_before[element.checkpoint_id] = list(self.left)
            for index in self.feedback:
                self.barriers_to_send[index].append(element)

    def step(self):
        self.inner.subtask.step()
        while told := self.inner.events.take():
            for said in told:
                self.on_event(*said[:2])

    def on_event(self, what, checkpoint_id):
        match what:
            case "started":
                self.inner.events.write(self.inner.subtask, checkpoint_id)
            case "recorded":
                self.inner.events.write_channels(self.inner.subtask, checkpoint_id)
            case "acknowledged":
                assert checkpoint_id == self.acknowledged + 1
                self.acknowledged = checkpoint_id
            case _:
                raise AssertionError(f"checkpoint {checkpoint_id} was {what}")

    def pass_time(self):
        self.inner.clock.advance(0.05)


@pytest.mark.parametrize("timeout_ms", [None, 0, 200], ids=["aligned", "overtaking", "timed"])
@pytest.mark.parametrize("seed", range(40))
def test_a_snapshot_is_what_came_before_its_barriers_and_its_output_what_went_before_its_own(
    new_inner, new_wire, seed, timeout_ms
):
    random = Random(seed)
    fed = Fed(random, new_inner, new_wire, timeout_ms)
    acts = [fed.send, fed.send, fed.step, fed.step, fed.leave, fed.pass_time, fed.trigger]
    acts += random.choice([[], [fed.send] * 2, [fed.leave] * 2])
    while fed.acknowledged < CHECKPOINTS:
        random.choice(acts)()
    while fed.wire.waiting or fed.inner.subtask.step():
        fed.leave()

    for checkpoint_id, state in fed.state_at.items():
        kept = fed.inner.log.kept.get(checkpoint_id, {})
        for index in range(len(fed.feeds)):
            processed = [number for number in state if number // 1000 == index]
            under_way = kept.get(("in", index, 0), [])
            assert processed + under_way == fed.sent_before[checkpoint_id, index]
        assert fed.left_before[checkpoint_id] + kept.get(("out", 0, 0), []) == state
    assert sorted(fed.inner.summing.got) == sorted(n for sent in fed.sent for n in sent)
    assert fed.left == fed.inner.summing.got


# --- small batches taken together ---


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

    assert written(inner, 1) == (10, {})
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

    assert written(inner, 1) == (0, {("in", 1): [20, 21], ("in", 2): [30]})
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
