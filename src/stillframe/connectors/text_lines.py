"""Files of text as a source: each line is a row, or each file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stillframe.api.sources import BlockingReader, SourceContext, Split
from stillframe.config import parse_flag
from stillframe.connectors.files import Following
from stillframe.connectors.lines import LineFileSource, LineReader, decoded, given_of, utf8_of
from stillframe.errors import BuildError

TEXT_SCHEMA = pa.schema([("value", pa.string())])
TEXT_OPTIONS = ("wholetext", "encoding", "charset", "lineSep")


@dataclass(frozen=True, init=False)
class TextSource(LineFileSource):
    """One column of strings, and those of partition directories."""

    is_whole: bool
    """Whether each file is one row."""

    def __init__(
        self,
        paths: str | Sequence[str],
        schema: pa.Schema = TEXT_SCHEMA,
        following: Following | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        super().__init__(paths, schema, following)
        object.__setattr__(self, "is_whole", is_whole)

    def check(self) -> None:
        super().check()
        found = self.files_now()
        keys = {key.lower() for file in found for key, _ in file.partitions}
        data = [field for field in self.schema if field.name.lower() not in keys]
        if len(data) != 1 or not pa.types.is_string(data[0].type):
            shown = ", ".join(f"{field.name} {field.type}" for field in data)
            raise BuildError(
                "Text data source supports only a single column of strings, and there are:"
                f" {shown}; leave .schema(...) out"
            )

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _TextReader(self, splits, is_whole=self.is_whole)

    def describe(self) -> str:
        return self._described("text")


class _TextReader(LineReader):
    def _parsed(self, path: str, offset: int, block: bytes) -> pa.RecordBatch:
        if self._is_whole:
            values = pa.array([block.decode("utf-8", "replace")], pa.string())
        else:
            values = lines_of(decoded(block, is_first=offset == 0))
        named = [
            values if at == 0 else pa.nulls(len(values), field.type)
            for at, field in enumerate(self._schema)
        ]
        return pa.RecordBatch.from_arrays(named, schema=self._schema)


def lines_of(block: bytes) -> pa.Array:
    """The lines of a block without their ends, which are a line feed, a carriage return or both."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    feeds = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
    letters = block.replace(b"\n", b"")
    ends = feeds - np.arange(len(feeds))
    if block and not block.endswith(b"\n"):
        ends = np.append(ends, len(letters))
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
    return pa.Array.from_buffers(pa.string(), len(ends), buffers)


def text_from_options(
    path: str, schema: pa.Schema, following: Following | None, options: Mapping[str, str]
) -> TextSource:
    """What `readStream.format("text").option(…)` asks for."""
    given = given_of(options, TEXT_OPTIONS)
    utf8_of(given)
    is_whole = parse_flag("wholetext", given.get("wholetext", "false"))
    return TextSource(path, schema, following, is_whole=is_whole)
