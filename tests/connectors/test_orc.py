"""ORC files: read in pieces, rewound, written, and honest about misfits."""

import io
import pickle
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyarrow import orc

from stillframe.api.sources import SourceContext
from stillframe.clock import SystemClock
from stillframe.connectors import orc as connector
from stillframe.connectors.file_encoders import Encoding
from stillframe.connectors.orc import OrcSource
from stillframe.errors import BuildError, DataError
from stillframe.ids import SubtaskIndex

SCHEMA = pa.schema([("n", pa.int64()), ("name", pa.string())])


def table_of(start, stop):
    rows = range(start, stop)
    return pa.table({"n": rows, "name": [f"name {n}" for n in rows]}, schema=SCHEMA)


def read(source, splits, **wanted):
    context = SourceContext(SubtaskIndex(0), 1, SystemClock(), **wanted)
    reader = pickle.loads(pickle.dumps(source)).open(splits, context)
    yield from reader.read()
    reader.close()


def write_in_stripes(path, table):
    """A writer closes a stripe when it has its size, which it looks at between batches."""
    with orc.ORCWriter(str(path), stripe_size=1, batch_size=25) as writer:
        writer.write(table)


def test_orc_rewinds_to_any_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(connector, "BATCH_ROWS", 20)
    write_in_stripes(tmp_path / "a.orc", table_of(0, 90))
    assert orc.ORCFile(tmp_path / "a.orc").nstripes > 1
    source = OrcSource(str(tmp_path), SCHEMA)
    whole = list(read(source, source.splits(1)))

    for place, (after, _) in enumerate(whole):
        rest = [batch for _, batch in read(source, [after])]
        begun = [batch for _, batch in whole[: place + 1]]
        assert pa.Table.from_batches(begun + rest, SCHEMA).equals(table_of(0, 90))
    assert whole[-1][0].position["ended"]


def test_an_orc_file_that_is_another_one_is_not_read_on(tmp_path, monkeypatch):
    monkeypatch.setattr(connector, "BATCH_ROWS", 2)
    orc.write_table(table_of(0, 9), tmp_path / "a.orc")
    source = OrcSource(str(tmp_path), SCHEMA)
    after, _ = next(read(source, source.splits(1)))
    orc.write_table(table_of(1, 9), tmp_path / "a.orc")
    with pytest.raises(DataError, match="is not the one that the job has begun to read"):
        list(read(source, [after]))


def test_orc_columns_are_picked_by_name_widened_and_null_if_missing(tmp_path):
    found = {"N": pa.array([1], pa.int32()), "at": pa.array([5], pa.timestamp("ms")), "x": ["y"]}
    orc.write_table(pa.table(found), tmp_path / "a.orc")
    schema = pa.schema(
        [("n", pa.int64()), ("missing", pa.float64()), ("at", pa.timestamp("us", "UTC"))]
    )
    source = OrcSource(str(tmp_path), schema)
    ((_, batch),) = read(source, source.splits(1))
    at = datetime(1970, 1, 1, 0, 0, 0, 5000, UTC)
    assert batch.to_pylist() == [{"n": 1, "missing": None, "at": at}]
    ((_, batch),) = read(source, source.splits(1), columns=("missing",))
    assert batch.to_pylist() == [{"missing": None}]


def test_an_orc_column_of_another_type_and_a_file_that_is_none_are_named(tmp_path):
    orc.write_table(table_of(0, 3), tmp_path / "a.orc")
    source = OrcSource(str(tmp_path), pa.schema([("name", pa.int64())]))
    with pytest.raises(DataError, match=r"column name of .*/a\.orc is string, but int64"):
        list(read(source, source.splits(1)))
    (tmp_path / "a.orc").write_text("no such thing")
    with pytest.raises(DataError, match=r"/a\.orc cannot be read as ORC"):
        list(read(source, source.splits(1)))


@pytest.mark.parametrize("codec", [None, "none", "snappy"])
def test_what_is_written_as_orc_is_read_as_what_it_was(codec):
    file = io.BytesIO()
    encoder = Encoding("orc", compression=codec).open(file, SCHEMA)
    for begin in (0, 5):
        encoder.write_table(table_of(begin, begin + 5))
    encoder.close()
    assert not file.closed
    assert orc.read_table(io.BytesIO(file.getvalue())).equals(table_of(0, 10))


def test_what_orc_cannot_hold_is_refused_before_anything_is_written():
    with pytest.raises(BuildError, match="x is an interval, which is not written as ORC"):
        Encoding("orc").check(pa.schema([("x", pa.duration("us"))]))
    with pytest.raises(BuildError, match="'brotli', but orc is written with one of"):
        Encoding("orc", compression="brotli").check(SCHEMA)
