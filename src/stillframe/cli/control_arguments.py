"""What the commands that ask a running job's driver can be given."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import TypeAlias

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_NAMES = "JOB is a job's name or its id."


def add_control(
    commands: _Commands, count: Callable[[str], int], seconds: Callable[[str], float]
) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all of them."""
    yield _add(
        commands,
        "list",
        "the jobs that run",
        "Show all jobs that run, or, with --checkpoints, all that ever ran there.",
        seconds,
    )
    yield _with_job(commands, "status", "how a job is", "Show a job in a few lines.", seconds)
    yield _with_job(
        commands,
        "open",
        "the address of a job's page",
        "Print the address of the page of a job's driver, with the token that lets you in, and open"
        " it in a browser if there is one.",
        seconds,
    )
    checkpoints = _with_job(
        commands,
        "checkpoints",
        "the checkpoints of a job, or one of them",
        "Show the last checkpoints of a job, also those of earlier drivers; with a number, the"
        " figures of every subtask.",
        seconds,
    )
    checkpoints.add_argument(
        "number", type=count, nargs="?", metavar="ID", help="one checkpoint, subtask by subtask"
    )
    yield checkpoints
    yield _with_job(
        commands,
        "failures",
        "why a job had to start again",
        "Show the last failures of a job, also those of earlier drivers, newest first, and what it"
        " recovered from.",
        seconds,
    )
    yield from _changing(commands, count, seconds)


def _changing(
    commands: _Commands, count: Callable[[str], int], seconds: Callable[[str], float]
) -> Iterator[argparse.ArgumentParser]:
    yield _detachable(
        _with_job(
            commands,
            "trigger",
            "take a checkpoint now",
            "Take a checkpoint of a running job now.",
            seconds,
        )
    )
    savepoint = _with_job(
        commands,
        "savepoint",
        "take a savepoint of a job, which runs on",
        "Write everything a job knows into a directory of its own, while the job runs on; its path"
        " is printed.",
        seconds,
    )
    savepoint.add_argument("directory", metavar="DIR", help="a directory that is not there yet")
    yield _detachable(savepoint)
    stop = _with_job(
        commands,
        "stop",
        "stop a job, with a savepoint or without",
        "Stop a job: started again, it goes on from its last checkpoint. With --savepoint,"
        " everything it knows goes there first, and the path is printed.",
        seconds,
    )
    stop.add_argument(
        "--savepoint", metavar="DIR", help="a directory that is not there yet, for a savepoint"
    )
    stop.add_argument(
        "--drain",
        action="store_true",
        help="end the sources first, so that windows and timers fire; for a job that will not go"
        " on",
    )
    yield _detachable(stop)
    yield _with_job(
        commands,
        "cancel",
        "end a job for good",
        "End a job now. Its checkpoints are kept or deleted, as its option retainOnCancel says.",
        seconds,
    )
    rescale = _with_job(
        commands,
        "rescale",
        "let a job go on with another parallelism",
        "Let a running job go on with N slots from where it is, and tell how long it was down.",
        seconds,
    )
    rescale.add_argument("parallelism", type=count, metavar="N", help="so many slots")
    yield _detachable(rescale)


def _with_job(
    commands: _Commands, name: str, summary: str, about: str, seconds: Callable[[str], float]
) -> argparse.ArgumentParser:
    command = _add(commands, name, summary, f"{about} {_NAMES}", seconds)
    command.add_argument("job", metavar="JOB", help="its name, or its id")
    return command


def _add(
    commands: _Commands, name: str, summary: str, about: str, seconds: Callable[[str], float]
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=about)
    places = command.add_mutually_exclusive_group()
    places.add_argument(
        "--checkpoints",
        metavar="ROOT",
        help="look in this checkpointLocation, not in the registry of this user; also for jobs that"
        " do not run",
    )
    places.add_argument("--url", metavar="URL", help="ask the driver at this address")
    command.add_argument(
        "--token",
        metavar="TOKEN",
        help="for what changes something (the one in the registry, else STILLFRAME_TOKEN)",
    )
    command.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="wait no longer than this (%(default)g)",
    )
    return command


def _detachable(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command.add_argument(
        "--detached", action="store_true", help="do not wait: print the number of the request"
    )
    return command
