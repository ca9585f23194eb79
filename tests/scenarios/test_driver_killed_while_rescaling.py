"""A driver killed in the middle of a rescale, and started again by the same command.

The driver is a process of its own, served over HTTP as on Spark, and killed once: at the moment the
test asks for. Checkpoints are an hour apart, so the one it goes on from is that of the rescale.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stillframe.cli.main import main

WAIT_SECONDS_MAX = 120.0
TOKEN = "a-token-for-these-tests"

DRIVER = """
import os, signal, sys
from functools import partial
from pathlib import Path

conftest, home, moment, token = sys.argv[1:]
sys.path.insert(0, conftest)
from conftest import WAIT_SECONDS_MAX, PageViews
from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, SlotsRunning
from stillframe.rest.server import RestServer
from stillframe.testing.processes import ProcessDeployment


def reach(reached):
    killed = Path(home, "killed")
    if reached == moment and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Slots(ProcessDeployment):
    def launch(self, launch, on_ended):
        def note_ended(reason):
            reach(f"the slots of attempt {launch.attempt} have ended")
            on_ended(reason)

        slots = super().launch(launch, note_ended)
        reach(f"the slots of attempt {launch.attempt} are being started")
        return slots


def note(event):
    if isinstance(event, CheckpointCompleted):
        reach(f"checkpoint {event.checkpoint_id} is complete")
    if isinstance(event, AttemptStarted):
        reach(f"attempt {event.attempt} is in the log")


server = RestServer("127.0.0.1", 0, token)
views = PageViews(Path(home))
views.deployment = Slots()
plan = partial(views.plan, views.halves(views.gate("second-half")))
running = views.start(plan(2), plan, checkpointInterval="1 hour")
running.query.add_listener(note)
server.add(running.query)
restored_from = running.wait(SlotsRunning) and running.attempts()[0].restored_from
if restored_from is None:
    running.wait_for_records(2_000)
print("said:", restored_from, flush=True)
running.finish()
print("said:", running.query.summary.records_in, flush=True)
server.withdraw(WAIT_SECONDS_MAX)
server.close()
"""


class Driver:
    """One run of the same command."""

    def __init__(self, home: Path, moment: str) -> None:
        command = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), str(home), moment]
        self.process = subprocess.Popen(
            [*command, TOKEN], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def said(self) -> str:
        """Past what it logs: on a busy machine it also tells what it waits for."""
        assert self.process.stdout is not None
        told = iter(self.process.stdout.readline, "")
        return next((line.removeprefix("said: ").strip() for line in told if "said: " in line), "")

    def wait(self) -> int:
        return self.process.wait(WAIT_SECONDS_MAX)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def drive(page_views):
    drivers = []

    def begin(moment):
        drivers.append(Driver(page_views.home, moment))
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.end()


@pytest.mark.parametrize(
    "moment",
    [
        "checkpoint 1 is complete",
        "the slots of attempt 1 have ended",
        "attempt 2 is in the log",
        "the slots of attempt 2 are being started",
    ],
)
def test_the_same_command_goes_on_exactly_where_the_rescale_was(page_views, drive, moment, capsys):
    def ask(command, *more):
        code = main([command, "page-views", *more, "--checkpoints", page_views.location])
        return code, *capsys.readouterr()

    def status():
        code, out, err = ask("status", "--json")
        assert code == 0, err
        return json.loads(out)

    first = drive(moment)
    assert first.said() == "None", "it began anew"
    assert status()["parallelism"] == 2
    code, _, sentence = ask("rescale", "4", "--token", TOKEN)
    assert first.wait() == -signal.SIGKILL
    assert code == 1
    assert sentence.count("\n") == 1, sentence
    assert status()["state"] == "NO DRIVER"

    again = drive(moment)
    assert again.said() == "1", "the checkpoint with which the job came to rest"
    now = status()
    assert (now["state"], now["parallelism"]) == ("RUNNING", 2), "as the command says"
    page_views.gate("second-half").open()
    assert again.said() == "2000", "not one record was read twice"
    assert again.wait() == 0
    page_views.check_exactly_once(page_views.halves(page_views.gate("second-half")))
    assert status()["state"] == "FINISHED"
    assert os.listdir(page_views.home / "chk" / "page-views" / "lease") == []
