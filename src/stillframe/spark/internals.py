"""One sentence where Spark's internals are not what is read of them here.

Plans and expressions are read through py4j, and Spark promises nothing of their classes. Of a class
or a method that is not there py4j tells in pages. A version that cannot work at all is refused
before anything of it is imported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError

import stillframe
from stillframe.errors import StartRefused

_OLDEST, _NEWEST = (4, 0), (4, 3)
TRIED = f"{_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST[0]}.{_NEWEST[1]}"
log = logging.getLogger("stillframe")
_warned: set[str] = set()

_NO_CLASS = "'JavaPackage' object is not callable"
_NO_MEMBER = re.compile(r"(?:Method|Constructor) \S.* does not exist|\S+ does not exist in the JVM")
_NO_LINK = re.compile(
    r"java\.lang\.(?:NoSuchMethodError|NoSuchFieldError|NoClassDefFoundError"
    r"|AbstractMethodError|IncompatibleClassChangeError).*"
)


def refuse_other_versions(spark: str, what: str = "PySpark") -> None:
    """Raises StartRefused if Spark is too old; of one that is newer than was tried, warns once."""
    numbers = re.match(r"(\d+)\.(\d+)", spark)
    if numbers is None:
        return
    version = int(numbers[1]), int(numbers[2])
    if version < _OLDEST:
        raise StartRefused(
            f"{what} {spark} is too old for Stillframe {stillframe.__version__}: use PySpark"
            f" {TRIED}"
        )
    if version > _NEWEST and spark not in _warned:
        _warned.add(spark)
        log.warning(
            "%s %s is newer than what Stillframe %s was tried with, which is PySpark %s: if"
            " something of it is not as expected, the job is refused with a sentence",
            *(what, spark, stillframe.__version__, TRIED),
        )


@contextmanager
def as_known() -> Iterator[None]:
    """Raises StartRefused with both versions if something of Spark's is not there."""
    try:
        yield
    except (Py4JError, TypeError) as error:
        missing = _missing(error)
        if missing is None:
            raise
        raise StartRefused(
            f"PySpark {pyspark.__version__} is not as Stillframe {stillframe.__version__} knows it"
            f" ({missing}): use PySpark {TRIED}, or a newer Stillframe"
        ) from error


def _missing(error: Exception) -> str | None:
    """What is not there; None: it is another error."""
    said = str(error)
    if isinstance(error, TypeError):
        return "a class is not there" if said == _NO_CLASS else None
    if isinstance(error, Py4JNetworkError):
        return None
    found = (_NO_LINK if isinstance(error, Py4JJavaError) else _NO_MEMBER).search(said)
    return None if found is None else found[0]
