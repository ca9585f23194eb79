"""What a job and its tasks did in the last minutes: a point a second, in four bytes a number.

Bounded from the start: fifteen minutes of the job, five of each task. Pure: the caller says when.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from stillframe.json_values import JsonObject, JsonValue

JOB_POINTS_MAX = 900
TASK_POINTS_MAX = 300
NUMBERS_MAX = 24_000
"""In one answer, so that it stays below 256 KB: of many tasks fewer points are shown."""
_UNKNOWN = math.nan


class _Ring:
    """The newest points of some columns; what is not known is not a number."""

    def __init__(self, width: int, points_max: int) -> None:
        self._width, self._points_max = width, points_max
        self._numbers = array("f", [_UNKNOWN]) * (width * points_max)

    def put(self, point: int, row: Sequence[float | None]) -> None:
        begin = point % self._points_max * self._width
        known = (_UNKNOWN if number is None else number for number in row)
        self._numbers[begin : begin + self._width] = array("f", known)

    def column(self, column: int, points: Sequence[int], newest: int) -> list[JsonValue]:
        """What has been overwritten since is not known any more."""
        oldest = newest - self._points_max
        return [
            _shown(self._numbers[point % self._points_max * self._width + column])
            if point > oldest
            else None
            for point in points
        ]


class Rings:
    """Of one job; every point has all columns of the job, and of those tasks that are measured."""

    def __init__(self, job_columns: Sequence[str], task_columns: Sequence[str]) -> None:
        self._job_columns, self._task_columns = tuple(job_columns), tuple(task_columns)
        self._at_ms = array("d", [0.0]) * JOB_POINTS_MAX
        self._job = _Ring(len(self._job_columns), JOB_POINTS_MAX)
        self._tasks: dict[int, _Ring] = {}
        self._points = 0

    def add(
        self,
        at_ms: int,
        job: Sequence[float | None],
        tasks: Mapping[int, Sequence[float | None]],
    ) -> None:
        self._at_ms[self._points % JOB_POINTS_MAX] = at_ms
        self._job.put(self._points, job)
        for task in tasks:
            self._tasks.setdefault(task, _Ring(len(self._task_columns), TASK_POINTS_MAX))
        nothing = [None] * len(self._task_columns)
        for task, ring in self._tasks.items():
            ring.put(self._points, tasks.get(task, nothing))
        self._points += 1

    def to_json(self, now_ms: int, window_seconds: int, task: int | None = None) -> JsonObject:
        """Columns, oldest first, of all tasks or of one."""
        newest = self._points - 1
        shown = [number for number in self._tasks if task in (None, number)]
        points = [
            point
            for point in range(max(0, self._points - JOB_POINTS_MAX), self._points)
            if now_ms - self._at_ms[point % JOB_POINTS_MAX] <= window_seconds * 1000
        ]
        columns = 1 + len(self._job_columns) + len(shown) * len(self._task_columns)
        step = max(1, math.ceil(len(points) * columns / NUMBERS_MAX))
        points = points[::-step][::-1]  # the newest is among them
        return {
            "at": [round(self._at_ms[point % JOB_POINTS_MAX]) for point in points],
            "job": {
                name: self._job.column(column, points, newest)
                for column, name in enumerate(self._job_columns)
            },
            "tasks": [
                {
                    "task": number,
                    **{
                        name: self._tasks[number].column(column, points, newest)
                        for column, name in enumerate(self._task_columns)
                    },
                }
                for number in sorted(shown)
            ],
        }


def _shown(number: float) -> JsonValue:
    return None if math.isnan(number) else float(f"{number:.4g}")
