"""Working directories that are removed also if their process is killed: by the next that makes one.

Beside each directory lies a file that its process holds a lock on. The system gives the lock back
when the process ends, whatever ends it: who gets the lock knows that nobody works there any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "stillframe-scratch-"
_LOCK = ".lock"


@contextlib.contextmanager
def scratch_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new directory, below `parent` or that of temporary files, for as long as it takes."""
    home = parent or Path(tempfile.gettempdir())
    _sweep(home)
    descriptor, lock = tempfile.mkstemp(_LOCK, _PREFIX, home)
    # Should a sweep get the lock first, the file has no name any more, and nothing else is lost.
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    directory = Path(lock.removesuffix(_LOCK))
    try:
        directory.mkdir(mode=0o700)
        yield directory
    finally:
        _remove(Path(lock))
        os.close(descriptor)


def _sweep(home: Path) -> None:
    for lock in home.glob(f"{_PREFIX}*{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, in use, or swept meanwhile
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(lock)
            finally:
                os.close(descriptor)


def _remove(lock: Path) -> None:
    """The file last: without it nobody would find the directory."""
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
