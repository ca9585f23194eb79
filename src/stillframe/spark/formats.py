"""The formats that `readStream` and `writeStream` know, and the options of each."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from stillframe.api.sources import Source
from stillframe.config import parse_duration_seconds, refuse_unknown
from stillframe.connectors.files import FileSource, Following, local_path
from stillframe.connectors.generate import (
    ClickSource,
    RateSource,
    clicks_from_options,
    rate_from_options,
)
from stillframe.connectors.json_lines import JsonLinesSource
from stillframe.connectors.parquet import ParquetSource
from stillframe.connectors.socket import SocketSource, socket_from_options
from stillframe.errors import BuildError

Options = Mapping[str, str]
"""What the user gave, spelled as they like: names are found without regard to case."""


@dataclass(frozen=True, slots=True)
class _FileFormat:
    name: str
    make: Callable[[str, pa.Schema, Following | None], FileSource]

    def source(self, options: Options, schema: pa.Schema | None) -> Source:
        refuse_unknown(options, ["path", "followInterval", "maxFileAge"], f"the source {self.name}")
        path = option_value(options, "path")
        if path is None:
            raise BuildError(f"the source {self.name} has no path: give one to load(...)")
        if schema is None:
            raise BuildError(
                "Schema must be specified when creating a streaming source DataFrame: say"
                ' .schema("app_id string, at timestamp"), or take the one of a DataFrame,'
                f" .schema(spark.read.{self.name}({path!r}).schema)"
            )
        following = _following(options)
        _refuse_missing(path, may_come_later=following is not None)
        source = self.make(path, schema, following)
        source.check()
        return source


@dataclass(frozen=True, slots=True)
class _GeneratorFormat:
    name: str
    make: Callable[[Options], Source]

    def source(self, options: Options, schema: pa.Schema | None) -> Source:
        if schema is not None:
            raise BuildError(
                f"the source {self.name} has a schema of its own: leave .schema(...) out"
            )
        return self.make(options)


_SOURCE_FORMATS: Mapping[str, _FileFormat | _GeneratorFormat] = {
    "parquet": _FileFormat("parquet", ParquetSource),
    "json": _FileFormat("json", JsonLinesSource),
    "clicks": _GeneratorFormat("clicks", clicks_from_options),
    "rate": _GeneratorFormat("rate", rate_from_options),
    "socket": _GeneratorFormat("socket", socket_from_options),
}

SINK_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "parquet": ("path",),
    "json": ("path",),
    "memory": ("maxRows",),
    "noop": (),
}


def make_source(name: str, options: Options, schema: pa.Schema | None) -> Source:
    """The source that `readStream.format(name)` stands for."""
    return _SOURCE_FORMATS[known_source(name)].source(options, schema)


def known_source(name: str) -> str:
    return _known(name, _SOURCE_FORMATS, "readStream")


def known_sink(name: str) -> str:
    return _known(name, SINK_OPTIONS, "writeStream")


def _known(name: str, formats: Iterable[str], of: str) -> str:
    names = list(formats)
    if name.lower() in names:
        return name.lower()
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]
    raise BuildError(
        f"{of} has no format {name!r}, did you mean {nearest!r}? There are {', '.join(names)};"
        " for others, let Spark do it: still.stream(spark.read...) and foreachBatch(...)"
    )


def option_text(value: object) -> str:
    """An option's value as Spark spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def option_value(options: Options, name: str) -> str | None:
    """The value of an option; where it was given in two spellings, the later one."""
    found = [value for given, value in options.items() if given.lower() == name.lower()]
    return found[-1] if found else None


def is_unbounded(source: Source) -> bool:
    """Whether this source never ends."""
    match source:
        case ClickSource(records=None) | RateSource(rows=None) | FileSource(following=Following()):
            return True
        case SocketSource():
            return True
        case _:
            return False


def _following(options: Options) -> Following | None:
    interval, age = option_value(options, "followInterval"), option_value(options, "maxFileAge")
    if interval is None:
        if age is not None:
            raise BuildError(
                "option maxFileAge is of files that come later, which are read only with the"
                " option followInterval: give that too, such as '1 second'"
            )
        return None
    seconds = parse_duration_seconds("followInterval", interval)
    if seconds <= 0:
        raise BuildError(
            f"option followInterval is {interval!r}, which leaves no pause between two listings:"
            " give a duration such as '1 second'"
        )
    if age is None:
        return Following(seconds)
    return Following(seconds, parse_duration_seconds("maxFileAge", age))


def _refuse_missing(path: str, may_come_later: bool) -> None:
    plain = local_path(path)
    if may_come_later and glob.has_magic(plain):
        return
    if not os.path.lexists(plain) and not glob.glob(plain):
        raise BuildError(f"[PATH_NOT_FOUND] Path does not exist: {path}; check its spelling")
