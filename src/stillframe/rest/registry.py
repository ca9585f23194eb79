"""Where the drivers of this machine are found: a small file for each job that runs.

Theory of operation
-------------------
A driver writes `<registry>/<jobid>.json` when its job has begun and removes it when the job has
ended. It holds the token for whatever changes something, so only its owner may read it. A driver
that is killed leaves its file behind: whoever reads the registry next removes it, if the process
was one of this machine and is gone. Beside it `driver.json`, the same without the token, lies in
the job's own directory on the checkpoint store, for those who know the job by its checkpoints.

Both are advice: they say where to ask, never who is alive; that is the job log's to say. So a file
that is missing, torn or too old costs an answer and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from stillframe.errors import StillframeError, StorageError
from stillframe.json_values import JsonObject
from stillframe.storage.store import Store

REGISTRY_VARIABLE = "STILLFRAME_REGISTRY"
DRIVER_FILE = "driver.json"

_FILE_BYTES_MAX = 64 * 1024
_LEFT_OVER_SECONDS = 3600.0
"""After this long nobody is writing a file any more that has not got its name."""


@dataclass(frozen=True, slots=True)
class RegisteredJob:
    """A job that runs, or ran when its driver was last heard of, and where to ask about it."""

    jid: str
    name: str
    url: str
    token: str | None
    """None where it was read from the checkpoint store, which others may read too."""
    pid: int
    host: str
    checkpoint_location: str | None
    started_at_ms: int
    process_started: str | None = None
    """Tells the process from a later one of the same number, where the system says it."""

    def to_json(self, *, with_token: bool) -> JsonObject:
        fields: dict[str, str | int | None] = {
            "jid": self.jid,
            "name": self.name,
            "url": self.url,
            "pid": self.pid,
            "host": self.host,
            "checkpoint-location": self.checkpoint_location,
            "started-at-ms": self.started_at_ms,
            "process-started": self.process_started,
        }
        return {**fields, "token": self.token} if with_token else fields

    @property
    def file_name(self) -> str:
        # Without a checkpoint location several processes may run a job of the same id.
        part = "" if self.checkpoint_location is not None else f"-{self.pid}"
        return f"{self.jid}{part}.json"


def registry_directory() -> Path:
    """What the environment says, else a directory of this user's; `OSError` if there is none."""
    given = os.environ.get(REGISTRY_VARIABLE)
    try:
        return Path(given) if given else Path.home() / ".stillframe" / "jobs"
    except RuntimeError as error:
        raise FileNotFoundError(
            f"nobody knows where the home directory is: set {REGISTRY_VARIABLE}"
        ) from error


# --- the driver's side ---


def this_process(
    jid: str, name: str, url: str, token: str, location: str | None, started_at_ms: int
) -> RegisteredJob:
    """A job of the process that asks."""
    pid = os.getpid()
    started = _started(pid)
    host = socket.gethostname()
    return RegisteredJob(jid, name, url, token, pid, host, location, started_at_ms, started)


def register(job: RegisteredJob) -> None:
    """Write its file, as a whole. Raises `OSError`."""
    directory = registry_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    unnamed = directory / f".{uuid.uuid4().hex}.tmp"
    try:
        handle = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(job.to_json(with_token=True), file)
        unnamed.replace(directory / job.file_name)
    finally:
        unnamed.unlink(missing_ok=True)


def unregister(job: RegisteredJob) -> None:
    """Remove its file, unless it is another driver's by now. Raises `OSError`."""
    path = registry_directory() / job.file_name
    if _read(path) == job:
        path.unlink(missing_ok=True)


def write_driver_file(store: Store, job: RegisteredJob) -> None:
    """Into the job's directory, in place of an earlier driver's. Raises `StorageError`."""
    store.delete(DRIVER_FILE)
    text = json.dumps(job.to_json(with_token=False))
    # False only if a driver that took the job over was quicker, and then it is right.
    store.create_if_absent(DRIVER_FILE, text.encode())


def remove_driver_file(store: Store, job: RegisteredJob) -> None:
    """Unless it is another driver's by now. Raises `StorageError`."""
    found = read_driver_file(store)
    if found is not None and _same_driver(found, job):
        store.delete(DRIVER_FILE)


def _same_driver(one: RegisteredJob, other: RegisteredJob) -> bool:
    return one.to_json(with_token=False) == other.to_json(with_token=False)


# --- the readers' side ---


def registered_jobs() -> list[RegisteredJob]:
    """All jobs of the registry, oldest first; files of processes that are gone are removed."""
    try:
        paths = sorted(registry_directory().iterdir())
    except OSError:
        return []
    found = []
    for path in paths:
        if path.suffix == ".tmp":
            _sweep_left_over(path)
        elif path.suffix == ".json" and (job := _read(path)) is not None:
            if is_gone(job):
                _sweep(path, job)
            else:
                found.append(job)
    return sorted(found, key=lambda job: job.started_at_ms)


def find(name_or_id: str) -> RegisteredJob:
    """The one job of this name or id; a sentence for people if there is none, or several."""
    jobs = registered_jobs()
    jid = name_or_id.replace("-", "").lower()
    matching = [job for job in jobs if job.name == name_or_id or job.jid == jid]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise StillframeError(
            f"{len(matching)} jobs are named {name_or_id!r}: give the id of one instead"
            f" ({', '.join(f'{job.jid} at {job.url}' for job in matching)})"
        )
    names = ", ".join(sorted({job.name for job in jobs})[:10])
    running = f"these run: {names}" if names else "none runs"
    raise StillframeError(
        f"no job named {name_or_id!r} is registered in {_directory_in_words()}; {running}"
    )


def _directory_in_words() -> str:
    try:
        return str(registry_directory())
    except OSError:
        return f"{REGISTRY_VARIABLE}, which is not set"


def read_driver_file(store: Store) -> RegisteredJob | None:
    """What a job's directory says of its driver; None if nothing that can be read."""
    try:
        if DRIVER_FILE not in store.list(""):
            return None
        return _parsed(store.read(DRIVER_FILE))
    except StorageError:
        return None


def is_gone(job: RegisteredJob) -> bool:
    """Whether its process is known to have ended: one of another machine never is."""
    if job.host != socket.gethostname():
        return False
    try:
        os.kill(job.pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    now = _started(job.pid)
    return None not in (now, job.process_started) and now != job.process_started


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's own count since it was booted."""
    with contextlib.suppress(OSError, IndexError):
        # The second field, a name in brackets, may hold anything; the times come after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def _read(path: Path) -> RegisteredJob | None:
    """What a file of ours says; None for another user's, who could send us anywhere."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(handle, "rb") as file:
            if os.fstat(handle).st_uid == os.geteuid():
                return _parsed(file.read(_FILE_BYTES_MAX))
    return None


def _parsed(data: bytes) -> RegisteredJob | None:
    try:
        fields = json.loads(data)
        texts = [fields[name] for name in ("jid", "name", "url", "host")]
        counts = [fields[name] for name in ("pid", "started-at-ms")]
        optional = [
            fields.get(name) for name in ("token", "checkpoint-location", "process-started")
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(count, int) for count in counts)
        and all(text is None or isinstance(text, str) for text in optional)
    ):
        return None
    jid, name, url, host = texts
    pid, started_at_ms = counts
    token, location, started = optional
    return RegisteredJob(jid, name, url, token, pid, host, location, started_at_ms, started)


def _sweep(path: Path, gone: RegisteredJob) -> None:
    with contextlib.suppress(OSError):
        if _read(path) == gone:  # the same job may have been started again meanwhile
            path.unlink(missing_ok=True)


def _sweep_left_over(path: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > _LEFT_OVER_SECONDS:
            path.unlink(missing_ok=True)
