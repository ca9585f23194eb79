"""Windows of windows, and deduplication between them, while a slot dies."""

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.file_sink import FileSink
from stillframe.coordinator.history import AttemptStarted
from stillframe.graph.logical import (
    WINDOW,
    Aggregate,
    DropDuplicates,
    MapInArrow,
    Node,
    Read,
    Window,
    WithWatermark,
    Write,
)
from stillframe.graph.plan import build_plan
from stillframe.testing.sources import ScriptedSource, Wait

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("key", pa.int64()), ("at", TIME)])
SPAN = pa.field(WINDOW, pa.struct([("start", TIME), ("end", TIME)]))
COUNTED = pa.schema([SPAN, ("key", pa.int64()), ("n", pa.int64())])
TIMED = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("at", TIME)])
KEYS, MOMENTS = 3, 400
COUNT = AggregateCall("count", None, "n", pa.int64())
SUM = AggregateCall("sum", "n", "n", pa.int64())


def records(first, stop):
    """Of each key one at each of these moments, a batch for each moment."""
    for moment in range(first, stop):
        at = pa.array([moment] * KEYS).cast(TIME)
        yield pa.record_batch([pa.array(range(KEYS)), at], schema=SCHEMA)


def at_their_ends(batches):
    """A window's event time is its last microsecond."""
    for batch in batches:
        ends = pc.struct_field(batch.column(WINDOW), "end").cast(pa.int64())
        columns = [batch.column("key"), batch.column("n"), pc.subtract(ends, 1).cast(TIME)]
        yield pa.record_batch(columns, schema=TIMED)


def plan_of(page_views, source):
    node = Node(Read(source), SCHEMA, given_uid="read")
    node = Node(WithWatermark("at", 0), SCHEMA, (node,), given_uid="time")
    inner = Aggregate(("key",), (COUNT,), Window("at", 10, 10), emits_closed=True)
    node = Node(inner, COUNTED, (node,), given_uid="inner")
    node = Node(MapInArrow(at_their_ends, "ends"), TIMED, (node,), given_uid="ends")
    node = Node(DropDuplicates(("key", "at"), "at", 0), TIMED, (node,), given_uid="once")
    outer = Aggregate(("key",), (SUM,), Window("at", 40, 40), emits_closed=True)
    node = Node(outer, COUNTED, (node,), given_uid="outer")
    sink = FileSink(str(page_views.home / "sums"), "parquet", COUNTED)
    return build_plan("sums", [Node(Write(sink), COUNTED, (node,), given_uid="write")], 2)


@pytest.mark.parametrize("backend", ["fs", "rocksdb"])
def test_no_row_is_late_behind_a_window_and_a_kill_in_the_middle_changes_nothing(
    page_views, backend
):
    gate, middle = page_views.gate("gate"), MOMENTS // 2 + 7
    script = (*records(0, middle), Wait(gate), *records(middle, MOMENTS))
    source = ScriptedSource(SCHEMA, (script, script))

    running = page_views.start(plan_of(page_views, source), stateBackend=backend)
    running.wait_for_records(2 * KEYS * middle)
    running.next_checkpoint()
    running.kill(slot=0)
    assert running.wait(AttemptStarted, attempt=2).restored_from is not None
    gate.open()
    running.finish()

    sums = pq.read_table(page_views.home / "sums").to_pylist()
    found = Counter({(row["key"], row[WINDOW]["start"].microsecond): row["n"] for row in sums})
    assert found == {(key, start): 2 * 40 for key in range(KEYS) for start in range(0, MOMENTS, 40)}
    assert len(sums) == len(found)
    assert running.query.summary.records_late == 0
