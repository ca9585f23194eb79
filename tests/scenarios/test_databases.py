"""Page views into a database on plain processes: slots and the server itself are killed."""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from functools import partial
from random import Random

import pyarrow as pa
import pytest
from database_servers import PASSWORD

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.database_sink import jdbc_from_options
from stillframe.coordinator.history import AttemptFailed
from stillframe.errors import StillframeError
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.options import Options
from stillframe.testing.sources import ScriptedSource, Wait

pytestmark = pytest.mark.database

COUNTS = pa.schema([("app_id", pa.string()), ("count", pa.int64())])


@pytest.fixture(params=["postgres", "mariadb"])
def server(request):
    return request.getfixturevalue(request.param)


class Clicks:
    """A table that gets clicks one by one and one that gets their counts."""

    def __init__(self, server, page_views, steps=3):
        """Some come when the job starts, and more when each of the gates is opened."""
        self.server = server
        self.gates = [page_views.gate(f"gate-{step}") for step in range(steps)]
        scripts = []
        for split in range(4):
            script = page_views.batches(split * 100_000, 10)
            for step, gate in enumerate(self.gates, 1):
                script += [Wait(gate), *page_views.batches(split * 100_000 + step * 1_000, 10)]
            scripts.append(tuple(script))
        self.source = ScriptedSource(page_views.batch(0).schema, tuple(scripts))
        self.ids = [split * 100_000 + n for split in range(4) for n in range(1_000 * (steps + 1))]
        name = f"t_{uuid.uuid4().hex[:12]}"
        self.clicks, self.counts = f"{name}_clicks", f"{name}_counts"
        for sink in self.sinks():
            sink.check_start()

    def plan(self, parallelism=2):
        source = self.source
        read = Node(Read(source), source.schema, given_uid="clicks")
        call = AggregateCall("count", None, "count", pa.int64())
        counted = Node(Aggregate(("app_id",), (call,)), COUNTS, (read,), given_uid="count")
        added, replaced = self.sinks()
        ends = [
            Node(Write(added), source.schema, (read,), given_uid="write-clicks"),
            Node(Write(replaced), COUNTS, (counted,), given_uid="write-counts"),
        ]
        return build_plan("page-views", ends, parallelism)

    def sinks(self):
        added = self.sink(self.clicks, self.source.schema)
        return added, self.sink(self.counts, COUNTS, upsertKeys="app_id")

    def sink(self, table, schema, **options):
        given = {
            "url": f"jdbc:{self.server.url}",
            "user": {"postgres": "postgres", "mysql": "root"}[self.server.dialect],
            "password": PASSWORD,
            "dbtable": table,
            "createTable": "true",
            **options,
        }
        return jdbc_from_options(Options("the sink jdbc", given), schema)

    def check_each_is_there_once(self):
        rows = self.server.execute(f"select id, app_id from {self.clicks}")
        assert sorted(id for id, _ in rows) == self.ids
        counts = dict(self.server.execute(f"select app_id, count from {self.counts}"))
        assert counts == Counter(app for _, app in rows)


def start(page_views, clicks, **options):
    given = {"checkpointInterval": "150 ms", "restartAttempts": "100", **options}
    return page_views.start(clicks.plan(), partial(clicks.plan), **given)


@pytest.mark.slow
def test_kills_of_slots_and_server_and_rescales_lose_and_double_nothing(page_views, server):
    random, clicks = Random(7), Clicks(server, page_views)
    running = start(page_views, clicks)
    for step, parallelism in enumerate((4, 1, 3)):
        running.next_checkpoint()
        running.kill_any(random)
        if step != 1:
            server.kill()
            server.start()
        with contextlib.suppress(StillframeError):  # a kill may come in its way
            running.query.rescale(parallelism, timeout=90)
        clicks.gates[step].open()
        running.kill_any(random)
    running.finish()

    clicks.check_each_is_there_once()
    left = {file.name.partition("-")[0] for file in page_views.home.rglob("prepared/*/*")}
    assert left <= {"marked"}, "nothing is left behind but notes of the marks"
    assert len(running.attempts()) > 3


def test_while_the_server_is_away_the_job_waits_and_goes_on(page_views, server, until):
    clicks = Clicks(server, page_views, steps=1)
    running = start(page_views, clicks)
    running.next_checkpoint()
    server.kill()
    clicks.gates[0].open()
    try:
        until(lambda: any("cannot be reached" in each for each in running.query.trouble))
        assert any(server.address in each for each in running.query.trouble)
        assert not any(PASSWORD in each for each in running.query.trouble)
    finally:
        server.start()
    running.finish()

    clicks.check_each_is_there_once()
    assert not [event for event in running.told if isinstance(event, AttemptFailed)]
