"""What simulated branches expect of event time, over records small enough to see it by eye."""

import numpy as np
import pytest

from stillframe.testing.simulation.jobs import random_job
from stillframe.testing.simulation.limits import NO_LIMITS
from stillframe.testing.simulation.outside import IDS_PER_SPLIT
from stillframe.testing.simulation.timed import Sessions, Windows
from stillframe.testing.simulation.timed_functions import Alarms
from stillframe.testing.simulation.timed_pairs import Distinct, Enriched, Joined
from stillframe.testing.simulation.world import World

KINDS = (Windows, Sessions, Alarms, Joined, Distinct, Enriched)


def records(*moments, key=0, split=0):
    """Of one key, at these seconds of a split."""
    return np.array([(split * IDS_PER_SPLIT + moment, key) for moment in moments])


def together(*parts):
    return np.concatenate(parts)


def test_sliding_windows_that_overlap_count_a_record_in_each():
    assert Windows(6, 2).expected(records(5)) == {(start, 0): (1, 5) for start in (0, 2, 4)}


def test_windows_of_windows_say_what_the_larger_ones_would_have_said():
    moments = records(0, 5, 7, 8)

    assert Windows(4, 4, outer=8).expected(moments) == Windows(8, 8).expected(moments)


def test_a_session_lasts_as_long_as_the_next_record_is_not_later_than_the_gap():
    both = together(records(1, 3, 6), records(2, key=1))

    assert Sessions(2).expected(both) == {(1, 5, 0): (2, 4), (6, 8, 0): (1, 6), (2, 4, 1): (1, 2)}


def test_a_session_that_lost_records_is_a_part_of_the_whole_one():
    whole = Sessions(2).expected(records(1, 3, 5))

    assert Sessions(2).is_of_fewer(Sessions(2).expected(records(1, 5)), whole)
    assert not Sessions(2).is_of_fewer(Sessions(2).expected(records(1, 9)), whole)


def test_alarms_of_the_same_key_and_moment_are_one():
    both = together(records(4), records(4, split=1))

    assert Alarms(3).expected(both) == {(7, 0): (2, 4 + IDS_PER_SPLIT + 4)}


def test_a_join_pairs_the_left_with_the_right_as_far_apart_as_it_says():
    ids = records(0, 1, 2, 3, 6)  # 2, 3 and 6 are on the right

    assert Joined("inner", 1, 2).expected(ids).keys() == {(0, 2), (1, 2), (1, 3)}
    assert Joined("full", 1, 2).expected(ids).keys() == {(0, 2), (1, 2), (1, 3), (-1, 6)}


def test_who_lost_all_that_it_was_to_meet_may_come_out_of_a_full_join_alone():
    join = Joined("full", 1, 2)
    whole = join.expected(records(0, 2))

    assert join.is_of_fewer({(0, -1): ()}, whole)
    assert not join.is_of_fewer({(4, -1): ()}, whole)
    assert not Joined("inner", 1, 2).is_of_fewer({(0, -1): ()}, whole)


def test_records_of_one_span_are_the_same_up_to_its_end():
    assert Distinct(4).expected(records(0, 1, 4, 5)).keys() == {(0, 0), (4, 0), (8, 0)}


def test_left_records_come_out_of_an_enrichment_and_the_last_right_one_is_known():
    ids = records(0, 1, 2, 3)

    assert Enriched().expected(ids).keys() == {(0, 0), (1, 0)}
    assert Enriched().newest(ids) == {0: 3}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_branch_is_drawn_with_event_time_that_goes_on_while_it_runs(kind):
    jobs = (random_job(World(seed), NO_LIMITS) for seed in range(300))

    assert any(
        isinstance(branch.timed, kind) and job.tells_time_early(branch)
        for job in jobs
        for branch in job.branches
    )
