"""`stillframe playground`: a job to break, a board that knows the truth, and a tour."""

from __future__ import annotations

import argparse
import signal
import threading
import webbrowser
from types import FrameType

from stillframe.cli.lines import Lines
from stillframe.playground.serving import Buttons
from stillframe.playground.steps import STEPS
from stillframe.playground.supervisor import Settings, Supervisor
from stillframe.playground.tour import Result, Step
from stillframe.rest.history_server import HistoryServer


def playground(arguments: argparse.Namespace) -> int:
    """0: as predicted, or left by Ctrl-C. 1: a step of the tour came out otherwise."""
    lines = Lines(as_json=arguments.json)
    settings = Settings(interval_seconds=arguments.checkpoint_interval)
    # A script's shell has what it starts in the background ignore Ctrl-C, however it is sent.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _as_interrupt)
    with Supervisor(settings, arguments.master) as play:
        lines.say("start", f"starting Spark ({play.master}) and the job", directory=str(play.root))
        if play.no_executor is not None:
            lines.say("executor", f"no executor can be killed: {play.no_executor}")
        play.start()
        lines.say("running", f"the job runs: {play.score and play.score.ours.rows:,} clicks shown")
        buttons = Buttons(play)
        server = HistoryServer(
            str(play.root / "checkpoints"),
            arguments.port,
            play.token,
            frozenset(),
            buttons.routes(),
        )
        try:
            if arguments.tour or arguments.steps:
                return _tour(buttons, arguments.steps, lines)
            _show(server, arguments.open, lines)
            threading.Event().wait()
        finally:
            server.close()
    return 0


def _tour(buttons: Buttons, numbers: list[int] | None, lines: Lines) -> int:
    wrong = 0
    buttons.play.following.on_long = lambda said: lines.say("waits", f"     {said}")
    for step, result in buttons.tour.run(numbers or [step.number for step in STEPS]):
        wrong += _tell(step, result, buttons, lines)
    ran = len(buttons.tour.results)
    verdict = "PASS" if wrong == 0 else "FAIL"
    lines.say(
        "verdict", f"tour: {verdict}  {ran - wrong} of {ran} steps came out as predicted",
        verdict=verdict, wrong=wrong,
    )  # fmt: skip
    return int(wrong > 0)


def _tell(step: Step, result: Result | None, buttons: Buttons, lines: Lines) -> bool:
    """Say what came of a step; whether it is wrong."""
    if result is None:
        lines.say(
            "skipped", f"{step.number:2d} {step.title}: off, {buttons.tour.skipped[step.number]}"
        )
        return False
    sign = "✓" if result.is_right else "✕"
    text = (
        f"{step.number:2d} {step.title} {sign}  {result.seconds:g} s\n"
        f"     predicted  {result.predicted}\n     observed   {result.observed}"
    )
    if result.by_hand:
        text += f"\n     by hand    {'; '.join(result.by_hand)}"
    lines.say(
        "step", text, number=step.number, title=step.title, predicted=result.predicted,
        observed=result.observed, right=result.is_right, seconds=result.seconds,
    )  # fmt: skip
    return not result.is_right


def _show(server: HistoryServer, opens: bool, lines: Lines) -> None:
    # The token is for the browser alone: in the fragment, which is sent to nobody.
    address = f"{server.url}/#/playground?token={server.token}"
    said = f"the page is {address} (Ctrl-C ends everything)"
    lines.say("page", said, url=server.url, token=server.token)
    if opens:
        webbrowser.open(address)


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt("terminated")
