"""The page about the worked examples, in both languages, and what the examples print."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "explain/checkpoints.md", DOCS / "zh/explain/checkpoints.md")


def check_shown(said: Iterable[object]) -> None:
    """The pages show just these lines, in this order."""
    transcript = "\n".join(map(str, said))
    for page in PAGES:
        assert transcript in page.read_text(), f"{page} does not show\n{transcript}"
