"""What becomes of an option of `spark.readStream` that our source has not: it is named.

Rules of this file
------------------
1. What only our reader cannot do, Spark's own does: it reads the leaf for us (`spooled_streams`).
2. What means nothing here, or to nobody, is left out with a warning, as Spark passes over it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from stillframe.errors import NotHonoured, UnknownOption
from stillframe.spark.stream import Stream

log = logging.getLogger("stillframe")

_SCHEMA_IS_THERE = "the schema is there already"
_NO_LIMIT = "there is no such limit here"
_WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(
        ("inferSchema", "preferDate", "samplingRatio", "primitivesAsString", "prefersDecimal",
         "inferTimestamp", "dropFieldIfAllNull", "mergeSchema"),
        _SCHEMA_IS_THERE,
    ),
    **dict.fromkeys(("maxColumns", "maxCharsPerColumn", "inputBufferSize"), _NO_LIMIT),
    **dict.fromkeys(
        ("compression", "codec"), "the end of a file's name says how it is compressed"
    ),
    "columnPruning": "it changes no row",
    "useUnsafeRow": "it changes no row",
    "ignoreInvalidPartitionPaths": "a directory that names no column is passed over",
}  # fmt: skip
_USUAL = {("enforceschema", "true"), ("multiline", "false")}
"""Those that Spark's reader knows by other values too, and ours by these alone."""
_OF_SPARK = (
    *("ignoreCorruptFiles", "ignoreMissingFiles", "ignoredPathSegmentRegex", "archivePathFilter"),
    *("basePath", "modifiedBefore", "modifiedAfter", "timeFormat", "timeZone"),
    *("explodeEmbeddedArray", "singleVariantColumn"),
    *("datetimeRebaseMode", "int96RebaseMode"),
)
"""Of files, that Spark's reader knows and ours does not."""
KNOWN = (*_WITHOUT_EFFECT, *_OF_SPARK)
"""What is known here, beside what a source itself names."""


def heeding(
    options: Mapping[str, str], of: str, load: Callable[[dict[str, str]], Stream]
) -> Stream:
    """What `load` makes of those of the options that mean something to the source `of`.

    Raises NotHonoured for one that only Spark's reader follows.
    """
    left = dict(options)
    for name, value in options.items():
        if (why := _of(name, _WITHOUT_EFFECT)) is not None:
            log.warning("option %s of the source %s has no effect: %s", name, of, why)
            del left[name]
        elif (name.lower(), value.lower()) in _USUAL:
            del left[name]
    while True:
        try:
            return load(left)
        except UnknownOption as error:
            if error.option not in left:
                raise
            if _is_among(error.option, _OF_SPARK):
                raise NotHonoured(f"option {error.option} is one of Spark's own reader") from None
            log.warning("option %s means nothing to the source %s: no effect", error.option, of)
            del left[error.option]


def _of(name: str, reasons: Mapping[str, str]) -> str | None:
    return next((why for each, why in reasons.items() if each.lower() == name.lower()), None)


def _is_among(name: str, names: Iterable[str]) -> bool:
    return name.lower() in (each.lower() for each in names)
