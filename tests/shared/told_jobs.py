"""Jobs of a server whose figures a test makes up: no slot runs, all the rest is as it is.

For what would need a cluster: two hundred tasks, or barriers of 64 x 64 channels.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from served_jobs import ServingDriver

from stillframe.clock import SystemClock
from stillframe.config import job_config
from stillframe.coordinator.history import (
    AttemptStarted,
    CheckpointCompleted,
    History,
    SlotsRunning,
)
from stillframe.coordinator.job import Job
from stillframe.coordinator.query import Query
from stillframe.coordinator.running import DriverAddress
from stillframe.graph.logical import Aggregate
from stillframe.graph.plan import Edge, HashBy, Plan, PlannedOperator, Task
from stillframe.ids import (
    Attempt,
    CheckpointId,
    Epoch,
    OperatorUid,
    SlotIndex,
    SubtaskIndex,
)
from stillframe.protocol.failures import AttemptBegun
from stillframe.protocol.figures import Triggered
from stillframe.protocol.measures import (
    Aligning,
    ChannelMeasures,
    Latency,
    Measured,
    SubtaskMeasures,
    TimeShares,
)
from stillframe.protocol.messages import Progress, SourceLag
from stillframe.protocol.snapshots import SubtaskTimings
from stillframe.protocol.statistics import SlotPlace, TaskShape
from stillframe.rest import answers
from stillframe.testing.processes import ProcessDeployment

_TOLD_CLOSELY_MAX = 4
"""Tasks: of jobs with more, neither channels nor latencies are told."""


def plan_of(job: str, edges: Sequence[tuple[int, int]], tasks: int, parallelism: int) -> Plan:
    """Tasks without operators, joined like this."""
    made = [
        Edge(
            number, f"{source}-{target}", source, target, HashBy(("key",)), pa.schema([]),
            parallelism, parallelism, number * parallelism**2,
        )
        for number, (source, target) in enumerate(edges)
    ]  # fmt: skip
    into = {
        task: tuple(edge.index for edge in made if edge.target_task == task)
        for task in range(tasks)
    }
    named = [
        Task(task, f"task {task}", (_operator(task),), parallelism, into[task])
        for task in range(tasks)
    ]
    return Plan(job, tuple(named), tuple(made), 128)


def _operator(task: int) -> PlannedOperator:
    nothing = pa.schema([])
    return PlannedOperator(
        OperatorUid(f"task-{task}"), Aggregate(("key",), ()), nothing, nothing, (), ()
    )


@dataclass
class ToldJob:
    """A job that is RUNNING for everybody who asks."""

    query: Query
    history: History
    plan: Plan
    aligns: tuple[int, int] | None = None
    """A task and its subtask that waits for a barrier of edge 0-1."""

    @classmethod
    def of(cls, driver: ServingDriver, plan: Plan) -> ToldJob:
        job = Job(
            plan,
            job_config({}),
            ProcessDeployment(),
            DriverAddress("127.0.0.1"),
            SystemClock(),
        )
        query, history = Query(job), job.history
        driver.server.add(query)
        made = cls(query, history, plan)
        pids = tuple(range(10_000, 10_000 + plan.slots))
        history.note_begun(AttemptBegun(Attempt(1), _now_ms(), None), None)
        history.tell(AttemptStarted(Attempt(1), None, ()))
        places = [SlotPlace(SlotIndex(slot), "vm", pid) for slot, pid in enumerate(pids)]
        history.note_slots(places)
        history.tell(SlotsRunning(Attempt(1), pids))
        return made

    def measure(self, second: int) -> None:
        """A report of every slot; `second`: since the attempt began."""
        for slot in range(self.plan.slots):
            subtasks = tuple(
                self._measures(task.index, slot, second)
                for task in self.plan.tasks
                if slot < task.parallelism
            )
            at_ms = _now_ms()
            self.history.note_measures(SlotIndex(slot), Measured(at_ms, subtasks, 200_000_000, 1.0))

    def read(self, records: int, second: float, lag_records: int, lag_seconds: float) -> None:
        """What slot 0 tells of all sources."""
        lag = SourceLag(OperatorUid("task-0"), "clicks", lag_records, lag_seconds)
        watermark_us = (_now_ms() - 1_500) * 1_000
        progress = Progress(records, records, watermark_us=watermark_us, lags=(lag,))
        self.history.report_progress(SlotIndex(0), progress, second)

    def _measures(self, task: int, slot: int, second: int) -> SubtaskMeasures:
        working = int((0.1 + (task * 7 + slot * 3 + second) % 80 / 100) * 1e9)
        shares = TimeShares(working * second, 0, 0, 0, (10**9 - working) * second)
        records = second * (1_000 + 10 * task + slot + second % 7)
        return SubtaskMeasures(
            task, SubtaskIndex(slot), records, records, records * 60, records * 60, shares,
            _now_ms() * 1_000 - 1_000_000, 0, 1_000 * (second % 5), 1_000, 60_000,
            100 * slot if task == 0 else None, 20 * slot if task == 0 else None,
            aligning=Aligning(CheckpointId(9), 1, 2, _now_ms() - 3_000, (("0-1", SubtaskIndex(1)),))
            if (task, slot) == self.aligns else None,
            latency=tuple(
                Latency(source, (0, 0, second, 1, *(0,) * 16), 5 * second + 8)
                for source in self._sources_of(task)
            ),
            channels=tuple(
                ChannelMeasures(
                    self.plan.edges[edge].name, SubtaskIndex(source), records // 2, records * 30,
                    500 * source, bool(source),
                )
                for edge in self.plan.tasks[task].input_edges
                for source in range(self.plan.edges[edge].source_parallelism)
            ) if len(self.plan.tasks) <= _TOLD_CLOSELY_MAX else (),
        )  # fmt: skip

    def _sources_of(self, task: int) -> list[int]:
        """In a job with few tasks."""
        if len(self.plan.tasks) > _TOLD_CLOSELY_MAX:
            return []
        return [self.plan.edges[edge].source_task for edge in self.plan.tasks[task].input_edges]

    def checkpoint(self, number: int) -> list[tuple[float, str, int, str, int]]:
        """One whose barriers came by chance; who got which when, in the order in which they came.

        (milliseconds after the trigger, task, subtask, sender's task, its subtask)
        """
        channels = sum(edge.channels for edge in self.plan.edges)
        moments = random.Random(number).sample(range(50_000, 600_000), channels)
        checkpoint_id = CheckpointId(number)
        now = self.history.now()
        senders = {edge.name: self.plan.tasks[edge.source_task].name for edge in self.plan.edges}
        shapes = tuple(
            TaskShape(answers.task_vertex(task), task.name, task.parallelism)
            for task in self.plan.tasks
        )
        begun = Triggered(checkpoint_id, Attempt(1), "CHECKPOINT", shapes, now, senders)
        self.history.note_triggered(begun)
        came = []
        timings = []
        for task, shape in zip(self.plan.tasks, shapes, strict=True):
            for subtask in range(task.parallelism):
                arrivals = [
                    (self.plan.edges[edge].name, source, moments.pop() / 10_000)
                    for edge in task.input_edges
                    for source in range(self.plan.edges[edge].source_parallelism)
                ]
                arrivals.sort(key=lambda each: each[2])
                came += [
                    (ms, task.name, subtask, senders[edge], source) for edge, source, ms in arrivals
                ]
                timing = _timings(task.name, subtask, arrivals)
                timings.append(timing)
                place = self.history.places()[subtask]
                self.history.note_acknowledged(checkpoint_id, shape.vertex, timing, place)
        self.history.tell(
            CheckpointCompleted(
                checkpoint_id, Epoch(number), Attempt(1), now.wall_ms, 80.0, 1_000,
                tuple(timings), 0, 0,
            )
        )  # fmt: skip
        return sorted(came)


def _timings(task: str, subtask: int, arrivals: Sequence[tuple[str, int, float]]) -> SubtaskTimings:
    first, last = (arrivals[0][2], arrivals[-1][2]) if arrivals else (1.0, 1.0)
    return SubtaskTimings(
        task=task,
        subtask=SubtaskIndex(subtask),
        arrivals=tuple((edge, SubtaskIndex(source), ms) for edge, source, ms in arrivals),
        start_delay_ms=first,
        alignment_ms=last - first,
        sync_ms=1.0,
        async_ms=5.0,
        bytes_written=100,
        state_bytes=1_000,
        in_flight_bytes=0,
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
