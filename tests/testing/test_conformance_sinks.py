"""The kit for sinks: ours pass, and each wrong one is told by the promise that it breaks."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_sinks
import sqlite_sink
from small_sinks import SmallSink, rows_in

from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.files import find_files
from stillframe.connectors.function_sink import to_function
from stillframe.connectors.listing import FoundFile
from stillframe.connectors.staged import StagedSink
from stillframe.errors import BuildError
from stillframe.storage.places import place_of
from stillframe.testing.conformance import PromiseBroken, check_sink

SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.int64())])
CHECKS = 40


def check(sink, visible, **options):
    return check_sink(sink, visible, **{"schema": SCHEMA, "checks": CHECKS, **options})


# --- ours --------------------------------------------------------------------------------------


def published(sink):
    paths = [os.path.join(sink.path, name) for name in os.listdir(sink.path)]
    for path in filter(os.path.isfile, paths):
        if sink.format == "parquet":
            yield from pq.read_table(path).to_pylist()
        else:
            with open(path) as lines:
                yield from map(json.loads, lines)


@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_files_are_published_once_whatever_happens(file_format):
    report = check(lambda place: FileSink(str(place), file_format, SCHEMA), published)

    assert report.schedules == CHECKS + 10
    assert report.unchecked == ()


def named_by_the_log(path):
    """As Spark finds it: the last compact entry, and those behind it."""
    place, entries = place_of(path), {}
    for file in place.walk(f"{path}/_spark_metadata", lambda name: False):
        name = os.path.basename(file.path)
        with place.open(file.path) as log:
            _, *lines = log.readall().decode().split("\n")
        entries[int(name.split(".")[0])] = (name.endswith(".compact"), lines)
    begin = max((number for number, entry in entries.items() if entry[0]), default=0)
    for number in range(begin, len(entries) and max(entries) + 1):
        for line in entries[number][1]:
            url = json.loads(line)["path"].replace("s3a://", "s3://")
            yield FoundFile(unquote(url))


@pytest.mark.s3
@pytest.mark.parametrize("is_logged", [False, True])
def test_files_in_a_bucket_are_published_once_whatever_happens(
    is_logged, s3_bucket, s3_environment
):
    def make(place):
        name = str(place).strip("/").replace("/", "-")
        sink = FileSink(f"s3://{s3_bucket}/{name}", "json", SCHEMA)
        return sink.logged(None) if is_logged else sink

    def in_bucket(sink):
        files = named_by_the_log(sink.path) if is_logged else find_files([sink.path])
        for file in files:
            with place_of(file.path).open(file.path) as lines:
                yield from map(json.loads, lines.readall().splitlines())

    check(make, in_bucket, checks=1)


@pytest.mark.parametrize("kind", [sqlite_sink.SqliteSink, sqlite_sink.SqliteSinkOnDriver])
def test_transactions_show_each_row_once_whatever_happens(kind):
    check(lambda place: kind(str(place / "db")), lambda sink: sqlite_sink.rows_in(sink.path))


@dataclass(frozen=True)
class Delivered:
    """A function that ignores a key that it has seen."""

    directory: str

    def __call__(self, rows, key):
        path = os.path.join(self.directory, key.replace("/", "_"))
        with open(f"{path}.new", "w") as file:
            json.dump(rows.to_pylist(), file)
        os.rename(f"{path}.new", path)


def delivered(sink):
    directory = sink.deliver.directory
    for name in os.listdir(directory):
        if not name.endswith(".new"):
            with open(os.path.join(directory, name)) as file:
                yield from json.load(file)


def test_a_function_that_ignores_keys_it_has_seen_shows_each_row_once():
    check(lambda place: to_function(Delivered(str(place)), idempotent=True), delivered)


class Remembering:
    """A handler on the driver that ignores a mark it has seen; an epoch comes again."""

    def __init__(self):
        self.seen = {}

    def __call__(self, epoch, mark, files):
        if mark not in self.seen:
            self.seen[mark] = [row for file in files for row in pq.read_table(file).to_pylist()]


def handled(sink):
    return [row for rows in sink.handler.seen.values() for row in rows]


def test_epochs_are_handed_to_a_handler_that_remembers_marks_once():
    staged = lambda place: StagedSink(  # noqa: E731
        str(place), Remembering(), SCHEMA, guarantee="exactly-once", weakness=None
    )

    check(staged, handled)


def test_a_sink_that_keeps_nothing_is_not_asked_for_anything():
    check(DiscardSink(), lambda sink: [])


# --- wrong ones --------------------------------------------------------------------------------

ALL_BUT_FILES = {"schema": pa.schema([("id", pa.int64()), ("name", pa.string())])}


def broken(kind, **options):
    with pytest.raises(PromiseBroken) as raised:
        check_sink(lambda place: kind(str(place)), rows_in, **options)
    return raised.value


def test_the_small_sink_that_the_wrong_ones_are_made_of_is_right():
    check_sink(lambda place: SmallSink(str(place)), rows_in)


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        ("SeenAtPrepare", "nobody outside sees a record before the checkpoint that holds it"),
        ("ByEpoch", "a commit is known by its mark and not by its epoch"),
        ("CommitsTwice", "what has been committed is left alone when it is committed again"),
        ("SweepsAll", "sweep removes what older attempts left behind, and nothing that `keep`"),
        ("MarkApart", "a call may be cut off at any line and made again: rows appear together"),
        ("LooksBeforeTheFence", "of two who commit the same at the same time, one shuts the other"),
        ("KeptInTheSink", "committables are enough to commit, in any process"),
        ("KeptInTheProcess", "what is prepared in one process can be committed in another"),
        ("NamesWithoutTheAttempt", "what an attempt does when it is over harms nobody"),
        ("AnyIncarnation", "a mark belongs to one incarnation of the job"),
        ("NotJson", "a committable is JSON and small"),
        ("PreparesWhatIsThereNow", "when commit has returned, all that it was given is seen"),
    ],
)
def test_a_sink_that_breaks_a_promise_is_told_which(kind, promise):
    told = broken(getattr(small_sinks, kind))

    assert told.promise.startswith(promise)
    assert told.steps
    assert f"seed={told.seed}, checks=1" in str(told)


def test_what_is_told_is_a_short_schedule_that_its_seed_replays():
    told = broken(small_sinks.CommitsTwice)
    again = broken(small_sinks.CommitsTwice, seed=told.seed, checks=1)

    assert again.steps == told.steps
    assert len(told.steps) <= 11
    assert str(told).startswith("CommitsTwice (small ")


def test_a_schema_that_no_rows_can_be_made_of_is_refused():
    schema = pa.schema([("tags", pa.list_(pa.string()))])

    with pytest.raises(BuildError, match="column tags is list<item: string>: give row="):
        check_sink(DiscardSink(), lambda sink: [], schema=schema)


def test_a_sink_that_cannot_be_pickled_is_told_before_anything_runs():
    with pytest.raises(PromiseBroken, match="can be pickled"):
        check_sink(to_function(lambda rows, key: None), lambda sink: [])


def test_checking_leaves_no_thread_and_no_warning_behind(recwarn):
    warnings.simplefilter("always")

    check_sink(lambda place: SmallSink(str(place)), rows_in, checks=3)

    assert [str(each.message) for each in recwarn] == []
