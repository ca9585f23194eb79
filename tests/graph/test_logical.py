"""Operators in their places, and the uids that tell them apart for ever."""

import pickle

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.generate import ClickSource
from stillframe.errors import BuildError
from stillframe.graph.expressions import Literal
from stillframe.graph.logical import (
    Aggregate,
    CloseLoop,
    Filter,
    LoopHead,
    Node,
    Read,
    Write,
    replaced,
    walk,
)

CLICKS = ClickSource(records=10)
COUNT = AggregateCall("count", None, "count", pa.int64())


def read(source=CLICKS):
    return Node(Read(source), source.schema)


def kept(upstream):
    return Node(Filter(Literal(pa.scalar(True))), upstream.schema, (upstream,))


def count(upstream):
    return Node(Aggregate(("app_id",), (COUNT,)), upstream.schema, (upstream,))


def test_a_derived_uid_is_the_same_whenever_the_same_job_is_built():
    assert count(kept(read())).uid == count(kept(read())).uid
    assert count(read()).uid.startswith("aggregate-")


def test_an_operator_put_in_between_changes_the_uids_below_it_only():
    assert read().uid == kept(read()).inputs[0].uid
    assert count(read()).uid != count(kept(read())).uid


def test_sources_and_sinks_are_told_apart_by_what_they_are_tied_to():
    other = ClickSource(records=10, seed=1)
    here, there = (Write(FileSink(p, "json", CLICKS.schema)) for p in ("/here", "/there"))
    upstream = read()

    assert read().uid != read(other).uid
    assert Node(here, CLICKS.schema, (upstream,)).uid != Node(there, CLICKS.schema, (upstream,)).uid


def test_a_given_uid_outweighs_the_derived_one_and_stays():
    given = count(read()).with_uid("views").with_parallelism(3)

    assert (given.uid, given.parallelism) == ("views", 3)
    assert given.kind == "aggregate"


def test_a_given_uid_upstream_keeps_the_derived_uids_below_when_things_change_above_it():
    upstream = kept(read()).with_uid("clean")
    changed = kept(kept(read())).with_uid("clean")

    assert count(upstream).uid == count(changed).uid


def test_a_parallelism_of_nothing_is_refused():
    with pytest.raises(BuildError, match="at least 1, not 0"):
        read().with_parallelism(0)


def test_walking_visits_every_node_once_and_inputs_first():
    source = read()
    left, right = kept(source), count(source)
    sinks = [Node(Write(DiscardSink()), CLICKS.schema, (each,)) for each in (left, right)]

    assert walk(sinks) == [source, left, sinks[0], right, sinks[1]]


def test_a_node_that_is_replaced_is_replaced_for_all_that_know_it():
    head = Node(LoopHead(), CLICKS.schema, (read(),))
    closed = Node(CloseLoop(head), CLICKS.schema, (head, kept(head)))
    new = head.with_uid("rounds")

    last = replaced(kept(closed), head, new)

    assert [node.uid for node in walk([last]) if node.kind == "loophead"] == ["rounds"]
    assert last.inputs[0].operator == CloseLoop(new)
    assert new.inputs[0] is head.inputs[0]


def test_a_node_can_be_pickled_and_keeps_its_uid():
    node = count(read())

    assert pickle.loads(pickle.dumps(node)).uid == node.uid
