"""Page views per app from a topic of one partition: a crash between two checkpoints.

Checkpoint 100 holds partition 0 at offset 1000, and the counts at just that offset: app1 = 50000,
app2 = 10000. The job works on to offset 1100, app1 = 50080, app2 = 10020. Then its worker is
killed: that work is in no checkpoint, and lost. The job goes back to checkpoint 100, does it again,
and the counts end exact. With a broker of your own:

    stillframe run --quiet examples/e3_page_views_from_kafka.py -- \\
        --bootstrap-servers localhost:9092

or `make e3`, which starts one.
"""

import os
import signal

from page_view_topics import (
    in_words,
    line,
    look_into,
    restored_from,
    running,
    session_and_servers,
    take_99_checkpoints,
)

THOUSAND = [[line("app1")] * 50 + [line("app2")] * 10] * 1000
"""A thousand records of sixty views each."""
HUNDRED = [line("app1")] * 80 + [line("app2")] * 20
"""A hundred records of one view each."""
AT_1000 = {"app1": 50_000, "app2": 10_000}
AT_1100 = {"app1": 50_080, "app2": 10_020}


def run(spark, servers, say=print):
    """What checkpoint 100 holds, from which one the job restarted, and what the next one holds."""
    with running(spark, servers, 1, "e3", parallelism=1) as (query, topics):
        topics.send(THOUSAND)
        take_99_checkpoints(query)
        topics.await_counts(AT_1000)
        before = look_into(query, query.checkpoint())
        say(before)

        topics.send(HUNDRED)
        topics.await_counts(AT_1100)
        say(f"the job has worked on: {in_words(topics.shown)}")
        topics.shown.clear()
        os.kill(query.slot_pids[0], signal.SIGKILL)
        say("its worker is killed, and that work is lost")

        topics.await_counts(AT_1100)
        restored = restored_from(query)
        say(f"the job has restarted from checkpoint {restored} and done it again")
        after = look_into(query, query.checkpoint())
        say(after)
    return before, restored, after


if __name__ == "__main__":
    run(*session_and_servers("e3"))
