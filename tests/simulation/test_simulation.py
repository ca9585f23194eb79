"""The simulator: promises hold under every schedule tried; every deliberate mistake is caught."""

import json
import os
from pathlib import Path

import pytest

from stillframe.cli.main import main
from stillframe.cli.simulate import hunted, run_one
from stillframe.testing.simulation.checkers import Checkers, Violation
from stillframe.testing.simulation.limits import NO_LIMITS, Limits, limits_of
from stillframe.testing.simulation.mutants import MUTANTS
from stillframe.testing.simulation.run import run_seed
from stillframe.testing.simulation.shrinking import shrink

SEEDS = range(120)
"""`make soak` tries two thousand."""
CATCHING_SEEDS = json.loads(Path(__file__).with_name("catching_seeds.json").read_text())
"""The seed that last caught each mutant. Where it no longer does, because something else is drawn
from it by now, seeds are tried one by one, which takes long: `stillframe simulate --mutants --json`
tells the new ones."""


@pytest.fixture(scope="module")
def failing():
    """A seed and a mutant it catches; which seed, changes with whatever is drawn from it."""
    mutant = "commit-before-completion"
    return next((seed, mutant) for seed in SEEDS if run_seed(seed, mutant).violation)


@pytest.mark.parametrize("portion", range(4))
def test_every_promise_holds_under_a_fixed_set_of_schedules(portion):
    verdicts = [run_one((seed, None)) for seed in SEEDS[portion::4]]

    broken = [verdict for verdict in verdicts if verdict.violation]
    assert not broken, f"stillframe simulate --seed {broken[0].seed}: {broken[0].violation}"
    assert any(verdict.recoveries for verdict in verdicts), "nothing was ever recovered"


@pytest.fixture(scope="module")
def hunts(request):
    """The hunts for all mutants of this session: while one is waited for, others go on, on as many
    cores as no other worker of this run has."""
    asked = [item for item in request.session.items if "hunts" in item.fixturenames]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = max(1, (os.cpu_count() or 1) // workers)
    found = hunted([item.callspec.params["name"] for item in asked], cores, CATCHING_SEEDS)
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_deliberate_mistake_is_caught(name, hunts):
    hunted_name, verdict = next(hunts)

    assert hunted_name == name
    assert verdict is not None, f"{name} survived: {MUTANTS[name].description}"


def test_a_seed_gives_the_same_run_again():
    assert run_one((7, None)) == run_one((7, None))


def test_what_a_checker_sees_within_a_sink_is_told_by_its_own_name(monkeypatch):
    """And not taken for an error of the sink's."""

    def sees(checkers, branch, rows):
        raise Violation("early: on purpose")

    monkeypatch.setattr(Checkers, "_check_nothing_early", sees)

    seen = {run_seed(seed).violation for seed in range(6)}

    assert seen == {"early: on purpose"}


def test_a_mutant_leaves_nothing_behind():
    before = run_one((3, None))
    run_one((3, "skip-alignment"))

    assert run_one((3, None)) == before


def test_the_command_says_which_seed_failed_by_which_checker_and_how_to_play_it_again(
    failing, capsys
):
    seed, mutant = failing
    code = main(["simulate", "--seed", str(seed), "--mutant", mutant])

    said = capsys.readouterr().out
    assert code == 1
    assert f"FAIL  seed {seed}: {run_seed(*failing).checker}: " in said
    assert f"stillframe simulate --seed {seed} --mutant {mutant}" in said


def test_the_command_passes_on_a_few_schedules(capsys):
    assert main(["simulate", "--seeds", "12"]) == 0
    assert "simulate: PASS  12 schedules" in capsys.readouterr().out


def test_most_schedules_recover_from_a_checkpoint():
    verdicts = [run_one((seed, None)) for seed in range(300, 360)]

    # About one in five: the rest is left to the chance of a small sample.
    assert sum(verdict.is_vacuous for verdict in verdicts) < len(verdicts) / 3


def test_a_trace_is_kept_of_what_failed_and_of_what_was_asked_for(failing):
    assert run_seed(3).trace == ()
    assert run_seed(3, traced=True).trace
    assert run_seed(*failing).trace


def test_a_limit_leaves_out_a_kind_of_fault_and_changes_nothing_else_that_is_drawn():
    drawn = next(
        verdict.drawn for verdict in map(run_seed, range(50)) if verdict.drawn["kills"] == 4
    )
    seed = next(seed for seed in range(50) if run_seed(seed).drawn == drawn)

    limited = run_seed(seed, None, Limits({"kills": 0})).drawn

    assert limited == {**drawn, "kills": 0}


def test_a_failing_schedule_is_shrunk_to_a_small_one_that_fails_by_the_same_checker(failing):
    before = run_seed(*failing)

    limits, verdict = shrink(*failing)

    assert verdict.checker == before.checker
    assert sum(verdict.drawn.values()) < sum(before.drawn.values())
    assert run_seed(*failing, limits_of(str(limits))) == verdict


def test_a_schedule_that_does_not_fail_is_not_shrunk():
    limits, verdict = shrink(3)

    assert (limits, verdict.violation) == (NO_LIMITS, None)


def test_the_command_shrinks_and_says_how_to_play_the_small_job_again(failing, capsys):
    seed, mutant = failing
    code = main(["simulate", "--seed", str(seed), "--mutant", mutant, "--shrink"])

    again = capsys.readouterr().out.rpartition("play it again: ")[2].strip()
    assert code == 1
    assert again.startswith(f"stillframe simulate --seed {seed} --mutant {mutant} --limits ")
    assert main(again.split()[1:]) == 1
    assert again in capsys.readouterr().out


def test_a_limit_that_makes_no_sense_is_refused_with_the_names_there_are(capsys):
    assert main(["simulate", "--seed", "1", "--limits", "slots=0"]) == 1
    assert "a whole number from 1 on, such as records=20, and not 'slots=0'" in (
        capsys.readouterr().err
    )
    assert main(["simulate", "--seed", "1", "--limits", "bugs=0"]) == 1
    assert "and not 'bugs=0'; the names are slots, " in capsys.readouterr().err


def test_limits_without_a_seed_are_refused(capsys):
    assert main(["simulate", "--limits", "slots=1"]) == 1
    assert "say which with --seed S" in capsys.readouterr().err


def test_a_mutant_nobody_knows_is_refused_with_the_names_of_those_there_are(capsys):
    assert main(["simulate", "--mutant", "no-such", "--seed", "1"]) == 1
    assert "there is no mutant 'no-such'; there are: skip-alignment" in capsys.readouterr().err
