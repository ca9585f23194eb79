"""What a task records because its snapshot was taken before a barrier came."""

from collections import deque
from random import Random

import pytest

from stillframe.protocol.alignment import BarrierAligner, Hold, Release, TakeSnapshot
from stillframe.protocol.recording import Abandon, Recordings, StopRecording
from stillframe.protocol.tracking import BarrierTracker

# --- barriers that overtake ------------------------------------------------------------------


def test_an_overtaking_barrier_snapshots_at_once_and_the_other_channels_are_recorded():
    aligner = BarrierAligner([0, 1, 2])

    assert aligner.on_barrier(1, 1, overtakes=True) == [
        TakeSnapshot(1, recorded=frozenset({0, 2}), overtakes=True),
        Release(frozenset({1})),
    ]
    assert aligner.is_recorded(0, 1)
    assert not aligner.is_recorded(1, 1), "its barrier is there"


def test_a_recording_is_complete_when_the_last_barrier_has_come():
    aligner = BarrierAligner([0, 1, 2])
    aligner.on_barrier(1, 1, overtakes=True)

    assert aligner.on_barrier(2, 1, overtakes=True) == [StopRecording(1, 2, is_last=False)]
    assert aligner.on_barrier(0, 1, overtakes=True) == [StopRecording(1, 0, is_last=True)]
    assert not aligner.is_recorded(0, 1)


def test_a_barrier_that_overtakes_on_every_channel_but_one_leaves_nothing_to_hold():
    aligner = BarrierAligner([0])

    assert aligner.on_barrier(0, 1, overtakes=True) == [
        TakeSnapshot(1, recorded=frozenset(), overtakes=True),
        Release(frozenset({0})),
    ]


def test_a_barrier_that_overtakes_ends_an_alignment_of_the_same_checkpoint():
    """A task upstream has lost patience: its barrier comes at once, the others came in place."""
    aligner = BarrierAligner([0, 1, 2])
    assert aligner.on_barrier(0, 1) == [Hold(0)]

    assert aligner.on_barrier(1, 1, overtakes=True) == [
        TakeSnapshot(1, recorded=frozenset({2}), overtakes=True),
        Release(frozenset({0, 1})),
    ]


def test_patience_runs_out_in_the_middle_of_an_alignment():
    aligner = BarrierAligner([0, 1, 2])
    aligner.on_barrier(2, 1)

    assert aligner.on_patience_over(1) == [
        TakeSnapshot(1, recorded=frozenset({0, 1}), overtakes=True),
        Release(frozenset({2})),
    ]
    assert aligner.on_barrier(0, 1) == [StopRecording(1, 0, is_last=False)]


def test_patience_that_runs_out_for_nothing_that_aligns_changes_nothing():
    aligner = BarrierAligner([0, 1])
    assert aligner.on_patience_over(1) == []
    aligner.on_barrier(0, 2)
    assert aligner.on_patience_over(1) == []
    aligner.on_barrier(1, 2)
    assert aligner.on_patience_over(2) == [], "it was taken as it should"


def test_a_newer_barrier_gives_the_older_recording_up():
    aligner = BarrierAligner([0, 1])
    aligner.on_barrier(0, 1, overtakes=True)

    assert aligner.on_barrier(1, 2, overtakes=True) == [
        Abandon(1),
        TakeSnapshot(2, recorded=frozenset({0}), overtakes=True),
        Release(frozenset({1})),
    ]
    assert not aligner.is_recorded(1, 1)


def test_a_newer_barrier_on_a_channel_whose_older_one_came_gives_nothing_up():
    aligner = BarrierAligner([0, 1])
    aligner.on_barrier(0, 1, overtakes=True)

    taken, _ = aligner.on_barrier(0, 2, overtakes=True)

    assert taken == TakeSnapshot(2, recorded=frozenset({1}), overtakes=True)
    assert aligner.on_barrier(1, 1, overtakes=True) == [StopRecording(1, 1, is_last=True)]
    assert aligner.on_barrier(1, 2, overtakes=True) == [StopRecording(2, 1, is_last=True)]


def test_a_cancelled_recording_ends_and_the_late_barrier_is_ignored():
    aligner = BarrierAligner([0, 1])
    aligner.on_barrier(0, 1, overtakes=True)

    assert aligner.on_cancel(1) == [Abandon(1)]
    assert aligner.on_cancel(1) == [], "told twice"
    assert aligner.on_barrier(1, 1, overtakes=True) == []


def test_a_held_channel_is_released_by_a_newer_barrier_that_overtakes_in_it():
    aligner = BarrierAligner([0, 1])
    aligner.on_barrier(0, 1)

    assert aligner.on_barrier(0, 2, overtakes=True) == [
        Abandon(1),
        Release(frozenset({0})),
        TakeSnapshot(2, recorded=frozenset({1}), overtakes=True),
        Release(frozenset({0})),
    ]


def test_nothing_to_record_is_no_recording():
    recordings = Recordings()
    recordings.begin(1, [])

    assert recordings.cancel(1) == []


# --- cycles ----------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("kind", [BarrierAligner, BarrierTracker])


@BOTH
def test_a_channel_of_a_cycle_is_not_waited_for_and_recorded_until_its_barrier_returns(kind):
    aligner = kind([0, 1], feedback=[1])

    instructions = aligner.on_barrier(0, 1)
    assert TakeSnapshot(1, recorded=frozenset({1})) in instructions
    assert aligner.is_recorded(1, 1)
    assert aligner.on_barrier(1, 1, overtakes=True) == [StopRecording(1, 1, is_last=True)]


@BOTH
def test_a_channel_of_a_cycle_is_never_held(kind):
    aligner = kind([0, 1, 2], feedback=[2])

    for checkpoint_id in (1, 2):
        told = [*aligner.on_barrier(0, checkpoint_id), *aligner.on_barrier(1, checkpoint_id)]
        told += aligner.on_barrier(2, checkpoint_id, overtakes=True)
        assert Hold(2) not in told
        assert told[-1] == StopRecording(checkpoint_id, 2, is_last=True)


@BOTH
def test_two_checkpoints_of_a_cycle_are_recorded_at_once(kind):
    aligner = kind([0, 1], feedback=[1])
    aligner.on_barrier(0, 1)
    aligner.on_barrier(0, 2)

    assert aligner.is_recorded(1, 1)
    assert aligner.is_recorded(1, 2)
    assert aligner.on_barrier(1, 1, overtakes=True) == [StopRecording(1, 1, is_last=True)]
    assert aligner.on_barrier(1, 2, overtakes=True) == [StopRecording(2, 1, is_last=True)]


@BOTH
def test_a_barrier_that_returns_after_a_newer_one_is_given_up_in_a_cycle_too(kind):
    aligner = kind([0, 1], feedback=[1])
    aligner.on_barrier(0, 1)
    aligner.on_barrier(0, 2)

    told = aligner.on_barrier(1, 2, overtakes=True)

    assert told == [Abandon(1), StopRecording(2, 1, is_last=True)]


@BOTH
def test_what_a_cycle_records_can_be_cancelled(kind):
    aligner = kind([0, 1], feedback=[1])
    aligner.on_barrier(0, 1)

    assert aligner.on_cancel(1) == [Abandon(1)]
    assert aligner.on_barrier(1, 1, overtakes=True) == []


# --- any schedule ----------------------------------------------------------------------------


class Channel:
    """Records are numbers; a barrier is its checkpoint's number in a tuple."""

    def __init__(self):
        self.waiting = deque()
        self.barriers_to_send = deque()
        self.sent = []
        self.processed = []
        self.sent_before = {}

    def send_record(self):
        self.sent.append(len(self.sent))
        self.waiting.append(self.sent[-1])

    def send_barrier(self):
        checkpoint_id = self.barriers_to_send.popleft()
        self.sent_before[checkpoint_id] = list(self.sent)
        self.waiting.append((checkpoint_id,))

    def pull(self, checkpoint_id):
        place = self.waiting.index((checkpoint_id,))
        ahead = [each for each in list(self.waiting)[:place] if isinstance(each, int)]
        del self.waiting[place]
        return ahead

    def waiting_barriers(self):
        return [each[0] for each in self.waiting if isinstance(each, tuple)]


class Task:
    """Carries out what the aligner says, and keeps of each snapshot what belongs to it."""

    def __init__(self, kind, plain, feedback, mode):
        self.channels = [Channel() for _ in range(plain + feedback)]
        self.feedback = range(plain, plain + feedback)
        self.aligner = kind(range(plain + feedback), self.feedback)
        self.overtakes = mode == "overtaking"
        self.is_timed = mode == "timed"
        self.impatient = set()
        self.held = set()
        self.recorded = {}
        self.snapshots = {}
        self.complete = {}
        self.abandoned = set()

    def trigger(self, checkpoint_id):
        for channel in self.channels[: self.feedback.start]:
            channel.barriers_to_send.append(checkpoint_id)

    def is_over(self, checkpoint_id):
        return checkpoint_id in self.complete or checkpoint_id in self.abandoned

    def step(self, random):
        """Pull what overtakes, then take one element; False if there is none."""
        for index, channel in enumerate(self.channels):
            for checkpoint_id in channel.waiting_barriers():
                if self.is_pulled(index, checkpoint_id):
                    ahead = channel.pull(checkpoint_id)
                    told = self.aligner.on_barrier(index, checkpoint_id, overtakes=True)
                    self.carry_out(told, index, ahead)
        for checkpoint_id in self.impatient:
            self.carry_out(self.aligner.on_patience_over(checkpoint_id))
        readable = [i for i, c in enumerate(self.channels) if c.waiting and i not in self.held]
        if not readable:
            return False
        index = random.choice(readable)
        self.take(index, self.channels[index].waiting.popleft())
        return True

    def is_pulled(self, index, checkpoint_id):
        wanted = self.overtakes or checkpoint_id in self.impatient
        return wanted or index in self.feedback or self.aligner.is_recorded(index, checkpoint_id)

    def take(self, index, element):
        if isinstance(element, tuple):
            self.carry_out(self.aligner.on_barrier(index, element[0]))
            return
        for checkpoint_id, channels in self.recorded.items():
            if index in channels:
                self.snapshots[checkpoint_id][index].append(element)
        self.channels[index].processed.append(element)

    def cancel(self, checkpoint_id):
        self.abandoned.add(checkpoint_id)
        self.carry_out(self.aligner.on_cancel(checkpoint_id))

    def carry_out(self, instructions, index=None, ahead=()):
        for instruction in instructions:
            match instruction:
                case Hold(channel):
                    assert channel not in self.feedback
                    self.held.add(channel)
                case Release(channels):
                    self.held.difference_update(channels)
                case TakeSnapshot(checkpoint_id, recorded):
                    self.snapshot(checkpoint_id, recorded)
                    if index is not None and index not in recorded:
                        self.snapshots[checkpoint_id][index] += ahead
                case StopRecording(checkpoint_id, channel, is_last):
                    self.recorded[checkpoint_id].discard(channel)
                    self.snapshots[checkpoint_id][channel] += ahead
                    if is_last:
                        self.completed(checkpoint_id)
                case Abandon(checkpoint_id):
                    self.abandoned.add(checkpoint_id)
                    self.recorded.pop(checkpoint_id, None)

    def snapshot(self, checkpoint_id, recorded):
        assert checkpoint_id not in self.snapshots, "one snapshot of a checkpoint"
        assert set(self.feedback) <= recorded
        self.snapshots[checkpoint_id] = [list(each.processed) for each in self.channels]
        for index in self.feedback:
            self.channels[index].barriers_to_send.append(checkpoint_id)
        self.recorded[checkpoint_id] = set(recorded)
        if not recorded:
            self.completed(checkpoint_id)

    def completed(self, checkpoint_id):
        del self.recorded[checkpoint_id]
        self.complete[checkpoint_id] = self.snapshots[checkpoint_id]


def play(random, task, checkpoints, concurrent, cancels):
    """Triggers, records, barriers, steps, lost patience and cancellations in any order."""
    triggered = 0
    while True:
        in_flight = [n for n in range(1, triggered + 1) if not task.is_over(n)]
        waiting = [each for each in task.channels if each.barriers_to_send]
        if triggered == checkpoints and not in_flight and not waiting and not task.step(random):
            return
        roll = random.random()
        if roll < 0.1 and triggered < checkpoints and len(in_flight) < concurrent:
            triggered += 1
            task.trigger(triggered)
        elif roll < 0.3:
            random.choice(task.channels).send_record()
        elif roll < 0.5 and waiting:
            random.choice(waiting).send_barrier()
        elif roll < 0.52 and in_flight and cancels:
            task.cancel(random.choice(in_flight))
        elif roll < 0.55 and in_flight and task.is_timed:
            task.impatient.add(random.choice(in_flight))
        else:
            task.step(random)


MODES = ["aligned", "overtaking", "timed"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(150))
def test_state_and_recorded_are_exactly_what_was_sent_before_the_barrier(seed, mode):
    random = Random(seed)
    cancels = random.random() < 0.5
    concurrent = random.randint(1, 3) if mode == "aligned" else 1
    plain, feedback = random.randint(1, 4), random.randint(0, 2)
    task = Task(BarrierAligner, plain, feedback, mode)

    play(random, task, 6, concurrent, cancels)

    for checkpoint_id, kept in task.complete.items():
        before = [channel.sent_before[checkpoint_id] for channel in task.channels]
        assert kept == before, f"checkpoint {checkpoint_id}"
    if not cancels:
        assert set(task.complete) == set(range(1, 7)), "one was lost"
    assert not task.held, "a channel was left held"
    assert not task.recorded, "a channel is recorded for ever"


@pytest.mark.parametrize("seed", range(100))
def test_what_a_cycle_carried_is_kept_once_where_nothing_else_is_aligned(seed):
    random = Random(seed)
    task = Task(BarrierTracker, random.randint(1, 3), random.randint(1, 2), "aligned")

    play(random, task, 6, random.randint(1, 3), cancels=random.random() < 0.5)

    for checkpoint_id, kept in task.complete.items():
        for index, channel in enumerate(task.channels):
            before = channel.sent_before[checkpoint_id]
            if index in task.feedback:
                assert kept[index] == before
            else:
                assert kept[index][: len(before)] == before, "perhaps more, never less"
    assert not task.held
    assert not task.recorded
