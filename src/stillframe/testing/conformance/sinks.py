"""`check_sink`: does a sink keep the promises of `api.sinks`, whatever happens to its job?"""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from stillframe.api.sinks import Sink
from stillframe.storage.local import LocalStore
from stillframe.storage.staging import StagedFiles
from stillframe.testing.conformance.elsewhere import Elsewhere
from stillframe.testing.conformance.outside import Outside, Visible, row_of
from stillframe.testing.conformance.promises import (
    Broken,
    Diary,
    Kind,
    PromiseBroken,
    Report,
    Search,
    Step,
    draw,
)
from stillframe.testing.conformance.sink_job import SinkJob

_SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
_STEPS_MAX = 24
_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where a sink that waits for the disk does not wait long."""
_SUBTASKS = range(3)
_LINES = (*range(1, 20), *range(1, 20), *range(1, 60))
_NEVER_OR_A_LINE = (*[0] * 60, *_LINES)
_HALF = (0, 1)

_KINDS = (
    Kind("write", 10, (_SUBTASKS, range(4))),
    Kind("whole_checkpoint", 6, (_HALF,)),
    Kind("trigger", 4),
    Kind("prepare", 5, (_SUBTASKS, range(2), _NEVER_OR_A_LINE)),
    Kind("complete", 4, (range(2),)),
    Kind("abort", 1, (range(2),)),
    Kind("commit", 4, (_SUBTASKS, _NEVER_OR_A_LINE)),
    Kind("commit_again", 2),
    Kind("restart", 4, (range(3), (0, 0, 0, 1, 2), _HALF, _NEVER_OR_A_LINE)),
    Kind("begin_anew", 1, (range(3),)),
    Kind("zombie_writes", 3, (_SUBTASKS, _HALF, _HALF)),
    Kind("zombie_commits", 2),
    Kind("race", 2, (_SUBTASKS, _LINES)),
    Kind("neighbour", 1, (_HALF,)),
)
"""The methods of `SinkJob`; about half of them are ordinary life, so that there is something to
break."""

# Spared from the last to the first, and of those that cannot be spared the first is told: what is
# about one thing only stands before what meets it with others.
_ADVERSITIES = {
    "copies": (
        "committables are enough to commit, in any process: nothing is remembered in the sink, a"
        " writer or a committer that another one needs"
    ),
    "epochs": (
        "a commit is known by its mark and not by its epoch, which comes again with other records"
    ),
    "begin anew": (
        "a mark belongs to one incarnation of the job: one that has begun anew under the same name"
        " counts its checkpoints from 1 again"
    ),
    "neighbours": (
        "what another job, or another sink of the job, has prepared in the same place is left"
        " alone, by sweep too: every name carries the job and the uid"
    ),
    "sweep": "sweep removes what older attempts left behind, and nothing that `keep` names",
    "forget": "forget drops what was noted of a commit, and nothing that is seen",
    "death in a call": (
        "a call may be cut off at any line and made again: rows appear together with what says that"
        " they have, or not at all"
    ),
    "race": (
        "of two who commit the same at the same time, one shuts the other out before it looks"
        " whether the work is done"
    ),
    "zombies": (
        "what an attempt does when it is over harms nobody: every name it gives carries the attempt"
    ),
    "out of order": "preparing may run later than the next rotation, and in any order",
    "older": "a commit may be asked for after later ones: somebody restores an older checkpoint",
    "rescale": (
        "after a change of the parallelism, another subtask commits what was prepared, under the"
        " mark of the one that prepared it"
    ),
}

_ELSEWHERE = {
    "another process": (
        "what is prepared in one process can be committed in another: nothing of it is kept in"
        " memory (if the outside is in memory too, give another_process=False)"
    )
}
_CHECKS_ELSEWHERE = 10

DESCRIBED = "describe and tied_to answer the same in every process, and never change"
PICKLED = "a sink is a frozen description that can be pickled"


def check_sink(
    sink: Sink | Callable[[Path], Sink],
    visible: Visible,
    *,
    schema: pa.Schema = _SCHEMA,
    row: Callable[[int], Any] | None = None,
    checks: int = 200,
    seed: int = 0,
    another_process: bool = True,
) -> Report:
    """Run a sink through drawn schedules of failures; raises `PromiseBroken` for the first flaw.

    `sink` is a sink, or a function that makes one for an empty directory: then each schedule has
    an outside of its own, which is quicker. `visible` is given the sink and answers all rows that
    one sees outside now, as tuples in the order of the columns or as dicts. The rows that are
    written have this `schema`; `row` makes the one of a number, different for each number. At the
    end some schedules have their writers in `another_process`; without it, the outside may be in
    the memory of this one.
    """
    kit = _SinkCheck(sink, visible, schema, row or row_of(schema))
    drawn = partial(draw, _KINDS, _STEPS_MAX)
    subject = kit.check_description()
    steps = Search(drawn, kit.run, _ADVERSITIES).explore(subject, seed, checks)
    if not another_process:
        return Report(subject, checks, steps, ("writers in another process",))
    with closing(Elsewhere()) as elsewhere:
        if why := kit.why_not(elsewhere):
            return Report(subject, checks, steps, (f"writers in another process ({why})",))
        run = partial(kit.run, elsewhere=elsewhere)
        far = min(checks, _CHECKS_ELSEWHERE)
        steps += Search(drawn, run, _ELSEWHERE).explore(subject, seed, far)
    return Report(subject, checks + far, steps)


@dataclass(frozen=True)
class _SinkCheck:
    given: Sink | Callable[[Path], Sink]
    visible: Visible
    schema: pa.Schema
    row: Callable[[int], Any]

    @contextmanager
    def _sink(self) -> Iterator[tuple[Sink, Path]]:
        with tempfile.TemporaryDirectory(prefix="conformance-", dir=_IN_MEMORY) as place:
            outside = Path(place) / "outside"
            outside.mkdir()
            sink = self.given if isinstance(self.given, Sink) else self.given(outside)
            yield sink, Path(place) / "job"

    def why_not(self, elsewhere: Elsewhere) -> str | None:
        with self._sink() as (sink, _):
            return elsewhere.why_not(sink)

    def check_description(self) -> str:
        """What is true before anything happens; answers what the sink calls itself."""
        with self._sink() as (sink, _):
            subject = f"{type(sink).__name__} ({sink.describe()})"
            try:
                copied: Sink = pickle.loads(pickle.dumps(sink))
            except Exception as error:
                raise PromiseBroken(subject, PICKLED, f"{error}", (), None) from error
            told = [(each.describe(), each.tied_to) for each in (sink, copied, sink)]
            if len(set(told)) > 1:
                seen = f"it is {told[0]} and then {told[1] if told[1] != told[0] else told[2]}"
                raise PromiseBroken(subject, DESCRIBED, seen, (), None)
        return subject

    def run(
        self,
        steps: Sequence[Step],
        diary: Diary,
        eased: frozenset[str],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        is_far = elsewhere is not None and "another process" not in eased
        opened = {"open_writer": elsewhere.open_writer} if elsewhere and is_far else {}
        with _unclosed_is_fine(), self._sink() as (sink, place):
            outside = Outside(sink, self.schema, self.row, self.visible)
            told = (sink.describe(), sink.tied_to)
            job = SinkJob(sink, outside, partial(_staging, place), diary, eased, **opened)
            try:
                for step in steps:
                    getattr(job, step.what)(*step.numbers)
                    job.check()
                job.settle()
            finally:
                job.close()
            if told != (sink.describe(), sink.tied_to):
                raise Broken(DESCRIBED, f"it was {told}")


def _staging(place: Path, job: str) -> StagedFiles:
    """Of this job, whose checkpoints are in a location of their own."""
    return StagedFiles(LocalStore(place / job))


@contextmanager
def _unclosed_is_fine() -> Iterator[None]:
    """A call that was cut off leaves a file open now and then, as a process that is killed does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
