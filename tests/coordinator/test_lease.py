"""A driver's lease on a real store, and processes that have really ended."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from stillframe.coordinator import lease as leases
from stillframe.coordinator.lease import DriverLease
from stillframe.protocol.lease import Alive, Lease, LookAgain, TakeOver
from stillframe.storage.local import LocalStore


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "job")


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
    first, second = DriverLease(store, 0.03), DriverLease(store, 15.0)
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


def test_files_that_are_no_leases_are_passed_over(store):
    store.write("lease/torn", [b'{"driver": "x"'])
    store.write("lease/alien", [b"[1, 2]"])

    assert DriverLease(store, 15.0).look(0.0) == TakeOver()


def test_a_child_that_nobody_has_waited_for_counts_as_ended():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        assert os.path.exists(f"/proc/{process.pid}"), "its remains are still there"
        assert leases._start_of(process.pid) is None
