"""How a cycle finds out that it is empty, told as laps that go round."""

from collections import deque
from random import Random

import pytest

from stillframe.protocol.laps import HeadLaps, PassingLaps, Returned, SendLap


def lap_of(head, channels=(0,), is_quiet_on_the_way=True):
    """Send one lap, which comes straight back on these channels."""
    lap = head.next_lap()
    for channel in channels:
        returned = head.on_lap(channel, lap.number, lap.is_quiet and is_quiet_on_the_way)
    return returned


def laps_to_the_end(head, **more):
    for laps in range(1, 10):
        if lap_of(head, **more) is Returned.QUIET:
            return laps
    raise AssertionError("it goes round for ever")


def test_the_first_lap_is_never_quiet_because_nobody_knows_what_was_there_before():
    assert HeadLaps([0]).next_lap() == SendLap(1, is_quiet=False)


def test_a_cycle_that_nothing_comes_back_from_ends_after_a_few_laps():
    head = HeadLaps([0])

    assert lap_of(head) is Returned.BUSY
    assert laps_to_the_end(head) <= 3


def test_a_record_that_comes_back_makes_the_next_lap_busy():
    head = HeadLaps([0])
    for _ in range(6):
        lap = head.next_lap()
        head.on_record()
        assert head.on_lap(0, lap.number, lap.is_quiet) is Returned.BUSY
        assert not lap.is_quiet

    assert laps_to_the_end(head) <= 4


def test_a_lap_is_back_when_it_is_on_every_channel():
    head = HeadLaps([3, 5])
    lap = head.next_lap()

    assert head.is_under_way
    assert head.on_lap(5, lap.number, True) is Returned.IN_PART
    assert head.is_under_way
    assert head.on_lap(3, lap.number, True) is not Returned.IN_PART
    assert not head.is_under_way


def test_one_channel_with_a_busy_lap_is_enough_to_go_round_again():
    head = HeadLaps([0, 1])
    for busy in (0, 1, 0, 1, 0, 1):
        lap = head.next_lap()
        head.on_lap(0, lap.number, busy != 0)
        assert head.on_lap(1, lap.number, busy != 1) is Returned.BUSY


def test_a_lap_goes_on_when_it_has_come_on_all_channels_and_is_quiet_only_if_all_were():
    passing = PassingLaps([0, 1])
    passing.on_lap(0, 1, True, has_outside_ended=True)
    passing.on_lap(1, 1, True, has_outside_ended=True)

    assert passing.on_lap(0, 2, True, has_outside_ended=True) is None
    assert passing.on_lap(1, 2, True, has_outside_ended=True) == SendLap(2, is_quiet=True)
    assert passing.on_lap(1, 3, False, has_outside_ended=True) is None
    assert passing.on_lap(0, 3, True, has_outside_ended=True) == SendLap(3, is_quiet=False)


def test_a_head_may_be_a_lap_ahead_of_another():
    passing = PassingLaps([0, 1])

    assert passing.on_lap(0, 1, True, has_outside_ended=True) is None
    assert passing.on_lap(0, 2, True, has_outside_ended=True) is None
    assert passing.on_lap(1, 1, True, has_outside_ended=True) == SendLap(1, is_quiet=False)
    assert passing.on_lap(1, 2, True, has_outside_ended=True) == SendLap(2, is_quiet=True)


def test_an_input_from_outside_must_have_ended_by_the_lap_before():
    """A record may have entered right behind the lap before, and the end behind the record: the
    head has seen neither, and the lap that finds the input ended goes round behind the record."""
    passing = PassingLaps([0])

    assert passing.on_lap(0, 1, True, has_outside_ended=False) == SendLap(1, is_quiet=False)
    assert passing.on_lap(0, 2, True, has_outside_ended=True) == SendLap(2, is_quiet=False)
    assert passing.on_lap(0, 3, True, has_outside_ended=True) == SendLap(3, is_quiet=True)


def test_a_head_does_not_end_before_an_input_that_reaches_it_only_through_another_head():
    """Two heads, two bodies; heads send to both, a body sends back to its own head only. The
    second body's input from outside is still open: what it brings goes to the second head and on
    to the first, so the first must not end either."""
    heads = [HeadLaps([0]), HeadLaps([0])]
    bodies = [PassingLaps([0, 1]), PassingLaps([0, 1])]
    outside_ended = [True, False]

    def go_round():
        laps = [head.next_lap() for head in heads]
        told = []
        for head, body, ended in zip(heads, bodies, outside_ended, strict=True):
            body.on_lap(0, laps[0].number, laps[0].is_quiet, ended)
            onward = body.on_lap(1, laps[1].number, laps[1].is_quiet, ended)
            told.append(head.on_lap(0, onward.number, onward.is_quiet))
        return told

    for _ in range(6):
        assert go_round() == [Returned.BUSY, Returned.BUSY]
    outside_ended[1] = True
    told = [go_round() for _ in range(4)]
    assert [Returned.QUIET, Returned.QUIET] in told
    ended_at = told.index([Returned.QUIET, Returned.QUIET])
    assert told[:ended_at] == [[Returned.BUSY, Returned.BUSY]] * ended_at, "they end together"


# --- any schedule ----------------------------------------------------------------------------


class Cycle:
    """Heads, bodies and the queues between them. A record is the number of rounds it has to go."""

    def __init__(self, random):
        self.random = random
        self.width = random.randint(1, 3)
        self.to_bodies_all = random.random() < 0.6
        # Never without the other: an edge back is all to all only where the parallelism changes,
        # so it has changed on the way there.
        self.to_heads_all = self.to_bodies_all and random.random() < 0.4
        everywhere = range(self.width)
        self.to_body = {(h, b): deque() for h in everywhere for b in self.bodies_of(h)}
        self.to_head = {(b, h): deque() for b in everywhere for h in self.heads_of(b)}
        self.outside = [self.some_records() for _ in everywhere]
        self.has_outside = random.random() < 0.7
        if not self.has_outside:
            self.outside = [[] for _ in everywhere]
        self.entering = [self.some_records() for _ in everywhere]
        self.heads = [HeadLaps([b for b, h in self.to_head if h == me]) for me in everywhere]
        self.bodies = [PassingLaps([h for h, b in self.to_body if b == me]) for me in everywhere]
        self.ended = set()

    def some_records(self):
        """What comes in from outside, None: nothing yet; an empty list has ended."""
        return [self.random.choice([None, None, 1, 2, 4]) for _ in range(self.random.randint(0, 6))]

    def bodies_of(self, head):
        return range(self.width) if self.to_bodies_all else [head]

    def heads_of(self, body):
        return range(self.width) if self.to_heads_all else [body]

    def send(self, queues, sender, receivers, record):
        if record:
            queues[sender, self.random.choice([*receivers])].append(record)

    def step(self):
        acts = [self.head_step, self.body_step, self.head_takes, self.body_takes]
        self.random.choice(acts)(self.random.randrange(self.width))

    def head_step(self, me):
        """A record enters, or, where none can any more, a lap is sent."""
        if self.entering[me]:
            self.send(self.to_body, me, self.bodies_of(me), self.entering[me].pop(0))
        elif self.is_lap_due(me):
            lap = self.heads[me].next_lap()
            for body in self.bodies_of(me):
                self.to_body[me, body].append(lap)

    def is_lap_due(self, me):
        has_come = any(queue for (_, head), queue in self.to_head.items() if head == me)
        return me not in self.ended and not self.heads[me].is_under_way and not has_come

    def body_step(self, me):
        if self.outside[me]:
            self.send(self.to_head, me, self.heads_of(me), self.outside[me].pop(0))

    def head_takes(self, me):
        sender = self.random.choice([b for b, h in self.to_head if h == me])
        if not self.to_head[sender, me]:
            return
        element = self.to_head[sender, me].popleft()
        if isinstance(element, SendLap):
            if self.heads[me].on_lap(sender, element.number, element.is_quiet) is Returned.QUIET:
                self.end(me)
            return
        assert me not in self.ended, "a record came back after the end"
        self.heads[me].on_record()
        self.send(self.to_body, me, self.bodies_of(me), element)

    def body_takes(self, me):
        sender = self.random.choice([h for h, b in self.to_body if b == me])
        if not self.to_body[sender, me]:
            return
        element = self.to_body[sender, me].popleft()
        if not isinstance(element, SendLap):
            self.send(self.to_head, me, self.heads_of(me), element - 1)
            return
        ended = not self.outside[me]
        onward = self.bodies[me].on_lap(sender, element.number, element.is_quiet, ended)
        for head in self.heads_of(me) if onward else ():
            self.to_head[me, head].append(onward)

    def end(self, me):
        mine = range(self.width) if self.to_bodies_all or self.to_heads_all else [me]
        queues = [
            queue
            for (sender, _), queue in [*self.to_body.items(), *self.to_head.items()]
            if sender in mine
        ]
        assert not any(type(each) is int for queue in queues for each in queue), "one circulates"
        assert not any(self.outside[i] or self.entering[i] for i in mine), "one may still enter"
        self.ended.add(me)


@pytest.mark.parametrize("seed", range(400))
def test_in_any_schedule_the_end_comes_and_never_while_a_record_circulates(seed):
    cycle = Cycle(Random(seed))
    for _ in range(20_000):
        cycle.step()
        if len(cycle.ended) == cycle.width:
            return
    raise AssertionError(f"only {cycle.ended} of {cycle.width} heads have ended")
