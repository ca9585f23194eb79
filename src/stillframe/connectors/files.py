"""Files as sources, one split per file; what is in them `parquet` and `json_lines` know.

The list of files is taken once, at the first start of the job, and is in every checkpoint from
then on: files that come later are not read, and one that has vanished or changed size is an
error. Only paths of a file system that all slots share are read.

A source that *follows* its paths lists them again and again and reads each file that it has not
seen, once, as Spark's file stream does. A file is known by its path. What was seen is the state of
the source's enumerator. It would grow for ever, so files that are older, by their time of change,
than the newest by more than an allowed age are forgotten, and not taken for new ones either.
"""

from __future__ import annotations

import glob
import os
import re
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import pyarrow as pa

from stillframe.api.sources import (
    BlockingReader,
    Discovered,
    Source,
    Split,
    SplitEnumerator,
)
from stillframe.errors import BuildError, DataError
from stillframe.json_values import JsonObject


def local_path(path: str) -> str:
    """An absolute path out of what Spark users write: `dir`, `/dir`, `file:/dir`, `file:///dir`."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", path)
    if scheme and scheme[1] != "file":
        raise BuildError(
            f"{path} is not on a local or mounted file system: only such paths and file:// are"
            " supported here; read or write it with Spark, through still.stream or foreachBatch"
        )
    plain = re.sub(r"^file:/+", "/", path)
    if not plain.strip():
        raise BuildError("a path is empty: say which file or directory is meant")
    return os.path.abspath(plain)


def find_files(paths: Sequence[str]) -> list[str]:
    """Every file meant by these files, directories and glob patterns, each once, in order."""
    found: dict[str, None] = {}
    for path in paths:
        files = _files_at(local_path(path))
        if not files:
            raise BuildError(f"no files found at {path}: check the path and its pattern")
        found.update(dict.fromkeys(files))
    return list(found)


def _files_at(path: str) -> list[str]:
    if os.path.lexists(path):
        return _files_under(path)
    matches = [match for match in sorted(glob.glob(path)) if not _hidden(os.path.basename(match))]
    return [file for match in matches for file in _files_under(match)]


def _files_under(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    files = []
    for directory, directories, names in os.walk(path, followlinks=True):
        directories[:] = [name for name in directories if not _hidden(name)]
        files += [os.path.join(directory, name) for name in names if not _hidden(name)]
    return sorted(files)


def _hidden(name: str) -> bool:
    """What Spark does not read either: work files, markers, copies under way."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


@dataclass(frozen=True, slots=True)
class Following:
    """That files which come later are read too, and how."""

    interval_seconds: float
    """How often the paths are listed."""
    file_age_seconds_max: float = 7 * 24 * 3600.0
    """How much older than the newest file one may be that is still taken for new."""


@dataclass(frozen=True, init=False)
class FileSource(Source):
    """What all sources of files have in common."""

    paths: tuple[str, ...]
    _schema: pa.Schema
    following: Following | None

    def __init__(
        self,
        paths: str | Sequence[str],
        schema: pa.Schema,
        following: Following | None = None,
    ) -> None:
        given = (paths,) if isinstance(paths, str) else tuple(paths)
        object.__setattr__(self, "paths", given)
        object.__setattr__(self, "_schema", schema)
        object.__setattr__(self, "following", following)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def discovery_interval_seconds(self) -> float | None:
        return None if self.following is None else self.following.interval_seconds

    def check(self) -> None:
        """Raise BuildError for what can be seen to be wrong on the driver, before anything runs."""
        if self.following is None:
            self.refuse_partition_columns(find_files(self.paths))
        else:
            self.refuse_partition_columns([found.path for found in _files_now(self.paths)])

    def splits(self, parallelism: int) -> list[Split]:
        if self.following is not None:
            return []  # the enumerator finds them all
        return [self.split(path, _size_bytes(path)) for path in find_files(self.paths)]

    def open_enumerator(self, state: JsonObject | None) -> SplitEnumerator:
        assert self.following is not None
        return _FollowedFiles(self, self.following, state)

    @abstractmethod
    def split(self, path: str, size_bytes: int) -> Split:
        """This file at its beginning."""

    def refuse_partition_columns(self, files: list[str]) -> None:
        # Read as an ordinary missing column, it would silently be null in every row.
        for path in files:
            for part in os.path.dirname(path).split(os.sep):
                name = part.partition("=")[0] if "=" in part else ""
                if name in self._schema.names:
                    raise BuildError(
                        f"column {name} is a partition directory ({part}), which is not read"
                        " here: leave it out of the schema, or read with Spark and still.stream"
                    )

    def _described(self, kind: str) -> str:
        again = f", listed every {self.following.interval_seconds:g} s" if self.following else ""
        return f"{kind} {', '.join(self.paths)}{again}"


def _size_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise BuildError(
            f"{path} was listed but cannot be read ({error.strerror}): make it readable or take it"
            " out of the path"
        ) from error


# --- following -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FoundFile:
    path: str
    size_bytes: int
    changed_at_ms: int


def _files_now(paths: Sequence[str]) -> list[_FoundFile]:
    """Every file at these paths that has something in it, the oldest first."""
    found: dict[str, _FoundFile] = {}
    for path in (file for each in paths for file in _files_at(local_path(each))):
        try:
            facts = os.stat(path)
        except OSError:
            continue  # gone since it was listed, or a link that leads nowhere
        # An empty file may be one that somebody has only begun to write.
        if facts.st_size:
            found[path] = _FoundFile(path, facts.st_size, facts.st_mtime_ns // 1_000_000)
    return sorted(found.values(), key=lambda file: (file.changed_at_ms, file.path))


class _FollowedFiles(SplitEnumerator):
    """Which files have been seen: path and time of change, as far back as files may be new."""

    def __init__(self, source: FileSource, following: Following, state: JsonObject | None) -> None:
        self._source = source
        self._age_ms_max = int(following.file_age_seconds_max * 1000)
        seen = cast(Mapping[str, int], state["seen"]) if state else {}
        self._seen = dict(seen)
        self._forgotten_before_ms = cast(int, state["forgotten_before_ms"]) if state else None

    def discover(self) -> Discovered:
        new = [file for file in _files_now(self._source.paths) if self._is_new(file)]
        try:
            self._source.refuse_partition_columns([file.path for file in new])
        except BuildError as error:
            raise DataError(str(error)) from error
        self._seen.update((file.path, file.changed_at_ms) for file in new)
        self._forget_old()
        splits = [self._source.split(file.path, file.size_bytes) for file in new]
        return Discovered(splits, self._state())

    def _is_new(self, file: _FoundFile) -> bool:
        # At the first listing nothing is too old, as in Spark.
        forgotten = self._forgotten_before_ms
        return file.path not in self._seen and (
            forgotten is None or file.changed_at_ms >= forgotten
        )

    def _forget_old(self) -> None:
        if not self._seen:
            return
        # A file that claims to be from the future must not make all others too old.
        newest_ms = min(max(self._seen.values()), int(time.time() * 1000))
        limit = max(newest_ms - self._age_ms_max, self._forgotten_before_ms or 0)
        self._seen = {path: at for path, at in self._seen.items() if at >= limit}
        self._forgotten_before_ms = limit

    def _state(self) -> JsonObject:
        return {"seen": dict(self._seen), "forgotten_before_ms": self._forgotten_before_ms}


# --- reading ---------------------------------------------------------------------------------


class FileReader(BlockingReader):
    """Reads file after file."""

    reads_in_turn = True

    def __init__(self, schema: pa.Schema, splits: Sequence[Split]) -> None:
        self._schema = schema
        for split in splits:
            if "path" not in split.position:
                raise DataError(
                    f"the checkpoint's position of {split.id} is not one in a file: give the job"
                    " the source and the parallelism it began with, or start it under another name"
                )
        self._splits = splits

    def read(self) -> Iterator[tuple[Split, pa.RecordBatch]]:
        for split in self._splits:
            yield from self._read_split(split)

    @abstractmethod
    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        """The rest of one file."""

    def close(self) -> None:
        """Files are closed by `read`, each when it ends or is given up."""


def unchanged_path(split: Split) -> str:
    """The path of a split, if its file is still the one that was listed."""
    path = str(split.position["path"])
    expected = split.position["size"]
    try:
        size_bytes = os.stat(path).st_size
    except OSError as error:
        raise DataError(
            f"source file {path} cannot be read any more ({error.strerror}): bring it back, the"
            " job has not read it to its end"
        ) from error
    if size_bytes != expected:
        raise DataError(
            f"source file {path} has changed since it was listed, from {expected} to"
            f" {size_bytes} bytes: bring the old one back, or start without the checkpoint (a file"
            " is to be written elsewhere and renamed when it is whole)"
        )
    return path


def position_of(split: Split, name: str) -> int:
    value = split.position[name]
    assert isinstance(value, int), f"{name} of split {split.id} is {value!r}"
    return value


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
