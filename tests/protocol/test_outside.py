"""What a committer does about one prepared part, by what it finds."""

import pytest

from stillframe.protocol.outside import Part, decide, retry_after_seconds


def test_what_nobody_has_written_is_written():
    assert decide(7, None, has_receipt=False, is_staged=True) is Part.TO_WRITE


def test_a_mark_of_an_earlier_checkpoint_says_nothing_of_a_later_one():
    assert decide(7, 6, has_receipt=False, is_staged=True) is Part.TO_WRITE


@pytest.mark.parametrize("newest", [7, 8, 50])
def test_a_mark_of_the_same_or_a_later_checkpoint_says_that_it_is_done(newest):
    assert decide(7, newest, has_receipt=False, is_staged=True) is Part.DONE
    assert decide(7, newest, has_receipt=False, is_staged=False) is Part.DONE


def test_a_receipt_is_enough_where_the_mark_was_forgotten():
    assert decide(7, None, has_receipt=True, is_staged=True) is Part.DONE
    assert decide(7, 3, has_receipt=True, is_staged=False) is Part.DONE


def test_what_is_neither_noted_nor_staged_is_lost_and_not_taken_for_done():
    assert decide(7, None, has_receipt=False, is_staged=False) is Part.LOST
    assert decide(7, 6, has_receipt=False, is_staged=False) is Part.LOST


def test_a_mark_that_was_there_and_is_gone_leaves_in_doubt_what_may_have_been_tried():
    gone = {"had_mark": True, "has_receipt": False}

    assert decide(7, None, is_staged=True, **gone) is Part.IN_DOUBT
    assert decide(7, 6, is_staged=True, **gone) is Part.TO_WRITE, "it is there"
    assert decide(7, None, is_staged=False, **gone) is Part.LOST
    assert decide(7, None, is_staged=True, may_be_tried=False, **gone) is Part.TO_WRITE


def test_a_receipt_leaves_no_doubt():
    assert decide(7, None, has_receipt=True, is_staged=True, had_mark=True) is Part.DONE


def test_tries_come_ever_later_and_no_later_than_every_ten_seconds():
    waits = [retry_after_seconds(failures) for failures in range(1, 12)]

    assert waits[:4] == [0.2, 0.4, 0.8, 1.6]
    assert waits == sorted(waits)
    assert waits[-1] == 10.0
