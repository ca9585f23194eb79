"""One sentence: what a job waits for, or that it keeps up.

From figures to a code with its arguments, so that the command line, the API and whoever translates
them say the same. Of all that may be said, the first that holds is: what stops a job comes before
what slows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal

from stillframe.ids import CheckpointId, SlotIndex, SubtaskIndex
from stillframe.protocol.measures import SubtaskMeasures

Code = Literal[
    "no-driver",
    "given-up",
    "ended",
    "restarting",
    "starting",
    "stuck",
    "waiting",
    "checkpoints-failing",
    "checkpoint-waits",
    "storage-slow",
    "bottleneck",
    "lag-grows",
    "time-stands-still",
    "skew",
    "memory",
    "clocks-differ",
    "keeps-up",
]

_FAILED_IN_A_ROW = 3
_WAITS_SECONDS = 1.0
"""A checkpoint that waits for less is not spoken of."""
_BUSY_SHARE = 0.8
_FELT_SHARE = 0.2
"""A task waits for another if it does so for this much of its time."""
_BACKGROUND_SHARE = 0.8
_BACKGROUND_SECONDS = 5.0
_SKEW_TIMES = 2.0
_SKEW_RATE_MIN = 1_000.0
"""Records a second; below that it is chance."""
_SKEW_WORKING_SHARE = 0.5
"""One that has little to do may get more than the others: it costs nobody anything."""
_STILL_SECONDS = 60.0
_COMES_SECONDS = 5.0
"""Records come if the newest report of one is no older than this."""
_MEMORY_LEFT_SHARE = 0.05
_CLOCKS_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class SubtaskNow:
    """What a subtask did lately."""

    subtask: SubtaskIndex
    working: float
    """The share of its time, as all of these; its turn was another's counts as working."""
    backpressured: float
    held: float
    records_in_per_second: float


@dataclass(frozen=True, slots=True)
class TaskNow:
    name: str
    subtasks: tuple[SubtaskNow, ...]
    inputs: tuple[int, ...] = ()
    """The tasks that send to it, by their numbers."""


@dataclass(frozen=True, slots=True)
class CheckpointWaits:
    """A checkpoint under way, and a subtask that has not done its part."""

    checkpoint_id: CheckpointId
    seconds: float
    task: str
    subtask: SubtaskIndex
    what: str
    senders: str | None = None
    """Of the barriers that it waits for, as far as slots have told."""


@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    seconds: float
    background_seconds: float
    """Of its slowest subtask, in which files were written."""


@dataclass(frozen=True, slots=True)
class SlotMemory:
    slot: SlotIndex
    host: str
    used_bytes: int
    left_bytes: int
    """Of what its machine, or its container, has for all that runs there."""
    limit_bytes: int


@dataclass(slots=True)
class EventTimeSeen:
    """How event time has come on in an attempt, report after report."""

    _watermark_us: int | None = None
    _since_seconds: float = 0.0
    _records: int = 0
    _came_at_seconds: float = float("-inf")
    _told_at_seconds: float = 0.0

    def on_report(self, watermark_us: int | None, records: int, now_seconds: float) -> None:
        """Of all slots together; `records`: that were read in the attempt so far."""
        if watermark_us != self._watermark_us:
            self._watermark_us, self._since_seconds = watermark_us, now_seconds
            self._came_at_seconds = float("-inf")
        elif records > self._records:
            self._came_at_seconds = now_seconds
        self._records, self._told_at_seconds = records, now_seconds

    @property
    def still_seconds(self) -> float | None:
        """For how long it has not moved although records come; None: it moves, or none come."""
        comes = self._told_at_seconds - self._came_at_seconds <= _COMES_SECONDS
        if self._watermark_us is None or not comes:
            return None
        return self._came_at_seconds - self._since_seconds


@dataclass(frozen=True, slots=True)
class JobNow:
    """All that the sentence is made from."""

    state: str
    """Flink's word; `NO DRIVER` where only files tell of it."""
    reason: str = ""
    """Of a job that failed or restarts."""
    stuck: Sequence[str] = ()
    """Calls of the user's code that do not return, a sentence each."""
    waiting: Sequence[str] = ()
    """What is not there that the job needs, a sentence each."""
    failed_in_a_row: int = 0
    last_failure: str = ""
    checkpoint: CheckpointWaits | None = None
    last: LastCheckpoint | None = None
    tasks: Sequence[TaskNow] = ()
    lags: Sequence[int] = ()
    """How many records sources were behind, oldest first, some seconds apart."""
    still_seconds: float | None = None
    """For how long event time has not moved although records came."""
    furthest_behind: tuple[str, SubtaskIndex] | None = None
    """The task and its subtask that read what is oldest by event time."""
    memory: Sequence[SlotMemory] = ()
    clocks: Mapping[SlotIndex, float] = field(default_factory=dict)
    """By how many seconds the driver's clock is ahead of that of each slot."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    code: Code
    sentence: str
    arguments: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def is_fine(self) -> bool:
        return self.code in ("keeps-up", "starting", "ended")


def diagnose(job: JobNow) -> Diagnosis:
    return next(_all_of(job))


def _all_of(job: JobNow) -> Iterator[Diagnosis]:
    yield from _of_state(job)
    yield from _of_troubles(job)
    yield from _of_checkpoints(job)
    yield from _of_speed(job)
    yield from _of_machines(job)
    yield Diagnosis("keeps-up", "It keeps up with its sources.")


def _of_state(job: JobNow) -> Iterator[Diagnosis]:
    match job.state:
        case "NO DRIVER":
            yield Diagnosis("no-driver", "No driver runs it: this is what the last one left.")
        case "FAILED":
            yield Diagnosis("given-up", f"It has failed: {job.reason}", {"reason": job.reason})
        case "FINISHED" | "CANCELED":
            yield Diagnosis("ended", "It has ended.")
        case "RESTARTING":
            yield Diagnosis("restarting", f"It restarts: {job.reason}", {"reason": job.reason})
        case "INITIALIZING" if not job.waiting:
            yield Diagnosis("starting", "It is starting: its slots are not all there yet.")


def _of_troubles(job: JobNow) -> Iterator[Diagnosis]:
    for said in job.stuck:
        yield Diagnosis("stuck", f"{_capital(said)}.", {"what": said})
    for said in job.waiting:
        yield Diagnosis("waiting", f"{_capital(said)}.", {"what": said})


def _of_checkpoints(job: JobNow) -> Iterator[Diagnosis]:
    if job.failed_in_a_row >= _FAILED_IN_A_ROW:
        yield Diagnosis(
            "checkpoints-failing",
            f"The last {job.failed_in_a_row} checkpoints failed, the last one because"
            f" {job.last_failure}",
            {"count": job.failed_in_a_row, "reason": job.last_failure},
        )
    waits = job.checkpoint
    if waits is not None and waits.seconds >= _WAITS_SECONDS:
        what = waits.what if waits.senders is None else f"it waits for barriers of {waits.senders}"
        yield Diagnosis(
            "checkpoint-waits",
            f"Checkpoint {waits.checkpoint_id} waits for {waits.task} {waits.subtask} since"
            f" {waits.seconds:.0f} s: {what}.",
            {
                "checkpoint": waits.checkpoint_id,
                "task": waits.task,
                "subtask": waits.subtask,
                "seconds": round(waits.seconds),
                **({"what": what} if waits.senders is None else {"senders": waits.senders}),
            },
        )
    last = job.last
    if last is not None and last.background_seconds >= max(
        _BACKGROUND_SECONDS, _BACKGROUND_SHARE * last.seconds
    ):
        yield Diagnosis(
            "storage-slow",
            f"Writing takes {last.background_seconds:.1f} s of the {last.seconds:.1f} s of a"
            " checkpoint: the storage is slow.",
            {"background": round(last.background_seconds, 1), "seconds": round(last.seconds, 1)},
        )


def _of_speed(job: JobNow) -> Iterator[Diagnosis]:
    yield from _bottleneck(job.tasks)
    if len(job.lags) >= 3 and all(before < after for before, after in pairwise(job.lags)):
        yield Diagnosis(
            "lag-grows",
            f"More comes than it reads: {job.lags[-1]:,} records wait, {job.lags[0]:,} before.",
            {"records": job.lags[-1], "before": job.lags[0]},
        )
    if job.still_seconds is not None and job.still_seconds >= _STILL_SECONDS:
        behind = job.furthest_behind
        who = "a source" if behind is None else f"{behind[0]} {behind[1]}"
        yield Diagnosis(
            "time-stands-still",
            f"Event time has not moved for {job.still_seconds:.0f} s although records come: {who},"
            " or one of its splits, gives nothing newer.",
            {
                "seconds": round(job.still_seconds),
                **({} if behind is None else {"task": behind[0], "subtask": behind[1]}),
            },
        )
    for task in job.tasks:
        yield from _skew(task)


def _bottleneck(tasks: Sequence[TaskNow]) -> Iterator[Diagnosis]:
    """The subtask that works most of those that others wait for, and that waits for nobody.

    Who is blocked is not the cause: it is the one behind.
    """
    busy = [
        (subtask.working, task, subtask, _waits_for(task, tasks))
        for task in tasks
        for subtask in task.subtasks
        if subtask.working >= _BUSY_SHARE and subtask.backpressured < _FELT_SHARE
    ]
    busy = [each for each in busy if each[3]]
    if busy:
        working, task, subtask, waiting = max(busy, key=lambda each: each[0])
        yield Diagnosis(
            "bottleneck",
            f"{task.name} {subtask.subtask} is the bottleneck: it works {working:.0%} of the time,"
            f" and {waiting[0].name} waits for it.",
            {
                "task": task.name,
                "subtask": subtask.subtask,
                "working": round(working, 2),
                "waits": waiting[0].name,
            },
        )


def _waits_for(task: TaskNow, tasks: Sequence[TaskNow]) -> list[TaskNow]:
    """Those that send to it and have no room to."""
    return [
        tasks[number]
        for number in task.inputs
        if any(each.backpressured >= _FELT_SHARE for each in tasks[number].subtasks)
    ]


def _skew(task: TaskNow) -> Iterator[Diagnosis]:
    if len(task.subtasks) < 2:
        return
    most = max(task.subtasks, key=lambda each: each.records_in_per_second)
    usual = median(each.records_in_per_second for each in task.subtasks if each is not most)
    rate = most.records_in_per_second
    is_felt = rate >= _SKEW_RATE_MIN and most.working >= _SKEW_WORKING_SHARE
    if is_felt and rate > _SKEW_TIMES * usual:
        yield Diagnosis(
            "skew",
            f"{task.name} {most.subtask} gets {rate:,.0f} records a second, the others about"
            f" {usual:,.0f}: its keys are more frequent.",
            {
                "task": task.name,
                "subtask": most.subtask,
                "rate": round(rate),
                "usual": round(usual),
            },
        )


def _of_machines(job: JobNow) -> Iterator[Diagnosis]:
    for each in sorted(job.memory, key=lambda each: each.left_bytes):
        if each.left_bytes < _MEMORY_LEFT_SHARE * each.limit_bytes:
            used, left = round(each.used_bytes / 1e6), round(each.left_bytes / 1e6)
            yield Diagnosis(
                "memory",
                f"Memory is short on {each.host}: slot {each.slot} takes {used:,} MB there, and"
                f" {left:,} MB are left. Give it more, or keep less in it: a higher parallelism, or"
                " stateBackend=rocksdb.",
                {"host": each.host, "slot": each.slot, "used": used, "left": left},
            )
    if job.clocks:
        slot, ahead = max(job.clocks.items(), key=lambda each: abs(each[1]))
        if abs(ahead) >= _CLOCKS_SECONDS:
            yield Diagnosis(
                "clocks-differ",
                f"The clocks of slot {slot} and of the driver differ by {abs(ahead):.1f} s: delays"
                " of barriers and lags are wrong by as much.",
                {"slot": slot, "seconds": round(abs(ahead), 1)},
            )


def subtask_now(earlier: SubtaskMeasures, later: SubtaskMeasures) -> SubtaskNow | None:
    """What it did between two reports; None: there was no time between them."""
    spent = later.shares.since(earlier.shares)
    if spent.total <= 0:
        return None
    return SubtaskNow(
        later.subtask,
        (spent.working + spent.turn) / spent.total,
        spent.backpressured / spent.total,
        spent.held / spent.total,
        (later.records_in - earlier.records_in) / (spent.total / 1e9),
    )


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:].split("\n")[0].rstrip(".")
