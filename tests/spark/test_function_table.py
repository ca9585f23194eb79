"""The list of Spark's functions in docs/expressions.md is that of this version of Spark."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import function_table
import pytest
from function_table import (
    AGGREGATES,
    CONFIGURATIONS,
    IN_SPARK,
    NATIVE,
    REFUSED,
    Judge,
    Verdict,
    functions_of,
)
from pyspark.sql import SparkSession

from stillframe.spark.expressions.evaluated import columns_in_two
from stillframe.spark.types import empty_frame

pytestmark = pytest.mark.spark

SHARE_MIN = 0.98
ROWS_MIN = 12
"""Of a function, in one time zone and one mode."""


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


def test_the_page_lists_every_function_of_spark_and_nearly_all_run(
    spark: SparkSession,
) -> None:
    listed = _listed()
    functions = functions_of(spark)
    assert {each.name for each in functions} == set().union(*listed.values())
    for heads in _HEADS.values():
        native, by_spark, refused = (_under(listed, head) for head in heads.values())
        running = native | by_spark
        assert len(running) / len(running | refused) >= SHARE_MIN


_HEADS = {
    False: {NATIVE: "**Natively**", IN_SPARK: "**In Spark's", REFUSED: "**Not on a stream**"},
    True: {
        NATIVE: "**Aggregates, natively**",
        IN_SPARK: "**Aggregates, by Spark's",
        REFUSED: "**Aggregates, not on a stream**",
    },
}


def _is_said(verdict: Verdict) -> bool:
    """Whether the page says the same of the function."""
    head = _HEADS[verdict.group == AGGREGATES][verdict.where]
    return verdict.name in _under(_listed(), head)


@pytest.mark.parametrize("name", ["coalesce", "transform", "input_file_name", "max_by"])
def test_functions_run_where_the_page_says(spark: SparkSession, name: str) -> None:
    [function] = [each for each in functions_of(spark) if each.name == name]
    assert _is_said(Judge(spark).where(function))


def test_some_functions_give_on_awkward_rows_what_they_give_in_spark(spark: SparkSession) -> None:
    """The whole list is that of `python tests/shared/function_table.py`."""
    named = {each.name: each for each in functions_of(spark)}
    judge = Judge(spark)
    verdicts = [
        *judge.verdicts([named[name] for name in ("upper", "soundex", "array_max", "date_add")]),
        *judge.aggregates([named[name] for name in ("sum", "try_sum", "histogram_numeric")]),
    ]
    for verdict in verdicts:
        assert _is_said(verdict), verdict
        assert verdict.rows >= ROWS_MIN, verdict


def test_a_function_that_differs_on_one_row_is_said_not_to_run(spark: SparkSession) -> None:
    [function] = [each for each in functions_of(spark) if each.name == "upper"]
    judge = Judge(spark)
    _, [built, *_] = judge._built(function)
    other = empty_frame(spark, built.schema).selectExpr("if(c0 = '', null, upper(c0)) AS made")
    wrong = replace(built, columns=columns_in_two(other))
    assert judge._difference("upper", built, None)[1] is None
    found = judge._difference("upper", wrong, None)[1]
    assert found is not None
    assert found.startswith("(None,) and not (b'',) at ('',)")


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("zone", "is_ansi"), CONFIGURATIONS)
def test_every_function_gives_what_it_gives_in_spark(
    spark: SparkSession,
    zone: str,
    is_ansi: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(function_table, "KEPT", tmp_path)
    try:
        verdicts = function_table.compared(spark, zone, is_ansi)
    finally:
        for name in ("spark.sql.session.timeZone", "spark.sql.ansi.enabled"):
            spark.conf.unset(name)
    refused = [each for each in verdicts if each.where == REFUSED]
    assert [each for each in refused if not _is_said(each)] == []
