"""Who was cut off gets what it missed, each event once, or is told to begin again."""

from __future__ import annotations

import pytest

from stillframe.protocol.event_ring import EventRing, Place, frame

ALL = 1 << 30


def numbers(ring, after, bytes_max=ALL):
    return [event.number for event in ring.after(after, bytes_max)]


def filled(count, **bounds):
    ring = EventRing("7f3a", **bounds)
    for number in range(1, count + 1):
        ring.append("job", f'{{"n":{number}}}')
    return ring


def test_who_says_nothing_begins_with_what_comes_next():
    ring = filled(3)

    assert ring.place_after(None) == Place(3)
    ring.append("job", "{}")
    assert numbers(ring, 3) == [4]


def test_who_comes_back_gets_exactly_what_it_missed():
    ring = filled(5)

    assert ring.place_after("7f3a-2") == Place(2)
    assert numbers(ring, 2) == [3, 4, 5]


def test_an_event_has_the_id_by_which_one_comes_back():
    ring = filled(1)

    assert ring.after(0, ALL)[0].data == b'id: 7f3a-1\nevent: job\ndata: {"n":1}\n\n'


@pytest.mark.parametrize(
    "last_id",
    ["7f3a-6", "7f3a-1", "beef-4", "4", "", "7f3a-", "7f3a--4", "7f3a-٤", "7f3a-" + "9" * 400],
)
def test_who_has_a_gap_that_cannot_be_filled_begins_again(last_id):
    ring = filled(5, events_max=3)

    assert ring.place_after(last_id) == Place(5, is_reset=True)


def test_who_has_seen_all_but_what_is_kept_has_no_gap():
    assert filled(5, events_max=3).place_after("7f3a-2") == Place(2)


def test_before_the_first_event_nothing_is_missed():
    assert EventRing("7f3a").place_after("7f3a-0") == Place(0)
    assert EventRing("7f3a").place_after("beef-0").is_reset


def test_the_oldest_go_when_there_are_too_many_or_they_are_too_large():
    assert numbers(filled(10, events_max=4), 6) == [7, 8, 9, 10]
    assert not filled(10, events_max=4).has_all_after(5)

    size = len(frame("job", '{"n":1}', "7f3a-1"))
    assert numbers(filled(9, bytes_max=3 * size), 0) == [7, 8, 9]


def test_one_larger_than_all_there_is_room_for_goes_at_once():
    ring = filled(1, bytes_max=10)

    assert (ring.newest, numbers(ring, 0)) == (1, [])
    assert ring.has_all_after(1)
    assert not ring.has_all_after(0)


def test_what_follows_comes_in_pieces_that_are_not_large():
    ring = filled(9)
    size = len(frame("job", '{"n":1}', "7f3a-1"))

    assert numbers(ring, 2, 3 * size) == [3, 4, 5]
    assert numbers(ring, 5, 1) == [6]
    assert ring.bytes_after(6) == 3 * size
