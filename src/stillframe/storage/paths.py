"""Names of things below a job's directory: `<root>/<job>/`.

    chk-<n>-<attempt>/_metadata                        the manifest of checkpoint n
    shared/<attempt>/<uid>-<subtask>-<state>-<n>.arrow one keyed state of one subtask, written for
                                                       checkpoint n; later ones may refer to it
    shared/<attempt>/<uid>-<subtask>-<file>-<n>.db     one file of the database of one operator in
                                                       one subtask, likewise
    log/<20 digits>                                    the job log
    history/checkpoints/<20 digits>-<attempt>.json     what became of a checkpoint; see
                                                       `coordinator/kept_history.py`
    history/rolled/<20 digits>-<attempt>.json          what became of a hundred, up to this one
    history/attempts/<20 digits>-begun.json            what an attempt started from, …
    history/attempts/<20 digits>-phases.json           … how it came up, …
    history/attempts/<20 digits>-ended.json            … and how it ended
    history/failures/<20 digits>-<6 digits>.json       why an attempt failed
    lease/<driver>-<n>                                 the n-th renewal of a driver's lease
    driver.json                                        where the job's driver answers over HTTP
    staged/<uid>/…                                     epochs staged for a function on the driver
    prepared/<uid>/…                                   epochs staged for a system with transactions

A manifest names the paths of its files, so checkpoints that hold their state files in their own
directory, as the oldest do, are read like any other; only nobody shares those files.

Everything but the job's own directory is relative to it. Names that users choose (jobs, uids,
states) are quoted: letters and digits of any script, `_`, `-` and `.` stay, the rest becomes
`%XX`, so that two names never share a file.
"""

from __future__ import annotations

import re
import uuid
from typing import Literal
from urllib.parse import unquote

from stillframe.errors import BuildError
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.storage.store import canonical_address

LEASE_DIRECTORY = "lease"
LOG_DIRECTORY = "log"
HISTORY_DIRECTORIES = (
    "history/checkpoints",
    "history/attempts",
    "history/failures",
    "history/rolled",
    "history/read",
)
"""Beside the checkpoints and not with them: what is told here outlives them."""
SHARED_DIRECTORY = "shared"
STAGED_DIRECTORY = "staged"
PREPARED_DIRECTORY = "prepared"
SAVEPOINT_METADATA = "_metadata"
"""Of a savepoint, whose directory has no other checkpoint in it."""
SAVEPOINT_DIRECTORY = "savepoint"
"""Where a job sees the savepoint it starts from; there is no such directory of its own."""
CHANNELS = "$channels"
"""Stands for a state's name in the path of what was under way; no state of a user's has a `$`."""

_NAME_BYTES_MAX = 100
"""File systems allow 255 bytes; a state file's name holds two quoted names and three numbers."""


def quoted_name(name: str, what: str, kept: str = "_-.") -> str:
    """A name as (a part of) a file name; `what` says in an error what it is the name of.

    `kept` are the signs that stay as they are, besides letters and digits.
    """
    if not name:
        raise BuildError(f"the {what} is empty: give it a name")
    try:
        quoted = "".join(_quoted(char, kept) for char in name)
    except UnicodeEncodeError as error:
        raise BuildError(f"the {what} {name!r} is not valid Unicode: choose another") from error
    if quoted.startswith("."):  # `.`, `..` and hidden files are not ours to make
        quoted = "%2E" + quoted[1:]
    if len(quoted.encode()) > _NAME_BYTES_MAX:
        raise BuildError(
            f"the {what} {name!r} takes {len(quoted.encode())} bytes as a file name, more than"
            f" {_NAME_BYTES_MAX}: choose a shorter one"
        )
    return quoted


def _quoted(char: str, kept: str) -> str:
    encoded = char.encode()
    if char.isalnum() or char in kept:
        return char
    return "".join(f"%{byte:02X}" for byte in encoded)


def job_directory(job: str) -> str:
    """Below the store's root; everything else here is below it."""
    return quoted_name(job, "job name")


def job_id(location: str | None, job: str) -> str:
    """Of a job by its checkpoint location, however that is written, and its name."""
    place = None if location is None else canonical_address(location)
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{place}/{job}"))


def lease_path(driver: str, renewal: int) -> str:
    return f"{LEASE_DIRECTORY}/{driver}-{renewal}"


def checkpoint_directory(checkpoint_id: CheckpointId, attempt: Attempt) -> str:
    """One for each attempt: an older driver may give the same number to a checkpoint of its own,
    and must neither write into this one nor delete it."""
    return f"chk-{checkpoint_id}-{attempt}"


def checkpoint_of(name: str) -> tuple[CheckpointId, Attempt] | None:
    """The checkpoint whose directory a child of the job's directory is, if it is one."""
    match = re.fullmatch(r"chk-([1-9][0-9]*)-([1-9][0-9]*)", name, re.ASCII)
    return (CheckpointId(int(match[1])), Attempt(int(match[2]))) if match else None


def metadata_path(checkpoint_id: CheckpointId, attempt: Attempt) -> str:
    return f"{checkpoint_directory(checkpoint_id, attempt)}/_metadata"


def attempt_directory(attempt: Attempt) -> str:
    """Where an attempt puts the files that checkpoints may share.

    One for each attempt: two drivers never write into the same one, and once an attempt is over
    nobody writes there, so that what a crash left half written can be told from what is at work.
    """
    return f"{SHARED_DIRECTORY}/{attempt}"


def attempt_of(name: str) -> Attempt | None:
    """The attempt whose directory a child of the shared directory is, if it is one."""
    return Attempt(int(name)) if re.fullmatch(r"[1-9][0-9]*", name, re.ASCII) else None


def is_shared(path: str) -> bool:
    """Whether checkpoints may share this file; if not, it goes with its checkpoint's directory."""
    return path.startswith(f"{SHARED_DIRECTORY}/")


def state_path(
    checkpoint_id: CheckpointId,
    uid: OperatorUid,
    subtask: SubtaskIndex,
    attempt: Attempt,
    state: str,
) -> str:
    """Of a keyed state, as rows."""
    return f"{_shared_path(checkpoint_id, uid, subtask, attempt, state)}.arrow"


def database_path(
    checkpoint_id: CheckpointId,
    uid: OperatorUid,
    subtask: SubtaskIndex,
    attempt: Attempt,
    file: str,
) -> str:
    """Of a file of a database; an attempt has one database for each operator and subtask."""
    return f"{_shared_path(checkpoint_id, uid, subtask, attempt, file)}.db"


def _shared_path(
    checkpoint_id: CheckpointId,
    uid: OperatorUid,
    subtask: SubtaskIndex,
    attempt: Attempt,
    state: str,
) -> str:
    # The last three parts are free of `-`, so that the name can be taken apart from its end:
    # uid `a-1` and state `x`, or uid `a` and state `1-x`, must not meet in one file.
    state_part = quoted_name(state, "state name", kept="_.")
    name = f"{quoted_name(uid, 'operator uid')}-{subtask}-{state_part}-{checkpoint_id}"
    return f"{attempt_directory(attempt)}/{name}"


def number_of_file(path: str) -> CheckpointId | None:
    """The number of the checkpoint for which a shared file was written; None for other files."""
    match = re.fullmatch(r"shared/[1-9][0-9]*/[^/]+-([1-9][0-9]*)\.(?:arrow|db)", path, re.ASCII)
    return CheckpointId(int(match[1])) if match else None


def state_of_path(path: str) -> tuple[OperatorUid, SubtaskIndex, str] | None:
    """Whose state a `state_path` is of, and the state's name; None for other files."""
    match = re.fullmatch(r"shared/[0-9]+/([^/]+)-([0-9]+)-([^-/]+)-[0-9]+\.arrow", path)
    if not match:
        return None
    return OperatorUid(unquote(match[1])), SubtaskIndex(int(match[2])), unquote(match[3])


def checkpoint_history_path(checkpoint_id: CheckpointId, attempt: Attempt) -> str:
    """In the order of the names the oldest comes first; so it does with the other two."""
    return f"history/checkpoints/{checkpoint_id:020d}-{attempt}.json"


def rolled_history_path(newest: CheckpointId, attempt: Attempt) -> str:
    return f"history/rolled/{newest:020d}-{attempt}.json"


def attempt_history_path(attempt: Attempt, what: Literal["begun", "phases", "ended"]) -> str:
    return f"history/attempts/{attempt:020d}-{what}.json"


def failure_history_path(attempt: Attempt, number: int) -> str:
    return f"history/failures/{attempt:020d}-{number:06d}.json"


def read_history_path(attempt: Attempt, slot: SlotIndex) -> str:
    return f"history/read/{attempt:020d}-{slot:06d}.json"


def is_history_file(name: str) -> bool:
    """Whether a child of one of the history's directories has a name of ours."""
    return (
        re.fullmatch(r"[0-9]{20}-(?:[0-9]+|begun|phases|ended)\.json", name, re.ASCII) is not None
    )


def numbers_in_history(directory: str, name: str) -> tuple[CheckpointId | None, Attempt] | None:
    """The checkpoint, if it is about one, and the attempt of a file of the history."""
    first, _, second = name.removesuffix(".json").partition("-")
    if not is_history_file(name):
        return None
    if not directory.endswith(("checkpoints", "rolled")):
        return None, Attempt(int(first))
    return (CheckpointId(int(first)), Attempt(int(second))) if second.isdigit() else None


def log_path(sequence: int) -> str:
    return f"{LOG_DIRECTORY}/{sequence:020d}"


def sequence_of(name: str) -> int | None:
    """The sequence number that a child of the log's directory stands for, if it is an entry."""
    return int(name) if re.fullmatch(r"[0-9]{20}", name, re.ASCII) else None
