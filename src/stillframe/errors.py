"""Everything Stillframe raises on purpose.

    StillframeError
    ├── BuildError            a mistake in the job's description, found before anything runs
    │   └── UnknownOption     an option nobody knows; the message names the nearest one
    ├── StartRefused          the job is fine but cannot run here; the message says what to change
    ├── StorageError          the snapshot store did not do what was asked
    │   ├── SnapshotDamaged   a file of a snapshot is missing, torn or altered
    │   ├── NotDone           the store has certainly not done it: it was not reached, or said no
    │   └── Unanswered        the store gave no answer: it may have done it, or do it still
    ├── Fenced                a newer attempt of the same job is alive, this one must stop
    │   └── Unsettled         nobody can tell whether a log entry was kept; the next attempt can
    ├── DataError             a record or a source does not fit what was declared
    ├── UserCodeError         a function the user gave us raised
    └── JobFailed             the job ended in failure; the message says why, in one sentence

Every message is one sentence that says what is wrong, the value that was seen and what to do.
"""

from __future__ import annotations


class StillframeError(Exception):
    """The root of all errors Stillframe raises on purpose."""


class BuildError(StillframeError):
    """A mistake in the job's description, found before anything runs."""


class UnknownOption(BuildError):
    """An option that does not exist."""


class StartRefused(StillframeError):
    """The job is well described but cannot run here."""


class StorageError(StillframeError):
    """The snapshot store did not do what was asked."""


class SnapshotDamaged(StorageError):
    """A file of a snapshot is missing, torn or altered."""


class NotDone(StorageError):
    """The store was not reached, or said no: what was asked has certainly not been done."""


class Unanswered(StorageError):
    """The store gave no answer: what was asked may have been done, or be done still."""


class Fenced(StillframeError):
    """A newer attempt of the same job is alive; this one must not write any more."""


class Unsettled(Fenced):
    """Nobody can tell whether an entry of the job log was kept: only a new attempt can go on."""


class DataError(StillframeError):
    """A record or a source does not fit what was declared; trying again would not help."""


class UserCodeError(StillframeError):
    """A function the user gave us raised; trying again would not help."""


class JobFailed(StillframeError):
    """The job ended in failure."""
