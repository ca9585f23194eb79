"""Asking a storage across a network: again and again within a bound, and what its errors mean.

Trying again has a bound, the patience. When it is used up, whatever is asked in the next moment
fails at once, so that a coordinator that tidies up after a failed checkpoint does not wait once
per file, and its slots do not take it for dead.

Rules of this file
------------------
1. Every wait has a limit; every request is sent again only within the patience.
2. Nothing a library says is shown as it is: servers like to repeat keys and signatures.
3. `NotDone` only if no try of a request can have reached the storage, or it was refused.
"""

from __future__ import annotations

import logging
import random
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from stillframe.errors import NotDone, Unanswered
from stillframe.storage.store import Chunk, Written

log = logging.getLogger("stillframe")

WHOLE_BYTES_MAX = 8 * 1024 * 1024
"""Up to this size a file is written at once, so that it can be sent again."""
_FIRST_PAUSE_SECONDS = 0.05
_PAUSE_SECONDS_MAX = 2.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait. What a coordinator does at a time must stay well below the 50 seconds
    after which its slots give it up."""

    connect_seconds: float = 3.0
    request_seconds: float = 6.0
    """For one small request and its answer."""
    body_seconds: float = 60.0
    """For one request with a large body."""
    patience_seconds: float = 12.0
    """After this a request is not sent again."""
    rest_seconds: float = 2.0
    """How long nothing is asked after that."""

    @classmethod
    def of_request(cls, seconds: float) -> Limits:
        """All in proportion to the time of one request."""
        share = seconds / cls().request_seconds
        return cls(
            min(cls().connect_seconds, seconds),
            seconds,
            cls().body_seconds * share,
            cls().patience_seconds * share,
            cls().rest_seconds * min(share, 1.0),
        )


class Missing(Exception):
    """There is no such file."""


class Taken(Exception):
    """There is such a file already."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What went wrong with one try, in our words."""

    reason: str
    is_passing: bool
    may_be_done: bool


class Asking(ABC):
    """The way to a storage. Every method may be called by any thread."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._rests_until_seconds = 0.0
        self._trouble = ""

    @abstractmethod
    def understand(self, error: Exception) -> Trouble:
        """What an error of the library means. One that is an answer becomes `Missing` or `Taken`,
        and one that is not the library's is raised again."""

    def ask(self, doing: str, where: str, request: Callable[[], Answer]) -> Answer:
        """Send a request until it is answered; `request` may be called any number of times.

        Besides `StorageError` this raises `Missing` and `Taken`, which are answers too.
        """
        if time.monotonic() < self._rests_until_seconds:
            raise NotDone(f"cannot {doing} {where}: {self._trouble} a moment ago")
        deadline = time.monotonic() + self.limits.patience_seconds
        tries, in_doubt = 0, False
        while True:
            tries += 1
            try:
                return request()
            except Exception as error:
                trouble = self.understand(error)
            in_doubt |= trouble.may_be_done
            pause = _pause_seconds(tries)
            if not trouble.is_passing or time.monotonic() + pause > deadline:
                break
            log.debug("%s %s: %s; trying again", doing, where, trouble.reason)
            time.sleep(pause)
        if trouble.is_passing:
            self._trouble = trouble.reason
            self._rests_until_seconds = time.monotonic() + self.limits.rest_seconds
        kind = Unanswered if in_doubt else NotDone
        often = f" ({tries} tries)" if tries > 1 else ""
        # Not chained: see rule 2.
        raise kind(f"cannot {doing} {where}: {trouble.reason}{often}") from None


def _pause_seconds(tries: int) -> float:
    """Ever longer, and never the same for two that failed together."""
    longest = min(_PAUSE_SECONDS_MAX, _FIRST_PAUSE_SECONDS * 2**tries)
    return float(longest * random.uniform(0.5, 1.0))


class Watched:
    """What is written, so that its own failure is told apart from what goes wrong on the way."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = views
        self.has_failed = False

    def __iter__(self) -> Iterator[memoryview]:
        try:
            yield from self._views
        except Exception:  # not GeneratorExit: then it is the writer that has failed
            self.has_failed = True
            raise


class Tally:
    """Counts what passes."""

    def __init__(self) -> None:
        self._length_bytes = 0
        self._crc32 = 0

    def counted(self, chunks: Iterable[Chunk]) -> Iterator[memoryview]:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            self._crc32 = zlib.crc32(view, self._crc32)
            self._length_bytes += view.nbytes
            if view.nbytes:
                yield view

    def written(self) -> Written:
        return Written(self._length_bytes, self._crc32)
