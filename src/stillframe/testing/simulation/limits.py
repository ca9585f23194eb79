"""What a job drawn from a seed may have at most: how a failing one is made smaller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from stillframe.errors import BuildError

Number = TypeVar("Number", int, float)

SIZES = ("slots", "branches", "splits", "records", "keys")
"""Of the job; at least one of each is left, except of records per split."""
FAULTS = (
    "kills",
    "driver_deaths",
    "driver_stalls",
    "store_fails",
    "driver_dies_at_store",
    "after_completion",
    "rescales",
    "rots",
    "power_losses",
    "repeats",
    "clock_jumps",
    "savepoints",
    "live_rescales",
    "cancels",
    "outside_fails",
    "aways",
    "locks",
    "handovers",
    "forgets",
    "older",
    "anew",
    "losses",
    "twice",
)
"""As in `Rates`; 0 leaves a kind of fault out."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most there may be of each; what is not named is as the seed says.

    As text: `slots=1,records=20,kills=0`.
    """

    most: Mapping[str, int] = field(default_factory=dict)

    def cap(self, name: str, drawn: Number) -> Number:
        assert name in (*SIZES, *FAULTS), f"{name} has no limit"
        return min(drawn, self.most.get(name, drawn))

    def with_at_most(self, name: str, most: int) -> Limits:
        return Limits({**self.most, name: most})

    def __str__(self) -> str:
        return ",".join(f"{name}={most}" for name, most in self.most.items())


NO_LIMITS = Limits()


def limits_of(text: str) -> Limits:
    """The reverse of `str`."""
    return Limits(dict(_limit(part) for part in text.split(",") if part))


def _limit(part: str) -> tuple[str, int]:
    name, _, most = part.partition("=")
    least = least_of(name) if name in (*SIZES, *FAULTS) else 0
    if name not in (*SIZES, *FAULTS) or not most.isdecimal() or int(most) < least:
        raise BuildError(
            f"a limit is a name, = and a whole number from {least} on, such as records=20, and not"
            f" {part!r}; the names are {', '.join((*SIZES, *FAULTS))}"
        )
    return name, int(most)


def least_of(name: str) -> int:
    return 1 if name in SIZES and name != "records" else 0


def smaller(limits: Limits, drawn: Mapping[str, float]) -> Iterator[Limits]:
    """Limits that leave out a little more, the boldest of each kind first."""
    for name in (*FAULTS, *SIZES):
        now, least = drawn[name], least_of(name)
        for most in sorted({least, int(now) // 4, int(now) // 2, int(now) - 1}):
            if least <= most < now:
                yield limits.with_at_most(name, most)
