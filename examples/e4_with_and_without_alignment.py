"""Page views per app from two partitions: what alignment is for.

    partition 0 ──▶ TaskA0 ──┬──▶ TaskB0 counts app0
                             ╳
    partition 1 ──▶ TaskA1 ──┴──▶ TaskB1 counts app1

Checkpoint 100 is taken while the process of TaskA0 stands still. TaskA1 sends its barrier at offset
10005, and 195 records after it; 45 of them are views of app1. TaskB1 has the barrier of TaskA1 and
waits for the one of TaskA0.

With alignment it holds the 195 records back: checkpoint 100 has app1 = 12005, which is just what
lies before the offsets 10000 and 10005. Without, it counts them: checkpoint 100 has app1 = 12050.
After a crash the job reads on from offset 10005, and counts those 45 a second time.

    stillframe run --quiet examples/e4_with_and_without_alignment.py -- \\
        --bootstrap-servers localhost:9092

or `make e4`, which starts a broker.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from page_view_topics import (
    WAIT_SECONDS_MAX,
    in_words,
    line,
    look_into,
    restored_from,
    running,
    session_and_servers,
    take_99_checkpoints,
)

BEFORE = (
    [line("app0")] * 4000 + [line("app1")] * 6000,
    [line("app0")] * 4000 + [line("app1")] * 6005,
)
"""By partition: together 8000 views of app0 and 12005 of app1."""
AFTER = [line("app1")] * 45 + [line("app1", event="click")] * 150
"""In partition 1, behind its barrier: 195 records. TaskA1 lets only views pass."""


def run(spark, servers, mode, say=print):
    """What checkpoint 100 holds, from which one the job restarted, and what the next one holds."""
    options = {
        "checkpointMode": mode,
        "parallelism": 2,
        "maxParallelism": 256,  # so that app0 belongs to TaskB0, and app1 to TaskB1
    }
    with running(spark, servers, 2, f"e4-{mode}", **options) as (query, topics):
        say(f"checkpointMode is {mode}")
        for partition, lines in enumerate(BEFORE):
            topics.send(lines, partition)
        topics.await_counts({"app0": 8_000, "app1": 12_005})
        take_99_checkpoints(query)
        until(lambda: query.summary.records_in == 20_005)

        with ThreadPoolExecutor(1) as beside, standing_still(query.slot_pids[0]):
            hundredth = beside.submit(query.checkpoint)
            until(lambda: has_sent_its_barrier(query, source=1))
            topics.send(AFTER, partition=1)
            until(lambda: query.summary.records_in == 20_200)
            if mode == "at-least-once":
                topics.await_counts({"app0": 8_000, "app1": 12_050})
            say(f"TaskA0 stands still, TaskA1 is at offset 10200: {in_words(topics.shown)}")
        before = look_into(query, hundredth.result(WAIT_SECONDS_MAX))
        say(before)

        topics.await_counts({"app0": 8_000, "app1": 12_050})
        topics.shown.clear()
        os.kill(query.slot_pids[1], signal.SIGKILL)
        say("a worker is killed")
        topics.await_counts({"app1": before.counts["app1"] + 45})
        restored = restored_from(query)
        say(f"the job has restarted from checkpoint {restored}")
        after = look_into(query, query.checkpoint())
        say(after)
    return before, restored, after


@contextmanager
def standing_still(process):
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def has_sent_its_barrier(query, source):
    """Whether this source has acknowledged the checkpoint that is under way."""
    newest = query.checkpoint_statistics.history[0]
    return newest.status == "IN_PROGRESS" and any(s.index == source for s in newest.subtasks)


def until(is_so):
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


if __name__ == "__main__":
    session, given_servers = session_and_servers("e4")
    for each in ("exactly-once", "at-least-once"):
        run(session, given_servers, each)
