"""A browser for the tests: this machine's Chromium, or Debian's, unpacked into the cache.

Nothing is installed and no root is needed: the packages are downloaded by apt, as they are, with
those libraries that this machine lacks, and a font that has Chinese signs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from stillframe.testing.fetched import NotFetched, cache_directory

_PACKAGES = ("chromium", "fonts-noto-cjk", "fonts-dejavu-core")
_DOWNLOAD_SECONDS_MAX = 240

_FONTS = """\
<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>/usr/share/fonts</dir><dir>{root}/usr/share/fonts</dir>
<cachedir>{root}/fonts-cache</cachedir>
<alias><family>system-ui</family><prefer><family>Noto Sans CJK SC</family></prefer></alias>
<alias><family>sans-serif</family><prefer><family>Noto Sans CJK SC</family></prefer></alias>
</fontconfig>
"""


@dataclass(frozen=True)
class Chromium:
    program: str
    environment: dict[str, str] = field(default_factory=dict)


def chromium() -> Chromium:
    """Raises `NotFetched` where there is none and none can be had."""
    own = shutil.which("chromium")
    if own is not None:
        return Chromium(own)
    root = _unpacked()
    places = ("usr/lib/*-linux-gnu*", "usr/lib/*-linux-gnu*/pulseaudio")
    libraries = [str(path) for place in places for path in root.glob(place)]
    fonts = root / "fonts.conf"
    return Chromium(
        str(root / "usr/lib/chromium/chromium"),
        {"LD_LIBRARY_PATH": ":".join(libraries), "FONTCONFIG_FILE": str(fonts)},
    )


def _unpacked() -> Path:
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    found = cache / "chromium-of-debian"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of one run want it at once
        if not found.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _unpack(Path(scratch)).rename(found)
        (found / "fonts.conf").write_text(_FONTS.format(root=found))
    return found


def _unpack(scratch: Path) -> Path:
    # What apt would install, and does not: only packages that this machine lacks are named.
    asked = ["apt-get", "--print-uris", "-qq", "--no-install-recommends", "install", *_PACKAGES]
    named = [line.split()[1] for line in _said(asked, scratch).splitlines() if ".deb" in line]
    packages = [name.partition("_")[0] for name in named]
    if not packages:
        raise NotFetched(f"apt knows no {' '.join(_PACKAGES)}: run apt-get update")
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
            f"there is no chromium and Debian's cannot be fetched ({command[0]} says"
            f" {str(said).strip()[-200:]!r}): install chromium"
        ) from error
    return done.stdout
