"""Text that is not UTF-8 is found where it enters, in whatever it is wrapped."""

import pyarrow as pa
import pytest

from stillframe.errors import DataError
from stillframe.texts import refuse_bad_text


def strings(*values):
    """A column of strings that nobody has looked at."""
    return pa.array(values, pa.binary()).view(pa.string())


GOOD, BAD = strings(b"a", "é页".encode()), strings(b"a", b"caf\xe9")


def within(text):
    """The same text in everything that may hold some."""
    one_each = pa.array([0, 1, 2], pa.int32())
    return {
        "a string": text,
        "a large string": text.cast(pa.large_string()),
        "a dictionary": pa.DictionaryArray.from_arrays(pa.array([0, 1]), text),
        "a list": pa.ListArray.from_arrays(one_each, text),
        "a struct": pa.StructArray.from_arrays([text], ["x"]),
        "a map's key": pa.MapArray.from_arrays(one_each, text, pa.array([1, 2])),
        "a map's value": pa.MapArray.from_arrays(one_each, pa.array(["a", "b"]), text),
        "a struct in a list": pa.ListArray.from_arrays(
            one_each, pa.StructArray.from_arrays([text], ["x"])
        ),
    }


@pytest.mark.parametrize("kind", within(GOOD))
def test_bad_text_is_named_wherever_it_is(kind):
    batch = pa.record_batch({"n": pa.array([1, 2]), "app": within(BAD)[kind]})

    with pytest.raises(DataError) as raised:
        refuse_bad_text(batch, "a.parquet", "clean it")
    assert str(raised.value) == (
        "a.parquet has text in column app that is not UTF-8, b'caf\\xe9': clean it"
    )
    refuse_bad_text(pa.record_batch({"app": within(GOOD)[kind]}), "a.parquet", "clean it")


def test_bytes_may_be_any_bytes_and_nulls_are_no_text():
    refuse_bad_text(pa.record_batch({"raw": pa.array([b"\xff", None])}), "x", "y")
    refuse_bad_text(pa.record_batch({"s": pa.array([None, "a"])}), "x", "y")


def test_other_damage_is_said_too():
    offsets = pa.array([0, 9, 6], pa.int32()).buffers()[1]
    text = pa.py_buffer("ééé".encode())
    beyond = pa.Array.from_buffers(pa.string(), 2, [None, offsets, text])
    with pytest.raises(DataError, match="a function's result is not valid Arrow data"):
        refuse_bad_text(pa.record_batch({"s": beyond}), "a function's result", "mend it")
