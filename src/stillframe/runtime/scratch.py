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

_LOCK = ".lock"


class Scratch:
    """A new directory of this process, until it is removed or kept, or the process ends."""

    def __init__(self, parent: Path | None = None, purpose: str = "scratch") -> None:
        """Below `parent`, or among the temporary files; its name says what it is for."""
        home = parent or Path(tempfile.gettempdir())
        prefix = f"stillframe-{purpose}-"
        _sweep(home, prefix)
        self._descriptor, lock = tempfile.mkstemp(_LOCK, prefix, home)
        # Should a sweep get the lock first, the file has no name any more; nothing else is lost.
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._lock = Path(lock)
        self.directory = self._lock.with_suffix("")
        self.directory.mkdir(mode=0o700)
        self._is_kept = False

    def keep(self) -> None:
        """Somebody has been told of it: neither this process nor a sweep removes it."""
        self._is_kept = True
        self._lock.unlink(missing_ok=True)

    def remove(self) -> None:
        """Unless it is to be kept. May be called twice."""
        if not self._is_kept:
            _remove(self._lock)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextlib.contextmanager
def scratch_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new directory, below `parent` or that of temporary files, for as long as it takes."""
    scratch = Scratch(parent)
    try:
        yield scratch.directory
    finally:
        scratch.remove()


def _sweep(home: Path, prefix: str) -> None:
    for lock in home.glob(f"{prefix}*{_LOCK}"):
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
