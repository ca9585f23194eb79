"""How long a barrier takes through a connection that is full: aligned, and overtaking.

    python bench/overtaking.py [--rounds 15] [--work-mb-per-second 0 100]

Two processes over loopback, one channel with a window of 4 MiB, filled until the sender has no room
and the receiver has its window full. Then a barrier is sent, and the receiver begins to take: as
fast as it can, or as fast as a task that needs a while for each batch. Measured is the time from
`send` or `overtake` until the receiver has taken or pulled the barrier.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe

import numpy as np
import pyarrow as pa

from stillframe.ids import Attempt, CheckpointId, SlotIndex
from stillframe.runtime.channels import InputChannel, OutputChannel
from stillframe.runtime.elements import Barrier, EndOfRecords
from stillframe.runtime.network import Network

WINDOW_BYTES = 4 * 1024 * 1024
LIMIT_SECONDS = 60.0
SENDER, RECEIVER = SlotIndex(0), SlotIndex(1)
BATCHES = {"64 KiB": 8 * 1024, "1 KiB": 128}


class Loop:
    """A slot's network and the waiting of its loop thread."""

    def __init__(self, slot: SlotIndex) -> None:
        self._woken = threading.Event()
        self.network = Network(
            job="bench", host="127.0.0.1", secret=b"for the benchmark only", attempt=Attempt(1),
            slot=slot, buffer_bytes_max=WINDOW_BYTES, wake=self._woken.set,
        )  # fmt: skip

    def wait_until(self, predicate: Callable[[], object]) -> None:
        while not predicate():
            assert self._woken.wait(LIMIT_SECONDS), "nothing happened in time"
            assert self.network.failure() is None, self.network.failure()
            self._woken.clear()


def receive(pipe: Pipe, work_mb_per_second: float) -> None:
    """For every 'full' from the sender: find the barrier, say when, and take all there is."""
    loop = Loop(RECEIVER)
    arriving = loop.network.input(SENDER, 1)
    pipe.send(loop.network.address)
    loop.network.connect({SENDER: loop.network.address}, LIMIT_SECONDS)
    while (kind := pipe.recv()) != "end":
        if kind == "aligned":
            pipe.send((take_up_to_marker(loop, arriving, work_mb_per_second), 0))
        else:
            loop.wait_until(arriving.waiting_barriers)
            pulled = len(arriving.pull(CheckpointId(1)))
            pipe.send((time.monotonic_ns(), pulled))
            take_up_to_marker(loop, arriving, 0.0)
    loop.network.close(LIMIT_SECONDS)


def take_up_to_marker(loop: Loop, arriving: InputChannel, work_mb_per_second: float) -> int:
    """When it came, in nanoseconds."""
    while True:
        loop.wait_until(lambda: not arriving.is_empty())
        element = arriving.take()
        if not isinstance(element, pa.RecordBatch):
            return time.monotonic_ns()
        if work_mb_per_second:
            done_at = time.perf_counter() + element.nbytes / (work_mb_per_second * 1e6)
            while time.perf_counter() < done_at:
                np.sort(element["n"].to_numpy())


def measure(rows: int, work_mb_per_second: float, rounds: int) -> dict[str, list[float]]:
    """Milliseconds, by what was measured."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=receive, args=(theirs, work_mb_per_second))
    process.start()
    loop = Loop(SENDER)
    output = loop.network.output(RECEIVER, 1)
    loop.network.connect({RECEIVER: ours.recv()}, LIMIT_SECONDS)
    batch = pa.record_batch({"n": np.random.default_rng(1).integers(0, 1_000, rows)})
    figures: dict[str, list[float]] = {"aligned": [], "overtaking": [], "overtake call": []}
    for _ in range(rounds):
        for kind in ("aligned", "overtaking"):
            fill(output, batch)
            ours.send(kind)
            sent_ns = time.monotonic_ns()
            if kind == "aligned":
                output.send(Barrier(CheckpointId(1), 0))
            else:
                overtaken = output.overtake(Barrier(CheckpointId(1), 0, 0))
                figures["overtake call"].append((time.monotonic_ns() - sent_ns) / 1e6)
            found_ns, pulled = ours.recv()
            figures[kind].append((found_ns - sent_ns) / 1e6)
            if kind == "overtaking":
                assert overtaken
                assert pulled
                output.send(EndOfRecords())  # so that the receiver knows where this round ends
            loop.wait_until(output.is_flushed)
    ours.send("end")
    loop.network.close(LIMIT_SECONDS)
    process.join(LIMIT_SECONDS)
    return figures


def fill(output: OutputChannel, batch: pa.RecordBatch) -> None:
    """Until nothing has moved for a while: both ends are full."""
    moved_at = time.perf_counter()
    while time.perf_counter() - moved_at < 0.1:
        time.sleep(0.001)
        while output.has_room():
            output.send(batch)
            moved_at = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--work-mb-per-second", type=float, nargs="*", default=[0, 100])
    arguments = parser.parse_args()
    print(f"{'batches of':12}{'receiver':>12}{'':16}{'median ms':>10}{'longest ms':>12}")
    for name, rows in BATCHES.items():
        for work in arguments.work_mb_per_second:
            speed = f"{work:g} MB/s" if work else "as it can"
            for kind, ms in measure(rows, work, arguments.rounds).items():
                median, longest = statistics.median(ms), max(ms)
                print(f"{name:12}{speed:>12}  {kind:14}{median:10.2f}{longest:12.2f}")


if __name__ == "__main__":
    main()
