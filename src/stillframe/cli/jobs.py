"""Runs a job file in this process, as `spark-submit` would, and knows the queries it starts."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stillframe.cli.signals import Ending
from stillframe.coordinator.history import event_log

if TYPE_CHECKING:
    from stillframe.coordinator.query import Query


def run_job_file(
    path: Path,
    arguments: Sequence[str],
    follow: Callable[[Query], None],
    ending: Ending,
    *,
    logs_events: bool = False,
) -> None:
    """Run the script to its end, and then the queries it has left running.

    `follow` is told of every query before its job begins. What the script raises comes out, and so
    does the failure of a query that nobody has waited for. A signal ends the queries as `ending`
    knows, and then this by `Interrupted`. Events are logged only if `logs_events`.
    """
    from stillframe.spark.launch import observe_starts

    queries: list[Query] = []

    def note(query: Query) -> None:
        ending.follow(query)
        queries.append(query)
        follow(query)

    event_log.disabled = not logs_events  # `follow` shows them
    observe_starts(note)
    with ending.listening():
        run_as_main(path, arguments)
        ending.interrupt_if_asked()
        for query in queries:
            query.awaitTermination()
        ending.interrupt_if_asked()


def run_as_main(path: Path, arguments: Sequence[str]) -> None:
    """Run the script, and nothing but the script."""
    before = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
