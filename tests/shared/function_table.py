"""Which of Spark's functions run on a stream, and where: the list in docs/expressions.md.

    python tests/shared/function_table.py

runs each function of Spark's registry on both sides, ANSI mode on and off, and writes the list;
with `--build` functions are only built, which says where they run and not what they give.

Cases are the examples that Spark's own documentation of the function has. Each is made to read
columns: an argument becomes a column that holds the argument's value, as many of them as the
function allows, in one row with the values and one row with nulls. What a function gives that no
column of a stream can hold, such as a variant, is cast to a string. A case whose result differs
from Spark's, or that fails where Spark's does not, makes its function one that does not run.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col

from stillframe.errors import BuildError, StillframeError
from stillframe.evaluator.beside import Evaluator
from stillframe.graph.expressions import Named, spark_results
from stillframe.runtime.expressions import project
from stillframe.spark.deployment.entry import spark_here
from stillframe.spark.expressions.evaluated import columns_in_two
from stillframe.spark.expressions.nodes import without_alias
from stillframe.spark.steps import analyzed, children, class_name, sequence
from stillframe.spark.types import empty_frame, to_arrow_schema

PAGE = Path(__file__).parents[2] / "docs" / "expressions.md"
BEGIN, END = "<!-- functions: begin -->", "<!-- functions: end -->"

NATIVE, IN_SPARK, REFUSED = "native", "in Spark's evaluator", "refused"
OFF = "not enabled in Spark"
_NOT_SCALAR = {
    "agg_funcs": "[aggregates](#aggregates)",
    "window_funcs": "window functions",
    "generator_funcs": "generators",
    "table_funcs": "table functions",
    "time_windows": "windows, which a stream groups by,",
}
_GROUPS = {
    "json_tuple": "generator_funcs",
    **dict.fromkeys(("schema_of_variant_agg", "vector_avg", "vector_sum"), "agg_funcs"),
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
    *("time", "timestamp_nanos", "unix_nanos"),
)
"""What needs a package beside Spark, or a type that is not enabled."""
_MEMORY_BYTES = 512 << 20


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


class Judge:
    """Runs cases on both sides and says what becomes of them."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._cases = Cases(spark)

    def verdicts(self, functions: Sequence[Function]) -> list[Verdict]:
        made = []
        scalar = [each for each in functions if each.group not in _NOT_SCALAR]
        for start in range(0, len(scalar), _FUNCTIONS_AT_ONCE):
            made += self._scalar(scalar[start : start + _FUNCTIONS_AT_ONCE])
            print(f"{made[-1].name} ...", file=sys.stderr, flush=True)
        made += [self.where(each) for each in functions if each.group in _NOT_SCALAR]
        return sorted(made, key=lambda each: each.name)

    def where(self, function: Function) -> Verdict:
        """Without running it: where it would run."""
        if function.group in _NOT_SCALAR:
            return Verdict(function.name, function.group, "")
        verdict, _ = self._built(function)
        return verdict

    def _built(self, function: Function) -> tuple[Verdict, list[tuple[Case, tuple[Named, ...]]]]:
        built: list[tuple[Case, tuple[Named, ...]]] = []
        refusal = "its documentation has no example that reads no table"
        for case in self._cases.of(function):
            empty = empty_frame(self._spark, self._spark.sql(case.given).schema)
            try:
                built.append((case, columns_in_two(empty.selectExpr(case.text))))
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
        made = [each.expression for _, columns in built for each in columns]
        where = IN_SPARK if spark_results(*made) else NATIVE
        is_within = all(case.is_cast for case, _ in built)
        return Verdict(function.name, function.group, where, is_within=is_within), built

    def _scalar(self, functions: Sequence[Function]) -> list[Verdict]:
        built = [self._built(each) for each in functions]
        made = [each.expression for _, cases in built for _, columns in cases for each in columns]
        projections = [each.projection for each in spark_results(*made)]
        with contextlib.ExitStack() as stack:
            evaluator = None
            if projections:
                beside = Evaluator(spark_here(), projections, _MEMORY_BYTES)
                evaluator = stack.enter_context(closing(beside))
            return [self._compared(verdict, cases, evaluator) for verdict, cases in built]

    def _compared(
        self,
        verdict: Verdict,
        cases: list[tuple[Case, tuple[Named, ...]]],
        evaluator: Evaluator | None,
    ) -> Verdict:
        for case, columns in cases:
            try:
                difference = self._difference(case, columns, evaluator)
            except Exception as error:
                difference = f"{type(error).__name__}: {error}"
            if difference:
                return replace(verdict, where=REFUSED, why=f"{case.text}: {_short(difference)}")
        return verdict

    def _difference(
        self, case: Case, columns: tuple[Named, ...], evaluator: Evaluator | None
    ) -> str | None:
        given = self._spark.sql(case.given)
        nulls = given.selectExpr(*(f"if(false, {name}, null) AS {name}" for name in given.columns))
        both = self._difference_on(given.unionAll(nulls), case, columns, evaluator)
        if both is None:
            return None
        # Where one of the rows fails, the other may not.
        found = (self._difference_on(each, case, columns, evaluator) for each in (given, nulls))
        return next((each for each in found if each is not None), None)

    def _difference_on(
        self,
        rows: DataFrame,
        case: Case,
        columns: tuple[Named, ...],
        evaluator: Evaluator | None,
    ) -> str | None:
        schema = to_arrow_schema(rows.schema)
        # PySpark fails where a struct is null whose fields cannot be: so without that promise.
        loose = [each.dataType.simpleString() for each in rows.schema]
        named = zip(rows.columns, loose, strict=True)
        read = rows.select(*(col(f"`{name}`").cast(type_) for name, type_ in named)).toArrow()
        values = zip(read.columns, schema, strict=True)
        # Not by a cast: nulls may be where Spark has said that there are none.
        arrays = [pa.array(each.to_pylist(), field.type) for each, field in values]
        batch = pa.RecordBatch.from_arrays(arrays, names=schema.names)
        out = pa.schema([(each.name, each.expression.type) for each in columns])
        wanted: Any = None
        with contextlib.suppress(*_BY_SPARK):
            wanted = rows.selectExpr(case.text).toArrow()
        try:
            seen = project(columns, batch, out, evaluator)
        except Exception as error:
            return None if wanted is None and isinstance(error, StillframeError) else str(error)
        if wanted is None:
            return "Spark fails here"
        if not self._is_fixed(rows, case):
            return None
        theirs = [_values(each, field) for each, field in zip(wanted.columns, out, strict=True)]
        ours = [each.to_pylist() for each in seen.columns]
        return None if repr(theirs) == repr(ours) else f"{ours} and not {theirs}"

    @staticmethod
    def _is_fixed(frame: DataFrame, case: Case) -> bool:
        """Whether it gives the same each time."""
        if re.search(
            r"current_|now\(|localtimestamp|uuid|rand|shuffle|_seed|aes_encrypt", case.text.lower()
        ):
            return False
        made = analyzed(frame.selectExpr(case.text))
        return all(bool(each.deterministic()) for each in sequence(made.projectList()))


def _values(column: pa.ChunkedArray, field: pa.Field) -> list[Any]:
    """Times in the zone that ours are in."""
    with contextlib.suppress(pa.ArrowInvalid):  # nulls where Spark has said that there are none
        column = column.cast(field.type)
    return column.to_pylist()  # type: ignore[no-any-return]


def _short(text: str) -> str:
    """The first part of an error, without what to do."""
    return " ".join(text.split())[:160].partition("; ")[0]


# --- The page


def agreed(both: Sequence[Sequence[Verdict]]) -> list[Verdict]:
    """Of ANSI mode on and off: the worse of the two."""
    order = [NATIVE, "", IN_SPARK, OFF, REFUSED]
    return [
        max(each, key=lambda verdict: order.index(verdict.where))
        for each in zip(*both, strict=True)
    ]


def lines_of(verdicts: Sequence[Verdict]) -> list[str]:
    """What stands between the marks of the page."""
    scalar = [v for v in verdicts if v.group not in _NOT_SCALAR and v.where != OFF]
    counts = Counter(each.where for each in scalar)
    running = counts[NATIVE] + counts[IN_SPARK]
    lines = [
        f"Of Spark's {len(scalar)} scalar functions and operators {running} run"
        f" ({100 * running / len(scalar):.1f} %): {counts[NATIVE]} natively,"
        f" {counts[IN_SPARK]} in Spark's evaluator.",
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
    ]
    off = [each for each in verdicts if each.where == OFF]
    lines += ["", f"Not counted, as Spark alone does not run them either: {_names(off, OFF)}."]
    for group, words in _NOT_SCALAR.items():
        of = [each for each in verdicts if each.group == group]
        lines += ["", f"Spark's {words} are no part of an expression: {_names(of, '')}."]
    return lines


def _names(verdicts: Sequence[Verdict], where: str) -> str:
    return ", ".join(f"`{each.name}`" for each in verdicts if each.where == where)


def write(spark: SparkSession, *, is_built_only: bool) -> None:
    functions, judge = functions_of(spark), Judge(spark)
    both = []
    for mode in ["true"] if is_built_only else ["true", "false"]:
        spark.conf.set("spark.sql.ansi.enabled", mode)
        given = map(judge.where, functions) if is_built_only else judge.verdicts(functions)
        both.append(list(given))
    write_list(agreed(both))


def write_list(verdicts: Sequence[Verdict]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = "\n".join(lines_of(verdicts))
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "America/New_York")
        .getOrCreate()
    )
    write(session, is_built_only="--build" in sys.argv)
    session.stop()
