"""Brings the libraries of the page from the npm registry into `src/stillframe/page/vendor/`.

`make vendor` runs it, after a version below was changed. What it writes is served as it is: there
is no build. It makes bare imports relative, because a browser without a build knows no
`from "preact"`, and keeps licences and hashes beside the files. A test compares the hashes.
"""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

VENDOR = Path(__file__).parent.parent / "src" / "stillframe" / "page" / "vendor"


@dataclass(frozen=True)
class Library:
    package: str
    version: str
    files: Mapping[str, str]
    """Where a file is in the package, and what it is called here."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    added: str = ""
    """Behind the end of a script: what makes a module of it."""


LIBRARIES = (
    Library(
        "preact",
        "11.2.0",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"},
        {'from"preact"': 'from"./preact.js"'},
    ),
    Library("htm", "3.1.1", {"dist/htm.mjs": "htm.js"}),
    # Its module is not minified, its script is.
    Library(
        "uplot",
        "1.6.32",
        {"dist/uPlot.iife.min.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"},
        added="\nexport default uPlot;\n",
    ),
    Library("@dagrejs/dagre", "3.1.3", {"dist/dagre.esm.js": "dagre.js"}),
)


def main() -> None:
    VENDOR.mkdir(exist_ok=True)
    for left in VENDOR.iterdir():
        left.unlink()
    for library in LIBRARIES:
        _bring(library)
    _write_hashes()


def _bring(library: Library) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        name = f"{library.package}@{library.version}"
        subprocess.run(["npm", "pack", "--silent", name], cwd=scratch, check=True)
        [archive] = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        package = Path(scratch) / "package"
        for file, called in library.files.items():
            text = (package / file).read_text()
            for bare, relative in library.replaced.items():
                text = text.replace(bare, relative)
            if called.endswith(".js"):
                text = _without_map(text) + library.added
            (VENDOR / called).write_text(text)
        short = library.package.rpartition("/")[2]
        (VENDOR / f"{short}.LICENSE.txt").write_text((package / "LICENSE").read_text())


def _without_map(text: str) -> str:
    """A browser would ask for the map that the last line names, and there is none."""
    lines = text.rstrip().split("\n")
    return "\n".join(line for line in lines if not line.startswith("//# sourceMappingURL"))


def _write_hashes() -> None:
    files = sorted(path for path in VENDOR.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (VENDOR / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    main()
