"""Records on their way while a checkpoint is taken: how many bytes the history tells, and of whom.

The slot that gets one key stands still with it. What the other slot's source sends there waits: at
first in the queue of the receiver, then in that of the sender, until that source stands still too.
"""

from __future__ import annotations

import threading
from functools import partial

import pyarrow as pa
import pytest

from stillframe.connectors.discard import DiscardSink
from stillframe.coordinator.kept_history import read_history
from stillframe.graph.logical import Node, Process, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.key_groups import hash_columns, key_groups_of, subtask_of_key_group
from stillframe.protocol.statistics import vertex_id
from stillframe.storage.store import open_store
from stillframe.testing.functions import StandingAt
from stillframe.testing.sources import ScriptedSource, Wait

SCHEMA = pa.schema([("id", pa.int64())])
PARALLELISM, MAX_PARALLELISM = 2, 128
ROWS = 5_000
READ, STAND = vertex_id("read"), vertex_id("stand")


def key_of_subtask(subtask: int) -> int:
    """A key that comes to this one; no other record has it."""
    ids = pa.array(range(-100, 0), pa.int64())
    groups = key_groups_of(hash_columns([ids]), MAX_PARALLELISM)
    return next(
        key
        for key, group in zip(ids.to_pylist(), groups.tolist(), strict=True)
        if subtask_of_key_group(group, PARALLELISM, MAX_PARALLELISM) == subtask
    )


class Standing:
    """The job: the second slot stands still until `goes_on` is open, and then the first one's
    source has its batches to read."""

    def __init__(self, page_views, batches, **options):
        self.goes_on, self.stands = page_views.gate("goes-on"), page_views.gate("stands")
        self.ends = page_views.gate("ends")
        key = key_of_subtask(1)
        rows = [range(at * ROWS, (at + 1) * ROWS) for at in range(batches)]
        scripts = (
            (
                Wait(self.stands),
                *(pa.record_batch([list(ids)], schema=SCHEMA) for ids in rows),
                Wait(self.ends),
            ),
            (pa.record_batch([[key]], schema=SCHEMA), Wait(self.ends)),
        )
        read = Node(Read(ScriptedSource(SCHEMA, scripts)), SCHEMA, given_uid="read")
        make = partial(StandingAt, "id", key, self.goes_on, self.stands)
        stand = Node(Process(make, "stand", ("id",)), SCHEMA, (read,), given_uid="stand")
        write = Node(Write(DiscardSink()), SCHEMA, (stand,), given_uid="write")
        plan = build_plan("standing", [write], PARALLELISM)
        self.running = page_views.start(plan, checkpointInterval="1 hour", **options)
        self.location = page_views.location

    def checkpoint(self, until):
        """One that begins while the second slot stands still, and what is told of it later."""
        taken = []
        query = self.running.query
        asking = threading.Thread(target=lambda: taken.append(query.checkpoint()))
        asking.start()
        until(self.first_source_has_acknowledged)
        self.goes_on.open()
        asking.join(120)
        return query.checkpoint_statistics.checkpoint(*taken)

    def first_source_has_acknowledged(self):
        begun = self.running.query.checkpoint_statistics.history
        return bool(begun and begun[0].subtasks_of(READ))

    def finish(self):
        self.ends.open()
        self.running.finish()

    def kept(self):
        return read_history(open_store(self.location).below("standing")).statistics()


def test_an_unaligned_checkpoint_under_backpressure_tells_what_its_barriers_overtook(
    page_views, until
):
    options = {"unalignedCheckpoints": "true", "channelBufferBytes": "65536"}
    job = Standing(page_views, batches=40, **options)
    # Half of each batch, 20 kB, goes to the second slot: four fill its queue and the rest waits.
    job.running.wait_for_records(6 * ROWS)

    told = job.checkpoint(until)

    first, second = told.subtasks_of(READ)
    assert first.in_flight_bytes > 0, "what had not left"
    assert second.in_flight_bytes == 0, "its barrier had nothing in front of it"
    assert told.subtasks_of(STAND)[1].in_flight_bytes > 0, "what had come and was not processed"
    assert told.in_flight_bytes == sum(part.in_flight_bytes for part in told.subtasks)
    assert told.bytes_written >= told.in_flight_bytes
    shown = told.to_json(with_tasks=True)
    assert shown["checkpoint_type"] == "UNALIGNED_CHECKPOINT"
    assert shown["persisted_data"] == told.in_flight_bytes
    assert shown["tasks"][READ]["persisted_data"] == first.in_flight_bytes
    [alone, _] = told.task_to_json(READ)["subtasks"]
    assert alone["alignment"]["persisted"] == first.in_flight_bytes
    assert alone["unaligned_checkpoint"]
    job.finish()
    assert job.kept().checkpoint(told.checkpoint_id).subtasks == told.with_arrivals(0).subtasks


@pytest.mark.parametrize("mode", ["exactly-once", "at-least-once"])
def test_an_aligned_checkpoint_tells_what_was_processed_between_its_barriers(
    page_views, until, mode
):
    job = Standing(page_views, batches=5, checkpointMode=mode)
    job.running.wait_for_records(5 * ROWS)

    told = job.checkpoint(until)

    waited, stood = told.subtasks_of(STAND)
    # The barrier of the first source is there, the second source has not sent its own: it stands.
    half = 5 * ROWS * 8 // 2
    assert stood.processed_bytes == pytest.approx(half, rel=0.1)
    assert told.processed_bytes == waited.processed_bytes + stood.processed_bytes
    assert (told.in_flight_bytes, told.checkpoint_type) == (0, "CHECKPOINT")
    shown = told.to_json()
    assert shown["processed_data"] == told.processed_bytes
    [_, alone] = told.task_to_json(STAND)["subtasks"]
    assert alone["alignment"]["processed"] == stood.processed_bytes
    job.finish()
    assert job.kept().checkpoint(told.checkpoint_id).subtasks == told.with_arrivals(0).subtasks
