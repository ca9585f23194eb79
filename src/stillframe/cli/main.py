"""The command `stillframe`: what can be asked, and how failures are told.

A command's own imports happen when it runs, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from stillframe import __version__
from stillframe.cli.control_arguments import add_control
from stillframe.cli.playground_arguments import add_playground
from stillframe.errors import StillframeError

_ABOUT = """\
Stateful stream jobs on PySpark that survive kill -9 with every record counted once.

Stillframe takes Flink-style checkpoints of a running job: a consistent snapshot of all its state
and of its position in the input, while records keep flowing. A job that dies restarts from it.
"""
_FIRST_STEPS = """\
first steps:
  stillframe demo           watch a job lose its workers and keep its counts
  stillframe playground     break a running job by hand, beside a board that knows the truth
  stillframe doctor         find out whether jobs can run here
  stillframe run JOB.py     run a job file; the same file runs under spark-submit
  stillframe history ROOT   show all jobs below a checkpointLocation over HTTP
  stillframe list           the jobs that run; status, savepoint, stop, rescale … ask one of them
  stillframe inspect PATH   look into the checkpoints a job has left
  stillframe diff A B       what two of them differ in
"""

INTERRUPTED = 130
"""What shells expect of a command that Ctrl-C has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """0: fine. 1: it failed, and a sentence on stderr says why. 2: nobody understood what to do."""
    given, job_arguments = _split(list(sys.argv[1:] if argv is None else argv))
    parser = _parser()
    arguments = parser.parse_args(given)
    if arguments.command is None:
        parser.print_help()
        return 2
    if job_arguments and not _runs_job_file(arguments):
        parser.error(f"{arguments.command} takes no arguments after --")
    arguments.job_arguments = job_arguments
    try:
        return _dispatch(arguments)
    except StillframeError as error:
        if arguments.debug:
            traceback.print_exc()
        else:
            print(f"stillframe: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"stillframe: {str(error) or 'interrupted'}", file=sys.stderr)
        return getattr(error, "exit_code", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output (head, less) has seen enough; say nothing while ending either.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115 - it stays open to the end
        return 1


def _dispatch(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "demo":
            from stillframe.cli.demo import demo

            return demo(arguments)
        case "playground":
            from stillframe.cli.playground import playground

            return playground(arguments)
        case "run":
            from stillframe.cli.run import run

            return run(arguments)
        case "doctor":
            from stillframe.cli.doctor import doctor

            return doctor(arguments)
        case "simulate":
            from stillframe.cli.simulate import simulate

            return simulate(arguments)
        case "bench":
            from stillframe.cli.bench import bench

            return bench(arguments)
        case "inspect":
            from stillframe.cli.inspection import inspect

            return inspect(arguments)
        case "diff":
            from stillframe.cli.differences import diff

            return diff(arguments)
        case "history":
            from stillframe.cli.history import history

            return history(arguments)
        case _:
            from stillframe.cli.control import control

            return control(arguments)


def _runs_job_file(arguments: argparse.Namespace) -> bool:
    return arguments.command == "run" or bool(getattr(arguments, "against", None))


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what comes after `--` and is the job's."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stillframe",
        description=_ABOUT,
        epilog=_FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stillframe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    adding = (
        _add_demo, _add_doctor, _add_run, _add_history, _add_inspect, _add_diff, _add_simulate,
        _add_bench,
    )  # fmt: skip
    for command in (
        *(add(commands) for add in adding),
        add_playground(commands, _count_or_zero, _seconds),
        *add_control(commands, _count, _seconds),
    ):
        command.add_argument("--json", action="store_true", help="JSON, for machines")
        command.add_argument(
            "--debug", action="store_true", help="show where an error comes from, in full"
        )
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_demo(commands: _Commands) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "demo",
        help="a page-view job on local Spark that kills its own slots and proves its counts",
        description="Run a page-view job on local Spark, kill some of its slots with SIGKILL, and"
        " compare every record it let through, every count and its last checkpoint with a recount"
        " by Spark SQL. Exit code 0: exactly once. 1: not.",
    )
    command.add_argument(
        "--records", type=_count, default=3_000_000, metavar="N", help="clicks (%(default)s)"
    )
    command.add_argument(
        "--kills", type=_count_or_zero, default=3, metavar="K", help="slots to kill (%(default)s)"
    )
    command.add_argument(
        "--parallelism", type=_count, default=2, metavar="P", help="slots (%(default)s)"
    )
    command.add_argument(
        "--seed",
        type=_count_or_zero,
        metavar="S",
        help="makes the same clicks, victims and moments again (another one each time)",
    )
    command.add_argument("--open", action="store_true", help="open its page in a browser")
    return command


def _add_doctor(commands: _Commands) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "doctor",
        help="can jobs run here?",
        description="Check whether jobs can run on this machine or Spark cluster, and say what to"
        " do where they cannot. Exit code 1: there is a problem.",
    )
    _add_master(command)
    command.add_argument(
        "--checkpoint-location",
        metavar="DIR",
        help="the directory, or the s3:// address, to check as a place for checkpoints"
        " (a temporary directory)",
    )
    return command


def _add_run(commands: _Commands) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "run",
        usage="stillframe run JOB.py [options] [-- ARGUMENT ...]",
        help="run a job file and show its progress",
        description="Run a job file, which is an ordinary PySpark script, and show the progress of"
        " the queries it starts (on stderr; with --json on stdout). The command ends when the"
        " script and all its queries have; Ctrl-C and SIGTERM end them as --on-signal says, and"
        " give exit code 130 or 143, or 1 if something wished for could not be done.",
    )
    command.add_argument("job", metavar="JOB.py", help="the script; its arguments come after --")
    command.add_argument(
        "--unchanged",
        action="store_true",
        help="the script is one for Structured Streaming: run the queries of df.writeStream",
    )
    _add_master(command)
    command.add_argument(
        "--parallelism", type=_count, metavar="N", help="slots, where the job file does not say"
    )
    command.add_argument(
        "--restore",
        type=_restore,
        default="latest",
        metavar="latest|NUMBER|PATH",
        help="the checkpoint to start from (%(default)s), or the directory of a savepoint or of"
        " another job's checkpoint; a job with checkpoints of its own needs --fresh for that",
    )
    command.add_argument(
        "--claim-mode",
        "--restore-mode",
        dest="restore_mode",
        choices=["no_claim", "claim"],
        help="whether the job owns that directory, and deletes it when it has a checkpoint of its"
        " own (no_claim)",
    )
    command.add_argument(
        "--fresh",
        action="store_true",
        help="start over: the job's checkpoints are deleted, what was committed stays",
    )
    command.add_argument(
        "--require",
        choices=["exactly-once", "at-least-once"],
        metavar="GUARANTEE",
        help="refuse to start a job that would give less than this: exactly-once or at-least-once",
    )
    command.add_argument(
        "--allow-non-restored-state",
        action="store_true",
        help="leave out the state of operators that the job no longer has",
    )
    command.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a job option where the job file does not say, such as checkpointInterval='5 seconds',"
        " or a Spark setting by its full name; may be repeated",
    )
    command.add_argument(
        "--quiet", action="store_true", help="say only what goes wrong, and show no progress"
    )
    command.add_argument(
        "--log-format",
        choices=["text", "json"],
        help="instead of progress, a line for each event on stderr, with job, attempt, checkpoint,"
        " task and slot; those of slots are in the logs of Spark's executors",
    )
    _add_signals(command)
    return command


def _add_signals(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--on-signal",
        choices=["stop", "savepoint", "cancel", "detach"],
        default="stop",
        help="what Ctrl-C and SIGTERM do: stop the job, which goes on when it is started again"
        " (stop, unless told otherwise); stop it with a savepoint, whose path is printed; cancel"
        " it; or end the command and Spark at once, as a crash would, and leave the job to its next"
        " start (detach). A second signal ends everything at once",
    )
    command.add_argument(
        "--savepoint-dir",
        metavar="DIR",
        help="where --on-signal savepoint puts a directory named after job and time"
        " (savepoints, in the checkpointLocation)",
    )
    command.add_argument(
        "--signal-timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="after a signal, end by force what has not ended by itself by then (%(default)g)",
    )


def _add_history(commands: _Commands) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "history",
        help="show all jobs below a checkpointLocation over HTTP, also those that nobody runs",
        description="Serve the HTTP API for all jobs below a checkpointLocation, on this machine,"
        " until Ctrl-C. Where a job's driver answers, it is asked; otherwise the files tell what"
        " they know.",
    )
    command.add_argument(
        "root", metavar="ROOT", help="the checkpointLocation of the jobs; a path, or s3://..."
    )
    command.add_argument(
        "--port", type=_port, default=0, metavar="PORT", help="the port (any free one)"
    )
    command.add_argument(
        "--forward",
        action="append",
        default=[],
        metavar="HOST",
        help="ask drivers of this host too, with the token of whoever asks; may be repeated (only"
        " those of this machine: where a driver is, a file on the store says, and who can write"
        " there could collect tokens)",
    )
    return command


def _add_inspect(commands: _Commands) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "inspect",
        help="what is in a checkpoint",
        description="Show what a checkpoint consists of, and verify every file of it. Exit code 1:"
        " something is damaged. With --against, say instead whether a job can begin with it,"
        " without starting the job. Exit code 1: it cannot.",
    )
    command.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint (chk-7-1), a job's directory or a location; a path, or s3://...",
    )
    command.add_argument(
        "--rows", type=_count, default=0, metavar="N", help="show so many rows of each state"
    )
    command.add_argument("--states", action="store_true", help="list the states, verifying nothing")
    command.add_argument(
        "--key",
        metavar="KEY",
        help="show the rows of this key, verifying nothing else; a JSON list for several columns",
    )
    _add_state(command)
    command.add_argument(
        "--against",
        metavar="JOB.py",
        help="a job file, run until its job would start: list all that does not fit",
    )
    command.add_argument(
        "--allow-non-restored-state",
        action="store_true",
        help="with --against: state of operators that the job no longer has is fine",
    )
    _add_master(command)
    return command


def _add_diff(commands: _Commands) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "diff",
        help="what two checkpoints differ in",
        description="Say which keys were added, changed or are gone from one checkpoint or"
        " savepoint to another, of the same job or of two. Exit code 1: they differ.",
    )
    for name, which in (("before", "A"), ("after", "B")):
        command.add_argument(
            name,
            metavar=which,
            help="a checkpoint (chk-7-1), a savepoint, or a job's directory for its newest one",
        )
    _add_state(command)
    command.add_argument(
        "--rows", type=_count, default=5, metavar="N", help="show so many keys of each kind (5)"
    )
    return command


def _add_state(command: argparse.ArgumentParser) -> None:
    command.add_argument("--operator", metavar="UID", help="only the states of this operator")
    command.add_argument("--state", metavar="NAME", help="only states of this name")
    command.add_argument("--settings-on-stdin", action="store_true", help=argparse.SUPPRESS)


def _add_simulate(commands: _Commands) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "simulate",
        help="prove the protocol: thousands of seeded schedules with faults, in virtual time",
        description="Run whole random jobs through the real protocol code on one thread each, in"
        " virtual time, with crashes, delays, failing storage, zombies and stalled drivers, all"
        " from one seed. Exit code 1: a promise was broken; the seed that broke it is told.",
    )
    command.add_argument(
        "--seeds", type=_count, default=500, metavar="N", help="how many schedules (%(default)s)"
    )
    command.add_argument(
        "--first", type=_count_or_zero, default=0, metavar="S", help="the first seed (%(default)s)"
    )
    command.add_argument("--seed", type=_count_or_zero, metavar="S", help="play this one again")
    command.add_argument("--mutant", metavar="NAME", help="with this deliberate mistake")
    command.add_argument(
        "--shrink", action="store_true", help="with --seed: find a smaller job that fails"
    )
    command.add_argument(
        "--limits",
        metavar="L",
        default="",
        help="with --seed: at most so much of something, such as slots=1,records=20,kills=0",
    )
    command.add_argument(
        "--mutants", action="store_true", help="check that every deliberate mistake is caught"
    )
    return command


def _add_bench(commands: _Commands) -> argparse.ArgumentParser:
    # Names and numbers only, so that --help is still answered at once.
    from stillframe.bench.catalogue import benchmarks
    from stillframe.bench.connectors import GROUPS

    command = commands.add_parser(
        "bench",
        help="Stillframe beside Flink, PyFlink, Spark and Bytewax, in one run on this machine",
        description="Run benchmarks with Stillframe and its peers in turns, each peer in an"
        " environment of its own that is installed at the first use, and write a table, plots and"
        " every single result. Exit code 1: a program failed.",
    )
    command.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(benchmarks())}; or a group: {', '.join(GROUPS)} (all)",
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="views, users, rows, latency at 10,000/s and Kafka only, shorter, one round",
    )
    command.add_argument(
        "--peers",
        default="flink,pyflink,spark,bytewax,client",
        metavar="P,…",
        help="with which peers (%(default)s), or none",
    )
    command.add_argument(
        "--rounds", type=_count, metavar="N", help="how often each program is run (3; quick: 1)"
    )
    command.add_argument(
        "--seconds", type=_count, metavar="S", help="how long each is measured (20; quick: 6)"
    )
    command.add_argument(
        "--output",
        default="bench-results",
        metavar="DIR",
        help="where results.json, results.md, plots and logs go (%(default)s)",
    )
    command.add_argument(
        "--continue",
        dest="goes_on",
        action="store_true",
        help="go on with the results in DIR: what was measured there is not measured again",
    )
    return command


def _add_master(command: argparse.ArgumentParser) -> None:
    command.add_argument("--master", metavar="M", help="Spark's master (local[cores+2])")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _port(text: str) -> int:
    number = _count_or_zero(text)
    if number > 65_535:
        raise argparse.ArgumentTypeError(f"{number} is no port: give one up to 65535")
    return number


def _count_or_zero(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds between 0 and 86400")
    return seconds


def _restore(text: str) -> str:
    is_number = text.isascii() and text.isdigit()
    # A single word may be mistyped: it is looked for now, and not when Spark has started.
    is_place = "/" in text or Path(text).is_dir()
    if text == "latest" or (int(text) >= 1 if is_number else is_place):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither 'latest' nor the number of a checkpoint nor the directory of a"
        " savepoint or checkpoint"
    )


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key.strip() or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key.strip(), value


if __name__ == "__main__":
    sys.exit(main())
