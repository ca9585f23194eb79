"""What databases load is what the columns say, whatever signs are in them."""

from __future__ import annotations

import pyarrow as pa

from stillframe.connectors.database_texts import as_lines


def test_signs_that_mean_something_in_a_line_are_written_differently():
    texts = ["plain", "a\\b", "tab\tbed", "two\nlines", "zero\0", None, "\\t", ""]
    rows = pa.record_batch({"n": range(8), "text": texts})

    lines = bytes(as_lines(rows)).decode().split("\n")

    written = ["plain", r"a\\b", r"tab\tbed", r"two\nlines", r"zero\0", r"\N", r"\\t", ""]
    assert lines == [*(f"{n}\t{text}" for n, text in enumerate(written)), ""]
    assert bytes(as_lines(rows.slice(3, 1))) == b"3\ttwo\\nlines\n", "of a slice only its own"


def test_a_column_without_any_text_is_nulls():
    rows = pa.record_batch({"text": pa.nulls(2, pa.string()), "n": [1, 2]})

    assert bytes(as_lines(rows)) == b"\\N\t1\n\\N\t2\n"
