"""The lease of a driver on a store: taken before its first attempt, renewed while it lives.

Theory of operation
-------------------
Files are written once, so each renewal is a new one, `lease/<driver>-<renewal>`, and then the one
before it is deleted: at any moment there is one. Whoever reads may find a name listed whose file
is gone by then, and lists again; only what has been read, or is not there, counts. `protocol/lease`
says what the leases of others mean.

A renewal that fails is tried again at the next: a storage that is down fails checkpoints, and
whoever waits for the lease cannot read it either. An answer may be lost, so after a failure nobody
knows which renewals are there, and the next one looks. It is given back when the job has ended,
whichever way; only a driver that dies leaves it behind. While a function that was given up still
runs on the driver it is kept, so that nobody calls it a second time.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from stillframe.errors import SnapshotDamaged, StillframeError, StorageError
from stillframe.protocol.lease import (
    RENEWALS_PER_TIMEOUT,
    Alive,
    Lease,
    LeaseWatch,
    LookAgain,
    TakeOver,
)
from stillframe.storage.paths import LEASE_DIRECTORY, lease_path
from stillframe.storage.store import Store

log = logging.getLogger("stillframe")

_END_SECONDS_MAX = 10.0
_LOOK_TRIES_MAX = 5
_PROC = Path("/proc")


class DriverLease:
    """One driver's lease of one job. `look` and `take` are for the job's thread."""

    def __init__(self, store: Store, timeout_seconds: float) -> None:
        """`store` is rooted at the job's own directory."""
        self._store = store
        self._own = Lease(
            driver=uuid.uuid4().hex,
            renewal=0,
            timeout_seconds=timeout_seconds,
            host=socket.gethostname(),
            machine=_this_machine(),
            pid=os.getpid(),
            process_started=_start_of(os.getpid()) or 0,
        )
        self._is_untidy = False
        """Whether a renewal has failed, so that older ones may still be there."""
        self._watch = LeaseWatch()
        self._released = threading.Event()
        self._renewing: threading.Thread | None = None

    def look(self, now_seconds: float) -> TakeOver | LookAgain | Alive:
        """What the leases of others say now. May raise `StorageError`."""
        others = [lease for lease in self._all() if lease.driver != self._own.driver]
        gone = {lease.driver for lease in others if _is_gone(lease)}
        return self._watch.on_look(others, gone, now_seconds)

    def is_of_this_process(self, other: Lease) -> bool:
        return (other.machine, other.pid) == (self._own.machine, self._own.pid)

    def take(self) -> None:
        """Claim the job, and clear away what others have left. May raise `StorageError`."""
        before = self._store.list(LEASE_DIRECTORY)
        self._renew()
        for name in before:
            self._store.delete(f"{LEASE_DIRECTORY}/{name}")
        self._renewing = threading.Thread(
            target=self._renew_until_released, name="stillframe-lease", daemon=True
        )
        self._renewing.start()

    def release(self, when_ended: threading.Thread | None = None) -> None:
        """Give it back, so that whoever looks next need not wait; not before this thread has ended,
        which still does something for the job."""
        if when_ended is not None and when_ended.is_alive():
            threading.Thread(
                target=self._release_behind,
                args=(when_ended,),
                name="stillframe-lease-end",
                daemon=True,
            ).start()
        else:
            self._release()

    def _release_behind(self, thread: threading.Thread) -> None:
        thread.join()
        self._release()

    def _release(self) -> None:
        self._released.set()
        if self._renewing is not None:
            self._renewing.join(_END_SECONDS_MAX)
            self._renewing = None
        if self._own.renewal > 0:
            # While this one is still there, so that no other driver is about to take its own.
            with suppress(StorageError):
                self._store.delete_unfinished(LEASE_DIRECTORY)
            with suppress(StorageError):
                for path in self._own_paths():
                    self._store.delete(path)

    def _renew_until_released(self) -> None:
        pause_seconds = self._own.timeout_seconds / RENEWALS_PER_TIMEOUT
        while not self._released.wait(pause_seconds):
            try:
                self._renew()
            except StillframeError as error:
                log.warning("the lease of this driver could not be renewed: %s", error)

    def _renew(self) -> None:
        before = {self._path()}
        self._own = replace(self._own, renewal=self._own.renewal + 1)
        was_untidy, self._is_untidy = self._is_untidy, True
        self._store.write(self._path(), [json.dumps(self._own.to_json()).encode()])
        for path in self._own_paths() - {self._path()} if was_untidy else before:
            self._store.delete(path)
        self._is_untidy = False

    def _path(self) -> str:
        return lease_path(self._own.driver, self._own.renewal)

    def _own_paths(self) -> set[str]:
        """All renewals of ours that are there."""
        names = self._store.list(LEASE_DIRECTORY)
        return {f"{LEASE_DIRECTORY}/{name}" for name in names if name.startswith(self._own.driver)}

    def _all(self) -> list[Lease]:
        """Those of one moment."""
        for _ in range(_LOOK_TRIES_MAX):
            names = self._store.list(LEASE_DIRECTORY)
            with suppress(SnapshotDamaged):  # renewed or given back since it was listed
                leases = [self._read(name) for name in names]
                return [lease for lease in leases if lease is not None]
        raise StorageError(
            f"the leases in {self._store.address}/{LEASE_DIRECTORY} change faster than they can be"
            " read: another driver is running the job; stop it, or leave the job to it"
        )

    def _read(self, name: str) -> Lease | None:
        """None: nothing of ours. That it cannot be read does not say that nobody holds it."""
        data = self._store.read(f"{LEASE_DIRECTORY}/{name}")
        try:
            value = json.loads(data)
            return Lease.from_json(value) if isinstance(value, dict) else None
        except ValueError:
            return None


def _is_gone(lease: Lease) -> bool:
    """Whether the driver's process is known to have ended."""
    if not lease.machine or lease.machine != _this_machine():
        return False
    return _start_of(lease.pid) != lease.process_started


def _this_machine() -> str:
    """Where a process number of ours means the same; empty where that cannot be told."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None if there is none, or only its remains."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
