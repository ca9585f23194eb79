"""The list of Spark's functions in docs/expressions.md is that of this version of Spark."""

from __future__ import annotations

import re

import function_table
import pytest
from function_table import IN_SPARK, NATIVE, REFUSED, Judge, functions_of
from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SCALAR_SHARE_MIN = 0.98


def _listed() -> dict[str, set[str]]:
    """The names on the page, by the words that stand in front of them."""
    text = function_table.PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition(function_table.BEGIN)
    found: dict[str, set[str]] = {}
    words = ""
    for line in rest.partition(function_table.END)[0].splitlines():
        if line.startswith("- `"):
            found.setdefault(words, set()).add(line.split("`")[1])
        elif line:
            words = line.partition(":")[0]
            found[words] = set(re.findall(r"`([^`]+)`", line))
    return found


def _under(listed: dict[str, set[str]], beginning: str) -> set[str]:
    [names] = [names for words, names in listed.items() if words.startswith(beginning)]
    return names


def test_the_page_lists_every_function_of_spark_and_nearly_all_scalar_ones_run(
    spark: SparkSession,
) -> None:
    listed = _listed()
    functions = functions_of(spark)
    assert {each.name for each in functions} == set().union(*listed.values())
    running = _under(listed, "**Natively**") | _under(listed, "**In Spark's evaluator**")
    refused = _under(listed, "**Not on a stream**")
    assert len(running) / len(running | refused) >= SCALAR_SHARE_MIN


@pytest.mark.parametrize("name", ["upper", "coalesce", "soundex", "transform", "input_file_name"])
def test_functions_run_where_the_page_says(spark: SparkSession, name: str) -> None:
    listed = _listed()
    [function] = [each for each in functions_of(spark) if each.name == name]
    heads = {NATIVE: "**Natively**", IN_SPARK: "**In Spark's", REFUSED: "**Not on a stream**"}
    assert name in _under(listed, heads[Judge(spark).where(function).where])
