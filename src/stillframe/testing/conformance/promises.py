"""Drawn schedules, the shortest one that breaks a promise, and what is said of it.

Theory of operation
-------------------
A schedule is a list of steps that is drawn from a seed. A step that makes no sense where it stands
is passed over, so any part of a schedule is one too. When a schedule breaks a promise,
*adversities* (that the process dies in a call, that an old one goes on, that epochs come again,
...) are taken away, one after the other, for as long as some schedule still breaks something
without them. What is left then is what the class does not stand, and its sentence says more than
the symptom. At last steps are left out and made simpler while the same is still seen.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from stillframe.errors import UserCodeError

_SECONDS_TO_SHORTEN_MAX = 8.0
_RUNS_EASED = 60
"""How many schedules are tried to break something without one more adversity."""
_TOLD_MAX = 5


@dataclass(frozen=True, slots=True)
class Step:
    """A method of the job under test, and what it is called with; 0 is always the simplest."""

    what: str
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """How often a step is drawn, and from which numbers each of its arguments."""

    what: str
    weight: int
    drawn_from: tuple[Sequence[int], ...] = ()


def draw(kinds: Sequence[Kind], steps_max: int, chance: random.Random) -> list[Step]:
    weights = [kind.weight for kind in kinds]
    chosen = chance.choices(kinds, weights, k=chance.randint(4, steps_max))
    return [Step(kind.what, tuple(map(chance.choice, kind.drawn_from))) for kind in chosen]


class Broken(Exception):
    """A promise is broken: which one, and how it was seen.

    `is_plain`: what was seen says it all. Otherwise it is what records look like outside, and the
    adversity that it took says more.
    """

    def __init__(self, promise: str, seen: str, *, is_plain: bool = False) -> None:
        super().__init__(f"{promise}: {seen}")
        self.promise = promise
        self.seen = seen
        self.is_plain = is_plain


@contextmanager
def keeping(promise: str, call: str, otherwise: str | None = None) -> Iterator[None]:
    """What the class under test raises in here breaks this promise; what the engine says of it,
    the other one."""
    try:
        yield
    except Broken:
        raise
    except UserCodeError as error:
        is_plain = error.blame is None
        raise Broken(
            (otherwise or promise) if is_plain else promise, str(error), is_plain=is_plain
        ) from error
    except Exception as error:
        raise Broken(promise, f"{call} raised {type(error).__name__}: {error}") from error


class PromiseBroken(AssertionError):
    """A source or a sink does not keep a promise of its contract.

    `promise` is the sentence, `seen` what was observed, `steps` the shortest schedule found, in
    words, and `seed` the one that it was drawn from.
    """

    def __init__(
        self, subject: str, promise: str, seen: str, steps: Sequence[str], seed: int | None
    ) -> None:
        self.subject = subject
        self.promise = promise
        self.seen = seen
        self.steps = tuple(steps)
        self.seed = seed
        super().__init__(self._in_words())

    def _in_words(self) -> str:
        lines = [f"{self.subject} breaks a promise: {self.promise}.", "", f"Seen: {self.seen}."]
        if self.steps:
            lines += ["", "The shortest schedule found:"]
            lines += [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)]
        if self.seed is not None:
            lines += ["", f"To replay it, give the same arguments and seed={self.seed}, checks=1."]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Report:
    """What was checked of a class that kept its promises, and what could not be."""

    subject: str
    schedules: int
    steps: int
    unchecked: tuple[str, ...] = ()
    """What the kit could not look at, in sentences."""

    def __str__(self) -> str:
        kept = f"{self.subject} kept its promises in {self.schedules} schedules"
        return "; not checked: ".join([f"{kept} of {self.steps} steps", *self.unchecked])


class Diary:
    """What happens in one run of a schedule, in words."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, line: str) -> None:
        self.lines.append(line)

    def add(self, words: str) -> None:
        """Something more about what was told last."""
        if self.lines:
            self.lines[-1] += f"; {words}"


@dataclass(frozen=True)
class Search:
    """How to draw a schedule and to run it; `eased` names the adversities to spare."""

    draw: Callable[[random.Random], list[Step]]
    run: Callable[[Sequence[Step], Diary, frozenset[str]], None]
    """Raises `Broken`."""
    adversities: Mapping[str, str] = field(default_factory=dict)
    """By name, the promise that is broken if all is well without it."""

    def explore(self, subject: str, seed: int, checks: int) -> int:
        """Run this many schedules; answers how many steps they had together."""
        told = 0
        for each in range(seed, seed + checks):
            diary = Diary()
            steps = self.draw(random.Random(each))
            broken = self._broken(steps, diary)
            told += len(diary.lines)
            if broken is not None:
                raise self._told(subject, each, steps, broken) from broken
        return told

    def _told(self, subject: str, seed: int, steps: list[Step], broken: Broken) -> PromiseBroken:
        eased: frozenset[str] = frozenset()
        for name in [] if broken.is_plain else list(self.adversities)[::-1]:
            milder = self._first_broken(seed, steps, eased | {name})
            if milder is not None:
                steps, broken = milder
                eased |= {name}
        steps, broken = self._shortest(steps, broken, eased)
        diary = Diary()
        broken = self._broken(steps, diary, eased) or broken
        needed = [promise for name, promise in self.adversities.items() if name not in eased]
        promise = needed[0] if needed and not broken.is_plain else broken.promise
        return PromiseBroken(subject, promise, broken.seen, diary.lines, seed)

    def _first_broken(
        self, seed: int, steps: list[Step], eased: frozenset[str]
    ) -> tuple[list[Step], Broken] | None:
        drawn = (self.draw(random.Random(seed + each)) for each in range(1, _RUNS_EASED))
        for tried in itertools.chain([steps], drawn):
            broken = self._broken(tried, Diary(), eased)
            if broken is not None:
                return tried, broken
        return None

    def _broken(
        self, steps: Sequence[Step], diary: Diary, eased: frozenset[str] = frozenset()
    ) -> Broken | None:
        try:
            self.run(steps, diary, eased)
        except Broken as broken:
            return broken
        return None

    def _shortest(
        self, steps: list[Step], broken: Broken, eased: frozenset[str]
    ) -> tuple[list[Step], Broken]:
        ends_at = time.monotonic() + _SECONDS_TO_SHORTEN_MAX
        again = True
        while again:
            again = False
            for fewer in _smaller(steps):
                if time.monotonic() > ends_at:
                    break
                found = self._broken(fewer, Diary(), eased)
                if found is not None and found.promise == broken.promise:
                    steps, broken, again = fewer, found, True
                    break
        return steps, broken


def _smaller(steps: list[Step]) -> Iterator[list[Step]]:
    """The same with less: halves, quarters, ... single steps left out; then smaller steps."""
    size = len(steps) // 2
    while size:
        for start in range(0, len(steps), size):
            yield steps[:start] + steps[start + size :]
        size //= 2
    for index, step in enumerate(steps):
        for place, number in enumerate(step.numbers):
            if number:
                numbers = (*step.numbers[:place], 0, *step.numbers[place + 1 :])
                yield [*steps[:index], Step(step.what, numbers), *steps[index + 1 :]]


def named(what: Sequence[object]) -> str:
    """The first few of them, in words."""
    shown = ", ".join(map(str, what[:_TOLD_MAX]))
    return shown if len(what) <= _TOLD_MAX else f"{shown} and {len(what) - _TOLD_MAX} more"
