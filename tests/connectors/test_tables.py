"""Delta and Iceberg tables as sinks, read by the libraries' own clients: each row once."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.connectors.delta_table import delta_from_options
from stillframe.connectors.iceberg_table import iceberg_from_options
from stillframe.options import Options
from stillframe.testing.conformance import check_sink

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


class Delta:
    def sink(self, place, schema=SCHEMA, **options):
        given = {"path": str(place / "table"), "createTable": "true", **options}
        return delta_from_options(Options("the sink delta", given), schema)

    def rows(self, sink):
        from deltalake import DeltaTable

        return DeltaTable(sink.path, storage_options=sink.storage_options).to_pyarrow_table()


class Iceberg:
    def sink(self, place, schema=SCHEMA, **options):
        given = {
            "table": "shop.views",
            "catalog.type": "sql",
            "catalog.uri": f"sqlite:///{place}/catalog.db",
            "catalog.warehouse": f"file://{place}",
            "createTable": "true",
            **options,
        }
        return iceberg_from_options(Options("the sink iceberg", given), schema)

    def rows(self, sink):
        catalog = sink.load_catalog()
        try:
            return catalog.load_table(sink.table).scan().to_arrow()
        finally:
            catalog.close()


@pytest.fixture(params=[Delta, Iceberg])
def kind(request):
    return request.param()


def visible(kind):
    return lambda sink: kind.rows(sink).to_pylist()


@pytest.mark.parametrize("options", [{}, {"partitionBy": "name"}], ids=["plain", "parted"])
def test_the_sink_keeps_every_promise(kind, options):
    def made(place):
        sink = kind.sink(place, **options)
        sink.check_start()
        return sink

    check_sink(made, visible(kind), checks=12)
