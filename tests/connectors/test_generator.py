"""A source from a Python generator that yields rows with positions."""

import itertools
from collections import namedtuple

import pyarrow as pa
import pytest

from stillframe import BuildError, DataError, Split, UserCodeError, from_generator
from stillframe.api.sources import SourceContext
from stillframe.connectors import generator
from stillframe.testing.clock import ManualClock

DDL = "number long, word string"


def numbers(position):
    """Three rows."""
    for number in range(0 if position is None else position, 3):
        yield (number, f"w{number}"), number + 1


def open_reader(source, **at):
    """A reader of all splits, from these positions on."""
    splits = [Split(each.id, at.get(each.id, each.position)) for each in source.splits(2)]
    return source.open(splits, SourceContext(0, 1, ManualClock()))


def read(source, **at):
    """What comes until the end, by split: the rows, and the position behind each batch."""
    found = []
    for item in open_reader(source, **at).read():
        if item is not None:
            split, batch = item
            found.append((split, [] if batch is None else batch["number"].to_pylist()))
    return found


def test_rows_are_gathered_and_the_position_is_behind_the_last_of_them():
    source = from_generator(numbers, DDL)

    assert read(source) == [(Split("generator", {"at": 3, "ended": True}), [0, 1, 2])]
    assert source.schema == pa.schema([("number", pa.int64()), ("word", pa.string())])
    assert source.describe() == "generator numbers"


def test_it_goes_on_after_the_position_of_the_checkpoint_and_not_at_all_after_the_end():
    source = from_generator(numbers, DDL)

    assert read(source, generator={"at": 2}) == [
        (Split("generator", {"at": 3, "ended": True}), [2])
    ]
    assert read(source, generator={"at": 3, "ended": True}) == []


def test_none_lets_go_what_was_gathered():
    def slow(position):
        yield (1, "a"), 1
        yield None
        yield (2, "b"), 2

    assert [rows for _, rows in read(from_generator(slow, DDL))] == [[1], [2]]


def test_rows_may_be_dicts_named_tuples_and_whole_batches():
    word = namedtuple("word", ["word", "number"])

    def mixed(position):
        yield {"word": "a", "number": 1}, 1
        yield word("b", 2), 2
        yield pa.record_batch({"number": [3, 4], "word": ["c", "d"]}), 4
        yield (5, "e"), 5

    found = read(from_generator(mixed, DDL))
    assert [rows for _, rows in found] == [[1, 2], [3, 4], [5]]
    assert [split.position["at"] for split, _ in found] == [2, 4, 5]


def test_several_splits_are_read_in_turn_each_with_its_name_and_position():
    def of_shop(shop, position):
        for number in range(position or 0, 2):
            yield (number, shop), number + 1
            yield None

    source = from_generator(of_shop, DDL, splits=["east", "west"], name="orders")
    found = read(source, west={"at": 1})

    assert [(split.id, rows) for split, rows in found] == [
        ("east", [0]),
        ("west", [1]),
        ("east", [1]),
        ("west", []),
        ("east", []),
    ]
    reader = open_reader(source)
    assert [reader.has_ended(split) for split, _ in found] == [False, False, False, True, True]


def test_a_generator_that_gives_row_after_row_is_cut_into_batches(monkeypatch):
    monkeypatch.setattr(generator, "_BATCH_ROWS_MAX", 10)
    monkeypatch.setattr(generator, "_TURN_SECONDS", 1000.0)
    endless = from_generator(lambda at: (((n, "x"), n) for n in itertools.count()), DDL)
    reader = open_reader(endless)
    items = reader.read()

    assert [next(items)[1].num_rows for _ in range(3)] == [10, 10, 10]
    reader.interrupt()
    next(items, None)
    assert list(items) == []


def test_its_own_end_of_things_is_run_when_the_reader_ends():
    closed = []

    def careful(position):
        try:
            while True:
                yield None
        finally:
            closed.append(True)

    items = open_reader(from_generator(careful, DDL)).read()
    assert next(items) is None
    items.close()

    assert closed == [True]


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (lambda at: iter([7]), UserCodeError, r"yielded 7: yield \(row, position\)"),
        (lambda at: 7, UserCodeError, "returned 7, which is no generator"),
        (lambda at: iter([((1,), 1)]), DataError, "1 values"),
        (lambda at: iter([((1.5, "a"), 1)]), DataError, "column number that are no int64"),
    ],
)
def test_what_is_no_row_with_a_position_is_refused_with_a_sentence(function, error, says):
    with pytest.raises(error, match=says):
        read(from_generator(function, DDL, name="bad"))


@pytest.mark.parametrize("splits", [[], ["a", "a"]])
def test_splits_have_different_names(splits):
    with pytest.raises(BuildError, match="splits of generator numbers are different names"):
        from_generator(numbers, DDL, splits=splits)


def test_a_schema_that_is_none_is_refused():
    with pytest.raises(UserCodeError, match="the schema of generator numbers is a StructType or"):
        from_generator(numbers, 7)
