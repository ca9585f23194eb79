"""What goes wrong outside ends in one clear sentence, with the completed checkpoints untouched."""

import contextlib
import operator
import os
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.coordinator.history import (
    CheckpointCompleted,
    CheckpointDamaged,
    CheckpointFailed,
)
from stillframe.errors import BuildError, DataError, JobFailed, StillframeError
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.manifests import decode_manifest
from stillframe.storage.paths import checkpoint_of
from stillframe.testing.sinks import GatedSink
from stillframe.testing.sources import Fail, ScriptedSource


def failure_of(running):
    with pytest.raises(JobFailed) as raised:
        running.query.awaitTermination(90)
    assert "\n" not in str(raised.value), "one sentence"
    return str(raised.value)


def files_of_checkpoints(page_views):
    job = Path(page_views.location) / "page-views"
    return {
        file: file.read_bytes() for place in ("chk-*/*", "shared/*/*") for file in job.glob(place)
    }


def first_half_twice(page_views, gate):
    """A source for `stopped_after_checkpoints`."""
    return page_views.three_parts(page_views.gate("between"), gate)


def stopped_after_checkpoints(page_views, source, plan=None):
    """Run the job until two checkpoints are retained that share nothing; their numbers."""
    running = page_views.start(plan or page_views.plan(source), checkpointInterval="1 hour")
    running.wait_for_records(1_000)
    older = running.query.checkpoint(timeout=60)
    page_views.gate("between").open()
    running.wait_for_records(2_000)
    newest = running.query.checkpoint(timeout=60)
    running.query.stop()
    return [older, newest]


def newest_files(page_views, checkpoint_id, pattern):
    job = Path(page_views.location) / "page-views"
    return sorted(job.glob(pattern.format(n=checkpoint_id)))


def test_a_function_that_raises_fails_the_job_at_once_and_leaves_checkpoints_alone(page_views):
    gate = page_views.gate("second-half")
    source = first_half_twice(page_views, gate)
    stopped_after_checkpoints(page_views, source)
    before = files_of_checkpoints(page_views)
    gate.open()

    broken = page_views.start(page_views.plan(source, function=operator.itemgetter("app_id")))
    sentence = failure_of(broken)

    assert "function tidy raised TypeError" in sentence
    assert len(broken.attempts()) == 1
    assert files_of_checkpoints(page_views) == before
    page_views.start(page_views.plan(source)).finish()
    page_views.check_exactly_once(source)


@pytest.mark.parametrize("kind", [DataError, BuildError])
def test_what_no_restart_can_mend_fails_the_job_at_once(page_views, kind):
    good = page_views.batch(0)
    source = ScriptedSource(good.schema, ((good, Fail(kind("line 7 is not a click"))),))

    running = page_views.start(page_views.plan(source))

    assert "line 7 is not a click" in failure_of(running)
    assert len(running.attempts()) == 1


def test_a_source_that_breaks_for_other_reasons_is_tried_again_and_then_given_up(page_views):
    good = page_views.batch(0)
    source = ScriptedSource(good.schema, ((good, Fail(OSError("the cable is out"))),))

    running = page_views.start(page_views.plan(source), restartAttempts="1")

    assert "the cable is out" in failure_of(running)
    assert len(running.attempts()) == 2


def test_a_checkpoint_location_that_is_a_file_is_said(page_views):
    Path(page_views.location).write_text("not a directory")

    running = page_views.start(page_views.plan(page_views.halves(page_views.gate("never"))))

    assert page_views.location in failure_of(running)
    assert Path(page_views.location).read_text() == "not a directory"


def test_a_sink_directory_that_is_a_file_is_said(page_views):
    (page_views.home / "clicks").write_text("not a directory")

    running = page_views.start(
        page_views.plan(page_views.halves(page_views.gate("never"))), restartAttempts="1"
    )

    assert str(page_views.home / "clicks") in failure_of(running)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_byte(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("shared/*/count-0-*-{n}.arrow", truncate),
        ("shared/*/count-1-*-{n}.arrow", flip_a_byte),
        ("chk-{n}-*/_metadata", flip_a_byte),
        ("chk-{n}-*/_metadata", Path.unlink),
    ],
    ids=["state cut off", "state altered", "metadata altered", "metadata gone"],
)
def test_a_damaged_checkpoint_whose_output_may_be_visible_is_not_stepped_over_unasked(
    page_views, pattern, damage
):
    gate = page_views.gate("second-half")
    source = first_half_twice(page_views, gate)
    older, newest = stopped_after_checkpoints(page_views, source)
    gate.open()
    damage(newest_files(page_views, newest, pattern)[0])

    running = page_views.start(page_views.plan(source))
    sentence = failure_of(running)

    assert f"checkpoint {newest} is damaged" in sentence
    assert f"restoreFrom={older}" in sentence
    assert isinstance(running.wait(CheckpointDamaged, checkpoint_id=newest), CheckpointDamaged)
    asked = page_views.start(page_views.plan(source), restoreFrom=str(older))
    asked.finish()
    assert asked.attempts()[0].restored_from == older


def damage_newest_entry(job):
    flip_a_byte(max((job / "log").iterdir()))


def lose_the_log(job):
    shutil.rmtree(job / "log")


def damage_newest_metadata(job):
    flip_a_byte(max(job.glob("chk-*/_metadata"), key=lambda file: checkpoint_of(file.parent.name)))


def damage_all_metadata(job):
    for file in job.glob("chk-*/_metadata"):
        truncate(file)


@pytest.mark.parametrize("asks_for_newest", [False, True], ids=["latest", "by number"])
@pytest.mark.parametrize(
    "damage", [damage_newest_entry, lose_the_log, damage_newest_metadata, damage_all_metadata]
)
def test_the_way_on_that_a_refusal_names_is_a_way_on(page_views, damage, asks_for_newest):
    gate = page_views.gate("second-half")
    source = first_half_twice(page_views, gate)
    _, newest = stopped_after_checkpoints(page_views, source)
    gate.open()
    job = Path(page_views.location) / "page-views"
    epochs = [decode_manifest(f.read_bytes()).epoch for f in job.glob("chk-*/_metadata")]
    damage(job)

    asked = {"restoreFrom": str(newest)} if asks_for_newest else {}
    sentence = failure_of(page_views.start(page_views.plan(source), **asked))
    option, value = re.search(r"(restoreFrom|fresh)=(\w+)", sentence).groups()
    going_on = page_views.start(page_views.plan(source), **{option: value})
    going_on.finish()

    assert going_on.attempts()[0].attempt > 1, "no number is used twice"
    assert max(of for of, _ in checkpoints_in(job)) > newest
    if option == "fresh":
        assert going_on.wait(CheckpointCompleted).epoch > max(epochs), "nor is any epoch"
    clicks = pq.read_table(page_views.home / "clicks")["id"].to_pylist()
    scripted = [item for item in source.scripts[0] + source.scripts[1] if hasattr(item, "num_rows")]
    assert set(clicks) == {number for batch in scripted for number in batch["id"].to_pylist()}


def checkpoints_in(job):
    return [checkpoint_of(file.parent.name) for file in job.glob("chk-*/_metadata")]


def counting_for_nobody(source):
    read = Node(Read(source), source.schema, given_uid="clicks")
    call = AggregateCall("count", None, "count", pa.int64())
    schema = pa.schema([("app_id", pa.string()), ("count", pa.int64())])
    counted = Node(Aggregate(("app_id",), (call,)), schema, (read,), given_uid="count")
    return build_plan("page-views", [Node(Write(DiscardSink()), schema, (counted,))], 2)


@pytest.mark.parametrize("pattern", ["shared/*/count-0-*-{n}.arrow", "chk-{n}-*/_metadata"])
def test_a_damaged_checkpoint_that_nobody_saw_is_stepped_over(page_views, pattern):
    gate = page_views.gate("second-half")
    source = first_half_twice(page_views, gate)
    plan = counting_for_nobody(source)
    older, newest = stopped_after_checkpoints(page_views, source, plan)
    gate.open()
    flip_a_byte(newest_files(page_views, newest, pattern)[0])

    running = page_views.start(plan)
    running.finish()

    assert running.wait(CheckpointDamaged).checkpoint_id == newest
    assert running.attempts()[-1].restored_from == older


def test_a_checkpoint_that_is_not_retained_cannot_be_asked_for(page_views):
    gate = page_views.gate("second-half")
    source = first_half_twice(page_views, gate)
    older, newest = stopped_after_checkpoints(page_views, source)

    sentence = failure_of(page_views.start(page_views.plan(source), restoreFrom="999"))

    assert f"checkpoint 999 is not retained; there are: {older}, {newest}" in sentence


def test_a_checkpoint_of_another_job_shape_is_refused_and_names_what_is_missing(page_views):
    gate = page_views.gate("second-half")
    source = first_half_twice(page_views, gate)
    stopped_after_checkpoints(page_views, source)

    other = Node(Write(DiscardSink()), source.schema, (Node(Read(source), source.schema),))
    running = page_views.start(build_plan("page-views", [other], 2))
    with pytest.raises(JobFailed) as raised:
        running.query.awaitTermination(90)

    lines = str(raised.value).splitlines()
    for uid in ("clicks", "count", "write-clicks", "write-counts"):
        [line] = [line for line in lines if f"({uid})" in line]
        assert f'add .uid("{uid}") to the ' in line


def fill(ballast):
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)


def test_a_full_disk_fails_checkpoints_and_the_job_goes_on_when_there_is_room(
    page_views, small_disk
):
    page_views.location = str(small_disk / "chk")
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source))
    running.wait(CheckpointCompleted)
    ballast = small_disk / "ballast"
    fill(ballast)
    failed = running.wait(CheckpointFailed, number=2)
    assert "no space left on device" in failed.reason
    ballast.unlink()
    gate.open()
    running.finish()

    page_views.check_exactly_once(source)
    assert len(running.attempts()) == 1


def test_a_commit_that_fails_is_the_reason_the_attempt_gives(page_views):
    commit = page_views.gate("commit")
    source = page_views.halves(page_views.gate("never"))
    plan = page_views.plan(
        source, around_clicks=lambda sink: GatedSink(sink, commit=commit, breaks=True)
    )

    running = page_views.start(plan, restartAttempts="2")

    with pytest.raises(JobFailed, match="is closed while committing"):
        running.query.awaitTermination(90)


# --- places that are not what they should be ---


@pytest.fixture
def savepoint(page_views):
    """Of a job that has run elsewhere."""
    running = page_views.start(page_views.plan(page_views.halves(page_views.gate("never"))))
    running.wait_for_records(2_000)
    address = running.query.savepoint(str(page_views.home / "savepoint"))
    running.query.stop()
    page_views.location = str(page_views.home / "another-chk")
    return Path(address)


def one_state_file(place):
    return sorted(place.glob("shared/*/*"))[0]


def is_of_a_newer_format(place):
    metadata = place / "_metadata"
    text = metadata.read_text()
    metadata.write_text(text.replace('"format_version":5', '"format_version":99'))
    assert metadata.read_text() != text


BAD_PLACES = {
    "not there": (shutil.rmtree, "savepoint is no directory: give a job"),
    "empty": (
        lambda place: [shutil.rmtree(place), place.mkdir()],
        "holds neither a job log nor a savepoint",
    ),
    "a file": (
        lambda place: [shutil.rmtree(place), place.write_text("x")],
        "savepoint is no directory",
    ),
    "without metadata": (
        lambda place: (place / "_metadata").unlink(),
        "there is no _metadata in it",
    ),
    "with a state file gone": (
        lambda place: one_state_file(place).unlink(),
        "is half deleted: 1 of the files it needs are gone, among them shared/",
    ),
    "with a state file altered": (
        lambda place: flip_a_byte(one_state_file(place)),
        "savepoint is damaged",
    ),
    "with metadata cut off": (
        lambda place: (place / "_metadata").write_bytes(b'{"format_version":5,'),
        "_metadata is damaged",
    ),
    "of a newer format": (
        is_of_a_newer_format,
        "has format version 99, but this Stillframe reads versions up to 5",
    ),
}


@pytest.mark.parametrize("bad", BAD_PLACES)
def test_a_place_that_is_no_snapshot_is_told_in_one_sentence_and_left_as_it_is(
    page_views, savepoint, bad
):
    spoil, expected = BAD_PLACES[bad]
    spoil(savepoint)
    before = tree_of(savepoint)

    running = page_views.start(
        page_views.plan(page_views.halves(page_views.gate("never"))),
        restoreFrom=str(savepoint),
        restoreMode="claim",
    )
    sentence = failure_of(running)

    assert expected in sentence
    assert str(savepoint) in sentence
    assert tree_of(savepoint) == before
    assert not list(Path(page_views.location).glob("page-views/chk-*"))


def tree_of(place):
    if not place.is_dir():
        return place.read_text() if place.exists() else None
    return {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}


def test_a_checkpoint_that_is_half_deleted_is_told(page_views):
    source = first_half_twice(page_views, page_views.gate("second-half"))
    _, newest = stopped_after_checkpoints(page_views, source)
    [metadata] = newest_files(page_views, newest, "chk-{n}-*/_metadata")
    place = metadata.parent
    metadata.unlink()
    page_views.location = str(page_views.home / "another-chk")

    sentence = failure_of(page_views.start(page_views.plan(source), restoreFrom=str(place)))

    assert f"{metadata} is missing" in sentence


def test_a_number_means_a_checkpoint_of_the_job_itself(page_views, savepoint):
    plan = page_views.plan(page_views.halves(page_views.gate("never")))

    sentence = failure_of(page_views.start(plan, restoreFrom="1"))

    assert "checkpoint 1 is not retained; there are: none" in sentence


@pytest.fixture
def read_only(tmp_path):
    """A directory into which nobody can write, not even root."""
    place = tmp_path / "read-only"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0 and os.geteuid() == 0:
        pytest.skip("a file system cannot be mounted here, and root may write everywhere")
    place.chmod(0o555) if mounted.returncode != 0 else None
    yield place
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_location_without_write_permission_is_said(page_views, read_only):
    page_views.location = str(read_only / "chk")

    running = page_views.start(page_views.plan(page_views.halves(page_views.gate("never"))))

    assert str(read_only) in failure_of(running)


def test_a_savepoint_into_a_place_that_cannot_take_it_fails_alone(page_views, read_only):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(page_views.plan(source))
    running.wait_for_records(2_000)
    full = page_views.home / "full"
    full.mkdir()
    (full / "notes").write_text("mine")

    with pytest.raises(StillframeError, match="full is not empty: give a directory"):
        running.query.savepoint(str(full))
    with pytest.raises(StillframeError, match=f"cannot .*{read_only}"):
        running.query.savepoint(str(read_only / "sp"))

    assert [file.name for file in full.iterdir()] == ["notes"]
    gate.open()
    running.finish()
    page_views.check_exactly_once(source)
