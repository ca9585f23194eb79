"""`stillframe list`, `status`, `stop` and the others that ask the driver of a running job.

Each answers in a short table for people, or with `--json` in one JSON document. What takes longer
is waited for, within `--timeout`, unless it is `--detached`: then the number to ask about it with
is told, and the driver goes on alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from stillframe.cli.client import Answer, DriverClient, NoDriver, NotThere
from stillframe.cli.finding import FoundJob, Where, all_jobs, find_job, state_of
from stillframe.cli.tables import NOTHING, fields, moment, one_line, size, span, table
from stillframe.errors import BuildError, StillframeError
from stillframe.storage.paths import SAVEPOINT_METADATA
from stillframe.storage.store import is_local_address, open_store

TOKEN_VARIABLE = "STILLFRAME_TOKEN"
_LAST_MS = 253_402_300_799_999
"""The year 9999; a watermark behind it says that nothing more will come."""
_CHECKPOINT_COLUMNS = (
    "ID", "Status", "Acks", "Triggered", "Duration", "New Data", "All Data", "In Flight",
)  # fmt: skip
"""Short, so that a line fits a terminal of 100 columns; --json has Flink's names."""
_SUBTASK_COLUMNS = (
    "Subtask", "Acknowledged", "Duration", "New Data", "Sync", "Async", "Alignment", "In Flight",
    "Delay",
)  # fmt: skip


def control(arguments: argparse.Namespace) -> int:
    """0: done, or told. What cannot be is raised as a sentence."""
    where = Where(
        arguments.url,
        arguments.checkpoints,
        arguments.token,
        os.environ.get(TOKEN_VARIABLE),
        arguments.timeout,
    )
    if arguments.command == "list":
        _list(where, as_json=arguments.json)
    else:
        found = find_job(arguments.job, where)
        _COMMANDS[arguments.command](found, arguments)
    return 0


# --- what is ---


def _list(where: Where, *, as_json: bool) -> None:
    jobs = all_jobs(where)
    if as_json:
        _print_json({"jobs": jobs})
    elif jobs:
        rows = (
            (_text(job["jid"]), _text(job["name"]), job["state"], moment(job["start-time"]))
            for job in jobs
        )
        _print(table(("ID", "Name", "State", "Start Time"), rows))
    else:
        print("no job runs")


def _status(found: FoundJob, arguments: argparse.Namespace) -> None:
    status = found.status()
    if arguments.json:
        _print_json(status)
        return
    _print(fields(_status_fields(status, found)))
    for trouble in status["trouble"]:
        first, *more = str(trouble).splitlines()
        _print([f"Trouble: {one_line(first)}", *(f"    {line.rstrip()}" for line in more)])
    _print(f"    {one_line(line)}" for line in status["last-failure-details"])


def _status_fields(status: Answer, found: FoundJob) -> Iterator[tuple[str, str]]:
    yield "Name", _text(status["name"])
    yield "ID", _text(status["jid"])
    yield "State", _state_in_words(status)
    if status.get("diagnosis"):
        yield "Diagnosis", one_line(status["diagnosis"])
    yield "Start Time", moment(status["start-time"])
    yield "Attempts", _text(status["attempts"])
    yield "Restarts", _restarts_in_words(status)
    yield "Records", _records_in_words(status)
    yield "Watermark", _watermark_in_words(status["watermark"])
    for lag in status["lags"]:
        yield "Lag", _lag_in_words(lag, is_only=len(status["lags"]) == 1)
    yield "Guarantee", _text(status["guarantee"])
    yield "Parallelism", _text(status["parallelism"])
    yield "Last Checkpoint", _checkpoint_in_words(status["last-checkpoint"])
    yield "Checkpoint Location", _text(status["checkpoint-location"])
    yield "Slots", _slots_in_words(status["slot-pids"])
    yield "Driver", _driver_in_words(status["driver"], found)
    if status["failure"] is not None:
        yield "Failure", one_line(status["failure"])


def _state_in_words(status: Answer) -> str:
    """A job that does not run although it should says why."""
    state = _text(status["state"])
    is_waiting = state in ("RESTARTING", "INITIALIZING") and status["message"]
    return f"{state} ({one_line(status['message'])})" if is_waiting else state


def _restarts_in_words(status: Answer) -> str:
    restarts = _text(status["restarts"])
    if not status["last-failure"]:
        return restarts
    return f"{restarts} (last: {one_line(status['last-failure'])})"


def _records_in_words(status: Answer) -> str:
    if status["records-in"] is None:
        return NOTHING
    read = f"{status['records-in']:,} read, {round(status['records-in-per-second'] or 0):,}/s"
    malformed = status["records-malformed"]
    return f"{read}, {malformed:,} malformed" if malformed else read


def _watermark_in_words(watermark_ms: object) -> str:
    if not isinstance(watermark_ms, int):
        return NOTHING
    return "the end of the input" if watermark_ms > _LAST_MS else moment(watermark_ms)


def _lag_in_words(lag: Mapping[str, Any], *, is_only: bool) -> str:
    behind = f"{lag['records']:,} records"
    if lag["seconds"] is not None:
        behind += f", {lag['seconds']:,.1f} s"
    return behind if is_only else one_line(f"{behind} ({lag['source']})")


def _slots_in_words(pids: object) -> str:
    """Each with its process, which a person may want to look at, or to kill."""
    if not isinstance(pids, list) or not pids:
        return NOTHING
    return ", ".join(f"{slot} (process {pid})" for slot, pid in enumerate(pids))


def _checkpoint_in_words(checkpoint: Mapping[str, Any] | None) -> str:
    if not checkpoint:
        return NOTHING
    return (
        f"{checkpoint.get('id')}, {moment(checkpoint.get('trigger_timestamp'))},"
        f" {span(checkpoint.get('end_to_end_duration'))}, {size(checkpoint.get('state_size'))}"
    )


def _driver_in_words(driver: Mapping[str, Any] | None, found: FoundJob) -> str:
    if driver is None:
        return one_line(found.why_no_driver)
    whose = "" if driver["pid"] is None else f", process {driver['pid']} of {driver['host']}"
    return one_line(f"{driver['url']}{whose}")


def _open(found: FoundJob, arguments: argparse.Namespace) -> None:
    """The token is behind the #, which browsers send nobody."""
    driver = found.driver("be shown")
    address = f"{driver.url}/" + (f"#token={driver.token}" if driver.token else "")
    _tell(arguments, address, {"url": address})
    if not arguments.json and sys.stdout.isatty() and _has_browser():
        webbrowser.open(address)


def _has_browser() -> bool:
    """One with windows: another would take the terminal."""
    is_unix = sys.platform not in ("darwin", "win32")
    return not is_unix or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _checkpoints(found: FoundJob, arguments: argparse.Namespace) -> None:
    if arguments.number is not None:
        _one_checkpoint(found, arguments.number, as_json=arguments.json)
        return
    told = found.checkpoints()
    _mention_files(found)
    if arguments.json:
        _print_json(told)
        return
    history = told.get("history") or []
    if history:
        _print(table(_CHECKPOINT_COLUMNS, map(_checkpoint_row, history)))
    counts = told.get("counts") or {}
    print(
        ", ".join(f"{counts.get(name, 0)} {name}" for name in ("completed", "failed", "restored"))
        + f", {counts.get('in_progress', 0)} in progress"
    )


def _checkpoint_row(checkpoint: Answer) -> tuple[str, ...]:
    savepoint = " (savepoint)" if checkpoint.get("is_savepoint") else ""
    return (
        _text(checkpoint.get("id")),
        f"{_text(checkpoint.get('status'))}{savepoint}",
        f"{checkpoint.get('num_acknowledged_subtasks')}/{checkpoint.get('num_subtasks')}",
        moment(checkpoint.get("trigger_timestamp")),
        span(checkpoint.get("end_to_end_duration")),
        size(checkpoint.get("checkpointed_size")),
        size(checkpoint.get("state_size")),
        _in_flight(checkpoint.get("processed_data"), checkpoint.get("persisted_data")),
    )


def _in_flight(processed_bytes: object, persisted_bytes: object) -> str:
    """What was processed between the barriers, and what was written because they overtook it."""
    return f"{size(processed_bytes)} ({size(persisted_bytes)})"


def _one_checkpoint(found: FoundJob, number: int, *, as_json: bool) -> None:
    told = found.checkpoint(number)
    _mention_files(found)
    if as_json:
        _print_json(told)
        return
    _print(table(_CHECKPOINT_COLUMNS, [_checkpoint_row(told)]))
    for name in ("failure_message", "external_path"):
        if told.get(name):
            print(_text(told[name]))
    for task in told["subtasks"].values():
        print(f"\n{_text(task.get('name'))}")
        _print(table(_SUBTASK_COLUMNS, map(_subtask_row, task.get("subtasks") or [])))


def _subtask_row(subtask: Answer) -> tuple[str, ...]:
    checkpoint, alignment = subtask.get("checkpoint") or {}, subtask.get("alignment") or {}
    unaligned = " unaligned" if subtask.get("unaligned_checkpoint") else ""
    return (
        f"{_text(subtask.get('index'))}{unaligned}",
        moment(subtask.get("ack_timestamp")),
        span(subtask.get("end_to_end_duration")),
        size(subtask.get("checkpointed_size")),
        span(checkpoint.get("sync")),
        span(checkpoint.get("async")),
        span(alignment.get("duration")),
        _in_flight(alignment.get("processed"), alignment.get("persisted")),
        span(subtask.get("start_delay")),
    )


def _failures(found: FoundJob, arguments: argparse.Namespace) -> None:
    told = found.failures()
    _mention_files(found)
    if arguments.json:
        _print_json(told)
        return
    entries = (told.get("exceptionHistory") or {}).get("entries") or []
    if not entries:
        print("no failure is remembered")
        return
    columns = ("Time", "Attempt", "Kind", "Task", "Recovered From", "Cause")
    _print(table(columns, map(_failure_row, entries)))
    _print(_details_of(entries))


def _details_of(entries: list[Answer]) -> Iterator[str]:
    """Of errors in the user's code: where, at which record. One that came again is told once."""
    told: set[str] = set()
    for entry in entries:
        trace = entry.get("traceback")
        if not isinstance(trace, str) or trace in told:
            continue
        told.add(trace)
        of = f"{entry.get('function')}, operator {entry.get('operator') or NOTHING}"
        yield ""
        yield one_line(f"attempt {entry.get('attempt')}: {of}, record: {entry.get('record')}")
        yield from (one_line(f"    {line}") for line in trace.splitlines())


def _failure_row(entry: Answer) -> tuple[str, ...]:
    return (
        moment(entry.get("timestamp")),
        _text(entry.get("attempt")),
        _text(entry.get("exceptionName")),
        _text(entry.get("taskName")),
        _recovered_in_words(entry),
        _text(entry.get("stacktrace")),
    )


def _recovered_in_words(entry: Answer) -> str:
    origin = entry.get("recovered-from")
    if isinstance(origin, dict):
        kind = "savepoint" if origin.get("is_savepoint") else "checkpoint"
        return f"{kind} {origin.get('id')}"
    if entry.get("recovered-by-attempt") is not None:
        return "the beginning"
    return "given up" if entry.get("given-up") else NOTHING


# --- what is to be ---


def _trigger(found: FoundJob, arguments: argparse.Namespace) -> None:
    driver = found.driver("take a checkpoint")
    request = driver.post("jobs", found.key, "checkpoints")
    if _is_left_alone(request, arguments):
        return
    done = driver.await_operation("jobs", found.key, "checkpoints", _number(request))
    number = done.get("checkpointId")
    _tell(arguments, f"checkpoint {number} is complete", {"checkpoint-id": number})


def _savepoint(found: FoundJob, arguments: argparse.Namespace) -> None:
    driver = found.driver("take a savepoint")
    directory = _absolute(arguments.directory)
    request = driver.post(
        "jobs", found.key, "savepoints", body={"target-directory": directory, "cancel-job": False}
    )
    if _is_left_alone(request, arguments):
        return
    done = driver.await_operation("jobs", found.key, "savepoints", _number(request))
    _tell(arguments, str(done.get("location")), {"location": done.get("location")})


def _stop(found: FoundJob, arguments: argparse.Namespace) -> None:
    if arguments.drain and arguments.savepoint is None:
        raise BuildError("--drain wants a savepoint: say where it goes with --savepoint DIR")
    driver = found.driver("be stopped")
    directory = None if arguments.savepoint is None else _absolute(arguments.savepoint)
    body: dict[str, Any] = {"drain": arguments.drain}
    request = driver.post(
        "jobs",
        found.key,
        "stop",
        body=body if directory is None else {**body, "targetDirectory": directory},
    )
    if _is_left_alone(request, arguments):
        return
    location = _await_stop(driver, found, _number(request), directory)
    text = f"job {found.name!r} has stopped" if location is None else location
    _tell(arguments, text, {"location": location, "state": "STOPPED"})


def _await_stop(
    driver: DriverClient, found: FoundJob, number: str, directory: str | None
) -> str | None:
    """The savepoint's place. The driver may end with its job, before anybody has asked it."""
    try:
        done = driver.await_operation("jobs", found.key, "savepoints", number)
        location = done.get("location")
        return None if location is None else str(location)
    except NoDriver as error:
        if directory is not None and not _is_savepoint(directory):
            raise StillframeError(
                f"{error} any more, and there is no savepoint in {directory}: look at what its"
                " driver has said"
            ) from error
        return directory


def _cancel(found: FoundJob, arguments: argparse.Namespace) -> None:
    driver = found.driver("be cancelled")
    driver.patch("jobs", found.key, mode="cancel")
    state = driver.await_answer(lambda: _ended_state(driver, found.key), "the job has not ended")
    if state not in ("CANCELED", None):
        raise StillframeError(f"job {found.name!r} was not cancelled: it is {state} already")
    _tell(arguments, f"job {found.name!r} is cancelled", {"state": "CANCELED"})


def _ended_state(driver: DriverClient, key: str) -> tuple[str | None] | None:
    """Nothing yet, or the state it has ended in; unknown if its driver has ended with it."""
    try:
        details = driver.get("jobs", key)
    except (NoDriver, NotThere):
        return (None,)
    is_over = (details.get("end-time") or -1) >= 0
    return (state_of(details),) if is_over else None


def _rescale(found: FoundJob, arguments: argparse.Namespace) -> None:
    driver = found.driver("be rescaled")
    request = driver.patch("jobs", found.key, "rescaling", parallelism=str(arguments.parallelism))
    if _is_left_alone(request, arguments):
        return
    done = driver.await_operation("jobs", found.key, "rescaling", _number(request))
    text = (
        f"job {found.name!r} runs with parallelism {done.get('parallelism')}, before"
        f" {done.get('parallelism-before')}; it was down for {span(done.get('downtime-ms'))}"
    )
    _tell(arguments, text, done)


_COMMANDS: Mapping[str, Callable[[FoundJob, argparse.Namespace], None]] = {
    "status": _status,
    "open": _open,
    "checkpoints": _checkpoints,
    "failures": _failures,
    "trigger": _trigger,
    "savepoint": _savepoint,
    "stop": _stop,
    "cancel": _cancel,
    "rescale": _rescale,
}
NAMES = ("list", *_COMMANDS)


# --- words ---


def _is_left_alone(request: Answer, arguments: argparse.Namespace) -> bool:
    """Whether nobody waits for it; its number is told then."""
    if arguments.detached:
        _tell(arguments, _number(request), {"request-id": _number(request)})
    return bool(arguments.detached)


def _number(request: Answer) -> str:
    number = request.get("request-id")
    if not isinstance(number, str):
        raise StillframeError(f"the driver did not say under which number it does it: {request!r}")
    return number


def _absolute(directory: str) -> str:
    """A path means what it means here, not where the driver was started."""
    if not directory:
        raise BuildError("the savepoint's directory is empty: say where it goes")
    is_plain = is_local_address(directory) and ":/" not in directory
    return os.path.abspath(directory) if is_plain else directory


def _is_savepoint(directory: str) -> bool:
    try:
        return SAVEPOINT_METADATA in open_store(directory).list("")
    except StillframeError:
        return False


def _mention_files(found: FoundJob) -> None:
    if found.client is None:
        sentence = f"{one_line(found.why_no_driver)}; this is what its files say"
        print(f"stillframe: job {found.name!r}: {sentence}", file=sys.stderr)


def _tell(arguments: argparse.Namespace, text: str, document: Answer) -> None:
    if arguments.json:
        _print_json(document)
    else:
        print(text)


def _print_json(document: Answer) -> None:
    print(json.dumps(document, ensure_ascii=False, indent=1))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _text(value: object) -> str:
    return NOTHING if value is None or value == "" else one_line(value)
