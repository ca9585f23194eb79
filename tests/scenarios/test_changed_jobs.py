"""A job that is changed between two starts and goes on with its own state, without given uids."""

from __future__ import annotations

import threading
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.config import job_config
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.staged import StagedSink
from stillframe.coordinator.history import CheckpointCompleted, SlotsRunning
from stillframe.coordinator.located import locate
from stillframe.coordinator.starting import mismatches_with
from stillframe.errors import JobFailed
from stillframe.graph.expressions import Literal
from stillframe.graph.logical import Aggregate, Filter, MapInArrow, Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.fit import in_words
from stillframe.runtime.unfit_states import unfit_states

COUNTS = pa.schema([("app_id", pa.string()), ("count", pa.int64())])
COUNT = AggregateCall("count", None, "count", pa.int64())


def kept(stream, steps=1):
    """Through this many steps that keep nothing, and change nothing either."""
    for _ in range(steps):
        stream = Node(Filter(Literal(pa.scalar(True))), stream.schema, (stream,))
    return stream


def named(stream, name):
    return Node(MapInArrow(iter, name), stream.schema, (stream,))


def views(page_views, source, front=0, back=0, sinks=("clicks", "counts")):
    """Clicks go to one directory, counts by app to another; no operator has a given uid."""
    read = Node(Read(source), source.schema)
    counted = Node(Aggregate(("app_id",), (COUNT,)), COUNTS, (kept(read, front),))
    streams = {"clicks": named(read, f"tidy_{front}"), "counts": counted}
    ends = []
    for name in sinks:
        stream = kept(streams[name], back)
        sink = FileSink(str(page_views.home / name), "parquet", stream.schema)
        ends.append(Node(Write(sink), stream.schema, (stream,)))
    return build_plan("page-views", ends, 2)


def told_before(page_views, plan, **options) -> str:
    """What `stillframe inspect --against` says of the job's newest checkpoint; empty if it fits."""
    config = job_config({"checkpointLocation": page_views.location, **options})
    found = locate(f"{page_views.location}/page-views")
    allows = config.allow_non_restored_state
    wrong, _ = mismatches_with(plan, found, unfit_states, config, allows_gone=allows)
    return in_words(found.manifest, wrong) if wrong else ""


def refusal_of(running) -> str:
    with pytest.raises(JobFailed) as raised:
        running.query.awaitTermination(90)
    return str(raised.value)


@pytest.mark.parametrize("backend", ["fs", "rocksdb"])
def test_steps_without_state_may_come_and_go_and_every_record_counts_once(page_views, backend):
    first, second = page_views.gate("first"), page_views.gate("second")
    source = page_views.three_parts(first, second)
    options = {"stateBackend": backend}
    running = page_views.start(views(page_views, source), **options)
    running.wait(CheckpointCompleted, number=2)
    running.query.stop()

    first.open()
    assert told_before(page_views, views(page_views, source, front=2, back=1)) == ""
    longer = page_views.start(views(page_views, source, front=2, back=1), **options)
    longer.next_checkpoint()
    longer.kill(slot=1, attempt=longer.attempts()[0].attempt)
    longer.wait(SlotsRunning, number=2)
    longer.next_checkpoint()
    longer.query.stop()
    second.open()
    shorter = page_views.start(views(page_views, source, front=1), **options)
    shorter.finish()

    page_views.check_exactly_once(source)
    assert longer.attempts()[0].restored_from is not None
    assert list((page_views.home / "clicks" / "_stillframe" / "staging").iterdir()) == []


def test_records_under_way_find_the_way_they_were_on(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    options = {"unalignedCheckpoints": "true"}
    running = page_views.start(views(page_views, source), **options)
    running.wait(CheckpointCompleted, number=2)
    running.query.stop()

    gate.open()
    page_views.start(views(page_views, source, back=2), **options).finish()

    page_views.check_exactly_once(source)


def test_two_operators_that_look_alike_are_not_mixed_up_but_refused(page_views):
    source = page_views.halves(page_views.gate("never"))

    def twice(first, second):
        read = Node(Read(source), source.schema)
        ends = []
        for name, steps in (("first", first), ("second", second)):
            counted = Node(Aggregate(("app_id",), (COUNT,)), COUNTS, (kept(read, steps),))
            sink = FileSink(str(page_views.home / name), "parquet", COUNTS)
            ends.append(Node(Write(sink), COUNTS, (counted,)))
        return build_plan("page-views", ends, 2)

    running = page_views.start(twice(1, 2))
    running.wait(CheckpointCompleted, number=2)
    running.query.stop()
    unchanged = page_views.start(twice(1, 2))
    unchanged.next_checkpoint()
    unchanged.query.stop()

    told = refusal_of(page_views.start(twice(2, 3)))

    assert told.endswith(told_before(page_views, twice(2, 3)))
    assert told_before(page_views, twice(1, 2)) == ""
    [one, two] = [line for line in told.splitlines() if "it holds state of 'aggregate" in line]
    assert "which could belong to 'aggregate count(*) by app_id' (aggregate-" in one
    assert 'add .uid("aggregate-' in one
    assert one != two


# --- epochs that a function is given --------------------------------------------------------------


class Epochs:
    def __init__(self, home):
        self.home = home
        self.ids: dict[int, list[int]] = {}
        self.calls = 0
        self.fails_in: int | None = None
        self.failed = threading.Event()

    def handle(self, epoch, mark, files):
        self.calls += 1
        if epoch == self.fails_in:
            self.failed.set()
            raise ValueError("no such table")
        ids = [i for file in files for i in pq.read_table(file)["id"].to_pylist()]
        self.ids.setdefault(epoch, []).extend(ids)

    def plan(self, source, function, steps=0, more=()):
        """As `foreachBatch` does it: the uid, and with it the directory, hangs on the name."""
        stream = kept(Node(Read(source), source.schema), steps)
        draft = StagedSink("", None, source.schema, f"foreachBatch {function}")
        uid = Node(Write(draft), source.schema, (stream,)).uid
        sink = replace(draft, directory=str(self.home / "staged" / uid), handler=self.handle)
        return build_plan("page-views", [Node(Write(sink), source.schema, (stream,)), *more], 2)


@pytest.fixture
def epochs(page_views):
    return Epochs(page_views.home)


def failed_in_epoch_1(page_views, epochs, source):
    epochs.fails_in = 1
    running = page_views.start(
        epochs.plan(source, "save"), checkpointInterval="1 hour", restartAttempts="0"
    )
    running.wait_for_records(2_000)
    running.query.processAllAvailable()
    assert epochs.ids.keys() == {0}
    page_views.gate("second-half").open()
    assert "no such table" in refusal_of(running)
    epochs.fails_in = None


def test_an_epoch_that_a_function_refused_is_given_to_it_when_it_is_corrected_and_renamed(
    page_views, epochs
):
    source = page_views.halves(page_views.gate("second-half"))
    failed_in_epoch_1(page_views, epochs, source)

    running = page_views.start(epochs.plan(source, "save_corrected", steps=1))
    running.finish()

    assert len(epochs.ids[1]) == 2_000
    assert sorted(i for ids in epochs.ids.values() for i in ids) == sorted(
        i for s in (0, 10_000) for i in range(s, s + 2_000)
    )
    left = list((page_views.home / "staged").rglob("*.parquet"))
    assert left == []


def only_to_files(page_views, source, name="files"):
    read = Node(Read(source), source.schema)
    sink = FileSink(str(page_views.home / name), "parquet", source.schema)
    return Node(Write(sink), source.schema, (read,))


def test_an_epoch_that_nobody_would_commit_is_never_dropped_by_a_general_option(page_views, epochs):
    source = page_views.halves(page_views.gate("second-half"))
    failed_in_epoch_1(page_views, epochs, source)
    staged = sorted((page_views.home / "staged").rglob("*.parquet"))
    assert staged
    without = build_plan("page-views", [only_to_files(page_views, source)], 2)

    for options in ({}, {"allowNonRestoredState": "true"}):
        told = refusal_of(page_views.start(without, **options))
        assert "it holds 2,000 rows of epoch 1 that the sink 'write foreachBatch save'" in told
        assert 'add .uid("write-' in told
        assert "allowNonRestoredState" not in told
        assert told.endswith(told_before(page_views, without, **options))
    savepoint = str(page_views.home / "sp")
    endless = page_views.halves(page_views.gate("never"))
    other = page_views.start(
        build_plan("other", [only_to_files(page_views, endless, "other")], 2),
        checkpointInterval="1 hour",
    )
    other.wait(SlotsRunning)
    other.query.stop(savepoint=savepoint)
    told = refusal_of(page_views.start(without, fresh="true", restoreFrom=savepoint))
    assert "holds 2,000 rows of epoch 1 that the sink 'write foreachBatch save'" in told
    assert "start the job once without fresh and restoreFrom" in told
    assert sorted((page_views.home / "staged").rglob("*.parquet")) == staged


def test_an_epoch_is_dropped_if_a_person_names_sink_epoch_and_rows(page_views, epochs, caplog):
    source = page_views.halves(page_views.gate("second-half"))
    failed_in_epoch_1(page_views, epochs, source)
    without = build_plan("page-views", [only_to_files(page_views, source)], 2)
    [(_, planned)] = [
        each
        for each in epochs.plan(source, "save").operators()
        if isinstance(each[1].operator, Write)
    ]

    told = refusal_of(page_views.start(without, discardPrepared=f"{planned.uid}:1:1999"))
    assert f"names {planned.uid}:1:1999, but checkpoint 2" in told
    assert f"({planned.uid}:1:2000)" in told
    discard = {"discardPrepared": f"{planned.uid}:1:2000"}
    assert told_before(page_views, without, **discard) == ""
    page_views.start(without, **discard).finish()

    assert "2,000 rows of epoch 1 that the sink 'write foreachBatch save'" in caplog.text
    assert epochs.ids.keys() == {0}


def test_a_sink_that_has_committed_all_may_be_taken_out_without_any_option(page_views):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    running = page_views.start(views(page_views, source), checkpointInterval="1 hour")
    running.wait_for_records(2_000)
    running.query.processAllAvailable()
    running.query.stop()
    gate.open()

    assert told_before(page_views, views(page_views, source, sinks=("counts",))) == ""
    page_views.start(views(page_views, source, sinks=("counts",))).finish()

    assert page_views.clicks_visible() == 2_000
