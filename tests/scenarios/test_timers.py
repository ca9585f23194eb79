"""Timers of a function while slots die: each fires once, also those of a burst under way."""

from collections import Counter
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.connectors.file_sink import FileSink
from stillframe.coordinator.history import AttemptStarted
from stillframe.graph.logical import Node, Process, Read, WithWatermark, Write
from stillframe.graph.plan import build_plan
from stillframe.testing.functions import GatedAlarm
from stillframe.testing.sources import ScriptedSource, Wait

SCHEMA = pa.schema([("user", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
FIRED = pa.schema([("user", pa.int64()), ("time", pa.timestamp("us", "UTC"))])
USERS = 20_000


def records(first, count, then=None):
    """Of so many users, each at the time that is its number; of one more at a time of its own."""
    users, times = [*range(first, first + count)], [*range(first, first + count)]
    if then is not None:
        users, times = [*users, then[0]], [*times, then[1]]
    at = pa.array(times).cast(SCHEMA.field("at").type)
    return pa.record_batch([pa.array(users), at], schema=SCHEMA)


def plan_of(page_views, source, burst_gate, parallelism=2):
    make = partial(GatedAlarm, "at", USERS // 2, burst_gate)
    read = Node(Read(source), SCHEMA, given_uid="users")
    timed = Node(WithWatermark("at", 0), SCHEMA, (read,), given_uid="time")
    alarm = Node(Process(make, "alarm", ("user",)), FIRED, (timed,), given_uid="alarm")
    sink = FileSink(str(page_views.home / "fired"), "parquet", FIRED)
    write = Node(Write(sink), FIRED, (alarm,), given_uid="write")
    return build_plan("alarms", [write], parallelism)


def fired_users(page_views):
    return Counter(pq.read_table(page_views.home / "fired")["user"].to_pylist())


@pytest.mark.parametrize(
    "mode", [{}, {"unalignedCheckpoints": "true"}, {"checkpointMode": "stop-the-world"}], ids=str
)
@pytest.mark.parametrize("parallelism_after", [2, 3])
def test_a_checkpoint_in_the_middle_of_a_burst_and_a_kill_lose_and_double_no_timer(
    page_views, mode, parallelism_after
):
    burst, rest = page_views.gate("burst"), page_views.gate("rest")
    scripts = [
        (
            # Event time passes them all at once: no record stands between it and a barrier.
            records(split * USERS // 2, USERS // 2, then=(USERS + split, 10**9)),
            Wait(rest),
            records(0, 0, then=(USERS + 2 + split, 2 * 10**9)),
        )
        for split in range(2)
    ]
    source = ScriptedSource(SCHEMA, tuple(scripts))

    running = page_views.start(plan_of(page_views, source, burst), **mode)
    running.wait_for_records(USERS + 2)
    running.next_checkpoint()
    checkpoint = running.next_checkpoint()  # the burst does not end before the gate is open
    if parallelism_after == 2:
        running.kill(slot=0)
        second = running.wait(AttemptStarted, attempt=2)
    else:
        running.query.stop()
        running = page_views.start(plan_of(page_views, source, burst, 3), **mode)
        second = running.wait(AttemptStarted)
    assert second.restored_from is not None
    assert second.restored_from >= checkpoint.checkpoint_id
    assert set(fired_users(page_views)) <= set(range(USERS // 2))
    burst.open()
    rest.open()
    running.finish()

    assert fired_users(page_views) == Counter(range(USERS + 4))


def test_what_the_end_of_records_fires_is_interrupted_and_resumed_as_well(page_views):
    burst = page_views.gate("burst")
    scripts = [(records(split * USERS // 2, USERS // 2),) for split in range(2)]
    source = ScriptedSource(SCHEMA, tuple(scripts))

    running = page_views.start(plan_of(page_views, source, burst))
    running.wait_for_records(USERS)
    running.next_checkpoint()
    running.next_checkpoint()
    running.kill(slot=1)
    running.wait(AttemptStarted, attempt=2)
    burst.open()
    running.finish()

    assert fired_users(page_views) == Counter(range(USERS))
