"""How much goes wrong in a run, drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stillframe.testing.simulation.jobs import SimulatedJob
from stillframe.testing.simulation.limits import FAULTS, Limits
from stillframe.testing.simulation.world import World

_BY_HAND = (None, "older", "older", "anew", "losses", "twice", "twice")


@dataclass(frozen=True, slots=True)
class Rates:
    """How much goes wrong in this run, and until when."""

    peace_from: float
    kills: int
    driver_deaths: int
    driver_stalls: int
    store_fails: float
    """Of the operations on files, of which one write to the store takes half a dozen."""
    driver_dies_at_store: float
    after_completion: float
    """How often something is killed right after a checkpoint has completed."""
    rescales: bool
    rots: int
    power_losses: int
    repeats: float
    """The share of control messages that come twice."""
    clock_jumps: int
    savepoints: int
    """How often somebody asks for one, or for the job to stop with one."""
    live_rescales: int
    """How often somebody asks for another parallelism while the job runs; only if it rescales."""
    cancels: int
    """How often somebody cancels the job, which keeps its checkpoints and is started again."""
    outside_fails: float
    """Of the requests to a system that takes marks."""
    aways: int
    """How often such a system is away for a while."""
    locks: int
    """How often it is so for one writer alone."""
    handovers: int
    """How often what a writer has prepared changes hands while it is so; only if it rescales."""
    forgets: int
    """How often it forgets the marks for which there are receipts."""
    older: int
    """How often somebody goes back to an older checkpoint."""
    anew: int
    """How often the log is damaged, so that somebody has the job begin anew."""
    losses: int
    """How often all is lost that the job has stored."""
    twice: int
    """Whether a second job starts from a savepoint of the first."""


def random_rates(world: World, job: SimulatedJob, limits: Limits) -> Rates:
    random = world.random
    own = world.own_random("outside")
    is_told_apart = len(job.marked) == len(job.branches) and job.is_exact
    by_hand = own.choice(_BY_HAND) if is_told_apart else None
    if any(branch.at_coordinator for branch in job.branches) and by_hand == "twice":
        # One mark for what was prepared before the savepoint and after it.
        by_hand = "losses"
    drawn = Rates(
        peace_from=random.choice([4.0, 8.0, 15.0]),
        kills=random.choice([0, 1, 1, 2, 4]),
        driver_deaths=random.choice([0, 1, 1, 2]),
        driver_stalls=random.choice([0, 0, 1]),
        store_fails=random.choice([0.0, 0.0, 0.01, 0.04]),
        driver_dies_at_store=random.choice([0.0, 0.0, 0.01, 0.02]),
        after_completion=random.choice([0.0, 0.3, 0.6]),
        rescales=random.random() < 0.4,
        rots=random.random() < 0.08,
        power_losses=random.choice([0, 0, 0, 1, 2]),
        repeats=random.choice([0.0, 0.0, 0.0, 0.1, 0.5]),
        clock_jumps=random.randint(0, 1),
        savepoints=random.choice([0, 0, 1, 2]),
        live_rescales=random.choice([0, 1, 2]),
        cancels=random.choice([0, 0, 0, 1]),
        outside_fails=own.choice([0.0, 0.1, 0.4]),
        aways=own.choice([0, 0, 1, 2]),
        locks=own.choice([0, 0, 1, 3]),
        handovers=own.choice([0, 1, 2]),
        # Who goes back to an older checkpoint needs marks of what is no longer staged.
        forgets=0 if by_hand == "older" else own.choice([0, 1, 4]),
        older=(by_hand == "older") * own.choice([1, 2]),
        anew=int(by_hand == "anew"),
        losses=int(by_hand == "losses"),
        twice=int(by_hand == "twice"),
    )
    # Drawn first, so that a limit changes nothing else about the run.
    return replace(drawn, **{name: limits.cap(name, getattr(drawn, name)) for name in FAULTS})
