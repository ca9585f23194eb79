"""Whether to start again after a failure, and when.

Rules of this file
- The strategies are Flink's, with Flink's meanings; their defaults are those of `JobConfig`.
- Time comes with each failure and chance is passed in: the same failures get the same answers.
- What would fail again is never tried again, whatever the strategy. Where an error says so, it is
  known at once. An error of the user's code, of a source or of a sink may be a network's, and a
  process that dies without a word (killed for its memory, a crash in a library) says nothing; but
  if the same comes again and again before a checkpoint completes, it comes of the records, and they
  come again (`SameFailure`). So does one record that code fails at after each restart: no
  checkpoint is past it, whatever completes in between because other records flow, or none do. Flink
  goes on for ever.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard, assert_never

from stillframe.config import JobConfig
from stillframe.ids import SlotIndex

# Reached by a job that fails for days; beyond it the number would overflow, and the longest delay
# has been in force since long before.
_BACKOFF_SECONDS_LIMIT = 1e100
_SAME_RECORD_SECONDS = 3600.0
"""What looks like the same record after this long, and after a checkpoint, may be another one."""
_SIGNS_MAX = 100
"""So many failures are told apart; no job has as many places that fail."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Begin a new attempt after this long."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job fails."""

    reason: str


class RestartStrategy(ABC):
    """Decides after each failure of one job; keeps in mind what it needs of the earlier ones."""

    def on_progress(self) -> None:  # noqa: B027 (most strategies do not care)
        """A checkpoint was completed since the last failure."""

    def on_failure(self, reason: str, is_permanent: bool, now_seconds: float) -> Restart | GiveUp:
        """An attempt failed at `now_seconds` of a clock that never goes back."""
        if is_permanent:
            return GiveUp(reason)
        return self._decide(reason, now_seconds)

    @abstractmethod
    def _decide(self, reason: str, now_seconds: float) -> Restart | GiveUp:
        """What follows a failure that may not come again."""


class NoRestart(RestartStrategy):
    """The first failure ends the job."""

    def _decide(self, reason: str, now_seconds: float) -> Restart | GiveUp:
        return GiveUp(
            f"{reason} (not restarted: restartStrategy is none, as it is by default when"
            " checkpointInterval is off)"
        )


class FixedDelay(RestartStrategy):
    """Start again after a fixed time, so many times in a row.

    A completed checkpoint is progress and starts the count anew: a job that is killed once a day
    for a year has not failed 365 times in a row. (Flink's count never starts over.)
    """

    def __init__(self, attempts_max: int, delay_seconds: float) -> None:
        self._attempts_max = attempts_max
        self._delay_seconds = delay_seconds
        self._failures_in_a_row = 0

    def on_progress(self) -> None:
        self._failures_in_a_row = 0

    def _decide(self, reason: str, now_seconds: float) -> Restart | GiveUp:
        self._failures_in_a_row += 1
        if self._failures_in_a_row > self._attempts_max:
            return GiveUp(
                f"{reason} (after {self._attempts_max} restarts without a completed checkpoint in"
                " between; raise restartAttempts to try longer)"
            )
        return Restart(self._delay_seconds)


class FailureRate(RestartStrategy):
    """Start again after a fixed time, unless there were too many failures of late.

    So many failures may lie within the interval that ends now; the next one ends the job.
    """

    def __init__(self, failures_max: int, interval_seconds: float, delay_seconds: float) -> None:
        self._failures_max = failures_max
        self._interval_seconds = interval_seconds
        self._delay_seconds = delay_seconds
        self._failed_at_seconds = deque[float](maxlen=failures_max + 1)

    def _decide(self, reason: str, now_seconds: float) -> Restart | GiveUp:
        self._failed_at_seconds.append(now_seconds)
        if self._are_too_many(now_seconds):
            return GiveUp(
                f"{reason} (failure {self._failures_max + 1} within {self._interval_seconds:g} s;"
                " raise restartMaxFailuresPerInterval to allow more)"
            )
        return Restart(self._delay_seconds)

    def _are_too_many(self, now_seconds: float) -> bool:
        if len(self._failed_at_seconds) <= self._failures_max:
            return False
        return now_seconds - self._failed_at_seconds[0] <= self._interval_seconds


@dataclass(frozen=True, slots=True)
class Backoff:
    """How delays grow, and how far chance moves each of them."""

    initial_seconds: float
    max_seconds: float
    multiplier: float
    jitter_factor: float

    def grown(self, backoff_seconds: float) -> float:
        return min(backoff_seconds * self.multiplier, _BACKOFF_SECONDS_LIMIT)

    def delay_seconds(self, backoff_seconds: float, chance: float) -> float:
        """Chance of 0 shortens most, of 1 lengthens most; the limits hold for what comes of it."""
        assert 0.0 <= chance <= 1.0, chance
        jittered = backoff_seconds * (1.0 + self.jitter_factor * (2.0 * chance - 1.0))
        return max(self.initial_seconds, min(jittered, self.max_seconds))


class ExponentialDelay(RestartStrategy):
    """Start again after a time that grows with every failure, up to a longest one.

    A long enough time after a restart without a failure begins again with the first delay;
    completed checkpoints do not matter. A failure told before the restart it would lead to belongs
    to the one before it. At the very moment of the restart it is a new one (in Flink it is not):
    a job that fails at once would otherwise be started again without any delay.
    """

    def __init__(
        self,
        backoff: Backoff,
        reset_threshold_seconds: float,
        attempts_max: float,
        jitter: Callable[[], float],
    ) -> None:
        self._backoff = backoff
        self._reset_threshold_seconds = reset_threshold_seconds
        self._attempts_max = attempts_max
        self._jitter = jitter
        self._restart_at_seconds = -math.inf
        self._begin_again()

    def _begin_again(self) -> None:
        self._backoff_seconds = self._backoff.initial_seconds
        self._attempts = 0

    def _decide(self, reason: str, now_seconds: float) -> Restart | GiveUp:
        if now_seconds < self._restart_at_seconds:
            return Restart(self._restart_at_seconds - now_seconds)
        if now_seconds - self._restart_at_seconds >= self._reset_threshold_seconds:
            self._begin_again()
        self._attempts += 1
        if self._attempts > self._attempts_max:
            return GiveUp(
                f"{reason} (after {self._attempts_max} restarts without"
                f" {self._reset_threshold_seconds:g} s free of failures;"
                " raise restartAttemptsBeforeResetBackoff to try longer)"
            )
        delay_seconds = self._backoff.delay_seconds(self._backoff_seconds, self._jitter())
        self._backoff_seconds = self._backoff.grown(self._backoff_seconds)
        self._restart_at_seconds = now_seconds + delay_seconds
        return Restart(delay_seconds)


@dataclass(frozen=True, slots=True)
class SlotCrashed:
    """The process of this slot was gone before it could say why."""

    slot: SlotIndex


@dataclass(frozen=True, slots=True)
class CodeFailed:
    """Code that is not ours raised this error at this place, or hung there."""

    what: str
    row: str | None = None
    """What it was called with; None: nobody knows."""


@dataclass(frozen=True, slots=True)
class NothingRan:
    """The slots were never there, for this reason."""

    reason: str


Sign = SlotCrashed | CodeFailed | NothingRan
"""Of two failures with the same sign, the second is the first come again."""


@dataclass(slots=True)
class _Seen:
    """How often a sign has come, when it came last, and whether a checkpoint completed since."""

    times: int
    at_seconds: float
    is_before_progress: bool = False

    def is_over(self, now_seconds: float) -> bool:
        is_long_ago = now_seconds - self.at_seconds > _SAME_RECORD_SECONDS
        return self.is_before_progress and is_long_ago


class SameFailure:
    """Counts failures that come again without progress; decides before the strategy does.

    Errors of code are counted in two ways. At any record: until a checkpoint completes. At one
    record: until an hour and a checkpoint have passed without it.

    What fails outside, such as a storage that is away, has no sign, however long it lasts: it
    explains what failed beside it, so the counts begin with 0 again.
    """

    def __init__(self, crashes_max: float, errors_max: float) -> None:
        """How many restarts there are for a sign."""
        self._crashes_max = crashes_max
        self._errors_max = errors_max
        self._seen: dict[Sign, _Seen] = {}
        self._has_run = False

    def on_running(self) -> None:
        """All slots of an attempt run: what keeps them from starting later may heal."""
        self._has_run = True

    def on_progress(self) -> None:
        """A checkpoint was completed since the last failure."""
        self._seen = {sign: seen for sign, seen in self._seen.items() if _is_of_record(sign)}
        for seen in self._seen.values():
            seen.is_before_progress = True

    def on_failure(self, reason: str, sign: Sign | None, now_seconds: float) -> GiveUp | None:
        """An attempt failed at `now_seconds` of a clock that never goes back."""
        if sign is None or (self._has_run and isinstance(sign, NothingRan)):
            self._seen.clear()
            return None
        signs = [CodeFailed(sign.what), sign] if _is_of_record(sign) else [sign]
        for each in signs:
            times = self._count(each, now_seconds)
            restarts_max, advice = self._limit(each, times)
            if times > restarts_max:
                return GiveUp(f"{reason} ({advice})")
        return None

    def _count(self, sign: Sign, now_seconds: float) -> int:
        """How often it has come, this time included."""
        before = self._seen.pop(sign, None)
        times = 1 if before is None or before.is_over(now_seconds) else before.times + 1
        self._seen[sign] = _Seen(times, now_seconds)
        if len(self._seen) > _SIGNS_MAX:
            self._seen.pop(next(iter(self._seen)))  # the one that came last the longest ago
        return times

    def _limit(self, sign: Sign, times: int) -> tuple[float, str]:
        """How many restarts follow such a failure, and what is said when there were more."""
        match sign:
            case SlotCrashed(slot):
                return self._crashes_max, (
                    f"slot {slot} has died {times} times without a completed checkpoint in between:"
                    " look for a record that its function does not survive, or give it more memory;"
                    " raise restartSameCrashMax to try longer"
                )
            case CodeFailed(row=str()):
                return self._errors_max, (
                    f"the same error {times} times at the same record, which comes again after each"
                    " restart: correct the cause and start the job again, it resumes from its last"
                    " checkpoint; raise restartSameErrorMax to try longer"
                )
            case CodeFailed():
                return self._errors_max, (
                    f"the same error {times} times without a completed checkpoint in between:"
                    " correct the cause and start the job again, it resumes from its last"
                    " checkpoint; raise restartSameErrorMax to try longer"
                )
            case NothingRan():
                return 1, (
                    "the same failure again, and no slot has ever run: correct the cause and start"
                    " the job again"
                )


def _is_of_record(sign: Sign) -> TypeGuard[CodeFailed]:
    return isinstance(sign, CodeFailed) and sign.row is not None


def restart_strategy(config: JobConfig, jitter: Callable[[], float]) -> RestartStrategy:
    """The strategy the settings ask for; `jitter` gives a number from 0 to 1, as `random` does."""
    match config.restart_strategy_in_force:
        case "none":
            return NoRestart()
        case "fixed-delay":
            return FixedDelay(config.restart_attempts, config.restart_delay_seconds)
        case "failure-rate":
            return FailureRate(
                config.restart_max_failures_per_interval,
                config.restart_failure_interval_seconds,
                config.restart_delay_seconds,
            )
        case "exponential-delay":
            return _exponential_delay(config, jitter)
        case unknown:
            assert_never(unknown)


def _exponential_delay(config: JobConfig, jitter: Callable[[], float]) -> ExponentialDelay:
    backoff = Backoff(
        initial_seconds=config.restart_initial_backoff_seconds,
        max_seconds=config.restart_max_backoff_seconds,
        multiplier=config.restart_backoff_multiplier,
        jitter_factor=config.restart_jitter_factor,
    )
    return ExponentialDelay(
        backoff,
        config.restart_reset_backoff_threshold_seconds,
        config.restart_attempts_before_reset_backoff,
        jitter,
    )
