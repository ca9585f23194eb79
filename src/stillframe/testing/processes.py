"""Slots as plain processes on this machine: real kills and real sockets, without Spark."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from stillframe.errors import StillframeError
from stillframe.graph.launch import Deployment, RunningSlots, SlotLaunch
from stillframe.ids import SlotIndex

_HOST = "127.0.0.1"
_OUTLIVE_SECONDS_MAX = 2.0
"""How long the others may run on when one has died; under Spark it is about as long."""


class ProcessDeployment(Deployment):
    """Every slot is a child process. As with a barrier stage, one that dies ends them all."""

    def launch(
        self, launch: SlotLaunch, on_ended: Callable[[str | None], None]
    ) -> RunningProcesses:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["stillframe.runtime.slot"])
        processes = [
            context.Process(target=_run, args=(launch, SlotIndex(slot)), daemon=True)
            for slot in range(launch.plan.slots)
        ]
        for process in processes:
            process.start()
        running = RunningProcesses(processes)
        threading.Thread(target=_wait, args=(processes, on_ended), daemon=True).start()
        return running


class RunningProcesses(RunningSlots):
    """The slots of one attempt, one process each."""

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        self._processes = processes

    @property
    def pids(self) -> tuple[int, ...]:
        """By slot."""
        return tuple(process.pid or 0 for process in self._processes)

    def cancel(self) -> None:
        for process in self._processes:
            process.kill()


def _run(launch: SlotLaunch, slot: SlotIndex) -> None:
    import os

    from stillframe.runtime.slot import run_slot

    try:
        run_slot(launch, slot, _HOST, os.getpid(), feed=None)
    except StillframeError:
        sys.exit(1)  # the coordinator has been told why


def _wait(processes: Sequence[BaseProcess], on_ended: Callable[[str | None], None]) -> None:
    first = _first_to_break(processes)
    if first is not None:
        _end_all(processes)
    on_ended(first)


def _first_to_break(processes: Sequence[BaseProcess]) -> str | None:
    """Wait until all have returned or one has not."""
    slots = {process.sentinel: slot for slot, process in enumerate(processes)}
    while slots:
        for sentinel in wait(list(slots)):
            assert isinstance(sentinel, int)
            slot = slots.pop(sentinel)
            processes[slot].join()
            if processes[slot].exitcode != 0:
                return f"slot {slot} ended with exit code {processes[slot].exitcode}"
    return None


def _end_all(processes: Sequence[BaseProcess]) -> None:
    deadline = time.monotonic() + _OUTLIVE_SECONDS_MAX
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
