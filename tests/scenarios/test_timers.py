"""Timers of a function while slots die or the job stops: each fires once, also in a burst."""

import threading
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
from stillframe.testing.sinks import GatedSink
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


def plan_of(page_views, source, burst_gate, parallelism=2, around=lambda sink: sink):
    make = partial(GatedAlarm, "at", USERS // 2, burst_gate)
    read = Node(Read(source), SCHEMA, given_uid="users")
    timed = Node(WithWatermark("at", 0), SCHEMA, (read,), given_uid="time")
    alarm = Node(Process(make, "alarm", ("user",)), FIRED, (timed,), given_uid="alarm")
    sink = around(FileSink(str(page_views.home / "fired"), "parquet", FIRED))
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


@pytest.mark.parametrize("mode", [{}, {"unalignedCheckpoints": "true"}], ids=str)
def test_a_job_that_stops_with_a_savepoint_amid_a_burst_shows_no_timer_twice(
    page_views, until, mode
):
    """What has not fired at the savepoint's barrier fires in the job that starts from it."""
    burst, never = page_views.gate("burst"), page_views.gate("never")
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    scripts = [
        (records(split * USERS // 2, USERS // 2, then=(USERS + split, 10**9)), Wait(never))
        for split in range(2)
    ]
    source = ScriptedSource(SCHEMA, tuple(scripts))
    plan = plan_of(
        page_views, source, burst, around=lambda sink: GatedSink(sink, prepare, None, reached)
    )
    running = page_views.start(plan, checkpointInterval="1 hour", **mode)
    running.wait_for_records(USERS + 2)
    savepoint = str(page_views.home / "savepoint")
    stopping = threading.Thread(target=lambda: running.query.stop(savepoint=savepoint))
    stopping.start()
    until(lambda: reached.is_open)
    burst.open()  # behind the savepoint's barrier the rest is free to fire
    prepare.open()
    stopping.join(120)
    shown = fired_users(page_views)
    never.open()

    page_views.home = page_views.home / "elsewhere"
    page_views.home.mkdir()
    page_views.location = str(page_views.home / "chk")
    other = plan_of(page_views, source, burst, parallelism=3)
    page_views.start(other, restoreFrom=savepoint, stateBackend="rocksdb").finish()

    assert shown + fired_users(page_views) == Counter(range(USERS + 2))
