"""Programs of Debian's packages for the tests, unpacked into the cache.

Nothing is installed and no root is needed: the packages are downloaded by apt, as they are, with
those libraries that this machine lacks.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

from stillframe.testing.fetched import NotFetched, cache_directory

_DOWNLOAD_SECONDS_MAX = 240


def unpacked(*packages: str) -> Path:
    """The directory with their files, named for the first. Raises `NotFetched` where they cannot be
    had."""
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    found = cache / f"{packages[0]}-of-debian"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of one run want it at once
        if not found.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _unpack(Path(scratch), packages).rename(found)
    return found


def _unpack(scratch: Path, wanted: tuple[str, ...]) -> Path:
    # What apt would install, and does not: only packages that this machine lacks are named.
    asked = ["apt-get", "--print-uris", "-qq", "--no-install-recommends", "install", *wanted]
    named = [line.split()[1] for line in _said(asked, scratch).splitlines() if ".deb" in line]
    packages = [name.partition("_")[0] for name in named]
    if not packages:
        raise NotFetched(f"apt knows no {' '.join(wanted)}: run apt-get update")
    _said(["apt-get", "-qq", "download", *packages], scratch)
    root = scratch / "root"
    root.mkdir()
    for archive in sorted(scratch.glob("*.deb")):
        _said(["dpkg-deb", "-x", str(archive), str(root)], scratch)
    return root


def _said(command: list[str], where: Path) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=where,
            capture_output=True,
            text=True,
            check=True,
            timeout=_DOWNLOAD_SECONDS_MAX,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise NotFetched(
            f"Debian's packages cannot be fetched ({' '.join(command)} says"
            f" {str(said).strip()[-200:]!r})"
        ) from error
    return done.stdout
