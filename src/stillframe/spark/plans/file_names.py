"""`input_file_name()` over files: the name that Spark's hidden column has.

The function asks the task which file it reads. A row that has left its source is in no such task,
but it may have brought the name along.
"""

from __future__ import annotations

from typing import Any

from py4j.java_gateway import JavaObject

from stillframe.spark.steps import as_scala, below_aliases, children, class_name, sequence

_FUNCTION = "input_file_name()"


def with_file_names(jvm: Any, plan: JavaObject) -> JavaObject:
    """The projection with `_metadata.file_path` for the function, where it stands right over files;
    else as it is."""
    if _FUNCTION not in str(plan.projectList().toString()):
        return plan
    leaf = below_aliases(plan.child())
    if class_name(leaf) != "StreamingRelation":
        return plan
    leaf = leaf.withMetadataColumns()
    hidden = [each for each in sequence(leaf.output()) if each.name() == "_metadata"]
    if not hidden:
        return plan
    catalyst = jvm.org.apache.spark.sql.catalyst
    place = hidden[0].dataType().fieldIndex("file_path")
    nothing = getattr(getattr(jvm.scala, "None$"), "MODULE$")
    expressions = catalyst.expressions
    path = expressions.GetStructField(hidden[0], place, nothing)
    # The function spells files of a disk with three slashes, the column with one.
    literal = getattr(getattr(expressions, "Literal$"), "MODULE$")
    spellings = map(literal.apply, ("file:/", "file:///"))
    path = expressions.StringReplace(path, *spellings)
    columns = [_replaced(jvm, each, path) for each in sequence(plan.projectList())]
    return catalyst.plans.logical.Project(as_scala(jvm, columns), leaf)


def _replaced(jvm: Any, node: JavaObject, path: JavaObject) -> JavaObject:
    if class_name(node) == "InputFileName":
        return path
    below = children(node)
    if not below:
        return node
    return node.withNewChildren(as_scala(jvm, [_replaced(jvm, each, path) for each in below]))
