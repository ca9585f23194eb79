"""The job log on a store: reads the newest record, appends the next one, fences off the past.

Theory of operation
-------------------
Entry n+1 is created with `create_if_absent`, so of two drivers that both stand at n exactly one
writes on; the other is fenced and must stop before it announces anything.

The log is compacted: after every append, all entries but the newest 32 of that moment may be
deleted, at once or later. That opens one door, which is closed again here. A driver that stood at n
and slept, while its successor wrote n+1 … n+100 and compacted, finds the name n+1 free when it
wakes. So a created entry counts only if a listing made *afterwards* shows no higher one. The
sleeper's listing does show one: n+1 can only be free because at least 32 higher entries existed,
and the newest 32 of any moment are never deleted. The directory holds little more than these, so a
listing is one request to the file system; all 32 would have to be replaced within it to be missed.
The entry the sleeper has created harms nobody: readers look at the highest number only, and the
next compaction sweeps it away.

Seen from the other side: when an entry counted and a successor takes over later, the successor
found that entry, because it was the highest; so what was announced after it holds.

A storage that gives no answer leaves it open whether the entry was kept, and it may even appear
later. Then the attempt stops (`Unsettled`) and `check_newest`, with which the next one begins,
takes the entry for its own if it is there. If it is not, the next attempt's first entry takes its
name, so that it can never appear: either way it is settled before anything is announced.

Rules of this file
------------------
1. `StorageError` from `append`: the entry is certainly not in the log, and the log may be used on.
   `Fenced`: stop, announce nothing and delete nothing, because the files belong to somebody else
   now. `Unsettled`: the same, but a new attempt of this driver may go on.
2. Only the driver that began an attempt writes entries for it.
3. One `JobLog` is used by one thread.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from stillframe.clock import Clock
from stillframe.errors import (
    Fenced,
    NotDone,
    SnapshotDamaged,
    StorageError,
    Unanswered,
    Unsettled,
)
from stillframe.ids import Attempt, Epoch
from stillframe.protocol.joblog import (
    JobRecord,
    Shown,
    decode_record,
    encode_record,
    record_in_place_of,
)
from stillframe.storage.paths import LOG_DIRECTORY, log_path, sequence_of
from stillframe.storage.store import Store

ENTRIES_KEPT = 32
_READ_TRIES_MAX = 5
WAY_PAST_DAMAGE = (
    "put the file back, or start the job with option fresh=true (stillframe run --fresh) to delete"
    " its checkpoints and start from the beginning"
)


class JobLog:
    """One driver's view of a job's log."""

    def __init__(self, store: Store, job: str, clock: Clock, written_by: str | None = None) -> None:
        """`store` is rooted at the job's own directory; `written_by` names this driver."""
        self._store = store
        self._job = job
        self._clock = clock
        self._written_by = written_by or _this_process()
        self._last: JobRecord | None = None
        self._own_attempt: Attempt | None = None
        self._fenced: Fenced | None = None
        self._in_place: JobRecord | None = None
        """What stands for an entry that cannot be read, if a person has said so."""
        self._unsettled: JobRecord | None = None
        """The entry of which it is not known whether it was kept."""
        self.superfluous: tuple[str, ...] = ()
        """Entries that may be deleted since the last `append`, by whomever."""

    @property
    def last(self) -> JobRecord | None:
        """What the last `read` or `append` answered."""
        return self._last

    def read(self) -> JobRecord | None:
        """The newest record; None if the job has never run. A damaged one is `SnapshotDamaged`.

        Reading after `Fenced` opens the log again: the next entry may begin a new attempt.
        """
        self._last = self._newest()
        self._fenced = self._unsettled = None
        return self._last

    def pass_over_damage(self, shown: Iterable[Shown]) -> JobRecord:
        """Go on as if the newest entry, which cannot be read, told these numbers and no more.

        Only for a job that starts over: what is retained is not known.
        """
        sequences = self._sequences()
        found = [*shown, *filter(None, map(self._shown_by, sequences))]
        stands_in = record_in_place_of(sequences[-1] if sequences else 0, found)
        self._last = self._in_place = stands_in
        self._fenced = self._unsettled = None
        return stands_in

    def _shown_by(self, sequence: int) -> Shown | None:
        try:
            entry = self._entry(sequence)
        except StorageError:
            return None
        last_epoch = Epoch(entry.next_epoch - 1) if entry.next_epoch else None
        return Shown(entry.attempt, entry.last_checkpoint_id, last_epoch)

    def check_newest(self) -> None:
        """Raise `Fenced` if somebody else has written since the last `read` or `append`.

        After `Unsettled` this opens the log again; `last` then is what the log says.
        """
        newest = self._newest()
        if newest is not None and newest == self._unsettled:
            self._last, self._unsettled = newest, None
        if isinstance(self._fenced, Unsettled):
            self._fenced = None
        expected = self._last.sequence if self._last else 0
        if newest is not None and newest.sequence > expected:
            raise self._fence(
                f"job {self._job!r}: this driver ({self._written_by}) must stop, because attempt"
                f" {newest.attempt}, started by {newest.written_by}, is alive; run only one driver"
                " per job"
            )

    def append(self, record: JobRecord) -> JobRecord:
        """Write the record that was made of `last`; answers it as it was written."""
        if self._fenced is not None:
            raise self._fenced
        self._check_ours(record)
        record = replace(record, written_at_ms=self._clock.wall_ms(), written_by=self._written_by)
        sequences = self._create(record)
        if sequences[-1:] != [record.sequence]:
            raise self._fence(self._overtaken(record))
        self._last = record
        self._unsettled = None
        self._own_attempt = record.attempt
        self.superfluous = tuple(map(log_path, sequences[:-ENTRIES_KEPT]))
        return record

    def sweep(self) -> None:
        """Remove what drivers that died were writing. One that is not dead, only overtaken, hears
        that it is, as if it had found the number taken."""
        with suppress(StorageError):  # harmless, and the next driver tries again
            self._store.delete_unfinished(LOG_DIRECTORY)

    def compact(self) -> None:
        """Delete what is superfluous; what stays now goes another time."""
        for path in self.superfluous:
            with suppress(StorageError):
                self._store.delete(path)

    def _check_ours(self, record: JobRecord) -> None:
        expected = self._last.sequence + 1 if self._last else 1
        assert record.sequence == expected, "a record is made of the last one read or appended"
        if record.event != "attempt-started" and record.attempt != self._own_attempt:
            raise self._fence(self._overtaken(record))

    def _create(self, record: JobRecord) -> list[int]:
        """Create the entry; the sequence numbers there are afterwards."""
        created = False
        try:
            created = self._store.create_if_absent(log_path(record.sequence), encode_record(record))
            if created:
                return self._sequences()
        except StorageError as error:
            if not created and self._certainly_absent(record.sequence, error):
                raise
            if not isinstance(error, Unanswered) and self._is_anothers(record):
                raise self._fence(self._overtaken(record)) from error
            raise self._unsettle(record, str(error)) from error
        if self._unsettled is not None and self._holds(self._unsettled):
            raise self._unsettle(self._unsettled, "it appeared late")
        raise self._fence(self._overtaken(record))

    def _certainly_absent(self, sequence: int, error: StorageError) -> bool:
        if isinstance(error, NotDone | Unanswered):
            return isinstance(error, NotDone)  # one that may still appear is not looked for
        try:
            return sequence not in self._sequences()
        except StorageError:
            return False

    def _is_anothers(self, record: JobRecord) -> bool:
        """Whether the number of this entry is taken for good: then it can never appear."""
        try:
            return self._entry(record.sequence) != record
        except StorageError:
            return False

    def _holds(self, record: JobRecord) -> bool:
        """Whether the log has this very entry."""
        try:
            return self._entry(record.sequence) == record
        except StorageError:
            return False

    def _unsettle(self, record: JobRecord, reason: str) -> Unsettled:
        self._unsettled = record
        self._fenced = Unsettled(
            f"job {self._job!r}: it is unknown whether entry {record.sequence} of the job log"
            f" was kept ({reason}), so attempt {record.attempt} stops; the next one, or the job"
            " when it is started again, goes on from what the log then says"
        )
        return self._fenced

    def _fence(self, sentence: str) -> Fenced:
        self._fenced = Fenced(sentence)
        return self._fenced

    def _overtaken(self, record: JobRecord) -> str:
        """One sentence about who wrote instead of us."""
        return (
            f"job {self._job!r}: attempt {record.attempt} of this driver ({self._written_by})"
            f" must stop, because {self._who_overtook()}; run only one driver per job"
        )

    def _who_overtook(self) -> str:
        try:
            newest = self._newest()
        except StorageError as error:
            return f"another driver has written to the job log ({error})"
        if newest is None:
            return "somebody has deleted the job log"
        return f"attempt {newest.attempt} ({newest.written_by}) has written entry {newest.sequence}"

    def _newest(self) -> JobRecord | None:
        """The entry with the highest number."""
        for _ in range(_READ_TRIES_MAX):
            sequences = self._sequences()
            if not sequences:
                return None
            if self._in_place is not None and self._in_place.sequence == sequences[-1]:
                return self._in_place
            try:
                return self._entry(sequences[-1])
            except SnapshotDamaged:
                # Not damage if the entry was compacted away between the listing and the reading.
                if self._sequences()[-1:] == sequences[-1:]:
                    raise
        raise StorageError(
            f"the log of job {self._job!r} grows faster than it can be read: another driver is"
            " running the job; stop it, or leave the job to it"
        )

    def _entry(self, sequence: int) -> JobRecord:
        path = log_path(sequence)
        where = f"entry {sequence} of the log of job {self._job!r} ({self._store.address}/{path})"
        try:
            record = decode_record(self._store.read(path), where)
            if record.sequence != sequence:
                raise SnapshotDamaged(f"{where} is damaged: it holds entry {record.sequence}")
        except SnapshotDamaged as error:
            raise SnapshotDamaged(f"{error}; {WAY_PAST_DAMAGE}") from error
        return record

    def _sequences(self) -> list[int]:
        """The numbers of all entries, ascending."""
        found = (sequence_of(name) for name in self._store.list(LOG_DIRECTORY))
        return sorted(sequence for sequence in found if sequence is not None)


def _this_process() -> str:
    # The last part tells two processes apart that share a name, as in containers.
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
