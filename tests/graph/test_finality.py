"""Which rows are final, by the operators they come through."""

import pyarrow as pa
import pytest

from stillframe.connectors.generate import ClickSource
from stillframe.graph.finality import can_be_final, given_updates, sends_updates
from stillframe.graph.logical import (
    Aggregate,
    DropDuplicates,
    Enrich,
    Late,
    MapInArrow,
    Node,
    Read,
    Union,
    Window,
    WithWatermark,
)

SCHEMA = pa.schema([("key", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
READ = Node(Read(ClickSource(records=1)), SCHEMA)
TIMED = Node(WithWatermark("at", 0), SCHEMA, (READ,))
WINDOW = Window("at", 10, 10)


def counted(node, window=WINDOW, emits_closed=False):
    return Node(Aggregate(("key",), (), window, emits_closed), SCHEMA, (node,))


def mapped(node):
    return Node(MapInArrow(iter, "iter"), SCHEMA, (node,))


def once(node):
    return Node(DropDuplicates(("key",)), SCHEMA, (node,))


@pytest.mark.parametrize(
    ("node", "is_updates", "can"),
    [
        (TIMED, False, True),
        (mapped(counted(TIMED)), True, True),
        (mapped(counted(TIMED, emits_closed=True)), False, True),
        (mapped(counted(TIMED, window=None)), True, False),
        (counted(READ), True, False),
        (once(counted(TIMED)), False, True),
        (Node(Late(), SCHEMA, (counted(TIMED),)), False, True),
        (
            Node(Enrich("left", ("key",), ("key",), None), SCHEMA, (TIMED, counted(READ))),
            False,
            True,
        ),
    ],
    ids=["records", "changes", "closed", "no window", "no time", "kept", "late", "looked up"],
)
def test_rows_are_new_values_of_older_ones_behind_an_aggregate_that_does_not_wait(
    node, is_updates, can
):
    assert sends_updates(node) is is_updates
    assert can_be_final(node) is can


@pytest.mark.parametrize(
    "behind", [once, counted, lambda node: Node(Union(), SCHEMA, (node, TIMED))]
)
def test_what_keeps_or_counts_rows_is_found_behind_one_that_does_not_wait(behind):
    node = behind(mapped(counted(TIMED)))
    assert given_updates(mapped(node)) == [node]
    assert given_updates(behind(mapped(counted(TIMED, emits_closed=True)))) == []
