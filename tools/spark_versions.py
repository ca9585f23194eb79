"""Runs the tests that lean on Spark's internals on each minor version of PySpark.

Each version has an environment of its own, which is made once, by package name, beside those of
the benchmarks' peers. Everything else in it has the versions that the project is pinned to.

    python tools/spark_versions.py -k windows

What is given goes to pytest. With STILLFRAME_SPARK=4.1 it is that version only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

from stillframe.bench.peers import Environment, bench_home, python_of

ROOT = Path(__file__).resolve().parents[1]

# The newest of each minor version; `make test` runs on the one after them.
VERSIONS = ("4.0.5", "4.1.4", "4.2.1")

# Plans of all kinds, Spark's evaluator, functions in Python, Spark's sources and sinks, and kills.
TESTS = (
    "tests/spark/programs",
    "tests/spark/test_whole_plans.py",
    "tests/spark/test_evaluator.py",
    "tests/spark/test_evaluator_plans.py",
    "tests/spark/test_spark_s_examples.py",
    "tests/spark/test_spooled_streams.py",
    "tests/spark/test_aggregate_functions.py",
    "tests/spark/test_combined.py",
    "tests/spark/test_data_sources.py",
    "tests/spark/test_listeners.py",
    "tests/spark/test_snapshots_as_frames.py",
    "tests/spark/test_refreshing.py",
    "tests/spark/test_program_kills.py",
    "tests/spark/soak_delta_by_spark.py",
)

# Sockets that older versions leave to the garbage collector are not ours to mend.
_ITS_OWN_LEFTOVERS = ("-W", "ignore::pytest.PytestUnraisableExceptionWarning")


def environment_of(spark: str) -> Environment:
    wanted = [Requirement(line) for line in requires("stillframe") or ()]
    names = [each.name for each in wanted if each.marker is None and each.name != "pyspark"]
    names += ["cryptography", "hypothesis", "protobuf", "pytest", "pytest-timeout"]
    packages = (f"pyspark=={spark}", *(f"{name}=={version(name)}" for name in names))
    return Environment(f"pyspark-{spark}", packages)


def main(arguments: list[str]) -> int:
    asked = os.environ.get("STILLFRAME_SPARK", "")
    failed = [spark for spark in VERSIONS if spark.startswith(asked) and _fails(spark, arguments)]
    if failed:
        print(f"Failed on PySpark {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


def _fails(spark: str, arguments: list[str]) -> bool:
    python = python_of(environment_of(spark), bench_home(), print)
    print(f"PySpark {spark}:", flush=True)
    options = ("-p", "no:cacheprovider", *_ITS_OWN_LEFTOVERS)
    command = [str(python), "-m", "pytest", *options, *TESTS, *arguments]
    paths = (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environ["PATH"] = os.pathsep.join((str(python.parent), environ["PATH"]))
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
