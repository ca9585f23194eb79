"""The lease of a driver on a store: taken before its first attempt, renewed while it lives.

Theory of operation
-------------------
Files are written once, so each renewal is a new one, `lease/<driver>-<renewal>`, and the one before
it is deleted. `protocol/lease` says what the leases of others mean. A renewal that fails is tried
again at the next: a storage that is down fails checkpoints, and whoever waits for the lease cannot
read it either. It is given back when the job has ended, whichever way; only a driver that dies
leaves it behind.
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

from stillframe.errors import StillframeError, StorageError
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
        self._watch = LeaseWatch()
        self._released = threading.Event()
        self._renewing: threading.Thread | None = None

    def look(self, now_seconds: float) -> TakeOver | LookAgain | Alive:
        """What the leases of others say now. May raise `StorageError`."""
        others = [lease for lease in self._all() if lease.driver != self._own.driver]
        gone = {lease.driver for lease in others if _is_gone(lease)}
        return self._watch.on_look(others, gone, now_seconds)

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

    def release(self) -> None:
        """Give it back; whoever looks next need not wait."""
        self._released.set()
        if self._renewing is not None:
            self._renewing.join(_END_SECONDS_MAX)
            self._renewing = None
            with suppress(StorageError):
                self._store.delete(self._path())

    def _renew_until_released(self) -> None:
        pause_seconds = self._own.timeout_seconds / RENEWALS_PER_TIMEOUT
        while not self._released.wait(pause_seconds):
            try:
                self._renew()
            except StillframeError as error:
                log.warning("the lease of this driver could not be renewed: %s", error)

    def _renew(self) -> None:
        before = self._path()
        self._own = replace(self._own, renewal=self._own.renewal + 1)
        self._store.write(self._path(), [json.dumps(self._own.to_json()).encode()])
        self._store.delete(before)

    def _path(self) -> str:
        return lease_path(self._own.driver, self._own.renewal)

    def _all(self) -> list[Lease]:
        leases = (self._read(name) for name in self._store.list(LEASE_DIRECTORY))
        return [lease for lease in leases if lease is not None]

    def _read(self, name: str) -> Lease | None:
        try:
            return Lease.from_json(json.loads(self._store.read(f"{LEASE_DIRECTORY}/{name}")))
        except (StillframeError, ValueError):
            return None  # renewed while we looked, or nothing of ours


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
