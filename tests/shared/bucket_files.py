"""Page views to files of a bucket, and what is there of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from stillframe.api.sinks import Sink
from stillframe.api.sources import Source
from stillframe.connectors.files import find_files
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.storage.places import place_of
from stillframe.testing.sources import Item, ScriptedSource


def plan_of(source: Source, sink: Sink, parallelism: int = 2) -> Plan:
    read = Node(Read(source), source.schema, given_uid="clicks")
    write = Node(Write(sink), source.schema, (read,), given_uid="write-clicks")
    return build_plan("page-views", [write], parallelism)


def below(address: str, settings: Mapping[str, str]) -> list[str]:
    return sorted(each.path for each in place_of(address, settings).walk(address, lambda _: False))


def visible(bucket: str, settings: Mapping[str, str]) -> list[str]:
    """What readers see of `out`."""
    return [each.path for each in find_files([f"{bucket}/out"], settings=settings)]


def staged(bucket: str, settings: Mapping[str, str]) -> list[str]:
    """Where nobody looks."""
    return [each for each in below(f"{bucket}/out", settings) if "/_stillframe/staging" in each]


def ids_in(files: Iterable[str], settings: Mapping[str, str]) -> list[int]:
    found: list[int] = []
    for file in files:
        with place_of(file, settings).open(file) as raw:
            found += pq.read_table(pa.PythonFile(raw, mode="r"))["id"].to_pylist()
    return found


def ids_of(source: ScriptedSource) -> list[int]:
    return [id for script in source.scripts for item in script for id in _ids_of_item(item)]


def _ids_of_item(item: Item) -> list[int]:
    return item["id"].to_pylist() if isinstance(item, pa.RecordBatch) else []
