"""How far event time had come for single key groups before a restore."""

import numpy as np

from stillframe.state.reached import BEGINNING_US, Reached


def test_what_is_remembered_can_be_told_again():
    spans = [(0, 3, 7), (3, 4, 9), (6, 8, 9)]

    assert list(Reached(8, spans).spans()) == spans


def test_of_two_that_tell_of_one_key_group_the_later_time_counts():
    for spans in ([(0, 8, 5), (2, 4, 9)], [(2, 4, 9), (0, 8, 5)]):
        assert list(Reached(8, spans).spans()) == [(0, 2, 5), (2, 4, 9), (4, 8, 5)]


def test_nothing_is_remembered_of_what_event_time_has_passed_for_all():
    assert Reached.beyond(9, 8, [(0, 3, 7), (3, 4, 9)]) is None
    assert Reached.beyond(8, 8, [(0, 3, 7), (3, 4, 9)]) is not None
    assert Reached.beyond(None, 8, []) is None


def test_a_key_has_the_time_of_its_group():
    reached = Reached(4, [(1, 2, 7)])

    hashes = np.arange(8, dtype=np.uint64)
    assert reached.times_of(hashes).tolist() == [BEGINNING_US, 7, BEGINNING_US, BEGINNING_US] * 2
