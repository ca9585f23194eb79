"""Delta and Iceberg tables as sinks, read by the libraries' own clients: each row once."""

from __future__ import annotations

import datetime
import decimal
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pyarrow as pa
import pytest
from s3_servers import Front

from stillframe.api.sinks import CommitterContext, Prepared, SinkContext
from stillframe.connectors.delta_table import delta_from_options, s3_settings
from stillframe.connectors.iceberg_table import iceberg_from_options
from stillframe.errors import BuildError, DataError, StartRefused, StorageError, Unavailable
from stillframe.ids import Mark, Writer
from stillframe.options import Options
from stillframe.storage.local import LocalStore
from stillframe.storage.staging import StagedFiles
from stillframe.testing.conformance import check_sink

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


class Delta:
    def sink(self, place, schema=SCHEMA, **options):
        given = {"path": f"{place}/table", "createTable": "true", **options}
        return delta_from_options(Options("the sink delta", given), schema)

    def table(self, sink):
        from deltalake import DeltaTable

        return DeltaTable(sink.path, storage_options=sink.storage_options)

    def read(self, sink):
        return self.table(sink).to_pyarrow_table()


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

    def table(self, sink):
        catalog = sink.load_catalog()
        try:
            return catalog.load_table(sink.table)
        finally:
            catalog.close()

    def read(self, sink):
        return self.table(sink).scan().to_arrow()


@pytest.fixture(params=[Delta, Iceberg])
def kind(request):
    return request.param()


def test_the_sink_keeps_every_promise(kind):
    def made(place):
        sink = kind.sink(place, partitionBy="name")
        sink.check_start()
        return sink

    check_sink(made, lambda sink: kind.read(sink).to_pylist(), checks=6, seed=3)


class House:
    """A job's store, and a table outside of it."""

    def __init__(self, directory, kind):
        self.directory = directory
        self.kind = kind
        self.staging = StagedFiles(LocalStore(directory / "job"))
        self.outside = directory
        self.incarnations = 0
        self.use(SCHEMA)

    def use(self, schema, **options):
        """Another table, with these columns, and another job."""
        self.incarnations += 1
        self.incarnation = f"i-{self.incarnations}"
        self.outside = self.outside / "outside"
        self.outside.mkdir()
        self.write_with(schema, **options)

    def write_with(self, schema, **options):
        """The same table, with these columns of a stream."""
        self.schema = schema
        self.sink = self.kind.sink(self.outside, schema, **options)
        self.sink.check_start()

    def stage(self, checkpoint_id, *rows, attempt=1, subtask=0):
        """One part, as the committer is given it."""
        context = SinkContext("job", attempt, "rows", subtask, self.incarnation, self.staging)
        with closing(self.sink.open_writer(context)) as writer:
            columns = zip(*rows, strict=True)
            arrays = [pa.array(c, f.type) for c, f in zip(columns, self.schema, strict=True)]
            writer.write(pa.record_batch(arrays, self.schema))
            committables = writer.rotate(checkpoint_id)()
        return Prepared(
            Mark(Writer(self.incarnation, "rows", None), checkpoint_id), tuple(committables)
        )

    def committer(self):
        return closing(self.sink.open_committer(CommitterContext("job", self.staging)))

    def commit(self, *parts):
        """By another process each time, as far as the table can tell."""
        with self.committer() as committer:
            committer.commit(0, parts)

    def sweep(self, older_than, *kept):
        with self.committer() as committer:
            keep = [each for part in kept for each in part.committables]
            committer.sweep("job", "rows", older_than, keep)

    def files_of(self, part):
        """What a target is given of it."""
        with self.committer() as committer:
            return list(committer._rows(part))

    def rows(self):
        found = self.kind.read(self.sink).to_pylist()
        return sorted((tuple(row.values()) for row in found), key=lambda row: row[0])

    def data_files(self):
        return sorted(each.name for each in self.outside.rglob("part-*.parquet"))

    def notes(self):
        return sorted(each.name for each in (self.directory / "job").rglob("prepared/*/*"))


@pytest.fixture
def house(tmp_path, kind):
    return House(tmp_path, kind)


def refuse_nothing(batch, reason):
    raise AssertionError(reason)


# --- Exactly once ----------------------------------------------------------------------------


def test_what_is_written_is_seen_when_it_is_committed_and_once(house):
    parts = [house.stage(1, (1, "a"), (2, None)), house.stage(1, (3, "b"), subtask=1)]
    both = Prepared(parts[0].mark, parts[0].committables + parts[1].committables)
    assert house.rows() == []

    house.commit(both)
    house.commit(both)
    house.commit(house.stage(2, (4, "c")))

    assert house.rows() == [(1, "a"), (2, None), (3, "b"), (4, "c")]
    assert [name for name in house.notes() if name.endswith(("files", "swept"))] == []


def test_an_entry_whose_receipt_was_never_noted_is_found_by_its_mark(house):
    part = house.stage(7, (1, "a"))
    target = house.sink.open_target()
    assert target.begin(part.mark.writer) is None
    target.write(part.mark, iter(house.files_of(part)), refuse_nothing)

    house.commit(part)

    assert house.rows() == [(1, "a")]


@pytest.mark.parametrize("first", ["a mark without files", "the same part"])
def test_who_has_looked_and_comes_late_is_refused_by_the_table(house, first):
    """The classic zombie: both have looked, and neither has found a mark."""
    part = house.stage(2, (1, "a"))
    older, newer = house.sink.open_target(), house.sink.open_target()
    assert older.begin(part.mark.writer) is None
    assert newer.begin(part.mark.writer) is None
    if first == "the same part":
        newer.write(part.mark, iter(house.files_of(part)), refuse_nothing)
    else:
        newer.write(Mark(part.mark.writer, 0), iter(()), refuse_nothing)

    with pytest.raises(Unavailable, match="changed at the same time"):
        older.write(part.mark, iter(house.files_of(part)), refuse_nothing)
    house.commit(part)

    assert house.rows() == [(1, "a")]


def test_others_may_write_to_the_table_at_the_same_time(house):
    part = house.stage(2, (1, "a"))
    theirs = house.stage(1, (2, "b"), subtask=1)
    target = house.sink.open_target()
    target.begin(part.mark.writer)
    other = house.sink.open_target()
    mark = Mark(Writer("other", "rows", None), 1)
    other.begin(mark.writer)
    other.write(mark, iter(house.files_of(theirs)), refuse_nothing)

    house.commit(part)

    assert house.rows() == [(1, "a"), (2, "b")]


def test_two_jobs_with_one_savepoint_do_not_see_each_others_marks(house):
    house.commit(house.stage(3, (1, "a")))
    part = house.stage(3, (2, "b"))

    house.commit(Prepared(Mark(Writer("another", "rows", None), 3), part.committables))

    assert house.rows() == [(1, "a"), (2, "b")]


def remove_marks(house):
    if isinstance(house.kind, Iceberg):
        with house.kind.table(house.sink).transaction() as transaction:
            known = transaction.table_metadata.properties
            transaction.remove_properties(*(name for name in known if "stillframe" in name))
    else:
        import shutil

        shutil.rmtree(house.sink.path)
        house.sink.create_table()


def test_where_somebody_removed_the_marks_nobody_guesses_what_was_written(house):
    house.commit(house.stage(1, (1, "a")))
    part = house.stage(2, (2, "b"))
    remove_marks(house)

    with pytest.raises(DataError, match=r"was there and is gone; look whether these rows"):
        house.commit(part)

    assert (2, "b") not in house.rows()


def test_a_job_that_is_given_another_table_goes_on_there(house):
    house.commit(house.stage(1, (1, "a")))
    job = house.incarnation
    house.use(SCHEMA)
    house.incarnation = job

    with house.committer() as committer:
        committer.sweep("job", "rows", 2, ())
        committer.commit(1, [house.stage(2, (2, "b"), attempt=2)])

    assert house.rows() == [(2, "b")]


def test_a_table_that_is_gone_is_told(house):
    part = house.stage(1, (1, "a"))
    house.sink = house.kind.sink(house.directory / "job" / "prepared")

    with pytest.raises(DataError, match=r"there is no (Delta|Iceberg) table .* any more"):
        house.commit(part)


def test_a_data_file_that_somebody_cleaned_away_is_never_named_by_the_log(house, monkeypatch):
    monkeypatch.setattr("stillframe.connectors.table_sink._OLD_SECONDS", -1)
    part = house.stage(1, (1, "a"))
    house.commit(house.stage(1, (0, "z")))
    late = house.stage(2, (1, "a"))
    for name in house.data_files():
        if name in str(late.committables):
            next(Path(house.directory).rglob(name)).unlink()

    with pytest.raises(
        StorageError, match=r"part-.* \(1 rows\) .* is gone before it was committed"
    ):
        house.commit(late)

    assert house.rows() == [(0, "z")]
    assert part.committables


# --- Sweeping --------------------------------------------------------------------------------


def test_files_of_older_attempts_go_and_those_of_the_log_and_of_pending_commits_stay(house):
    house.commit(house.stage(1, (1, "a")))
    committed = house.data_files()
    house.stage(2, (2, "b"))
    kept, newer = house.stage(3, (3, "c")), house.stage(4, (4, "d"), attempt=2)

    house.sweep(2, kept)

    assert len(house.data_files()) == 3
    assert set(committed) < set(house.data_files())
    house.commit(kept)
    house.commit(newer)
    assert house.rows() == [(1, "a"), (3, "c"), (4, "d")]


def test_a_file_that_was_committed_stays_though_its_note_is_left(house):
    part = house.stage(1, (1, "a"))
    target = house.sink.open_target()
    target.begin(part.mark.writer)
    target.write(part.mark, iter(house.files_of(part)), refuse_nothing)

    house.sweep(2)

    assert house.rows() == [(1, "a")]
    assert house.notes() == []


def test_who_has_looked_before_a_sweep_can_no_longer_commit_what_was_swept(house):
    """An older checkpoint is restored while the driver of a newer one is about to commit."""
    house.commit(house.stage(1, (1, "a")))
    part = house.stage(2, (2, "b"))
    zombie = house.sink.open_target()
    assert zombie.begin(part.mark.writer) == 1
    files = house.files_of(part)

    house.sweep(2)

    with pytest.raises(Unavailable):
        zombie.write(part.mark, iter(files), refuse_nothing)
    with pytest.raises(StorageError, match=r"1 rows .* are gone"):
        house.commit(part)
    with house.committer() as committer, pytest.raises(StorageError, match=r"1 rows .* are gone"):
        next(committer._rows(part))
    assert house.rows() == [(1, "a")]
    assert len(house.data_files()) == 1


def test_a_sweep_that_was_cut_off_is_brought_to_its_end_by_the_next(house, monkeypatch):
    house.stage(2, (2, "b"))
    with monkeypatch.context() as patched:
        patched.setattr(type(house.sink), "required_table", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            house.sweep(2)
    assert len(house.data_files()) == 1

    house.sweep(2)

    assert house.data_files() == house.notes() == []


# --- Columns ---------------------------------------------------------------------------------

TYPES = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int16()),
        ("name", pa.string()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("local", pa.timestamp("us")),
        ("price", pa.decimal128(10, 2)),
        ("ratio", pa.float64()),
        ("open", pa.bool_()),
        ("raw", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("x", pa.float32())])),
        ("counts", pa.map_(pa.string(), pa.int64())),
    ]
)
NOON = datetime.datetime(2026, 1, 2, 12, 30, 15, 123456)
ROW = (
    1, 2, "n", datetime.date(2026, 1, 2), NOON.replace(tzinfo=datetime.UTC), NOON,
    decimal.Decimal("3.14"), float("inf"), True, b"\0\xff", ["a", None], {"x": 0.5}, [("k", 1)],
)  # fmt: skip


def test_values_of_every_type_are_read_as_they_were_written(house):
    for by in ("", "small,name,day,at,local,price,open"):
        house.use(TYPES, partitionBy=by)
        house.commit(house.stage(len(by) + 1, ROW, (2, *[None] * 12)))

        found = house.kind.read(house.sink).select(TYPES.names).sort_by("id").to_pylist()
        assert [tuple(row.values()) for row in found] == [ROW, (2, *[None] * 12)]


def test_a_reader_skips_files_by_what_the_log_says_of_them(house):
    for first in (0, 100):
        house.commit(house.stage(first + 1, *((first + n, f"n{first + n}") for n in range(10))))

    if isinstance(house.kind, Delta):
        found = pa.table(house.kind.table(house.sink).get_add_actions(flatten=True)).to_pylist()
        spans = sorted((each["min.id"], each["max.id"], each["num_records"]) for each in found)
        assert spans == [(0, 9, 10), (100, 109, 10)]
    else:
        scan = house.kind.table(house.sink).scan(row_filter="id >= 105")
        assert [task.file.record_count for task in scan.plan_files()] == [10]


def test_rows_go_to_the_partitions_of_a_table_that_is_there(house):
    house.use(SCHEMA, partitionBy="name")
    house.write_with(SCHEMA)

    house.commit(house.stage(1, (1, "a"), (2, "b"), (3, "a"), (4, None)))

    assert len(house.data_files()) == 3
    assert house.rows() == [(1, "a"), (2, "b"), (3, "a"), (4, None)]


def test_a_wider_table_takes_the_rows_and_its_other_columns_are_null(house):
    house.use(pa.schema([("more", pa.string()), ("id", pa.int64()), ("name", pa.string())]))
    house.write_with(pa.schema([("id", pa.int32())]))

    house.commit(house.stage(1, (5,)))

    assert house.kind.read(house.sink).to_pylist() == [{"more": None, "id": 5, "name": None}]


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        ([("id", pa.string())], {}, r"column id is string, and in .* it is int64: cast it"),
        ([("id", pa.float64())], {}, r"column id is double, and in .* it is int64: cast it"),
        ([("di", pa.int64())], {}, r"has no column di: it has id, name; add the column"),
        (SCHEMA, {"partitionBy": "id"}, r"by nothing and not by id: correct"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused_before_the_start(house, schema, options, said):
    with pytest.raises(StartRefused, match=said):
        house.write_with(pa.schema(schema), **options)


def test_a_table_that_is_missing_is_not_made_unless_it_is_asked_for(kind, tmp_path):
    with pytest.raises(StartRefused, match=r"there is no .*: create it, or say .option\('createT"):
        kind.sink(tmp_path, createTable="false").check_start()


def test_a_null_is_refused_where_the_table_takes_none(house):
    house.use(pa.schema([pa.field("id", pa.int64(), nullable=False)]))
    house.write_with(pa.schema([("id", pa.int64())]))

    with pytest.raises(DataError, match=r"column id has a null, and .* takes none there"):
        house.stage(1, (None,))


def test_what_makes_no_sense_is_told_when_the_sink_is_made(kind, tmp_path):
    with pytest.raises(BuildError, match="partitionBy names a column nam, and the stream has id"):
        kind.sink(tmp_path, partitionBy="nam")
    with pytest.raises(BuildError, match="column took is duration"):
        kind.sink(tmp_path, pa.schema([("took", pa.duration("us"))]))


def test_a_package_that_is_missing_is_named(kind, tmp_path, monkeypatch):
    for module in ("deltalake", "deltalake.exceptions", "pyiceberg", "pyiceberg.exceptions"):
        monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(BuildError, match=r"needs the package .*: pip install 'stillframe\["):
        kind.sink(tmp_path).check_start()


def test_a_delta_table_that_asks_its_writers_for_more_is_refused(tmp_path):
    sink = Delta().sink(tmp_path)
    sink.check_start()
    Delta().table(sink).alter.add_constraint({"positive": "id > 0"})

    with pytest.raises(
        StartRefused, match=r"asks of whoever writes .*delta\.constraints\.positive"
    ):
        sink.check_start()


# --- In a bucket -----------------------------------------------------------------------------


S3_SECRET = "a-secret-key"


def in_bucket(kind, bucket, endpoint):
    """The options of a table there."""
    place = f"s3://{bucket}/lake"
    if isinstance(kind, Delta):
        return {
            "path": f"{place}/table",
            "storage.AWS_ENDPOINT_URL": endpoint,
            "storage.AWS_ACCESS_KEY_ID": "an-access-key",
            "storage.AWS_SECRET_ACCESS_KEY": S3_SECRET,
            "storage.AWS_REGION": "us-east-1",
            "storage.AWS_ALLOW_HTTP": "true",
        }
    return {
        "catalog.warehouse": place,
        "catalog.s3.endpoint": endpoint,
        "catalog.s3.access-key-id": "an-access-key",
        "catalog.s3.secret-access-key": S3_SECRET,
        "catalog.s3.region": "us-east-1",
    }


@pytest.mark.s3
def test_a_table_may_be_in_a_bucket(house, s3_bucket, s3_port):
    settings = in_bucket(house.kind, s3_bucket, f"http://127.0.0.1:{s3_port}")
    house.use(SCHEMA, partitionBy="name", **settings)
    house.commit(house.stage(1, (1, "a"), (2, "b")))
    kept, swept = house.stage(2, (3, "c")), house.stage(3, (4, "d"))
    target = house.sink.open_target()
    target.begin(swept.mark.writer)
    files = house.files_of(swept)

    house.sweep(2, kept)
    with pytest.raises(Unavailable):
        target.write(swept.mark, iter(files), refuse_nothing)
    house.commit(kept)
    house.commit(kept)

    assert house.rows() == [(1, "a"), (2, "b"), (3, "c")]
    table = house.sink.open_table()
    names = [file["name"] for file in swept.committables[0]["parts"][0]["files"]]
    assert [table.has(name) for name in names] == [False]
    assert S3_SECRET not in f"{house.sink}"


@pytest.mark.s3
def test_while_a_bucket_does_not_answer_a_writer_keeps_no_other_thread_from_running(
    house, s3_bucket, gateway
):
    """The gateway is a thread of this process, as a slot's signs of life are of its own."""
    patience = {"storage.timeout": "10s", "storage.max_retries": "0"}
    more = patience if isinstance(house.kind, Delta) else {}
    house.use(SCHEMA, **in_bucket(house.kind, s3_bucket, gateway.url), **more)
    table = house.sink.open_table()
    gateway.stall()
    content = pa.py_buffer(b"of a data file")
    putting = threading.Thread(target=table.put, args=("part-0.parquet", content))
    putting.start()
    assert gateway.stalled.wait(20)
    gateway.flow()
    putting.join(20)

    assert table.has("part-0.parquet")


def test_what_only_deltalake_understands_is_left_to_deltalake(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    keys = {"AWS_ACCESS_KEY_ID": "key", "aws_secret_access_key": "hush"}
    known = {"fs.s3a.access.key": "key", "fs.s3a.secret.key": "hush"}

    assert s3_settings("s3a://lake/t", {**keys, "AWS_ALLOW_HTTP": "true"}) == known
    assert s3_settings("s3://lake/t", {**keys, "AWS_SERVER_SIDE_ENCRYPTION": "aws:kms"}) is None
    assert s3_settings("gs://lake/t", keys) is None
    assert s3_settings("s3://lake/t", {}) == {}, "a role of the machine"
    (tmp_path / "config").touch()
    assert s3_settings("s3://lake/t", keys) == known
    assert s3_settings("s3://lake/t", {}) is None, "keys may be in Amazon's own files"


@pytest.mark.s3
@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (400, "ExpiredToken")])
def test_a_bucket_that_lets_nobody_in_is_told_before_the_start_and_when_files_are_written(
    house, s3_bucket, s3_port, status, code
):
    front = Front(s3_port)
    with ExitStack() as ending:
        ending.callback(front.end)
        settings = in_bucket(house.kind, s3_bucket, front.url)
        house.use(SCHEMA, **settings)
        house.commit(house.stage(1, (1, "a")))
        front.refuses = lambda method, headers: (status, code)

        with pytest.raises(StartRefused) as at_start:
            house.sink.check_start()
        with pytest.raises((StorageError, Unavailable, DataError)) as later:
            house.stage(2, (2, "b"))
        front.refuses = lambda method, headers: None
        house.commit(house.stage(2, (2, "b")))
        assert house.rows() == [(1, "a"), (2, "b")]

    for told in (at_start, later):
        said = str(told.value)
        assert house.sink.describe() in said
        assert S3_SECRET not in said
        assert len(said) < 600, said


# --- Iceberg's own ---------------------------------------------------------------------------


def test_the_tables_own_properties_stay_as_they_are(tmp_path):
    house = House(tmp_path, Iceberg())
    house.commit(house.stage(1, (1, "a")))

    properties = house.kind.table(house.sink).properties
    assert [name for name in properties if "retry" in name] == []
    assert properties["stillframe.mark.i-1/rows/all"] == "1"


def test_a_writer_that_is_over_leaves_no_mark_and_others_are_told(tmp_path, caplog):
    house = House(tmp_path, Iceberg())
    house.commit(house.stage(1, (1, "a")))
    part = house.stage(1, (2, "b"))
    house.commit(Prepared(Mark(Writer("another", "rows", None), 1), part.committables))
    (house.directory / "job/prepared/rows/marked-another-all").unlink()

    with house.committer() as committer:
        committer.end_writers("rows", set())

    marks = [name for name in house.kind.table(house.sink).properties if "mark" in name]
    assert marks == ["stillframe.mark.another/rows/all"]
    assert "has marks of other incarnations of sink rows (another)" in caplog.text


def test_a_mark_stays_when_snapshots_expire(tmp_path):
    house = House(tmp_path, Iceberg())
    parts = [house.stage(n, (n, "a")) for n in (1, 2)]
    for part in parts:
        house.commit(part)
    table = house.kind.table(house.sink)
    former = [each.snapshot_id for each in table.snapshots()][:-1]
    table.maintenance.expire_snapshots().by_ids(former).commit()

    assert house.sink.open_target().begin(parts[0].mark.writer) == 2


def test_rows_are_parted_by_transforms_of_columns(tmp_path):
    house = House(tmp_path, Iceberg())
    with house.kind.table(house.sink).update_spec() as spec:
        spec.add_field("id", "bucket[2]").add_field("name", "truncate[1]")

    house.commit(house.stage(1, *((n, f"{'ab'[n % 2]}{n}") for n in range(8))))

    assert len(house.rows()) == 8
    scan = house.kind.table(house.sink).scan(row_filter="name = 'a4'")
    assert sum(task.file.record_count for task in scan.plan_files()) <= 4


def test_a_table_that_is_partitioned_anew_in_between_is_told_and_not_broken(tmp_path):
    house = House(tmp_path, Iceberg())
    part = house.stage(1, (1, "a"))
    with house.kind.table(house.sink).update_spec() as spec:
        spec.add_identity("name")

    with pytest.raises(DataError, match="is partitioned in another way than when"):
        house.commit(part)


def test_a_password_of_the_catalog_is_no_part_of_what_is_shown(tmp_path):
    given = {
        "catalog.uri": "postgresql+psycopg://me@localhost:1/c",
        "catalog.password": "hush-hush",
    }
    sink = Iceberg().sink(tmp_path, **given)

    with pytest.raises(StartRefused, match="cannot be reached") as refused:
        sink.check_start()

    assert "hush-hush" not in f"{refused.value}{sink}{sink.describe()}"
