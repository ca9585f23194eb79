"""When a driver may take a job over from another one that may still be alive.

Theory of operation
-------------------
The job log decides who is alive: whatever happens, of two drivers only the one that wrote last can
complete a checkpoint or commit a sink. A lease is about manners, not about safety: without one, a
driver that is started by mistake would end the job of another. So a driver renews a lease while it
lives, and one that starts looks at the leases of others first.

A lease is passed over if its driver is known to be gone (its process has ended), or if it was not
renewed for as long as it says itself. That time is measured by the clock of whoever waits, from
when it looked first: clocks of two machines need not agree. A lease that is renewed while somebody
waits belongs to a driver that lives, and the other is refused. Two renewals that are seen at once
say nothing of the kind: their driver may have died before it could delete the older one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from stillframe.json_values import JsonObject
from stillframe.protocol.documents import JsonFields

RENEWALS_PER_TIMEOUT = 3
"""So two in a row may come late."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One driver's claim to run a job."""

    driver: str
    """Another one for every start of a driver."""
    renewal: int
    timeout_seconds: float
    """Not renewed for so long, it is void."""
    host: str
    machine: str
    """Where `pid` means something: this boot of this machine, and the processes seen there."""
    pid: int
    process_started: int
    """Tells a process from a later one that has got the same number."""

    def to_json(self) -> JsonObject:
        return {
            "driver": self.driver,
            "renewal": self.renewal,
            "timeout_ms": round(self.timeout_seconds * 1000),
            "host": self.host,
            "machine": self.machine,
            "pid": self.pid,
            "process_started": self.process_started,
        }

    @classmethod
    def from_json(cls, value: JsonObject) -> Lease:
        fields = JsonFields(value)
        return cls(
            driver=fields.text("driver"),
            renewal=fields.integer("renewal"),
            timeout_seconds=fields.integer("timeout_ms") / 1000,
            host=fields.text("host"),
            machine=fields.text("machine"),
            pid=fields.integer("pid"),
            process_started=fields.integer("process_started"),
        )


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Nobody else is there any more."""


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Nobody knows yet."""

    seconds: float
    lease: Lease
    """Of whom it is not known."""


@dataclass(frozen=True, slots=True)
class Alive:
    """This driver runs the job."""

    lease: Lease


class LeaseWatch:
    """Looks at the leases of other drivers until it is clear what to do."""

    def __init__(self) -> None:
        self._first_seen: dict[str, tuple[int, float]] = {}

    def on_look(
        self, leases: Iterable[Lease], gone: Collection[str], now_seconds: float
    ) -> TakeOver | LookAgain | Alive:
        """What is there at `now_seconds` of a clock that never goes back.

        `gone` are drivers whose process is known to have ended.
        """
        awaited: LookAgain | None = None
        for lease in _newest_of_each(leases):
            if lease.driver in gone:
                continue
            renewal, since = self._first_seen.setdefault(lease.driver, (lease.renewal, now_seconds))
            if lease.renewal > renewal:
                return Alive(lease)
            left = since + lease.timeout_seconds - now_seconds
            if left > 0 and (awaited is None or left > awaited.seconds):
                awaited = LookAgain(left, lease)
        if awaited is None:
            return TakeOver()
        # Often enough to see a renewal soon after it came.
        pause = awaited.lease.timeout_seconds / RENEWALS_PER_TIMEOUT / 2
        return LookAgain(min(awaited.seconds, pause), awaited.lease)


def _newest_of_each(leases: Iterable[Lease]) -> Iterable[Lease]:
    """One for every driver."""
    newest: dict[str, Lease] = {}
    for lease in leases:
        known = newest.setdefault(lease.driver, lease)
        if lease.renewal > known.renewal:
            newest[lease.driver] = lease
    return newest.values()
