"""The conformance kit's drawn schedules of failures, on real databases."""

from __future__ import annotations

import uuid

import pyarrow as pa
import pytest
from database_servers import PASSWORD

from stillframe.connectors.database_sink import jdbc_from_options
from stillframe.options import Options
from stillframe.testing.conformance import check_sink

pytestmark = [pytest.mark.database, pytest.mark.slow]

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


@pytest.mark.parametrize(
    "kind", ["postgres", "mariadb", pytest.param("mysql", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("keys", ["", "id"])
def test_the_sink_keeps_its_promises(kind, keys, request):
    server = request.getfixturevalue(kind)

    def sink(place):
        given = {
            "url": f"jdbc:{server.url}",
            "user": {"postgres": "postgres", "mysql": "root"}[server.dialect],
            "password": PASSWORD,
            "dbtable": f"t_{uuid.uuid4().hex[:12]}",
            "createTable": "true",
            "upsertKeys": keys,
        }
        made = jdbc_from_options(Options("the sink jdbc", given), SCHEMA)
        made.check_start()
        return made

    def visible(sink):
        return server.rows(sink.table.name.name)

    check_sink(
        sink,
        visible,
        schema=SCHEMA,
        row=lambda n: (n, f"v{n}"),
        checks=6,
        seed=3,
        another_process=False,
    )
