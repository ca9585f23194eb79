"""The files of the page, as a browser gets them.

Rules of this file
------------------
1. Only what is in the list made at the start is served: no name in a request is ever a path.
2. They tell nothing of any job, so they need no token: a browser that opens an address sends none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from stillframe.rest.routes import split_path

_DIRECTORY = Path(__file__).parent.parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@cache
def page_files() -> Mapping[str, Path]:
    """The files by the paths they are asked for with: `/`, and all others below `/page/`."""
    found = [path for path in _DIRECTORY.rglob("*") if path.suffix in _TYPES]
    named = {f"/page/{path.relative_to(_DIRECTORY).as_posix()}": path for path in found}
    return {"/": named.pop("/page/index.html"), **named}


def page_file(path: str) -> tuple[str, Mapping[str, str]] | None:
    """The text at this path and its headers; None: it is none of the page."""
    found = page_files().get("/" + "/".join(split_path(path)))
    if found is None:
        return None
    return found.read_text(), {"Content-Type": _TYPES[found.suffix], **_HEADERS}
