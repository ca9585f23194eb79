"""Commits that are made on the driver."""

import queue
import threading

import pytest

from stillframe.api.sinks import Committer, Sink, committables_of
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator import sinks as sinks_module
from stillframe.coordinator.sinks import CommitFailed, CommitThread, DriverSinks, EpochCommitted
from stillframe.errors import StorageError, Unavailable, UserCodeError
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.ids import Mark, Writer
from stillframe.protocol.manifests import Manifest, OperatorSnapshot, PendingCommit
from stillframe.storage.local import LocalStore
from stillframe.storage.staging import StagedFiles

CLICKS = ClickSource(records=10)
LIMIT_SECONDS = 20


class HereSink(Sink, Committer):
    """Commits at the coordinator; keeps what it is asked, raises what it is told to."""

    commits_at_coordinator = True

    def __init__(self, raises=None):
        self.asked = []
        self.raises = raises
        self.go_on = threading.Event()
        self.go_on.set()

    def open_writer(self, context):
        raise AssertionError("writers are opened in slots")

    def open_committer(self, context):
        return self

    def describe(self):
        return "here"

    def commit(self, epoch, prepared):
        assert self.go_on.wait(LIMIT_SECONDS)
        if self.raises is not None:
            raise self.raises
        self.asked.append((epoch, [each["f"] for each in committables_of(prepared)]))

    def sweep(self, job, uid, older_than, keep):
        self.asked.append(("sweep", job, uid, older_than, [each["f"] for each in keep]))

    def close(self):
        self.asked.append("closed")


class ThereSink(HereSink):
    commits_at_coordinator = False


def driver_sinks(*sinks, staging=None):
    read = Node(Read(CLICKS), CLICKS.schema)
    nodes = [
        Node(Write(sink), CLICKS.schema, (read,), given_uid=f"w{i}") for i, sink in enumerate(sinks)
    ]
    return DriverSinks(build_plan("views", nodes, 2), staging)


def manifest(*snapshots, epoch=4):
    return Manifest("views", 1, 9, epoch, "checkpoint", 0, 0, 128, (), tuple(snapshots), ())


def prepared(uid, subtask, *pairs):
    commits = tuple(PendingCommit(checkpoint_id, {"f": name}) for checkpoint_id, name in pairs)
    return OperatorSnapshot(uid, subtask, commits=commits)


def test_one_commit_gets_what_all_subtasks_prepared_aborted_checkpoints_too():
    sink = HereSink()
    made = manifest(prepared("w0", 0, (8, "aborted"), (9, "a")), prepared("w0", 1, (9, "b")))

    driver_sinks(sink).commit("w0", made)

    assert sink.asked == [(4, ["aborted", "a", "b"])]


def test_only_sinks_that_commit_here_are_committed_here_and_all_are_swept_and_closed():
    here, there = HereSink(), ThereSink()
    sinks = driver_sinks(here, there)
    assert list(sinks.committing_here) == ["w0"]

    sinks.sweep(3, manifest(prepared("w1", 0, (9, "kept"))))
    sinks.close()

    assert here.asked == [("sweep", "views", "w0", 3, []), "closed"]
    assert there.asked == [("sweep", "views", "w1", 3, ["kept"]), "closed"]


def test_what_was_staged_under_a_former_uid_is_swept_unless_another_sink_has_it_now():
    first, second = HereSink(), HereSink()
    sinks = driver_sinks(first, second)
    sinks.go_on_after({"w0": "gone", "w1": "w0"})

    sinks.sweep(3, manifest(prepared("w0", 0, (9, "kept"))))

    assert first.asked == [
        ("sweep", "views", "w0", 3, ["kept"]),
        ("sweep", "views", "gone", 3, ["kept"]),
    ]
    assert second.asked == [("sweep", "views", "w1", 3, [])]


def test_a_sink_that_cannot_be_closed_keeps_no_other_from_it_and_is_told(caplog):
    broken, other = HereSink(), HereSink()
    broken.close = lambda: (_ for _ in ()).throw(RuntimeError("not today"))

    driver_sinks(broken, other).close()

    assert other.asked == ["closed"]
    assert "sink here could not be closed: not today" in caplog.text


def test_what_is_committed_here_has_one_mark_for_all_subtasks_under_the_uid_that_prepared_it():
    sink = HereSink()
    given = []
    sink.commit = lambda epoch, parts: given.extend(part.mark for part in parts)
    sinks = driver_sinks(sink)
    sinks.go_on_after({"w0": "former"}, "i1")
    former = PendingCommit(8, {"f": "a"}, Writer("i1", "former", 1))

    sinks.commit("w0", manifest(OperatorSnapshot("w0", 1, commits=(former,))))
    sinks.commit("w0", manifest(OperatorSnapshot("w0", 0)))

    assert given == [Mark(Writer("i1", "former", None), 9), Mark(Writer("i1", "w0", None), 9)]


def test_a_system_that_is_away_is_tried_again_and_told_meanwhile(committing, monkeypatch):
    monkeypatch.setattr(sinks_module, "retry_after_seconds", lambda failures: 0.01)
    sink = HereSink(raises=Unavailable("nobody answers"))
    thread, events = committing(sink)

    thread.submit(manifest(prepared("w0", 0, (9, "a"))))
    while (under_way := thread._sinks.under_way) is None or under_way.awaits is None:
        threading.Event().wait(0.01)
    assert "nobody answers; tried" in under_way.awaits
    sink.raises = None

    assert events.get(timeout=LIMIT_SECONDS) == EpochCommitted(4)
    assert sink.asked == [(4, ["a"])]


def test_a_system_that_stays_away_longer_than_a_checkpoint_may_take_ends_the_attempt(committing):
    sink = HereSink(raises=Unavailable("nobody answers"))
    thread, events = committing(sink, patience_seconds=0.0)

    thread.submit(manifest(prepared("w0", 0, (9, "a"))))

    assert events.get(timeout=LIMIT_SECONDS) == CommitFailed("nobody answers", "other")


@pytest.fixture
def committing():
    made = []

    def make(*sinks, **patience):
        events = queue.Queue()
        thread = CommitThread(driver_sinks(*sinks), events.put, **patience)
        made.append(thread)
        return thread, events

    yield make
    for thread in made:
        thread.finish()


def test_an_epoch_is_told_when_every_sink_has_committed_it(committing):
    first, second = HereSink(), HereSink()
    thread, events = committing(first, second)

    thread.submit(manifest(prepared("w0", 0, (9, "a")), prepared("w1", 0, (9, "b"))))

    assert events.get(timeout=LIMIT_SECONDS) == EpochCommitted(4)
    assert (first.asked, second.asked) == ([(4, ["a"])], [(4, ["b"])])


def test_an_epoch_without_records_is_committed_too_so_that_numbers_stay_dense(committing):
    sink = HereSink()
    thread, events = committing(sink)

    thread.submit(manifest())

    assert events.get(timeout=LIMIT_SECONDS) == EpochCommitted(4)
    assert sink.asked == [(4, [])]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (UserCodeError("function f answered None"), "permanent"),
        (StorageError("disk full"), "other"),
        (ConnectionError("refused"), "other"),
        (TypeError("no such argument"), "permanent"),
        (SystemExit(3), "permanent"),
    ],
)
def test_a_commit_that_raises_is_told_with_whether_it_would_again(committing, error, cause):
    thread, events = committing(HereSink(raises=error))

    thread.submit(manifest())

    failed = events.get(timeout=LIMIT_SECONDS)
    assert isinstance(failed, CommitFailed)
    assert str(error) in failed.reason
    assert failed.cause == cause


def test_a_commit_that_raises_is_told_with_the_sink_and_the_line(committing):
    thread, events = committing(HereSink(raises=ConnectionError("refused")))

    thread.submit(manifest())

    blame = events.get(timeout=LIMIT_SECONDS).blame
    assert (blame.code, blame.error, blame.operator) == ("sink here", "ConnectionError", "w0")
    assert f"{__file__}:" in blame.line
    assert "raise self.raises" in blame.traceback


def test_finishing_waits_for_the_commit_under_way():
    sink, events = HereSink(), queue.Queue()
    sink.go_on.clear()
    thread = CommitThread(driver_sinks(sink), events.put)
    thread.submit(manifest())
    finishing = threading.Thread(target=thread.finish)
    finishing.start()

    assert finishing.is_alive()
    sink.go_on.set()
    finishing.join(LIMIT_SECONDS)
    assert events.get_nowait() == EpochCommitted(4)


def test_what_a_dead_slot_had_begun_to_stage_is_swept_while_no_slot_runs_and_only_then(tmp_path):
    sinks = driver_sinks(ThereSink(), staging=StagedFiles(LocalStore(tmp_path)))
    begun = tmp_path / "prepared" / "w0" / ".tmp-1"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"half a fi")

    sinks.sweep(2, None, is_running=True)
    assert begun.exists(), "it may be a running slot's"

    sinks.sweep(2, None)
    assert not begun.exists()
