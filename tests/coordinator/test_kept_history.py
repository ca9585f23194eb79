"""A job's history on a store: kept in the background, bounded, read back by whoever comes next."""

import gc
import json
import logging
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from waiting import wait_until

from stillframe.coordinator.history import (
    CheckpointCommitted,
    CheckpointCompleted,
    CheckpointFailed,
    History,
)
from stillframe.coordinator.kept_history import HistoryThread, read_history
from stillframe.errors import StorageError
from stillframe.protocol.failures import AttemptBegun, Failure, Restored
from stillframe.protocol.figures import Moment, Triggered
from stillframe.protocol.joblog import JobRecord
from stillframe.protocol.manifests import SubtaskTimings
from stillframe.protocol.statistics import TaskShape
from stillframe.storage.local import LocalStore
from stillframe.storage.store import open_store
from stillframe.testing.clock import ManualClock

TASKS = (TaskShape("v1", "read", 1),)
NOW = Moment(1_000, 1.0)
BROKE = Failure(1, 1, 1_000, "slot 1 was lost", "lost slot", 1.0)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def store(request, tmp_path):
    if request.param == "local":
        return LocalStore(tmp_path)
    request.getfixturevalue("s3_environment")
    return open_store(f"s3://{request.getfixturevalue('s3_bucket')}/root/job")


@pytest.fixture
def local(tmp_path):
    return LocalStore(tmp_path)


def driver(store, attempt=1, before=None, restored=None, kept_max=100):
    """A driver that has begun an attempt."""
    recorder = History(HistoryThread(store, kept_max), ManualClock(), kept_max)
    recorder.start()
    begin(recorder, attempt, before, restored)
    return recorder


def begin(recorder, attempt, before=None, restored=None):
    source = Restored(restored, 1_000, False, None) if restored else None
    recorder.note_begun(AttemptBegun(attempt, 1_000, source), before)


def timings(index, arrivals=()):
    spent = (1.0, 2.0, 3.0, 4.0, 5, 6, 0)
    return SubtaskTimings(*spent, task="t", subtask=index, arrivals=tuple(arrivals))


def complete(recorder, *numbers, attempt=1, subtasks=0):
    for number in numbers:
        recorder.note_triggered(Triggered(number, attempt, "CHECKPOINT", TASKS, recorder.now()))
        for index in range(subtasks):
            recorder.note_acknowledged(number, "v1", timings(index))
        told = (number, number, attempt, 1_000, 1.0, 10, (), 0, 0)
        recorder.tell(CheckpointCompleted(*told, path=f"/chk/{number}", metadata_bytes=10))


def ids(kept):
    return [each.checkpoint_id for each in kept.checkpoints]


def test_what_a_driver_kept_is_there_without_one(store):
    first = driver(store)
    complete(first, 1, 2)
    first.note_triggered(Triggered(3, 1, "CHECKPOINT", TASKS, NOW))
    first.tell(CheckpointFailed(3, "disk full"))
    first.note_failure(BROKE)
    first.close("failed")

    kept = read_history(store)

    assert ids(kept) == [1, 2, 3]
    assert kept.checkpoints[-1].failure == "disk full"
    assert [each.reason for each in kept.failures] == ["slot 1 was lost"]
    assert [each.outcome for each in kept.ended] == ["failed"]


def test_the_next_driver_goes_on_where_the_last_one_ended(store):
    first = driver(store)
    complete(first, 1, 2)
    first.close("stopped")

    second = driver(store, attempt=2, restored=2)
    complete(second, 3, attempt=2)
    known = second.kept()
    second.close("stopped")

    assert ids(known) == [1, 2, 3]
    assert known.statistics().counts.completed == 3
    again = read_history(store)
    assert (ids(again), again.totals) == ([1, 2, 3], known.totals)
    assert again.statistics().restored.checkpoint_id == 2


def test_a_driver_that_died_is_told_of_by_the_next(store):
    first = driver(store)
    complete(first, 1)
    first.note_triggered(Triggered(2, 1, "CHECKPOINT", TASKS, NOW))
    first._keeping.close()  # killed, after all of this was written

    running = JobRecord(3, "checkpoint-completed", 1, written_by="host:4711:ab")
    second = driver(store, attempt=2, before=running, restored=1)
    second.close("stopped")

    for kept in (second.kept(), read_history(store)):
        [lost] = kept.failures
        assert (lost.kind, lost.attempt) == ("driver lost", 1)
        assert lost.recovered_from.checkpoint_id == 1


def test_a_driver_that_stopped_in_good_order_was_not_lost(store):
    driver(store).close("stopped")

    running = JobRecord(3, "checkpoint-completed", 1, written_by="host:4711:ab")
    second = driver(store, attempt=2, before=running)
    begin(second, 3, replace(running, attempt=2))  # nor is it lost itself when it starts again
    second.close("stopped")

    assert read_history(store).failures == []


def test_no_more_than_the_bound_is_kept(local):
    recorder = driver(local, kept_max=3)
    complete(recorder, *range(1, 8))
    for _ in range(12):
        recorder.note_failure(BROKE)
    recorder.close("stopped")

    assert len(local.list("history/checkpoints")) == 3
    assert len(local.list("history/failures")) == 3
    kept = read_history(local)
    assert ids(kept) == [5, 6, 7]
    assert [each.number for each in kept.failures] == [10, 11, 12]
    assert kept.totals.completed == 7, "counts have no bound"


def test_older_checkpoints_are_rolled_into_few_files_with_their_slowest_subtasks(local):
    first = driver(local, kept_max=1_000)
    for number in range(1, 421):
        complete(first, number, subtasks=5)
        first.tell(CheckpointCommitted(number))
        if number % 50 == 0:
            wait_until(lambda: not first._keeping._waiting)
    known = first.kept()
    first.close("stopped")

    assert [len(local.list(f"history/{each}")) for each in ("checkpoints", "rolled")] == [120, 3]
    kept = read_history(local)
    assert ids(kept) == ids(known) == list(range(1, 421))
    assert kept.totals.completed == 420
    old, new = kept.checkpoints[100], kept.checkpoints[-1]
    assert (len(old.subtasks), len(new.subtasks)) == (3, 5)
    assert (old.sums, old.commit_ms) == (new.sums, 0.0)
    assert kept.checkpoints[:300] == known.checkpoints[:300]

    second = driver(local, attempt=2, restored=420, kept_max=300)
    complete(second, *range(421, 501), attempt=2)
    assert ids(second.kept()) == list(range(201, 501))
    second.close("stopped")
    assert [len(local.list(f"history/{each}")) for each in ("checkpoints", "rolled")] == [100, 2]


def test_a_driver_that_died_while_it_rolled_files_up_leaves_nothing_twice(local, tmp_path):
    first = driver(local, kept_max=1_000)
    complete(first, *range(1, 100))
    wait_until(lambda: not first._keeping._waiting)
    left = {path: path.read_bytes() for path in (tmp_path / "history/checkpoints").iterdir()}
    complete(first, *range(100, 191))
    wait_until(lambda: not first._keeping._waiting)
    complete(first, *range(191, 211))
    first.close("stopped")
    assert len(local.list("history/rolled")) == 1
    for path, data in left.items():
        path.write_bytes(data)

    assert ids(read_history(local)) == list(range(1, 211))


def test_a_rolled_up_file_that_is_damaged_or_newer_is_named_and_the_rest_is_shown(local, tmp_path):
    first = driver(local, kept_max=1_000)
    for number in range(1, 311):
        complete(first, number)
        if number % 50 == 0:
            wait_until(lambda: not first._keeping._waiting)
    first.close("stopped")
    torn, newer = sorted((tmp_path / "history" / "rolled").iterdir())
    torn.write_bytes(torn.read_bytes()[:5_000])
    newer.write_bytes(newer.read_bytes().replace(b'"format_version":4', b'"format_version":5'))

    kept = read_history(local)

    assert ids(kept) == list(range(201, 311))
    assert [torn.name in kept.unreadable[0], newer.name in kept.unreadable[1]] == [True, True]
    assert "newer Stillframe" in kept.unreadable[1]


@pytest.fixture(scope="module")
def of_a_thousand():
    """A driver's history of 1,000 checkpoints of 64 subtasks."""
    tasks = (TaskShape("v1", "read", 32), TaskShape("v2", "count", 32))
    history = History(clock=ManualClock())
    for number in range(1, 1_001):
        history.note_triggered(Triggered(number, 1, "CHECKPOINT", tasks, history.now()))
        for index in range(32):
            history.note_acknowledged(number, "v1", timings(index))
            history.note_acknowledged(number, "v2", timings(index, [("e", i, 1.0) for i in (0, 1)]))
        history.tell(CheckpointCompleted(number, number, 1, 1_000, 1.0, 10, (), 0, 0))
    return history


def bytes_of(root):
    """Of an object and all that it holds; classes and functions are there anyway."""
    seen, waiting, taken = {}, [root], 0
    while waiting:
        each = waiting.pop()
        if id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType):
            seen[id(each)] = each
            taken += sys.getsizeof(each)
            waiting += gc.get_referents(each)
    return taken


def test_a_thousand_checkpoints_of_64_subtasks_take_20_mb_at_most(of_a_thousand):
    assert 1_000_000 <= bytes_of(of_a_thousand) <= 20_000_000


def test_a_thousand_checkpoints_of_64_subtasks_are_answered_at_once(of_a_thousand):
    """By processor time, for the machine may be busy; a lookup of one of them included."""
    history = of_a_thousand

    def took(ask):
        began = time.process_time()
        assert len(json.dumps(ask())) < 1 << 20
        return time.process_time() - began

    for ask in (
        lambda: history.kept().statistics().to_json(),
        lambda: history.kept().statistics().to_json(limit=500, before=900),
        lambda: history.kept().statistics().series_json(),
        lambda: history.kept().statistics().checkpoint(1_000).barriers_json(),
        lambda: history.kept().statistics().checkpoint(950).to_json(with_tasks=True),
        lambda: history.kept().statistics().checkpoint(950).task_to_json("v2"),
        lambda: history.kept().attempts_json(),
    ):
        assert min(took(ask) for _ in range(3)) <= 0.2


class ReadByMany(LocalStore):
    """Counts its requests; none is answered before the gate is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.reads = 0

    def list(self, directory):
        assert self.gate.wait(30)
        return super().list(directory)

    def read(self, path):
        self.reads += 1
        assert self.gate.wait(30)
        return super().read(path)


def test_a_start_does_not_wait_for_the_history_which_few_requests_read(local, tmp_path):
    first = driver(local, kept_max=1_000)
    for number in range(1, 1_100):
        complete(first, number)
        if number % 50 == 0:
            wait_until(lambda: not first._keeping._waiting)
    first.close("stopped")

    slow = ReadByMany(tmp_path)
    second = driver(slow, attempt=2, restored=1_099, kept_max=1_000)
    complete(second, 1_100, attempt=2)
    assert slow.reads == 0, "the attempt has begun and taken a checkpoint before a file was read"
    slow.gate.set()
    assert ids(second.kept()) == list(range(101, 1_101))
    second.close("stopped")

    assert slow.reads <= 220, "eight at a time: at 30 ms a request all are there within a second"


def test_a_torn_an_empty_and_an_alien_file_are_passed_over_with_a_warning(local, tmp_path, caplog):
    recorder = driver(local)
    complete(recorder, 1, 2, 3)
    recorder.close("stopped")
    place = tmp_path / "history" / "checkpoints"
    torn, empty, _ = sorted(place.iterdir())
    torn.write_bytes(torn.read_bytes()[:-30])
    empty.write_bytes(b"")
    (place / "notes.txt").write_text("mine")

    with caplog.at_level(logging.WARNING):
        kept = read_history(local)

    assert ids(kept) == [3]
    told = kept.statistics().to_json()["stillframe"]["unreadable"]
    assert len(told) == 3
    assert [name for name in (torn.name, empty.name, "notes.txt") if name not in caplog.text] == []
    assert (place / "notes.txt").exists()


def test_a_store_without_any_history_has_an_empty_one(local):
    kept = read_history(local)

    assert not kept
    assert kept.statistics().to_json()["counts"]["total"] == 0


def test_before_its_first_attempt_a_driver_writes_nothing(local, tmp_path):
    recorder = History(HistoryThread(local))
    recorder.start()
    recorder.note_failure(BROKE)
    recorder.close("failed")

    assert list(tmp_path.iterdir()) == []


def test_a_fenced_driver_writes_and_deletes_nothing_any_more(tmp_path):
    store = GatedStore(tmp_path)
    old = driver(store)
    complete(old, 1, 2, 3)
    store.reached.wait(30)
    old.abandon()
    store.gate.set()
    complete(old, 4)
    old.close("failed")

    assert len(list((tmp_path / "history").rglob("*.json"))) == 1, "the one that was under way"


def test_two_drivers_that_give_the_same_number_keep_one_record_each(local):
    """The older one does not know yet that it is replaced."""
    old, new = driver(local, attempt=1), driver(local, attempt=2)
    complete(old, 7, attempt=1)
    complete(new, 7, attempt=2)
    old.close("stopped")
    new.close("stopped")

    kept = read_history(local)
    assert [(each.checkpoint_id, each.attempt) for each in kept.checkpoints] == [(7, 1), (7, 2)]
    assert kept.statistics().checkpoint(7).attempt == 2


class GatedStore(LocalStore):
    """Writes wait until the gate is open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate, self.reached = threading.Event(), threading.Event()

    def create_if_absent(self, path: str, data: bytes) -> bool:
        self.reached.set()
        assert self.gate.wait(30)
        return super().create_if_absent(path, data)


def test_a_slow_storage_holds_nobody_up_and_costs_the_oldest_records(tmp_path, caplog):
    store = GatedStore(tmp_path)
    recorder = driver(store)
    assert store.reached.wait(30), "its thread waits in the storage"
    with caplog.at_level(logging.WARNING):
        complete(recorder, *range(1, 151))
    store.gate.set()
    recorder.close("stopped")

    kept = read_history(LocalStore(tmp_path))
    assert ids(kept) == list(range(52, 151)), "ninety-nine, and the end of the attempt"
    assert kept.totals.completed == 150
    assert "so slow that a record of the job's history is lost" in caplog.text


def test_a_storage_that_does_not_answer_is_not_waited_for_at_the_end(tmp_path, caplog):
    store = GatedStore(tmp_path)
    recorder = driver(store)
    complete(recorder, 1)
    with caplog.at_level(logging.WARNING):
        recorder._keeping.close(seconds_max=0.01)
    store.gate.set()

    assert "the end of the job's history is lost" in caplog.text


class Refusing(LocalStore):
    """Neither lists nor writes what belongs to the history, as long as it is told so."""

    refuses = True

    def list(self, directory):
        self._refuse()
        return super().list(directory)

    def create_if_absent(self, path, data):
        self._refuse()
        return super().create_if_absent(path, data)

    def _refuse(self):
        if self.refuses:
            raise StorageError("the storage is away")


def test_a_storage_that_is_away_costs_records_and_nothing_else(tmp_path, caplog):
    store = Refusing(tmp_path)
    with caplog.at_level(logging.WARNING):
        recorder = driver(store)
        complete(recorder, 1)
        known = recorder.kept()
        recorder.close("stopped")

    assert ids(known) == [1], "what this driver has seen it knows"
    assert "the history of earlier drivers cannot be read: the storage is away" in caplog.text
    assert "a record of the job's history is lost: the storage is away" in caplog.text
    with pytest.raises(StorageError, match="away"):
        read_history(store)
