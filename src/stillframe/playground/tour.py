"""The tour of twelve steps: each breaks something, waits for what comes of it, and says whether it
is what was predicted.

A step is a function of the playground. It can be repeated, left out and run alone; what it changes
it changes back. What it raises is its result too: the step is wrong, and the tour goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stillframe.cli.lines import in_one_sentence
from stillframe.playground.following import Left
from stillframe.playground.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a step."""

    predicted: str
    observed: str
    is_right: bool
    by_hand: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One of the twelve."""

    number: int
    title: str
    does: str
    """What it breaks or asks for, in a sentence."""
    run: Callable[[Supervisor], Result]
    needs_executor: bool = False


class Tour:
    """Runs steps, one at a time, and remembers what came of them. May be read from any thread."""

    def __init__(self, play: Supervisor, steps: Sequence[Step]) -> None:
        self._play = play
        self.steps = {step.number: step for step in steps}
        self.results: dict[int, Result] = {}
        self.skipped: dict[int, str] = {}
        self.at: int | None = None
        """The step that runs; None: none does."""

    def run(self, numbers: Sequence[int]) -> Iterator[tuple[Step, Result | None]]:
        """These steps in turn; None for one that cannot be run here (`skipped` says why)."""
        for number in numbers:
            step = self.steps[number]
            if step.needs_executor and self._play.no_executor is not None:
                self.skipped[number] = self._play.no_executor
                yield step, None
            else:
                yield step, self.run_step(step)

    def run_step(self, step: Step) -> Result:
        self.at, began = step.number, time.monotonic()
        try:
            result = step.run(self._play)
        except Left:
            raise
        except Exception as error:  # whatever it is: the next step may do better
            result = Result("as said", in_one_sentence(error), False)
        finally:
            self.at = None
        seconds = round(time.monotonic() - began, 1)
        self.results[step.number] = Result(
            result.predicted, result.observed, result.is_right, result.by_hand, seconds
        )
        return self.results[step.number]

    def to_json(self) -> dict[str, Any]:
        waiting = self._play.following.waiting
        return {
            "at": self.at,
            "waits_for": None if waiting is None else waiting.what,
            "waits_long": None if waiting is None else waiting.sentence,
            "steps": [self._told(step) for step in self.steps.values()],
        }

    def _told(self, step: Step) -> dict[str, Any]:
        result = self.results.get(step.number)
        return {
            "number": step.number,
            "title": step.title,
            "does": step.does,
            "off": self._play.no_executor if step.needs_executor else None,
            "result": None if result is None else asdict(result),
        }
