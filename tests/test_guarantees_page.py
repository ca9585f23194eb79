"""The tables of docs/guarantees.md say what the code does, for every format there is."""

from pathlib import Path

import pyarrow as pa
import pytest

from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.frame import FrameSource
from stillframe.connectors.generate import ClickSource
from stillframe.connectors.socket import SocketSource
from stillframe.connectors.staged import StagedSink
from stillframe.graph.guarantees import weigh
from stillframe.spark import formats
from stillframe.spark.frames import UnresolvedFrame

PAGE = Path(__file__).parents[1] / "docs" / "guarantees.md"
SCHEMA = pa.schema([("value", pa.string())])
STAGED = StagedSink("/staged", None, SCHEMA, "staged")
SINKS = {
    "parquet": FileSink("/out", "parquet", SCHEMA),
    "json": FileSink("/out", "json", SCHEMA),
    "foreachBatch": STAGED,
    "console": STAGED,
    "memory": STAGED.kept_by_driver(),
    "noop": DiscardSink(),
}
MODES = ("exactly-once", "stop-the-world", "at-least-once", "at-most-once")


def table(heading: str) -> list[list[str]]:
    """The cells below the heading, without their backquotes."""
    lines = PAGE.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(heading))
    found = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return found


def options_of(name: str, files: Path) -> dict[str, str]:
    """As few as the source needs."""
    if name in ("parquet", "json"):
        return {"path": str(files), "followInterval": "1 second"}
    return {"host": "localhost", "port": "9999"} if name == "socket" else {}


def test_every_source_says_truly_whether_it_rewinds(tmp_path):
    rewinds = {name: said for name, said, _ in table("| source |")}

    assert set(rewinds) == {*formats._SOURCE_FORMATS, "still.stream(df)"}
    for name in formats._SOURCE_FORMATS:
        options = options_of(name, tmp_path)
        source = formats.make_source(name, options, SCHEMA if "path" in options else None)
        assert rewinds[name] == ("yes" if source.rewindable else "no"), name
    assert rewinds["still.stream(df)"] == "yes"
    assert FrameSource.rewindable
    assert UnresolvedFrame.rewindable


def test_every_sink_gives_what_the_page_says():
    said = {name: guarantee for name, guarantee, _ in table("| sink |")}

    assert set(said) == {*formats.SINK_OPTIONS, "foreachBatch"}
    assert said == {name: sink.guarantee for name, sink in SINKS.items()}


@pytest.mark.parametrize("row", table("| `checkpointMode` |"), ids=" ".join)
def test_together_they_give_what_the_page_says(row):
    mode, source, sink, word = row
    rewinding = {"rewinds": ClickSource(), "socket": SocketSource("localhost", 9999)}

    assert mode in MODES
    assert weigh([rewinding[source]], [SINKS[sink]], mode).word == word
