"""Which files a path means, and what the directories on the way to them say: by Spark's rules.

A directory means the files in it and not those further below, unless it is read recursively or some
of the directories below are called `key=value`. Then the files below these are meant, and no
others, and each key is a column of theirs: a partition column.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pyarrow as pa

from stillframe.errors import BuildError
from stillframe.storage.places import FileFacts, Place, is_on_disk, place_of
from stillframe.zones import zone_of

_NULL = "__HIVE_DEFAULT_PARTITION__"

Partitions = tuple[tuple[str, str], ...]
"""Keys and values as directories have them, the outermost first."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file, and the partition columns of its rows."""

    path: str
    partitions: Partitions = ()
    facts: FileFacts | None = field(default=None, compare=False)
    """None of one that cannot be looked at."""


def files_at(
    path: str, is_recursive: bool, settings: Mapping[str, str] | None = None
) -> list[FoundFile]:
    """The files meant by an address or pattern, in order; none if there are none."""
    place = place_of(path, settings)
    return [
        file
        for root in _roots(place, path)
        for file in _files_under(place, root, is_recursive=is_recursive)
    ]


def has_magic(path: str) -> bool:
    """Whether it is a pattern, if there is nothing of exactly this name."""
    return glob.has_magic(path)


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a name fits a glob of Hadoop's, which knows `{a,b}` besides `*`, `?` and `[a-z]`."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    texts = [""]
    for at, part in enumerate(parts):
        choices = part.split(",") if at % 2 else [part]
        texts = [text + choice for text in texts for choice in choices]
    globs = [text.replace("[^", "[!") for text in texts]
    return lambda name: any(fnmatch.fnmatchcase(name, each) for each in globs)


def _roots(place: Place, path: str) -> list[str]:
    """The files and directories that an address or pattern names."""
    if is_on_disk(path):
        if os.path.lexists(path):
            return [path]
        return [match for match in sorted(glob.glob(path)) if not _hidden(os.path.basename(match))]
    if not has_magic(path) or place.facts(path) is not None:
        return [path]
    parts = path.split("/")
    fixed = next(at for at, part in enumerate(parts) if glob.has_magic(part))
    below = place.walk("/".join(parts[:fixed]), _hidden)
    found = {"/".join(file.path.split("/")[: len(parts)]) for file in below}
    return sorted(
        each
        for each in found
        if each.count("/") == len(parts) - 1
        and all(map(fnmatch.fnmatchcase, each.split("/"), parts))
    )


def _files_under(place: Place, root: str, *, is_recursive: bool) -> list[FoundFile]:
    if not place.has_directory(root):
        facts = place.facts(root)
        return [FoundFile(root, facts=facts)] if facts or is_on_disk(root) else []
    files: dict[str, list[FileFacts]] = {}
    for facts in place.walk(root, _hidden):
        files.setdefault(os.path.dirname(facts.path), []).append(facts)
    found = {directory: Partitions() for directory in files}
    if not is_recursive:
        found = _partitioned(root, files)
    return sorted(
        (
            FoundFile(facts.path, partitions, facts)
            for directory, partitions in found.items()
            for facts in files[directory]
        ),
        key=lambda file: file.path,
    )


def _hidden(name: str) -> bool:
    """What Spark does not read either: work files, markers, copies under way."""
    is_marked = name.startswith("_") and "=" not in name
    return is_marked or name.startswith(".") or name.endswith("._COPYING_")


def _partitioned(root: str, directories: Iterable[str]) -> dict[str, Partitions]:
    """Those of these directories whose files are meant, with what their names say."""
    bases: dict[str, str] = {}
    found: dict[str, Partitions] = {}
    for directory in directories:
        partitions, base = _partitions_of(directory, root)
        bases[base] = directory
        if partitions:
            found[directory] = partitions
    if not found:
        return {directory: () for directory in directories if directory == root}
    if len(bases) > 1:
        raise BuildError(
            "Conflicting directory structures detected: there are files in partition directories"
            f" and beside them, such as in {' and '.join(sorted(bases.values())[:2])}; move them,"
            " or set recursiveFileLookup to read all without partition columns"
        )
    keys = {tuple(key.lower() for key, _ in each): directory for directory, each in found.items()}
    if len(keys) > 1:
        raise BuildError(
            "Conflicting partition column names detected, such as in"
            f" {' and '.join(sorted(keys.values())[:2])}: give all partition directories the same"
            " keys in the same order"
        )
    return found


def _partitions_of(directory: str, root: str) -> tuple[Partitions, str]:
    """The columns of a directory, and the one that they begin below; itself, if it has none."""
    columns: list[tuple[str, str]] = []
    base = directory
    while base != root:
        key, is_column, value = os.path.basename(base).partition("=")
        if columns and not is_column:
            break
        if is_column:
            columns.append(_column(key, value, base))
        base = os.path.dirname(base)
    return tuple(reversed(columns)), base if columns else directory


def _column(key: str, value: str, directory: str) -> tuple[str, str]:
    if not key or not value:
        what = "name" if not key else "value"
        raise BuildError(
            f"Found an empty partition column {what} in the path segment"
            f" {os.path.basename(directory)!r} of {directory}: rename the directory"
        )
    return _unescaped(key), _unescaped(value)


def _unescaped(text: str) -> str:
    return re.sub("%([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), text)


# --- what partition columns are worth ---


def declared_partitions(file: FoundFile, schema: pa.Schema, zone: str) -> dict[str, str | None]:
    """The text of each partition column of a file, times in UTC; raises for what does not fit."""
    by_lower = {name.lower(): name for name in schema.names}
    texts: dict[str, str | None] = {}
    for key, value in file.partitions:
        name = key if key in schema.names else by_lower.get(key.lower())
        if name is None:
            raise BuildError(
                f"the directory {key}={value} on the way to {file.path} is a partition column"
                f" {key}, which is not declared: add it to .schema(...) and start the job again, or"
                " set recursiveFileLookup to read all without partition columns"
            )
        type_ = schema.field(name).type
        try:
            texts[name] = None if value == _NULL else _in_utc(value, type_, zone)
            partition_value(texts[name], type_)
        except pa.ArrowException as error:
            raise BuildError(
                f"{key}={value} on the way to {file.path} is no {type_}, as which column {name} is"
                " declared: correct the schema or the directory"
            ) from error
    return texts


def _in_utc(text: str, type_: pa.DataType, zone: str) -> str:
    if not pa.types.is_timestamp(type_) or type_.tz is None:
        return text
    try:
        local = pa.scalar(text).cast(pa.timestamp("us")).as_py()
    except pa.ArrowInvalid:
        return text  # it says its zone
    moment: datetime = local.replace(tzinfo=zone_of(zone)).astimezone(UTC)
    return moment.replace(tzinfo=None).isoformat(" ")


def partition_value(text: str | None, type_: pa.DataType) -> pa.Scalar:
    """The value of a partition column; a time without a zone is in UTC."""
    if text is not None and pa.types.is_timestamp(type_) and type_.tz is not None:
        try:
            return pa.scalar(text).cast(pa.timestamp("us")).cast(type_)
        except pa.ArrowInvalid:
            pass
    return pa.scalar(text, pa.string()).cast(type_)


def with_partitions(
    batch: pa.RecordBatch, schema: pa.Schema, texts: Sequence[tuple[str, str | None]]
) -> pa.RecordBatch:
    """The batch with these values in its partition columns, as far as it has them."""
    for name, text in texts:
        index = batch.schema.get_field_index(name)
        if index >= 0:
            field = schema.field(name)
            column = pa.repeat(partition_value(text, field.type), batch.num_rows)
            batch = batch.set_column(index, field, column)
    return batch
