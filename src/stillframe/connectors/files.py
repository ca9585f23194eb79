"""Files as sources, one split per file; what is in them `parquet` and `json_lines` know.

The list of files is taken once, at the first start of the job, and is in every checkpoint from
then on: files that come later are not read, and one that has vanished is an error. A path of a
disk must be one that all slots share.

What was read of a file must not change any more. Beside a position is a checksum of what is before
it, and a file with another past is refused. What is ahead may change, so that a bad line can be
corrected.

A source that *follows* its paths lists them again and again and reads each file that it has not
seen, once, as Spark's file stream does. A file is known by its path. What was seen is the state of
the source's enumerator. It would grow for ever, so files that are older, by their time of change,
than the newest by more than an allowed age are forgotten, and not taken for new ones either.
"""

from __future__ import annotations

import copy
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, cast

import pyarrow as pa

from stillframe.api.sources import (
    BlockingReader,
    Discovered,
    Source,
    Split,
    SplitEnumerator,
)
from stillframe.connectors.cleaning import Cleaning
from stillframe.connectors.listing import (
    FoundFile,
    declared_partitions,
    files_at,
    has_magic,
    name_matcher,
    with_partitions,
)
from stillframe.errors import BuildError, DataError, StorageError
from stillframe.ids import CheckpointId
from stillframe.json_values import JsonObject
from stillframe.storage.places import Place, address_of, is_on_disk, place_of


def find_files(
    paths: Sequence[str],
    *,
    is_recursive: bool = False,
    settings: Mapping[str, str] | None = None,
) -> list[FoundFile]:
    """Every file meant by these files, directories and glob patterns, each once, in order."""
    found = [file for path in paths for file in files_at(address_of(path), is_recursive, settings)]
    return list({file.path: file for file in found}.values())


@dataclass(frozen=True, slots=True)
class Following:
    """That files which come later are read too, and how."""

    interval_seconds: float = 1.0
    """How often the paths are listed."""
    file_age_seconds_max: float = 7 * 24 * 3600.0
    """How much older than the newest file one may be that is still taken for new."""
    latest_first: bool = False
    """Whether of several new files the newest is read first."""
    cleaning: Cleaning | None = None
    """What becomes of files that have been read; None: nothing."""
    by_name: bool = False
    """Whether a file is known by its name alone, in whichever directory it is."""


@dataclass(frozen=True, init=False)
class FileSource(Source):
    """What all sources of files have in common."""

    paths: tuple[str, ...]
    _schema: pa.Schema
    following: Following | None
    is_recursive: bool
    """Whether a directory means all files below it, without partition columns."""
    zone: str
    """The one of times in partition directories."""
    name_pattern: str | None
    """Which names files have that are read, as a glob."""
    settings: Mapping[str, str] = field(repr=False, compare=False)
    """How the place of the files is reached; there may be secrets in it."""

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
        object.__setattr__(self, "is_recursive", False)
        object.__setattr__(self, "zone", "UTC")
        object.__setattr__(self, "name_pattern", None)
        object.__setattr__(self, "settings", {})

    def listing(
        self,
        *,
        schema: pa.Schema | None = None,
        is_recursive: bool | None = None,
        zone: str | None = None,
        name_pattern: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> Self:
        """The same source with another schema, or directories understood otherwise."""
        other = copy.copy(self)
        given = {
            "_schema": schema,
            "is_recursive": is_recursive,
            "zone": zone,
            "name_pattern": name_pattern,
            "settings": settings,
        }
        for name, value in given.items():
            if value is not None:
                object.__setattr__(other, name, value)
        return other

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def discovery_interval_seconds(self) -> float | None:
        return None if self.following is None else self.following.interval_seconds

    def check(self) -> None:
        """Raise BuildError for what can be seen to be wrong on the driver, before anything runs."""
        if self.following is not None and self.following.cleaning is not None:
            self.following.cleaning.check(self.paths)
        for file in self.files_now():
            declared_partitions(file, self._schema, self.zone)

    def refuse_missing(self) -> None:
        """Raise BuildError for a path that is no pattern and names nothing."""
        for path in self.paths:
            address = address_of(path)
            place = place_of(address, self.settings)
            if has_magic(address) or (is_on_disk(address) and os.path.lexists(address)):
                continue
            if place.facts(address) is None and not place.has_directory(address):
                raise BuildError(
                    f"[PATH_NOT_FOUND] Path does not exist: {path}; check its spelling"
                )

    def files_now(self) -> list[FoundFile]:
        """Every file that its paths mean now; perhaps none, if it follows them."""
        found = find_files(self.paths, is_recursive=self.is_recursive, settings=self.settings)
        if self.name_pattern is not None:
            wanted = name_matcher(self.name_pattern)
            found = [file for file in found if wanted(os.path.basename(file.path))]
        if not found and self.following is None:
            places = ", ".join(self.paths)
            raise BuildError(f"no files found at {places}: check the path and its pattern")
        return found

    def splits(self, parallelism: int) -> list[Split]:
        if self.following is not None:
            return []  # the enumerator finds them all
        return [self.split_of(file, _size_bytes(file)) for file in self.files_now()]

    def split_of(self, file: FoundFile, size_bytes: int) -> Split:
        """This file at its beginning, with its partition columns."""
        split = self.split(file.path, size_bytes)
        texts = declared_partitions(file, self._schema, self.zone)
        return Split(split.id, {**split.position, "partitions": texts}) if texts else split

    def open_enumerator(self, state: JsonObject | None) -> SplitEnumerator:
        assert self.following is not None
        return _FollowedFiles(self, self.following, state)

    @abstractmethod
    def split(self, path: str, size_bytes: int) -> Split:
        """This file at its beginning."""

    def _described(self, kind: str) -> str:
        return f"{kind} {', '.join(self.paths)}{self._in_words_how_often}"

    @property
    def tied_to(self) -> str:
        """How often it is listed may change."""
        return self.describe().removesuffix(self._in_words_how_often)

    @property
    def _in_words_how_often(self) -> str:
        seconds = self.discovery_interval_seconds
        is_usual = seconds in (None, Following().interval_seconds)
        return "" if is_usual else f", listed every {seconds:g} s"


def _size_bytes(file: FoundFile) -> int:
    if file.facts is None:
        raise BuildError(
            f"{file.path} was listed but cannot be read (it is a link that leads nowhere, or may"
            " not be looked at): make it readable or take it out of the path"
        )
    return file.facts.size_bytes


# --- following -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Listed:
    file: FoundFile
    size_bytes: int
    changed_at_ms: int


def _listed(files: Sequence[FoundFile]) -> list[_Listed]:
    """Those of these files that have something in them, the oldest first."""
    # An empty file may be one that somebody has only begun to write.
    found = [
        _Listed(file, file.facts.size_bytes, file.facts.changed_at_ms)
        for file in files
        if file.facts is not None and file.facts.size_bytes
    ]
    return sorted(found, key=lambda each: (each.changed_at_ms, each.file.path))


class _FollowedFiles(SplitEnumerator):
    """Which files have been seen: path and time of change, as far back as files may be new."""

    def __init__(self, source: FileSource, following: Following, state: JsonObject | None) -> None:
        self._source = source
        self._age_ms_max = int(following.file_age_seconds_max * 1000)
        seen = cast(Mapping[str, int], state["seen"]) if state else {}
        self._seen = dict(seen)
        self._latest_first = following.latest_first
        self._cleaning = following.cleaning
        self._known_by: Callable[[str], str] = os.path.basename if following.by_name else str
        self._let_go: set[str] = set()
        self._forgotten_before_ms = cast(int, state["forgotten_before_ms"]) if state else None

    def discover(self) -> Discovered:
        try:
            known = {self._known_by(path) for path in self._seen}
            listed = _listed(self._source.files_now())
            new = [each for each in listed if self._is_new(each, known)]
            if self._latest_first:
                new.reverse()
            splits = [self._source.split_of(each.file, each.size_bytes) for each in new]
        except BuildError as error:
            raise DataError(str(error)) from error
        self._seen.update((each.file.path, each.changed_at_ms) for each in new)
        self._forget_old()
        return Discovered(splits, self._state())

    def on_checkpoint_complete(
        self, checkpoint_id: CheckpointId, state: JsonObject | None, splits: Sequence[Split]
    ) -> None:
        if self._cleaning is None or state is None:
            return
        unread = {split.id for split in splits}
        seen = cast(Mapping[str, int], state["seen"])
        for path in sorted(seen.keys() - unread - self._let_go):
            self._cleaning.let_go(path, seen[path], self._source.settings)
        self._let_go = set(seen) - unread

    def _is_new(self, listed: _Listed, known: Collection[str]) -> bool:
        # At the first listing nothing is too old, as in Spark.
        forgotten = self._forgotten_before_ms
        return self._known_by(listed.file.path) not in known and (
            forgotten is None or listed.changed_at_ms >= forgotten
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

    def __init__(self, source: FileSource, splits: Sequence[Split]) -> None:
        self._schema = source.schema
        self._settings = source.settings
        for split in splits:
            if "path" not in split.position:
                raise DataError(
                    f"the checkpoint's position of {split.id} is not one in a file: give the job"
                    " the source and the parallelism it began with, or start it under another name"
                )
        self._splits = splits

    def read(self) -> Iterator[tuple[Split, pa.RecordBatch]]:
        for split in self._splits:
            texts = list(partitions_of(split).items())
            for after, batch in self._read_split(split):
                yield after, with_partitions(batch, self._schema, texts)

    @abstractmethod
    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        """The rest of one file."""

    def _place(self, path: str) -> Place:
        return place_of(path, self._settings)

    def close(self) -> None:
        """Files are closed by `read`, each when it ends or is given up."""


def unreadable(path: str, error: OSError | StorageError) -> DataError:
    """What a reader says of a file that it cannot open or read on."""
    if isinstance(error, FileNotFoundError):
        return DataError(
            f"source file {path} cannot be read any more ({error.strerror}): bring it back, the"
            " job has not read it to its end"
        )
    why = getattr(error, "strerror", None) or str(error)
    return DataError(
        f"source file {path} cannot be read ({why}): make it readable and start the job again"
    )


def refuse_other_size(split: Split, size_bytes: int) -> None:
    """All that can be said of a file by a position that has no checksum, from an older version."""
    expected = split.position["size"]
    if size_bytes != expected:
        raise DataError(
            f"source file {split.position['path']} has changed since it was listed, from"
            f" {expected} to {size_bytes} bytes: bring the old one back, or start without the"
            " checkpoint (a file is to be written elsewhere and renamed when it is whole)"
        )


def refuse_other_footer(split: Split, size_bytes: int, footer: str) -> None:
    """Raise for a file that was read in part and whose footer, by its checksum, is another one."""
    kept = split.position.get("footer_crc32")
    if position_of(split, "rows") == 0:
        return
    if kept is None:
        refuse_other_size(split, size_bytes)
    elif kept != footer:
        raise changed_past(split, "its footer is another one")


def changed_past(split: Split, how: str) -> DataError:
    return DataError(
        f"source file {split.position['path']} is not the one that the job has begun to read"
        f" ({how}): bring the old one back, or start the job without its checkpoint (fresh)"
    )


def partitions_of(split: Split) -> Mapping[str, str | None]:
    """The texts of the partition columns of a split's file."""
    return cast(Mapping[str, str | None], split.position.get("partitions", {}))


def position_of(split: Split, name: str) -> int:
    value = split.position[name]
    assert isinstance(value, int), f"{name} of split {split.id} is {value!r}"
    return value


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
