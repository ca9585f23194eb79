"""What the options of database sinks say, and what is wrong with them, without any server."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from stillframe.connectors.database_options import TableName
from stillframe.connectors.database_sink import (
    jdbc_from_options,
    mysql_from_options,
    postgres_from_options,
)
from stillframe.connectors.database_target import chunks, newest_of, one_ahead
from stillframe.errors import BuildError
from stillframe.options import Options

SCHEMA = pa.schema([("id", pa.int64()), ("Name", pa.string()), ("gone", pa.bool_())])
MAKERS = {
    "jdbc": jdbc_from_options,
    "postgres": postgres_from_options,
    "mysql": mysql_from_options,
}


def made(format="jdbc", schema=SCHEMA, **options):
    given = {"url": "jdbc:postgresql://db.example/shop", "dbtable": "counts", **options}
    return MAKERS[format](Options(f"the sink {format}", given), schema)


@pytest.mark.parametrize(
    ("format", "url", "address"),
    [
        ("jdbc", "jdbc:postgresql://db:6432/shop", ("postgres", "db", 6432, "shop")),
        ("jdbc", "jdbc:mysql://db/shop?useUnicode=true", ("mysql", "db", 3306, "shop")),
        ("jdbc", "JDBC:mariadb://db/shop", ("mysql", "db", 3306, "shop")),
        ("postgres", "postgresql://[::1]/my%20shop", ("postgres", "::1", 5432, "my shop")),
        ("postgres", "jdbc:postgresql://db/shop", ("postgres", "db", 5432, "shop")),
        ("mysql", "mysql://db:3307/shop", ("mysql", "db", 3307, "shop")),
    ],
)
def test_an_address_says_which_database_it_is(format, url, address):
    found = made(format, url=url).address

    assert (found.dialect, found.host, found.port, found.database) == address
    assert found.settings == ()


def test_the_user_may_be_in_the_address_and_the_option_comes_first():
    assert made(url="jdbc:postgresql://ann@db/shop").address.user == "ann"
    assert made(url="jdbc:postgresql://db/shop?user=ann").address.user == "ann"
    assert made(url="jdbc:postgresql://ann@db/shop", user="bob").address.user == "bob"
    settings = made(url="jdbc:postgresql://db/shop?sslmode=require").address.settings
    assert settings == (("sslmode", "require"),)


def test_a_sink_can_be_pickled_and_shows_no_password():
    sink = pickle.loads(pickle.dumps(made(user="ann", password="tiger9")))

    assert sink.address.password.reveal() == "tiger9"
    assert "tiger9" not in repr(sink) + sink.describe()
    assert sink.describe() == "postgres table counts at db.example:5432/shop"


@pytest.mark.parametrize(
    ("format", "given", "name"),
    [
        ("postgres", "Counts", TableName(None, "counts")),
        ("postgres", 'web."The Counts"', TableName("web", "The Counts")),
        ("mysql", "Counts", TableName(None, "Counts")),
        ("mysql", "web.`The Counts`", TableName("web", "The Counts")),
    ],
)
def test_a_table_is_named_as_in_sql(format, given, name):
    table = made(format, url=f"{format.replace('gres', 'gresql')}://db/shop", dbtable=given).table

    assert table.name == name
    assert table.marks == TableName(name.schema, "stillframe_marks")


def test_names_of_columns_are_found_in_any_spelling():
    table = made(upsertKeys="ID, name", deleteColumn="GONE").table

    assert table.keys == ("id", "Name")
    assert table.columns.names == ["id", "Name"]


@pytest.mark.parametrize(
    ("format", "options", "said"),
    [
        ("jdbc", {"url": ""}, "needs the option url, such as"),
        ("jdbc", {"url": "jdbc:oracle://db/shop"}, "no address of PostgreSQL, MySQL or MariaDB"),
        ("jdbc", {"url": "postgresql://db/shop"}, "say jdbc:postgresql://host:5432/shop"),
        ("jdbc", {"url": "jdbc:postgresql://db"}, "has to name one server and one database"),
        ("jdbc", {"url": "jdbc:postgresql://db:x/shop"}, "whose port is no number"),
        ("postgres", {"url": "mysql://db/shop"}, r"say format\('mysql'\)"),
        ("jdbc", {"url": "jdbc:postgresql://a:tiger9@db/shop"}, "has a password or token in its"),
        ("jdbc", {"driver": "com.mysql.cj.jdbc.Driver"}, "driver is .* does not belong to the url"),
        ("jdbc", {"dbtable": "(select 1) t"}, "dbtable is .* has to name a table"),
        ("jdbc", {"upsertKeys": "idd"}, "upsertKeys names a column idd, and the stream has id"),
        ("jdbc", {"deleteColumn": "gone"}, "deleteColumn needs option upsertKeys"),
        ("jdbc", {"upsertKeys": "id", "deleteColumn": "Name"}, "one column that is true or false"),
        ("jdbc", {"onRefused": "maybe"}, "onRefused is 'fail' or 'go on', not 'maybe'"),
        ("jdbc", {"createTableColumnTypes": "id bigint; drop"}, "has 'id bigint; drop', which is"),
    ],
)
def test_what_cannot_work_is_said_when_the_sink_is_described(format, options, said):
    with pytest.raises(BuildError, match=said) as told:
        made(format, **options)

    assert "tiger9" not in str(told.value)


def test_a_column_that_no_database_has_is_refused():
    with pytest.raises(BuildError, match="column tags is list<item: string>, which a database has"):
        made(schema=pa.schema([("tags", pa.list_(pa.string()))]))


# --- Rows on their way -----------------------------------------------------------------------


def test_small_batches_are_loaded_together_and_large_ones_in_pieces():
    batches = [pa.record_batch({"n": list(range(at, at + 10))}) for at in range(0, 100, 10)]
    large = pa.record_batch({"n": list(range(100, 200))})

    found = list(chunks(iter([*batches, large]), rows_max=35, bytes_max=1_000_000))

    assert max(each.num_rows for each in found) <= 35
    assert len(found) <= 8
    assert [n for each in found for n in each.column("n").to_pylist()] == list(range(200))


def test_while_one_chunk_is_taken_the_next_is_made_and_no_other():
    made = [threading.Event() for _ in range(4)]

    def chunks_made():
        for each in made:
            each.set()
            yield each

    with ThreadPoolExecutor(1) as pool:
        taken = one_ahead(chunks_made(), pool)
        assert next(taken) is made[0]
        assert made[1].wait(60)
        assert not made[2].is_set()
        assert list(taken) == made[1:]


def test_what_fails_while_a_chunk_is_made_is_told_to_who_takes_it():
    def broken():
        yield "first"
        raise OSError("the staged file is torn")

    with ThreadPoolExecutor(1) as pool:
        taken = one_ahead(broken(), pool)
        assert next(taken) == "first"
        with pytest.raises(OSError, match="torn"):
            next(taken)


def test_of_each_key_the_newest_row_stays_in_its_order():
    rows = pa.record_batch(
        {"a": [1, 2, 1, 3, 2], "b": ["x", "x", "x", None, "y"], "n": [*range(5)]}
    )

    assert newest_of(rows, ("a",)).column("n").to_pylist() == [2, 3, 4]
    assert newest_of(rows, ("a", "b")).column("n").to_pylist() == [1, 2, 3, 4]
