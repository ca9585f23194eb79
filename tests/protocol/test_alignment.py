"""How a task aligns its inputs, told as what arrives and what the task must do."""

from random import Random

import pytest

from stillframe.protocol.alignment import Abandon, BarrierAligner, Hold, Release, TakeSnapshot
from stillframe.protocol.recording import StopRecording


def test_snapshot_waits_for_the_slowest_channel():
    aligner = BarrierAligner([0, 1])

    assert aligner.on_barrier(0, 1) == [Hold(0)]
    assert aligner.on_barrier(1, 1) == [
        Hold(1),
        TakeSnapshot(1),
        Release(frozenset({0, 1})),
    ]


def test_a_newer_barrier_abandons_the_older_checkpoint():
    aligner = BarrierAligner([0, 1])

    aligner.on_barrier(0, 1)
    assert aligner.on_barrier(1, 2) == [Abandon(1), Release(frozenset({0})), Hold(1)]


def test_a_cancelled_checkpoint_releases_its_channels_and_ignores_late_barriers():
    aligner = BarrierAligner([0, 1])

    aligner.on_barrier(0, 1)
    assert aligner.on_cancel(1) == [Abandon(1), Release(frozenset({0}))]
    assert aligner.on_barrier(1, 1) == []


def test_a_cancellation_that_overtakes_its_barrier_leaves_the_open_checkpoint_alone():
    aligner = BarrierAligner([0, 1])

    aligner.on_barrier(0, 1)
    assert aligner.on_cancel(2) == []
    assert aligner.on_barrier(1, 1)[1:] == [TakeSnapshot(1), Release(frozenset({0, 1}))]
    assert aligner.on_barrier(0, 2) == []


def test_the_head_of_a_cycle_records_what_comes_back_until_its_barrier_is_round():
    head = BarrierAligner([0, 1], feedback=[1])

    assert head.on_barrier(0, 1) == [
        Hold(0),
        TakeSnapshot(1, recorded=frozenset({1})),
        Release(frozenset({0})),
    ]
    assert head.on_barrier(1, 1, overtakes=True) == [StopRecording(1, 1, is_last=True)]


def test_a_barrier_that_comes_round_before_it_has_come_in_overtakes_at_once():
    head = BarrierAligner([0, 1, 2], feedback=[1, 2])

    assert head.on_barrier(1, 1, overtakes=True) == [
        TakeSnapshot(1, recorded=frozenset({0, 2}), overtakes=True),
        Release(frozenset({1})),
    ]
    assert head.on_barrier(0, 1, overtakes=True) == [StopRecording(1, 0, is_last=False)]
    assert head.on_barrier(2, 1, overtakes=True) == [StopRecording(1, 2, is_last=True)]


@pytest.mark.parametrize("seed", range(200))
def test_any_schedule_snapshots_every_live_checkpoint_exactly_at_its_barriers(seed):
    """Play one random schedule: channels that take turns, cancellations at any moment."""
    random = Random(seed)
    channels, last = range(random.randint(1, 5)), random.randint(0, 8)
    unread = {channel: [*range(1, last + 1)] for channel in channels}
    to_cancel = {random.randint(1, 8) for _ in range(random.randint(0, 3))}
    live = set(range(1, last + 1)) - to_cancel
    delivered = dict.fromkeys(channels, 0)
    held, cancelled, snapshots = set(), set(), []
    aligner = BarrierAligner(channels)

    def check_snapshot(checkpoint_id):
        assert checkpoint_id not in cancelled
        assert snapshots == [] or snapshots[-1] < checkpoint_id
        assert set(delivered.values()) == {checkpoint_id}, "not every barrier is in"

    def carry_out(instructions):
        for instruction in instructions:
            match instruction:
                case Hold(channel):
                    held.add(channel)
                case Release(channels):
                    held.difference_update(channels)
                case TakeSnapshot(checkpoint_id):
                    check_snapshot(checkpoint_id)
                    snapshots.append(checkpoint_id)

    while readable := [c for c in unread if unread[c] and c not in held]:
        if to_cancel and random.random() < 0.2:
            checkpoint_id = to_cancel.pop()
            cancelled.add(checkpoint_id)
            carry_out(aligner.on_cancel(checkpoint_id))
            continue
        channel = random.choice(readable)
        delivered[channel] = unread[channel].pop(0)
        carry_out(aligner.on_barrier(channel, delivered[channel]))

    assert live <= set(snapshots), "a live checkpoint was lost"
    assert not held, "a channel was left held"
