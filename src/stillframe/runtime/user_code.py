"""Calls of the user's code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stillframe.errors import StillframeError, UserCodeError


@contextmanager
def calling(name: str) -> Iterator[None]:
    """What is raised in here names the user's code, not our insides; our own errors pass."""
    try:
        yield
    except StillframeError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"{name} raised {type(error).__name__}: {error};"
            " correct it and start the job again, it resumes from its last checkpoint"
        ) from error
