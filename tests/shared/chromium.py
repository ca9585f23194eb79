"""A browser for the tests: this machine's Chromium, or Debian's, with a font for Chinese."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

from of_debian import unpacked

_PACKAGES = ("chromium", "fonts-noto-cjk", "fonts-dejavu-core")

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
    root = unpacked(*_PACKAGES)
    places = ("usr/lib/*-linux-gnu*", "usr/lib/*-linux-gnu*/pulseaudio")
    libraries = [str(path) for place in places for path in root.glob(place)]
    fonts = root / "fonts.conf"
    fonts.write_text(_FONTS.format(root=root))
    return Chromium(
        str(root / "usr/lib/chromium/chromium"),
        {"LD_LIBRARY_PATH": ":".join(libraries), "FONTCONFIG_FILE": str(fonts)},
    )
