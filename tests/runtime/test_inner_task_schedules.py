"""A subtask under random schedules: whatever comes when, a snapshot divides it in two."""

from random import Random

import pyarrow as pa
import pytest

from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.inputs import ChannelPlace
from stillframe.runtime.spilling import FeedbackInput

SCHEMA = pa.schema([("id", pa.int64())])


def batch(*ids):
    return pa.record_batch([list(ids)], schema=SCHEMA)


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
