"""Which of Spark's functions run on a stream, and where: the list in docs/expressions.md.

    python tests/shared/function_table.py

runs each scalar function and each aggregate of Spark's registry on both sides, in UTC and New York,
ANSI mode on and off, and writes the list. It takes most of an hour. What has been found is kept in
`build/functions`, and a second run goes on from there; delete it to begin from the beginning.
`--write` writes what is known by now, and says of which functions only the plan is.

Cases are the examples that Spark's own documentation of the function has. Each is made to read
columns: an argument becomes a column that holds the argument's value, as many of them as the
function allows. The rows are that value, nulls, and in each column what is awkward for its type
(extremes, NaN, letters outside ASCII, skipped hours, empty and nested ones) and random values. What
a function gives that no column of a stream can hold, such as a variant, is cast to a string.

A row that Spark refuses must be refused here too. A case that gives another result for any row, or
that fails where Spark's does not, makes its function one that does not run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from awkward_rows import rows_around
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.types import StructType

from stillframe.errors import BuildError, StillframeError
from stillframe.evaluator.beside import Evaluator
from stillframe.graph.expressions import (
    Named,
    SparkAggregate,
    SparkProjection,
    spark_results,
)
from stillframe.graph.logical import Aggregate
from stillframe.runtime.aggregating_by_spark import bound
from stillframe.runtime.expressions import project
from stillframe.spark.deployment.entry import spark_here
from stillframe.spark.expressions.evaluated import columns_in_two
from stillframe.spark.expressions.nodes import without_alias
from stillframe.spark.plans.aggregations import Aggregation, aggregation_of
from stillframe.spark.steps import analyzed, children, class_name, sequence
from stillframe.spark.types import empty_frame, to_arrow_schema
from stillframe.state.aggregates import AggregateTable

PAGE = Path(__file__).parents[2] / "docs" / "expressions.md"
BEGIN, END = "<!-- functions: begin -->", "<!-- functions: end -->"

NATIVE, IN_SPARK, REFUSED = "native", "in Spark's evaluator", "refused"
OFF = "not enabled in Spark"
AGGREGATES = "agg_funcs"
_NOT_SCALAR = {
    AGGREGATES: "",
    "grouping_funcs": "functions of ROLLUP, CUBE and GROUPING SETS, which a stream has with these,",
    "window_funcs": "window functions",
    "generator_funcs": "generators",
    "table_funcs": "table functions",
    "time_windows": "windows, which a stream groups by,",
}
_GROUPS = {
    "json_tuple": "generator_funcs",
    **dict.fromkeys(("schema_of_variant_agg", "vector_avg", "vector_sum"), AGGREGATES),
    **dict.fromkeys(("grouping", "grouping_id"), "grouping_funcs"),
    **dict.fromkeys(("session_window", "window", "window_time"), "time_windows"),
}
"""Where Spark's documentation has them elsewhere."""
_CASES_MAX = 2
"""Of one function: the first ones that Spark's documentation has."""
_FUNCTIONS_AT_ONCE = 40
_BY_SPARK = (PySparkException, Py4JJavaError)
"""What Spark raises."""
_CASTS = {
    **dict.fromkeys(("bigint", "decimal", "double", "float", "int", "smallint", "tinyint"), "'7'"),
    **{"binary": "'x'", "boolean": "'true'", "date": "'2024-02-29'", "string": "7"},
    "timestamp": "'2024-02-29 10:00:00'",
}
_EXAMPLES = {
    **{name: (f"SELECT {name}({value})",) for name, value in _CASTS.items()},
    "between": ("SELECT 0.5 BETWEEN 0.1 AND 1.0",),
}
"""Of functions for which Spark's documentation has none that can be parsed."""
_NOT_ENABLED = ("FEATURE_NOT_ENABLED", "UNSUPPORTED_TIME_TYPE")
_WITH_MORE = (
    *("from_avro", "schema_of_avro", "to_avro", "from_protobuf", "to_protobuf"),
    *("time", "timestamp_nanos", "unix_nanos", "measure"),
)
"""What needs a package beside Spark, a metric view, or a type that is not enabled."""
_LENGTHS = (
    *("repeat", "lpad", "rpad", "space", "sequence", "array_repeat", "array_insert", "randstr"),
    *(
        "format_number",
        "format_string",
        "printf",
        "elt",
        "to_char",
        "to_varchar",
        "bround",
        "round",
    ),
)
"""Functions that make something as long as a number says."""
_BATCHES = 3
_BY_WHAT_IS_MERGED = ("approx_top_k", "approx_top_k_accumulate", "histogram_numeric")
"""Aggregates that are others, in Spark too, when the same rows are merged in other parts."""
_BY_RANK = ("approx_percentile", "percentile_approx")
"""Which are exact here, and in Spark up to a number of rows."""
_IN_ANY_ORDER = ("collect_set", "collect_union")
_REFUSED_ROWS_MAX = 2
"""Of a case: after each the projection is made again."""
_MEMORY_BYTES = 512 << 20
_EXCLUDED = "spark.sql.optimizer.excludedRules"
_INTERPRETING = "org.apache.spark.sql.catalyst.optimizer.ConvertToLocalRelation"


@dataclass(frozen=True)
class Case:
    """An expression over columns, and what stands in them."""

    text: str
    given: str
    """A query of one row."""
    is_cast: bool = False
    """Whether the function's own result cannot be a column of a stream."""


@dataclass(frozen=True)
class Function:
    name: str
    group: str
    examples: Sequence[str]


@dataclass(frozen=True)
class Verdict:
    name: str
    group: str
    where: str
    why: str = ""
    is_within: bool = False
    """Whether it runs within an expression only."""
    rows: int = 0
    """How many rows were compared."""
    settings: int = 0
    """In how many of the settings it was run."""


def functions_of(spark: SparkSession) -> list[Function]:
    """All that Spark brings; what the session has registered is not among them."""
    jvm: Any = spark._jvm
    registries = jvm.org.apache.spark.sql.catalyst.analysis
    made: dict[str, Function] = {}
    for registry, is_table in (("FunctionRegistry", False), ("TableFunctionRegistry", True)):
        builtin = getattr(getattr(registries, f"{registry}$"), "MODULE$").builtin()
        for identifier in sequence(builtin.listFunction()):
            info = builtin.lookupFunction(identifier).get()
            name = str(identifier.funcName())
            group = "table_funcs" if is_table else _GROUPS.get(name, str(info.getGroup()))
            examples = _EXAMPLES.get(name) or tuple(_examples(str(info.getExamples())))
            made.setdefault(name, Function(name, group, examples))
    return sorted(made.values(), key=lambda each: each.name)


def _examples(text: str) -> Iterator[str]:
    """The queries among the lines of Spark's documentation; a line without '>' is a result."""
    for found in re.finditer(r"^\s*> (SELECT.*?);\s*$", text, re.MULTILINE | re.DOTALL):
        yield " ".join(found[1].split("\n"))


class Cases:
    """Makes cases of examples."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._parser = spark._jsparkSession.sessionState().sqlParser()
        self._made: dict[str, list[Case]] = {}

    def of(self, function: Function) -> list[Case]:
        """They are made once, for both modes."""
        if function.name not in self._made:
            self._made[function.name] = list(islice(self._cases_of(function), _CASES_MAX))
        return self._made[function.name]

    def of_aggregate(self, function: Function) -> Iterator[tuple[str, str]]:
        """What is aggregated, and the query that it is aggregated of."""
        for example in function.examples:
            with contextlib.suppress(*_BY_SPARK):
                plan = self._parser.parsePlan(example)
                if class_name(plan) != "Project" or " GROUP BY " in example:
                    continue
                for item in sequence(plan.projectList()):
                    node = without_alias(item)
                    node = node.child() if class_name(node) == "UnresolvedAlias" else node
                    place = _place_of(node)
                    if place is not None and plan.projectList().size() == 1:
                        yield example[place.start : place.stop], f"SELECT *{example[place.stop :]}"

    def _cases_of(self, function: Function) -> Iterator[Case]:
        for example in function.examples:
            with contextlib.suppress(*_BY_SPARK):
                yield from self._of(example, function.name)

    def _of(self, example: str, name: str) -> Iterator[Case]:
        plan = self._parser.parsePlan(example)
        if class_name(plan) != "Project":
            return
        has_table = class_name(plan.child()) != "OneRowRelation"
        for item in sequence(plan.projectList()):
            node = without_alias(item)
            node = node.child() if class_name(node) == "UnresolvedAlias" else node
            place = _place_of(node)
            if plan.projectList().size() == 1 and not has_table:
                place = range(len("SELECT "), len(example))
            if place is not None:
                call = _call_of(node, name) or node
                table = example[place.stop :] if has_table else ""
                yield self._over_columns(example, call, place, table)

    def _over_columns(self, example: str, call: Any, whole: range, table: str) -> Case:
        """With as many arguments as possible in columns: all, all but the last ones, one, none.

        Of an example with a table, such as an aggregate's result, an argument's first value is.
        """
        places = list(_arguments(call, whole))
        prefixes = [places[:length] for length in range(len(places), 0, -1)]
        for chosen in chain(prefixes, [[place] for place in places[1:]]):
            case = self._carried(_with_columns(example, whole, chosen, table))
            if case is not None:
                return case
        alone = Case(example[whole.start : whole.stop], "SELECT 1 AS nothing")
        return self._carried(alone) or alone

    def _carried(self, case: Case) -> Case | None:
        """The case, cast to a string if it has to be; None: it makes no sense."""
        try:
            given = self._spark.sql(case.given)
            if any("void" in kind for _, kind in given.dtypes):
                return None
            to_arrow_schema(given.schema)
            made = given.selectExpr(case.text)
        except (*_BY_SPARK, StillframeError):
            return None
        try:
            to_arrow_schema(made.schema)
        except (StillframeError, ValueError):  # the latter of a map of nothing
            return replace(case, text=f"CAST({case.text} AS STRING)", is_cast=True)
        return case


def _call_of(node: Any, name: str) -> Any:
    """Where the function is called in an expression; None: nowhere by its name."""
    if class_name(node) == "UnresolvedFunction":
        *_, called = sequence(node.nameParts())
        if str(called).lower() == name.lower():
            return node
    found = (_call_of(child, name) for child in children(node))
    return next((each for each in found if each is not None), None)


def _place_of(node: Any) -> range | None:
    """Of the letters in the query that it was parsed from."""
    origin = node.origin()
    if not (origin.startIndex().isDefined() and origin.stopIndex().isDefined()):
        return None
    return range(int(origin.startIndex().get()), int(origin.stopIndex().get()) + 1)


def _arguments(node: Any, whole: range) -> Iterator[range]:
    """Where those stand that may be columns, one behind the other."""
    end = whole.start
    for child in children(node):
        place = _place_of(child)
        is_value = class_name(child) not in ("LambdaFunction", "NamedArgumentExpression")
        if place is None or not is_value or place == whole:
            continue
        if place.start >= end and place.stop <= whole.stop:
            yield place
            end = place.stop


def _with_columns(example: str, whole: range, chosen: list[range], table: str) -> Case:
    text, given, at = "", [], whole.start
    for number, place in enumerate(chosen):
        text += f"{example[at : place.start]}c{number}"
        value = example[place.start : place.stop]
        given.append(f"{f'(SELECT {value}{table} LIMIT 1)' if table else value} AS c{number}")
        at = place.stop
    return Case(text + example[at : whole.stop], f"SELECT {', '.join(given)}")


_BY_CHANCE = re.compile(r"current_|now\(|localtimestamp|uuid|rand|shuffle|_seed|aes_encrypt")


@dataclass(frozen=True)
class Built:
    """A case as both sides run it."""

    case: Case
    schema: StructType
    """Of what it reads; whatever is in it may be null."""
    example: tuple[Any, ...]
    columns: tuple[Named, ...]


class Judge:
    """Runs cases on both sides and says what becomes of them."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._cases = Cases(spark)

    def verdicts(self, functions: Sequence[Function]) -> list[Verdict]:
        """Of scalar functions: what comes of running them."""
        judged = [self._built(each) for each in functions]
        made = [each.expression for _, cases in judged for built in cases for each in built.columns]
        with self._evaluator([each.projection for each in spark_results(*made)]) as evaluator:
            return [self._compared(verdict, cases, evaluator) for verdict, cases in judged]

    def where(self, function: Function) -> Verdict:
        """Without running it: where it would run."""
        if function.group == AGGREGATES:
            return self._aggregate_built(function)[0]
        if function.group in _NOT_SCALAR:
            return Verdict(function.name, function.group, "")
        return self._built(function)[0]

    @contextmanager
    def _evaluator(self, projections: Sequence[SparkProjection]) -> Iterator[Evaluator | None]:
        if not projections:
            yield None
            return
        with closing(Evaluator(spark_here(), projections, _MEMORY_BYTES)) as evaluator:
            yield evaluator

    # --- scalar functions

    def _built(self, function: Function) -> tuple[Verdict, list[Built]]:
        built: list[Built] = []
        refusal = "its documentation has no example that reads no table"
        for case in self._cases.of(function):
            try:
                schema, [example, *_] = self._given(case.given)
                frame = empty_frame(self._spark, schema).selectExpr(case.text)
                built.append(Built(case, schema, example, columns_in_two(frame)))
            except BuildError as error:
                return Verdict(function.name, function.group, REFUSED, _short(str(error))), []
            except _BY_SPARK as error:  # Spark refuses it too
                refusal = str(error)
        if function.name in _WITH_MORE or (
            not built and any(word in refusal for word in _NOT_ENABLED)
        ):
            return Verdict(function.name, function.group, OFF), []
        if not built:
            return Verdict(function.name, function.group, REFUSED, _short(refusal)), []
        made = [each.expression for case in built for each in case.columns]
        where = IN_SPARK if spark_results(*made) else NATIVE
        is_within = all(each.case.is_cast for each in built)
        return Verdict(function.name, function.group, where, is_within=is_within), built

    def _given(self, query: str) -> tuple[StructType, list[tuple[Any, ...]]]:
        """The columns of a query, all of which may be null, and its rows."""
        frame = self._spark.sql(query)
        schema = StructType.fromJson(_loose(json.loads(frame.schema.json())))
        fields = to_arrow_schema(schema)
        # Not by a cast: nulls may be where Spark has said that there are none.
        columns = [
            pa.array(column.to_pylist(), field.type).to_pylist()
            for column, field in zip(frame.toArrow().columns, fields, strict=True)
        ]
        return schema, list(zip(*columns, strict=True))

    def _compared(
        self, verdict: Verdict, cases: list[Built], evaluator: Evaluator | None
    ) -> Verdict:
        rows = 0
        for built in cases:
            try:
                compared, difference = self._difference(verdict.name, built, evaluator)
                if difference:  # without Java code of its own Spark may look at less, and fail less
                    self._spark.conf.set(_EXCLUDED, _INTERPRETING)
                    compared, difference = self._difference(verdict.name, built, evaluator)
            except Exception as error:
                compared, difference = 0, f"{type(error).__name__}: {error}"
            self._spark.conf.unset(_EXCLUDED)
            if difference:
                why = f"{built.case.text}: {_short(difference)}"
                return replace(verdict, where=REFUSED, why=why)
            rows += compared
        return replace(verdict, rows=rows)

    def _difference(
        self, name: str, built: Built, evaluator: Evaluator | None
    ) -> tuple[int, str | None]:
        """How many rows were compared, and what was found."""
        types = list(to_arrow_schema(built.schema).types)
        rows = rows_around(built.example, types, name, only_small=name in _LENGTHS)
        batch = _batch_of(rows, built.schema)
        out = pa.schema([(each.name, each.expression.type) for each in built.columns])
        theirs, good, bad = self._by_spark(batch, built, out)
        for place in bad[:_REFUSED_ROWS_MAX]:
            with contextlib.suppress(StillframeError):
                project(built.columns, batch.slice(place, 1), out, evaluator)
                return 0, f"Spark fails at {rows[place]}"
        if not good:
            return 0, None
        try:
            seen = project(built.columns, batch.take(pa.array(good)), out, evaluator)
        except StillframeError as error:
            return 0, str(error)
        if not self._is_fixed(built):
            return 0, None
        ours = list(zip(*map(_plain, seen.columns), strict=True))
        for place, here, there in zip(good, ours, theirs, strict=True):
            if repr(here) != repr(there):
                return 0, f"{here} and not {there} at {rows[place]}"
        return len(good), None

    def _by_spark(
        self, batch: pa.RecordBatch, built: Built, out: pa.Schema
    ) -> tuple[list[tuple[Any, ...]], list[int], list[int]]:
        """Its results, of which rows they are, and which rows it refuses."""
        theirs: list[tuple[Any, ...]] = []
        good: list[int] = []
        bad: list[int] = []
        waiting = [range(batch.num_rows)]
        while waiting:
            part = waiting.pop()
            rows = pa.Table.from_batches([batch.slice(part.start, len(part))])
            frame = self._spark.createDataFrame(rows, built.schema)
            try:
                made = frame.selectExpr(built.case.text).toArrow()
            except _BY_SPARK:
                if len(part) == 1:
                    bad.append(part.start)
                else:
                    middle = part.start + len(part) // 2
                    waiting += [range(middle, part.stop), range(part.start, middle)]
                continue
            columns = [_values(each, field) for each, field in zip(made.columns, out, strict=True)]
            theirs += zip(*columns, strict=True)
            good += part
        return theirs, good, bad

    def _is_fixed(self, built: Built) -> bool:
        """Whether it gives the same each time."""
        if _BY_CHANCE.search(built.case.text.lower()):
            return False
        made = analyzed(empty_frame(self._spark, built.schema).selectExpr(built.case.text))
        return all(bool(each.deterministic()) for each in sequence(made.projectList()))

    # --- aggregates

    def aggregates(self, functions: Sequence[Function]) -> list[Verdict]:
        judged = [self._aggregate_built(each) for each in functions]
        crossings = []
        for _, cases in judged:
            for _, _, _, made in cases:
                read = [each.expression for each in (*made.before, *made.after)]
                crossings += [each.projection for each in spark_results(*read)]
                crossings += [
                    crossing
                    for call in made.calls
                    for given in call.parameters
                    if isinstance(given, SparkAggregate)
                    for crossing in given.crossings
                ]
        with self._evaluator(crossings) as evaluator:
            return [self._aggregate_compared(*each, evaluator) for each in judged]

    def _aggregate_built(
        self, function: Function
    ) -> tuple[Verdict, list[tuple[str, StructType, list[tuple[Any, ...]], Aggregation]]]:
        verdict = Verdict(function.name, function.group, NATIVE)
        built = []
        refusal = "its documentation has no example that reads a table"
        if function.name in _WITH_MORE:
            return replace(verdict, where=OFF), []
        for text, query in self._cases.of_aggregate(function):
            if len(built) == _CASES_MAX:
                break
            try:
                schema, rows = self._given(query)
            except (BuildError, *_BY_SPARK) as error:  # of columns that no stream has
                refusal = str(error)
                continue
            try:
                frame = empty_frame(self._spark, schema).agg(expr(text).alias("made"))
                made = aggregation_of(frame)
            except BuildError as error:
                return replace(verdict, where=REFUSED, why=_short(str(error))), []
            except _BY_SPARK as error:
                refusal = str(error)
                continue
            built.append((text, schema, rows, made))
            if any(call.function == "by_spark" for call in made.calls):
                verdict = replace(verdict, where=IN_SPARK)
        if not built:
            return replace(verdict, where=REFUSED, why=_short(refusal)), []
        return verdict, built

    def _aggregate_compared(
        self,
        verdict: Verdict,
        cases: list[tuple[str, StructType, list[tuple[Any, ...]], Aggregation]],
        evaluator: Evaluator | None,
    ) -> Verdict:
        compared = 0
        for text, schema, rows, made in cases:
            types = list(to_arrow_schema(schema).types)
            around = rows_around(rows[0], types, verdict.name, only_small=False)
            small = rows_around(rows[0], types, verdict.name, only_small=True)
            nulls = [tuple(None for _ in types)] * 3
            groups = (rows, nulls, [*rows, *around], [*rows, *small], [*nulls, *small * 9])
            for group in groups[:-1] if verdict.name in _BY_RANK else groups:
                try:
                    batches = 1 if verdict.name in _BY_WHAT_IS_MERGED else _BATCHES
                    difference = self._aggregate_difference(
                        text, schema, group, made, evaluator, batches
                    )
                except Exception as error:
                    difference = f"{type(error).__name__}: {error}"
                if difference:
                    return replace(verdict, where=REFUSED, why=f"{text}: {_short(difference)}")
                compared += len(group)
        return replace(verdict, rows=compared)

    def _aggregate_difference(
        self,
        text: str,
        schema: StructType,
        rows: list[tuple[Any, ...]],
        made: Aggregation,
        evaluator: Evaluator | None,
        batches: int,
    ) -> str | None:
        """Of all rows as one group; ours come in batches, and are restored in between."""
        batch = _batch_of(rows, schema)
        frame = self._spark.createDataFrame(pa.Table.from_batches([batch]), schema).coalesce(1)
        wanted: Any = None
        with contextlib.suppress(*_BY_SPARK):
            [row] = frame.agg(expr(text).alias("made")).toArrow().to_pylist()
            wanted = row["made"]
            if wanted is None:
                wanted = _NULL
        try:
            seen = self._aggregated(batch, made, evaluator, batches)
        except StillframeError as error:
            return None if wanted is None else str(error)
        if wanted is None:
            return f"Spark fails at {rows}"
        there = None if wanted is _NULL else wanted
        if "approx_top_k" in text:  # of values that are there as often, any may be among them
            seen, there = ([each["count"] for each in side or []] for side in (seen, there))
        if text.startswith(_IN_ANY_ORDER):
            seen, there = (sorted(map(str, each or [])) for each in (seen, there))
        return None if near(seen) == near(there) else f"{seen} and not {there}"

    @staticmethod
    def _aggregated(
        batch: pa.RecordBatch, made: Aggregation, evaluator: Evaluator | None, batches: int
    ) -> Any:
        before = pa.schema([(each.name, each.expression.type) for each in made.before])
        calls = bound(Aggregate(made.keys, made.calls), evaluator).calls
        what = (before, made.keys, calls, 8)
        kept = AggregateTable(*what)
        step = -(-batch.num_rows // batches)
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            has_columns = bool(made.before)
            read = project(made.before, part, before, evaluator) if has_columns else part.select([])
            kept.take_in(read, partial=False)
            older, kept = kept, AggregateTable(*what)
            for _, kept_rows in older.freeze().batches_by_key_group():
                kept.restore(kept_rows)
        after = pa.schema([(each.name, each.expression.type) for each in made.after])
        found = project(made.after, kept.results(), after, evaluator)
        [value] = found.column(0).to_pylist()
        return value


_NULL = object()


def near(value: Any) -> Any:
    """Sums of doubles may differ in their last digits; a zero has no sign."""
    if isinstance(value, float) and not math.isnan(value):
        return f"{value + 0.0:.9g}"
    if isinstance(value, list):
        return [near(each) for each in value]
    if isinstance(value, dict):
        return {name: near(each) for name, each in value.items()}
    return str(value)


def _loose(schema: Any) -> Any:
    """The same columns in Spark's JSON, where everything may be null."""
    if isinstance(schema, list):
        return [_loose(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    may_be_null = ("nullable", "containsNull", "valueContainsNull")
    return {name: name in may_be_null or _loose(each) for name, each in schema.items()}


def _batch_of(rows: list[tuple[Any, ...]], schema: StructType) -> pa.RecordBatch:
    fields = to_arrow_schema(schema)
    columns = zip(*rows, strict=True)
    arrays = [pa.array(each, field.type) for each, field in zip(columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=fields)


def _values(column: pa.ChunkedArray, field: pa.Field) -> list[Any]:
    """Times in the zone that ours are in."""
    with contextlib.suppress(pa.ArrowInvalid):  # nulls where Spark has said that there are none
        column = column.cast(field.type)
    return _plain(column)


def _plain(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Texts as bytes, as some functions of Spark's make such as are no UTF-8; times as numbers,
    as there are more than Python has."""
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    return column.to_pylist()  # type: ignore[no-any-return]


def _short(text: str) -> str:
    """The first part of an error, without what to do."""
    return " ".join(text.split())[:160].partition("; ")[0]


# --- The page


def agreed(each_time: Sequence[Sequence[Verdict]]) -> list[Verdict]:
    """Of all settings: the worst, with all rows that were compared."""
    order = [NATIVE, "", IN_SPARK, OFF, REFUSED]
    return [
        replace(
            max(each, key=lambda verdict: order.index(verdict.where)),
            rows=sum(verdict.rows for verdict in each),
            settings=sum(verdict.settings for verdict in each),
        )
        for each in zip(*each_time, strict=True)
    ]


def lines_of(verdicts: Sequence[Verdict]) -> list[str]:
    """What stands between the marks of the page."""
    scalar = [v for v in verdicts if v.group not in _NOT_SCALAR and v.where != OFF]
    aggregates = [v for v in verdicts if v.group == AGGREGATES and v.where != OFF]
    off = [each for each in verdicts if each.where == OFF]
    judged = [each for each in (*scalar, *aggregates) if each.where != REFUSED]
    lines = [
        _share(scalar, "scalar functions and operators"),
        "",
        f"**Natively**, in the forms that Spark's documentation shows: {_names(scalar, NATIVE)}.",
        "",
        f"**In Spark's evaluator**: {_names(scalar, IN_SPARK)}.",
        "",
        "Within an expression only, as no column of a stream has the type they give:"
        f" {', '.join(f'`{each.name}`' for each in scalar if each.is_within)}.",
        "",
        "**Not on a stream**:",
        "",
        *(f"- `{each.name}`: {each.why}" for each in scalar if each.where == REFUSED),
        "",
        _share(aggregates, "aggregates"),
        "",
        f"**Aggregates, natively**: {_names(aggregates, NATIVE)}.",
        "",
        f"**Aggregates, by Spark's own code**: {_names(aggregates, IN_SPARK)}.",
        "",
        "**Aggregates, not on a stream**:",
        "",
        *(f"- `{each.name}`: {each.why}" for each in aggregates if each.where == REFUSED),
        "",
        f"Not counted, as Spark alone does not run them either: {_names(off, OFF)}.",
    ]
    for settings in range(len(CONFIGURATIONS)):
        named = ", ".join(f"`{each.name}`" for each in judged if each.settings == settings)
        words = f"Run with {settings} of the {len(CONFIGURATIONS)} settings until now"
        if not settings:
            words = "Listed by their plans, and not run on these rows yet"
        lines += ["", f"{words}: {named}."] if named else []
    for group, words in _NOT_SCALAR.items():
        of = [each for each in verdicts if each.group == group]
        if words:
            lines += ["", f"Spark's {words} are no part of an expression: {_names(of, '')}."]
    return lines


def _share(verdicts: Sequence[Verdict], what: str) -> str:
    counts = Counter(each.where for each in verdicts)
    running = counts[NATIVE] + counts[IN_SPARK]
    rows = sum(each.rows for each in verdicts)
    seen = f" {rows:,} rows were compared." if rows else ""
    return (
        f"Of Spark's {len(verdicts)} {what} {running} run"
        f" ({100 * running / len(verdicts):.1f} %): {counts[NATIVE]} natively,"
        f" {counts[IN_SPARK]} in Spark's evaluator.{seen}"
    )


def _names(verdicts: Sequence[Verdict], where: str) -> str:
    return ", ".join(f"`{each.name}`" for each in verdicts if each.where == where)


CONFIGURATIONS = [
    (zone, is_ansi) for zone in ("UTC", "America/New_York") for is_ansi in ("true", "false")
]
KEPT = Path("build") / "functions"


def _kept(zone: str, is_ansi: str) -> Path:
    return KEPT / f"{zone.replace('/', '-')}-{is_ansi}.json"


def known_of(zone: str, is_ansi: str) -> dict[str, Verdict]:
    """What has been found with these settings, by name."""
    kept = _kept(zone, is_ansi)
    if not kept.exists():
        return {}
    found = json.loads(kept.read_text(encoding="utf-8"))
    return {each["name"]: Verdict(**each) for each in found}


def known_by_now(spark: SparkSession) -> list[Verdict]:
    """Of all functions; of those that were not run yet, where they would."""
    judge, made = Judge(spark), []
    times = [known_of(*each) for each in CONFIGURATIONS]
    for function in functions_of(spark):
        found = [each[function.name] for each in times if function.name in each]
        made += agreed([[each] for each in found]) if found else [judge.where(function)]
    return made


def compared(spark: SparkSession, zone: str, is_ansi: str) -> list[Verdict]:
    """Of all functions, with these settings; what is known already is not found out again."""
    spark.conf.set("spark.sql.session.timeZone", zone)
    spark.conf.set("spark.sql.ansi.enabled", is_ansi)
    kept = _kept(zone, is_ansi)
    kept.parent.mkdir(parents=True, exist_ok=True)
    known = known_of(zone, is_ansi)
    judge, functions = Judge(spark), functions_of(spark)
    waiting = [each for each in functions if each.name not in known]
    aggregates = [each for each in waiting if each.group == AGGREGATES]
    scalar = [each for each in waiting if each.group not in _NOT_SCALAR]
    for judged, given in ((judge.aggregates, aggregates), (judge.verdicts, scalar)):
        for start in range(0, len(given), _FUNCTIONS_AT_ONCE):
            for verdict in judged(given[start : start + _FUNCTIONS_AT_ONCE]):
                known[verdict.name] = replace(verdict, settings=1)
                if verdict.where == REFUSED:
                    print(f"{zone} {is_ansi} {verdict.name}: {verdict.why}", flush=True)
            told = json.dumps([asdict(each) for each in known.values()], indent=1)
            kept.write_text(told, encoding="utf-8")
    return [known.get(each.name) or judge.where(each) for each in functions]


def write_list(verdicts: Sequence[Verdict]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = "\n".join(lines_of(verdicts))
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # tells each error twice
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.sql.shuffle.partitions", "1")
        .getOrCreate()
    )
    if "--write" in sys.argv:
        write_list(known_by_now(session))
        sys.exit()
    chosen = [each for each in CONFIGURATIONS if sys.argv[1:] in ([], list(each))]
    each_time = [compared(session, *each) for each in chosen]
    if len(each_time) == len(CONFIGURATIONS):
        write_list(agreed(each_time))
    session.stop()
