"""The last minutes of a job: a point a second, bounded, and what is not known is null."""

import json
import sys

from stillframe.protocol.rings import JOB_POINTS_MAX, NUMBERS_MAX, TASK_POINTS_MAX, Rings

NOW_MS = 1_763_370_000_000


def filled(points, tasks=1):
    rings = Rings(("in", "out"), ("in", "working"))
    for point in range(points):
        at_ms = NOW_MS - (points - 1 - point) * 1000
        rings.add(at_ms, (point, None), dict.fromkeys(range(tasks), (point, 0.25)))
    return rings


def test_what_is_shown_is_what_was_told_in_the_window():
    told = filled(5).to_json(NOW_MS, 2)

    assert told == {
        "at": [NOW_MS - 2000, NOW_MS - 1000, NOW_MS],
        "job": {"in": [2, 3, 4], "out": [None, None, None]},
        "tasks": [{"task": 0, "in": [2, 3, 4], "working": [0.25, 0.25, 0.25]}],
    }


def test_a_task_is_remembered_for_five_minutes_and_the_job_for_fifteen():
    told = filled(2_000).to_json(NOW_MS, 3_600)

    assert len(told["at"]) == JOB_POINTS_MAX
    assert (told["job"]["in"][0], told["job"]["in"][-1]) == (1_100, 1_999)
    known = [each for each in told["tasks"][0]["in"] if each is not None]
    assert (len(known), known[0]) == (TASK_POINTS_MAX, 1_700)


def test_a_task_that_is_not_measured_has_no_points_for_that_time():
    rings = filled(2)
    rings.add(NOW_MS + 1000, (7, 8), {})

    told = rings.to_json(NOW_MS + 1000, 60)

    assert (told["job"]["out"], told["tasks"][0]["in"]) == ([None, None, 8], [0, 1, None])


def test_of_two_hundred_tasks_an_answer_stays_small_and_one_is_shown_whole():
    rings = filled(900, tasks=200)

    every, one = rings.to_json(NOW_MS, 900), rings.to_json(NOW_MS, 300, task=7)

    assert len(json.dumps(every)) < 256 << 10
    assert every["at"][-1] == NOW_MS
    assert len(every["at"]) * 403 <= NUMBERS_MAX
    assert (len(one["at"]), [each["task"] for each in one["tasks"]]) == (301, [7])


def test_two_hundred_tasks_with_ten_columns_are_held_in_some_megabytes():
    rings = Rings(("in",), tuple("abcdefghij"))
    rings.add(NOW_MS, (1,), {task: range(10) for task in range(200)})

    held = sum(sys.getsizeof(ring._numbers) for ring in rings._tasks.values())
    assert held < 2.5e6
