"""How a program is started: the command line of each engine, and what it needs to be there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import stillframe
from stillframe.bench.peers import (
    PROGRAMS,
    CannotInstall,
    Environment,
    Jdk,
    bring_spark_s_jars,
    environments,
    find_jdk,
    flink_class_path,
    python_of,
)
from stillframe.bench.trials import Engine, Trial
from stillframe.spark.deployment.java import ensure_java

_FAMILIES = {
    "strings": "throughput",
    "integers": "throughput",
    "growth": "throughput",
    "kafka_counts": "kafka",
    "kafka_values": "kafka",
    "kafka_sink": "kafka",
    "postgres_sink": "sinks",
    "mysql_sink": "sinks",
    "s3_sink": "sinks",
    "json_counts": "language",
    "words": "language",
    "decimals": "language",
    "distinct": "language",
    "evaluated": "language",
}
"""Workloads that share a program; the others have one of their name."""
_OF_OURS = ("stillframe", "client")
"""Those that run in the environment of this command."""


class Engines:
    """Knows how to start each engine; what is missing is installed when it is first asked for."""

    def __init__(
        self,
        home: Path,
        tell: Callable[[str], None] = lambda _: None,
        *,
        environ: Mapping[str, str] | None = None,
        made_of: Mapping[Engine, Environment] | None = None,
        programs: Path = PROGRAMS,
    ) -> None:
        self._home = home
        self._tell = tell
        self._environ = dict(os.environ if environ is None else environ)
        self._made_of = environments() if made_of is None else made_of
        self._programs = programs
        self._jdk: Jdk | None = find_jdk(self._environ)
        self._class_path = ""
        self._pythons: dict[Engine, Path] = {}

    def prepare(self, engine: Engine) -> None:
        """Make sure that it can be started; raises CannotInstall with the reason otherwise."""
        if engine in _OF_OURS:
            return
        if engine == "flink" and self._jdk is None:
            raise CannotInstall(
                "Flink's programs are in Java and there is no Java compiler: install a JDK of"
                " version 17 and set JAVA_HOME, or have javac on PATH"
            )
        python = python_of(self._made_of[engine], self._home, self._tell)
        self._pythons[engine] = python
        if engine == "spark":
            bring_spark_s_jars(self._home, self._tell)
        if engine == "flink" and self._jdk is not None:
            self._class_path = flink_class_path(python, self._jdk, self._home, self._tell)

    def command(self, trial: Trial, params: Mapping[str, Any]) -> list[str]:
        """What runs this trial; its engine has been prepared."""
        given = json.dumps(params)
        if trial.engine == "flink":
            assert self._jdk is not None
            options = self._programs / "flink" / "java.options"
            flags = [f"@{options}"] if options.is_file() else []
            return [str(self._jdk.java), *flags, "-cp", self._class_path, "Bench", given]
        python = self._pythons.get(trial.engine, Path(sys.executable))
        return [str(python), str(self._program(trial)), given]

    def environ(self, engine: Engine) -> dict[str, str]:
        """Of its programs: the same Java for all engines, and no settings of somebody's shell."""
        environ = {
            name: value
            for name, value in self._environ.items()
            if not name.startswith(("SPARK_", "PYSPARK_", "FLINK_", "PYFLINK_", "PYTHONPATH"))
        }
        if self._jdk is not None:
            environ["JAVA_HOME"] = str(self._jdk.home)
        else:
            ensure_java(environ)
        environ["STILLFRAME_BENCH_HOME"] = str(self._home)
        if engine in _OF_OURS:
            # The one that is measured is the one whose command this is, installed or not.
            environ["PYTHONPATH"] = str(Path(stillframe.__file__).parents[1])
        return environ

    def _program(self, trial: Trial) -> Path:
        family = _FAMILIES.get(trial.workload, trial.workload)
        return self._programs / f"{trial.engine}_{family}.py"
