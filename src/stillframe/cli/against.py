"""`stillframe inspect --against JOB.py PATH`: would this job fit that snapshot?

Theory of operation. The job file is run as `stillframe run` would, but where it starts a job the
plan is taken and nothing is started. If the job is the snapshot's own, by its name, the script ends
there; otherwise it goes on with a query that has ended already, in case it starts that one later.
What is then asked of plan and snapshot is what a start would ask, so it gets the same answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stillframe.cli.jobs import run_as_main
from stillframe.cli.run import default_master, tell_where
from stillframe.config import SESSION_PREFIX, JobConfig
from stillframe.coordinator.located import LocatedSnapshot, locate
from stillframe.coordinator.starting import mismatches_with
from stillframe.errors import BuildError, StillframeError
from stillframe.graph.plan import Plan
from stillframe.protocol.fit import Evolves, Mismatch, in_words
from stillframe.runtime.scratch import scratch_directory

if TYPE_CHECKING:
    from stillframe.coordinator.query import Query


def inspect_against(arguments: argparse.Namespace) -> int:
    """0 if the job fits the snapshot, 1 if not."""
    job_file = Path(arguments.against)
    if not job_file.is_file():
        raise BuildError(f"there is no job file {job_file}: give the path of a PySpark script")
    rehearsal = _Rehearsal(arguments.path)
    try:
        _run(job_file, rehearsal, arguments)
    except StillframeError:
        raise
    except Exception as error:
        tell_where(error, job_file, is_debugging=arguments.debug)
        return 1
    plan, config, found = rehearsal.chosen(job_file)
    from stillframe.runtime.unfit_states import unfit_states

    allows = config.allow_non_restored_state or arguments.allow_non_restored_state
    wrong, changed = mismatches_with(plan, found, unfit_states, config, allows_gone=allows)
    if arguments.json:
        print(json.dumps(_as_json(plan, found, wrong, changed), ensure_ascii=False, indent=1))
    elif wrong:
        print(f"{found.place}: {in_words(found.manifest, wrong)}")
    else:
        print(f"{found.place}: {found.manifest.title} fits job {plan.job!r} of {job_file}")
        for each in changed:
            print(f"- {each}")
    return int(bool(wrong))


def _as_json(
    plan: Plan, found: LocatedSnapshot, wrong: tuple[Mismatch, ...], changed: list[Evolves]
) -> dict[str, Any]:
    return {
        "path": found.place,
        "job": plan.job,
        "fits": not wrong,
        "mismatches": [each.to_json() for each in wrong],
        "evolves": [each.to_json() for each in changed],
    }


class _Enough(BaseException):
    """The job that was looked for is there; the script need not go on."""


_ENDED: Mapping[str, Any] = {
    "isActive": False,
    "lastProgress": None,
    "recentProgress": [],
    "awaitTermination": lambda *_, **__: True,
    "processAllAvailable": lambda *_, **__: None,
    "stop": lambda *_, **__: None,
    "exception": lambda: None,
}


class _NotStarted:
    """What a script gets for a query that was not started: one that has ended."""

    def __getattr__(self, name: str) -> Any:
        if name not in _ENDED:
            raise _Enough  # whatever the script wants of a query that ran, it cannot have it
        return _ENDED[name]


class _Rehearsal:
    """Takes the plans of the jobs that a script would start."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._plans: list[tuple[Plan, JobConfig, LocatedSnapshot]] = []

    def look(self, plan: Plan, config: JobConfig) -> Query:
        found = locate(self._address, config.storage_settings)
        self._plans.append((plan, config, found))
        if plan.job == found.manifest.job:
            raise _Enough
        return cast("Query", _NotStarted())

    def chosen(self, job_file: Path) -> tuple[Plan, JobConfig, LocatedSnapshot]:
        if not self._plans:
            raise BuildError(f"{job_file} starts no job, so there is nothing to compare")
        last = self._plans[-1]
        if len(self._plans) > 1 and last[0].job != last[2].manifest.job:
            names = ", ".join(repr(plan.job) for plan, _, _ in self._plans)
            raise BuildError(
                f"{job_file} starts the jobs {names}, and {last[2].place} is of"
                f" {last[2].manifest.job!r}: give the one that is meant this queryName"
            )
        return last


def _run(job_file: Path, rehearsal: _Rehearsal, arguments: argparse.Namespace) -> None:
    """Run the script on Spark until its graph is built."""
    from stillframe.spark.deployment.environment import keep_jvm_output, prepare_spark
    from stillframe.spark.launch import rehearse

    # What was started before the script ends is what there is to look at.
    with suppress(_Enough, SystemExit), scratch_directory() as scratch:
        conf = {f"{SESSION_PREFIX}restPort": "off"}
        master = arguments.master or default_master()
        prepare_spark(master, conf, scratch, is_verbose=arguments.debug)
        if not arguments.debug:
            keep_jvm_output(scratch, pass_on=True)
        with rehearse(rehearsal.look, str(scratch / "spool")):
            run_as_main(job_file, arguments.job_arguments)
