"""What is measured of jobs that are slow on purpose: who works, who waits, and what is said."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pytest

from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.graph.logical import MapInArrow, Node, Read, Write
from stillframe.graph.plan import build_plan

SOURCE = ClickSource(records=None, partitions=2, apps=50)


def slowly(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        time.sleep(0.02)
        yield batch


def at_once(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def plan(middle, last):
    """Two sources, then two functions of one subtask each: in tasks of their own."""
    read = Node(Read(SOURCE), SOURCE.schema, given_uid="clicks")
    first = Node(MapInArrow(middle, "middle"), SOURCE.schema, (read,), parallelism=1)
    second = Node(MapInArrow(last, "last"), SOURCE.schema, (first,), parallelism=2)
    write = Node(Write(DiscardSink()), SOURCE.schema, (second,), given_uid="nowhere")
    return build_plan("slow", [write], 2)


@pytest.mark.parametrize(
    ("middle", "last", "blamed"), [(slowly, at_once, "middle"), (at_once, slowly, "last")]
)
def test_the_task_that_others_wait_for_is_the_bottleneck_and_not_the_one_that_waits(
    page_views, until, middle, last, blamed
):
    running = page_views.start(plan(middle, last), checkpointInterval="1 hour")

    def said():
        return running.query.diagnosis("RUNNING")

    until(lambda: said().code == "bottleneck" and blamed in str(said().arguments["task"]))

    waited = [
        subtask.shares.backpressured
        for told in running.query.measured.values()
        for subtask in told.subtasks
        if subtask.task == 0
    ]
    assert max(waited) > 0, "also the sources, and are not blamed"
