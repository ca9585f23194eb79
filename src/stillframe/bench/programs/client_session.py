"""What the programs of bare clients have in common: processes that begin together, the result.

As many processes as the job beside it has slots, each with its share of the work. They begin when
all have their client and their rows; the time is from then to the end of the last.
"""

import glob
import json
import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress

import pyarrow.parquet as pq

_BATCH_ROWS = 65_536


def params_given():
    return json.loads(sys.argv[1])


def rows_of(params, part, columns=None):
    """The share of a process, as batches that are in memory."""
    return [
        batch
        for file in files_of(params, part)
        for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS, columns=columns)
    ]


def files_of(params, part):
    files = sorted(glob.glob(os.path.join(params["input"], "*.parquet")))
    return files[part :: params["parallelism"]]


class Cadence:
    """Says when it is time to commit."""

    def __init__(self, params):
        self._seconds = params["checkpoint_interval_ms"] / 1000
        self._committed_s = time.monotonic()

    def is_due(self):
        if time.monotonic() - self._committed_s < self._seconds:
            return False
        self._committed_s = time.monotonic()
        return True


def run_together(params, work):
    """`work` is called in each process, as `work(params, part, begin)`; it calls `begin()` when it
    is ready, and answers how many records it had. Answers all records, seconds and seconds of the
    processor."""
    processes, parallelism = multiprocessing.get_context("spawn"), params["parallelism"]
    barrier, told = processes.Barrier(parallelism + 1), processes.Queue()
    started = [
        processes.Process(target=_work, args=(work, params, part, barrier, told), daemon=True)
        for part in range(parallelism)
    ]
    for each in started:
        each.start()
    with suppress(threading.BrokenBarrierError):
        barrier.wait()
    began_s = time.monotonic()
    done = [told.get() for _ in started]
    for each in started:
        each.join()
    for failed in (each for each in done if isinstance(each, str)):
        raise SystemExit(failed)
    seconds = max(each[1] for each in done) - began_s
    return sum(each[0] for each in done), seconds, sum(each[2] for each in done)


def _work(work, params, part, barrier, told):
    began_s = [0.0]

    def begin():
        barrier.wait()
        began_s[0] = time.process_time()

    try:
        records = work(params, part, begin)
        told.put((records, time.monotonic(), time.process_time() - began_s[0]))
    except Exception as error:
        told.put(repr(error))
        barrier.abort()
        raise


def tell(params, version, done, there):
    """Everything must be there, or there is no result."""
    records, seconds, cpu_seconds = done
    if records != there:
        raise SystemExit(f"{records} records were counted, and there are {there}")
    result = {
        "engine": "client",
        "version": version,
        "variant": params["variant"],
        "workload": params["workload"],
        "records": records,
        "seconds": round(seconds, 3),
        "records_per_second": round(records / seconds),
        "cpu_seconds": round(cpu_seconds, 2),
    }
    print("RESULT " + json.dumps(result), flush=True)
