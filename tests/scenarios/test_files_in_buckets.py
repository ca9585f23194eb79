"""Page views with a bucket as the only shared storage: kills, exact output, nothing left behind."""

from __future__ import annotations

import re
from collections import Counter

import pyarrow as pa
import pytest
from bucket_files import below, ids_in, ids_of, plan_of, staged, visible
from s3_servers import Front

from stillframe.connectors.cleaning import Cleaning
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.files import Following
from stillframe.connectors.json_lines import JsonLinesSource
from stillframe.connectors.staged import StagedSink
from stillframe.connectors.staged_files import Layout
from stillframe.coordinator.history import AttemptFailed, CheckpointCompleted
from stillframe.errors import BuildError
from stillframe.storage.places import place_of
from stillframe.testing.sinks import GatedSink

pytestmark = pytest.mark.s3

DENIED = "cannot {} {}.*: access denied; let these credentials read, write, list and delete there"


@pytest.fixture
def bucket(page_views, s3_bucket, s3_settings):
    page_views.location = f"s3://{s3_bucket}/checkpoints"
    s3_settings["fs.s3a.connection.request.timeout"] = "10s"
    return f"s3://{s3_bucket}"


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_slot_killed_between_stage_and_commit_loses_and_doubles_nothing(
    is_logged, page_views, bucket, s3_settings, until
):
    more, commit = page_views.gate("more"), page_views.gate("commit")
    source = page_views.halves(more)
    layout = Layout(rows_max=400)
    files = FileSink(f"{bucket}/out", "parquet", source.schema, layout=layout, settings=s3_settings)
    if is_logged:
        sink = files.logged(None)
    else:
        sink = GatedSink(files, commit=commit, reached=page_views.gate("reached"))
    running = page_views.start(plan_of(source, sink), **s3_settings)

    running.wait(CheckpointCompleted)
    if not is_logged:
        until(lambda: page_views.gate("reached").is_open)
        assert ids_in(visible(bucket, s3_settings), s3_settings) == [], "nothing shows before"
    running.kill(slot=0)
    commit.open()
    more.open()
    running.finish()

    shown = visible(bucket, s3_settings)
    assert Counter(ids_in(shown, s3_settings)) == Counter(ids_of(source))
    assert staged(bucket, s3_settings) == []
    assert len(running.attempts()) == 2
    if is_logged:
        log = [each for each in below(f"{bucket}/out", s3_settings) if "/_spark_metadata/" in each]
        assert log


@pytest.fixture
def denying(s3_port, s3_settings):
    """A way to the bucket that refuses what a test says, and the settings of who takes it."""
    front = Front(s3_port)
    yield front, {**s3_settings, "fs.s3a.endpoint": front.url}
    front.end()


def test_a_bucket_that_lets_nobody_look_is_told_before_the_start(page_views, bucket, denying):
    front, settings = denying
    front.refuses = lambda method, headers: (403, "AccessDenied")
    sink = FileSink(f"{bucket}/out", "parquet", page_views.batch(0).schema, settings=settings)

    with pytest.raises(BuildError, match=DENIED.format("list", f"{bucket}/out")):
        sink.check()


def stages(method, headers):
    return method == "PUT" and "x-amz-copy-source" not in headers


def publishes(method, headers):
    return "x-amz-copy-source" in headers


@pytest.mark.parametrize("is_denied", [stages, publishes])
def test_a_bucket_that_denies_is_told_and_gets_everything_once_when_it_no_longer_does(
    is_denied, page_views, bucket, denying, s3_settings
):
    front, settings = denying
    more = page_views.gate("more")
    source = page_views.halves(more)
    sink = FileSink(f"{bucket}/out", "parquet", source.schema, settings=settings)
    running = page_views.start(plan_of(source, sink), restartAttempts="100", **s3_settings)
    running.next_checkpoint()
    front.refuses = lambda *request: (403, "AccessDenied") if is_denied(*request) else None
    more.open()
    failed = running.wait(AttemptFailed)
    front.refuses = lambda *request: None
    running.finish()

    assert re.search(DENIED.format("write", f"{bucket}/out"), failed.reason), failed.reason
    shown = visible(bucket, s3_settings)
    assert Counter(ids_in(shown, s3_settings)) == Counter(ids_of(source))
    assert staged(bucket, s3_settings) == []


def test_epochs_are_handed_to_the_driver_through_the_bucket(page_views, bucket, s3_settings):
    more = page_views.gate("more")
    source, handed = page_views.halves(more), []

    def keep(epoch, mark, files):
        handed.append((epoch, ids_in(files, s3_settings)))

    directory = f"{bucket}/checkpoints/page-views/staged/write-clicks"
    sink = StagedSink(directory, keep, source.schema, settings=s3_settings)
    running = page_views.start(plan_of(source, sink), **s3_settings)
    running.wait(CheckpointCompleted)
    running.kill(slot=1)
    more.open()
    running.finish()

    last = dict(handed)  # an epoch that comes again has the same rows
    assert Counter(id for ids in last.values() for id in ids) == Counter(ids_of(source))
    assert below(directory, s3_settings) == []


def test_a_bucket_is_followed_and_archived_and_the_job_reads_on_after_a_kill(
    page_views, bucket, s3_settings, until
):
    place = place_of(bucket, s3_settings)

    def put(name, numbers):
        lines = "".join(f'{{"id": {n}, "app_id": "a"}}\n' for n in numbers)
        place.create_if_absent(f"{bucket}/in/{name}", lines.encode())

    put("a.json", range(100))
    schema = pa.schema([("id", pa.int64()), ("app_id", pa.string())])
    following = Following(0.1, cleaning=Cleaning(f"{bucket}/archive"))
    source = JsonLinesSource(f"{bucket}/in", schema, following).listing(settings=s3_settings)
    sink = FileSink(f"{bucket}/out", "parquet", source.schema, settings=s3_settings)
    running = page_views.start(plan_of(source, sink), **s3_settings)

    def shown():
        return sorted(ids_in(visible(bucket, s3_settings), s3_settings))

    running.wait_for_records(100)
    running.next_checkpoint()
    running.kill(slot=0)
    put("b.json", range(100, 200))
    running.wait(CheckpointCompleted)
    until(lambda: shown() == list(range(200)))
    until(lambda: below(f"{bucket}/in", s3_settings) == [])
    running.query.stop()
    archived = [each.removeprefix(bucket) for each in below(f"{bucket}/archive", s3_settings)]
    assert archived == ["/archive/in/a.json", "/archive/in/b.json"]
    assert shown() == list(range(200))
