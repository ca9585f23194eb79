"""The settings of a job: options of the writer, or `spark.stillframe.<option>` for a whole session.

Meanings and defaults are Flink's where Flink has them. Three deviate on purpose: two checkpoints
are retained (one damaged file must not be the end), ten failed checkpoints in a row do not fail the
attempt (in Flink one does), and a completed one starts the count of restartAttempts anew.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from stillframe.errors import BuildError, UnknownOption
from stillframe.json_values import JsonObject
from stillframe.secrets import Conf, Secret, is_secret_name

RestartStrategyName = Literal["none", "fixed-delay", "failure-rate", "exponential-delay"]
LogFormat = Literal["text", "json"]
CheckpointMode = Literal["exactly-once", "at-least-once", "at-most-once", "stop-the-world"]
StateBackend = Literal["memory", "fs", "rocksdb"]
RequiredGuarantee = Literal["exactly-once", "at-least-once"]
RestoreMode = Literal["no_claim", "claim"]
LOOPBACK = "127.0.0.1"

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


def _parse_duration_or_zero(option: str, text: str) -> float:
    """0 needs no unit."""
    return 0.0 if text.strip() == "0" else parse_duration_seconds(option, text)


def _parse_duration_or_infinite(option: str, text: str) -> float:
    if text.strip().lower() == "infinite":
        return math.inf
    try:
        return parse_duration_seconds(option, text)
    except BuildError as error:
        raise BuildError(
            f"option {option} is a duration such as '1 hour' or '365 days', or 'infinite', not"
            f" {text!r}"
        ) from error


def parse_count(option: str, text: str) -> int:
    """A whole number, at least 1."""
    if not re.fullmatch(r"\s*\d+\s*", text) or int(text) < 1:
        raise BuildError(f"option {option} is a whole number of at least 1, not {text!r}")
    return int(text)


def parse_count_or_zero(option: str, text: str) -> int:
    """A whole number, 0 included."""
    return 0 if text.strip() == "0" else parse_count(option, text)


_UNIT_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(option: str, text: str) -> int:
    """A number and a unit as Spark has them: `'512k'`, `'5m'`, `'1g'`; without one, bytes."""
    match = re.fullmatch(r"\s*(\d+)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if not match or int(match[1]) < 1:
        raise BuildError(f"option {option} is a size such as '512k', '5m' or '1g', not {text!r}")
    return int(match[1]) * _UNIT_BYTES[match[2]]


def _text(option: str, text: str) -> str:
    if not text.strip():
        raise BuildError(f"option {option} is empty: give it a value or leave it out")
    return text


def _parse_count_or_infinite(option: str, text: str, least: int = 1) -> float:
    """A whole number of at least `least`, or no limit at all."""
    if text.strip().lower() == "infinite":
        return math.inf
    if not re.fullmatch(r"\s*\d+\s*", text) or int(text) < least:
        raise BuildError(
            f"option {option} is a whole number of at least {least} or 'infinite', not {text!r}"
        )
    return int(text)


def _parse_tolerable(option: str, text: str) -> float:
    return _parse_count_or_infinite(option, text, least=0)


def _number(text: str) -> float:
    """Plain decimals; anything else is not a number that any range contains."""
    return float(text) if re.fullmatch(r"\s*\d+(\.\d+)?\s*", text) else math.nan


def _parse_multiplier(option: str, text: str) -> float:
    if not _number(text) >= 1:
        raise BuildError(f"option {option} is a number of at least 1, not {text!r}")
    return _number(text)


def _parse_share(option: str, text: str) -> float:
    if not _number(text) <= 1:
        raise BuildError(f"option {option} is a number from 0 to 1, not {text!r}")
    return _number(text)


def _parse_port(option: str, text: str) -> int | Literal["off"]:
    if text.strip().lower() == "off":
        return "off"
    if not re.fullmatch(r"\s*[0-9]{1,5}\s*", text, re.ASCII) or int(text) > 65_535:
        raise BuildError(
            f"option {option} is a port up to 65535, 0 for any free one, or off, not {text!r}"
        )
    return int(text)


def _parse_interval(option: str, text: str) -> float | Literal["off"]:
    return "off" if text.strip().lower() == "off" else _parse_time_span_seconds(option, text)


def parse_flag(option: str, text: str) -> bool:
    flags = {"true": True, "false": False}
    if text.strip().lower() not in flags:
        raise BuildError(f"option {option} is true or false, not {text!r}")
    return flags[text.strip().lower()]


Name = TypeVar("Name", bound=str)


def nearest_of(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant; None if all are too far from what was given."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return found[0] if found else None


def _one_of(option: str, text: str, names: tuple[Name, ...]) -> Name:
    given = text.strip().lower()
    for name in names:
        if given == name:
            return name
    nearest = nearest_of(given, names)
    hint = f"; did you mean {nearest!r}?" if nearest is not None else ""
    raise BuildError(f"option {option} is one of {', '.join(names)}, not {text!r}{hint}")


def _parse_missing(option: str, text: str) -> frozenset[str]:
    """Files and the rows of each, without spaces: nobody accepts a loss without its size."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\S+:[0-9]+", part, re.ASCII) for part in parts):
        raise BuildError(
            f"option {option} names each file with its rows as FILE:ROWS, separated by commas, as"
            f" the message that asks for it does, not {text!r}"
        )
    return frozenset(parts)


def _parse_restore(option: str, text: str) -> int | str | None:
    """A number is a checkpoint's, all else an address; None: the newest, as without the option."""
    if text.strip().lower() == "latest":
        return None
    is_number = re.fullmatch(r"\s*[-+]?[0-9.]+\s*", text, re.ASCII)
    return parse_count(option, text) if is_number else _text(option, text)


def _parse_prepared(option: str, text: str) -> tuple[str, ...]:
    """What prepared output is called in full: it must not be thrown away by a slip."""
    keys = tuple(part.strip() for part in text.split(","))
    for key in keys:
        if not re.fullmatch(r".+:[0-9]+:([0-9]+|unknown)", key, re.ASCII):
            raise BuildError(
                f"option {option} names sink, epoch and number of rows, such as 'write-1a2b:7:120',"
                f" not {key!r}"
            )
    return keys


def _parse_defaults(option: str, text: str) -> JsonObject:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise BuildError(
            f"option {option} is a JSON object of columns and what they begin with, such as"
            f""" '{{"country": "unknown", "sum(amount)": null}}', not {text!r}"""
        )
    return given


def _parse_restart_strategy(option: str, text: str) -> RestartStrategyName:
    """Any case, and `off` for `none`, as Flink has it."""
    given = "none" if text.strip().lower() == "off" else text
    names: tuple[RestartStrategyName, ...] = get_args(RestartStrategyName)
    return _one_of(option, given, names)


def _parse_state_backend(option: str, text: str) -> StateBackend:
    """Flink's name for the heap is understood too."""
    given = "fs" if text.strip().lower() == "hashmap" else text
    names: tuple[StateBackend, ...] = get_args(StateBackend)
    return _one_of(option, given, names)


def _parse_restore_mode(option: str, text: str) -> RestoreMode:
    """Any case, and with `-` for `_`."""
    names: tuple[RestoreMode, ...] = get_args(RestoreMode)
    return _one_of(option, text.replace("-", "_"), names)


def _parse_checkpoint_mode(option: str, text: str) -> CheckpointMode:
    """Any case, and with `_` as Flink writes it."""
    names: tuple[CheckpointMode, ...] = get_args(CheckpointMode)
    return _one_of(option, text.replace("_", "-"), names)


def _parse_log_format(option: str, text: str) -> LogFormat:
    names: tuple[LogFormat, ...] = get_args(LogFormat)
    return _one_of(option, text, names)


def _parse_guarantee(option: str, text: str) -> RequiredGuarantee:
    """Any case, and with `_` as for the checkpoint mode."""
    names: tuple[RequiredGuarantee, ...] = get_args(RequiredGuarantee)
    return _one_of(option, text.replace("_", "-"), names)


@dataclass(frozen=True, slots=True)
class StateSettings:
    """Where a job's slots keep their state, and where its snapshots go."""

    backend: StateBackend = "fs"
    """On the heap with snapshots in the acknowledgement (memory) or in files (fs), or on disk."""
    memory_bytes_max: int = 5 << 20
    """Of the backend memory: how long the snapshot of one state of one subtask may be."""
    is_incremental: bool = True
    """Of the backend rocksdb: whether a checkpoint stores only the files that are new."""
    rocksdb_bytes_max: int = 256 << 20
    """Of the backend rocksdb: how much memory its buffers and caches may take in each slot."""
    directory: str | None = None
    """Of the backend rocksdb: where working files go; None: Spark's local directories."""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """All settings of one job, parsed and checked."""

    checkpoint_location: str | None = None
    """Where checkpoints and the job log are kept; without it there are none."""
    checkpoint_interval_seconds: float | None = None
    """None: checkpointing is off."""
    checkpoint_timeout_seconds: float = 600.0
    checkpoint_min_pause_seconds: float = 0.0
    checkpoint_mode: CheckpointMode = "exactly-once"
    """At-least-once holds no channel back: after a recovery some records count twice. At-most-once
    emits only what no restart can read again. Stop-the-world is exactly-once the naive way: the
    sources pause, the job drains, the state is copied, and only then does it go on."""
    unaligned_checkpoints: bool = False
    """Whether barriers overtake the records in their way, which are then in the checkpoint."""
    aligned_checkpoint_timeout_seconds: float = 0.0
    """How long a task waits for barriers before an unaligned checkpoint overtakes."""
    max_concurrent_checkpoints: int = 1
    """How many may be in flight, from trigger to commit; with a min pause never more than one."""
    tolerable_failed_checkpoints: float = 10
    """How many checkpoints in a row may fail before the attempt counts as failed."""
    checkpoints_retained: int = 2
    history_checkpoints: int = 1_000
    """How many checkpoints the job remembers, failed ones included."""
    metrics_interval_seconds: float | Literal["off"] = 1.0
    """How often a slot tells what it has measured."""
    lease_timeout_seconds: float = 15.0
    """How long a driver that does not renew its lease is waited for; 0: it is not asked at all."""
    heartbeat_timeout_seconds: float = 50.0
    """After how long without a word from it a slot, or for a slot its driver, counts as gone."""
    stuck_timeout_seconds: float = 300.0
    """After how long in one call of the user's code the attempt is ended; 0: never."""
    parallelism: int | None = None
    """None: the session decides (local masters: the number of cores)."""
    max_parallelism: int = 128
    restart_strategy: RestartStrategyName | None = None
    """None: by the checkpoints, see `restart_strategy_in_force`."""
    restart_attempts: int = 1
    """How many restarts in a row without a new completed checkpoint before the job gives up."""
    restart_delay_seconds: float = 1.0
    restart_max_failures_per_interval: int = 1
    restart_failure_interval_seconds: float = 60.0
    restart_initial_backoff_seconds: float = 1.0
    restart_max_backoff_seconds: float = 60.0
    restart_backoff_multiplier: float = 1.5
    restart_reset_backoff_threshold_seconds: float = 3600.0
    """How long after a restart without a failure until delays begin with the first again."""
    restart_jitter_factor: float = 0.1
    restart_attempts_before_reset_backoff: float = math.inf
    restart_same_crash_max: float = 20
    """How many restarts because the process of the same slot died without saying why, with no new
    completed checkpoint in between, before the job gives up."""
    restart_same_error_max: float = 10
    """The same for an error raised at the same place: ten restarts take about two minutes."""
    restore_from: int | str | None = None
    """A checkpoint's number, to begin with that one instead of the newest; or the address of a
    savepoint or of another job's checkpoint, to begin with where there is none yet."""
    restore_mode: RestoreMode = "no_claim"
    """Whether a snapshot from elsewhere is deleted when the job has a checkpoint of its own."""
    fresh: bool = False
    """Whether the job starts over, whatever it has: its checkpoints are swept."""
    retain_on_cancel: bool = False
    """Whether a job that is cancelled keeps its checkpoints."""
    allow_non_restored_state: bool = False
    """Whether state of operators that the job does not have is left out; otherwise refused."""
    accept_missing_output: frozenset[str] = frozenset()
    """Published files that are gone, and that the job goes on without: `file:rows`, by commas."""
    state_defaults: JsonObject = field(default_factory=dict)
    """What columns of a state begin with that the snapshot does not have, by the name of the column
    or of the aggregate; null: with nothing."""
    discard_prepared: tuple[str, ...] | None = None
    """Prepared output that nobody wants, each by sink, epoch and number of rows."""
    required_guarantee: RequiredGuarantee | None = None
    """The job does not start if it would give less than this."""
    watermark_idle_timeout_seconds: float | None = None
    """After how long without a record event time no longer waits for a source; None: never."""
    watermark_ahead_seconds_max: float = 365 * 86_400.0
    """How far ahead of the wall clock a record may pull event time."""
    channel_buffer_bytes: int = 4 * 1024 * 1024
    """How many bytes may wait in one channel before its sender must pause."""
    state_backend: StateBackend = "fs"
    memory_state_bytes_max: int = 5 << 20
    incremental_checkpoints: bool = True
    rocksdb_memory_bytes: int = 256 << 20
    state_directory: str | None = None
    evaluator_memory_bytes: int = 512 << 20
    """The heap of the JVM beside each slot, of a job with expressions that only Spark evaluates."""
    rest_port: int | Literal["off"] = 0
    """Where the driver serves its HTTP API; 0: on any free port."""
    rest_bind_address: str = LOOPBACK
    refresh_interval_seconds: float | None = None
    """How often tables that streams are joined with are read again; None: only at the start."""
    log_format: LogFormat = "text"
    """Of the lines that slots write into the logs of their executors."""
    available_now: bool = False
    """Whether the job stops when it has read what was there at its start; a trigger says so."""
    storage_settings: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Hadoop's `fs.s3a.*` of options and session, keys and secrets among them: never shown."""

    @property
    def state(self) -> StateSettings:
        return StateSettings(
            self.state_backend,
            self.memory_state_bytes_max,
            self.incremental_checkpoints,
            self.rocksdb_memory_bytes,
            self.state_directory,
        )

    @property
    def alignment_timeout_ms(self) -> int | None:
        """How long barriers wait for each other before they overtake; None: for ever."""
        if not self.unaligned_checkpoints:
            return None
        return round(self.aligned_checkpoint_timeout_seconds * 1000)

    @property
    def restart_strategy_in_force(self) -> RestartStrategyName:
        """As in Flink: without checkpoints a restart would begin from nothing, so there is none."""
        if self.restart_strategy is not None:
            return self.restart_strategy
        return "none" if self.checkpoint_interval_seconds is None else "exponential-delay"


_OPTIONS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "checkpointLocation": ("checkpoint_location", _text),
    "checkpointInterval": ("checkpoint_interval_seconds", _parse_time_span_seconds),
    "checkpointTimeout": ("checkpoint_timeout_seconds", _parse_time_span_seconds),
    "checkpointMinPause": ("checkpoint_min_pause_seconds", parse_duration_seconds),
    "checkpointMode": ("checkpoint_mode", _parse_checkpoint_mode),
    "unalignedCheckpoints": ("unaligned_checkpoints", parse_flag),
    "alignedCheckpointTimeout": ("aligned_checkpoint_timeout_seconds", parse_duration_seconds),
    "maxConcurrentCheckpoints": ("max_concurrent_checkpoints", parse_count),
    "tolerableFailedCheckpoints": ("tolerable_failed_checkpoints", _parse_tolerable),
    "checkpointsRetained": ("checkpoints_retained", parse_count),
    "historyCheckpoints": ("history_checkpoints", parse_count),
    "metricsInterval": ("metrics_interval_seconds", _parse_interval),
    "leaseTimeout": ("lease_timeout_seconds", parse_duration_seconds),
    "heartbeatTimeout": ("heartbeat_timeout_seconds", _parse_time_span_seconds),
    "stuckTimeout": ("stuck_timeout_seconds", _parse_duration_or_zero),
    "parallelism": ("parallelism", parse_count),
    "maxParallelism": ("max_parallelism", parse_count),
    "restartStrategy": ("restart_strategy", _parse_restart_strategy),
    "restartAttempts": ("restart_attempts", parse_count_or_zero),
    "restartDelay": ("restart_delay_seconds", parse_duration_seconds),
    "restartMaxFailuresPerInterval": ("restart_max_failures_per_interval", parse_count),
    "restartFailureInterval": ("restart_failure_interval_seconds", _parse_time_span_seconds),
    "restartInitialBackoff": ("restart_initial_backoff_seconds", _parse_time_span_seconds),
    "restartMaxBackoff": ("restart_max_backoff_seconds", _parse_time_span_seconds),
    "restartBackoffMultiplier": ("restart_backoff_multiplier", _parse_multiplier),
    "restartResetBackoffThreshold": (
        "restart_reset_backoff_threshold_seconds",
        _parse_time_span_seconds,
    ),
    "restartJitterFactor": ("restart_jitter_factor", _parse_share),
    "restartAttemptsBeforeResetBackoff": (
        "restart_attempts_before_reset_backoff",
        _parse_count_or_infinite,
    ),
    "restartSameCrashMax": ("restart_same_crash_max", _parse_tolerable),
    "restartSameErrorMax": ("restart_same_error_max", _parse_tolerable),
    "restoreFrom": ("restore_from", _parse_restore),
    "restoreMode": ("restore_mode", _parse_restore_mode),
    "allowNonRestoredState": ("allow_non_restored_state", parse_flag),
    "acceptMissingOutput": ("accept_missing_output", _parse_missing),
    "stateDefaults": ("state_defaults", _parse_defaults),
    "discardPrepared": ("discard_prepared", _parse_prepared),
    "requireGuarantee": ("required_guarantee", _parse_guarantee),
    "fresh": ("fresh", parse_flag),
    "retainOnCancel": ("retain_on_cancel", parse_flag),
    "watermarkIdleTimeout": ("watermark_idle_timeout_seconds", _parse_time_span_seconds),
    "watermarkMaxAhead": ("watermark_ahead_seconds_max", _parse_duration_or_infinite),
    "channelBufferBytes": ("channel_buffer_bytes", parse_count),
    "stateBackend": ("state_backend", _parse_state_backend),
    "memoryStateMax": ("memory_state_bytes_max", parse_bytes),
    "incrementalCheckpoints": ("incremental_checkpoints", parse_flag),
    "rocksdbMemory": ("rocksdb_memory_bytes", parse_bytes),
    "stateDirectory": ("state_directory", _text),
    "evaluatorMemory": ("evaluator_memory_bytes", parse_bytes),
    "restPort": ("rest_port", _parse_port),
    "restBindAddress": ("rest_bind_address", _text),
    "refreshInterval": ("refresh_interval_seconds", _parse_time_span_seconds),
    "logFormat": ("log_format", _parse_log_format),
}
# Which strategies have an option. Where none is named, the first that has all given ones is meant.
_STRATEGIES_WITH: Mapping[str, tuple[RestartStrategyName, ...]] = {
    "restartAttempts": ("fixed-delay",),
    "restartDelay": ("fixed-delay", "failure-rate"),
    "restartMaxFailuresPerInterval": ("failure-rate",),
    "restartFailureInterval": ("failure-rate",),
    "restartInitialBackoff": ("exponential-delay",),
    "restartMaxBackoff": ("exponential-delay",),
    "restartBackoffMultiplier": ("exponential-delay",),
    "restartResetBackoffThreshold": ("exponential-delay",),
    "restartJitterFactor": ("exponential-delay",),
    "restartAttemptsBeforeResetBackoff": ("exponential-delay",),
}
USUAL_CHECKPOINT_INTERVAL = "1 second"
"""Of a query with a location or a trigger that does not say how often."""
SESSION_PREFIX = "spark.stillframe."
STORAGE_PREFIX = "fs.s3a."
_SESSION_STORAGE_PREFIX = f"spark.hadoop.{STORAGE_PREFIX}"


def job_option_names() -> list[str]:
    return list(_OPTIONS)


def settings_in_force(config: JobConfig) -> dict[str, str]:
    """Every option that has a value, as people read it; nothing of how the storage is reached."""
    values = {option: getattr(config, field) for option, (field, _) in _OPTIONS.items()}
    return {option: str(value) for option, value in values.items() if value is not None}


def refuse_unknown(given: Iterable[str], known: Iterable[str], of: str) -> None:
    """Raise for the first option that is not known, naming one that is if it is near.

    One that is known as `kafka.*` stands for all that begin with `kafka.`.
    """
    spelled = {name.lower(): name for name in known}
    for name in given:
        if names_option(name, spelled):
            continue
        nearest = nearest_of(name.lower(), spelled)
        hint = ": leave it out" if nearest is None else f"; did you mean {spelled[nearest]!r}?"
        raise UnknownOption(f"{of} has no option {name!r}{hint}", name)


def names_option(given: str, known: Iterable[str]) -> bool:
    """Whether this is one of these options, in any spelling."""
    name = given.lower()
    return any(
        name.startswith(each.lower()[:-1]) if each.endswith(".*") else name == each.lower()
        for each in known
    )


def job_config(
    options: Mapping[str, str],
    session: Mapping[str, str] | None = None,
    conf: Conf = lambda name: None,
) -> JobConfig:
    """The settings made of a writer's options and, below them, a session's `spark.stillframe.*`.

    Option names are matched without regard to case, as Spark's are. `options` holds job options
    only; the caller has taken the sink's own out. What they and the session say of the storage
    (`fs.s3a.*`, in a session `spark.hadoop.fs.s3a.*`) is kept as it is, for the store to read.
    """
    of_storage = storage_settings(options, session or {}, conf)
    options = {name: text for name, text in options.items() if not is_storage_setting(name)}
    from_session = {
        name.removeprefix(SESSION_PREFIX): value
        for name, value in (session or {}).items()
        if name.startswith(SESSION_PREFIX)
    }
    by_lower = {name.lower(): name for name in _OPTIONS}
    values: dict[str, Any] = {}
    for given, of in ((from_session, "the session (spark.stillframe.*)"), (options, "the job")):
        refuse_unknown(given, _OPTIONS, of)
        texts = {by_lower[name.lower()]: str(text) for name, text in given.items()}
        parsed = {_OPTIONS[name][0]: _OPTIONS[name][1](name, text) for name, text in texts.items()}
        named, inherited = (of_level.get("restart_strategy") for of_level in (parsed, values))
        parsed["restart_strategy"] = _strategy_meant(texts, named, inherited, of)
        values |= parsed
    values["storage_settings"] = of_storage
    assert set(values) <= {each.name for each in fields(JobConfig)}
    return _checked(JobConfig(**values))


def is_storage_setting(option: str) -> bool:
    """Whether this option of a writer is Hadoop's for a storage, such as `fs.s3a.endpoint`."""
    return option.lower().startswith(STORAGE_PREFIX)


def storage_settings(
    options: Mapping[str, str], session: Mapping[str, str], conf: Conf = lambda name: None
) -> dict[str, str]:
    """Hadoop's `fs.s3a.*` for a store: those of the options, and below them the session's."""
    of_session = {
        name.removeprefix("spark.hadoop."): text
        for name, text in session.items()
        if name.startswith(_SESSION_STORAGE_PREFIX)
    }
    of_job = {
        name.lower(): Secret.from_option(name, text, conf).reveal()
        if is_secret_name(name)
        else text
        for name, text in options.items()
        if is_storage_setting(name)
    }
    # What is in a file may be renewed there: see storage/s3.py.
    renewed = {
        f"{name.lower()}.from": text
        for name, text in options.items()
        if is_storage_setting(name) and is_secret_name(name) and text.startswith("file:")
    }
    return of_session | of_job | renewed


def _strategy_meant(
    given: Iterable[str],
    named: RestartStrategyName | None,
    inherited: RestartStrategyName | None,
    of: str,
) -> RestartStrategyName | None:
    """The restart strategy that options given in one place mean, which may be the inherited one."""
    options = [option for option in given if option in _STRATEGIES_WITH]
    for option in options:
        if named is not None and named not in _STRATEGIES_WITH[option]:
            raise BuildError(
                f"option {option} of {of} is none of restartStrategy {named!r}: leave it out, or"
                f" choose {' or '.join(_STRATEGIES_WITH[option])}"
            )
    if named is not None or not options:
        return named or inherited
    fitting = [
        name
        for name in _STRATEGIES_WITH[options[0]]
        if all(name in _STRATEGIES_WITH[option] for option in options)
    ]
    if not fitting:
        raise BuildError(
            f"options {' and '.join(options)} of {of} belong to different restart strategies:"
            " keep those of one"
        )
    return inherited if inherited in fitting else fitting[0]


def _checked(config: JobConfig) -> JobConfig:
    if config.checkpoint_interval_seconds is not None and config.checkpoint_location is None:
        raise BuildError(
            "checkpointInterval is set but checkpointLocation is not: say where checkpoints go"
        )
    if isinstance(config.restore_from, str) and config.checkpoint_location is None:
        raise BuildError(
            f"restoreFrom is the savepoint {config.restore_from!r}, but checkpointLocation is not"
            " set: say where the job's own checkpoints go"
        )
    if config.fresh and isinstance(config.restore_from, int):
        raise BuildError(
            f"fresh starts the job over, but restoreFrom is its checkpoint {config.restore_from}:"
            " leave one of the two out"
        )
    if config.parallelism is not None and config.parallelism > config.max_parallelism:
        raise BuildError(
            f"parallelism {config.parallelism} is more than maxParallelism"
            f" {config.max_parallelism}: lower the one or, for a new job, raise the other"
        )
    _check_mode(config)
    if config.restart_initial_backoff_seconds > config.restart_max_backoff_seconds:
        raise BuildError(
            f"restartInitialBackoff of {config.restart_initial_backoff_seconds:g} s is longer than"
            f" restartMaxBackoff of {config.restart_max_backoff_seconds:g} s: lower the one or"
            " raise the other"
        )
    return config


def _check_mode(config: JobConfig) -> None:
    mode = config.checkpoint_mode
    if mode == "at-most-once" and config.checkpoint_interval_seconds is None:
        raise BuildError(
            "checkpointMode at-most-once emits what a checkpoint has reserved, but there are no"
            " checkpoints: set checkpointInterval"
        )
    if config.unaligned_checkpoints and mode != "exactly-once":
        raise BuildError(
            f"unalignedCheckpoints goes with checkpointMode exactly-once only, not with {mode}:"
            " leave one of the two out"
        )
    if config.unaligned_checkpoints and config.max_concurrent_checkpoints > 1:
        raise BuildError(
            "unalignedCheckpoints takes one checkpoint at a time, but maxConcurrentCheckpoints is"
            f" {config.max_concurrent_checkpoints}: leave one of the two out"
        )
    if mode == "stop-the-world" and config.max_concurrent_checkpoints > 1:
        raise BuildError(
            "checkpointMode stop-the-world takes one checkpoint at a time, but"
            f" maxConcurrentCheckpoints is {config.max_concurrent_checkpoints}: leave it out"
        )
    if config.aligned_checkpoint_timeout_seconds and not config.unaligned_checkpoints:
        raise BuildError(
            "alignedCheckpointTimeout says when an unaligned checkpoint stops waiting: set"
            " unalignedCheckpoints to true, or leave it out"
        )
