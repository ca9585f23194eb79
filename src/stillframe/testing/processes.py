"""Slots as plain processes on this machine: real kills and real sockets, without Spark."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from stillframe.errors import StillframeError
from stillframe.graph.launch import Deployment, RunningSlots, SlotLaunch
from stillframe.ids import SlotIndex

_HOST = "127.0.0.1"


class ProcessDeployment(Deployment):
    """Starts every slot as a child process."""

    def launch(self, launch: SlotLaunch, on_ended: Callable[[str | None], None]) -> RunningSlots:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["stillframe.runtime.slot"])
        processes = [
            context.Process(target=_run, args=(launch, SlotIndex(slot)), daemon=True)
            for slot in range(launch.plan.slots)
        ]
        for process in processes:
            process.start()
        running = _Processes(processes)
        threading.Thread(target=_wait, args=(processes, on_ended), daemon=True).start()
        return running


class _Processes(RunningSlots):
    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        self._processes = processes

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
    for process in processes:
        process.join()
    broken = [
        f"slot {slot} ended with exit code {process.exitcode}"
        for slot, process in enumerate(processes)
        if process.exitcode != 0
    ]
    on_ended("; ".join(broken) or None)
