"""A job into a database: clicks go to one table one by one, and to another as counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from database_servers import PASSWORD

from stillframe.api.aggregates import AggregateCall
from stillframe.api.sinks import Sink
from stillframe.api.sources import Source
from stillframe.connectors.database_sink import jdbc_from_options
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.options import Options

COUNTS = pa.schema([("app_id", pa.string()), ("count", pa.int64())])


@dataclass(frozen=True)
class ClicksToTables:
    source: Source
    url: str
    clicks: str
    counts: str
    user: str
    password: str = PASSWORD

    def __call__(self, parallelism: int) -> Plan:
        source = self.source
        read = Node(Read(source), source.schema, given_uid="clicks")
        call = AggregateCall("count", None, "count", pa.int64())
        counted = Node(Aggregate(("app_id",), (call,)), COUNTS, (read,), given_uid="count")
        added, replaced = self.sinks()
        ends = [
            Node(Write(added), source.schema, (read,), given_uid="write-clicks"),
            Node(Write(replaced), COUNTS, (counted,), given_uid="write-counts"),
        ]
        return build_plan("page-views", ends, parallelism)

    def sinks(self) -> tuple[Any, Any]:
        added = self._sink(self.clicks, self.source.schema)
        return added, self._sink(self.counts, COUNTS, upsertKeys="app_id")

    def _sink(self, table: str, schema: pa.Schema, **options: str) -> Sink:
        given = {
            "url": f"jdbc:{self.url}",
            "user": self.user,
            "password": self.password,
            "dbtable": table,
            "createTable": "true",
            **options,
        }
        return jdbc_from_options(Options("the sink jdbc", given), schema)
