"""The driver of the playground's job: a process of its own that keeps its Spark session.

    python -m stillframe.playground.driver MASTER DIRECTORY JOB.py

Each line of its input is a JSON object that the job is started with; what happens it tells in lines
of JSON. A change of mode or version starts the job again, not Spark. When its input ends, because
the supervisor has ended in whatever way, it ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from stillframe.cli.jobs import run_as_main
from stillframe.cli.lines import Lines, in_one_sentence
from stillframe.coordinator.history import event_log
from stillframe.errors import StillframeError
from stillframe.playground.driver_process import QUICK_JVM

if TYPE_CHECKING:
    from stillframe.coordinator.query import Query

_STOP_SECONDS_MAX = 10.0


def main(master: str, directory: Path, job: Path) -> None:
    from stillframe.spark.deployment.environment import end_spark, prepare_spark
    from stillframe.spark.launch import observe_starts

    lines = Lines(as_json=True, out=_own_output())
    event_log.disabled = True
    running: list[Query] = []

    def follow(query: Query) -> None:
        running.append(query)
        query.add_listener(lines.say_event)
        threading.Thread(target=_tell_end, args=(query, lines), daemon=True).start()

    conf = {
        "spark.ui.enabled": "false",
        "spark.python.daemon.module": "stillframe.spark.daemon",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.local.dir": str(directory / "local"),
        "spark.executor.extraJavaOptions": QUICK_JVM,
        # A slot that is killed is no reason to look for another machine.
        "spark.excludeOnFailure.enabled": "false",
        "spark.deploy.maxExecutorRetries": "-1",
    }
    prepare_spark(master, conf, directory, is_verbose=False)
    observe_starts(follow)
    lines.say("ready", "the driver is ready", pid=os.getpid())
    for line in sys.stdin:
        _start(job, json.loads(line), lines)
    for query in running:
        if query.isActive:
            with contextlib.suppress(StillframeError):  # Spark is ended in any case
                query.cancel(_STOP_SECONDS_MAX)
    end_spark()


def _own_output() -> TextIO:
    """Lines of ours alone: whatever else prints, prints to the log."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours


def _start(job: Path, given: dict[str, Any], lines: Lines) -> None:
    try:
        run_as_main(job, [json.dumps(given)])
    except Exception as error:  # the supervisor has to hear of whatever it is
        lines.say("refused", in_one_sentence(error))


def _tell_end(query: Query, lines: Lines) -> None:
    try:
        query.awaitTermination()
        lines.say("ended", "the job has ended", failure=None)
    except Exception as error:
        lines.say("ended", str(error), failure=in_one_sentence(error))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
