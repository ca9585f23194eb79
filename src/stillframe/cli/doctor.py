"""`stillframe doctor`: can jobs run here? One line per check, and what to do where it fails."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stillframe.cli.lines import in_one_sentence
from stillframe.cli.run import default_master
from stillframe.errors import StillframeError
from stillframe.runtime.scratch import scratch_directory

if TYPE_CHECKING:
    from stillframe.storage.store import Store

Answer = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found."""

    check: str
    answer: Answer
    text: str

    def __str__(self) -> str:
        return f"{self.answer:<8} {self.check}: {self.text}"


class Warned(StillframeError):
    """A check's way to say: this works, but."""


def doctor(arguments: argparse.Namespace) -> int:
    worst = 0
    with scratch_directory() as logs:
        for finding in _findings(arguments, logs):
            _tell(finding, as_json=arguments.json)
            worst |= finding.answer == "problem"
    if not arguments.json:
        print("there are problems: see above" if worst else "jobs can run here")
    return int(worst)


def _tell(finding: Finding, *, as_json: bool) -> None:
    fields = {"check": finding.check, "answer": finding.answer, "text": finding.text}
    print(json.dumps(fields, ensure_ascii=False) if as_json else finding, flush=True)


def _findings(arguments: argparse.Namespace, logs: Path) -> Iterator[Finding]:
    yield examined("Python", _python)
    yield examined("pyarrow", _pyarrow)
    java = examined("Java", _java)
    yield java
    location = arguments.checkpoint_location or str(logs / "location")
    yield examined("storage", lambda: _storage(location))
    if java.answer == "problem":
        yield Finding("Spark", "problem", "not tried, because it needs Java")
        return
    master = arguments.master or default_master()
    shared = Path(location) if arguments.checkpoint_location and _is_local(location) else None
    yield from _spark_findings(master, shared, logs, is_verbose=arguments.debug)


def examined(check: str, examine: Callable[[], str]) -> Finding:
    """What `examine` answers is fine, `Warned` is a warning; whatever else it raises, a problem."""
    try:
        return Finding(check, "ok", examine())
    except Warned as error:
        return Finding(check, "warning", str(error))
    except Exception as error:
        return Finding(check, "problem", in_one_sentence(error))


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _pyarrow() -> str:
    import pyarrow

    if int(pyarrow.__version__.split(".")[0]) < 18:
        raise StillframeError(f"{pyarrow.__version__} is too old: install 18 or newer")
    return str(pyarrow.__version__)


def _java() -> str:
    from stillframe.spark.deployment.java import ensure_java

    return str(ensure_java())


def _is_local(location: str) -> bool:
    from stillframe.storage.store import is_local_address

    return is_local_address(location)


def _storage(location: str | Path) -> str:
    """Everything a checkpoint asks of its place: whole files, durable, created by one alone."""
    from stillframe.storage.store import open_store

    place = open_store(str(location))
    directory = Path(place.address) if _is_local(str(location)) else None
    is_new = directory is not None and not directory.exists()
    store = place.below(".doctor")
    with _tidied(place, directory if is_new else None):
        written = store.write("file", [b"still", b"frame"])
        store.read_verified("file", written.length_bytes, written.crc32)
        created = [store.create_if_absent("entry", b"") for _ in range(2)]
        if created != [True, False]:
            raise StillframeError(
                f"{location} lets a file be created twice ({created}): two drivers could not be"
                " told apart there, use another file system"
            )
    return f"{location} takes whole and durable files"


@contextmanager
def _tidied(place: Store, new: Path | None) -> Iterator[None]:
    """Leave it as it was. What went wrong before is the better story, and is told as it is."""
    try:
        yield
    except StillframeError:
        with suppress(StillframeError):
            _tidy(place, new)
        raise
    _tidy(place, new)


def _tidy(place: Store, new: Path | None) -> None:
    place.delete_directory(".doctor")
    if new is not None and new.is_dir() and not any(new.iterdir()):
        new.rmdir()


def _spark_findings(
    master: str, shared: Path | None, logs: Path, *, is_verbose: bool
) -> Iterator[Finding]:
    from stillframe.spark import health
    from stillframe.spark.deployment.environment import (
        keep_jvm_output,
        log_file,
        open_session,
        prepare_spark,
    )

    prepare_spark(master, {"spark.ui.enabled": "false"}, logs, is_verbose=is_verbose)
    if not is_verbose:
        keep_jvm_output(logs, pass_on=False)
    try:
        session = open_session("stillframe-doctor")
    except Exception as error:
        why = _said_by_java(log_file(logs)) or in_one_sentence(error)
        yield Finding("Spark", "problem", f"no session starts on {master}: {why}")
        return
    yield Finding("Spark", "ok", f"{session.version} on {session.sparkContext.master}")
    checks = {name: partial(examine, session) for name, examine in health.CHECKS.items()}
    if shared is not None:
        checks["shared storage"] = partial(health.reach_storage, session, str(shared))
    is_python_there = True
    for check, examine in checks.items():
        if not is_python_there and check in health.NEED_EXECUTORS:
            yield Finding(check, "problem", "not tried, because it needs a Python on executors")
            continue
        finding = _of_health(check, examine)
        if check == health.EXECUTORS:
            is_python_there = finding.answer != "problem"
        yield finding
    session.stop()


def _of_health(check: str, examine: Callable[[], str]) -> Finding:
    from stillframe.spark.health import Doubtful

    def ask() -> str:
        try:
            return examine()
        except Doubtful as doubt:
            raise Warned(str(doubt)) from doubt

    return examined(check, ask)


def _said_by_java(log: Path) -> str | None:
    """What Java said when it could not start."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return None
    errors = [line for line in lines if "Exception" in line or "Error" in line]
    if errors:
        return errors[0]
    return lines[-1] if lines else None
