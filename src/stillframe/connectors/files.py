"""Parquet and JSON-lines files as sources, one split per file.

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
from io import FileIO
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from stillframe.api.sources import (
    BlockingReader,
    Discovered,
    Source,
    SourceContext,
    Split,
    SplitEnumerator,
)
from stillframe.errors import BuildError, DataError
from stillframe.json_values import JsonObject

_BATCH_ROWS = 65_536
_BLOCK_BYTES = 1 << 20
_LINE_BYTES_MAX = 64 << 20
_ENCODED_VALUE_BYTES_MAX = 4
"""A value in Parquet that is written out takes four bytes for its length alone."""
_GROUP_ROWS_MIN = 8_192


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


class _FileReader(BlockingReader):
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


def _unchanged_path(split: Split) -> str:
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


def _number(split: Split, name: str) -> int:
    value = split.position[name]
    assert isinstance(value, int), f"{name} of split {split.id} is {value!r}"
    return value


# --- Parquet ---------------------------------------------------------------------------------


class ParquetSource(FileSource):
    """Parquet files; columns are matched by name, one that a file lacks is null."""

    def split(self, path: str, size_bytes: int) -> Split:
        return Split(path, {"path": path, "size": size_bytes, "rows": 0})

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _ParquetReader(self.schema, splits, context)

    def describe(self) -> str:
        return self._described("parquet")


class _ParquetReader(_FileReader):
    """Fetches and decodes only the columns that the job reads; files are held to all of them.

    What records are only grouped by is left encoded where the file has it as a small dictionary:
    a thousand different strings in a million rows take 4 ns for a row so, and 18 written out.
    """

    def __init__(self, schema: pa.Schema, splits: Sequence[Split], context: SourceContext) -> None:
        super().__init__(schema, splits)
        read = schema.names if context.columns is None else context.columns
        self._read_schema = pa.schema([schema.field(name) for name in read])
        self._grouped_by = context.grouped_by

    def has_ended(self, split: Split) -> bool:
        # A file that was read to its end may be archived; an empty one has no footer to read.
        return bool(split.position.get("ended")) or split.position["size"] == 0

    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        if self.has_ended(split):
            return
        path = _unchanged_path(split)
        done = _number(split, "rows")
        try:
            with self._opened(path) as file:
                total = file.metadata.num_rows
                for batch in self._batches(file, path, done):
                    done += batch.num_rows
                    position = {**split.position, "rows": done}
                    if done == total:
                        position["ended"] = True
                    yield Split(split.id, position), batch
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} cannot be read as Parquet ({_first_line(error)}): repair it or take it"
                " out of the path"
            ) from error

    def _opened(self, path: str) -> pq.ParquetFile:
        metadata = pq.read_metadata(path)
        grouped_by = pa.schema([self._schema.field(name) for name in self._grouped_by])
        names = _names_in_file(metadata.schema.to_arrow_schema(), grouped_by)
        return pq.ParquetFile(
            path,
            metadata=metadata,
            read_dictionary=[name for name in names if name and _is_encoded(metadata, name)],
            # Spark writes times as INT96, which Arrow otherwise takes for nanoseconds, until 2262.
            coerce_int96_timestamp_unit="us",
        )

    def _batches(self, file: pq.ParquetFile, path: str, done: int) -> Iterator[pa.RecordBatch]:
        found, schema = file.schema_arrow, self._read_schema
        _refuse_unfit(path, found, self._schema, _names_in_file(found, self._schema))
        names = _names_in_file(found, schema)
        groups, skip = _groups_after(file.metadata, done)
        wanted = [name for name in names if name is not None]
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=wanted):
            unread = batch.slice(min(skip, batch.num_rows))
            skip -= batch.num_rows - unread.num_rows
            if unread.num_rows:
                yield _fitted(path, unread, schema, names, self._grouped_by)


def _is_encoded(metadata: pq.FileMetaData, name: str) -> bool:
    """Whether a file has this column as small dictionaries, and hardly a value written out.

    Batches of dictionaries end where a row group does, so groups of a few rows do not count.
    """
    if metadata.num_rows < _GROUP_ROWS_MIN * (metadata.num_row_groups - 1):
        return False
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [
        chunk
        for group in groups
        for chunk in (group.column(number) for number in range(group.num_columns))
        if chunk.path_in_schema == name
    ]
    return bool(chunks) and all(
        chunk.physical_type == "BYTE_ARRAY"
        and chunk.has_dictionary_page
        and chunk.total_uncompressed_size < _ENCODED_VALUE_BYTES_MAX * chunk.num_values
        for chunk in chunks
    )


def _groups_after(metadata: pq.FileMetaData, done: int) -> tuple[list[int], int]:
    """The row groups that still have unread rows, and how many rows of the first to skip."""
    first = 0
    while first < metadata.num_row_groups and done >= metadata.row_group(first).num_rows:
        done -= metadata.row_group(first).num_rows
        first += 1
    return list(range(first, metadata.num_row_groups)), done


def _names_in_file(found: pa.Schema, declared: pa.Schema) -> list[str | None]:
    """What each declared column is called in the file: case does not matter, as in Spark."""
    by_lower = {name.lower(): name for name in found.names}
    return [name if name in found.names else by_lower.get(name.lower()) for name in declared.names]


def _refuse_unfit(
    path: str, found: pa.Schema, declared: pa.Schema, names: list[str | None]
) -> None:
    for field, name in zip(declared, names, strict=True):
        if name is None and not field.nullable:
            raise DataError(
                f"{path} has no column {field.name}, which is declared as never null: declare it"
                " nullable or take the file out of the path"
            )
        if name is not None and not _fits(found.field(name).type, field.type):
            raise DataError(
                f"column {name} of {path} is {found.field(name).type}, but {field.type} was"
                " declared: correct the schema or take the file out of the path"
            )


def _fits(found: pa.DataType, declared: pa.DataType) -> bool:
    """Whether every value of the one type is a value of the other, or a cast can tell."""
    types = pa.types
    if found.equals(declared) or types.is_null(found):
        return True
    if types.is_dictionary(found):
        return _fits(found.value_type, declared)
    if types.is_integer(found):
        return _integer_fits(found, declared)
    if types.is_floating(found):
        return bool(types.is_floating(declared) and found.bit_width <= declared.bit_width)
    if types.is_decimal(found) and types.is_decimal(declared):
        more_scale = declared.scale - found.scale
        return bool(0 <= more_scale <= declared.precision - found.precision)
    if _is_text(found) or _is_bytes(found):
        return _is_text(declared) if _is_text(found) else _is_bytes(declared)
    if types.is_timestamp(found):
        return bool(types.is_timestamp(declared))
    return _nested_fits(found, declared)


def _integer_fits(found: pa.DataType, declared: pa.DataType) -> bool:
    if pa.types.is_float64(declared):
        return bool(found.bit_width <= 32)
    if not pa.types.is_integer(declared):
        return False
    signed = pa.types.is_signed_integer(declared)
    if signed == pa.types.is_signed_integer(found):
        return bool(found.bit_width <= declared.bit_width)
    return bool(signed and found.bit_width < declared.bit_width)


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _nested_fits(found: pa.DataType, declared: pa.DataType) -> bool:
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        same = pa.types.is_list(declared) or pa.types.is_large_list(declared)
        return same and _fits(found.value_type, declared.value_type)
    if pa.types.is_map(found) and pa.types.is_map(declared):
        return _fits(found.key_type, declared.key_type) and (
            _fits(found.item_type, declared.item_type)
        )
    if pa.types.is_struct(found) and pa.types.is_struct(declared):
        pairs = list(zip(found.fields, declared.fields, strict=False))
        return found.num_fields == declared.num_fields and all(
            one.name == other.name and _fits(one.type, other.type) for one, other in pairs
        )
    return False


def _fitted(
    path: str,
    batch: pa.RecordBatch,
    schema: pa.Schema,
    names: list[str | None],
    grouped_by: Sequence[str],
) -> pa.RecordBatch:
    columns = []
    for field, name in zip(schema, names, strict=True):
        if name is None:
            columns.append(pa.nulls(batch.num_rows, field.type))
        elif field.name in grouped_by and _is_dictionary_of(field.type, batch.column(name).type):
            columns.append(_not_null(path, batch.column(name), field))
        else:
            columns.append(_fitted_column(path, batch.column(name), field))
    fields = [field.with_type(each.type) for field, each in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _is_dictionary_of(type_: pa.DataType, found: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(found) and found.value_type.equals(type_))


def _not_null(path: str, column: pa.Array, field: pa.Field) -> pa.Array:
    if column.null_count and not field.nullable:
        raise DataError(
            f"column {field.name} of {path} has nulls, but it is declared as never null: declare"
            " it nullable"
        )
    return column


def _fitted_column(path: str, column: pa.Array, field: pa.Field) -> pa.Array:
    _not_null(path, column, field)
    if column.type.equals(field.type):
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise DataError(
            f"column {field.name} of {path} is {column.type} and has values that do not fit the"
            f" declared {field.type} ({_first_line(error)}): correct the schema"
        ) from error


# --- JSON lines ------------------------------------------------------------------------------


class JsonLinesSource(FileSource):
    """Files of one JSON object per line; timestamps are ISO 8601 strings, UTC if they do not say.

    A member that was not declared is passed over, one that is missing is null.
    """

    def check(self) -> None:
        for field in self.schema:
            if pa.types.is_map(field.type) or _is_bytes(field.type):
                raise BuildError(
                    f"column {field.name} is {field.type}, which is not read from JSON lines:"
                    " declare it as a string or a struct"
                )
        super().check()

    def split(self, path: str, size_bytes: int) -> Split:
        return Split(path, {"path": path, "size": size_bytes, "offset": 0})

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _JsonLinesReader(self.schema, splits)

    def describe(self) -> str:
        return self._described("json")


class _JsonLinesReader(_FileReader):
    def has_ended(self, split: Split) -> bool:
        return _number(split, "offset") >= _number(split, "size")

    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        if self.has_ended(split):
            return
        offset = _number(split, "offset")
        path = _unchanged_path(split)
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(offset)
                for block in _blocks(file, path):
                    batch = self._parsed(path, offset, block)
                    offset += len(block)
                    yield Split(split.id, {**split.position, "offset": offset}), batch
        except OSError as error:
            raise DataError(
                f"source file {path} cannot be read ({error.strerror}): make it readable and"
                " start the job again"
            ) from error

    def _parsed(self, path: str, offset: int, block: bytes) -> pa.RecordBatch:
        try:
            return _parse_lines(block, self._schema)
        except (pa.ArrowException, _RowsAreNotLines) as error:
            raise _unfit_line(path, offset, block, self._schema) from error


def _blocks(file: FileIO, path: str) -> Iterator[bytes]:
    """The rest of a file in pieces of whole lines; the last line may lack its newline."""
    rest = b""
    while piece := file.read(_BLOCK_BYTES):
        cut = piece.rfind(b"\n") + 1
        if cut:
            yield rest + piece[:cut]
            rest = piece[cut:]
        else:
            rest += piece
        if len(rest) > _LINE_BYTES_MAX:
            raise DataError(
                f"{path} has a line of more than {_LINE_BYTES_MAX} bytes: it is probably not"
                " JSON lines, one record per line"
            )
    if rest:
        yield rest


class _RowsAreNotLines(Exception):
    """A record over several lines, or several on one line."""


def _parse_lines(block: bytes, schema: pa.Schema) -> pa.RecordBatch:
    table = pa_json.read_json(
        pa.BufferReader(block),
        # One block, or a parallel reader would cut it again, and not at the same places.
        pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
        pa_json.ParseOptions(
            explicit_schema=_as_written(schema), unexpected_field_behavior="ignore"
        ),
    )
    if table.num_rows != _count_records(block):
        raise _RowsAreNotLines
    batch = table.combine_chunks().to_batches()
    columns = batch[0].columns if batch else [pa.array([], field.type) for field in schema]
    fitted = [column.cast(field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(fitted, schema=schema)


def _as_written(schema: pa.Schema) -> pa.Schema:
    """Dates are strings in JSON, which pyarrow's reader does not convert by itself."""
    return pa.schema(
        [
            field.with_type(pa.string()) if pa.types.is_date(field.type) else field
            for field in schema
        ]
    )


def _count_records(block: bytes) -> int:
    """How many lines are not blank; a line that begins with a printing character surely is not."""
    octets = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(octets == ord("\n"))
    starts = np.concatenate(([0], ends + 1))
    starts = starts[starts < len(octets)]
    if (octets[starts] > ord(" ")).all():
        return len(starts)
    return sum(1 for line in block.split(b"\n") if line.strip())


def _unfit_line(path: str, offset: int, block: bytes, schema: pa.Schema) -> DataError:
    """Which line it was: the shortest run of lines from the block's start that fails ends in it."""
    lines = block.splitlines(keepends=True)
    good, bad = 0, len(lines)
    while bad - good > 1:
        middle = (good + bad) // 2
        if _complaint(b"".join(lines[:middle]), schema) is None:
            good = middle
        else:
            bad = middle
    line = lines[bad - 1]
    reason = _complaint(line, schema) or "it is not one whole record"
    number = _lines_before(path, offset) + bad
    return DataError(
        f"line {number} of {path} does not fit the schema ({reason}): correct the record or the"
        f" schema; the line begins {line[:80].decode('utf-8', 'replace').rstrip()!r}"
    )


def _complaint(lines: bytes, schema: pa.Schema) -> str | None:
    try:
        _parse_lines(lines, schema)
    except pa.ArrowException as error:
        # Row numbers count from the place where this parse happened to begin.
        return re.sub(r" in row \d+$", "", _first_line(error).removeprefix("JSON parse error: "))
    except _RowsAreNotLines:
        return "it is not one whole record"
    return None


def _lines_before(path: str, offset: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while offset > 0 and (piece := file.read(min(offset, _BLOCK_BYTES))):
            count += piece.count(b"\n")
            offset -= len(piece)
    return count


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
