"""Subtasks of a cycle, stepped by hand: what comes back, what goes round, and when it all ends."""

import pyarrow as pa
import pytest

from stillframe.errors import UserCodeError
from stillframe.runtime.channels import LocalChannel, ReplayingInput
from stillframe.runtime.elements import EndOfRecords, Lap
from stillframe.runtime.inputs import ChannelPlace
from stillframe.runtime.spilling import FeedbackInput

SCHEMA = pa.schema([("id", pa.int64())])


def batch(*ids):
    return pa.record_batch([list(ids)], schema=SCHEMA)


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

    assert head.written(1) == (1, {("in", 1): [20, 21]})
    assert head.summing.got == [1, 20, 21, 22]


def test_what_comes_back_behind_a_barrier_that_holds_stays_where_it_is_until_that_is_given_up(
    new_inner,
):
    """It is in the savepoint with which the job stops, and in the last checkpoint after it."""
    cycle = Cycle(new_inner)
    head = cycle.head
    for checkpoint_id, holds in ((1, True), (2, False)):
        cycle.entry.send(head.barrier(checkpoint_id, holds=holds))
        cycle.back.send(batch(18 + checkpoint_id))
        head.run()
        cycle.back.send(head.barrier(checkpoint_id, holds=holds))
        head.run()

    assert head.summing.got == []
    assert head.written(1) == (0, {("in", 1): [19]})
    assert head.written(2) == (0, {("in", 1): [19, 20]}), "20 is only here to be told apart"
    head.subtask.on_abort(1)
    head.run()
    assert head.summing.got == [19, 20]


def test_no_lap_goes_round_behind_a_barrier_that_holds(new_inner):
    cycle = Cycle(new_inner)
    barrier = cycle.head.barrier(1, holds=True)
    cycle.entry.send(EndOfRecords())
    cycle.head.run()
    cycle.head.sent()
    cycle.entry.send(barrier)
    cycle.head.run()
    cycle.back.send(Lap(0, 1, True))
    cycle.back.send(barrier)
    cycle.head.clock.advance(1)
    cycle.head.run()

    assert cycle.head.sent() == [barrier]
    assert cycle.head.subtask.idle_seconds_max() == 1.0


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
        assert head.written(checkpoint_id) == (of_state, {("in", 1): under_way})


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

    assert cycle.head.written(1) == (1, {("in", 1): [2], ("out", 0): [1]})


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
