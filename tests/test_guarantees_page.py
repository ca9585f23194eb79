"""The tables of docs/guarantees.md say what the code does, for every format there is."""

import re
from pathlib import Path

import pyarrow as pa
import pytest

from stillframe.connectors.database_sink import jdbc_from_options as database_from_options
from stillframe.connectors.delta_table import DeltaSink
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.function_sink import to_function
from stillframe.connectors.generate import ClickSource
from stillframe.connectors.iceberg_table import IcebergSink
from stillframe.connectors.kafka_options import Settings
from stillframe.connectors.kafka_sink import Destination, KafkaSink
from stillframe.connectors.socket import SocketSource
from stillframe.connectors.staged import StagedSink
from stillframe.graph.guarantees import weigh
from stillframe.options import Options
from stillframe.spark.formats.guarantee_table import guarantee_table
from stillframe.spark.frames.sources import UnresolvedFrame

PAGE = Path(__file__).parents[1] / "docs" / "guarantees.md"
SCHEMA = pa.schema([("value", pa.string())])
STAGED = StagedSink("/staged", None, SCHEMA, "staged")
SINKS = {
    "parquet": FileSink("/out", "parquet", SCHEMA),
    "orc": FileSink("/out", "orc", SCHEMA),
    "json": FileSink("/out", "json", SCHEMA),
    "csv": FileSink("/out", "csv", SCHEMA),
    "text": FileSink("/out", "text", SCHEMA),
    "foreachBatch": STAGED,
    "console": STAGED,
    "memory": STAGED.kept_by_driver(),
    "noop": DiscardSink(),
    "kafka": KafkaSink(Destination(Settings("localhost:9092"), "out"), "out"),
    "to_function(deliver)": to_function(print),
}
DATABASE = database_from_options(
    Options("the sink jdbc", {"url": "jdbc:mysql://db/shop", "dbtable": "t"}), SCHEMA
)
SINKS |= dict.fromkeys(("postgres", "mysql", "jdbc"), DATABASE)
SINKS |= {"delta": DeltaSink("/lake", SCHEMA), "iceberg": IcebergSink("shop.views", SCHEMA)}
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


@pytest.mark.parametrize("word", ["source", "sink"])
def test_the_tables_of_sources_and_sinks_are_those_that_the_code_makes(word):
    lines = PAGE.read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"| {word} |"))
    made = guarantee_table(word)

    assert lines[begin : begin + len(made)] == made
    assert not lines[begin + len(made)]


@pytest.mark.parametrize("word", ["source", "sink"])
def test_every_line_says_all_and_names_tests_that_are_there(word):
    for line in guarantee_table(word)[2:]:
        assert "not said" not in line
        tests = re.findall(r"`(tests/\S+)`", line)
        assert tests, line
        assert all((PAGE.parents[1] / test).is_file() for test in tests), line


def test_a_dataframe_rewinds_before_it_is_resolved_too():
    assert UnresolvedFrame.rewindable


def test_a_sink_that_the_writer_builds_gives_what_its_line_says():
    """The others are what their class says."""
    said = {name: guarantee for name, guarantee, *_ in table("| sink |")}

    assert said == {name: sink.guarantee for name, sink in SINKS.items()}


@pytest.mark.parametrize("row", table("| `checkpointMode` |"), ids=" ".join)
def test_together_they_give_what_the_page_says(row):
    mode, source, sink, word = row
    rewinding = {"rewinds": ClickSource(), "socket": SocketSource("localhost", 9999)}

    assert mode in MODES
    assert weigh([rewinding[source]], [SINKS[sink]], mode).word == word
