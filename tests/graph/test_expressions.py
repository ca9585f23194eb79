"""Trees of expressions: their parts, and how parts are replaced."""

import pyarrow as pa

from stillframe.graph.expressions import (
    BatchFunction,
    Call,
    Column,
    Named,
    Rewriting,
    SparkProjection,
    SparkResult,
    all_parts,
    spark_results,
)
from stillframe.graph.logical import Project, evaluated_by_spark
from stillframe.runtime.expressions import project

X = Column("x", pa.int64())
Y = Column("y", pa.int64())


def by_spark(*inputs, place=0, projection=None):
    made = projection or SparkProjection(inputs, False, "", "", (), (), ())
    return SparkResult(made, place, pa.int64(), "sql")


def plus(*arguments):
    return Call("add", arguments, pa.int64())


def test_a_part_that_is_used_twice_is_told_once():
    shared = plus(X, Y)
    assert list(all_parts(plus(shared, shared))) == [plus(shared, shared), shared, X, Y]


def test_what_is_computed_before_a_crossing_is_among_its_parts():
    inner = by_spark(X)
    outer = by_spark(BatchFunction(sum, (inner,), pa.int64(), "f"))
    assert spark_results(outer) == [outer, inner]
    assert evaluated_by_spark(Project((Named("a", outer), Named("b", inner)))) == [outer, inner]


def test_rewritten_expressions_share_what_they_shared_and_stay_if_nothing_is_replaced():
    one = by_spark(X, plus(X, Y))
    other = by_spark(place=1, projection=one.projection)
    rewriting = Rewriting(lambda each: Y if each is X else None)
    first, second = rewriting(plus(one, Y)), rewriting(other)
    assert first.arguments[0].projection is second.projection
    assert second.projection.inputs == (Y, plus(Y, Y))
    kept = plus(by_spark(Y), Y)
    assert rewriting(kept) is kept


def test_a_function_of_columns_gets_those_of_a_batch_and_is_not_called_without_rows():
    def total(columns, rows):
        assert rows == len(columns[0]) > 0
        return columns[0]

    columns = (Named("t", BatchFunction(total, (plus(X, Y),), pa.int64(), "total")),)
    batch = pa.record_batch({"x": [1, 2], "y": [3, None]})
    schema = pa.schema([("t", pa.int64())])
    assert project(columns, batch, schema).to_pydict() == {"t": [4, None]}
    assert project(columns, batch.slice(0, 0), schema).num_rows == 0
