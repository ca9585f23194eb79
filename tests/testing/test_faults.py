"""Faults that are read from a file."""

from __future__ import annotations

import pyarrow as pa

from stillframe.ids import CheckpointId
from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.elements import Barrier
from stillframe.testing.faults import POISON, DelayedInput, Faults, poisoned, write_faults


def test_an_element_is_taken_when_its_delay_has_passed_and_in_its_order():
    now, delay = [0.0], [3.0]
    channel = LocalChannel(1 << 20)
    delayed = DelayedInput(channel, lambda: delay[0], lambda: now[0])
    first, barrier = pa.record_batch({"n": [1]}), Barrier(CheckpointId(1), 0)
    channel.send(first)
    channel.send(barrier)
    assert delayed.is_empty()
    now[0] = 2.9
    channel.send(pa.record_batch({"n": [2]}))
    assert delayed.is_empty()
    now[0] = 3.0
    assert not delayed.is_empty()
    assert delayed.take() is first
    assert delayed.take() is barrier
    assert delayed.is_empty()
    delay[0] = 0.0  # the fault is gone
    assert not delayed.is_empty()


def test_a_barrier_on_its_way_in_a_slow_channel_has_not_come():
    now = [0.0]
    channel = LocalChannel(1 << 20)
    delayed = DelayedInput(channel, lambda: 3.0, lambda: now[0])
    barrier = Barrier(CheckpointId(1), 0)
    channel.send(pa.record_batch({"n": [1]}))
    channel.send(barrier)
    assert delayed.is_empty()
    assert list(delayed.waiting_barriers()) == []
    now[0] = 3.0
    assert list(delayed.waiting_barriers()) == [barrier], "behind a record that is there too"


def test_a_barrier_is_pulled_out_of_a_slow_channel():
    channel = LocalChannel(1 << 20)
    delayed = DelayedInput(channel, lambda: 0.0, lambda: 0.0)
    batch = pa.record_batch({"n": [1]})
    channel.send(batch)
    channel.send(Barrier(CheckpointId(1), 0))
    assert not delayed.is_empty()
    assert delayed.pull(CheckpointId(1)) == [batch]
    assert delayed.take() is batch
    assert delayed.is_empty()


def test_only_the_poisoned_record_has_another_app():
    batch = pa.record_batch({"id": [7, 8], "app_id": ["app-0001", "app-0002"]})
    assert poisoned(batch, 8).column("app_id").to_pylist() == ["app-0001", POISON]
    assert poisoned(batch, 9).equals(batch)


def test_a_file_that_cannot_be_read_leaves_the_faults_as_they_were(tmp_path):
    path = str(tmp_path / "faults.json")
    write_faults(path, {"delay": {"source": 0, "target": 1, "seconds": 3}})
    faults = Faults(path)
    assert (faults.delay_seconds(0, 1), faults.delay_seconds(1, 0)) == (3.0, 0.0)
    (tmp_path / "faults.json").write_text('{"delay":')
    faults._looked_seconds = float("-inf")
    assert faults.delay_seconds(0, 1) == 3.0
    assert Faults(str(tmp_path / "none.json")).now() == {}
