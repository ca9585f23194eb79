"""Parquet and JSON-lines files: listed once, read in pieces, rewound, and honest about misfits."""

import bz2
import gzip
import json
import os
import pickle
import time
from datetime import UTC, date, datetime
from decimal import Decimal
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe.api.sources import SourceContext, Split
from stillframe.clock import SystemClock
from stillframe.connectors import lines, parquet
from stillframe.connectors.cleaning import Cleaning
from stillframe.connectors.csv_lines import CsvSource
from stillframe.connectors.csv_values import CsvRules
from stillframe.connectors.files import Following, find_files
from stillframe.connectors.json_lines import JsonLinesSource, json_from_options
from stillframe.connectors.parquet import ParquetSource
from stillframe.connectors.text_lines import TextSource
from stillframe.errors import BuildError, DataError
from stillframe.ids import SubtaskIndex
from stillframe.json_texts.rules import JsonRules

SCHEMA = pa.schema([("n", pa.int64()), ("name", pa.string())])


def table_of(start, stop):
    rows = range(start, stop)
    return pa.table({"n": rows, "name": [f"name {n}" for n in rows]}, schema=SCHEMA)


def write_lines(path, rows, last_newline=True):
    text = "\n".join(json.dumps(row) for row in rows)
    path.write_text(text + "\n" if rows and last_newline else text)


def read(source, splits, **wanted):
    context = SourceContext(SubtaskIndex(0), 1, SystemClock(), **wanted)
    reader = pickle.loads(pickle.dumps(source)).open(splits, context)
    yield from reader.read()
    reader.close()


def read_all(source):
    batches = [batch for _, batch in read(source, source.splits(1))]
    return pa.Table.from_batches(batches, source.schema)


def read_with_stops(source, random):
    """Stop after a few batches, several times, going on from the positions each time."""
    splits, batches = {split.id: split for split in source.splits(1)}, []
    for turn in range(5):
        for taken, (after, batch) in enumerate(read(source, list(splits.values()))):
            splits[after.id] = after
            batches.append(batch)
            if turn < 4 and taken == random.randint(0, 4):
                break
    return pa.Table.from_batches(batches, source.schema)


@pytest.mark.parametrize("seed", range(15))
def test_parquet_rewinds_to_any_batch(seed, tmp_path, monkeypatch):
    random = Random(seed)
    monkeypatch.setattr(parquet, "BATCH_ROWS", random.randint(1, 50))
    start = 0
    for number in range(random.randint(1, 4)):
        stop = start + random.randint(0, 200)
        table = table_of(start, stop)
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=random.randint(1, 90))
        start = stop
    source = ParquetSource(str(tmp_path), SCHEMA)

    assert read_with_stops(source, random).equals(table_of(0, start))


@pytest.mark.parametrize("seed", range(15))
def test_json_lines_rewind_to_any_block(seed, tmp_path, monkeypatch):
    random = Random(seed)
    monkeypatch.setattr(lines, "_BLOCK_BYTES", random.randint(10, 400))
    start = 0
    for number in range(random.randint(1, 4)):
        stop = start + random.randint(0, 60)
        rows = table_of(start, stop).to_pylist()
        write_lines(tmp_path / f"{number}.json", rows, last_newline=random.random() < 0.5)
        start = stop
    source = JsonLinesSource(str(tmp_path), SCHEMA)

    assert read_with_stops(source, random).equals(table_of(0, start))


def test_row_groups_already_read_are_not_touched_again(tmp_path):
    pq.write_table(table_of(0, 100), tmp_path / "a.parquet", row_group_size=10)
    metadata = pq.read_metadata(tmp_path / "a.parquet")

    assert parquet._groups_after(metadata, 0) == (list(range(10)), 0)
    assert parquet._groups_after(metadata, 34) == ([3, 4, 5, 6, 7, 8, 9], 4)
    assert parquet._groups_after(metadata, 40) == ([4, 5, 6, 7, 8, 9], 0)
    assert parquet._groups_after(metadata, 100) == ([], 0)


def put(home, *names):
    for name in names:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text('{"n": 1}\n')


def listed(home, path="", **how):
    """The files that are meant, and their partition columns."""
    found = find_files([f"{home}{path}"], **how)
    return {os.path.relpath(each.path, home): dict(each.partitions) for each in found}


def test_a_directory_means_its_visible_files_in_order_and_not_those_below(tmp_path):
    hidden = ["_SUCCESS", ".a.json.crc", "_tmp/x.json", "d.json._COPYING_"]
    put(tmp_path, "b.json", "a.json", "sub/c.json", *hidden)

    found = find_files([f"file://{tmp_path}"])
    assert [os.path.basename(each.path) for each in found] == ["a.json", "b.json"]
    assert [os.path.basename(each.path) for each in find_files([f"{tmp_path}/*.json"])] == [
        "a.json",
        "b.json",
    ]
    assert list(listed(tmp_path, is_recursive=True)) == ["a.json", "b.json", "sub/c.json"]


def test_directories_with_an_equals_sign_are_columns_of_the_files_below(tmp_path):
    put(tmp_path, "y=2024/m=01/a", "y=2024/m=a%2Fb/deep/b", "beside")

    assert listed(tmp_path) == {
        "y=2024/m=01/a": {"y": "2024", "m": "01"},
        "y=2024/m=a%2Fb/deep/b": {"y": "2024", "m": "a/b"},
    }
    assert listed(tmp_path, "/y=2024") == {
        "y=2024/m=01/a": {"m": "01"},
        "y=2024/m=a%2Fb/deep/b": {"m": "a/b"},
    }
    assert set(map(str, listed(tmp_path, is_recursive=True).values())) == {"{}"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["k=1/a", "sub/b"], r"Conflicting directory structures.*/sub"),
        (["k=1/a", "j=1/b"], r"Conflicting partition column names.*k=1.*j=1|j=1.*k=1"),
        (["k=/a"], r"empty partition column value.*'k='"),
    ],
)
def test_partition_directories_that_do_not_agree_are_refused(names, message, tmp_path):
    put(tmp_path, *names)
    with pytest.raises(BuildError, match=message):
        find_files([str(tmp_path)])


PARTED = pa.schema(
    [
        ("n", pa.int64()),
        ("day", pa.date32()),
        ("Shop", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)


@pytest.mark.parametrize("kind", [ParquetSource, JsonLinesSource])
@pytest.mark.parametrize("columns", [None, ("Shop", "n"), ("Shop",)])
def test_a_partition_column_has_its_value_in_every_row(kind, columns, tmp_path):
    for day, shop in [("2024-01-02", "a%20b"), ("2024-01-03", "__HIVE_DEFAULT_PARTITION__")]:
        place = tmp_path / f"day={day}" / f"shop={shop}" / "at=2024-01-02 03%3A04%3A05"
        place.mkdir(parents=True)
        if kind is ParquetSource:
            pq.write_table(pa.table({"n": [1, 2]}), place / "file")
        else:
            write_lines(place / "file", [{"n": 1}, {"n": 2}])
    source = kind(str(tmp_path), PARTED).listing(zone="America/New_York")
    source.check()
    wanted = {} if columns is None else {"columns": columns}
    batches = [batch for _, batch in read(source, source.splits(1), **wanted)]
    rows = pa.Table.from_batches(batches).to_pylist()

    at = datetime(2024, 1, 2, 8, 4, 5, tzinfo=UTC)
    expected = [
        {"n": n, "day": date(2024, 1, day), "Shop": shop, "at": at}
        for day, shop in [(2, "a b"), (3, None)]
        for n in (1, 2)
    ]
    if columns is not None and kind is ParquetSource:
        expected = [{name: row[name] for name in columns} for row in expected]
    assert rows == expected


def test_a_partition_column_of_parquet_files_may_be_declared_as_never_null(tmp_path):
    (tmp_path / "shop=a").mkdir()
    pq.write_table(pa.table({"n": [1]}), tmp_path / "shop=a" / "file")
    schema = pa.schema([("n", pa.int64()), pa.field("shop", pa.string(), nullable=False)])

    assert read_all(ParquetSource(str(tmp_path), schema)).to_pylist() == [{"n": 1, "shop": "a"}]


def test_a_partition_value_that_does_not_fit_is_refused_with_its_directory(tmp_path):
    put(tmp_path, "n=one/a")
    with pytest.raises(BuildError, match=r"n=one .* is no int64, as which column n is declared"):
        JsonLinesSource(str(tmp_path), SCHEMA).check()


@pytest.mark.parametrize("kind", [ParquetSource, JsonLinesSource])
def test_a_path_with_nothing_in_it_is_a_mistake_at_build_time(kind, tmp_path):
    for path in [tmp_path, tmp_path / "absent", tmp_path / "*.x"]:
        with pytest.raises(BuildError, match="no files found at"):
            kind(str(path), SCHEMA).check()
    with pytest.raises(BuildError, match="ftp://bucket/x is on 'ftp', which is not supported here"):
        kind("ftp://bucket/x", SCHEMA).check()


def test_empty_files_have_no_records(tmp_path):
    (tmp_path / "a").touch()
    assert read_all(JsonLinesSource(str(tmp_path), SCHEMA)).num_rows == 0
    assert read_all(ParquetSource(str(tmp_path), SCHEMA)).num_rows == 0


@pytest.mark.parametrize("kind", [ParquetSource, JsonLinesSource])
def test_a_file_that_vanished_is_named(kind, tmp_path):
    path = tmp_path / "a"
    pq.write_table(table_of(0, 3), path)
    source = kind(str(path), SCHEMA)
    splits = source.splits(1)
    path.unlink()
    with pytest.raises(DataError, match=r"/a cannot be read any more"):
        list(read(source, splits))


@pytest.mark.parametrize("kind", [ParquetSource, JsonLinesSource])
def test_a_file_that_was_read_to_its_end_may_go(kind, tmp_path):
    path = tmp_path / "a"
    if kind is ParquetSource:
        pq.write_table(table_of(0, 3), path)
    else:
        write_lines(path, table_of(0, 3).to_pylist())
    source = kind(str(path), SCHEMA)
    ((after, _),) = read(source, source.splits(1))
    path.unlink()

    assert list(read(source, [after])) == []


# --- a file that is another one when the job goes on ---


def begun(source):
    """The split of the only file, after its first batch."""
    return next(read(source, source.splits(1)))[0]


def rest_of(source, split):
    return [n for _, batch in read(source, [split]) for n in batch["n"].to_pylist()]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 40)
    monkeypatch.setattr(parquet, "BATCH_ROWS", 2)


def write_numbers(kind, path, first, count=20):
    """Files of the same length for numbers of the same number of digits."""
    if kind is ParquetSource:
        table = pa.table({"n": range(first, first + count)})
        pq.write_table(table, path, use_dictionary=False, compression="none")
    else:
        write_lines(path, [{"n": n} for n in range(first, first + count)])


@pytest.mark.parametrize("kind", [ParquetSource, JsonLinesSource])
def test_a_file_that_was_replaced_by_one_of_the_same_length_is_not_read_on(
    kind, tmp_path, small_pieces
):
    path = tmp_path / "a"
    write_numbers(kind, path, 100)
    source = kind(str(path), SCHEMA)
    after, size = begun(source), path.stat().st_size
    write_numbers(kind, path, 200)

    assert path.stat().st_size == size
    with pytest.raises(DataError, match=r"/a is not the one that the job has begun to read"):
        rest_of(source, after)


@pytest.mark.parametrize("kind", [ParquetSource, JsonLinesSource])
def test_a_file_of_which_nothing_was_read_may_still_change(kind, tmp_path, small_pieces):
    path = tmp_path / "a"
    write_numbers(kind, path, 100)
    source = kind(str(path), SCHEMA)
    (first,) = source.splits(1)
    write_numbers(kind, path, 2000, 30)

    assert rest_of(source, first) == list(range(2000, 2030))


@pytest.mark.parametrize("correction", ['{"n": 110}', '{"n": 1100000}', '{"n":7}'])
def test_a_line_ahead_of_the_position_may_be_corrected(correction, tmp_path, small_pieces):
    path = tmp_path / "a"
    good = [f'{{"n": {n}}}' for n in range(100, 120)]
    path.write_text("\n".join([*good[:10], '{"n": "x"}', *good[11:]]))
    source = JsonLinesSource(str(path), SCHEMA, rules=JsonRules(mode="FAILFAST"))
    after = begun(source)
    with pytest.raises(DataError, match="line 11 of"):
        rest_of(source, after)
    path.write_text("\n".join([*good[:10], correction, *good[11:]]))

    expected = [*range(100, 110), json.loads(correction)["n"], *range(111, 120)]
    assert rest_of(source, after) == expected[3:]


def test_a_file_that_was_cut_short_before_the_position_is_not_read_on(tmp_path, small_pieces):
    path = tmp_path / "a"
    write_numbers(JsonLinesSource, path, 100)
    source = JsonLinesSource(str(path), SCHEMA)
    after = begun(source)
    path.write_bytes(path.read_bytes()[:11])

    with pytest.raises(DataError, match=r"/a is not the one that the job has begun to read"):
        rest_of(source, after)


@pytest.mark.parametrize("kind", [ParquetSource, JsonLinesSource])
def test_a_position_of_an_older_version_has_no_checksum_and_is_held_to_the_size(
    kind, tmp_path, small_pieces
):
    path = tmp_path / "a"
    write_numbers(kind, path, 100)
    source = kind(str(path), SCHEMA)
    after = begun(source)
    names = {"path", "size", "offset", "rows"}
    old = Split(after.id, {name: after.position[name] for name in names & set(after.position)})

    assert rest_of(source, old) == rest_of(source, after) != []
    write_numbers(kind, path, 100, 21)
    with pytest.raises(DataError, match=r"/a has changed since it was listed, from \d+ to \d+ b"):
        rest_of(source, old)


def test_a_file_that_grows_while_it_is_read_is_not_taken_for_whole(tmp_path, small_pieces):
    path = tmp_path / "a"
    write_numbers(JsonLinesSource, path, 100)
    source = JsonLinesSource(str(path), SCHEMA)
    reading = read(source, source.splits(1))
    after, _ = next(reading)
    with open(path, "a") as file:
        file.write('{"n": 120}\n')
    with pytest.raises(DataError, match=r"/a has changed while it was read, from 220 to 231 bytes"):
        for after, _ in reading:  # noqa: B007
            pass

    assert rest_of(source, after)[-1] == 120, "the last lines come when it is whole"


# --- what fits -------------------------------------------------------------------------------


def test_long_lines_come_in_larger_blocks_so_that_enough_of_them_come_at_once(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 1_000)
    monkeypatch.setattr(lines, "_BLOCK_LINES", 30)
    for length, block_lines in ((9, 100), (49, 30), (399, 20)):
        path = tmp_path / str(length)
        path.write_text(("x" * length + "\n") * 1_000)
        source = TextSource(str(path))
        reader = source.open(source.splits(1), SourceContext(SubtaskIndex(0), 1, SystemClock()))
        sizes = [batch.num_rows for _, batch in reader.read()]
        assert sum(sizes) == 1_000
        assert set(sizes[1:-1]) == {block_lines}


@pytest.mark.parametrize("kind", [ParquetSource, JsonLinesSource])
def test_a_position_tells_when_a_file_has_ended(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_ROWS", 2)
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 40)
    path = tmp_path / "file"
    if kind is ParquetSource:
        pq.write_table(table_of(0, 5), path)
    else:
        write_lines(path, table_of(0, 5).to_pylist())
    source = kind(str(path), SCHEMA)
    [first] = source.splits(1)
    reader = source.open([first], SourceContext(SubtaskIndex(0), 1, SystemClock()))
    ended = [reader.has_ended(split) for split in (first, *(after for after, _ in reader.read()))]

    assert len(ended) > 2
    assert ended == [*[False] * (len(ended) - 1), True]


def test_parquet_columns_are_picked_by_name_widened_and_null_if_missing(tmp_path):
    pq.write_table(
        pa.table(
            {
                "other": ["x"],
                "N": pa.array([1], pa.int32()),
                "at": pa.array([5], pa.timestamp("ms")),
                "word": pa.array(["a"]).dictionary_encode(),
            }
        ),
        tmp_path / "a.parquet",
    )
    schema = pa.schema(
        [
            ("word", pa.string()),
            ("n", pa.int64()),
            ("missing", pa.float64()),
            ("at", pa.timestamp("us", "UTC")),
        ]
    )
    table = read_all(ParquetSource(str(tmp_path), schema))
    assert table.schema == schema
    assert table.to_pylist() == [
        {"word": "a", "n": 1, "missing": None, "at": datetime(1970, 1, 1, 0, 0, 0, 5000, UTC)}
    ]


def test_times_as_spark_writes_them_to_parquet_are_read_in_any_year(tmp_path):
    times = [datetime(9999, 12, 31, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC), None]
    found = pa.table({"at": pa.array(times, pa.timestamp("us", "UTC"))})
    pq.write_table(found, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)

    assert read_all(ParquetSource(str(tmp_path), found.schema)).equals(found)


def test_parquet_files_without_any_declared_column_still_have_rows(tmp_path):
    pq.write_table(table_of(0, 3), tmp_path / "a.parquet")
    table = read_all(ParquetSource(str(tmp_path), pa.schema([("x", pa.int8())])))
    assert table["x"].to_pylist() == [None, None, None]


def test_text_of_parquet_may_be_read_as_the_bytes_that_it_is(tmp_path):
    text = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"name": text}), tmp_path / "a.parquet")
    read = read_all(ParquetSource(str(tmp_path), pa.schema([("name", pa.binary())])))
    assert read["name"].to_pylist() == [b"caf\xe9"]


@pytest.mark.parametrize(
    ("found", "declared"),
    [
        (pa.int64(), pa.int32()),
        (pa.string(), pa.int64()),
        (pa.int64(), pa.string()),
        (pa.float64(), pa.float32()),
        (pa.uint64(), pa.int64()),
        (pa.decimal128(10, 2), pa.decimal128(10, 3)),
        (pa.list_(pa.int64()), pa.list_(pa.string())),
        (pa.struct([("a", pa.int64())]), pa.struct([("b", pa.int64())])),
    ],
)
def test_a_parquet_column_of_another_type_is_named_with_both_types(found, declared, tmp_path):
    pq.write_table(pa.table({"c": pa.nulls(1, found)}), tmp_path / "a.parquet")
    source = ParquetSource(str(tmp_path), pa.schema([("c", declared)]))
    with pytest.raises(DataError) as caught:
        read_all(source)
    in_file = pq.read_schema(tmp_path / "a.parquet").field("c").type
    for part in ["column c of ", "a.parquet", str(in_file), str(declared)]:
        assert part in str(caught.value)


def test_a_parquet_column_that_may_not_be_null_must_be_there(tmp_path):
    pq.write_table(pa.table({"n": [1, None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no column x"):
        read_all(ParquetSource(str(tmp_path), pa.schema([pa.field("x", pa.int64(), False)])))
    with pytest.raises(DataError, match=r"column n of .* has nulls"):
        read_all(ParquetSource(str(tmp_path), pa.schema([pa.field("n", pa.int64(), False)])))


def only_batch(path, schema, **wanted):
    source = ParquetSource(str(path), schema)
    [(_, batch)] = read(source, source.splits(1), **wanted)
    return batch


def test_of_parquet_only_the_columns_are_read_that_the_job_looks_at(tmp_path):
    pq.write_table(table_of(0, 3), tmp_path / "a.parquet")

    batch = only_batch(tmp_path, SCHEMA, columns=("name",))
    assert batch.to_pydict() == {"name": ["name 0", "name 1", "name 2"]}
    assert batch.schema.equals(pa.schema([("name", pa.string())]))


def test_a_parquet_file_is_held_to_columns_that_nobody_reads_too(tmp_path):
    pq.write_table(table_of(0, 3), tmp_path / "a.parquet")
    declared = pa.schema([("n", pa.string()), ("name", pa.string())])

    with pytest.raises(DataError, match=r"column n of .* is int64, but string was declared"):
        only_batch(tmp_path, declared, columns=("name",))


APPS = pa.table({"App": ["maps", "mail", None, "maps"] * 500, "n": range(2000)})
APP_SCHEMA = pa.schema([("app", pa.string()), ("n", pa.int64())])
BY_APP = {"columns": ("app",), "grouped_by": ("app",)}


def test_what_is_only_grouped_by_comes_as_the_dictionary_that_parquet_has(tmp_path):
    pq.write_table(APPS, tmp_path / "a.parquet")
    batch = only_batch(tmp_path, APP_SCHEMA, **BY_APP)

    assert batch.schema.types == [pa.dictionary(pa.int32(), pa.string())]
    assert batch.column("app").to_pylist() == APPS["App"].to_pylist()


def test_small_row_groups_are_not_worth_a_dictionary_each(tmp_path):
    pq.write_table(APPS, tmp_path / "a.parquet", row_group_size=700)

    assert only_batch(tmp_path, APP_SCHEMA, **BY_APP).schema.types == [pa.string()]


def test_a_file_that_is_read_as_dictionaries_rewinds_to_any_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_ROWS", 300)
    monkeypatch.setattr(parquet, "_GROUP_ROWS_MIN", 100)
    pq.write_table(APPS, tmp_path / "a.parquet", row_group_size=700)
    source = ParquetSource(str(tmp_path), APP_SCHEMA)
    everything = list(read(source, source.splits(1), **BY_APP))

    assert {batch.schema.types[0] for _, batch in everything} == {
        pa.dictionary(pa.int32(), pa.string())
    }
    for taken, (split, _) in enumerate(everything, 1):
        rest = [batch for _, batch in read(source, [split], **BY_APP)]
        found = [app for batch in rest for app in batch.column("app").to_pylist()]
        rows = sum(batch.num_rows for _, batch in everything[:taken])
        assert found == APPS["App"].to_pylist()[rows:]


def test_what_somebody_looks_at_is_written_out(tmp_path):
    pq.write_table(APPS, tmp_path / "a.parquet")

    assert only_batch(tmp_path, APP_SCHEMA).schema.types == APP_SCHEMA.types


@pytest.mark.parametrize(
    ("column", "more"),
    [
        (pa.array([f"visitor {n}" for n in range(2000)]), {}),  # a dictionary as large as itself
        (pa.array(["maps", "mail"] * 1000), {"use_dictionary": False}),
        (pa.array([1, 2] * 1000), {}),  # numbers are quicker as they are
    ],
)
def test_what_parquet_has_not_as_a_small_dictionary_is_read_as_it_is(column, more, tmp_path):
    pq.write_table(pa.table({"app": column}), tmp_path / "a.parquet", **more)

    batch = only_batch(tmp_path, pa.schema([("app", column.type)]), **BY_APP)
    assert batch.column("app").equals(column)


def test_a_dictionary_of_other_values_than_declared_becomes_what_is_declared(tmp_path):
    pq.write_table(APPS, tmp_path / "a.parquet")

    batch = only_batch(tmp_path, pa.schema([("app", pa.large_string())]), **BY_APP)
    assert batch.column("app").equals(APPS["App"].combine_chunks().cast(pa.large_string()))


def test_a_key_that_may_not_be_null_is_refused_as_a_dictionary_too(tmp_path):
    pq.write_table(APPS, tmp_path / "a.parquet")
    declared = pa.schema([pa.field("app", pa.string(), nullable=False)])

    with pytest.raises(DataError, match=r"column app of .* has nulls"):
        only_batch(tmp_path, declared, **BY_APP)


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("this is not a Parquet file")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        read_all(ParquetSource(str(tmp_path), SCHEMA))


def test_json_values_of_many_types(tmp_path):
    (tmp_path / "a.json").write_text(
        '{"at": "2024-01-02T03:04:05.000006Z", "day": "2024-01-02", "price": "1.25", "x": 1,'
        ' "inner": {"a": [1, 2]}, "unknown": true}\r\n'
        "\n"
        '{"at": "2024-01-02T03:04:05+01:00", "day": null}\n'
        "  \n"
        '{"at": "2024-01-02 03:04:05"}'
    )
    schema = pa.schema(
        [
            ("at", pa.timestamp("us", "UTC")),
            ("day", pa.date32()),
            ("price", pa.decimal128(10, 2)),
            ("x", pa.float64()),
            ("inner", pa.struct([("a", pa.list_(pa.int32()))])),
        ]
    )
    rows = read_all(JsonLinesSource(str(tmp_path), schema)).to_pylist()

    assert rows[0] == {
        "at": datetime(2024, 1, 2, 3, 4, 5, 6, UTC),
        "day": date(2024, 1, 2),
        "price": Decimal("1.25"),
        "x": 1.0,
        "inner": {"a": [1, 2]},
    }
    assert [row["at"].hour for row in rows] == [3, 2, 3]
    assert rows[2]["day"] is rows[2]["inner"] is None


@pytest.mark.parametrize(
    "bad",
    [
        '{"n": "one"}',
        '{"n": 1.5}',
        '{"n": 1',
        "[1]",
        "gibberish",
        "null",
        '{"n":\n1}',
        '{"name": "\\q"}',
    ],
)
@pytest.mark.parametrize("block_bytes", [100, 1 << 20])
def test_a_json_record_that_does_not_fit_is_named_by_its_line(
    bad, block_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(lines, "_BLOCK_BYTES", block_bytes)
    good = [json.dumps(row) for row in table_of(0, 100).to_pylist()]
    (tmp_path / "a.json").write_text("\n".join([*good[:70], "", bad, *good[70:]]))
    with pytest.raises(DataError, match=r"line 72 of .*a\.json does not fit the schema \("):
        read_all(JsonLinesSource(str(tmp_path), SCHEMA, rules=JsonRules(mode="FAILFAST")))


def test_a_date_that_is_none_is_named_by_its_line(tmp_path):
    (tmp_path / "a.json").write_text('{"day": "2024-01-01"}\n{"day": "soon"}\n')
    schema = pa.schema([("day", pa.date32())])
    with pytest.raises(DataError, match=r"line 2 of .*\(day: 'soon' is not a date\): .* \"soon\""):
        read_all(JsonLinesSource(str(tmp_path), schema, rules=JsonRules(mode="FAILFAST")))


TORN = ['{"n": 1}', "null", '{"n": 2, "name": "b"', '{"n": "x", "name": "c"}', '{"n": 4}']
WITH_CORRUPT = pa.schema([*SCHEMA, ("_corrupt_record", pa.string())])


def test_a_malformed_record_keeps_what_can_be_read_and_is_shown_and_counted(tmp_path):
    (tmp_path / "a.json").write_bytes("\n".join(TORN).encode() + b'\n{"n": 5, "name": "\xff"}\n')
    source = JsonLinesSource(str(tmp_path), WITH_CORRUPT)
    reader = source.open(source.splits(1), SourceContext(SubtaskIndex(0), 1, SystemClock()))
    ((_, batch),) = reader.read()

    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        (1, None, None),
        (None, None, TORN[1]),
        (None, None, TORN[2]),
        (None, "c", TORN[3]),
        (4, None, None),
        (None, None, '{"n": 5, "name": "\ufffd"}'),
    ]
    assert reader.records_malformed() == 4


def test_malformed_records_are_dropped_where_that_is_asked_for(tmp_path):
    (tmp_path / "a.json").write_text("\n".join([*TORN, ""]))
    source = JsonLinesSource(str(tmp_path), SCHEMA, rules=JsonRules(mode="DROPMALFORMED"))
    reader = source.open(source.splits(1), SourceContext(SubtaskIndex(0), 1, SystemClock()))
    ((_, batch),) = reader.read()

    assert batch.column("n").to_pylist() == [1, 4]
    assert reader.records_malformed() == 3


@pytest.mark.parametrize("first", ["null", "[]", "1", '"x"', "{}", "}", "{", "\x00", ""])
def test_no_first_line_ends_the_interpreter(first, tmp_path):
    (tmp_path / "a.json").write_text(first + '\n{"n": 1}\n')
    rows = read_all(JsonLinesSource(str(tmp_path), SCHEMA)).to_pylist()
    assert rows[-1] == {"n": 1, "name": None}


def test_a_file_may_be_one_text_of_many_lines(tmp_path):
    (tmp_path / "a.json").write_text('[{"n": 1,\n"name": "a"},\n{"n": 2}]\n')
    (tmp_path / "b.json").write_text('{\n"n": 3\n}\n')
    (tmp_path / "c.json").write_text('{\n"n": "x"\n}')
    source = JsonLinesSource(str(tmp_path), WITH_CORRUPT, is_multi_line=True)

    assert [tuple(row.values()) for row in read_all(source).to_pylist()] == [
        (1, "a", None),
        (2, None, None),
        (3, None, None),
        (None, None, '{\n"n": "x"\n}'),
    ]


def test_lines_end_as_they_do_for_spark(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"n":1}\r\n{"n":2}\r{"n":3}\n\n{"n":4}')
    rows = read_all(JsonLinesSource(str(tmp_path), SCHEMA)).to_pylist()
    assert [row["n"] for row in rows] == [1, 2, 3, 4]


def test_a_compressed_file_is_not_taken_for_malformed_records(tmp_path):
    (tmp_path / "a.json.zst").write_bytes(b"\x28\xb5")
    with pytest.raises(DataError, match=r"a\.json\.zst is compressed, and only .* are read"):
        read_all(JsonLinesSource(str(tmp_path), SCHEMA))


@pytest.mark.parametrize(("end", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
@pytest.mark.parametrize("rows", [1, 300_000])
def test_a_compressed_file_is_read_from_any_position_to_its_end(tmp_path, end, pack, rows):
    lines = b"".join(b'{"n": %d, "name": "x"}\n' % n for n in range(rows))
    (tmp_path / f"a.json{end}").write_bytes(pack(lines))
    source = JsonLinesSource(str(tmp_path), SCHEMA)
    [begin] = source.splits(1)
    read = [(split, batch.num_rows) for split, batch in opened(source, begin).read()]

    assert sum(count for _, count in read) == rows
    assert (len(read) > 1) == (rows > 1)
    passed = 0
    for split, count in read:
        passed += count
        rest = [batch for _, batch in opened(source, split).read()]
        assert sum(batch.num_rows for batch in rest) == rows - passed
        if rest:
            assert rest[0].column("n")[0].as_py() == passed
    assert [opened(source, split).has_ended(split) for split, _ in read] == [
        *[False] * (len(read) - 1),
        True,
    ]


def test_a_compressed_file_may_be_one_text_and_begin_with_a_header(tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'[{"n": 1},\n{"n": 2}]'))
    source = JsonLinesSource(str(tmp_path), SCHEMA, is_multi_line=True)
    assert [row["n"] for row in read_all(source).to_pylist()] == [1, 2]
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "a.csv.gz").write_bytes(gzip.compress(b"n,name\n1,a\n") * 2)
    rules = CsvRules(has_header=True)
    found = read_all(CsvSource(str(tmp_path / "csv"), SCHEMA, rules=rules)).to_pylist()
    assert [row["n"] for row in found] == [1, None, 1], "a second member is more of the same file"


def test_a_compressed_file_that_is_torn_or_another_one_is_refused(tmp_path):
    path = tmp_path / "a.json.gz"
    lines = b"".join(b'{"n": %d}\n' % n for n in range(300_000))
    path.write_bytes(gzip.compress(lines))
    source = JsonLinesSource(str(tmp_path), SCHEMA)
    after, _ = next(opened(source, source.splits(1)[0]).read())
    path.write_bytes(gzip.compress(lines.replace(b"7", b"8")))
    with pytest.raises(DataError, match="is not the one that the job has begun to read"):
        list(opened(source, after).read())
    path.write_bytes(gzip.compress(lines)[:-1000])
    with pytest.raises(DataError, match=r"a\.json\.gz cannot be read .*end-of-stream"):
        list(opened(source, after).read())


def opened(source, split):
    return source.open([split], SourceContext(SubtaskIndex(0), 1, SystemClock()))


@pytest.mark.parametrize(
    ("schema", "rules", "said"),
    [
        (pa.schema([("i", pa.duration("us"))]), JsonRules(), "column i is an interval"),
        (
            pa.schema([("s", pa.struct([("m", pa.map_(pa.int32(), pa.int32()))]))]),
            JsonRules(),
            "column s.m is a map with keys of int32",
        ),
        (pa.schema([("_corrupt_record", pa.int64())]), JsonRules(), "declare it as a string"),
        (SCHEMA, JsonRules(zone="Mars/Base"), "'Mars/Base' is no time zone"),
    ],
)
def test_what_no_text_could_be_read_with_is_refused_at_build_time(schema, rules, said, tmp_path):
    with pytest.raises(BuildError, match=said):
        JsonLinesSource(str(tmp_path), schema, rules=rules).check()


def test_no_column_of_json_is_declared_as_never_null(tmp_path):
    declared = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    assert JsonLinesSource(str(tmp_path), declared).schema.field("n").nullable


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timestampFormat": "yyyy"}, "does not take the option timestampFormat: read the column"),
        ({"PrimitivesAsString": "true"}, "primitivesAsString: it is about schemas that Spark inf"),
        ({"encoding": "UTF-16"}, "option encoding is 'UTF-16', but only UTF-8 is read"),
        ({"lineSep": ";"}, "option lineSep is ';', but lines end with a line feed"),
        ({"mode": "LENIENT"}, "option mode is one of PERMISSIVE, DROPMALFORMED, FAILFAST"),
        ({"multiLine": "yes"}, "option multiLine is true or false, not 'yes'"),
    ],
)
def test_an_option_that_would_not_be_heeded_is_refused(options, said):
    with pytest.raises(BuildError, match=said):
        json_from_options("/nowhere", SCHEMA, None, options)


def test_options_are_those_of_spark():
    options = {"MODE": "failfast", "allowsinglequotes": "False", "timeZone": "Asia/Tokyo"}
    source = json_from_options("/nowhere", SCHEMA, None, {**options, "multiLine": "true"})
    assert source.rules == JsonRules(zone="Asia/Tokyo", mode="FAILFAST", single_quotes=False)
    assert source.is_multi_line


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(lines, "_LINE_BYTES_MAX", 1000)
    (tmp_path / "a.json").write_text("x" * 5000)
    with pytest.raises(DataError, match="a line of more than 1000 bytes"):
        read_all(JsonLinesSource(str(tmp_path), SCHEMA))


def test_a_position_that_is_not_one_in_a_file_is_refused_in_one_sentence(tmp_path):
    source = ParquetSource(str(tmp_path), SCHEMA)
    context = SourceContext(SubtaskIndex(0), 1, SystemClock())

    with pytest.raises(DataError, match="position of partition-00000 is not one in a file"):
        source.open([Split("partition-00000", {"rows": 3, "fingerprint": "x"})], context)


# --- a directory that is followed ---


class Followed:
    """A directory, and what an enumerator of it finds; time is what files say of themselves."""

    def __init__(self, home, kind=JsonLinesSource, age_seconds_max=100.0):
        self.home = home
        self.source = kind(str(home), SCHEMA, Following(1.0, age_seconds_max))
        self.state = None

    def write(self, name, at_seconds=1_000_000, text='{"n": 1}\n'):
        path = self.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        os.utime(path, (at_seconds, at_seconds))

    def discover(self):
        """By an enumerator that knows only its state, as after a restart."""
        found = self.source.open_enumerator(self.state).discover()
        assert not found.is_last
        self.state = json.loads(json.dumps(found.state))
        return [os.path.relpath(split.id, self.home) for split in found.splits]


@pytest.fixture
def followed(tmp_path):
    return Followed(tmp_path)


def test_only_a_source_with_an_interval_follows_its_path(tmp_path):
    assert JsonLinesSource(str(tmp_path), SCHEMA).discovery_interval_seconds is None
    followed = JsonLinesSource(str(tmp_path), SCHEMA, Following(2.5))

    assert followed.discovery_interval_seconds == 2.5
    assert followed.splits(3) == []
    assert followed.describe() == f"json {tmp_path}, listed every 2.5 s"


def test_each_file_is_found_once_the_oldest_first(followed):
    followed.write("b", 1_000_000)
    followed.write("a", 1_000_001)
    assert followed.discover() == ["b", "a"]
    assert followed.discover() == []
    followed.write("c", 1_000_000)

    assert followed.discover() == ["c"]
    assert followed.discover() == []


def test_a_found_file_is_read_from_its_beginning_and_rewound(followed):
    followed.write("a", text='{"n": 1}\n{"n": 2}\n')
    (split,) = followed.source.open_enumerator(None).discover().splits

    assert split.position == {"path": str(followed.home / "a"), "size": 18, "offset": 0}
    (read_one,) = read(followed.source, [split])
    assert read_one[1]["n"].to_pylist() == [1, 2]


def test_what_is_hidden_or_empty_is_not_taken_until_it_has_its_name_and_its_rows(followed):
    followed.write("_temporary/a")
    followed.write(".b.tmp")
    followed.write("c", text="")
    assert followed.discover() == []
    (followed.home / ".b.tmp").rename(followed.home / "b")
    followed.write("c")

    assert followed.discover() == ["b", "c"]


def test_a_file_that_is_written_anew_under_its_old_name_is_not_read_again(followed):
    followed.write("a", 1_000_000)
    followed.discover()
    followed.write("a", 1_000_050, '{"n": 2}\n')

    assert followed.discover() == []


def test_files_may_be_missing_at_first_and_come_later(followed):
    followed.source.check()
    assert followed.discover() == []
    followed.write("a")

    assert followed.discover() == ["a"]


def test_a_file_known_by_its_name_alone_is_not_new_in_another_directory(tmp_path):
    source = JsonLinesSource(str(tmp_path), SCHEMA, Following(by_name=True)).listing(
        is_recursive=True
    )
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a").write_text('{"n": 1}\n')
    enumerator = source.open_enumerator(None)
    found = enumerator.discover()
    assert len(found.splits) == 1
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / name).write_text('{"n": 1}\n')

    for each in (enumerator, source.open_enumerator(found.state)):
        assert [split.id for split in each.discover().splits] == [str(tmp_path / "two" / "b")]


def test_at_the_first_listing_no_file_is_too_old(followed):
    followed.write("old", 1)
    followed.write("new", 1_000_000)

    assert followed.discover() == ["old", "new"]
    assert followed.discover() == []


def test_names_are_forgotten_with_their_age_and_such_files_are_not_read_again(followed):
    for number in range(50):
        followed.write(f"f{number}", 1_000_000 + number * 10)
        followed.discover()

    assert len(followed.state["seen"]) == 11
    assert followed.discover() == []
    followed.write("late", 1_000_000)
    assert followed.discover() == [], "older than the newest by more than the allowed age"


def test_a_file_from_the_future_does_not_make_all_others_too_old(followed):
    followed.write("future", 99_000_000_000)
    followed.discover()
    followed.write("now", int(time.time()))

    assert followed.discover() == ["now"]


def test_a_partition_directory_that_comes_later_is_a_declared_column_or_refused(followed):
    followed.source.check()
    followed.write("name=x/a")
    (split,) = followed.source.open_enumerator(None).discover().splits
    assert [batch["name"].to_pylist() for _, batch in read(followed.source, [split])] == [["x"]]
    (followed.home / "name=x").rename(followed.home / "k=1")

    with pytest.raises(DataError, match=r"k=1 .* column k, which is not declared"):
        followed.discover()


def test_a_file_that_was_put_in_the_place_of_a_read_one_is_not_cleaned_away(tmp_path):
    source = JsonLinesSource(str(tmp_path), SCHEMA, Following(1.0, cleaning=Cleaning()))
    for name in ("a", "b"):
        (tmp_path / name).write_text('{"n": 1}\n')
    found = source.open_enumerator(None).discover()
    os.utime(tmp_path / "a", (1, 1))  # another file of that name
    unread = [split for split in found.splits if split.id.endswith("b")]

    source.open_enumerator(found.state).on_checkpoint_complete(1, found.state, unread)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    source.open_enumerator(found.state).on_checkpoint_complete(2, found.state, [])
    assert os.listdir(tmp_path) == ["a"]


def test_an_archive_that_would_be_read_again_is_a_mistake(tmp_path):
    for archive in (tmp_path / "in" / "old", tmp_path):
        source = JsonLinesSource(
            str(tmp_path / "in"), SCHEMA, Following(1.0, cleaning=Cleaning(str(archive)))
        )
        with pytest.raises(BuildError, match="would be read again"):
            source.check()


def test_files_are_chosen_by_name_and_the_newest_come_first_if_asked(tmp_path):
    for at, name in enumerate(["a.json", "b.csv", "c.json", "d.txt"]):
        (tmp_path / name).write_text('{"n": 1}\n')
        os.utime(tmp_path / name, (100 + at, 100 + at))
    following = Following(1.0, latest_first=True)
    source = JsonLinesSource(str(tmp_path), SCHEMA, following).listing(name_pattern="*.{json,txt}")
    found = source.open_enumerator(None).discover().splits
    assert [os.path.basename(split.id) for split in found] == ["d.txt", "c.json", "a.json"]
