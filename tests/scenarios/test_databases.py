"""Page views into a database on plain processes: slots, the driver and the server are killed."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from contextlib import closing
from random import Random

import pytest
from database_jobs import ClicksToTables
from database_servers import PASSWORD
from driven_jobs import IS_LONG, KILLS, SEED, on_plain_processes

from stillframe.coordinator.history import AttemptFailed
from stillframe.testing.sources import ScriptedSource, Wait

pytestmark = pytest.mark.database


@pytest.fixture(params=["postgres", "mariadb", *(["mysql"] if IS_LONG else [])])
def server(request):
    return request.getfixturevalue(request.param)


class Clicks:
    """A table that gets clicks one by one and one that gets their counts."""

    def __init__(self, server, page_views, steps, **login):
        """Some come when the job starts, and more when each of the gates is opened."""
        self.server = server
        self.gates = [page_views.gate(f"gate-{step}") for step in range(steps)]
        scripts = []
        for split in range(4):
            script = page_views.batches(split * 100_000, 10)
            for step, gate in enumerate(self.gates, 1):
                script += [Wait(gate), *page_views.batches(split * 100_000 + step * 1_000, 10)]
            scripts.append(tuple(script))
        source = ScriptedSource(page_views.batch(0).schema, tuple(scripts))
        self.ids = [split * 100_000 + n for split in range(4) for n in range(1_000 * (steps + 1))]
        name = f"t_{uuid.uuid4().hex[:12]}"
        self.clicks, self.counts = f"{name}_clicks", f"{name}_counts"
        login = {"user": {"postgres": "postgres", "mysql": "root"}[server.dialect], **login}
        self.plan = ClicksToTables(source, server.url, self.clicks, self.counts, **login)
        for sink in self.plan.sinks():
            sink.check_start()

    def check_each_is_there_once(self):
        """By the server's own client."""
        rows = [line.split("\t") for line in self.server.asked(f"select * from {self.clicks}")]
        assert sorted(int(id) for id, _ in rows) == self.ids
        told = [line.split("\t") for line in self.server.asked(f"select * from {self.counts}")]
        assert {app: int(count) for app, count in told} == Counter(app for _, app in rows)


def start(page_views, clicks, **options):
    given = {"checkpointInterval": "150 ms", "restartAttempts": "100", **options}
    return page_views.start(clicks.plan(2), clicks.plan, **given)


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * KILLS)
def test_kills_of_slots_driver_and_server_and_rescales_lose_and_double_nothing(
    page_views, server, tmp_path
):
    random, clicks = Random(SEED), Clicks(server, page_views, steps=KILLS + 1)
    tables = server.tables()
    with closing(on_plain_processes(tmp_path, "page-views", clicks.plan)) as job:
        job.start(2)
        *gates, last = clicks.gates
        for gate, victim, held in zip(gates, *drawn(random, clicks), strict=True):
            if random.random() < 0.7:  # else while it restarts
                job.next_checkpoint()
            if held:
                kill_between_stage_and_commit(server, job, gate, held)
            gate.open()
            job.kill(victim, random)
            if victim == "driver":
                job.start(random.randint(1, 4))
            elif random.random() < 0.5:
                job.ask(random.randint(1, 4))
        last.open()
        job.finish()

    clicks.check_each_is_there_once()
    assert job.left_behind() == set(), "nothing is left behind but notes of the marks"
    assert server.tables() == tables


def drawn(random, clicks):
    """Who is killed at each step, and of every second one also the server, and what it is asked to
    lock so that the commit waits: marks before it begins, a table in the middle of it."""
    victims = random.sample(["slot", "driver"] * (KILLS // 2), KILLS)
    locks = [None, "stillframe_marks", None, clicks.clicks] * (KILLS // 4)
    return victims, locks


def kill_between_stage_and_commit(server, job, gate, held):
    with server.locked(held):
        gate.open()
        job.wait_until(server.waits_for_a_lock)
        server.kill()
    server.start()


@pytest.mark.parametrize("away_seconds", [0, pytest.param(30, marks=pytest.mark.soak)])
def test_while_the_server_is_away_the_job_waits_and_goes_on(
    page_views, server, until, away_seconds
):
    clicks = Clicks(server, page_views, steps=1)
    running = start(page_views, clicks)
    running.next_checkpoint()
    server.kill()
    clicks.gates[0].open()
    try:
        until(lambda: any("cannot be reached" in each for each in running.query.trouble))
        assert any(server.address in each for each in running.query.trouble)
        assert not any(PASSWORD in each for each in running.query.trouble)
        threading.Event().wait(away_seconds)
    finally:
        server.start()
    running.finish()

    clicks.check_each_is_there_once()
    assert not [event for event in running.told if isinstance(event, AttemptFailed)]


def test_a_password_that_expires_ends_an_attempt_and_the_next_takes_the_one_that_renews_it(
    page_views, server, until
):
    secret = page_views.home / "secret"
    secret.write_text("the-first-one")
    user = server.new_user("the-first-one")
    clicks = Clicks(server, page_views, steps=1, user=user, password=f"file:{secret}")
    running = start(page_views, clicks, restartDelay="500 ms")
    running.next_checkpoint()
    server.change_password(user, "the-next-one")
    clicks.gates[0].open()
    failed = running.wait(AttemptFailed)
    secret.write_text("the-next-one")
    running.finish()

    clicks.check_each_is_there_once()
    assert "refuses what the sink for table" in failed.reason
    assert not any("-one" in str(event) for event in running.told)
