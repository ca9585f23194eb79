"""What a slot changes in the interpreter that runs it, and puts back."""

import gc
import sys

import pytest

from stillframe.runtime.interpreter import quick_threads, spared_collections


def test_threads_are_switched_sooner_while_a_slot_runs():
    before = sys.getswitchinterval()
    with quick_threads():
        assert sys.getswitchinterval() <= 0.001
    assert sys.getswitchinterval() == before


def test_an_interval_that_is_shorter_already_is_left_alone():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    try:
        with quick_threads():
            assert sys.getswitchinterval() == pytest.approx(0.0001, rel=0.1)
        assert sys.getswitchinterval() == pytest.approx(0.0001, rel=0.1)
    finally:
        sys.setswitchinterval(before)


def test_collections_pass_over_what_was_there_when_the_slot_began():
    assert gc.get_freeze_count() == 0
    with spared_collections():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_collections_come_less_often_while_a_slot_runs_unless_they_are_off():
    before = gc.get_threshold()
    try:
        for given, expected in ((700, 50_000), (200_000, 200_000), (0, 0)):
            gc.set_threshold(given, 10, 10)
            with spared_collections():
                assert gc.get_threshold() == (expected, 10, 10)
            assert gc.get_threshold() == (given, 10, 10)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("settings", [quick_threads, spared_collections])
def test_settings_are_put_back_also_after_a_failure(settings):
    before = sys.getswitchinterval(), gc.get_freeze_count(), gc.get_threshold()

    def fail():
        with settings():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (sys.getswitchinterval(), gc.get_freeze_count(), gc.get_threshold()) == before


def test_garbage_that_is_made_later_is_still_collected():
    class Ring:
        alive = 0

        def __init__(self):
            self.itself = self
            Ring.alive += 1

        def __del__(self):
            Ring.alive -= 1

    with spared_collections():
        Ring()
        gc.collect()
        assert Ring.alive == 0
