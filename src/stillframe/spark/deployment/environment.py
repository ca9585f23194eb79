"""The surroundings of a Spark session that a command starts: which Java, which Python, how quiet.

Theory of operation
-------------------
A job file is an ordinary PySpark script: it makes its own session, and must not need to know that
a command runs it. So everything is said where PySpark looks by itself when it starts its JVM: the
environment, with PYSPARK_SUBMIT_ARGS for what would be an option of spark-submit.

Spark's log goes to a file. What the JVM and the Python workers print goes through our hands,
because some lines cannot be switched off (`WARNING: Using incubator modules` is Java's own).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.core import context as pyspark_context
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from stillframe.config import SESSION_PREFIX
from stillframe.spark.deployment.java import ensure_java

_LOG4J = """\
status = error
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {log}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{HH:mm:ss.SSS}} %p %c{{1}}: %m%n%ex
"""

_DEFAULTS = {
    "spark.ui.showConsoleProgress": "false",
    # Spark looks for free cores only this often, 15 s unless told, and a restart waits for it.
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
}

_LOCAL_DEFAULTS = {
    # The driver's own interpreter has what slots need: workers are forked with their imports done.
    "spark.python.daemon.module": "stillframe.spark.daemon",
}

_JVM_SECONDS_MAX = 15.0

_NOISE = re.compile(
    r"WARNING: (Using incubator modules|package sun\.|A restricted method|A terminally deprecated"
    r"|sun\.misc|java\.lang|Use --|Restricted methods|Please consider)"
    r"|Using Spark's default log4j|Setting default log level|To adjust logging level"
    r"|.*resolves to a loopback address|.*Set SPARK_LOCAL_IP|OpenJDK .* warning:"
    # What slots tell of their comings and goings: on a cluster it is in the executors' logs.
    r'|\d{4}-\d\d-\d\dT\S+Z INFO |\{"at": "[^"]*", "level": "INFO"'
)


def is_local_master(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def prepare_spark(master: str, conf: Mapping[str, str], logs: Path, *, is_verbose: bool) -> None:
    """Have the next session of this process start on `master`, with `conf` and without noise.

    `logs` is a directory, to which Spark's log goes; see `log_file`. With `is_verbose` Spark says
    all that it says by itself, where it says it by itself.
    """
    ensure_java()
    defaults = dict(_DEFAULTS)
    if is_local_master(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        if os.environ.setdefault("PYSPARK_PYTHON", sys.executable) == sys.executable:
            defaults |= _LOCAL_DEFAULTS
    arguments = ["--master", master]
    for name, value in {**defaults, **conf}.items():
        arguments += ["--conf", f"{name}={value}"]
    if not is_verbose:
        settings = logs / "log4j2.properties"
        settings.write_text(_LOG4J.format(log=log_file(logs)))
        arguments += ["--driver-java-options", f"-Dlog4j2.configurationFile={settings.as_uri()}"]
        # It prints every error that is raised as well, in JSON and with a page of Java.
        for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
            PySparkLogger.getLogger(name).disabled = True
    before = os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"{shlex.join(arguments)} {before}"


_LOCAL = re.compile(r"local(?:\[(\*|\d+)(,\d+)?\])?")
_MORE_THREADS_MIN = 8


def roomier(master: str, processors: int) -> tuple[str, int] | None:
    """A local master with threads for several jobs, and the cores of this one; None: it is none."""
    asked = _LOCAL.fullmatch(master.replace(" ", ""))
    if asked is None:
        return None
    cores = processors if asked[1] == "*" else int(asked[1] or 1)
    return f"local[{cores + max(_MORE_THREADS_MIN, 2 * cores)}{asked[2] or ''}]", max(1, cores)


def make_room_in_local_sessions() -> None:
    """Give the local sessions of this process more threads than their master says.

    A query of Spark's has no thread while it waits for rows, so `local[2]` is enough for any number
    of them. A job of ours has its slots for as long as it runs. A program that was written for
    Spark sets its master in a line of its own: it is changed where its context begins.
    """
    own = SparkContext._initialize_context

    def with_room(self: SparkContext, jconf: Any) -> Any:
        room = roomier(str(jconf.get("spark.master")), os.cpu_count() or 1)
        if room is not None:
            master, cores = room
            jconf.set("spark.master", master)
            # What goes by the number of threads stays what it would have been.
            jconf.setIfMissing("spark.default.parallelism", str(cores))
            jconf.setIfMissing(f"{SESSION_PREFIX}parallelism", str(max(1, cores - 2)))
        return own(self, jconf)

    SparkContext._initialize_context = with_room  # type: ignore[method-assign]


def log_file(logs: Path) -> Path:
    return logs / "spark.log"


def keep_jvm_output(logs: Path, *, pass_on: bool) -> None:
    """Catch what the JVM of the next session and its Python workers print.

    It goes to the log file; with `pass_on` only the noise does, and the rest, such as what a user's
    function prints, goes to our own stderr.
    """
    names = vars(pyspark_context)
    launch = names["launch_gateway"]

    def launch_quietly(conf: Any = None, popen_kwargs: Any = None) -> Any:
        with open(log_file(logs), "ab") as kept:
            target = _sifted(logs) if pass_on else kept
            try:
                wanted = {"stdout": target, "stderr": subprocess.STDOUT}
                return launch(conf, {**(popen_kwargs or {}), **wanted})
            finally:
                target.close()  # the JVM has its own by now

    # The parameter popen_kwargs is PySpark's own, made for this; only nobody else can reach it
    # between a user's getOrCreate() and the JVM.
    names["launch_gateway"] = launch_quietly


def _sifted(logs: Path) -> IO[bytes]:
    """The writing end of a pipe, whose lines a thread sorts into noise and the rest."""
    reading, writing = os.pipe()

    def sift() -> None:
        with os.fdopen(reading, "rb") as lines, open(log_file(logs), "ab") as kept:
            for line in lines:
                if _NOISE.match(line.decode(errors="replace")):
                    kept.write(line)
                    kept.flush()
                else:
                    sys.stderr.write(line.decode(errors="replace"))
                    sys.stderr.flush()

    threading.Thread(target=sift, name="stillframe-jvm-output", daemon=True).start()
    return os.fdopen(writing, "wb")


def open_session(name: str) -> SparkSession:
    """The session of this process, started if there is none."""
    return SparkSession.builder.appName(name).getOrCreate()


def jvm_pid() -> int | None:
    """The process of this process's JVM; None if it has not started one."""
    process = _jvm()
    return process.pid if process is not None and process.poll() is None else None


def end_spark() -> None:
    """Stop the session of this process, and with it the JVM; when this returns it has gone.

    A JVM does that by itself when its driver has, but a little later.
    """
    with suppress(Py4JError, OSError):
        if SparkContext._active_spark_context is not None:
            SparkContext._active_spark_context.stop()
    process = _jvm()
    if process is None:
        return
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    try:
        process.wait(_JVM_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _jvm() -> subprocess.Popen[bytes] | None:
    """None as well where somebody else has started it, as `spark-submit` does."""
    found: subprocess.Popen[bytes] | None = getattr(SparkContext._gateway, "proc", None)
    return found
