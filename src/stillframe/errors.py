"""Everything Stillframe raises on purpose.

    StillframeError
    ├── BuildError            a mistake in the job's description, found before anything runs
    │   └── UnknownOption     an option nobody knows; the message names the nearest one
    ├── StartRefused          the job is fine but cannot run here; the message says what to change
    ├── StorageError          the snapshot store did not do what was asked
    │   └── SnapshotDamaged   a file of a snapshot is missing, torn or altered
    ├── Fenced                a newer attempt of the same job is alive, this one must stop
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


class Fenced(StillframeError):
    """A newer attempt of the same job is alive; this one must not write any more."""


class DataError(StillframeError):
    """A record or a source does not fit what was declared; trying again would not help."""


class UserCodeError(StillframeError):
    """A function the user gave us raised; trying again would not help."""


class JobFailed(StillframeError):
    """The job ended in failure."""
