"""An aggregate is added to a grouping and another taken out: the job goes on with what it has."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.config import job_config
from stillframe.connectors.file_sink import FileSink
from stillframe.coordinator.history import SlotsRunning
from stillframe.coordinator.located import locate
from stillframe.coordinator.starting import mismatches_with
from stillframe.graph.logical import Aggregate, MapInArrow, Node, Read, Window, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.runtime.unfit_states import unfit_states
from stillframe.runtime.windowing import output_schema

COUNT = AggregateCall("count", None, "count(1)", pa.int64())
SUM = AggregateCall("sum", "id", "sum(id)", pa.int64())
LIST = AggregateCall("collect_list", "id", "collect_list(id)", pa.list_(pa.int64()))
LARGEST = AggregateCall("max", "id", "max(id)", pa.int64())
TIMED = pa.schema([("id", pa.int64()), ("app_id", pa.string()), ("at", pa.timestamp("us", "UTC"))])


def timed(batches):
    for batch in batches:
        times = pa.nulls(batch.num_rows, pa.int64()).fill_null(1_000_000).cast(TIMED.types[2])
        yield pa.RecordBatch.from_arrays([*batch.columns, times], schema=TIMED)


def plan_of(page_views, source, calls, window, place, parallelism=2) -> Plan:
    read = Node(MapInArrow(timed, "timed"), TIMED, (Node(Read(source), source.schema),))
    made = Aggregate(("app_id",), calls, window)
    if window is None:
        schema = pa.schema([TIMED.field("app_id"), *((call.name, call.type) for call in calls)])
    else:
        schema = output_schema(TIMED, made)
    counted = Node(made, schema, (read,))
    sink = FileSink(str(page_views.home / place), "parquet", schema)
    return build_plan("page-views", [Node(Write(sink), schema, (counted,))], parallelism)


@pytest.mark.parametrize(
    ("backend", "window", "parallelism"),
    [
        ("fs", None, 2),
        ("rocksdb", None, 2),
        ("rocksdb", None, 1),
        ("fs", Window("at", 60_000_000, 30_000_000), 1),
    ],
    ids=["heap", "rocksdb", "rocksdb, rescaled", "windows, rescaled"],
)
def test_what_was_counted_goes_on_and_what_is_new_begins_where_it_was_added(
    page_views, caplog, backend, window, parallelism
):
    gate = page_views.gate("second-half")
    source = page_views.halves(gate)
    options = {"stateBackend": backend, "checkpointInterval": "1 hour"}
    before = plan_of(page_views, source, (LIST, COUNT), window, "before")
    first = page_views.start(before, **options)
    first.wait_for_records(2_000)
    first.query.processAllAvailable()
    first.query.stop()

    after = plan_of(page_views, source, (COUNT, SUM, LARGEST), window, "after", parallelism)
    options["stateDefaults"] = '{"max(id)": 1000000}'
    config = job_config({"checkpointLocation": page_views.location, **options})
    found = locate(f"{page_views.location}/page-views")
    wrong, said = mismatches_with(after, found, unfit_states, config, allows_gone=False)
    assert wrong == ()
    second = page_views.start(after, **options)
    second.wait(SlotsRunning)
    second.kill(slot=0, attempt=second.attempts()[0].attempt)  # it begins with the old ones again
    second.wait(SlotsRunning, number=2)
    gate.open()
    second.finish()

    [evolves] = said
    assert evolves.what == (
        "sum(id) is new and begins empty for what was kept before; max(id) is new and begins with"
        " 1000000 for what was kept before; collect_list(id).values is not"
        " kept any more and left behind"
    )
    assert str(evolves) in caplog.text
    rows = pq.read_table(page_views.home / "after").to_pylist()
    newest = {app: max((r for r in rows if r["app_id"] == app), key=lambda r: r["count(1)"])
              for app in {row["app_id"] for row in rows}}  # fmt: skip
    ids = [split * 10_000 + i for split in (0, 1) for i in range(2_000)]
    for app, row in newest.items():
        mine = [i for i in ids if f"app-{i % 17}" == app]
        assert row["count(1)"] == len(mine)
        assert row["sum(id)"] == sum(i for i in mine if i % 10_000 >= 1_000), "since it was added"
        assert row["max(id)"] == 1_000_000
