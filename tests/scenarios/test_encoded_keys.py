"""Keys that come as dictionaries, as Parquet has them, are counted with those that do not; keys of
many megabytes are counted like any other."""

from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.parquet import ParquetSource
from stillframe.graph.logical import Aggregate, Node, Read, Union, Write
from stillframe.graph.plan import build_plan
from stillframe.testing.sources import ScriptedSource

SCHEMA = pa.schema([("app_id", pa.string()), ("n", pa.int64())])
COUNTS = pa.schema([("app_id", pa.string()), ("count", pa.int64())])


@pytest.fixture
def counted(page_views):
    """The last count of each app in all of these sources together."""

    def start(*sources):
        reads = tuple(
            Node(Read(source), SCHEMA, given_uid=f"read-{place}")
            for place, source in enumerate(sources)
        )
        together = Node(Union(), SCHEMA, reads)
        call = AggregateCall("count", None, "count", pa.int64())
        counts = Node(Aggregate(("app_id",), (call,)), COUNTS, (together,), given_uid="count")
        sink = FileSink(str(page_views.home / "counts"), "parquet", COUNTS)
        plan = build_plan("apps", [Node(Write(sink), COUNTS, (counts,), given_uid="write")], 2)
        page_views.start(plan).finish()
        last = {}
        for row in pq.read_table(page_views.home / "counts").to_pylist():
            last[row["app_id"]] = max(row["count"], last.get(row["app_id"], 0))
        return last

    return start


def rows(apps):
    return pa.table([pa.array(apps, pa.string()), pa.array(range(len(apps)))], schema=SCHEMA)


def test_counts_are_those_of_all_files_and_streams_however_their_keys_come(counted, tmp_path):
    many = [f"app-{n % 23}" for n in range(20_000)]
    some = [f"app-{n % 5}" if n % 7 else None for n in range(1_000)]  # too few to be combined
    different = [f"visitor-{n}" for n in range(3_000)]
    (tmp_path / "in").mkdir()
    pq.write_table(rows(many), tmp_path / "in" / "many.parquet", row_group_size=9_000)
    pq.write_table(rows(some), tmp_path / "in" / "some.parquet")
    pq.write_table(rows(many), tmp_path / "in" / "plain.parquet", use_dictionary=False)
    pq.write_table(rows(different), tmp_path / "in" / "different.parquet")
    scripted = ScriptedSource(SCHEMA, (tuple(rows(some).to_batches()),))

    last = counted(ParquetSource(str(tmp_path / "in"), SCHEMA), scripted)

    assert last == Counter([*many, *many, *some, *some, *different])


@pytest.mark.slow
def test_keys_larger_than_a_channels_buffer_are_counted(counted):
    long = "x" * 10_000_000
    apps = [long, f"{long}y", f"y{long}", "x" * 300_000_000]
    # One in a batch, and several.
    script = [*(rows([app]) for app in apps), rows(apps[:3]), rows([long, "short", long])]
    source = ScriptedSource(SCHEMA, tuple(tuple(each.to_batches()) for each in script))

    last = counted(source)

    assert last == {apps[0]: 4, apps[1]: 2, apps[2]: 2, apps[3]: 1, "short": 1}
