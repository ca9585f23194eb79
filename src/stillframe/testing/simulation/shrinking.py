"""From a seed that fails to the smallest job of that seed that still does.

Theory of operation: limits are tightened one at a time, the boldest first, and each is kept if the
run then still fails by the same checker. It is over when nothing can be left out any more. A limit
changes the schedule too, so this finds a small job and not always the smallest there is.
"""

from __future__ import annotations

from collections.abc import Callable

from stillframe.testing.simulation.limits import NO_LIMITS, Limits, smaller
from stillframe.testing.simulation.run import Verdict, run_seed

_RUNS_MAX = 400


def shrink(
    seed: int,
    mutant: str | None = None,
    limits: Limits = NO_LIMITS,
    on_smaller: Callable[[Limits], None] = lambda limits: None,
) -> tuple[Limits, Verdict]:
    """The tightest limits found, and what the run then shows; as given if it does not fail."""
    verdict = run_seed(seed, mutant, limits, traced=True)
    runs = 0
    while verdict.violation is not None and runs < _RUNS_MAX:
        for tighter in smaller(limits, verdict.drawn):
            runs += 1
            tried = run_seed(seed, mutant, tighter)
            if tried.checker == verdict.checker:
                limits, verdict = tighter, tried
                on_smaller(limits)
                break
        else:
            break
    return limits, verdict
