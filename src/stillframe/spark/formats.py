"""The formats that `readStream` and `writeStream` know, and the options of each."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from stillframe.api.sources import Source
from stillframe.config import nearest_of, parse_duration_seconds, parse_flag, refuse_unknown
from stillframe.connectors.files import FileSource, Following, local_path
from stillframe.connectors.generate import (
    ClickSource,
    RateSource,
    clicks_from_options,
    rate_from_options,
)
from stillframe.connectors.json_lines import JSON_OPTIONS, json_from_options
from stillframe.connectors.parquet import ParquetSource
from stillframe.connectors.socket import SocketSource, socket_from_options
from stillframe.errors import BuildError

Options = Mapping[str, str]
"""What the user gave, spelled as they like: names are found without regard to case."""


_FILE_OPTIONS = ("path", "followInterval", "maxFileAge", "recursiveFileLookup")


@dataclass(frozen=True, slots=True)
class _FileFormat:
    name: str
    make: Callable[[str, pa.Schema, Following, Options], FileSource]
    own_options: tuple[str, ...] = ()

    def source(self, options: Options, schema: pa.Schema | None) -> Source:
        known = (*_FILE_OPTIONS, *self.own_options)
        refuse_unknown(options, known, f"the source {self.name}")
        path = option_value(options, "path")
        if path is None:
            raise BuildError(f"the source {self.name} has no path: give one to load(...)")
        if schema is None:
            raise BuildError(
                "Schema must be specified when creating a streaming source DataFrame: say"
                ' .schema("app_id string, at timestamp"), or take the one of a DataFrame,'
                f" .schema(spark.read.{self.name}({path!r}).schema)"
            )
        _refuse_missing(path)
        recursive = option_value(options, "recursiveFileLookup") or "false"
        return self.make(path, schema, _following(options), options).listing(
            is_recursive=parse_flag("recursiveFileLookup", recursive)
        )


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
    "parquet": _FileFormat("parquet", lambda *asked: ParquetSource(*asked[:3])),
    "json": _FileFormat("json", json_from_options, JSON_OPTIONS),
    "clicks": _GeneratorFormat("clicks", clicks_from_options),
    "rate": _GeneratorFormat("rate", rate_from_options),
    "socket": _GeneratorFormat("socket", socket_from_options),
}

SINK_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "parquet": ("path",),
    "json": ("path",),
    "memory": ("maxRows",),
    "console": ("numRows", "truncate"),
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
    nearest = nearest_of(name.lower(), names)
    hint = "; there" if nearest is None else f", did you mean {nearest!r}? There"
    raise BuildError(
        f"{of} has no format {name!r}{hint} are {', '.join(names)};"
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
    """Whether this source always has more to come, so that a job cannot read all there is."""
    match source:
        case ClickSource(records=None) | RateSource(rows=None):
            return True
        case SocketSource():
            return True
        case _:
            return False


def _following(options: Options) -> Following:
    usual = Following()
    interval, age = option_value(options, "followInterval"), option_value(options, "maxFileAge")
    seconds = usual.interval_seconds
    if interval is not None:
        seconds = parse_duration_seconds("followInterval", interval)
    if seconds <= 0:
        raise BuildError(
            f"option followInterval is {interval!r}, which leaves no pause between two listings:"
            " give a duration such as '1 second'"
        )
    if age is None:
        return Following(seconds)
    return Following(seconds, parse_duration_seconds("maxFileAge", age))


def _refuse_missing(path: str) -> None:
    plain = local_path(path)
    if not glob.has_magic(plain) and not os.path.lexists(plain):
        raise BuildError(f"[PATH_NOT_FOUND] Path does not exist: {path}; check its spelling")
