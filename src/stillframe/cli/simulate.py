"""`stillframe simulate`: the real protocol under thousands of seeded schedules, and its mutants."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from typing import TYPE_CHECKING

from stillframe.cli.lines import Lines
from stillframe.errors import BuildError
from stillframe.testing.simulation.limits import NO_LIMITS, Limits, limits_of

if TYPE_CHECKING:
    from stillframe.testing.simulation.run import Verdict

_CHUNK_SEEDS = 10
"""Few, because what was begun is ended, whether anybody still asks for it or not."""
_ALL_CORES = os.cpu_count() or 1
_MUTANT_SEEDS_MAX = 800
"""How many seeds a mutant gets to be caught in."""


def simulate(arguments: argparse.Namespace) -> int:
    """0 if every promise was kept, or every mutant caught; 1 otherwise."""
    lines = Lines(as_json=arguments.json)
    if arguments.mutants:
        return _hunt_mutants(lines)
    _refuse_unknown_mutant(arguments.mutant)
    limits = limits_of(arguments.limits)
    if arguments.seed is not None:
        replay = _shrink if arguments.shrink else _replay
        return replay(arguments.seed, arguments.mutant, limits, lines)
    if arguments.shrink or arguments.limits:
        raise BuildError("--shrink and --limits are for one schedule: say which with --seed S")
    return _search(
        range(arguments.first, arguments.first + arguments.seeds), arguments.mutant, lines
    )


def _search(seeds: range, mutant: str | None, lines: Lines) -> int:
    began = time.monotonic()
    runs = vacuous = recoveries = checkpoints = 0
    for verdict in _verdicts(seeds, mutant):
        runs += 1
        vacuous += verdict.is_vacuous
        recoveries += verdict.recoveries
        checkpoints += verdict.checkpoints
        if verdict.violation is not None:
            return _tell_violation(verdict, mutant, lines)
    seconds = time.monotonic() - began
    lines.say(
        "verdict",
        f"simulate: PASS  {runs} schedules, {checkpoints} checkpoints, {recoveries} recoveries from"
        f" one, {vacuous} schedules without a recovery, {runs / seconds:.0f} schedules/s",
        runs=runs,
        checkpoints=checkpoints,
        recoveries=recoveries,
        vacuous=vacuous,
        seconds=round(seconds, 1),
    )
    return 0


def _replay(seed: int, mutant: str | None, limits: Limits, lines: Lines) -> int:
    from stillframe.testing.simulation.run import run_seed

    return _tell_one(run_seed(seed, mutant, limits, traced=True), mutant, limits, lines)


def _shrink(seed: int, mutant: str | None, limits: Limits, lines: Lines) -> int:
    from stillframe.testing.simulation.shrinking import shrink

    limits, verdict = shrink(
        seed, mutant, limits, on_smaller=lambda found: lines.for_people(f"fails with {found}")
    )
    return _tell_one(verdict, mutant, limits, lines)


def _tell_one(verdict: Verdict, mutant: str | None, limits: Limits, lines: Lines) -> int:
    if verdict.violation is not None:
        return _tell_violation(verdict, mutant, lines, limits)
    lines.for_people("\n".join(verdict.trace))
    said = f"simulate: PASS  seed {verdict.seed}, {verdict.events} events"
    lines.say("verdict", said, seed=verdict.seed)
    return 0


def _tell_violation(
    verdict: Verdict, mutant: str | None, lines: Lines, limits: Limits = NO_LIMITS
) -> int:
    again = f"stillframe simulate --seed {verdict.seed}"
    again += f" --mutant {mutant}" if mutant else ""
    again += f" --limits {limits}" if limits.most else ""
    drawn = ", ".join(f"{name} {value:g}" for name, value in verdict.drawn.items() if value)
    lines.for_people("\n".join(verdict.trace))
    lines.for_people(f"the job: {drawn}")
    lines.say(
        "verdict",
        f"simulate: FAIL  seed {verdict.seed}: {verdict.violation}\nplay it again: {again}",
        seed=verdict.seed,
        violation=verdict.violation,
        again=again,
    )
    return 1


def _hunt_mutants(lines: Lines) -> int:
    from stillframe.testing.simulation.mutants import MUTANTS

    survivors = []
    for name, caught in hunted(MUTANTS):
        if caught is None:
            survivors.append(name)
            said = f"{name}: SURVIVED {_MUTANT_SEEDS_MAX} seeds ({MUTANTS[name].description})"
            lines.say("mutant", said, mutant=name, seed=None, violation=None)
        else:
            said = f"{name}: caught with seed {caught.seed} by {caught.violation}"
            lines.say(
                "mutant", said[:200], mutant=name, seed=caught.seed, violation=caught.violation
            )
    total = len(MUTANTS)
    word = "PASS" if not survivors else "FAIL"
    lines.say(
        "verdict",
        f"mutants: {word}  {total - len(survivors)} of {total} caught",
        caught=total - len(survivors),
        survivors=survivors,
    )
    return 1 if survivors else 0


def hunted(
    mutants: Iterable[str],
    cores: int | None = None,
    likely_seeds: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, Verdict | None]]:
    """The first run that catches each of them, in their order; every core, or so many of them,
    hunts one at a time. A likely seed is tried before all others."""
    names = list(mutants)
    work = [(name, (likely_seeds or {}).get(name)) for name in names]
    with _pool_of(cores or _ALL_CORES) as pool:
        yield from zip(names, pool.map(_hunt, work), strict=True)


def _hunt(work: tuple[str, int | None]) -> Verdict | None:
    mutant, likely_seed = work
    seeds = chain([] if likely_seed is None else [likely_seed], range(_MUTANT_SEEDS_MAX))
    verdicts = (run_one((seed, mutant)) for seed in seeds)
    return next((verdict for verdict in verdicts if verdict.catches_mutant), None)


def _verdicts(seeds: Sequence[int], mutant: str | None) -> Iterator[Verdict]:
    """In the order of the seeds, from all cores; stops working when nobody asks for more."""
    with _pool_of(_ALL_CORES) as pool:
        work = [(seed, mutant) for seed in seeds]
        yield from pool.map(run_one, work, chunksize=_CHUNK_SEEDS)


@contextlib.contextmanager
def _pool_of(cores: int) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(cores, get_context("forkserver"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_one(work: tuple[int, str | None]) -> Verdict:
    """One seed, with one mutant or none; a function of its own, so that it reaches other cores."""
    from stillframe.testing.simulation.run import run_seed

    return run_seed(*work)


def _refuse_unknown_mutant(name: str | None) -> None:
    from stillframe.testing.simulation.mutants import MUTANTS

    if name is not None and name not in MUTANTS:
        raise BuildError(f"there is no mutant {name!r}; there are: {', '.join(MUTANTS)}")
