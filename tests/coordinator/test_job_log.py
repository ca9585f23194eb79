"""The job log on disk: one driver writes on, the past is fenced off, damage is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stillframe.coordinator.job_log import ENTRIES_KEPT, JobLog
from stillframe.errors import (
    Fenced,
    NotDone,
    SnapshotDamaged,
    StorageError,
    Unanswered,
    Unsettled,
)
from stillframe.ids import CheckpointId
from stillframe.protocol.joblog import (
    CompletedCheckpoint,
    JobRecord,
    attempt_started,
    checkpoint_completed,
    ended,
)
from stillframe.storage.files import RealFiles
from stillframe.storage.local import LocalStore
from stillframe.storage.store import Store, open_store


class StandingClock:
    def monotonic_seconds(self) -> float:
        return 0.0

    def wall_ms(self) -> int:
        return 1234


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "page-views"))


def driver(store: Store, name: str) -> JobLog:
    return JobLog(store, "page-views", StandingClock(), written_by=name)


def begin(log: JobLog) -> JobRecord:
    record = log.read()
    newest = record.newest if record else None
    return log.append(attempt_started(record, newest.checkpoint_id if newest else None))


def complete(log: JobLog) -> JobRecord:
    record = log.last
    assert record is not None
    checkpoint = CompletedCheckpoint(
        CheckpointId(record.last_checkpoint_id + 1), record.next_epoch, record.attempt, 1, 1
    )
    return log.append(checkpoint_completed(record, checkpoint, retained_max=2)[0])


def entry(tmp_path: Path, sequence: int) -> Path:
    return tmp_path / f"page-views/log/{sequence:020d}"


def test_a_job_that_never_ran_has_no_record(store: Store) -> None:
    assert driver(store, "a").read() is None


def test_the_newest_record_tells_everything(store: Store) -> None:
    log = driver(store, "a")
    begin(log)
    complete(log)
    written = complete(log)

    read = driver(store, "b").read()

    assert read == written
    assert read is not None
    assert (read.sequence, read.written_at_ms, read.written_by) == (3, 1234, "a")
    assert [kept.checkpoint_id for kept in read.checkpoints] == [1, 2]


def test_a_restart_in_the_same_driver_goes_on_with_the_next_attempt(store: Store) -> None:
    log = driver(store, "a")
    begin(log)
    complete(log)

    record = begin(log)

    assert (record.attempt, record.restored_from) == (2, 1)
    assert complete(log).attempt == 2


def test_a_stalled_driver_is_fenced_by_its_successor(store: Store) -> None:
    old, new = driver(store, "old"), driver(store, "new")
    begin(old)
    complete(old)
    begin(new)

    with pytest.raises(Fenced, match=r"'page-views': attempt 1 .*\(old\).* attempt 2 \(new\)"):
        complete(old)

    assert complete(new).attempt == 2


def test_a_stalled_driver_learns_that_it_was_overtaken_before_it_relies_on_what_it_knows(
    store: Store,
) -> None:
    """Found by the simulator: it took a checkpoint its successor had dropped for a damaged one."""
    old, new = driver(store, "old"), driver(store, "new")
    begin(old)
    old.check_newest()
    begin(new)

    with pytest.raises(Fenced, match=r"attempt 2, started by new, is alive"):
        old.check_newest()


def test_a_stalled_driver_is_fenced_also_after_the_log_was_compacted(
    store: Store, tmp_path: Path
) -> None:
    old, new = driver(store, "old"), driver(store, "new")
    begin(old)
    begin(new)
    for _ in range(2 * ENTRIES_KEPT):
        newest = complete(new)
        new.compact()
    assert not entry(tmp_path, 2).exists(), "the name the old driver wants is free again"

    with pytest.raises(Fenced, match=r"attempt 1 .* attempt 2 \(new\) has written entry 66"):
        complete(old)

    assert entry(tmp_path, 2).exists(), "it did create its entry"
    assert driver(store, "reader").read() == newest
    complete(new)
    new.compact()
    assert not entry(tmp_path, 2).exists()


def test_a_fenced_driver_stays_fenced_until_it_reads_the_log_again(store: Store) -> None:
    old, new = driver(store, "old"), driver(store, "new")
    begin(old)
    begin(new)
    for _ in range(2):
        with pytest.raises(Fenced):
            complete(old)

    assert begin(old).attempt == 3
    with pytest.raises(Fenced, match=r"attempt 3 \(old\)"):
        complete(new)


def test_nobody_writes_for_an_attempt_that_another_driver_began(store: Store) -> None:
    owner, stranger = driver(store, "owner"), driver(store, "stranger")
    record = begin(owner)
    assert stranger.read() == record

    with pytest.raises(Fenced, match="stranger"):
        stranger.append(ended(record, "failed"))

    complete(owner)


def test_of_two_drivers_that_start_together_one_is_fenced(store: Store) -> None:
    first, second = driver(store, "first"), driver(store, "second")
    seen = second.read()
    begin(first)

    with pytest.raises(Fenced, match=r"attempt 1 .*\(second\).* attempt 1 \(first\)"):
        second.append(attempt_started(seen, None))


class Overtaken(RealFiles):
    """Files of a driver that stops for a moment when an entry is written and has no name yet."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] = lambda: None

    def link(self, file: str, name: str) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        super().link(file, name)


def test_a_driver_whose_half_written_entry_is_swept_by_its_successor_is_told_that_it_was_overtaken(
    store: Store, tmp_path: Path
) -> None:
    files = Overtaken()
    first, second = driver(LocalStore(tmp_path / "page-views", files), "a"), driver(store, "b")
    begin(first)

    def take_over() -> None:
        begin(second)
        second.sweep()

    files.meanwhile = take_over
    with pytest.raises(Fenced, match=r"attempt 1 .*\(a\).* attempt 2 \(b\).*run only one driver"):
        complete(first)
    complete(second)


def test_of_many_drivers_that_take_over_at_once_exactly_one_goes_on(store: Store) -> None:
    begin(driver(store, "first"))
    start = threading.Barrier(8)

    def take_over(name: int) -> bool:
        log = driver(store, f"driver {name}")
        record = log.read()
        start.wait(timeout=60)
        try:
            log.append(attempt_started(record, None))
        except Fenced:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take_over, range(8), timeout=60)) == 1


def test_the_log_stays_short_whatever_happens(store: Store) -> None:
    log = driver(store, "a")
    begin(log)
    for _ in range(ENTRIES_KEPT + 20):
        complete(log)
        log.compact()

    sequences = [int(name) for name in store.list("log")]
    newest = ENTRIES_KEPT + 21
    assert sequences == list(range(newest - ENTRIES_KEPT + 1, newest + 1))


def test_left_overs_and_strange_files_are_not_entries(store: Store, tmp_path: Path) -> None:
    log = driver(store, "a")
    record = begin(log)
    for name in (".tmp-1", "README", "99"):
        (tmp_path / "page-views/log" / name).write_text("?")

    assert driver(store, "b").read() == record
    complete(log)


@pytest.mark.parametrize("kept", [0, 40, -1])
def test_a_torn_newest_entry_is_told_and_the_one_before_is_not_used(
    store: Store, tmp_path: Path, kept: int
) -> None:
    log = driver(store, "a")
    begin(log)
    complete(log)
    damaged = entry(tmp_path, 2)
    damaged.write_bytes(damaged.read_bytes()[:-2][:kept])

    with pytest.raises(SnapshotDamaged, match=r"entry 2 of the log of job 'page-views' .*damaged"):
        driver(store, "b").read()


def test_an_entry_under_another_number_is_damage(store: Store, tmp_path: Path) -> None:
    begin(driver(store, "a"))
    entry(tmp_path, 1).rename(entry(tmp_path, 5))

    with pytest.raises(SnapshotDamaged, match="it holds entry 1"):
        driver(store, "b").read()


def test_a_damaged_older_entry_bothers_nobody(store: Store, tmp_path: Path) -> None:
    log = driver(store, "a")
    begin(log)
    newest = complete(log)
    entry(tmp_path, 1).write_bytes(b"rubbish")

    assert driver(store, "b").read() == newest


def test_of_two_drivers_with_a_deleted_log_between_them_one_is_fenced(store: Store) -> None:
    first, second = driver(store, "first"), driver(store, "second")
    begin(first)
    complete(first)
    store.delete_directory("log")
    begin(second)
    complete(first)  # entry 3 follows on what this driver knows

    with pytest.raises(Fenced, match=r"attempt 1 \(first\) has written entry 3"):
        complete(second)


class FailingStore(LocalStore):
    """A local store whose disk breaks, once, before or after an entry got its name."""

    fails: str = ""

    def create_if_absent(self, path: str, data: bytes) -> bool:
        fails, self.fails = self.fails, ""
        if fails == "before":
            raise StorageError(f"cannot create {path}: no space left on device")
        created = super().create_if_absent(path, data)
        if fails == "after":
            raise StorageError(f"cannot create {path}: the device reported an error")
        return created


def test_an_append_that_failed_before_it_landed_may_be_tried_again(tmp_path: Path) -> None:
    store = FailingStore(tmp_path / "page-views")
    log = driver(store, "a")
    begin(log)
    store.fails = "before"
    with pytest.raises(StorageError, match="no space left"):
        complete(log)

    assert complete(log).sequence == 2


def test_an_append_of_unknown_outcome_stops_the_driver_until_it_reads_the_log(
    tmp_path: Path,
) -> None:
    store = FailingStore(tmp_path / "page-views")
    log = driver(store, "a")
    begin(log)
    store.fails = "after"
    for _ in range(2):
        with pytest.raises(Fenced, match=r"unknown whether entry 2 .* was kept .*attempt 1 stops"):
            complete(log)

    assert begin(log).restored_from == 1


class SilentStore(LocalStore):
    """A storage over a network: it gives no answer, or cannot be reached, or answers late."""

    no_answer = is_down = is_late = False
    late: tuple[str, bytes] | None = None

    def create_if_absent(self, path: str, data: bytes) -> bool:
        if self.is_down:
            raise NotDone(f"cannot create {path}: nobody is there")
        if self.is_late:
            self.late = (path, data)
        elif not self.no_answer:
            return super().create_if_absent(path, data)
        else:
            super().create_if_absent(path, data)
        raise Unanswered(f"cannot create {path}: no answer in time")

    def list(self, directory: str) -> list[str]:
        if self.is_down:
            raise NotDone(f"cannot list {directory}: nobody is there")
        return super().list(directory)

    def deliver(self) -> None:
        """What was asked in vain happens after all."""
        assert self.late is not None
        super().create_if_absent(*self.late)


def begin_again(log: JobLog) -> JobRecord:
    """As a driver does that has not ended in between."""
    log.check_newest()
    record = log.last
    newest = record.newest if record else None
    return log.append(attempt_started(record, newest.checkpoint_id if newest else None))


def test_an_append_that_never_reached_the_storage_fails_alone(tmp_path: Path) -> None:
    store = SilentStore(tmp_path / "page-views")
    log = driver(store, "a")
    begin(log)
    store.is_down = True
    with pytest.raises(NotDone, match="nobody is there"):
        complete(log)
    store.is_down = False

    assert complete(log).sequence == 2, "the same attempt goes on"


def test_an_entry_without_an_answer_is_found_kept_by_the_next_attempt(tmp_path: Path) -> None:
    store = SilentStore(tmp_path / "page-views")
    log = driver(store, "a")
    begin(log)
    store.no_answer = True
    for _ in range(2):
        with pytest.raises(Unsettled, match=r"unknown whether entry 2 .* was kept"):
            complete(log)
    store.no_answer = False

    again = begin_again(log)

    assert (again.sequence, again.attempt, again.restored_from) == (3, 2, 1)


def test_an_entry_without_an_answer_that_was_not_kept_can_never_appear(tmp_path: Path) -> None:
    store = SilentStore(tmp_path / "page-views")
    log = driver(store, "a")
    begin(log)
    store.is_late = True
    with pytest.raises(Unsettled):
        complete(log)
    store.is_late = False

    again = begin_again(log)
    store.deliver()

    assert (again.sequence, again.attempt, again.restored_from) == (2, 2, None)
    assert driver(store, "b").read() == again


def test_an_entry_that_appears_between_looking_and_writing_is_taken_by_the_next_attempt(
    tmp_path: Path,
) -> None:
    store = SilentStore(tmp_path / "page-views")
    log = driver(store, "a")
    begin(log)
    store.is_late = True
    with pytest.raises(Unsettled):
        complete(log)
    store.is_late = False
    log.check_newest()
    store.deliver()

    with pytest.raises(Unsettled, match="it appeared late"):
        log.append(attempt_started(log.last, None))

    assert begin_again(log).restored_from == 1


def test_a_driver_that_waits_for_an_answer_is_fenced_by_another_that_went_on(
    tmp_path: Path,
) -> None:
    store = SilentStore(tmp_path / "page-views")
    log = driver(store, "old")
    begin(log)
    store.no_answer = True
    with pytest.raises(Unsettled):
        complete(log)
    store.no_answer = False
    begin(driver(store, "new"))

    with pytest.raises(Fenced, match=r"attempt 2, started by new, is alive") as raised:
        begin_again(log)
    assert not isinstance(raised.value, Unsettled)


def test_an_unreadable_checkpoint_location_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "page-views").write_text("a file")
    log = driver(open_store(str(tmp_path / "page-views")), "a")

    with pytest.raises(StorageError, match=r"cannot list .*page-views/log: a part of the path"):
        log.read()
