"""A browser in front of the playground."""

from __future__ import annotations

from browsers import browser, eyes

__all__ = ["browser", "eyes"]
