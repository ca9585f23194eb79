"""What happens to a job: told once, folded once, shown to whoever asks.

The job's thread tells it. Listeners hear of events at once; `protocol/figures` makes records of
them, which a `HistoryThread` keeps beyond the driver's life, where there is a place for that; and
the newest figures of slots are here to be looked at. Any thread may ask.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from stillframe.clock import Clock, SystemClock
from stillframe.coordinator.kept_history import HistoryThread, Kept
from stillframe.coordinator.replanned import Refreshed, Rescaled
from stillframe.errors import Blame
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SlotIndex
from stillframe.json_values import JsonObject
from stillframe.logs import About
from stillframe.protocol import messages
from stillframe.protocol.diagnosis import EventTimeSeen
from stillframe.protocol.failures import AttemptBegun, EndOutcome, Failure, in_words
from stillframe.protocol.figures import Figures, Moment, Triggered, driver_lost
from stillframe.protocol.joblog import JobRecord
from stillframe.protocol.kept import CHECKPOINTS_MAX, KeptHistory, Record, Totals
from stillframe.protocol.manifests import SubtaskTimings
from stillframe.protocol.measures import Measured
from stillframe.protocol.messages import Progress, SourceLag, SubtaskDoing, lag_of_each
from stillframe.protocol.snapshots import EventTimes
from stillframe.protocol.statistics import SlotPlace

_KEPT_MAX = 100
_SAMPLE_SECONDS = 1.0
_SAMPLES_MAX = 10
_MEASURED_MAX = 6
"""Five seconds of what a slot tells once a second."""
_OFFSETS_MAX = 60
log = logging.getLogger("stillframe")
event_log = log.getChild("events")
"""Where events go; a command that shows them by itself turns it off."""


@dataclass(frozen=True, slots=True)
class DriverAwaited:
    """Another driver has run the job and may still be there."""

    host: str
    pid: int
    seconds: float
    """After which it counts as gone, unless it is heard of."""

    def __str__(self) -> str:
        return (
            f"waiting up to {self.seconds:.3g} s for the driver on {self.host} (pid {self.pid}),"
            " which may still run this job"
        )


@dataclass(frozen=True, slots=True)
class GuaranteeGiven:
    """What the job promises of every record, told when it starts."""

    word: str
    reasons: tuple[str, ...]
    """Why it is not exactly-once."""

    def __str__(self) -> str:
        because = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"the guarantee is {self.word}{because}"


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    attempt: Attempt
    restored_from: CheckpointId | None
    positions: tuple[str, ...]
    """Where the sources begin, in words."""
    savepoint: str | None = None
    """The address of the savepoint it starts from, where it is no checkpoint of the job's own."""

    def __str__(self) -> str:
        if self.savepoint is not None:
            return f"attempt {self.attempt} starts from the savepoint {self.savepoint}"
        if self.restored_from is None:
            return f"attempt {self.attempt} starts from the beginning"
        where = ", ".join(self.positions[:4]) + (", …" if len(self.positions) > 4 else "")
        return f"restored checkpoint {self.restored_from}, replaying from {where or 'its end'}"


@dataclass(frozen=True, slots=True)
class AlreadyFinished:
    """The job was started again after it had finished; nothing runs."""

    checkpoint_id: CheckpointId | None
    address: str
    """The job's directory."""

    def __str__(self) -> str:
        last = f", with checkpoint {self.checkpoint_id}" if self.checkpoint_id else ""
        go_on = (
            f"; another queryName and restoreFrom={self.address} go on with its state"
            if self.checkpoint_id
            else ""
        )
        return (
            f"the job has finished{last}, and nothing is left to do: fresh=true (stillframe run"
            f" --fresh) runs it again from the beginning{go_on}"
        )


@dataclass(frozen=True, slots=True)
class SlotsRunning:
    attempt: Attempt
    pids: tuple[int, ...]
    """By slot."""

    def __str__(self) -> str:
        slots = ", ".join(f"{slot} (pid {pid})" for slot, pid in enumerate(self.pids))
        return f"slots running: {slots}"


@dataclass(frozen=True, slots=True)
class OperatorFigures:
    """What a checkpoint holds of one operator, all its subtasks together."""

    uid: OperatorUid
    rows: int | None
    """Of its keyed states; None: they are in a database, which does not tell."""
    state_bytes: int
    positions: tuple[JsonObject, ...] | None
    """Of a source: its splits, each with `id` and `position`; None: there are too many to keep."""
    states: tuple[str, ...] = ()
    """By name; those in a database are not among them."""
    commits: int = 0
    """Of a sink: how many files or transactions it has ready for its commit."""

    def to_json(self) -> JsonObject:
        return {
            "uid": self.uid,
            "states": list(self.states),
            "rows": self.rows,
            "bytes": self.state_bytes,
            "positions": None if self.positions is None else list(self.positions),
            "commits": self.commits,
        }


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    checkpoint_id: CheckpointId
    epoch: Epoch
    attempt: Attempt
    triggered_at_ms: int
    duration_ms: float
    state_bytes: int
    """Of all files it needs, its metadata included."""
    timings: tuple[SubtaskTimings, ...]
    records_in: int
    """Read from the sources in this attempt so far, as last reported."""
    records_out: int
    records_late: int = 0
    """Came too late in this attempt so far, and were dropped."""
    watermark_us: int | None = None
    """How far event time had come in the slowest operator, as last reported."""
    operators: tuple[OperatorFigures, ...] = ()
    path: str | None = None
    """Where it is."""
    metadata_bytes: int = 0
    records_read: tuple[tuple[str, int], ...] = ()
    """By the task of each source, in this attempt before its barrier."""
    event_times: tuple[EventTimes, ...] = ()
    """Of each `withWatermark` that has seen rows since the barrier before."""

    def __str__(self) -> str:
        size = format_bytes(self.state_bytes)
        return f"checkpoint {self.checkpoint_id} complete, {self.duration_ms:.0f} ms, {size}"


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """Every sink has made visible what this checkpoint holds."""

    checkpoint_id: CheckpointId

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint_id} committed"


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    checkpoint_id: CheckpointId
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint_id} failed: {self.reason}"


@dataclass(frozen=True, slots=True)
class SavepointCompleted:
    """It belongs to whoever asked for it; the job does not know it any more."""

    checkpoint_id: CheckpointId
    address: str
    state_bytes: int

    def __str__(self) -> str:
        size = format_bytes(self.state_bytes)
        return f"savepoint {self.checkpoint_id} complete in {self.address}, {size}"


@dataclass(frozen=True, slots=True)
class CheckpointDamaged:
    checkpoint_id: CheckpointId
    reason: str

    def __str__(self) -> str:
        return f"checkpoint {self.checkpoint_id} is damaged: {self.reason}"


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    attempt: Attempt
    reason: str
    restart_seconds: float | None
    """None: there will be no other attempt."""
    blame: Blame | None = None
    """Of an error in code that is not ours."""

    def __str__(self) -> str:
        said = f"attempt {self.attempt} failed: {self.reason}"
        if self.restart_seconds is not None:
            said += f"; restarting in {round(self.restart_seconds, 2):g} s"
        return "\n    ".join([said, *(in_words(self.blame) if self.blame is not None else ())])


@dataclass(frozen=True, slots=True)
class Hanging:
    """A slot does not come back from a call of the user's code."""

    slot: SlotIndex
    hanging: messages.Hanging

    def __str__(self) -> str:
        lines = [f"{self.hanging}, in slot {self.slot}"]
        if self.hanging.task is not None:
            lines[0] += f", task {self.hanging.task} ({self.hanging.subtask})"
        named = {"operator": self.hanging.operator, "called with": self.hanging.called_with}
        lines += [f"{name}: {value}" for name, value in named.items() if value is not None]
        return "\n    ".join([*lines, *self.hanging.stack.splitlines()])


@dataclass(frozen=True, slots=True)
class Waiting:
    """The job does not get on for want of something outside it."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class JobEnded:
    outcome: str
    """finished, stopped or failed"""

    def __str__(self) -> str:
        return f"job {self.outcome}"


Event = (
    GuaranteeGiven
    | DriverAwaited
    | AlreadyFinished
    | AttemptStarted
    | SlotsRunning
    | CheckpointCompleted
    | CheckpointCommitted
    | CheckpointFailed
    | SavepointCompleted
    | Rescaled
    | Refreshed
    | CheckpointDamaged
    | AttemptFailed
    | Hanging
    | Waiting
    | JobEnded
)


def level_of(event: Event) -> int:
    """A job may go on for long without a new checkpoint: whoever looks at the log should know."""
    is_warning = isinstance(event, _WARNINGS) or (
        isinstance(event, GuaranteeGiven) and event.word in ("at-most-once", "none")
    )
    return logging.WARNING if is_warning else logging.INFO


def about_event(job: str | None, event: Event) -> About:
    hanging = event.hanging if isinstance(event, Hanging) else None
    return About(
        job,
        getattr(event, "attempt", None),
        getattr(event, "checkpoint_id", None),
        None if hanging is None else hanging.task,
        getattr(event, "slot", None),
    )


Listener = Callable[[Event], None]
_WARNINGS = (CheckpointFailed, AlreadyFinished, AttemptFailed, Hanging, Waiting)


@dataclass(frozen=True, slots=True)
class Summary:
    """A job in a few figures."""

    outcome: str
    attempts: int
    restarts: int
    checkpoints_completed: int
    checkpoints_failed: int
    last_checkpoint: CheckpointId | None
    records_in: int
    """Read from the sources in this process, replayed ones included."""
    records_out: int
    records_late: int = 0
    """Came too late and were dropped, replayed ones included."""
    guarantee: str | None = None
    """Of the whole job, in a word; None: it has not been told yet."""
    records_per_second: float = 0.0
    """Read from the sources lately."""
    watermark_us: int | None = None
    """How far event time has come in the slowest operator; None: nothing is known."""
    records_malformed: int = 0
    """Could not be read as their schema declares them, replayed ones included."""
    lags: tuple[SourceLag, ...] = ()
    """How far each source is behind what is there to be read, of those that tell."""
    rescales: int = 0
    down_seconds: float = 0.0
    """From when failures were noticed until all slots ran again, and while it was rescaled."""

    def to_json(self) -> JsonObject:
        return {
            "outcome": self.outcome,
            "guarantee": self.guarantee,
            "attempts": self.attempts,
            "restarts": self.restarts,
            "checkpoints_completed": self.checkpoints_completed,
            "checkpoints_failed": self.checkpoints_failed,
            "last_checkpoint": self.last_checkpoint,
            "records_in": self.records_in,
            "records_out": self.records_out,
            "records_late": self.records_late,
            "records_per_second": round(self.records_per_second, 1),
            "watermark_us": self.watermark_us,
            "records_malformed": self.records_malformed,
            "lags": [lag.to_json() for lag in self.lags],
        }


class History:
    """Collects events and figures on the job's thread; may be read from any."""

    def __init__(
        self,
        keeping: HistoryThread | None = None,
        clock: Clock | None = None,
        checkpoints_max: int = CHECKPOINTS_MAX,
        job: str | None = None,
    ) -> None:
        """`keeping`: None, it all is in memory only."""
        self.job = job
        self._keeping = keeping
        self._clock = clock or SystemClock()
        self._checkpoints_max = checkpoints_max
        self._figures = Figures(checkpoints_max)
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._events: deque[Event] = deque(maxlen=_KEPT_MAX)
        self._completed: deque[CheckpointCompleted] = deque(maxlen=_KEPT_MAX)
        self._attempts = 0
        self._rests = 0
        self._rescales = 0
        self._rescaling_seconds = 0.0
        self._has_rested = False
        self._discoveries: Counter[OperatorUid] = Counter()
        self._guarantee: str | None = None
        self._checkpoints_completed = 0
        self._checkpoints_failed = 0
        self._outcome = "running"
        self._past_attempts = Progress(0, 0)
        self._this_attempt: dict[SlotIndex, Progress] = {}
        self._measured: dict[SlotIndex, deque[Measured]] = {}
        """Of each slot, those of the last seconds."""
        self._offsets_ms: dict[SlotIndex, deque[int]] = {}
        self._places: tuple[SlotPlace, ...] = ()
        self._present: dict[str, Event] = {}
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES_MAX)
        """When how many records had been read in this attempt, a second apart and more."""
        self._lags: deque[int] = deque(maxlen=_SAMPLES_MAX)
        self._event_time = EventTimeSeen()

    def add_listener(self, listener: Listener) -> None:
        """Called with every event from now on, on the job's thread; it must not block."""
        with self._lock:
            self._listeners.append(listener)

    def tell(self, event: Event) -> None:
        event_log.log(level_of(event), "%s", event, extra=about_event(self.job, event).extra())
        with self._lock:
            self._note(event)
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(event)
            except Exception:  # a curious listener must not harm the job
                log.exception("a listener failed on %s", event)

    def now(self) -> Moment:
        return Moment(self._clock.wall_ms(), self._clock.monotonic_seconds())

    # --- what is kept ---

    def kept(self) -> KeptHistory:
        """All that is known, also of earlier drivers; waits some seconds until that is read."""
        earlier = self._keeping.earlier() if self._keeping is not None else KeptHistory()
        with self._lock:
            return earlier.followed_by(self._figures.kept(self.now()), self._checkpoints_max)

    def start(self) -> None:
        """Begin to read what earlier drivers left. Nothing is written before an attempt begins."""
        if self._keeping is not None:
            self._keeping.start()

    def abandon(self) -> None:
        """Another driver has taken over: it is its history now."""
        if self._keeping is not None:
            self._keeping.abandon()

    def close(self, outcome: EndOutcome) -> None:
        """The driver's part is over; waits some seconds until that is written."""
        with self._lock:
            self._keep(self._figures.on_ended(outcome, self.now()))
        if self._keeping is not None:
            self._keeping.close()

    def sweep(self) -> None:
        """The job is this driver's now: remove what others have begun to write and never ended."""
        if self._keeping is not None:
            self._keeping.sweep()

    def note_begun(self, begun: AttemptBegun, before: JobRecord | None) -> None:
        """An attempt begins; `before` is what the log said until then."""
        with self._lock:
            if not self._figures.has_begun and self._keeping is not None:
                now = self.now()
                self._keeping.sweep()
                self._keeping.submit(lambda earlier: self._lost(before, begun, earlier, now))
            self._keep(self._figures.on_begun(begun))

    def note_noticed(self, heard_at_seconds: float | None) -> None:
        """It is known now that the attempt has failed, and when what failed was heard of last."""
        now = self.now()
        heard_ms = None
        if heard_at_seconds is not None:
            heard_ms = now.wall_ms - round((now.monotonic_seconds - heard_at_seconds) * 1000)
        with self._lock:
            self._figures.on_noticed(heard_ms, now)

    def note_slots(self, places: Sequence[SlotPlace]) -> None:
        """All slots of the attempt are there."""
        with self._lock:
            self._places = tuple(places)
            self._figures.on_slots(self.now())

    def places(self) -> tuple[SlotPlace, ...]:
        """Where the slots of the attempt run; of none before all are there."""
        with self._lock:
            return self._places

    def tell_failure(self, failure: Failure) -> None:
        """An attempt has failed: a record of what is kept, and an event."""
        self.note_failure(failure)
        delay_seconds = failure.restart_delay_seconds
        self.tell(AttemptFailed(failure.attempt, failure.reason, delay_seconds, failure.blame))

    def note_failure(self, failure: Failure) -> None:
        """An attempt did not go on; before the first of this driver there is nothing to keep."""
        self.note_attempt_over(f"the attempt failed: {failure.reason}")
        with self._lock:
            self._figures.on_noticed(None, self.now())
            if self._figures.has_begun:
                self._keep(self._figures.on_failed(failure))

    def note_attempt_over(self, reason: str) -> None:
        """What was under way is not any more."""
        with self._lock:
            self._keep(*self._figures.on_attempt_over(reason, self.now()))

    def note_triggered(self, triggered: Triggered) -> None:
        with self._lock:
            self._figures.on_triggered(triggered)

    def note_acknowledged(
        self,
        checkpoint_id: CheckpointId,
        vertex: str,
        timings: SubtaskTimings,
        place: SlotPlace | None = None,
    ) -> None:
        with self._lock:
            self._figures.on_acknowledged(checkpoint_id, vertex, timings, self.now(), place)

    def _keep(self, *records: Record | None) -> None:
        for record in records:
            if record is not None and self._keeping is not None:
                self._keeping.submit(partial(_after, record, self._figures.totals))

    def _lost(
        self, before: JobRecord | None, begun: AttemptBegun, earlier: KeptHistory, now: Moment
    ) -> Kept | None:
        """On the history's thread: only now it is known what earlier drivers have told."""
        with self._lock:
            self._figures.on_earlier(begun, earlier)
        lost = driver_lost(before, earlier, now)
        if lost is None:
            return None
        with self._lock:
            return self._figures.on_failed(lost), earlier.totals

    # --- what slots tell ---

    def report_progress(self, slot: SlotIndex, progress: Progress, now_seconds: float) -> None:
        with self._lock:
            self._this_attempt[slot] = progress
            read = sum(each.records_in for each in self._this_attempt.values())
            self._keep(self._figures.on_read(read, self.now()))
            times_us = (each.watermark_us for each in self._this_attempt.values())
            slowest_us = min((each for each in times_us if each is not None), default=None)
            self._event_time.on_report(slowest_us, read, now_seconds)
            if not self._samples or now_seconds - self._samples[-1][0] >= _SAMPLE_SECONDS:
                self._samples.append((now_seconds, read))
                lags = [lag.records for each in self._this_attempt.values() for lag in each.lags]
                if lags:
                    self._lags.append(sum(lags))

    def note_measures(self, slot: SlotIndex, measured: Measured) -> None:
        offset_ms = self._clock.wall_ms() - measured.at_ms
        with self._lock:
            self._measured.setdefault(slot, deque(maxlen=_MEASURED_MAX)).append(measured)
            self._offsets_ms.setdefault(slot, deque(maxlen=_OFFSETS_MAX)).append(offset_ms)

    def clock_offsets_ms(self, reports_min: int = 1) -> dict[SlotIndex, int]:
        """By how much the driver's clock is ahead of each slot's: what a report took on its way is
        in it too, so the least of a minute counts; of few reports all may have been late."""
        with self._lock:
            known = self._offsets_ms.items()
            return {slot: min(told) for slot, told in known if len(told) >= reports_min}

    def still_seconds(self) -> float | None:
        """For how long event time has not moved although records came; None: it moves."""
        with self._lock:
            return self._event_time.still_seconds

    def measured(self) -> dict[SlotIndex, Measured]:
        """What each slot of this attempt has told last."""
        with self._lock:
            return {slot: told[-1] for slot, told in self._measured.items()}

    def measured_lately(self) -> dict[SlotIndex, tuple[Measured, Measured]]:
        """The first and the last that each slot has told in the last seconds."""
        with self._lock:
            return {slot: (told[0], told[-1]) for slot, told in self._measured.items()}

    def doing(self) -> list[SubtaskDoing]:
        """What subtasks do with checkpoints that are under way."""
        with self._lock:
            return [each for told in self._this_attempt.values() for each in told.doing]

    def lags_lately(self) -> list[int]:
        """How many records sources were behind, oldest first, a second apart and more."""
        with self._lock:
            return list(self._lags)

    def begin(self, what: str, event: Event) -> None:
        """Something lasts: told when it begins, and shown as it is now until it is over."""
        with self._lock:
            is_new = what not in self._present
            self._present[what] = event
        if is_new:
            self.tell(event)

    def over(self, what: str) -> None:
        with self._lock:
            self._present.pop(what, None)

    def present(self) -> list[Event]:
        """What is in the job's way now."""
        with self._lock:
            return list(self._present.values())

    def note_discovered(self, uid: OperatorUid) -> None:
        """The enumerator of this source has answered, and what it found was handed out."""
        with self._lock:
            self._discoveries[uid] += 1

    def discoveries(self, uid: OperatorUid) -> int:
        """How often it has."""
        with self._lock:
            return self._discoveries[uid]

    def note_rest(self) -> None:
        """An attempt has come to rest: the next one is no restart."""
        with self._lock:
            self._has_rested = True

    def events(self) -> list[Event]:
        with self._lock:
            return list(self._events)

    def completed(self) -> list[CheckpointCompleted]:
        """The last completed checkpoints, oldest first."""
        with self._lock:
            return list(self._completed)

    def records_of_attempt(self) -> Progress:
        with self._lock:
            return _sum_of(self._this_attempt.values())

    def summary(self) -> Summary:
        with self._lock:
            records, here = self._records_of_all(), _sum_of(self._this_attempt.values())
            return Summary(
                outcome=self._outcome,
                attempts=self._attempts,
                restarts=max(0, self._attempts - 1 - self._rests),
                checkpoints_completed=self._checkpoints_completed,
                checkpoints_failed=self._checkpoints_failed,
                last_checkpoint=self._completed[-1].checkpoint_id if self._completed else None,
                records_in=records.records_in,
                records_out=records.records_out,
                records_late=records.records_late,
                guarantee=self._guarantee,
                records_per_second=self._records_per_second(),
                watermark_us=here.watermark_us,
                records_malformed=records.records_malformed,
                lags=here.lags,
                rescales=self._rescales,
                down_seconds=self._figures.down_seconds + self._rescaling_seconds,
            )

    def _records_per_second(self) -> float:
        if len(self._samples) < 2 or self._outcome != "running":
            return 0.0
        (began, before), (ended, after) = self._samples[0], self._samples[-1]
        return (after - before) / (ended - began)

    def _records_of_all(self) -> Progress:
        """Of this attempt and those before it."""
        return _sum_of([self._past_attempts, *self._this_attempt.values()])

    def _note(self, event: Event) -> None:
        self._events.append(event)
        match event:
            case AttemptStarted():
                self._attempts += 1
                self._rests += self._has_rested
                self._has_rested = False
                self._past_attempts = self._records_of_all()
                self._this_attempt = {}
                self._measured = {}
                self._offsets_ms = {}
                self._places = ()
                self._lags.clear()
                self._event_time = EventTimeSeen()
                self._samples.clear()
                self._present.clear()
            case SlotsRunning():
                self._present.pop("slots", None)  # and not only at the next look
                self._figures.on_running(self.now())
            case AttemptFailed():
                self._samples.clear()
                self._present.clear()
            case CheckpointCompleted():
                self._checkpoints_completed += 1
                self._completed.append(event)
                of = event.checkpoint_id, event.path, event.metadata_bytes
                self._keep(self._figures.on_completed(*of, self.now()))
            case SavepointCompleted(checkpoint_id, address):
                self._keep(self._figures.on_completed(checkpoint_id, address, 0, self.now()))
            case CheckpointCommitted(checkpoint_id):
                told = self._figures.on_committed(checkpoint_id, self.now())
                if told is not None and self._keeping is not None:
                    self._keeping.amend(told)
            case CheckpointFailed(checkpoint_id, reason):
                self._checkpoints_failed += 1
                self._keep(self._figures.on_aborted(checkpoint_id, reason, self.now()))
            case Rescaled(before, after, downtime_seconds):
                self._rescales += before != after
                self._rescaling_seconds += downtime_seconds
            case Refreshed(downtime_seconds):
                self._rescaling_seconds += downtime_seconds
            case GuaranteeGiven(word):
                self._guarantee = word
            case JobEnded(outcome):
                self._outcome = outcome
                self._present.clear()


def _after(record: Record, own: Totals, earlier: KeptHistory) -> Kept:
    """What is written: with the totals of this driver and of those before it."""
    return record, earlier.totals.plus(own)


def _sum_of(parts: Collection[Progress]) -> Progress:
    return Progress(
        sum(part.records_in for part in parts),
        sum(part.records_out for part in parts),
        sum(part.records_late for part in parts),
        min((part.watermark_us for part in parts if part.watermark_us is not None), default=None),
        records_malformed=sum(part.records_malformed for part in parts),
        lags=lag_of_each(lag for part in parts for lag in part.lags),
    )


def format_bytes(count: int) -> str:
    """`21 KB`: as people say it."""
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if round(size) < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")
