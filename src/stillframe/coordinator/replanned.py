"""What a job tells when it goes on with another plan, exactly where it was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rescaled:
    """The job runs on with another parallelism."""

    before: int
    after: int
    downtime_seconds: float
    """From when its sources were held until all its new slots ran."""

    def __str__(self) -> str:
        if self.before == self.after:
            return f"the parallelism is {self.after} already"
        return (
            f"rescaled from parallelism {self.before} to {self.after},"
            f" down for {self.downtime_seconds:.3g} s"
        )


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The job runs on with new rows of the tables that it joins with."""

    downtime_seconds: float
    """As above."""

    def __str__(self) -> str:
        return f"tables read again and changed, down for {self.downtime_seconds:.3g} s"
