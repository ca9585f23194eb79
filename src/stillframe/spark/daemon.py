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
import sys
from importlib import import_module
from importlib.machinery import PathFinder

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _prefer_compiled() -> None:
    """Look into Spark's own archives last, if they came with the PySpark that is installed.

    Spark puts them in front, and of modules in an archive Python keeps nothing compiled: most of a
    second at each start.
    """
    installed = PathFinder.find_spec("pyspark", [each for each in sys.path if os.path.isdir(each)])
    for home in (installed and installed.submodule_search_locations) or ():
        archives = [each for each in sys.path if each.startswith(os.path.join(home, "python", ""))]
        sys.path[:] = [each for each in sys.path if each not in archives] + archives


_prefer_compiled()
for _needed in (
    "pandas",  # pyarrow imports it with the first array it makes
    "pyarrow.compute",
    "pyarrow.parquet",
    "pyspark.worker",
    "stillframe.spark.deployment.entry",
    "stillframe.spark.processors.programs",
):
    import_module(_needed)

if __name__ == "__main__":
    from pyspark.daemon import manager

    gc.freeze()  # a collection in a worker would copy every page it looks at
    manager()
