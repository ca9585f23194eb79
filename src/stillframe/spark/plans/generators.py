"""Spark's generators, which make several rows of one: `explode`, `inline`, `stack` and their like.

What a generator reads is computed in front of it where only Spark's own evaluator can.
"""

from __future__ import annotations

import pyarrow as pa
from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame

from stillframe.graph.expressions import Column, Literal, Named, SparkResult
from stillframe.graph.logical import MapInArrow, Node, Project
from stillframe.runtime.exploding import Expanding, Exploding
from stillframe.spark.expressions.evaluated import Columns, Crossings, InTwo, computed_in_front
from stillframe.spark.expressions.reading import Translator, columns_of
from stillframe.spark.expressions.spark_generators import generator_by_spark
from stillframe.spark.expressions.windows import is_event_time
from stillframe.spark.plans.joins import noted_frame, told_apart
from stillframe.spark.steps import analyzed, children, class_name, sequence
from stillframe.spark.stream import Stream, schema_of
from stillframe.spark.types import to_arrow_schema

_OF_COLLECTIONS = {
    "Explode": ("array", "map"),
    "PosExplode": ("array", "map"),
    "Inline": ("array",),
}


def generated(child: Stream, plan: JavaObject, frame: DataFrame) -> Stream | None:
    """The stream behind this `Generate`, which `frame` is over the stream's own frame.

    None: a stream has no such generator.
    """
    generator = plan.generator()
    make = {"Stack": _stacked, "JsonTuple": _tupled}.get(class_name(generator), _exploded)
    leaf = analyzed(child.frame)
    fields = to_arrow_schema(frame.schema)
    # A column may be exploded into one of its own name.
    result = told_apart(tuple(Named(each.name, Column(each.name, each.type)) for each in fields))
    node = make(child, plan, schema_of(result), Crossings(frame.sparkSession), columns_of(leaf))
    if node is None:
        return None
    times = {str(each.name()) for each in sequence(leaf.output()) if is_event_time(each)}
    return child.after(node, noted_frame(frame, result, times))


def _exploded(
    child: Stream, plan: JavaObject, schema: pa.Schema, crossings: Crossings, columns: Columns
) -> Node | None:
    generator = plan.generator()
    kind = class_name(generator)
    if kind not in _OF_COLLECTIONS:
        return None
    if generator.child().dataType().typeName() not in _OF_COLLECTIONS[kind]:
        return None
    read = InTwo(crossings, Translator(columns)).translate(generator.child())
    front, [[expression]] = computed_in_front(crossings, child.node_by_ids, [[read]])
    is_inline = kind == "Inline"
    own = tuple(child.node_by_ids.schema.names)
    with_position, is_outer = kind == "PosExplode", bool(plan.outer())
    function = Exploding(expression, own, with_position, is_outer, schema, is_inline)
    return Node(MapInArrow(function, "inline" if is_inline else "explode"), schema, (front,))


def _tupled(
    child: Stream, plan: JavaObject, schema: pa.Schema, crossings: Crossings, columns: Columns
) -> Node:
    """`json_tuple`: one row of each, with the fields of a text as columns of Spark's."""
    generator, spark = plan.generator(), child.frame.sparkSession
    in_two = InTwo(crossings, Translator(columns))
    outputs = sequence(plan.generatorOutput())
    projection = generator_by_spark(spark, generator, outputs, crossings, in_two)
    unchanged, made = _own_and_made(child, schema)
    results = [
        SparkResult(projection, place, field.type, str(generator.sql()))
        for place, field in enumerate(made)
    ]
    named = [Named(f.name, each) for f, each in zip(made, results, strict=True)]
    return Node(Project((*unchanged, *named)), schema, (child.node_by_ids,))


def _stacked(
    child: Stream, plan: JavaObject, schema: pa.Schema, crossings: Crossings, columns: Columns
) -> Node:
    """Each row once for each of so many rows of values; what is missing in the last is null."""
    count, *given = children(plan.generator())
    values = [InTwo(crossings, Translator(columns)).translate(each) for each in given]
    unchanged, made = _own_and_made(child, schema)
    width, rows = len(made), int(count.eval(None))
    places = range(len(values), rows * width)
    values += [Literal(pa.scalar(None, made[place % width].type)) for place in places]
    parts = [values[start : start + width] for start in range(0, rows * width, width)]
    front, parts = computed_in_front(crossings, child.node_by_ids, parts)
    stacked = tuple(
        (*unchanged, *(Named(field.name, value) for field, value in zip(made, part, strict=True)))
        for part in parts
    )
    return Node(MapInArrow(Expanding(stacked, schema), "stack"), schema, (front,))


def _own_and_made(child: Stream, schema: pa.Schema) -> tuple[list[Named], list[pa.Field]]:
    """The columns of the child as they come out again, which are the first; and the others."""
    own = list(child.node_by_ids.schema)
    names = schema.names[: len(own)]
    unchanged = [
        Named(name, Column(each.name, each.type)) for name, each in zip(names, own, strict=True)
    ]
    return unchanged, list(schema)[len(own) :]
