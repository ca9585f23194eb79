"""A request that is not done: the status, and one sentence for whoever sent it."""

from __future__ import annotations

from collections.abc import Mapping

from stillframe.errors import StillframeError


class Refused(StillframeError):
    """Nothing has changed."""

    def __init__(
        self, status: int, sentence: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers or {}
