"""Gathers what the one sentence about a job is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stillframe.coordinator.history import Event, Hanging, History, Waiting
from stillframe.graph.plan import Plan
from stillframe.ids import CheckpointId, SlotIndex, SubtaskIndex
from stillframe.protocol.checkpointing import CheckpointingStatistics
from stillframe.protocol.diagnosis import (
    CheckpointWaits,
    JobNow,
    LastCheckpoint,
    SlotMemory,
    SubtaskNow,
    TaskNow,
    subtask_now,
)
from stillframe.protocol.measures import Aligning, Measured
from stillframe.protocol.messages import doing_in_words
from stillframe.protocol.statistics import CheckpointStatistics

Spans = Mapping[SlotIndex, tuple[Measured, Measured]]
"""Of each slot two reports, some seconds apart."""
_SENDERS_SAID_MAX = 3
_CLOCK_REPORTS_MIN = 10


def job_now(
    state: str, reason: str, plan: Plan, history: History, told: CheckpointingStatistics
) -> JobNow:
    present = history.present()
    failed = _failed_in_a_row(told.history)
    return JobNow(
        state=state,
        reason=reason,
        stuck=_sentences(present, Hanging),
        waiting=_sentences(present, Waiting),
        failed_in_a_row=len(failed),
        last_failure=failed[0].failure or "" if failed else "",
        checkpoint=_waits(told.history, plan, history),
        last=_last(told.latest_completed),
        tasks=_tasks(plan, history.measured_lately()),
        lags=history.lags_lately(),
        still_seconds=history.still_seconds(),
        furthest_behind=_furthest_behind(plan, history),
        memory=_memory(history),
        clocks={
            slot: ms / 1000 for slot, ms in history.clock_offsets_ms(_CLOCK_REPORTS_MIN).items()
        },
    )


def _sentences(present: Sequence[Event], kind: type[Event]) -> list[str]:
    return [str(event) for event in present if isinstance(event, kind)]


def _failed_in_a_row(newest_first: Sequence[CheckpointStatistics]) -> list[CheckpointStatistics]:
    failed = []
    for each in newest_first:
        if each.status == "COMPLETED":
            break
        if each.status == "FAILED":
            failed.append(each)
    return failed


def _waits(
    newest_first: Sequence[CheckpointStatistics], plan: Plan, history: History
) -> CheckpointWaits | None:
    """Of the oldest that is under way: the first task in which somebody waits for a barrier, for
    those behind it wait because of it; otherwise the last in which somebody is missing."""
    under_way = [each for each in newest_first if each.status == "IN_PROGRESS"]
    if not under_way:
        return None
    oldest = under_way[-1]
    answered = {(part.vertex, part.index) for part in oldest.subtasks}
    missing = [
        (number, SubtaskIndex(index))
        for number, task in enumerate(oldest.tasks)
        for index in range(task.parallelism)
        if (task.vertex, index) not in answered
    ]
    if not missing:
        return None
    aligning = _aligning(history, oldest.checkpoint_id)
    last = next(place for place in missing if place[0] == missing[-1][0])
    number, subtask = next((place for place in missing if place in aligning), last)
    waits = aligning.get((number, subtask))
    return CheckpointWaits(
        oldest.checkpoint_id,
        oldest.end_to_end_ms / 1000,
        oldest.tasks[number].name,
        subtask,
        doing_in_words(history.doing(), number, subtask, oldest.checkpoint_id),
        None if waits is None else _senders(plan, waits),
    )


def _aligning(
    history: History, checkpoint_id: CheckpointId
) -> dict[tuple[int, SubtaskIndex], Aligning]:
    """Who waits for barriers of this checkpoint, as slots have told last."""
    return {
        (each.task, each.subtask): each.aligning
        for told in history.measured().values()
        for each in told.subtasks
        if each.aligning is not None and each.aligning.checkpoint == checkpoint_id
    }


def _senders(plan: Plan, waits: Aligning) -> str:
    """Whose barriers have not come."""
    tasks = {edge.name: plan.tasks[edge.source_task].name for edge in plan.edges}
    said = [f"{tasks.get(edge, edge)} {of}" for edge, of in waits.missing[:_SENDERS_SAID_MAX]]
    more = ["…"] if waits.channels - waits.arrived > len(said) else []
    return ", ".join(said + more)


def _last(last: CheckpointStatistics | None) -> LastCheckpoint | None:
    if last is None:
        return None
    slowest_ms = max((part.async_ms for part in last.subtasks), default=0.0)
    return LastCheckpoint(last.end_to_end_ms / 1000, slowest_ms / 1000)


def _tasks(plan: Plan, spans: Spans) -> list[TaskNow]:
    subtasks: dict[int, list[SubtaskNow]] = {}
    for earlier, later in spans.values():
        before = {(each.task, each.subtask): each for each in earlier.subtasks}
        for each in later.subtasks:
            first = before.get((each.task, each.subtask))
            now = None if first is None else subtask_now(first, each)
            if now is not None:
                subtasks.setdefault(each.task, []).append(now)
    return [
        TaskNow(
            task.name,
            tuple(sorted(subtasks.get(number, ()), key=lambda each: each.subtask)),
            tuple(plan.edges[edge].source_task for edge in task.input_edges),
        )
        for number, task in enumerate(plan.tasks)
    ]


def _furthest_behind(plan: Plan, history: History) -> tuple[str, SubtaskIndex] | None:
    """Of the sources, as their own tasks tell event time."""
    times = [
        (each.watermark_us, each.task, each.subtask)
        for told in history.measured().values()
        for each in told.subtasks
        if each.watermark_us is not None and not plan.tasks[each.task].input_edges
    ]
    if not times:
        return None
    _, task, subtask = min(times)
    return plan.tasks[task].name, subtask


def _memory(history: History) -> list[SlotMemory]:
    hosts = {place.slot: place.host for place in history.places()}
    return [
        SlotMemory(slot, hosts.get(slot, "its machine"), told.rss_bytes, *told.memory)
        for slot, told in history.measured().items()
        if told.memory is not None
    ]
