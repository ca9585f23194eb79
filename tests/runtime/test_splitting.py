"""`split` by a plain text gives what Arrow's own, slower function gives, for any texts."""

import random

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stillframe.runtime.splitting import split_by_text

WITHOUT_LIMIT = pa.scalar(-1, pa.int32())
LETTERS = [" ", " ", " ", "a", "bc", "é", "漢", "😀", "\n", "\x00", "||"]


def split(texts, by=" ", limit=WITHOUT_LIMIT):
    return split_by_text(pa.list_(pa.string()), texts, pa.scalar(by), limit)


def some_texts(random_):
    made = ["".join(random_.choices(LETTERS, k=random_.randrange(9))) for _ in range(40)]
    return pa.array(made, pa.string())


@pytest.mark.parametrize("seed", range(20))
def test_texts_made_of_chance_have_the_parts_that_arrow_sees(seed):
    texts = some_texts(random.Random(seed))
    for part in (texts, texts.slice(7), texts.slice(3, 11), texts.slice(39), texts.slice(0, 0)):
        for by in (" ", "a", "\n", "\x00", "|", "||", "é", "😀"):
            found = split(part, by)
            found.validate(full=True)
            assert found.equals(pc.split_pattern(part, by)), (by, part.to_pylist())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", [""]),
        (" ", ["", ""]),
        ("  a ", ["", "", "a", ""]),
        ("héllo wörld", ["héllo", "wörld"]),
        ("one", ["one"]),
    ],
)
def test_empty_parts_are_parts_too(text, parts):
    assert split(pa.array([text])).to_pylist() == [parts]
    assert split(pa.array(["x y", text, "z"])).to_pylist() == [["x", "y"], parts, ["z"]]


def test_a_null_has_no_parts():
    assert split(pa.array(["a b", None, ""])).to_pylist() == [["a", "b"], None, [""]]
    assert split(pa.array([None, None], pa.string())).to_pylist() == [None, None]


def test_a_limit_leaves_the_rest_in_the_last_part():
    assert split(pa.array(["a b c", "d"]), limit=pa.scalar(2)).to_pylist() == [["a", "b c"], ["d"]]


def test_no_rows_have_no_parts():
    assert split(pa.array([], pa.string())).to_pylist() == []
