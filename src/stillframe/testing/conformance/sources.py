"""`check_source`: does a source keep the promises of `api.sources`, whatever happens to its job?"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from stillframe.api.sources import Source
from stillframe.testing.conformance.promises import (
    Diary,
    Kind,
    PromiseBroken,
    Report,
    Search,
    Step,
    draw,
)
from stillframe.testing.conformance.source_job import SourceJob
from stillframe.testing.conformance.truth import Truth

_STEPS_MAX = 20
_SUBTASKS = range(3)
_KINDS = (
    Kind("poll", 10, (_SUBTASKS, range(3))),
    Kind("whole_checkpoint", 4),
    Kind("trigger", 3),
    Kind("complete", 3, (range(2),)),
    Kind("two_in_flight", 2, (_SUBTASKS,)),
    Kind("abort", 1, (range(2),)),
    Kind("restart", 4, (range(3), (0, 0, 0, 1), (0, 1))),
    Kind("zombie_polls", 2, (_SUBTASKS,)),
    Kind("discover", 3),
    Kind("grow", 2),
)
"""The methods of `SourceJob`."""

_ADVERSITIES = {
    "completion": (
        "on_checkpoint_complete says what is never asked for again, and no more: what was read"
        " after the positions it is given is asked for after a failure"
    ),
    "copies": "a reader needs the source and its splits, and nothing that another process has",
    "zombies": "readers have nothing in common: one that was given up goes on for a while",
    "rescale": "a split may go to any reader, together with any others",
    "older": "a position may be gone back to as long as a checkpoint holds it",
    "restart": (
        "splits() is positioned after the last batch that poll has returned, and a reader that is"
        " opened there gives exactly the rows behind it"
    ),
}

DESCRIBED = "describe and tied_to answer the same in every process, and never change"
PICKLED = "a source is a frozen description that can be pickled"


def check_source(
    source: Source | Callable[[Path], Source],
    *,
    expected: Callable[[Any], Iterable[Any]] | None = None,
    more: Callable[[Any], None] | None = None,
    rows_max: int = 2_000,
    checks: int = 200,
    seed: int = 0,
) -> Report:
    """Run a source through drawn schedules of failures; raises `PromiseBroken` for the first flaw.

    `source` is a source, or a function that makes one for an empty directory: then each schedule
    has an outside of its own. What rows there are is found out by reading each split once from its
    beginning, up to `rows_max` rows; `expected`, given the source, answers all of them as tuples,
    for who knows better. `more` is called now and then to make something that its enumerator finds.
    """
    kit = _SourceCheck(source, expected, more, rows_max)
    subject = kit.check_description()
    search = Search(partial(draw, _KINDS, _STEPS_MAX), kit.run, kit.adversities)
    steps = search.explore(subject, seed, checks)
    return Report(subject, checks, steps, tuple(kit.unchecked))


class _SourceCheck:
    def __init__(
        self,
        given: Source | Callable[[Path], Source],
        expected: Callable[[Any], Iterable[Any]] | None,
        more: Callable[[Any], None] | None,
        rows_max: int,
    ) -> None:
        self._given = given
        self._expected = expected
        self._more = more
        self._rows_max = rows_max
        self._known: Truth | None = None
        """Of a source that is the same in all schedules."""
        self.unchecked: dict[str, None] = {}
        self.adversities = dict(_ADVERSITIES)

    @contextmanager
    def _source(self) -> Iterator[Source]:
        with tempfile.TemporaryDirectory(prefix="conformance-") as place:
            yield self._given if isinstance(self._given, Source) else self._given(Path(place))

    def check_description(self) -> str:
        """What is true before anything happens; answers what the source calls itself."""
        with self._source() as source:
            subject = f"{type(source).__name__} ({source.describe()})"
            try:
                copied: Source = pickle.loads(pickle.dumps(source))
            except Exception as error:
                raise PromiseBroken(subject, PICKLED, f"{error}", (), None) from error
            told = [(each.describe(), each.tied_to) for each in (source, copied, source)]
            if len(set(told)) > 1 or not source.schema.equals(copied.schema):
                raise PromiseBroken(subject, DESCRIBED, f"it is {told}", (), None)
            if not source.rewindable:
                self.unchecked["which rows come: the source cannot rewind"] = None
            if source.discovery_interval_seconds is not None and self._more is None:
                self.unchecked["splits that are found later: give more="] = None
        return subject

    def run(self, steps: Sequence[Step], diary: Diary, eased: frozenset[str]) -> None:
        with self._source() as source:
            if not source.rewindable:
                eased |= {"restart"}
            truth = self._known or Truth(source, self._rows_max)
            if isinstance(self._given, Source) and self._more is None:
                self._known = truth
            job = SourceJob(source, truth, self._more, diary, eased)
            try:
                for step in steps:
                    getattr(job, step.what)(*step.numbers)
                    job.check()
                job.settle()
                self._check_expected(source, job, truth)
            finally:
                job.close()
            if truth.is_cut and source.rewindable:
                self.unchecked[f"rows behind the first {self._rows_max} of a split"] = None

    def _check_expected(self, source: Source, job: SourceJob, truth: Truth) -> None:
        if self._expected is not None and not truth.is_cut:
            job.compare([tuple(row) for row in self._expected(source)])
