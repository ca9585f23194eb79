"""A small package that brings a source and a sink, as somebody would install it."""

from __future__ import annotations

import zipfile
from pathlib import Path

MODULE = '''
from dataclasses import dataclass, field
import os

import pyarrow as pa

from stillframe import Secret, Sink, Source
from stillframe.api.sources import EndOfData, SourceReader, Split
from stillframe.connectors.file_sink import FileSink

SCHEMA = pa.schema([("n", pa.int64())])


@dataclass(frozen=True)
class CountingSource(Source):
    """Counts up to `until`; counts again from a position."""

    until: int
    token: Secret | None = None

    option_names = ("until", "token")

    @classmethod
    def from_options(cls, options, schema):
        return cls(int(options["until"]), options.secret("token") if "token" in options else None)

    @property
    def schema(self):
        return SCHEMA

    def splits(self, parallelism):
        return [Split("all", {"next": 0})]

    def open(self, splits, context):
        return _Counting(self, list(splits))

    def describe(self):
        return f"counting to {self.until}"


class _Counting(SourceReader):
    def __init__(self, source, splits):
        self._source, self._splits = source, splits

    def poll(self):
        for at, split in enumerate(self._splits):
            begin = split.position["next"]
            end = min(begin + 10, self._source.until)
            if begin < end:
                self._splits[at] = Split(split.id, {"next": end})
                return pa.record_batch([pa.array(range(begin, end), pa.int64())], schema=SCHEMA)
        return EndOfData()

    def splits(self):
        return list(self._splits)

    def close(self):
        pass


@dataclass(frozen=True)
class ShelfSink(Sink):
    """Files in a directory that asks for a password; wrong at first, if it is told so."""

    path: str
    columns: pa.Schema = field(repr=False)
    password: Secret
    stumbles: str

    option_names = ("path", "stumbles", "client.*")
    secret_options = ("pin",)
    how = "files are renamed when the checkpoint is complete"
    needs = "a shelf"
    tested_by = ("tests/test_shelf.py",)

    @classmethod
    def from_options(cls, options, schema):
        password = options.secret("client.password" if "client.password" in options else "pin")
        if options.get("stumbles") == "built":
            raise OSError(f"no login as {password.reveal()}")
        return cls(options["path"], schema, password, options.get("stumbles", ""))

    @property
    def _files(self):
        return FileSink(self.path, "json", self.columns)

    def _login(self, where):
        """Fails once, with the password in the text, as clients do."""
        mark = os.path.join(os.path.dirname(self.path), "stumbled-" + where)
        if where == self.stumbles and not os.path.exists(mark):
            open(mark, "w").close()
            raise ConnectionError(f"no login as {self.password.reveal()} ({self.password!r})")

    def open_writer(self, context):
        self._login("open_writer")
        return self._files.open_writer(context)

    def open_committer(self, context):
        self._login("open_committer")
        return self._files.open_committer(context)

    def describe(self):
        return f"shelf {self.path}"
'''


def install(
    directory: Path,
    package: str = "shelves",
    module: str | None = None,
    sources: tuple[str, ...] = ("counting = shelves:CountingSource",),
    sinks: tuple[str, ...] = ("shelf = shelves:ShelfSink",),
    text: str = MODULE,
) -> Path:
    """As pip leaves it in `directory`, which has to be on sys.path; answers the module's file."""
    file = directory / f"{module or package}.py"
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    info = directory / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = {"stillframe.sources": sources, "stillframe.sinks": sinks}
    lines = [line for group, named in groups.items() for line in (f"[{group}]", *named, "")]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return file


def zipped(file: Path) -> Path:
    """For `addPyFile`."""
    archive = file.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as made:
        made.write(file, file.name)
    return archive
