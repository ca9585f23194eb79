"""Checkpoints on S3: kills, and a storage that goes away while the job runs, recovers or ends."""

import http.client
import json
import threading
from collections import Counter
from contextlib import closing

import pyarrow as pa
import pytest
from s3_servers import Front

from stillframe.api.aggregates import AggregateCall
from stillframe.cli.main import main
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointFailed,
    SlotsRunning,
)
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.manifests import decode_manifest
from stillframe.runtime.stored_states import batches_of, state_parts
from stillframe.storage.store import open_store

pytestmark = pytest.mark.s3


@pytest.fixture
def on_s3(page_views, s3_bucket, s3_settings):
    """Options that put the job's checkpoints on S3, by a way that can be broken."""
    page_views.location = f"s3://{s3_bucket}/jobs/location"
    return s3_settings


def objects_of(port, bucket):
    """Every object of a bucket, as the server itself tells it, not our store."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", f"/{bucket}?list-type=2")
        listing = connection.getresponse().read().decode()
        for key in [part.split("</Key>")[0] for part in listing.split("<Key>")[1:]]:
            connection.request("GET", f"/{bucket}/{key}")
            yield key, connection.getresponse().read()


def test_a_slot_killed_while_its_checkpoints_go_to_s3_loses_and_doubles_nothing(
    page_views, on_s3, s3_port, s3_bucket
):
    source = ClickSource(records=30_000, records_per_second=15_000)

    running = page_views.start(page_views.plan(source), **on_s3)
    running.wait(CheckpointCompleted)
    running.kill(slot=1)
    running.finish()

    page_views.check_exactly_once(source)
    assert [each.attempt for each in running.attempts()] == [1, 2]
    assert running.attempts()[1].restored_from is not None
    secret = on_s3["fs.s3a.secret.key"]
    kept = dict(objects_of(s3_port, s3_bucket))
    assert any(key.endswith("/_metadata") for key in kept), sorted(kept)
    assert not any(secret.encode() in data for data in kept.values())
    assert not any(secret in f"{event}" for event in running.told)
    assert secret not in f"{running.job.config}"


def test_inspect_shows_a_checkpoint_on_s3(page_views, on_s3, s3_environment, capsys):
    source = ClickSource(records=20_000, records_per_second=20_000)
    running = page_views.start(page_views.plan(source), **on_s3)
    running.finish()
    last = [each for each in running.told if isinstance(each, CheckpointCompleted)][-1]

    for address in (page_views.location, f"{page_views.location}/page-views"):
        assert main(["inspect", "--json", address]) == 0
        (job,) = json.loads(capsys.readouterr().out)
        assert job["path"] == f"{page_views.location}/page-views"
        assert job["checkpoints"][-1]["checkpoint"] == last.checkpoint_id
    chosen = f"{page_views.location}/page-views/chk-{last.checkpoint_id}-{last.attempt}"
    assert main(["inspect", chosen]) == 0
    assert "state" in capsys.readouterr().out

    assert main(["inspect", f"{page_views.location}/nothing"]) == 1
    assert "holds neither a job log nor checkpoints" in capsys.readouterr().err


def checkpoints_in(store):
    names = [name for name in store.list("") if name.startswith("chk-")]
    return [f"{name}/{file}" for name in names for file in store.list(name)]


def test_commits_and_checkpoints_do_not_wait_for_deletions(page_views, on_s3, gateway):
    """The first checkpoint after a start would wait for its sweep, every other one for the files of
    the one that it makes needless."""
    source = ClickSource(records_per_second=2_000)
    on_s3["fs.s3a.connection.request.timeout"] = "60s"
    running = page_views.start(page_views.plan(source), checkpointsRetained="1", **on_s3)
    running.wait(SlotsRunning)
    gateway.hold_deletions()

    assert gateway.held.wait(60)
    newest = running.next_checkpoint().checkpoint_id
    running.wait(CheckpointCommitted, checkpoint_id=newest + 5)
    store = open_store(f"{page_views.location}/page-views", on_s3)
    assert f"chk-{newest}-1/_metadata" in checkpoints_in(store), "nothing could be deleted yet"
    gateway.flow()
    running.query.stop()

    assert len(checkpoints_in(store)) == 1


def test_a_storage_that_is_down_fails_checkpoints_and_not_the_job(page_views, on_s3, gateway):
    first, second = page_views.gate("first"), page_views.gate("second")
    source = page_views.three_parts(first, second)

    running = page_views.start(page_views.plan(source), **on_s3)
    before = running.next_checkpoint()
    gateway.close()
    failed = running.wait(CheckpointFailed, number=2)
    first.open()
    running.wait_for_records(2_000)
    gateway.open()
    after = running.next_checkpoint()
    second.open()
    running.finish()

    page_views.check_exactly_once(source)
    assert "cannot be reached" in failed.reason
    assert after.checkpoint_id > before.checkpoint_id
    assert len(running.attempts()) == 1, "records flowed on"


def test_a_storage_that_stops_answering_does_not_end_the_job(page_views, on_s3, gateway, until):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)

    running = page_views.start(page_views.plan(source), **on_s3)
    running.next_checkpoint()
    gateway.stall()
    assert gateway.stalled.wait(90)
    until(lambda: any(isinstance(each, AttemptFailed | CheckpointFailed) for each in running.told))
    gateway.flow()
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)


# More than there are threads that write: a state whose turn has not come is read only when the
# files of others are there, and has changed by then.
TABLES = [f"count-{n}" for n in range(5)]


def counting(source):
    """One slot that counts the same clicks again and again, in a table each."""
    read = Node(Read(source), source.schema, given_uid="clicks")
    call = AggregateCall("count", None, "count", pa.int64())
    schema = pa.schema([("app_id", pa.string()), ("count", pa.int64())])
    counts = [Node(Aggregate(("app_id",), (call,)), schema, (read,), given_uid=t) for t in TABLES]
    return build_plan("page-views", [Node(Write(DiscardSink()), schema, (c,)) for c in counts], 1)


def counted_in(store, checkpoint):
    """By table: what a checkpoint says of each app."""
    directory = f"chk-{checkpoint.checkpoint_id}-{checkpoint.attempt}"
    manifest = decode_manifest(store.read(f"{directory}/_metadata"))
    return {
        table: {
            app: count
            for parts in state_parts(store, manifest, table).values()
            for part in parts
            for _, batch in batches_of(store, part, manifest.max_parallelism)
            for app, count in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        }
        for table in TABLES
    }


def test_records_flow_while_state_files_take_seconds_and_change_nothing_in_them(
    page_views, on_s3, gateway
):
    first, second = page_views.gate("first"), page_views.gate("second")
    source = page_views.three_parts(first, second, splits=1)
    patient = {**on_s3, "fs.s3a.connection.request.timeout": "60s"}
    running = page_views.start(counting(source), checkpointInterval="1 hour", **patient)
    store = open_store(f"{page_views.location}/page-views", on_s3)
    running.wait_for_records(500)
    gateway.stall()
    asking = threading.Thread(target=running.query.checkpoint)
    asking.start()
    assert gateway.stalled.wait(90)
    first.open()
    running.wait_for_records(1_000)  # none of them waits for the files
    flowed = not any(isinstance(each, CheckpointCompleted) for each in running.told)
    gateway.flow()
    asking.join(90)
    held = counted_in(store, running.wait(CheckpointCompleted))
    running.kill(slot=0)
    second.open()
    running.finish()

    assert flowed, "the checkpoint was complete before the records had come"
    assert held == {table: Counter(f"app-{i % 17}" for i in range(500)) for table in TABLES}
    assert [each.restored_from for each in running.attempts()] == [None, 1]
    last = [each for each in running.told if isinstance(each, CheckpointCompleted)][-1]
    every = Counter(f"app-{i % 17}" for i in range(2_000))
    assert counted_in(store, last) == dict.fromkeys(TABLES, every)


def test_a_recovery_waits_for_a_storage_that_is_down(page_views, on_s3, gateway):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)

    running = page_views.start(page_views.plan(source), restartAttempts="100", **on_s3)
    running.next_checkpoint()
    gateway.close()
    running.kill(slot=0)
    running.wait(AttemptFailed, number=3)
    gateway.open()
    second = running.wait(AttemptStarted, attempt=2)
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)
    assert second.restored_from is not None
    reasons = [each.reason for each in running.told if isinstance(each, AttemptFailed)]
    assert "cannot be reached" in reasons[1]


def test_a_recovery_gives_up_on_a_storage_that_stays_down_as_the_restart_strategy_says(
    page_views, on_s3, gateway
):
    source = page_views.halves(page_views.gate("never"))

    running = page_views.start(page_views.plan(source), restartAttempts="2", **on_s3)
    running.next_checkpoint()
    gateway.close()
    running.kill(slot=0)
    running.job.join(60)

    assert running.query.summary.outcome == "failed"
    assert "cannot be reached" in str(running.query.exception())


def test_a_job_whose_storage_is_down_at_its_first_start_says_so_at_once(page_views, on_s3, gateway):
    gateway.close()
    source = page_views.halves(page_views.gate("never"))

    running = page_views.start(page_views.plan(source), **on_s3)
    running.job.join(60)

    said = str(running.query.exception())
    assert f"cannot list {page_views.location}/page-views/lease: " in said
    assert f"{gateway.url} cannot be reached" in said
    assert on_s3["fs.s3a.secret.key"] not in said


def test_a_storage_that_is_down_when_the_records_end_delays_the_end(page_views, on_s3, gateway):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)

    running = page_views.start(page_views.plan(source), restartAttempts="100", **on_s3)
    running.next_checkpoint()
    gateway.close()
    gate.open()
    running.wait_for_records(4_000)
    running.wait(CheckpointFailed, number=2)
    gateway.open()
    running.finish()

    page_views.check_exactly_once(source)


def test_a_job_goes_on_when_its_credentials_expire_and_are_renewed_in_their_file(
    page_views, on_s3, s3_port, tmp_path
):
    front = Front(s3_port)
    token = tmp_path / "token"
    token.write_text("the-first-token")
    own = {"fs.s3a.endpoint": front.url, "fs.s3a.session.token": f"file:{token}"}
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source), **{**on_s3, **own})
    running.next_checkpoint()
    front.expire("the-first-token")
    failed = running.wait(CheckpointFailed)
    token.write_text("the-second-token")
    running.next_checkpoint()
    gate.open()
    running.finish()
    front.end()

    page_views.check_exactly_once(source)
    assert "the credentials have expired, and no newer ones are found" in failed.reason
    assert len(running.attempts()) == 1
    assert not any("-token" in f"{event}" for event in running.told)


@pytest.mark.parametrize("what", ["savepoint", "checkpoint"])
def test_a_snapshot_on_s3_is_begun_with_and_claimed_and_a_cancelled_job_leaves_its_log(
    page_views, on_s3, s3_port, s3_bucket, what
):
    options = {**on_s3, "checkpointInterval": "1 hour"}
    plan = page_views.plan(page_views.halves(page_views.gate("never")))
    first = page_views.start(plan, retainOnCancel="true", **options)
    first.wait_for_records(2_000)
    number = first.query.checkpoint()
    place = f"{page_views.location}/page-views/chk-{number}-1"
    if what == "savepoint":
        place = first.query.savepoint(f"s3://{s3_bucket}/savepoint")
    first.query.cancel()

    page_views.location = f"s3a://{s3_bucket}/jobs/another"
    second = page_views.start(plan, restoreFrom=place, restoreMode="claim", **options)
    second.wait(SlotsRunning)
    prefix = place.removeprefix(f"s3://{s3_bucket}/")
    assert any(key.startswith(prefix) for key, _ in objects_of(s3_port, s3_bucket))
    second.query.checkpoint()
    second.query.cancel()

    left = [key for key, _ in objects_of(s3_port, s3_bucket)]
    assert not any(key.startswith(prefix) for key in left)
    own = [key.removeprefix("jobs/another/page-views/") for key in left if "another" in key]
    assert {key.partition("/")[0] for key in own} <= {"log", "history", "lease"}
    assert any(key.startswith("log/") for key in own)
