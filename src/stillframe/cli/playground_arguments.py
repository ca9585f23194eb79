"""What `stillframe playground` can be asked."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

_STEPS_MAX = 12


def add_playground(
    commands: Any, count_or_zero: Callable[[str], int], seconds: Callable[[str], float]
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        "playground",
        help="a job to break, a board that knows the truth, and a tour of twelve steps",
        description="Start a job on local Spark that runs until Ctrl-C, with a page where its"
        " slots, executors and driver can be killed and its checkpoints damaged, beside a board"
        " that compares its output with the truth and predicts what each kill will do. With --tour"
        " all twelve steps are run and told here. Exit code 1: one did not come out as predicted.",
    )
    command.add_argument("--tour", action="store_true", help="run all steps, without a browser")
    command.add_argument(
        "--steps", type=_steps, metavar="N,N", help="run these steps of the tour only"
    )
    command.add_argument("--open", action="store_true", help="open the page in a browser")
    command.add_argument(
        "--port", type=count_or_zero, default=0, metavar="P", help="of the page (any free one)"
    )
    command.add_argument(
        "--checkpoint-interval",
        type=seconds,
        default=5.0,
        metavar="S",
        help="seconds between checkpoints (%(default)s)",
    )
    command.add_argument(
        "--master",
        help="local-cluster[2,2,1024] where there is memory for it, else local[4]",
    )
    return command


def _steps(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= _STEPS_MAX for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of steps from 1 to {_STEPS_MAX}, such as 1,2,3"
        )
    return [int(part) for part in parts]
