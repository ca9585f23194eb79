"""Environments are made once, by package name, and anew where one is not whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from stillframe.bench.peers import (
    CannotInstall,
    Environment,
    Jdk,
    bench_home,
    compiled,
    environments,
    fetched,
    find_jdk,
    python_of,
)


def wheel(directory: Path, version: str) -> None:
    """A package tiny-peer, as an index would offer it."""
    info = f"tiny_peer-{version}.dist-info"
    files = {
        "tiny_peer.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-peer\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    records = []
    for name, text in files.items():
        digest = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        records.append(f"{name},sha256={digest},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*records, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(directory / f"tiny_peer-{version}-py3-none-any.whl", "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages, the only one that pip knows."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    wheel(packages, "1.0")
    return packages


def version_in(python: Path) -> str:
    asked = [str(python), "-c", "import tiny_peer; print(tiny_peer.VERSION)"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_an_environment_is_made_once_and_anew_where_it_is_not_whole(index, tmp_path):
    home, told = tmp_path / "home", []
    first = Environment("tiny", ("tiny-peer==1.0",))
    place = home / "tiny"
    # What an interrupted install leaves: something, but no stamp.
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "left-behind").touch()

    python = python_of(first, home, told.append)

    assert version_in(python) == "1.0"
    assert told == ["installing tiny-peer==1.0 for tiny"]
    assert not (place / "bin" / "left-behind").exists()
    assert "tiny-peer==1.0" in json.loads((place / "installed.json").read_text())["installed"]

    # Whole: it is taken as it is, though the package is no longer to be had.
    shutil.rmtree(index)
    assert python_of(first, home, told.append) == python
    assert len(told) == 1

    # Another version is another environment.
    index.mkdir()
    wheel(index, "2.0")
    python_of(Environment("tiny", ("tiny-peer==2.0",)), home, told.append)
    assert version_in(python) == "2.0"

    # A stamp that cannot be read is none.
    (place / "installed.json").write_text("{")
    python_of(Environment("tiny", ("tiny-peer==2.0",)), home, told.append)
    assert len(told) == 3


@pytest.mark.slow
def test_a_package_that_does_not_exist_is_told_in_the_words_of_pip(index, tmp_path):
    nowhere = Environment("nowhere", ("a-peer-that-does-not-exist==1.0",))

    for _ in range(2):  # the second time as well: what was made of it is not taken for whole
        with pytest.raises(CannotInstall) as raised:
            python_of(nowhere, tmp_path / "home")

        assert "nowhere cannot be installed: No matching distribution found for" in str(
            raised.value
        )
        assert "a-peer-that-does-not-exist==1.0" in str(raised.value)


def test_spark_is_the_one_that_we_run_on():
    import importlib.metadata

    wanted = environments()

    assert f"pyspark=={importlib.metadata.version('pyspark')}" in wanted["spark"].packages
    assert wanted["flink"] == wanted["pyflink"]


def test_the_home_of_the_environments_can_be_said():
    assert bench_home({"STILLFRAME_BENCH_HOME": "/elsewhere"}) == Path("/elsewhere")
    assert bench_home({}) == Path.home() / ".cache" / "stillframe" / "bench"


# --- Java --------------------------------------------------------------------------------------


def fake_jdk(home: Path) -> Path:
    (home / "bin").mkdir(parents=True)
    for name in ("java", "javac"):
        (home / "bin" / name).touch(0o755)
    return home


def test_the_compiler_of_java_home_comes_before_that_of_the_path(tmp_path):
    home, other = fake_jdk(tmp_path / "home"), fake_jdk(tmp_path / "other")
    links = tmp_path / "links"
    links.mkdir()
    (links / "javac").symlink_to(other / "bin" / "javac")
    path = {"PATH": str(links)}

    assert find_jdk({"JAVA_HOME": str(home), **path}) == Jdk(home)
    assert find_jdk(path) == Jdk(other)
    assert find_jdk({"JAVA_HOME": str(tmp_path / "no-compiler"), **path}) == Jdk(other)
    assert find_jdk({"JAVA_HOME": str(tmp_path / "no-compiler"), "PATH": str(tmp_path)}) is None


@pytest.mark.slow
def test_java_is_compiled_once_for_each_state_of_its_sources(tmp_path):
    jdk = find_jdk()
    if jdk is None:
        pytest.skip("there is no Java compiler")
    source = tmp_path / "Tiny.java"
    source.write_text("class Tiny {}")

    classes = compiled([source], [], jdk, tmp_path)
    (classes / "seen").touch()

    assert (classes / "Tiny.class").is_file()
    assert compiled([source], [], jdk, tmp_path) == classes
    assert (classes / "seen").is_file()

    source.write_text("class Tiny { int more; }")
    assert compiled([source], [], jdk, tmp_path) != classes

    source.write_text("class Tiny { oops }")
    with pytest.raises(CannotInstall, match=r"do not compile: .*Tiny\.java:1: error"):
        compiled([source], [], jdk, tmp_path)
    assert len(list(tmp_path.glob("flink-classes-*"))) == 2


@pytest.fixture
def maven(tmp_path):
    """A stand-in: copies `repository/NAME` to where it is told, and says what it has not."""
    program = tmp_path / "mvn"
    program.write_text(
        f"""#!{sys.executable}
import pathlib, shutil, sys
given = dict(each[2:].split("=") for each in sys.argv if each.startswith("-D"))
name = "-".join(given["artifact"].split(":")[1:]) + ".jar"
if not pathlib.Path({str(tmp_path)!r}, "repository", name).exists():
    sys.exit(f"ERROR: could not find {{name}}")
shutil.copy(pathlib.Path({str(tmp_path)!r}, "repository", name), given["outputDirectory"])
"""
    )
    program.chmod(0o755)
    (tmp_path / "repository").mkdir()
    return str(program)


def test_a_jar_is_fetched_once_and_only_the_one_that_is_meant(tmp_path, maven):
    kept, directory = tmp_path / "repository" / "tiny-1.2.jar", tmp_path / "jars"
    kept.write_bytes(b"tiny")
    tiny = {"org.example:tiny:1.2": hashlib.sha256(b"tiny").hexdigest()}

    with pytest.raises(CannotInstall, match=r"tiny-1\.2\.jar is not the file it should be"):
        fetched({"org.example:tiny:1.2": "0" * 64}, directory, maven)
    (jar,) = fetched(tiny, directory, maven)
    kept.unlink()

    assert jar.read_bytes() == b"tiny"
    assert fetched(tiny, directory, maven) == [jar]
    assert list(directory.iterdir()) == [jar]
    with pytest.raises(CannotInstall, match=r"other:3 cannot be installed: could not find other"):
        fetched({"org.example:other:3": "0" * 64}, directory, maven)


def test_without_maven_it_is_said_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotInstall, match="there is no mvn on PATH"):
        fetched({"org.example:tiny:1.2": "0" * 64}, tmp_path)
