"""`stillframe demo`: a page-view job that kills its own slots and proves its counts."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import textwrap
import threading
import time
import traceback
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stillframe.cli.jobs import run_job_file
from stillframe.cli.kills import WAIT_SECONDS_MAX, Killer, planned_kills
from stillframe.cli.lines import Lines, in_one_sentence
from stillframe.cli.run import default_master
from stillframe.cli.signals import Ending
from stillframe.clock import SystemClock
from stillframe.coordinator.history import (
    CheckpointCommitted,
    Event,
    GuaranteeGiven,
    SlotsRunning,
)
from stillframe.rest.registry import registered_jobs
from stillframe.runtime.scratch import Scratch

if TYPE_CHECKING:
    from stillframe.cli.comparison import Comparison
    from stillframe.connectors.generate import ClickSource
    from stillframe.coordinator.query import Query

JOB = "page-views"
JOB_FILE = Path(__file__).with_name("page_views.py")

_SECONDS_PER_KILL = 1.5 + WAIT_SECONDS_MAX
"""How much of the input an attempt may use up before it is killed: its first checkpoint comes after
a second, or two on a busy machine."""
_SECONDS_AT_THE_END = 4.0
_SIGNAL_SECONDS_MAX = 60.0
_ANNOUNCED_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Demo:
    """What was asked for, and what follows from it."""

    records: int
    kills: int
    parallelism: int
    seed: int
    scratch: Scratch
    opens: bool = False
    """Whether its page is opened in a browser."""

    @property
    def directory(self) -> Path:
        return self.scratch.directory

    @property
    def master(self) -> str:
        return default_master(self.parallelism)

    @property
    def partitions(self) -> int:
        return max(4, self.parallelism)

    @property
    def records_per_second(self) -> float:
        """Slow enough that the job is still running when its last kill is due."""
        seconds = self.kills * _SECONDS_PER_KILL + _SECONDS_AT_THE_END
        return max(1.0, self.records) / seconds

    @property
    def arguments(self) -> list[str]:
        values = (self.records, self.records_per_second, self.partitions, self.seed)
        return [str(self.directory), *map(str, values)]

    @property
    def again(self) -> str:
        """The command that makes the same choices again."""
        options = ("records", "kills", "parallelism", "seed")
        said = [f"--{option}={getattr(self, option)}" for option in options]
        return shlex.join(["stillframe", "demo", *said])

    def source(self) -> ClickSource:
        """The input of the job file, described once more for the recount."""
        from stillframe.connectors.generate import ClickSource

        return ClickSource(records=self.records, partitions=self.partitions, seed=self.seed)


def demo(arguments: argparse.Namespace) -> int:
    """0 if the output is exact, 1 if it is not or cannot be known."""
    lines = Lines(as_json=arguments.json)
    chosen = Demo(
        records=arguments.records,
        kills=arguments.kills,
        parallelism=arguments.parallelism,
        seed=random.randrange(1_000_000) if arguments.seed is None else arguments.seed,
        scratch=Scratch(purpose="demo"),
        opens=arguments.open,
    )
    try:
        return 0 if _prove(chosen, lines, is_debugging=arguments.debug) else 1
    finally:
        chosen.scratch.remove()


def _prove(chosen: Demo, lines: Lines, *, is_debugging: bool) -> bool:
    _introduce(chosen, lines)
    kills = planned_kills(chosen.kills, chosen.seed)
    killer = Killer(kills, SystemClock(), lambda slot, pid: _say_killed(lines, slot, pid))

    def follow(query: Query) -> None:
        query.add_listener(partial(_say_event, lines))
        query.add_listener(killer.on_event)
        if chosen.opens:
            query.add_listener(partial(_open_page, lines))
        killer.start()

    try:
        _run(chosen, follow)
        lines.say(
            "recount",
            f"recounting {chosen.records} clicks with Spark SQL and comparing them with the output",
        )
        return _conclude(chosen, _compare(chosen), killer.done, lines)
    except Exception as error:
        # Whatever it is, the proof has not been given, and the last line has to say so.
        if is_debugging:
            traceback.print_exc()
        return _say_failed(chosen, in_one_sentence(error), lines)


def _introduce(chosen: Demo, lines: Lines) -> None:
    script = textwrap.indent(JOB_FILE.read_text(), "    ")
    lines.for_people(f"This is the job, {JOB_FILE.name}, an ordinary PySpark script:\n\n{script}")
    lines.say(
        "start",
        f"starting Spark ({chosen.master}) for {chosen.records} records on {chosen.parallelism}"
        f" slots, {chosen.kills} of which will be killed, seed {chosen.seed}",
        records=chosen.records,
        kills=chosen.kills,
        parallelism=chosen.parallelism,
        seed=chosen.seed,
        master=chosen.master,
        directory=str(chosen.directory),
    )


def _run(chosen: Demo, follow: Callable[[Query], None]) -> None:
    from stillframe.spark.deployment.environment import jvm_pid, keep_jvm_output, prepare_spark

    conf = {
        "spark.ui.enabled": "false",
        "spark.stillframe.parallelism": str(chosen.parallelism),
        # Enough for kills in quick succession, before a checkpoint of the next attempt.
        "spark.stillframe.restartAttempts": str(chosen.kills + 10),
        "spark.stillframe.restartDelay": "100 ms",
        "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 1)),
        "spark.sql.warehouse.dir": str(chosen.directory / "warehouse"),
    }
    prepare_spark(chosen.master, conf, chosen.directory, is_verbose=False)
    keep_jvm_output(chosen.directory, pass_on=False)
    ending = Ending("stop", _SIGNAL_SECONDS_MAX, None, jvm_pid, chosen.scratch.remove)
    run_job_file(JOB_FILE, chosen.arguments, follow, ending)


def _compare(chosen: Demo) -> Comparison:
    import stillframe
    from stillframe.cli.comparison import compare
    from stillframe.spark.deployment.environment import open_session

    still = stillframe.on(open_session(JOB))
    return compare(still, chosen.source(), chosen.directory, JOB)


def _say_event(lines: Lines, event: Event) -> None:
    # That a completed checkpoint is committed as well is for machines: it doubles the lines. And
    # what the guarantee is, people are shown by the comparison at the end.
    if lines.as_json or not isinstance(event, CheckpointCommitted | GuaranteeGiven):
        lines.say_event(event)


def _open_page(lines: Lines, event: Event) -> None:
    """When the first slots run the driver is about to be announced."""
    if isinstance(event, SlotsRunning) and event.attempt == 1:
        threading.Thread(target=_open_when_announced, args=(lines,), daemon=True).start()


def _open_when_announced(lines: Lines) -> None:
    deadline = time.monotonic() + _ANNOUNCED_SECONDS_MAX
    while time.monotonic() < deadline:
        for job in registered_jobs():
            if job.pid == os.getpid() and job.name == JOB:
                # The token is for the browser alone: in the fragment, which is sent to nobody.
                address = f"{job.url}/#token={job.token}"
                lines.say("page", f"its page is {address}", url=job.url)
                webbrowser.open(address)
                return
        threading.Event().wait(0.1)


def _say_killed(lines: Lines, slot: int, pid: int) -> None:
    lines.say("kill", f"kill -9 slot {slot} (pid {pid})", slot=slot, pid=pid)


def _conclude(chosen: Demo, found: Comparison, kills_done: int, lines: Lines) -> bool:
    for difference in found.differences:
        lines.say("difference", difference)
    if found.is_exact and kills_done < chosen.kills:
        return _say_failed(
            chosen,
            f"the output is exact, but the job ended after {kills_done} of {chosen.kills} kills:"
            " run it once more on a less busy machine",
            lines,
        )
    counted = (
        f"{found.records} records, {found.apps} apps, {kills_done} kills survived,"
        f" {found.lost} lost, {found.duplicated} duplicated"
    )
    if not found.is_exact:
        wrong = f", {len(found.differences)} differences told above" if found.differences else ""
        return _say_failed(chosen, counted + wrong, lines)
    lines.say(
        "verdict",
        f"exactly-once: PASS  {counted}",
        verdict="PASS",
        records=found.records,
        apps=found.apps,
        kills=kills_done,
        lost=found.lost,
        duplicated=found.duplicated,
    )
    return True


def _say_failed(chosen: Demo, why: str, lines: Lines) -> bool:
    """Always False, the demo's answer."""
    chosen.scratch.keep()
    lines.say(
        "kept",
        f"everything is kept in {chosen.directory}, Spark's log in spark.log; to see it"
        f" again: {chosen.again}",
        directory=str(chosen.directory),
        command=chosen.again,
    )
    lines.say("verdict", f"exactly-once: FAIL  {why}", verdict="FAIL", why=why)
    return False
