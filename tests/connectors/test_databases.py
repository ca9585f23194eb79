"""Databases as sinks, against real servers: each row once, or once for each key."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import tempfile
import threading
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from database_servers import PASSWORD

from stillframe.api.sinks import CommitterContext, Prepared, SinkContext
from stillframe.connectors.database_sink import jdbc_from_options
from stillframe.errors import DataError, OutputRefused, StartRefused, Unavailable
from stillframe.ids import Mark, Writer
from stillframe.options import Options
from stillframe.storage.local import LocalStore
from stillframe.storage.staging import StagedFiles

pytestmark = pytest.mark.database

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
KEYED = "id bigint primary key, name varchar(20)"
SERVERS = ["postgres", "mysql", "mariadb"]


@pytest.fixture(params=SERVERS)
def server(request):
    return request.getfixturevalue(request.param)


def options_for(server, table, **more):
    users = {"postgres": "postgres", "mysql": "root"}
    given = {
        "url": f"jdbc:{server.url}",
        "dbtable": table,
        "user": users[server.dialect],
        "password": PASSWORD,
        **more,
    }
    return {name: text for name, text in given.items() if text is not None}


def sink_of(server, table, schema=SCHEMA, **options):
    return jdbc_from_options(
        Options("the sink jdbc", options_for(server, table, **options)), schema
    )


class House:
    """A job's store, and a table outside of it."""

    def __init__(self, directory, server):
        self.directory = directory
        self.server = server
        self.staging = StagedFiles(LocalStore(directory / "job"))
        self.use("id bigint, name varchar(20)")
        self.incarnation = f"i-{self.table}"

    def use(self, columns, schema=SCHEMA, **options):
        """Another table, with these columns."""
        self.table = self.server.table(columns)
        self.schema = schema
        self.sink = sink_of(self.server, self.table, schema, **options)
        return self.table

    def stage(self, checkpoint_id, *rows, subtask=0):
        """One part, as the committer is given it."""
        context = SinkContext("job", 1, "rows", subtask, self.incarnation, self.staging)
        with closing(self.sink.open_writer(context)) as writer:
            writer.write(self.batch(*rows))
            committables = writer.rotate(checkpoint_id)()
        return Prepared(self.mark(checkpoint_id, subtask), tuple(committables))

    def batch(self, *rows):
        columns = zip(*rows, strict=True)
        arrays = [pa.array(c, f.type) for c, f in zip(columns, self.schema, strict=True)]
        return pa.record_batch(arrays, self.schema)

    def mark(self, checkpoint_id, subtask=0):
        return Mark(Writer(self.incarnation, "rows", subtask), checkpoint_id)

    def commit(self, *parts):
        """By another process each time, as far as the server can tell."""
        context = CommitterContext("job", self.staging)
        with closing(self.sink.open_committer(context)) as committer:
            committer.commit(0, parts)

    def put(self, checkpoint_id, *rows):
        self.commit(self.stage(checkpoint_id, *rows))

    def target(self):
        return closing(self.sink.open_target())

    def visible(self):
        return self.server.rows(self.table)

    def refused(self):
        """What is kept aside, each row with its reason."""
        files = self.directory.glob("job/prepared/*/refused-*.parquet")
        return [tuple(row.values()) for file in files for row in pq.read_table(file).to_pylist()]


@pytest.fixture
def house(tmp_path, server):
    return House(tmp_path, server)


def refuse_nothing(batch, reason):
    raise AssertionError(reason)


# --- Exactly once ----------------------------------------------------------------------------


def test_what_is_staged_is_seen_when_it_is_committed_and_once(house):
    part = house.stage(1, (1, "a"), (2, None))
    assert house.visible() == []

    house.commit(part)
    house.commit(part)

    assert house.visible() == [(1, "a"), (2, None)]


def test_a_transaction_whose_receipt_was_never_noted_is_found_by_its_mark(house):
    part = house.stage(7, (1, "a"))
    with house.target() as target:
        assert target.begin(part.mark.writer) is None
        target.write(part.mark, iter([house.batch((1, "a"))]), refuse_nothing)

    house.commit(part)

    assert house.visible() == [(1, "a")]


def test_a_later_checkpoint_is_written_and_its_mark_speaks_for_those_before(house):
    house.commit(house.stage(3, (1, "a")), house.stage(3, (2, "b"), subtask=1))
    house.commit(house.stage(5, (3, "c")))

    with house.target() as target:
        assert target.begin(house.mark(5).writer) == 5
        assert target.begin(house.mark(5, subtask=1).writer) == 3
    assert house.visible() == [(1, "a"), (2, "b"), (3, "c")]


def test_who_comes_second_waits_for_the_first_and_finds_its_mark(house):
    """The classic zombie: both have the same part, and one is in the middle of its transaction."""
    house.put(1, (0, "before"))
    mark, found = house.mark(2), []
    with house.target() as older, house.target() as newer:
        assert older.begin(mark.writer) == 1
        waits = threading.Thread(target=lambda: found.append(newer.begin(mark.writer)))
        waits.start()
        waits.join(1)
        assert waits.is_alive(), "whoever looks before the other is done finds an old mark"
        older.write(mark, iter([house.batch((1, "a"))]), refuse_nothing)
        waits.join(30)

    assert found == [2]
    assert house.visible() == [(0, "before"), (1, "a")]


def test_rows_without_their_mark_are_not_there(house):
    house.server.execute(
        f"create table {house.table}_marks (writer varchar(200) primary key, checkpoint_id bigint"
        " check (checkpoint_id <> 99), committed_at timestamp default current_timestamp)"
    )
    house.sink = sink_of(house.server, house.table, markTable=f"{house.table}_marks")
    house.put(1, (1, "a"))

    with pytest.raises(DataError):
        house.put(99, (2, "b"))

    assert house.visible() == [(1, "a")]


def test_one_who_holds_the_mark_and_stands_still_is_ended_by_the_server(house, monkeypatch):
    for module in ("postgres_session", "mysql_session"):
        monkeypatch.setattr(f"stillframe.connectors.{module}.IDLE_SECONDS_MAX", 1)
    mark = house.mark(2)
    with house.target() as frozen, house.target() as newer:
        assert frozen.begin(mark.writer) is None
        assert newer.begin(mark.writer) is None
        with pytest.raises(Unavailable):
            frozen.write(mark, iter([house.batch((1, "a"))]), refuse_nothing)
        newer.write(mark, iter([house.batch((1, "a"))]), refuse_nothing)

    assert house.visible() == [(1, "a")]


def test_a_table_that_somebody_has_locked_is_waited_for_by_short_tries(house, monkeypatch):
    session = f"stillframe.connectors.{house.server.dialect}_session"
    monkeypatch.setattr(f"{session}.LOCK_SECONDS_MAX", 1)
    part = house.stage(1, (1, "a"))

    with house.server.locked(house.table), pytest.raises(Unavailable):
        house.commit(part)
    house.commit(part)

    assert house.visible() == [(1, "a")]


def test_what_one_that_died_has_begun_is_undone_by_the_server(house):
    mark = house.mark(2)
    with house.target() as dead, house.target() as next_one:
        dead.begin(mark.writer)

        def half_way():
            yield house.batch(*[(n, "never") for n in range(60_000)])
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            dead.write(mark, half_way(), refuse_nothing)
        dead.abandon()
        assert next_one.begin(mark.writer) is None

    assert house.visible() == []


def test_two_jobs_with_one_savepoint_do_not_see_each_others_marks(house):
    house.put(3, (1, "a"))
    house.incarnation += "-again"

    house.put(3, (2, "b"))

    assert house.visible() == [(1, "a"), (2, "b")]


def test_where_somebody_emptied_the_marks_nobody_guesses_what_was_written(house):
    house.put(1, (1, "a"))
    part = house.stage(2, (2, "b"))
    with house.target() as target:  # it dies before it notes its receipt
        target.begin(part.mark.writer)
        target.write(part.mark, iter([house.batch((2, "b"))]), refuse_nothing)
    house.server.execute("delete from stillframe_marks")

    with pytest.raises(DataError, match=r"the row of writer .* in table stillframe_marks, which"):
        house.commit(part)

    assert house.visible() == [(1, "a"), (2, "b")]


def test_a_writer_that_is_over_leaves_no_mark(house):
    house.put(1, (1, "a"))
    context = CommitterContext("job", house.staging)

    with closing(house.sink.open_committer(context)) as committer:
        committer.end_writers("rows", set())

    writer = str(house.mark(1).writer)
    marks = house.server.execute("select writer from stillframe_marks")
    assert writer not in [each for (each,) in marks]


def test_marks_of_another_incarnation_are_told_and_not_compared(house, caplog):
    incarnation = f"before-{house.incarnation}"
    with house.target() as target:
        for uid in ("rows", "rows2", "ro/ws"):
            mark = Mark(Writer(incarnation if uid == "rows" else "another job", uid, 0), 50)
            target.begin(mark.writer)
            target.write(mark, iter([house.batch((1, "a"))]), refuse_nothing)

    house.put(3, (2, "b"))
    with closing(house.sink.open_committer(CommitterContext("job", house.staging))) as committer:
        committer.end_writers("rows", {house.mark(3).writer})

    assert (2, "b") in house.visible(), "though 50 is above 3"
    [said] = [each for each in caplog.messages if "other incarnations of sink rows" in each]
    assert incarnation in said
    assert house.incarnation not in said.replace(incarnation, "")
    assert "another job," not in said


def test_a_table_of_marks_that_was_dropped_is_made_again(house):
    with house.target() as target:
        house.server.execute("drop table if exists stillframe_marks")
        assert target.begin(house.mark(2).writer) is None
        target.write(house.mark(2), iter([house.batch((1, "a"))]), refuse_nothing)
        assert target.begin(house.mark(2).writer) == 2


# --- By keys ---------------------------------------------------------------------------------


def test_the_last_row_of_a_key_wins_within_a_part_and_across_parts(house):
    house.use(KEYED, upsertKeys="id")
    house.put(1, (1, "a"), (2, "b"), (1, "c"), (1, "d"))
    house.put(2, (2, "e"), (3, None))

    assert house.visible() == [(1, "d"), (2, "e"), (3, None)]


def test_keys_of_several_columns_and_nothing_else_are_there_once(house):
    house.use("id bigint, name varchar(20), primary key (name, id)", upsertKeys="id,name")

    house.put(1, (1, "a"), (1, "b"), (1, "a"))
    house.put(2, (1, "a"))

    assert house.visible() == [(1, "a"), (1, "b")]


def test_rows_are_deleted_where_a_column_says_so_in_their_order(house):
    schema = pa.schema([*SCHEMA, ("gone", pa.bool_())])
    house.use("id bigint primary key, name varchar(20) not null", schema, upsertKeys="id",
              deleteColumn="gone")  # fmt: skip
    house.put(1, (1, "a", False), (2, "b", None), (3, "c", True), (4, "d", False))

    house.put(2, (1, None, True), (2, None, True), (2, "again", False), (9, None, True),
              (5, "e", False), (5, None, True))  # fmt: skip

    assert house.visible() == [(2, "again"), (4, "d")]


def test_a_restored_older_checkpoint_writes_its_keys_again(house):
    house.use(KEYED, upsertKeys="id")
    for checkpoint_id, name in ((1, "one"), (2, "two"), (3, "three")):
        house.put(checkpoint_id, (1, name))

    house.put(4, (1, "two"))  # what came after checkpoint 1 is done again, under newer marks
    assert house.visible() == [(1, "two")]
    house.put(5, (1, "three"))

    assert house.visible() == [(1, "three")]


# --- What columns hold -----------------------------------------------------------------------

KINDS = pa.schema(
    [
        ("i", pa.int32()),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("m", pa.decimal128(30, 9)),
        ("s", pa.string()),
        ("b", pa.binary()),
        ("t", pa.bool_()),
        ("day", pa.date32()),
        ("moment", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
    ]
)
MOMENT = datetime.datetime(2026, 11, 18, 1, 2, 3, 456789)
ROWS = [
    (
        -(2**31),
        1.5,
        1e300,
        decimal.Decimal("123456789012345678901.000000001"),
        "a\"b'c\\d\n\t,\r%s é 漢 \U0001f600",
        bytes(range(256)),
        True,
        datetime.date(2026, 2, 28),
        MOMENT.replace(tzinfo=datetime.UTC),
        MOMENT,
    ),
    (0, -0.25, 0.1, decimal.Decimal("0.000000001"), "", b"", False, datetime.date(1970, 1, 1),
     MOMENT.replace(tzinfo=datetime.UTC), MOMENT),
    (None,) * 10,
    (1, 2.0, 3.0, decimal.Decimal("4.5"), "\\.", b"\\x00", True, datetime.date(1969, 12, 31),
     MOMENT.replace(tzinfo=datetime.UTC), MOMENT),
]  # fmt: skip


@pytest.mark.parametrize("keys", [None, "i"])
def test_a_created_table_gives_back_what_was_written(house, keys):
    house.schema, house.table = KINDS, f"{house.table}_made"
    house.sink = sink_of(house.server, house.table, KINDS, createTable="true", upsertKeys=keys)
    house.sink.check_start()
    rows = [row for row in ROWS if row[0] is not None or keys is None]

    house.put(1, *rows)

    assert sorted(map(plain, house.visible()), key=repr) == sorted(map(plain, rows), key=repr)


def plain(row):
    """Without what drivers give in another way: MySQL has no type of its own for true, and no time
    zones."""
    row = list(row)
    row[6] = None if row[6] is None else bool(row[6])
    row[8] = None if row[8] is None else row[8].replace(tzinfo=None)
    return tuple(row)


def test_a_row_larger_than_what_is_loaded_at_once_is_written(house):
    house.use(f"id bigint, name {'text' if house.server.dialect == 'postgres' else 'longtext'}")
    large = "x" * (9 << 20)

    house.put(1, (1, "a"), (2, large), (3, "b"))

    assert [len(name) for _, name in house.visible()] == [1, len(large), 1]


def test_names_with_other_signs_are_written_as_they_are(house):
    quote = '"' if house.server.dialect == "postgres" else "`"
    name = f"{quote}The 100% {house.table}{quote}"
    schema = pa.schema([("a %s b", pa.int64()), ("select", pa.string())])
    sink = sink_of(house.server, name.replace("%", ""), schema, createTable="true",
                   upsertKeys="a %s b", createTableColumnTypes="select varchar(30)")  # fmt: skip
    sink.check_start()
    house.schema, house.sink, house.table = schema, sink, name.replace("%", "")

    house.put(1, (1, "x"), (1, "y"))

    assert house.visible() == [(1, "y")]


# --- MySQL's own -----------------------------------------------------------------------------


@pytest.fixture
def loading(tmp_path, mariadb):
    """With LOAD DATA LOCAL."""
    house = House(tmp_path, mariadb)
    house.url = f"jdbc:{mariadb.url}?allowLoadLocalInfile=true"
    return house


def test_rows_that_are_loaded_from_memory_are_what_was_written(loading):
    schema = pa.schema([field for field in KINDS if field.name != "b"])
    rows = [row[:5] + row[6:] for row in ROWS]
    loading.schema, loading.table = schema, f"{loading.table}_made"
    loading.sink = sink_of(loading.server, loading.table, schema, url=loading.url,
                           createTable="true")  # fmt: skip
    loading.sink.check_start()

    loading.put(1, *rows)

    def known(row):
        return (*row[:5], None if row[5] is None else bool(row[5]), row[6], row[8])

    assert sorted(map(known, loading.visible()), key=repr) == sorted(map(known, rows), key=repr)


def test_a_server_gets_no_file_that_it_was_not_told_of(loading):
    with closing(loading.sink.open_session()) as session:
        asking = f"load data local infile '/etc/hostname' into table {loading.table}"
        with pytest.raises(DataError, match="asks for the file '/etc/hostname' of this machine"):
            session.execute(asking)


def test_rows_that_loading_would_skip_or_change_are_refused_all_the_same(loading):
    loading.use("id tinyint primary key, name varchar(5)", url=loading.url)
    mark = loading.mark(1)
    refused = []
    with loading.target() as target:
        target.begin(mark.writer)
        rows = [(1, "a"), (2, "b"), (1, "again"), (300, "c"), (4, "too long"), (5, "d")]
        target.write(mark, iter([loading.batch(*rows)]), lambda *told: refused.append(told))

    assert loading.visible() == [(1, "a"), (2, "b"), (5, "d")]
    reasons = {row.column("id")[0].as_py(): reason for row, reason in refused}
    assert set(reasons) == {1, 300, 4}
    assert "Duplicate entry" in reasons[1]
    assert "Out of range" in reasons[300]
    assert "too long" in reasons[4]


def test_a_table_that_mysql_would_treat_otherwise_is_refused_before_the_start(tmp_path, mariadb):
    house = House(tmp_path, mariadb)
    house.use("id bigint primary key, name varchar(9) unique", upsertKeys="id")
    with pytest.raises(StartRefused, match="has a second unique index, of name, by which MySQL"):
        house.sink.check_start()

    house.use("id bigint unique, name varchar(9), n int auto_increment primary key",
              upsertKeys="id")  # fmt: skip
    house.sink.check_start()

    house.use(KEYED)
    mariadb.execute(f"alter table {house.table} engine = MyISAM")
    with pytest.raises(StartRefused, match="has the engine MyISAM, which has no transactions"):
        house.sink.check_start()


def test_a_key_to_which_different_texts_are_the_same_is_warned_of(tmp_path, mariadb, caplog):
    house = House(tmp_path, mariadb)
    house.use("id bigint, name varchar(9) collate utf8mb4_general_ci primary key",
              upsertKeys="name")  # fmt: skip

    house.sink.check_start()

    assert "compares texts by utf8mb4_general_ci, to which A and a are the same" in caplog.text
    house.put(1, (1, "a"), (2, "A"))
    assert [id for id, _ in house.visible()] == [2]


# --- PostgreSQL's own ------------------------------------------------------------------------


def test_constraints_that_postgres_defers_are_looked_at_in_time(tmp_path, postgres):
    house = House(tmp_path, postgres)
    house.use("id bigint unique deferrable initially deferred, name varchar(20)")

    with pytest.raises(OutputRefused):
        house.put(1, (1, "a"), (2, "b"), (1, "c"))

    assert house.visible() == [(1, "a"), (2, "b")]


def test_texts_go_to_columns_that_read_them(tmp_path, postgres):
    house = House(tmp_path, postgres)
    schema = pa.schema([("u", pa.string()), ("j", pa.string())])
    house.use("u uuid primary key, j jsonb", schema, upsertKeys="u")
    house.sink.check_start()

    with pytest.raises(OutputRefused):
        house.put(1, ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", '{"a": 1}'), ("no", "{}"))

    [(u, j)] = house.visible()
    assert (str(u), j) == ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", {"a": 1})


def test_postgres_gets_the_same_rows_in_its_binary_form_and_as_texts(tmp_path, postgres):
    schema = pa.schema([field for field in KINDS if field.name != "m"])
    rows = [row[:3] + row[4:] for row in ROWS]
    columns = (
        "i bigint, f float8, d float8, s text, b bytea, t boolean, day date, moment timestamp,"
        " local timestamp"
    )
    house = House(tmp_path, postgres)
    house.use(columns, schema)
    house.put(1, *rows)
    in_binary = house.visible()
    house.use(columns.replace("i bigint", "i numeric"), schema)
    house.put(2, *rows)

    assert in_binary == house.visible()
    assert len(in_binary) == len(rows)


def test_a_time_that_postgres_does_not_have_is_kept_aside(tmp_path, postgres):
    house = House(tmp_path, postgres)
    house.use("at timestamp, name text", pa.schema([("at", pa.timestamp("us")), SCHEMA.field(1)]))
    part = house.stage(1, (MOMENT, "a"), (MOMENT, "b"))
    years = pa.array([-(2**63) + 1, -(10**18)], pa.timestamp("us"))
    for row in range(2):
        early = pa.record_batch([years.slice(row, 1), pa.array(["early"])], house.schema)
        house.batch = lambda *_, early=early: early
        part = Prepared(part.mark, part.committables + house.stage(1, ()).committables)

    with pytest.raises(OutputRefused, match="refused 2 rows"):
        house.commit(part)

    assert house.visible() == [(MOMENT, "a"), (MOMENT, "b")]


def test_a_column_that_was_altered_gets_rows_of_its_new_type(tmp_path, postgres):
    house = House(tmp_path, postgres)
    house.put(1, (1, "a"))
    part = house.stage(2, (2, "b"))
    postgres.execute(f"alter table {house.table} alter id type double precision")

    house.commit(part)

    assert house.visible() == [(1.0, "a"), (2.0, "b")]


def test_a_view_is_refused_before_the_start(tmp_path, postgres):
    house = House(tmp_path, postgres)
    postgres.execute(f"create view {house.table}_view as select * from {house.table}")

    with pytest.raises(StartRefused, match="_view is no table in PostgreSQL"):
        sink_of(postgres, f"{house.table}_view").check_start()


# --- What goes wrong -------------------------------------------------------------------------


def test_rows_that_the_database_refuses_are_kept_aside_and_the_others_are_written(house):
    house.use(KEYED)
    house.put(1, (5, "before"))
    part = house.stage(2, *((n, f"n{n}") for n in range(10)), (3, "again"))

    with pytest.raises(OutputRefused, match="refused 2 rows of epoch 0, which are kept in"):
        house.commit(part)

    assert house.visible() == sorted(
        [(n, f"n{n}") for n in range(10) if n != 5] + [(5, "before")], key=repr
    )
    assert sorted((id, name) for id, name, _ in house.refused()) == [(3, "again"), (5, "n5")]
    assert all("uplicate" in reason and "first of 2" in reason for *_, reason in house.refused())
    house.commit(part)  # it is done


def test_of_a_key_whose_last_row_is_refused_the_row_before_stays(house):
    house.use("id bigint primary key, name varchar(20), check (name <> 'bad')", upsertKeys="id")

    with pytest.raises(OutputRefused):
        house.put(1, (1, "a"), (2, "b"), (1, "bad"), (3, "c"))

    assert house.visible() == [(1, "a"), (2, "b"), (3, "c")]
    assert [row[:2] for row in house.refused()] == [(1, "bad")]


@pytest.mark.parametrize(
    ("columns", "row", "said"),
    [
        ("id bigint not null, name varchar(20)", (None, "a"), "column id has a null, and"),
        ("id smallint, name varchar(20)", (40_000, "a"), "column id has the number 40000, and .*"),
        ("id bigint, name varchar(3)", (1, "abcé"), "column name has a text of 4 characters, and"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_column_is_refused_when_it_is_written(house, columns, row, said):
    house.use(columns)

    with pytest.raises(DataError, match=said):
        house.stage(1, (1, "ok"), row)


def test_a_row_without_its_key_is_refused_when_it_is_written(house):
    house.use(KEYED, upsertKeys="id")

    with pytest.raises(DataError, match="a row has no id, by which it is to replace others"):
        house.stage(1, (None, "a"))


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("id bigint", {}, "has no column name: it has id"),
        ("id bigint, name date", {}, "column name is string, which column name .* being date"),
        ("id bigint, name varchar(9), age int not null", {}, "column age .* has no default"),
        ("id bigint, name varchar(9)", {"upsertKeys": "id"}, "has no primary key or unique index"),
        (
            "id bigint, name varchar(9), primary key (id, name)",
            {"upsertKeys": "id"},
            "of just the columns id, by which rows are replaced",
        ),
        (
            "id bigint, name varchar(9) generated always as ('x') stored",
            {},
            "column name of .* is generated",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_the_start(house, columns, options, said):
    house.use(columns, **options)

    with pytest.raises(StartRefused, match=said):
        house.sink.check_start()


def test_decimals_that_would_be_rounded_are_refused_before_the_start(house):
    schema = pa.schema([("price", pa.decimal128(10, 4))])
    house.use("price numeric(10, 2)", schema)

    with pytest.raises(StartRefused, match=r"column price is decimal128\(10, 4\), which column"):
        house.sink.check_start()


def test_a_missing_table_is_refused_before_the_start_unless_it_is_to_be_created(house):
    with pytest.raises(StartRefused, match=r"table nowhere does not exist in .* set option create"):
        sink_of(house.server, "nowhere").check_start()

    sink = sink_of(house.server, f"{house.table}_new", createTable="true")
    sink.check_start()
    sink.check_start()


def test_a_table_that_was_dropped_is_named_and_what_was_staged_waits_for_it(house):
    part = house.stage(1, (1, "a"))
    house.server.execute(f"drop table {house.table}")

    with pytest.raises(DataError, match=r"has no such table .* create it, then start the job"):
        house.commit(part)
    house.server.execute(f"create table {house.table} (id bigint, name varchar(20))")
    house.commit(part)

    assert house.visible() == [(1, "a")]


@pytest.mark.parametrize("options", [{"password": "wrong-pass"}, {"user": "nobody-here"}])
def test_a_wrong_password_is_told_without_showing_it(house, options):
    with pytest.raises(StartRefused, match="refuses what the sink for table") as told:
        sink_of(house.server, house.table, **options).check_start()

    assert "wrong-pass" not in str(told.value)
    assert PASSWORD not in str(told.value)
    assert "wrong-pass" not in repr(sink_of(house.server, house.table, **options))


def test_a_server_that_is_away_can_be_waited_for(house, free_port):
    url = f"jdbc:{house.server.url}".replace(str(house.server.port), str(free_port))
    sink = sink_of(house.server, "t", url=url)

    with pytest.raises(StartRefused, match=f"127.0.0.1:{free_port}/.* cannot be reached"):
        sink.check_start()
    with closing(sink.open_target()) as target, pytest.raises(Unavailable):
        target.begin(Writer("i", "u", 0))


def test_a_server_that_dies_in_a_transaction_has_written_nothing_and_is_tried_again(house):
    part = house.stage(1, (1, "a"), (2, "b"))
    with house.target() as target:
        target.begin(part.mark.writer)

        def half_way():
            yield house.batch((1, "a"))
            house.server.kill()
            yield house.batch(*[(n, "b" * 20) for n in range(60_000)])

        try:
            with pytest.raises(Unavailable):
                target.write(part.mark, half_way(), refuse_nothing)
        finally:
            house.server.start()
    house.commit(part)

    assert house.visible() == [(1, "a"), (2, "b")]


@pytest.fixture
def small_disk():
    """A directory of a file system with four megabytes, and how to make it large."""
    with tempfile.TemporaryDirectory(prefix="stillframe-disk-") as place:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m,mode=777", "none", place],
            check=False,
            capture_output=True,
        )
        if mounted.returncode:
            pytest.skip("a small disk is made by root only, by mounting one")
        remount = ["mount", "-o", "remount,size=200m", place]
        try:
            yield place, lambda: subprocess.run(remount, check=True)
        finally:
            subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_a_full_disk_of_the_database_is_waited_for(tmp_path, request, kind, small_disk):
    house = House(tmp_path, request.getfixturevalue(kind))
    place, enlarge = small_disk
    house.table = house.server.table_on("id bigint, name varchar(20)", place)
    house.sink = sink_of(house.server, house.table)
    part = house.stage(1, *[(n, "x" * 20) for n in range(100_000)])

    try:
        with pytest.raises(Unavailable, match=r"cannot do what is asked of it now .*(full|space)"):
            house.commit(part)
        assert house.visible() == []
        enlarge()
        house.commit(part)
        house.commit(part)
        assert house.server.execute(f"select count(*) from {house.table}") == [(100_000,)]
    finally:
        house.server.execute(f"drop table {house.table}")
        house.server.forget_place()


# --- Who it speaks to ------------------------------------------------------------------------


@pytest.fixture(params=["mysql", "mariadb"])
def certified(tmp_path, request):
    """A table of a server that has a certificate of localhost. Our PostgreSQL has none: it was
    built without encryption."""
    return House(tmp_path, request.getfixturevalue(request.param))


def sink_for(house, host, settings):
    url = f"jdbc:{house.server.url}?{settings}".replace("127.0.0.1", host)
    return sink_of(house.server, house.table, url=url)


@pytest.mark.parametrize(
    ("host", "settings"),
    [
        ("localhost", "sslMode=VERIFY_IDENTITY&serverSslCert={}"),
        ("127.0.0.1", "sslMode=VERIFY_CA&serverSslCert={}"),
        ("127.0.0.1", "useSSL=true"),
    ],
)
def test_rows_go_encrypted_to_a_server_with_a_certificate(certified, host, settings):
    house = certified
    house.sink = sink_for(house, host, settings.format(house.server.certificate))
    house.sink.check_start()
    house.put(1, (1, "a"))

    assert house.visible() == [(1, "a")]
    with closing(house.sink.open_session()) as session:
        [(_, cipher)] = session.execute("show status like 'Ssl_cipher'")
    assert cipher != ""


def test_a_certificate_of_another_host_or_of_nobody_known_is_refused(certified, monkeypatch):
    house, certificate = certified, certified.server.certificate
    other = sink_for(house, "127.0.0.1", f"sslMode=VERIFY_IDENTITY&serverSslCert={certificate}")
    by_the_system = sink_for(house, "127.0.0.1", "sslMode=VERIFY_IDENTITY")
    unknown = sink_for(house, "localhost", "sslMode=VERIFY_CA")

    with pytest.raises(StartRefused, match="certificate verify failed: self-signed"):
        unknown.check_start()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    for each in (other, by_the_system):
        with pytest.raises(StartRefused, match=r"certificate is not valid for '127\.0\.0\.1'"):
            each.check_start()


def test_where_encryption_is_asked_for_nothing_goes_without(tmp_path, postgres):
    house = House(tmp_path, postgres)
    with pytest.raises(StartRefused, match="server does not support SSL, but SSL was required"):
        sink_for(house, "127.0.0.1", "sslmode=require").check_start()
