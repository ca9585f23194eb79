"""What was measured: every single run as it was, the machine it ran on, and how that is kept."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

RESULT_PREFIX = "RESULT "
_TAIL_BYTES = 1 << 20
_SAID_CHARACTERS_MAX = 400
_NOISY_LOAD_PER_CORE = 0.5
_SAMPLE_SECONDS = 0.3

Status = Literal["measured", "failed", "left out"]
JsonValue = Any


@dataclass(frozen=True, slots=True)
class Run:
    """One program, run once."""

    benchmark: str
    label: str
    engine: str
    round: int
    params: Mapping[str, JsonValue]
    began: str
    """Date and time, with zone."""
    load_before: float
    """How many cores others kept busy in the moment before; the run before it has ended."""
    load_average: float
    """The system's own, over the minute before, in which the run before it may have been."""
    wall_seconds: float
    """From its start to its end, all included."""
    status: Status
    reason: str = ""
    """Why there is no result."""
    result: Mapping[str, JsonValue] = field(default_factory=dict)

    def figure(self, metric: str) -> float | None:
        """`latency_ms.p99`: a figure of the result by its path; None where there is none."""
        found: JsonValue = self.result
        for name in metric.split("."):
            if not isinstance(found, Mapping) or name not in found:
                return None
            found = found[name]
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        return float(found) if is_number else None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran."""

    cores: int
    memory_bytes: int
    processor: str
    kernel: str
    python: str

    @property
    def noisy_load(self) -> float:
        """With more cores than this busy before a run, its figures are not to be trusted."""
        return _NOISY_LOAD_PER_CORE * self.cores


def this_machine() -> Machine:
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        processor=_processor(),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def load_average() -> float:
    return os.getloadavg()[0]


def busy_cores(seconds: float = _SAMPLE_SECONDS) -> float:
    """How many cores are busy right now, whoever it is; the load average where nobody counts."""
    try:
        before = _busy_ticks()
        time.sleep(seconds)
        return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds
    except (OSError, ValueError):
        return load_average()


def _busy_ticks() -> int:
    user, nice, system, idle, io_wait, irq, soft_irq = (
        int(ticks) for ticks in Path("/proc/stat").read_text().split()[1:8]
    )
    del idle, io_wait
    return user + nice + system + irq + soft_irq


@dataclass(slots=True)
class Results:
    """Everything one command has found, or several of which each went on with the one before."""

    commands: list[str]
    date: str
    """When the first of them began."""
    versions: dict[str, str]
    machine: Machine
    runs: list[Run] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Peers that are not to be had, and why."""

    def of(self, benchmark: str, label: str | None = None) -> list[Run]:
        return [
            run for run in self.runs if run.benchmark == benchmark and label in (None, run.label)
        ]

    def has(self, benchmark: str, label: str, round_number: int, params: JsonValue) -> bool:
        """Whether this trial was measured in this round, with these parameters."""
        return any(
            run.status == "measured" and run.round == round_number and run.params == params
            for run in self.of(benchmark, label)
        )

    def add(self, run: Run) -> None:
        """Keep this run, instead of what there was of the same trial and round."""
        same = (run.benchmark, run.label, run.round)
        self.runs = [each for each in self.runs if (each.benchmark, each.label, each.round) != same]
        self.runs.append(run)

    def to_json(self) -> dict[str, JsonValue]:
        return asdict(self)

    def write(self, path: Path) -> None:
        """All of it, or what was there before: a run of hours may be interrupted any time."""
        written = path.with_name(f".{path.name}.new")
        written.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        written.replace(path)


def results_from(document: Mapping[str, JsonValue]) -> Results:
    """What `to_json` made."""
    machine = Machine(**document["machine"])
    runs = [Run(**run) for run in document["runs"]]
    return Results(**{**document, "machine": machine, "runs": runs})


class NoResult(Exception):
    """A program said nothing that can be understood."""


def parse_result(output: Path) -> dict[str, JsonValue]:
    """The result in the last line of what a program printed that has one."""
    lines = [line for line in _tail_of(output) if line.startswith(RESULT_PREFIX)]
    if not lines:
        raise NoResult("it printed no line that begins with RESULT")
    try:
        result = json.loads(lines[-1].removeprefix(RESULT_PREFIX))
    except ValueError:
        raise NoResult(f"its result is not JSON: {lines[-1][:80]!r}") from None
    if not isinstance(result, dict):
        raise NoResult(f"its result is not an object: {lines[-1][:80]!r}")
    return result


def last_words(errors: Path) -> str:
    """The last line of what a program said of its failure."""
    lines = [line.strip() for line in _tail_of(errors) if line.strip()]
    return lines[-1][:_SAID_CHARACTERS_MAX] if lines else "it said nothing"


def _tail_of(path: Path) -> Sequence[str]:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
