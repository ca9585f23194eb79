"""The simulator: promises hold under every schedule tried; every deliberate mistake is caught."""

import pytest

from stillframe.cli.main import main
from stillframe.cli.simulate import run_one
from stillframe.testing.simulation.mutants import MUTANTS

SEEDS = range(150)
MUTANT_SEEDS_MAX = 400
FIRST_SEED = {"ignore-checksums": 100}
"""Where a rare fault is needed the search starts near a seed that has it."""


@pytest.mark.parametrize("portion", range(10))
def test_every_promise_holds_under_a_fixed_set_of_schedules(portion):
    verdicts = [run_one((seed, None)) for seed in SEEDS[portion::10]]

    broken = [verdict for verdict in verdicts if verdict.violation]
    assert not broken, f"stillframe simulate --seed {broken[0].seed}: {broken[0].violation}"
    assert any(verdict.recoveries for verdict in verdicts), "nothing was ever recovered"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_deliberate_mistake_is_caught(name):
    first = FIRST_SEED.get(name, 0)

    for seed in range(first, first + MUTANT_SEEDS_MAX):
        if run_one((seed, name)).violation:
            return
    pytest.fail(f"{name} survived: {MUTANTS[name].description}")


def test_a_seed_gives_the_same_run_again():
    assert run_one((7, None)) == run_one((7, None))


def test_a_mutant_leaves_nothing_behind():
    before = run_one((3, None))
    run_one((3, "skip-alignment"))

    assert run_one((3, None)) == before


def test_the_command_says_which_seed_failed_by_which_checker_and_how_to_play_it_again(capsys):
    code = main(["simulate", "--seed", "0", "--mutant", "skip-alignment"])

    said = capsys.readouterr().out
    assert code == 1
    assert "FAIL  seed 0: cut:" in said
    assert "stillframe simulate --seed 0 --mutant skip-alignment" in said


def test_the_command_passes_on_a_few_schedules(capsys):
    assert main(["simulate", "--seeds", "12"]) == 0
    assert "simulate: PASS  12 schedules" in capsys.readouterr().out


def test_a_mutant_nobody_knows_is_refused_with_the_names_of_those_there_are(capsys):
    assert main(["simulate", "--mutant", "no-such", "--seed", "1"]) == 1
    assert "there is no mutant 'no-such'; there are: skip-alignment" in capsys.readouterr().err
