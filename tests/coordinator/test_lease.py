"""A driver's lease on real stores, and processes that have really ended."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from stillframe.coordinator import lease as leases
from stillframe.coordinator.lease import DriverLease
from stillframe.errors import StorageError, Unanswered
from stillframe.protocol.lease import Alive, Lease, LookAgain, TakeOver
from stillframe.storage.store import open_store

STORES = [
    "local",
    pytest.param("s3", marks=pytest.mark.s3),
    pytest.param("hdfs", marks=pytest.mark.hdfs),
]


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    if request.param == "local":
        return open_store(str(tmp_path / "job"))
    if request.param == "hdfs":
        return open_store(f"{request.getfixturevalue('hdfs_root')}/job")
    return open_store(*request.getfixturevalue("on_s3"))


@pytest.fixture
def on_s3(s3_bucket, s3_settings):
    """Address and settings of a store whose way can be broken."""
    return f"s3://{s3_bucket}/jobs/job", s3_settings


class Interrupted:
    """A store with which something happens after a listing, once."""

    def __init__(self, store, happens):
        self._store, self._happens = store, happens

    def list(self, directory):
        names = self._store.list(directory)
        happens, self._happens = self._happens, lambda: None
        happens()
        return names

    def __getattr__(self, name):
        return getattr(self._store, name)


class Flaky:
    """A store that fails in one request: a file is written all the same, or not deleted."""

    def __init__(self, store, fails=None):
        self._store, self.fails = store, fails

    def write(self, path, chunks):
        self._store.write(path, chunks)
        self._fail_once("write")

    def delete(self, path):
        self._fail_once("delete")
        self._store.delete(path)

    def _fail_once(self, request):
        if self.fails == request:
            self.fails = None
            raise Unanswered(f"cannot {request}: no answer came")

    def __getattr__(self, name):
        return getattr(self._store, name)


def there(store) -> list[Lease]:
    return [
        Lease.from_json(json.loads(store.read(f"lease/{name}"))) for name in store.list("lease")
    ]


def left_behind(store, **changed) -> Lease:
    """The lease of a driver that was killed: one that has renewed it in this process, changed."""
    driver = DriverLease(store, 15.0)
    driver.take()
    [lease] = there(store)
    driver.release()
    lease = replace(lease, **changed)
    store.write(f"lease/{lease.driver}-9", [json.dumps(lease.to_json()).encode()])
    return lease


def ended_process() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process


def test_a_lease_is_there_while_it_is_held_and_not_afterwards(store):
    first, second = DriverLease(store, 15.0), DriverLease(store, 15.0)
    assert second.look(0.0) == TakeOver()
    first.take()
    assert isinstance(second.look(0.0), LookAgain)
    assert first.look(0.0) == TakeOver(), "one's own is not in the way"
    first.release()
    assert second.look(1.0) == TakeOver()
    assert there(store) == []


def test_a_lease_is_renewed_again_and_again(store):
    first, second = DriverLease(store, 0.3), DriverLease(store, 15.0)
    first.take()
    found = second.look(0.0)
    for _ in range(10_000):
        if isinstance(found, Alive):
            break
        found = second.look(0.0)  # at a clock that stands still, so that it cannot run out
    first.release()

    assert isinstance(found, Alive)
    assert found.lease.pid == os.getpid()


def test_the_lease_of_a_process_that_has_ended_is_passed_over_at_once(store):
    left_behind(store, pid=ended_process().pid)

    assert DriverLease(store, 15.0).look(0.0) == TakeOver()


def test_a_process_that_has_the_number_of_one_that_ended_is_not_taken_for_it(store):
    left_behind(store, process_started=1)

    assert DriverLease(store, 15.0).look(0.0) == TakeOver()


@pytest.mark.parametrize("machine", ["another boot pid:[1]", ""])
def test_a_process_of_another_machine_is_waited_for(store, machine):
    left_behind(store, pid=ended_process().pid, machine=machine)
    driver = DriverLease(store, 3.0)

    assert isinstance(driver.look(0.0), LookAgain)
    assert isinstance(driver.look(14.9), LookAgain), "as long as the lease says, not as ours does"
    assert driver.look(15.0) == TakeOver()


def test_who_takes_a_job_over_clears_away_what_the_driver_before_left(store):
    left_behind(store, pid=ended_process().pid)
    driver = DriverLease(store, 15.0)
    driver.take()
    [lease] = there(store)
    driver.release()

    assert lease.pid == os.getpid()


def test_a_lease_that_is_renewed_while_it_is_read_is_in_the_way_all_the_same(store):
    first = DriverLease(store, 15.0)
    first.take()
    second = DriverLease(Interrupted(store, first._renew), 15.0)
    found = second.look(0.0)
    first.release()

    assert isinstance(found, LookAgain)


def test_a_lease_that_is_given_back_while_it_is_read_is_not_in_the_way(store):
    first = DriverLease(store, 15.0)
    first.take()
    second = DriverLease(Interrupted(store, first.release), 15.0)

    assert second.look(0.0) == TakeOver()


@pytest.mark.s3
def test_a_lease_that_cannot_be_read_is_no_lease_that_has_run_out(on_s3, gateway):
    first = DriverLease(open_store(*on_s3), 15.0)
    first.take()
    second = DriverLease(Interrupted(open_store(*on_s3), gateway.close), 15.0)

    with pytest.raises(StorageError, match="cannot be reached"):
        second.look(0.0)
    gateway.open()
    assert isinstance(DriverLease(open_store(*on_s3), 15.0).look(0.0), LookAgain)
    first.release()


def test_a_driver_of_another_machine_killed_between_two_renewals_is_not_taken_for_alive(store):
    """It has written the new one and not deleted the old one yet."""
    lease = left_behind(store, machine="another boot pid:[1]", renewal=9)
    older = replace(lease, renewal=8)
    store.write(f"lease/{lease.driver}-8", [json.dumps(older.to_json()).encode()])
    driver = DriverLease(store, 3.0)

    assert driver.look(0.0) == LookAgain(2.5, lease)
    assert driver.look(15.0) == TakeOver()


@pytest.mark.parametrize("request_lost", ["write", "delete"])
def test_a_renewal_of_which_half_was_done_leaves_one_lease_and_in_the_end_none(store, request_lost):
    flaky = Flaky(store)
    driver = DriverLease(flaky, 3_600.0)
    driver.take()
    for _ in range(2):
        flaky.fails = request_lost
        with pytest.raises(StorageError):
            driver._renew()
    driver._renew()
    assert [lease.renewal for lease in there(store)] == [4]

    flaky.fails = request_lost
    with pytest.raises(StorageError):
        driver._renew()
    driver.release()
    assert there(store) == []


def test_a_lease_that_could_not_be_taken_is_given_back_all_the_same(store):
    flaky = Flaky(store, "write")
    driver = DriverLease(flaky, 15.0)
    with pytest.raises(StorageError):
        driver.take()
    assert there(store), "it came to be after all"

    driver.release()
    assert there(store) == []


def test_files_that_are_no_leases_are_passed_over(store):
    store.write("lease/torn", [b'{"driver": "x"'])
    store.write("lease/alien", [b"[1, 2]"])

    assert DriverLease(store, 15.0).look(0.0) == TakeOver()


def test_a_child_that_nobody_has_waited_for_counts_as_ended():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        assert os.path.exists(f"/proc/{process.pid}"), "its remains are still there"
        assert leases._start_of(process.pid) is None
