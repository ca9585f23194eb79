"""Runs a job file in this process, as `spark-submit` would, and knows the queries it starts."""

from __future__ import annotations

import runpy
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stillframe.coordinator.query import Query


def run_job_file(path: Path, arguments: Sequence[str], follow: Callable[[Query], None]) -> None:
    """Run the script to its end, and then the queries it has left running.

    `follow` is told of every query before its job begins. What the script raises comes out, and so
    does the failure of a query that nobody has waited for. Ctrl-C stops the queries in good order.
    """
    from stillframe.spark.launch import observe_starts

    queries: list[Query] = []

    def note(query: Query) -> None:
        queries.append(query)
        _take_back_interrupts()
        follow(query)

    observe_starts(note)
    try:
        _run_as_main(path, arguments)
        for query in queries:
            query.awaitTermination()
    except KeyboardInterrupt:
        for query in queries:
            query.stop()
        raise


def _run_as_main(path: Path, arguments: Sequence[str]) -> None:
    before = sys.argv, sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def _take_back_interrupts() -> None:
    """PySpark answers Ctrl-C by cancelling every Spark job, which would kill the slots at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
