"""Deliberately broken variants of the protocol: each must be caught by a checker.

A mutant replaces one function while a run lasts; what it says in its description is the mistake an
implementer could make. If none of a few hundred seeds catches it, the checkers are worth little.
There is a module for each room of the house, by where the function is that is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping

from stillframe.testing.simulation.mutants.coordinator import COORDINATOR_MUTANTS
from stillframe.testing.simulation.mutants.mutant import Mutant
from stillframe.testing.simulation.mutants.outside import OUTSIDE_MUTANTS
from stillframe.testing.simulation.mutants.protocol import PROTOCOL_MUTANTS
from stillframe.testing.simulation.mutants.runtime import RUNTIME_MUTANTS
from stillframe.testing.simulation.mutants.state import STATE_MUTANTS
from stillframe.testing.simulation.mutants.storage import STORAGE_MUTANTS

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: Mapping[str, Mutant] = {
    **PROTOCOL_MUTANTS,
    **RUNTIME_MUTANTS,
    **STATE_MUTANTS,
    **COORDINATOR_MUTANTS,
    **STORAGE_MUTANTS,
    **OUTSIDE_MUTANTS,
}
