"""One sentence where Spark's internals are not what is read of them here.

Plans and expressions are read through py4j, and Spark promises nothing of their classes. Of a class
or a method that is not there py4j tells in pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError

import stillframe
from stillframe.errors import StartRefused

TRIED = "4.0 to 4.3"

_NO_CLASS = "'JavaPackage' object is not callable"
_NO_MEMBER = re.compile(r"(?:Method|Constructor) \S.* does not exist|\S+ does not exist in the JVM")
_NO_LINK = re.compile(
    r"java\.lang\.(?:NoSuchMethodError|NoSuchFieldError|NoClassDefFoundError"
    r"|AbstractMethodError|IncompatibleClassChangeError).*"
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
