"""The settings of a job: options of the writer, or `spark.stillframe.<option>` for a whole session.

Meanings and defaults are Flink's where Flink has them. Two deviate on purpose: two checkpoints are
retained (one damaged file must not be the end), and a failed checkpoint never fails the job.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from stillframe.errors import BuildError, UnknownOption

_UNIT_SECONDS = {
    "ms": 0.001, "millisecond": 0.001, "milliseconds": 0.001,
    "s": 1.0, "second": 1.0, "seconds": 1.0,
    "min": 60.0, "m": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip


def parse_duration_seconds(option: str, text: str) -> float:
    """`'1 second'`, `'200 ms'`, `'10 min'`: a number and a unit."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    unit = match and _UNIT_SECONDS.get(match[2].lower())
    if not match or not unit:
        raise BuildError(
            f"option {option} is a duration such as '1 second', '200 ms' or '10 min', not {text!r}"
        )
    return float(match[1]) * unit


def _parse_time_span_seconds(option: str, text: str) -> float:
    """A duration of which something must be left: checkpoints that may take no time all fail."""
    seconds = parse_duration_seconds(option, text)
    if seconds == 0:
        raise BuildError(f"option {option} must be longer than nothing, not {text!r}")
    return seconds


def parse_count(option: str, text: str) -> int:
    """A whole number, at least 1."""
    if not re.fullmatch(r"\s*\d+\s*", text) or int(text) < 1:
        raise BuildError(f"option {option} is a whole number of at least 1, not {text!r}")
    return int(text)


def parse_count_or_zero(option: str, text: str) -> int:
    """A whole number, 0 included."""
    return 0 if text.strip() == "0" else parse_count(option, text)


def _text(option: str, text: str) -> str:
    if not text.strip():
        raise BuildError(f"option {option} is empty: give it a value or leave it out")
    return text


@dataclass(frozen=True, slots=True)
class JobConfig:
    """All settings of one job, parsed and checked."""

    checkpoint_location: str | None = None
    """Where checkpoints and the job log are kept; without it there are none."""
    checkpoint_interval_seconds: float | None = None
    """None: checkpointing is off."""
    checkpoint_timeout_seconds: float = 600.0
    checkpoint_min_pause_seconds: float = 0.0
    checkpoints_retained: int = 2
    parallelism: int | None = None
    """None: the session decides (local masters: the number of cores)."""
    max_parallelism: int = 128
    restart_attempts: int = 10
    """How many restarts in a row without a new completed checkpoint before the job gives up."""
    restart_delay_seconds: float = 1.0
    restore_from: int | None = None
    """A checkpoint's number, to begin with that one instead of the newest."""
    channel_buffer_bytes: int = 4 * 1024 * 1024
    """How many bytes may wait in one channel before its sender must pause."""


_OPTIONS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "checkpointLocation": ("checkpoint_location", _text),
    "checkpointInterval": ("checkpoint_interval_seconds", _parse_time_span_seconds),
    "checkpointTimeout": ("checkpoint_timeout_seconds", _parse_time_span_seconds),
    "checkpointMinPause": ("checkpoint_min_pause_seconds", parse_duration_seconds),
    "checkpointsRetained": ("checkpoints_retained", parse_count),
    "parallelism": ("parallelism", parse_count),
    "maxParallelism": ("max_parallelism", parse_count),
    "restartAttempts": ("restart_attempts", parse_count_or_zero),
    "restartDelay": ("restart_delay_seconds", parse_duration_seconds),
    "restoreFrom": ("restore_from", parse_count),
    "channelBufferBytes": ("channel_buffer_bytes", parse_count),
}
SESSION_PREFIX = "spark.stillframe."


def job_option_names() -> list[str]:
    return list(_OPTIONS)


def refuse_unknown(given: Iterable[str], known: Iterable[str], of: str) -> None:
    """Raise for the first option that is not known, naming the nearest that is."""
    spelled = {name.lower(): name for name in known}
    for name in given:
        if name.lower() in spelled:
            continue
        nearest = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.0)
        hint = f"; did you mean {spelled[nearest[0]]!r}?" if nearest else ""
        raise UnknownOption(f"{of} has no option {name!r}{hint}")


def job_config(options: Mapping[str, str], session: Mapping[str, str] | None = None) -> JobConfig:
    """The settings made of a writer's options and, below them, a session's `spark.stillframe.*`.

    Option names are matched without regard to case, as Spark's are. `options` holds job options
    only; the caller has taken the sink's own out.
    """
    from_session = {
        name.removeprefix(SESSION_PREFIX): value
        for name, value in (session or {}).items()
        if name.startswith(SESSION_PREFIX)
    }
    by_lower = {name.lower(): name for name in _OPTIONS}
    values: dict[str, Any] = {}
    for given, of in ((from_session, "the session (spark.stillframe.*)"), (options, "the job")):
        refuse_unknown(given, _OPTIONS, of)
        for name, text in given.items():
            option = by_lower[name.lower()]
            field_name, parse = _OPTIONS[option]
            values[field_name] = parse(option, str(text))
    assert set(values) <= {field.name for field in fields(JobConfig)}
    return _checked(JobConfig(**values))


def _checked(config: JobConfig) -> JobConfig:
    if config.checkpoint_interval_seconds is not None and config.checkpoint_location is None:
        raise BuildError(
            "checkpointInterval is set but checkpointLocation is not: say where checkpoints go"
        )
    if config.parallelism is not None and config.parallelism > config.max_parallelism:
        raise BuildError(
            f"parallelism {config.parallelism} is more than maxParallelism"
            f" {config.max_parallelism}: lower the one or, for a new job, raise the other"
        )
    return config
