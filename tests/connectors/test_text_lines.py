"""Lines of text files, cut out of whole blocks."""

from __future__ import annotations

import re
from random import Random

import pytest

from stillframe.connectors.text_lines import lines_of


@pytest.mark.parametrize("signs", ["ab\n", "ab\n\r"])
def test_a_line_ends_with_a_line_feed_a_carriage_return_or_both(signs: str) -> None:
    random = Random(0)
    for _ in range(2000):
        text = "".join(random.choice(signs) for _ in range(random.randrange(12)))
        lines = re.split("\r\n|\r|\n", text)
        expected = lines if lines[-1] else lines[:-1]

        found = lines_of(text.encode())

        found.validate(full=True)
        assert found.to_pylist() == expected, repr(text)
