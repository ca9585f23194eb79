"""Everything Stillframe raises on purpose.

    StillframeError
    ├── BuildError            a mistake in the job's description, found before anything runs
    │   ├── UnknownOption     an option nobody knows; the message names the nearest one
    │   └── NotHonoured       an option of Spark's that is known and cannot be followed here
    ├── StartRefused          the job is fine but cannot run here; the message says what to change
    ├── StorageError          the snapshot store did not do what was asked
    │   ├── SnapshotDamaged   a file of a snapshot is missing, torn or altered
    │   ├── NotDone           the store has certainly not done it: it was not reached, or said no
    │   └── Unanswered        the store gave no answer: it may have done it, or do it still
    ├── Fenced                a newer attempt of the same job is alive, this one must stop
    │   └── Unsettled         nobody can tell whether a log entry was kept; the next attempt can
    ├── DataError             a record or a source does not fit what was declared
    ├── UserCodeError         a function the user gave us raised, or does not keep its contract
    └── JobFailed             the job ended in failure; the message says why, in one sentence

Every message is one sentence that says what is wrong, the value that was seen and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass


class StillframeError(Exception):
    """The root of all errors Stillframe raises on purpose."""


class BuildError(StillframeError):
    """A mistake in the job's description, found before anything runs."""


class UnknownOption(BuildError):
    """An option that does not exist."""

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option
        """Its name, as it was given."""


class NotHonoured(BuildError):
    """An option of Spark's that cannot be followed here. Spark itself can."""


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


class Unavailable(StillframeError):
    """Another system cannot be reached now; what was asked of it may be asked again later."""


class DataError(StillframeError):
    """A record or a source does not fit what was declared; trying again would not help."""


class OutputRefused(DataError):
    """Another system does not take some rows of a completed checkpoint; they are kept aside."""


@dataclass(frozen=True, slots=True)
class Blame:
    """What is known of an error that was raised in code which is not Stillframe's own."""

    code: str
    """What was called, as people name it: `function tidy`."""
    error: str
    """The class of what it raised."""
    heals: bool
    """Whether it may not come again; an error of types will."""
    line: str | None = None
    """`/home/ann/job.py:12 in tidy`: the innermost line of the user's own."""
    traceback: str = ""
    """As Python prints it, without Stillframe's own frames."""
    operator: str | None = None
    """The uid of the operator that called it."""
    record: str | None = None
    """The record it was called with, in words."""
    rows: range | None = None
    """Its place in the batch that the operator was given; all of them, if only the batch is known.
    None: it was not called with records."""
    row: str | None = None
    """What it was called with and nothing of where that stood in its batch, which is another one
    when it is read again: if the same comes again, then so does this text."""

    @property
    def same_as(self) -> str:
        """Of two errors with the same text here, the second is the first come again."""
        return f"{self.error} in {self.operator or self.code} at {self.line or self.code}"


class UserCodeError(StillframeError):
    """A function the user gave us raised, or did not do what its contract says.

    With a `blame` it has raised. Without, or if that does not heal, trying again would not help.
    """

    def __init__(self, message: str, blame: Blame | None = None) -> None:
        super().__init__(message)
        self.blame = blame

    def __reduce__(self) -> tuple[type[UserCodeError], tuple[str, Blame | None]]:
        return UserCodeError, (str(self), self.blame)

    @property
    def heals(self) -> bool:
        return self.blame is not None and self.blame.heals


class JobFailed(StillframeError):
    """The job ended in failure."""


PY4J_CALLED = "An error occurred while calling "
"""How Py4J begins, and goes on with a number of its own."""


def telling_line(text: str) -> str:
    """Of what another program has printed, which may be pages, the line that tells the cause.

    A Python error at the end of what Spark tells of its workers; else what Java names last as the
    cause; else the first line that says more than which call it was.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    of_python = [line for line in lines if line.startswith("stillframe.") or "Error: " in line]
    causes = [line.partition("Caused by: ")[2] for line in lines if line.startswith("Caused by: ")]
    others = [line.removeprefix(": ") for line in lines if not line.startswith(PY4J_CALLED)]
    return (of_python[-1:] or causes[-1:] or others[:1] or lines[:1] or [""])[0]
