"""The environments of the peers: one virtual environment each, made once, by package name.

Theory of operation
-------------------
An environment that is whole has a stamp, written as the last thing, that tells what was asked for.
One without it, or with another, was interrupted or is of another version, and is thrown away. Java
programs are compiled once for each state of their sources, into a directory that gets its name when
it is complete. Two commands at a time wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from stillframe.bench.processes import run_program
from stillframe.bench.trials import Engine
from stillframe.errors import StillframeError

PROGRAMS = Path(__file__).with_name("programs")

_STAMP = "installed.json"
_INSTALL_SECONDS_MAX = 1800.0
_COMPILE_SECONDS_MAX = 300.0
FLINK_VERSION = "2.3.0"
BYTEWAX_VERSION = "0.21.1"
# Flink's wheel reads no Parquet: its format is a jar of its own and wants Hadoop's classes.
_PARQUET_JARS = {
    f"org.apache.flink:flink-sql-parquet:{FLINK_VERSION}": (
        "f30617f4a5a6d437750f155ff72178ab34439aec91df64d96621c260559ba5fd"
    ),
    "org.apache.hadoop:hadoop-client-api:3.4.1": (
        "a964d4daa054c9615bbafb4553efbb140fa7fb9ac6f358a24393f183a5703438"
    ),
    "org.apache.hadoop:hadoop-client-runtime:3.4.1": (
        "f6a800a159f918670db533606d33560d6c13b7e13f14eda493280ae33b9eeb2f"
    ),
    "commons-logging:commons-logging:1.2": (
        "daddea1ea0be0f56978ab3006b8ac92834afeefbd9b7e4e6316fca57df0fa636"
    ),
}
_FLINK_KAFKA_JARS = {
    "org.apache.flink:flink-sql-connector-kafka:5.0.0-2.2": (
        "5605c691d11a501382c383fecba37a7a552467da5ab7ba904ef5d6f3d62c5616"
    ),
}
# Nor does Spark's wheel read Kafka. Of this version it runs on PySpark 4.2 and 4.3.
_SPARK_KAFKA_JARS = {
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0": (
        "64539c45e5d39f7ddb747312c239f38f5208d08c1a0ddf7d70beb2fbd9373705"
    ),
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0": (
        "f2be3b76f9e6cbe63379d4e4e0dc14f59dbf056ae2ad16ff15ac108004c86767"
    ),
    "org.apache.kafka:kafka-clients:3.9.2": (
        "014b4ef36884478a932641818b080c36a8f8e2e92dc771e800c9d2694f4f83d8"
    ),
    "org.apache.commons:commons-pool2:2.13.1": (
        "f77a5060d6936a9144023584232f9de3f2248f1abfe156e9d31795f18770674f"
    ),
}
_JDBC_JARS = {
    "org.postgresql:postgresql:42.7.7": (
        "157963d60ae66d607e09466e8c0cdf8087e9cb20d0159899ffca96bca2528460"
    ),
    "com.mysql:mysql-connector-j:9.3.0": (
        "6c8e6692b521376d89bc5618c16cdeaf8c61854329f4fa25677ed08776c5bb76"
    ),
}
_FETCH_SECONDS_MAX = 600.0


class CannotInstall(StillframeError):
    """A peer is not to be had here, and why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with these packages."""

    name: str
    packages: tuple[str, ...]


def environments() -> dict[Engine, Environment]:
    flink = Environment("flink", (f"apache-flink=={FLINK_VERSION}",))
    # The same versions of what Spark shares with us; protobuf is for transformWithState.
    same = tuple(f"{name}=={version(name)}" for name in ("pyspark", "pandas", "pyarrow", "numpy"))
    spark = Environment("spark", (*same, "protobuf>=5,<7", "python-dateutil<3"))
    bytewax = Environment("bytewax", (f"bytewax=={BYTEWAX_VERSION}",))
    return {"flink": flink, "pyflink": flink, "spark": spark, "bytewax": bytewax}


def bench_home(environ: Mapping[str, str] | None = None) -> Path:
    """Where environments and inputs are kept from one command to the next."""
    environ = os.environ if environ is None else environ
    given = environ.get("STILLFRAME_BENCH_HOME")
    return Path(given) if given else Path.home() / ".cache" / "stillframe" / "bench"


def python_of(
    environment: Environment, home: Path, tell: Callable[[str], None] = lambda _: None
) -> Path:
    """The interpreter of an environment, which is made if it is not there. May raise."""
    place = home / environment.name
    python = place / "bin" / "python"
    with _alone(home, environment.name):
        if _stamp_of(place) != _wanted(environment):
            tell(f"installing {' '.join(environment.packages)} for {environment.name}")
            shutil.rmtree(place, ignore_errors=True)
            _install(environment, place, home / f"{environment.name}-install")
    return python


def _wanted(environment: Environment) -> dict[str, object]:
    # The interpreter too: an environment does not outlive the Python it was made with.
    return {"packages": list(environment.packages), "python": sys.version.split()[0]}


def _stamp_of(place: Path) -> object:
    try:
        stamp = json.loads((place / _STAMP).read_text())
        return {name: stamp[name] for name in ("packages", "python")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _install(environment: Environment, place: Path, log: Path) -> None:
    python = str(place / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "venv", str(place)], log, environment.name)
    _run([*pip, "install", "--no-input", *environment.packages], log, environment.name)
    frozen = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=False).stdout
    stamp = {**_wanted(environment), "installed": frozen.split("\n")}
    written = place / f"{_STAMP}.new"
    written.write_text(json.dumps(stamp, indent=1))
    written.rename(place / _STAMP)


def _run(
    command: Sequence[str], log: Path, name: str, seconds_max: float = _INSTALL_SECONDS_MAX
) -> None:
    errors = log.with_name(f"{log.name}.err")
    ended = run_program(
        command,
        directory=log.parent,
        output=log.with_name(f"{log.name}.out"),
        errors=errors,
        seconds_max=seconds_max,
    )
    if ended.is_too_late:
        raise CannotInstall(f"{name} was not installed within {seconds_max:g} s: {log}.out")
    if ended.exit_code != 0:
        raise CannotInstall(f"{name} cannot be installed: {_why(errors)} (see {errors})")


def _why(errors: Path) -> str:
    """The line in which pip says it, or else the last one."""
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    told = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (told or lines or ["it says nothing"])[-1][:300]


@contextmanager
def _alone(home: Path, name: str) -> Iterator[None]:
    home.mkdir(parents=True, exist_ok=True)
    with open(home / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- Java --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Jdk:
    """A Java with its compiler."""

    home: Path

    @property
    def java(self) -> Path:
        return self.home / "bin" / "java"

    @property
    def javac(self) -> Path:
        return self.home / "bin" / "javac"


def find_jdk(environ: Mapping[str, str] | None = None) -> Jdk | None:
    """That of JAVA_HOME, or else of PATH; None where neither has a compiler."""
    environ = os.environ if environ is None else environ
    if given := environ.get("JAVA_HOME"):
        found = Path(given) / "bin" / "javac"
        if found.is_file():
            return Jdk(Path(given))
    on_path = shutil.which("javac", path=environ.get("PATH", ""))
    # Links such as /usr/bin/javac lead to the home, where java is its neighbour.
    return Jdk(Path(on_path).resolve().parents[1]) if on_path else None


def flink_class_path(
    python: Path, jdk: Jdk, home: Path, tell: Callable[[str], None] = lambda _: None
) -> str:
    """The compiled programs, Flink itself out of its wheel, and connectors. May raise."""
    jars = _flink_jars(python)
    for name, more in (("Parquet", _PARQUET_JARS), ("Kafka", _FLINK_KAFKA_JARS)):
        try:
            jars += fetched(more, home / "flink-jars")
        except CannotInstall as error:
            tell(f"Flink goes without {name}: {error}")
    sources = sorted((PROGRAMS / "flink").glob("*.java"))
    if not sources:
        raise CannotInstall(f"there are no Java programs in {PROGRAMS / 'flink'}")
    with _alone(home, "flink-classes"):
        classes = compiled(sources, jars, jdk, home)
    return os.pathsep.join(map(str, (classes, *jars)))


def bring_spark_s_jars(home: Path, tell: Callable[[str], None] = lambda _: None) -> None:
    """Where its programs look for them: the jars of Spark's Kafka source, and JDBC's drivers."""
    for name, jars in (("Kafka", _SPARK_KAFKA_JARS), ("JDBC", _JDBC_JARS)):
        try:
            fetched(jars, home / f"spark-{name.lower()}-jars")
        except CannotInstall as error:
            tell(f"Spark goes without {name}: {error}")


def _flink_jars(python: Path) -> list[Path]:
    jars = sorted(python.parents[1].glob("lib/python*/site-packages/pyflink/lib/*.jar"))
    if not jars:
        raise CannotInstall(f"the package apache-flink below {python.parents[1]} has no jars")
    return jars


def fetched(jars: Mapping[str, str], directory: Path, mvn: str | None = None) -> list[Path]:
    """Jars by their Maven coordinates and SHA-256; those that are there are not asked for.

    Maven fetches them, from wherever it is set up to. May raise.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found = []
    for artifact, sha256 in jars.items():
        _, name, number = artifact.split(":")
        jar = directory / f"{name}-{number}.jar"
        if not jar.is_file():
            _fetch(artifact, sha256, jar, mvn or shutil.which("mvn"))
        found.append(jar)
    return found


def _fetch(artifact: str, sha256: str, jar: Path, mvn: str | None) -> None:
    if mvn is None:
        raise CannotInstall(f"{artifact} is fetched by Maven, and there is no mvn on PATH")
    with tempfile.TemporaryDirectory(dir=jar.parent) as scratch:
        copy = ["dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={scratch}"]
        log = jar.parents[1] / "maven"
        _run([mvn, "--quiet", "--batch-mode", *copy], log, artifact, _FETCH_SECONDS_MAX)
        copied = Path(scratch) / jar.name
        if not copied.is_file():
            raise CannotInstall(f"Maven said it had copied {artifact}, but there is no {jar.name}")
        if hashlib.sha256(copied.read_bytes()).hexdigest() != sha256:
            raise CannotInstall(f"{jar.name} is not the file it should be: its SHA-256 differs")
        copied.rename(jar)


def compiled(sources: Sequence[Path], jars: Sequence[Path], jdk: Jdk, home: Path) -> Path:
    """The directory of their classes, which is made if it is not there. May raise."""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join([str(jdk.javac), *(jar.name for jar in jars)]).encode())
    classes = home / f"flink-classes-{digest.hexdigest()[:16]}"
    if classes.is_dir():
        return classes
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        made = Path(scratch) / "classes"
        command = [str(jdk.javac), "-nowarn", "-cp", os.pathsep.join(map(str, jars))]
        _compile([*command, "-d", str(made), *map(str, sources)], home)
        made.rename(classes)
    return classes


def _compile(command: Sequence[str], home: Path) -> None:
    errors = home / "flink-classes.err"
    ended = run_program(
        command,
        directory=home,
        output=home / "flink-classes.out",
        errors=errors,
        seconds_max=_COMPILE_SECONDS_MAX,
    )
    if ended.exit_code != 0:
        said = errors.read_text(errors="replace").strip().splitlines() or ["it says nothing"]
        raise CannotInstall(f"the Java programs do not compile: {said[0][:300]} (see {errors})")
