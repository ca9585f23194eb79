"""What a mutant is: one function replaced by a wrong one, for as long as a run lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Breaking = Callable[[Any], Any]
"""Gets the right function, answers the wrong one."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small mistake."""

    description: str
    target: Any
    attribute: str
    breaking: Breaking

    @contextmanager
    def applied(self) -> Iterator[None]:
        original = getattr(self.target, self.attribute)
        setattr(self.target, self.attribute, self.breaking(original))
        try:
            yield
        finally:
            setattr(self.target, self.attribute, original)


def nothing(original: Any) -> Any:
    """What was to be done is not done."""
    return lambda *args, **kwargs: None
