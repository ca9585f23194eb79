"""Bytewax on several processes, as `python -m bytewax.run` starts them, two jobs one after another.

Theory of operation
    The program is started once by the harness and starts itself again, once per process of the
    cluster, with the process's number as a second argument. Those workers take one job a line from
    their standard input (how many records, which addresses, where recovery is), run it with
    `cli_main` (what `bytewax.run` calls) and answer with one line on a pipe: when they began to
    read, when the dataflow had ended, how much was read, counted and written. Workers live through
    both jobs, so that the warm-up warms the processes that are measured.

    A job's time runs from the first read of any worker to the end of the last. The last epoch's
    snapshot is inside it.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.operators import StatefulBatchLogic
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.run import cli_main

Params = dict[str, Any]
SOURCE_BATCH = 10_000
_MASK = (1 << 64) - 1


def refuse(sentence: str) -> NoReturn:
    """End as the harness expects of a combination that cannot be done."""
    print(sentence, file=sys.stderr)
    sys.exit(3)


def splitmix64(number: int) -> int:
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Tally:
    """What one worker saw of one job."""

    def __init__(self) -> None:
        self.first_read_s = 0.0
        self.read = 0
        self.written = 0
        self.logics: list[Any] = []  # The logic of every key, with the count it has.


class CountLogic(StatefulBatchLogic[None, int, int]):
    """The count of one key; what is emitted of a batch, a program's own class says."""

    def __init__(self, resume: int | None, tally: Tally) -> None:
        self.count = resume or 0
        tally.logics.append(self)

    def snapshot(self) -> int:
        return self.count


class _Partition(StatefulSourcePartition[Any, int]):
    def __init__(self, table: list[Any], batch: int, records: int, done: int, tally: Tally) -> None:
        self._table, self._batch, self._records = table, batch, records
        self._done, self._tally = done, tally

    def next_batch(self) -> list[Any]:
        if self._tally.first_read_s == 0.0:
            self._tally.first_read_s = time.time()
        left = self._records - self._done
        if left == 0:
            raise StopIteration
        at = self._done % len(self._table)
        items = self._table[at : at + min(left, self._batch)]
        self._done += len(items)
        self._tally.read += len(items)
        return items

    def snapshot(self) -> int:
        return self._done


class TableSource(FixedPartitionedSource[Any, int]):
    """As many partitions as processes, each going round a table of records made beforehand.

    Making a record in Python would cost more than all the rest of the dataflow.
    """

    def __init__(
        self, partitions: int, table: list[Any], batch: int, records: int, tally: Tally
    ) -> None:
        self._partitions, self._records = partitions, records
        self._table, self._batch, self._tally = table, batch, tally

    def list_parts(self) -> list[str]:
        return [str(number) for number in range(self._partitions)]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> _Partition:
        share = self._records // self._partitions
        return _Partition(self._table, self._batch, share, resume_state or 0, self._tally)


def table_source(params: Params, table: list[Any], records: int, tally: Tally) -> TableSource:
    return TableSource(params["parallelism"], table, _source_batch(params), records, tally)


def _source_batch(params: Params) -> int:
    return int(params.get("source_batch") or SOURCE_BATCH)


class _DiscardingPartition(StatelessSinkPartition[Any]):
    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def write_batch(self, items: list[Any]) -> None:
        self._tally.written += len(items)


class DiscardingSink(DynamicSink[Any]):
    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def build(self, step_id: str, worker_index: int, worker_count: int) -> _DiscardingPartition:
        return _DiscardingPartition(self._tally)


FlowOf = Callable[[Params, int, Tally], Dataflow]


def _work(params: Params, process: int, flow_of: FlowOf) -> None:
    """Run the jobs that come in, one a line, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever is printed goes to standard error.
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        job = json.loads(line)
        tally = Tally()
        flow = flow_of(params, job["records"], tally)
        cpu_s = time.process_time()
        recovery = RecoveryConfig(Path(job["recovery"])) if job["recovery"] else None
        interval_ms = params["checkpoint_interval_ms"] or 10_000
        cli_main(
            flow,
            process_id=process,
            addresses=job["addresses"],
            epoch_interval=timedelta(milliseconds=interval_ms),
            recovery_config=recovery,
        )
        answer = {
            "first_read_s": tally.first_read_s,
            "ended_s": time.time(),
            "read": tally.read,
            "counted": sum(logic.count for logic in tally.logics),
            "written": tally.written,
            "cpu_s": time.process_time() - cpu_s,
            "memory_kb_max": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _free_addresses(count: int) -> list[str]:
    """Ports that are free now. All are held until all are found, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for held in sockets:
        held.close()
    return addresses


class _Cluster:
    def __init__(self, params: Params, program: str) -> None:
        self._params = params
        self._workers = [
            subprocess.Popen(
                [sys.executable, program, json.dumps(params), str(process)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for process in range(params["parallelism"])
        ]
        self._answers()  # They are up once they have said so.

    def _answers(self) -> list[dict[str, Any]]:
        lines = [worker.stdout.readline() for worker in self._workers if worker.stdout]
        if not all(lines):
            self.end()
            raise RuntimeError("A Bytewax process ended before its job did; see above.")
        return [json.loads(line) for line in lines]

    def run(self, name: str, records: int) -> dict[str, Any]:
        recovery = None
        if self._params["checkpoint_interval_ms"] is not None:
            recovery = os.path.join(self._params["directory"], name)
            os.mkdir(recovery)
            init_db_dir(Path(recovery), len(self._workers))
        addresses = _free_addresses(len(self._workers))
        job = json.dumps({"records": records, "recovery": recovery, "addresses": addresses})
        for worker in self._workers:
            assert worker.stdin
            worker.stdin.write(job + "\n")
            worker.stdin.flush()
        return _together(self._answers())

    def end(self) -> None:
        for worker in self._workers:
            assert worker.stdin
            worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(timeout=10)
            except subprocess.TimeoutExpired:
                worker.kill()


def _together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    read, counted = (sum(a[name] for a in answers) for name in ("read", "counted"))
    if read != counted:
        raise RuntimeError(f"Bytewax counted {counted} of the {read} records that it read.")
    return {
        "records": read,
        "counted": counted,
        "written": sum(a["written"] for a in answers),
        "seconds": max(a["ended_s"] for a in answers) - min(a["first_read_s"] for a in answers),
        "cpu_seconds": sum(a["cpu_s"] for a in answers),
    }


def run_program(params: Params, program: str, flow_of: FlowOf) -> None:
    """The whole program: the workers' side if it is one of them, else warm-up, job, result."""
    if len(sys.argv) > 2:
        _work(params, int(sys.argv[2]), flow_of)
        return
    began_s = time.time()
    cluster = _Cluster(params, program)
    startup_s = time.time() - began_s
    try:
        each = params["parallelism"]
        warm = cluster.run("warm-up", params["warmup_records"] // each * each)
        speed = warm["records"] / warm["seconds"]
        job = cluster.run("measured", int(speed * params["seconds"]) // each * each)
    finally:
        cluster.end()
    result = {
        "engine": "bytewax",
        "version": version("bytewax"),
        "variant": params["variant"],
        "workload": params["workload"],
        "startup_s": startup_s,
        "records_per_second": job["records"] / job["seconds"],
        "checkpoints": None,  # Bytewax says neither how many snapshots it made nor how long.
        "latency_ms": None,
        "settings": {
            "processes": params["parallelism"],
            "records per source batch": _source_batch(params),
            "recovery partitions": params["parallelism"],
        },
        **job,
    }
    print("RESULT " + json.dumps(result), flush=True)
