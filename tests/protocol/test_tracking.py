"""Barriers without alignment, told as what arrives and what the task must do."""

from random import Random

import pytest

from stillframe.protocol.alignment import Abandon, Hold, Release, TakeSnapshot
from stillframe.protocol.tracking import BarrierTracker


def test_the_snapshot_waits_for_the_slowest_channel_but_holds_none():
    tracker = BarrierTracker([0, 1])

    assert tracker.on_barrier(0, 1) == []
    assert tracker.on_barrier(1, 1) == [TakeSnapshot(1)]


def test_an_early_channel_may_deliver_the_next_barrier_meanwhile():
    tracker = BarrierTracker([0, 1])

    assert tracker.on_barrier(0, 1) == []
    assert tracker.on_barrier(0, 2) == []
    assert tracker.on_barrier(1, 1) == [TakeSnapshot(1)]
    assert tracker.on_barrier(1, 2) == [TakeSnapshot(2)]


def test_a_later_checkpoint_that_is_there_first_abandons_the_earlier():
    tracker = BarrierTracker([0, 1])
    tracker.on_barrier(0, 1)
    tracker.on_barrier(0, 2)

    assert tracker.on_barrier(1, 2) == [Abandon(1), TakeSnapshot(2)]
    assert tracker.on_barrier(1, 1) == [], "it can only be late"


def test_a_cancelled_checkpoint_is_not_snapshotted_whenever_its_barriers_come():
    tracker = BarrierTracker([0, 1])

    tracker.on_barrier(0, 1)
    assert tracker.on_cancel(1) == [Abandon(1)]
    assert tracker.on_barrier(1, 1) == []
    assert tracker.on_cancel(2) == []
    assert tracker.on_barrier(0, 2) == []
    assert tracker.on_cancel(1) == []


def test_a_barrier_that_comes_twice_counts_once():
    tracker = BarrierTracker([0, 1])

    assert tracker.on_barrier(0, 1) == []
    assert tracker.on_barrier(0, 1) == []
    assert tracker.on_barrier(1, 1) == [TakeSnapshot(1)]
    assert tracker.on_barrier(1, 1) == []


@pytest.mark.parametrize("seed", range(100))
def test_any_schedule_snapshots_every_live_checkpoint_and_holds_nothing(seed):
    random = Random(seed)
    count = random.randint(1, 8)
    unread = {channel: list(range(1, count + 1)) for channel in range(random.randint(1, 4))}
    cancelled = {random.randint(1, 8) for _ in range(random.randint(0, 2))}
    delivered = dict.fromkeys(unread, 0)
    tracker = BarrierTracker(unread)
    for checkpoint_id in cancelled:
        tracker.on_cancel(checkpoint_id)
    snapshots = []
    while readable := [channel for channel in unread if unread[channel]]:
        channel = random.choice(readable)
        delivered[channel] = unread[channel].pop(0)
        for instruction in tracker.on_barrier(channel, delivered[channel]):
            assert not isinstance(instruction, Hold | Release)
            if isinstance(instruction, TakeSnapshot):
                assert min(delivered.values()) >= instruction.checkpoint_id
                snapshots.append(instruction.checkpoint_id)

    assert snapshots == [n for n in range(1, count + 1) if n not in cancelled]
