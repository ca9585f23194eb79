"""How many simulated schedules one core plays in a second, over a fixed range of seeds.

    python bench/simulation.py [--seeds 300] [--rounds 3] [--processes 1]

Processor time, so that what else runs on the machine counts little. 'Small' are those of the
schedules whose job has at most 4 operators, 4 subtasks (slots times tasks) and 500 records. The
figure of a round is of all its schedules together; the best round is the one least disturbed.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from stillframe.testing.simulation.jobs import random_job
from stillframe.testing.simulation.limits import NO_LIMITS
from stillframe.testing.simulation.run import run_seed
from stillframe.testing.simulation.world import World

OPERATORS_MAX, SUBTASKS_MAX, RECORDS_MAX = 4, 4, 500
CHUNK_SEEDS = 10


def is_small(seed: int, slots: int) -> bool:
    job = random_job(World(seed), NO_LIMITS)
    plan = job.plan(slots)
    operators = sum(1 for _ in plan.operators())
    subtasks = sum(1 for _ in plan.subtasks())
    return (
        operators <= OPERATORS_MAX
        and subtasks <= SUBTASKS_MAX
        and sum(job.source.lengths) <= RECORDS_MAX
    )


def timed(seed: int) -> tuple[float, bool, int]:
    """How long it took in processor seconds, whether it was small, and its recoveries."""
    began = time.process_time()
    verdict = run_seed(seed)
    seconds = time.process_time() - began
    if verdict.violation is not None:
        raise SystemExit(f"stillframe simulate --seed {seed}: {verdict.violation}")
    return seconds, is_small(seed, int(verdict.drawn["slots"])), verdict.recoveries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="at a time; 0: one per core")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    processes = arguments.processes or os.cpu_count() or 1
    with ProcessPoolExecutor(processes, get_context("forkserver")) as pool:
        list(pool.map(timed, range(CHUNK_SEEDS * processes)))  # imports, and caches filled
        for number in range(1, arguments.rounds + 1):
            began = time.monotonic()
            results = list(pool.map(timed, seeds, chunksize=CHUNK_SEEDS))
            elapsed = time.monotonic() - began
            small = [seconds for seconds, was_small, _ in results if was_small]
            recoveries = sum(recovered for _, _, recovered in results)
            everything = sum(seconds for seconds, _, _ in results)
            print(
                f"round {number}: {len(results) / everything:.1f} schedules/s per core,"
                f" {len(small) / sum(small):.1f} of the {len(small)} small ones,"
                f" {recoveries / everything:.1f} recoveries/s per core;"
                f" {len(results) / elapsed:.1f} schedules/s in all on {processes} processes"
            )


if __name__ == "__main__":
    main()
