"""Spark's daemon of Python workers, which has imported already what a slot needs.

    SparkSession.builder.config("spark.python.daemon.module", "stillframe.spark.daemon")

Spark forks every Python worker from a daemon. Its own daemon imports next to nothing, so that each
new worker spends most of a second on imports, at the start of a job and at each recovery. Forked
from this one, a worker begins with its work.

Spark leaves that to the workers because some libraries start threads when they are imported, and a
fork has only the thread that forked. Those of numpy are not started here; pyarrow's one gives free
memory back to the system, and nothing waits for it.
"""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pandas  # noqa: F401 (pyarrow imports it with the first array it makes)
import pyarrow.compute  # noqa: F401
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import stillframe.spark.entry
import stillframe.spark.processor_programs  # noqa: F401

if __name__ == "__main__":
    gc.freeze()  # a collection in a worker would copy every page it looks at
    manager()
