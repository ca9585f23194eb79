"""Clicks into files and tables of a bucket, and into files on HDFS: slots, the driver and the
storage are killed, every second time the storage too, between stage and commit. Only `make soak`
has the time for it; of each kind there is something shorter in `make test`.
"""

from __future__ import annotations

import uuid
from contextlib import closing
from random import Random

import pytest
from bucket_files import ids_of
from driven_jobs import KILLS, SEED, on_plain_processes
from gateway import Gateway
from lake_jobs import (
    Bucket,
    ClicksToDelta,
    ClicksToFiles,
    ClicksToIceberg,
    ClicksToLoggedFiles,
    Directory,
)

from stillframe.testing.s3_node import ACCESS_KEY, SECRET_KEY, versitygw
from stillframe.testing.sources import ScriptedSource, Wait


class InBucket:
    """A bucket of a server that is killed, and the way to it."""

    def __init__(self, server):
        self._server, self._way = server, Gateway(server.port)
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        server.make_bucket(name)
        self.place = f"s3://{name}"
        self.settings = {
            "fs.s3a.endpoint": self._way.url,
            "fs.s3a.access.key": ACCESS_KEY,
            "fs.s3a.secret.key": SECRET_KEY,
            "fs.s3a.endpoint.region": "us-east-1",
            "fs.s3a.connection.request.timeout": "5s",
        }
        self.found = Bucket(server.url, name, ACCESS_KEY, SECRET_KEY)

    def die_between_stage_and_commit(self, job, gate, commits, random):
        """Before the server has got that request, or when it has done what it says."""
        way = self._way
        is_done = random.random() < 0.5
        way.stall_from(commits) if is_done else way.hold(commits)
        gate.open()
        job.wait_until((way.stalled if is_done else way.held).is_set)
        self._server.kill()
        way.lose_answers(1_000_000)  # those that it gave before it died
        way.flow()
        self._server.start()
        way.lose_answers(0)

    def close(self):
        self._way.end()


class InHdfs:
    """A directory of a cluster that is killed, at any moment."""

    def __init__(self, cluster, place):
        self._cluster, self.place, self.settings = cluster, place, {}
        self.found = Directory(cluster, place.removeprefix(cluster.url))

    def die_between_stage_and_commit(self, job, gate, commits, random):
        gate.open()
        job.next_checkpoint()
        self._cluster.kill()
        self._cluster.start()

    def close(self):
        """There is nothing open."""


@pytest.fixture
def lake(request):
    if request.param == "bucket":
        made = InBucket(request.getfixturevalue("keeping_s3"))
    else:
        made = InHdfs(request.getfixturevalue("hdfs"), request.getfixturevalue("hdfs_root"))
    with closing(made):
        yield made


@pytest.mark.timeout(180 + 60 * KILLS)
@pytest.mark.parametrize(
    ("lake", "kind"),
    [
        pytest.param("bucket", ClicksToFiles, marks=pytest.mark.s3),
        pytest.param("bucket", ClicksToLoggedFiles, marks=pytest.mark.s3),
        pytest.param("bucket", ClicksToDelta, marks=pytest.mark.s3),
        pytest.param("bucket", ClicksToIceberg, marks=pytest.mark.s3),
        pytest.param("hdfs", ClicksToFiles, marks=pytest.mark.hdfs),
    ],
    indirect=["lake"],
)
def test_kills_of_slots_driver_and_storage_and_rescales_lose_and_double_nothing(
    page_views, lake, kind, tmp_path
):
    if kind is ClicksToIceberg and not versitygw().exists():
        pytest.skip("moto forgets what it was given in parts when it is killed: make versitygw")
    random = Random(SEED)
    gates = [page_views.gate(f"gate-{step}") for step in range(KILLS + 1)]
    source = clicks(page_views, gates)
    more = {"catalog": f"{tmp_path}/catalog.db"} if kind is ClicksToIceberg else {}
    plan = kind(source, lake.place, lake.settings, **more)
    if hasattr(plan.sink(), "check_start"):
        plan.sink().check_start()

    with closing(on_plain_processes(tmp_path, "page-views", plan)) as job:
        job.start(2)
        victims = random.sample(["slot", "driver"] * (KILLS // 2), KILLS)
        for step, (gate, victim) in enumerate(zip(gates, victims, strict=False)):
            if random.random() < 0.7:  # else while it restarts
                job.next_checkpoint()
            if step % 2:
                lake.die_between_stage_and_commit(job, gate, plan.commits, random)
            gate.open()
            job.kill(victim, random)
            if victim == "driver":
                job.start(random.randint(1, 4))
            elif random.random() < 0.5:
                job.ask(random.randint(1, 4))
        gates[-1].open()
        job.finish()

    there = lake.found.data_files()
    named = plan.named(there)
    assert sorted(id for name in named for id in lake.found.ids(name)) == sorted(ids_of(source))
    left = {name for name in there - named if "/_stillframe/receipts/" not in name}
    assert left == set(), "nothing is left behind that no reader takes"
    assert job.left_behind() == set()


def clicks(page_views, gates):
    """Some come when the job starts, and more when each of the gates is opened."""
    scripts = []
    for split in range(4):
        script = page_views.batches(split * 100_000, 10)
        for step, gate in enumerate(gates, 1):
            script += [Wait(gate), *page_views.batches(split * 100_000 + step * 1_000, 10)]
        scripts.append(tuple(script))
    return ScriptedSource(page_views.batch(0).schema, tuple(scripts))
