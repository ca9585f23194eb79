"""The graph cut into tasks."""

import pickle

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.generate import ClickSource
from stillframe.errors import BuildError
from stillframe.graph.expressions import Literal
from stillframe.graph.logical import Aggregate, Filter, MapInArrow, Node, Read, Write
from stillframe.graph.plan import HashBy, Rebalance, SubtaskRef, build_plan

CLICKS = ClickSource(records=10)
SCHEMA = CLICKS.schema
COUNTS = pa.schema([("app_id", pa.string()), ("count", pa.int64())])
COUNT = AggregateCall("count", None, "count", pa.int64())


def read(**more):
    return Node(Read(CLICKS), SCHEMA, **more)


def kept(upstream, **more):
    return Node(Filter(Literal(pa.scalar(True))), upstream.schema, (upstream,), **more)


def counted(upstream, keys=("app_id",), **more):
    return Node(Aggregate(keys, (COUNT,)), COUNTS, (upstream,), **more)


def written(upstream, path=None, **more):
    sink = FileSink(path, "json", upstream.schema) if path else DiscardSink()
    return Node(Write(sink), upstream.schema, (upstream,), **more)


def page_views():
    source = read()
    return [written(kept(source), "/clicks"), written(counted(source), "/counts")]


def names(plan):
    return [[type(planned.operator).__name__ for planned in task.operators] for task in plan.tasks]


def test_operators_that_need_no_exchange_are_chained_and_an_aggregate_begins_a_task():
    plan = build_plan("views", page_views(), 2)

    assert names(plan) == [["Read", "Filter", "Write"], ["Aggregate", "Write"]]
    assert [planned.chained for planned in plan.tasks[0].operators] == [(1,), (2,), ()]
    assert plan.tasks[0].operators[0].edges == (0,)
    [edge] = plan.edges
    assert (edge.source_task, edge.target_task, edge.partitioning) == (0, 1, HashBy(("app_id",)))
    assert plan.tasks[1].input_edges == (0,)
    assert plan.tasks[0].has_sinks


def test_one_stream_can_feed_several_operators_and_several_tasks():
    source = read()
    sinks = [written(source, "/a"), written(source, "/b")]
    sinks += [written(counted(source)), written(counted(source, ("user_id",), given_uid="users"))]
    sinks[2] = sinks[2].with_uid("w1")
    sinks[3] = sinks[3].with_uid("w2")
    plan = build_plan("views", sinks, 2)

    head = plan.tasks[0].operators[0]
    assert len(head.chained) == 2
    assert [plan.edges[e].target_task for e in head.edges] == [1, 2]


def test_another_parallelism_breaks_the_chain_and_rebalances():
    plan = build_plan("views", [written(kept(read(), parallelism=3))], 2)

    assert names(plan) == [["Read"], ["Filter", "Write"]]
    assert [task.parallelism for task in plan.tasks] == [2, 3]
    assert plan.edges[0].partitioning == Rebalance()
    assert plan.slots == 3


def test_an_aggregate_over_everything_runs_once():
    plan = build_plan("views", [written(counted(read(), keys=()))], 4)

    assert [task.parallelism for task in plan.tasks] == [4, 1]


def test_an_aggregate_over_everything_cannot_be_spread():
    node = counted(read(), keys=(), parallelism=2)

    with pytest.raises(BuildError, match="without keys"):
        build_plan("views", [written(node)], 4)


def test_every_channel_of_the_job_has_its_own_id():
    source = read()
    sinks = [written(counted(source)), written(kept(source, parallelism=3), given_uid="other")]
    plan = build_plan("views", sinks, 4)

    ids = [
        edge.channel_id(source, target)
        for edge in plan.edges
        for source in edge.sources()
        for target in edge.targets()
    ]
    assert sorted(ids) == list(range(4 * 4 + 4 * 3))


def test_every_subtask_is_counted_once():
    plan = build_plan("views", page_views(), 2)

    assert plan.subtasks() == {SubtaskRef(t, s) for t in range(2) for s in range(2)}


def test_two_operators_with_one_given_uid_are_refused_and_both_are_named():
    sinks = [written(counted(read(), given_uid="x"), given_uid="x")]

    with pytest.raises(
        BuildError, match=r"the uid 'x' \(aggregate count\(\*\) .* and write noop\)"
    ):
        build_plan("views", sinks, 2)


def test_two_stateful_operators_in_the_same_place_are_refused():
    source = read()
    sinks = [written(counted(source), "/a"), written(counted(source), "/b")]

    with pytest.raises(BuildError, match=r"give each its own \.uid"):
        build_plan("views", sinks, 2)


def test_two_stateless_operators_in_the_same_place_are_fine():
    source = read()
    plan = build_plan("views", [written(kept(source), "/a"), written(kept(source), "/b")], 2)

    assert names(plan) == [["Read", "Filter", "Write", "Filter", "Write"]]


def test_a_job_without_a_sink_is_refused():
    with pytest.raises(BuildError, match="has no sink"):
        build_plan("views", [], 2)


def test_more_subtasks_of_an_aggregate_than_key_groups_are_refused():
    with pytest.raises(BuildError, match="parallelism 9, but the job has only 8 key groups"):
        build_plan("views", [written(counted(read(), parallelism=9))], 2, max_parallelism=8)


def test_a_plan_explains_itself():
    source = read(given_uid="clicks")
    mapped = Node(MapInArrow(iter, "tidy"), SCHEMA, (source,), given_uid="tidied")
    sinks = [
        written(mapped, "/clicks", given_uid="out"),
        written(counted(source, given_uid="count"), "/counts", given_uid="counts"),
    ]

    assert build_plan("views", sinks, 2).explain().splitlines() == [
        "views: 2 slots, 128 key groups",
        "task 0 x2: read clicks (10 records, 4 partitions, seed 0) -> map tidy"
        " -> write json /clicks",
        "    read clicks (10 records, 4 partitions, seed 0)  [clicks]",
        "      --hash(app_id)--> task 1",
        "    map tidy  [tidied]",
        "    write json /clicks  [out]",
        "task 1 x2: aggregate count(*) by app_id -> write json /counts",
        "    aggregate count(*) by app_id  [count]",
        "    write json /counts  [counts]",
    ]


def test_an_aggregate_over_everything_is_explained_without_keys():
    plan = build_plan("views", [written(counted(read(), keys=()))], 1)

    assert plan.tasks[1].name == "aggregate count(*) -> write noop"
    assert plan.explain().startswith("views: 1 slot, ")


def test_a_plan_can_be_pickled():
    plan = build_plan("views", page_views(), 2)

    assert pickle.loads(pickle.dumps(plan)).explain() == plan.explain()
