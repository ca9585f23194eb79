"""The S3 server itself is killed in the middle of a checkpoint, or while a sink publishes, and
returns with what it holds."""

import os
import uuid
from collections import Counter

import pytest
from bucket_files import ids_in, ids_of, plan_of, staged, visible
from gateway import Gateway

from stillframe.connectors.file_sink import FileSink
from stillframe.coordinator.history import AttemptFailed, CheckpointFailed
from stillframe.storage.store import open_store
from stillframe.testing.s3_node import ACCESS_KEY, SECRET_KEY

pytestmark = pytest.mark.s3


@pytest.fixture
def way(keeping_s3):
    """Each request takes 20 ms longer."""
    gateway = Gateway(keeping_s3.port)
    gateway.delay(0.02)
    yield gateway
    gateway.end()


@pytest.fixture
def on_s3(page_views, keeping_s3, way):
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    keeping_s3.make_bucket(bucket)
    page_views.location = f"s3://{bucket}/jobs"
    return {
        "fs.s3a.endpoint": way.url,
        "fs.s3a.access.key": ACCESS_KEY,
        "fs.s3a.secret.key": SECRET_KEY,
        "fs.s3a.endpoint.region": "us-east-1",
        "fs.s3a.connection.request.timeout": "1s",
    }


def puts(data: bytes, what: bytes) -> bool:
    first_line = data.split(b"\r\n", 1)[0]
    return first_line.startswith(b"PUT ") and what in first_line


MOMENTS = [(b"/chk-", "before it is done"), (b"/log/", "when it is done")]
PUBLISHING = ["when it is done"]
if os.environ.get("STILLFRAME_SOAK"):
    PUBLISHING += ["before it is done"]
    MOMENTS += [(b"/log/", "before it is done"), (b"/chk-", "when it is done")]


@pytest.mark.parametrize(("at", "dies"), MOMENTS)
def test_a_server_killed_while_it_is_given_a_file_loses_nothing_and_the_job_goes_on(
    page_views, on_s3, way, keeping_s3, until, at, dies
):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source), **patient(on_s3))
    running.next_checkpoint()
    lie_in_wait(way, lambda data: puts(data, at), dies)
    die_and_return(running, way, keeping_s3, until, dies)
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)
    store = open_store(f"{page_views.location}/page-views", on_s3)
    kept = [name for name in store.list("") if name.startswith("chk-")]
    assert kept, "a checkpoint of the end is retained"
    assert all(store.list(name) for name in kept)


def publishes(data: bytes) -> bool:
    """A staged object is copied to where readers look."""
    return puts(data, b"/out/") and not puts(data, b"/_stillframe")


@pytest.mark.parametrize("dies", PUBLISHING)
def test_a_server_killed_while_a_file_sink_publishes_leaves_every_record_once(
    page_views, on_s3, way, keeping_s3, until, dies
):
    bucket = page_views.location.removesuffix("/jobs")
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    sink = FileSink(f"{bucket}/out", "parquet", source.schema, settings=on_s3)
    lie_in_wait(way, publishes, dies)
    running = page_views.start(plan_of(source, sink), **patient(on_s3))
    die_and_return(running, way, keeping_s3, until, dies)
    gate.open()
    running.finish()

    shown = visible(bucket, on_s3)
    assert Counter(ids_in(shown, on_s3)) == Counter(ids_of(source))
    assert staged(bucket, on_s3) == []


def patient(settings):
    return {**settings, "restartAttempts": "100", "tolerableFailedCheckpoints": "1000"}


def lie_in_wait(way, request, dies):
    if dies == "before it is done":
        way.hold(request)
    else:
        way.stall_from(request)


def die_and_return(running, way, server, until, dies):
    """At that request; then the server is away until the job has noticed."""
    assert (way.held if dies == "before it is done" else way.stalled).wait(60)
    server.kill()
    way.lose_answers(1_000)  # those that it gave before it died
    way.flow()
    until(lambda: any(isinstance(each, AttemptFailed | CheckpointFailed) for each in running.told))
    way.close()
    server.start()
    way.lose_answers(0)
    way.open()
