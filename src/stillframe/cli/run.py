"""`stillframe run JOB.py`: a job file on Spark, with its progress shown."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from pathlib import Path

import stillframe
from stillframe.cli.jobs import run_job_file
from stillframe.cli.last_steps import end_launching_jvm
from stillframe.cli.lines import Lines, in_one_sentence
from stillframe.cli.signals import Ending
from stillframe.clock import SystemClock
from stillframe.config import SESSION_PREFIX, job_option_names, parse_count, refuse_unknown
from stillframe.coordinator.query import Query
from stillframe.errors import BuildError, JobFailed, StillframeError
from stillframe.logs import LogLines
from stillframe.runtime.scratch import Scratch


def run(arguments: argparse.Namespace) -> int:
    """0 if the script and all its queries have ended well, 1 if not; for signals see `signals`."""
    job = Path(arguments.job)
    if not job.is_file():
        raise BuildError(f"there is no job file {job}: give the path of a PySpark script")
    conf = session_settings(arguments)
    logs = Scratch(purpose="run")
    try:
        return _run(job, conf, logs, arguments)
    except JobFailed as error:
        raise JobFailed(f"{error} (Spark's log is {_kept(logs)})") from error
    finally:
        logs.remove()


def _kept(logs: Scratch) -> Path:
    from stillframe.spark.deployment.environment import log_file

    logs.keep()
    return log_file(logs.directory)


def session_settings(arguments: argparse.Namespace) -> dict[str, str]:
    """What is said on the command line, as settings of the session."""
    conf: dict[str, str] = {}
    for key, value in arguments.set:
        if not key.startswith("spark."):
            refuse_unknown([key], job_option_names(), "the job (--set)")
            key = SESSION_PREFIX + key
        conf[key] = value
    if arguments.parallelism is not None:
        conf[SESSION_PREFIX + "parallelism"] = str(arguments.parallelism)
    if arguments.restore != "latest":
        conf[SESSION_PREFIX + "restoreFrom"] = arguments.restore
    if arguments.restore_mode is not None:
        conf[SESSION_PREFIX + "restoreMode"] = arguments.restore_mode
    if arguments.fresh:
        conf[SESSION_PREFIX + "fresh"] = "true"
    if arguments.require is not None:
        conf[SESSION_PREFIX + "requireGuarantee"] = arguments.require
    if arguments.log_format is not None:
        conf[SESSION_PREFIX + "logFormat"] = arguments.log_format
    if arguments.allow_non_restored_state:
        conf[SESSION_PREFIX + "allowNonRestoredState"] = "true"
    return conf


def default_master(parallelism: int = 1) -> str:
    """Two more than the slots that may want to run, for the Spark jobs beside them."""
    return f"local[{max(parallelism, os.cpu_count() or 1) + 2}]"


def _run(job: Path, conf: dict[str, str], logs: Scratch, arguments: argparse.Namespace) -> int:
    from stillframe.cli.progress import Progress, form_for
    from stillframe.spark.deployment.environment import (
        end_spark,
        jvm_pid,
        keep_jvm_output,
        make_room_in_local_sessions,
        prepare_spark,
    )

    parallelism = parse_count("parallelism", conf.get(SESSION_PREFIX + "parallelism", "1"))
    master = arguments.master or default_master(parallelism)
    form = form_for(sys.stderr, as_json=arguments.json)
    is_log = arguments.log_format is not None
    progress = Progress(
        form, SystemClock(), is_quiet=arguments.quiet or (is_log and not arguments.json)
    )
    if is_log:
        _log_to_stderr(as_json=arguments.log_format == "json", is_quiet=arguments.quiet)
    follow = progress.follow if arguments.json or not is_log else _follow_nothing
    progress.waiting(f"starting Spark ({master})")
    prepare_spark(master, conf, logs.directory, is_verbose=arguments.debug)
    if not arguments.debug:
        keep_jvm_output(logs.directory, pass_on=True)
    ending = Ending(
        arguments.on_signal,
        arguments.signal_timeout,
        arguments.savepoint_dir,
        jvm_pid,
        tidy_up=logs.remove,
    )
    if arguments.unchanged:
        stillframe.everywhere()
        if arguments.master is None:
            make_room_in_local_sessions()
    try:
        run_job_file(job, arguments.job_arguments, follow, ending, logs_events=is_log)
        return 0
    except KeyboardInterrupt:  # ours, or PySpark's while no query has begun
        ending.await_done()
        end_spark()
        end_launching_jvm()
        if not _tell_ending(ending, Lines(as_json=arguments.json)):
            return 1
        raise
    except StillframeError:
        raise
    except SystemExit as ended:
        return _exit_code(ended)
    except Exception as error:
        tell_where(error, job, is_debugging=arguments.debug)
        if "JAVA_GATEWAY" in str(error):
            print(f"stillframe: what Java said is in {_kept(logs)}", file=sys.stderr)
        return 1
    finally:
        progress.close()


def _follow_nothing(query: Query) -> None:
    """The log tells it all."""


def _log_to_stderr(*, as_json: bool, is_quiet: bool) -> None:
    log, handler = logging.getLogger("stillframe"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLines(as_json=as_json))
    log.addHandler(handler)
    log.setLevel(logging.WARNING if is_quiet else logging.INFO)
    log.propagate = False


def _tell_ending(ending: Ending, lines: Lines) -> bool:
    """Whether everything wished for was done. Savepoints go to stdout, where scripts read them."""
    for place in ending.savepoints_taken:
        lines.say("savepoint", place, path=place)
    for sentence in ending.undone:
        print(f"stillframe: {sentence}", file=sys.stderr)
    return not ending.undone


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def tell_where(error: Exception, job: Path, *, is_debugging: bool) -> None:
    """An error of the job file itself: its own lines, without ours around and Java below them."""
    if is_debugging:
        traceback.print_exception(error)
        return
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(job)]
    where = f"{job}, line {own[-1].lineno}: " if own else f"{job}: "
    print(f"stillframe: {where}{in_one_sentence(error)} (--debug shows more)", file=sys.stderr)
