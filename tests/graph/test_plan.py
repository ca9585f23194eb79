"""The graph cut into tasks."""

import pickle
from dataclasses import replace

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.generate import ClickSource
from stillframe.connectors.staged import StagedSink
from stillframe.errors import BuildError
from stillframe.graph.expressions import Literal
from stillframe.graph.logical import (
    Aggregate,
    CloseLoop,
    Connect,
    DropDuplicates,
    Enrich,
    Filter,
    Late,
    Lookup,
    LoopHead,
    MapInArrow,
    Node,
    Read,
    Union,
    Window,
    WithWatermark,
    Write,
)
from stillframe.graph.plan import (
    Broadcast,
    Forward,
    HashBy,
    Rebalance,
    SubtaskRef,
    build_plan,
)

CLICKS = ClickSource(records=10)
SCHEMA = CLICKS.schema
COUNTS = pa.schema([("app_id", pa.string()), ("count", pa.int64())])
COUNT = AggregateCall("count", None, "count", pa.int64())
EACH = StagedSink("/staged", None, COUNTS, "foreachBatch each")


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


@pytest.mark.parametrize("slots", [2, 3])
def test_an_operator_with_a_given_parallelism_is_a_task_of_its_own_whatever_the_slots(slots):
    """An edge that came and went with the number of slots could not be restored."""
    plan = build_plan("views", [written(kept(read(), parallelism=3))], slots)

    assert names(plan) == [["Read"], ["Filter", "Write"]]
    [edge] = plan.edges
    assert edge.partitioning == (Forward() if slots == 3 else Rebalance())
    assert edge.name == f"{plan.tasks[0].operators[0].uid}>{plan.tasks[1].operators[0].uid}"


def test_a_forward_edge_has_one_channel_from_each_subtask_to_its_namesake():
    [edge] = build_plan("views", [written(kept(read(), parallelism=3))], 3).edges

    assert [edge.targets_of(i) for i in range(3)] == [[0], [1], [2]]
    assert [edge.sources_of(i) for i in range(3)] == [[0], [1], [2]]
    assert [edge.channel_id(i, i) for i in range(3)] == [0, 1, 2]
    assert edge.channels == 3


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
        for source in range(edge.source_parallelism)
        for target in edge.targets_of(source)
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


def uids_of_aggregates(*keys):
    source = read()
    sinks = [written(counted(source, each), f"/{each[0]}") for each in keys]
    planned = [each for _, each in build_plan("views", sinks, 2).operators()]
    made = [each for each in planned if isinstance(each.operator, Aggregate)]
    return {each.operator.keys: each.uid for each in made}


def test_aggregates_in_the_same_place_are_told_apart_by_what_they_do_and_not_by_their_order():
    both = uids_of_aggregates(("app_id",), ("user",))

    assert len(set(both.values())) == 2
    assert uids_of_aggregates(("user",), ("app_id",)) == both
    assert uids_of_aggregates(("user",))[("user",)] != both[("user",)], "a mismatch on restore"


def test_two_functions_with_state_in_the_same_place_are_refused():
    source = read()
    made = [Node(Connect(None, name, ("app_id",)), SCHEMA, (source, source)) for name in "ab"]
    sinks = [written(each, f"/{place}") for place, each in enumerate(made)]

    with pytest.raises(BuildError, match=r"give each its own \.uid"):
        build_plan("views", sinks, 2)


def test_operators_that_do_the_same_with_the_same_rows_are_one():
    sinks = [written(counted(kept(read())), path) for path in ("/a", "/b")]

    assert names(build_plan("views", sinks, 2)) == [
        ["Read", "Filter"],
        ["Aggregate", "Write", "Write"],
    ]


def test_an_operator_that_was_given_a_name_stays_beside_its_twin():
    source = read()
    sinks = [written(counted(source, given_uid=uid), f"/{uid}") for uid in "ab"]

    assert {"a", "b"} <= {each.uid for _, each in build_plan("views", sinks, 2).operators()}


def places(sinks):
    planned = [planned for _, planned in build_plan("views", sinks, 2).operators()]
    return {each.uid: (each.traits, each.fed_by) for each in planned}


def test_a_step_without_state_changes_neither_what_feeds_an_operator_nor_its_traits():
    source = read()

    for stream in (source, kept(source), kept(kept(source, given_uid="kept"))):
        counts = counted(stream)
        assert places([written(counts)])[counts.uid] == ("by app_id", ((source.uid,),))

    window = Window("time", 10_000_000, 5_000_000)
    grouped = Node(Aggregate(("app_id",), (COUNT,), window), COUNTS, (kept(source),))
    [of_window] = (each for uid, each in places([written(grouped)]).items() if uid == grouped.uid)
    assert of_window == (
        "by app_id in windows of 10 s every 5 s from 0 s of time",
        ((source.uid,),),
    )


def test_an_operator_with_a_given_uid_has_no_traits_and_one_without_has_those_of_its_keys():
    source = read(given_uid="clicks")
    counts = counted(kept(source))
    found = places([written(counts, "/counts")])

    assert found["clicks"] == (None, ())
    assert found[counts.uid] == ("by app_id", (("clicks",),))


def test_the_streams_of_a_connect_are_told_apart_and_those_of_a_union_are_not():
    a, b, c = (read(given_uid=uid) for uid in "abc")
    both = Node(Connect(None, "f", ("app_id",)), SCHEMA, (union(a, b), kept(c)))

    assert places([written(both)])[both.uid] == ("by app_id", (("a", "b"), ("c",)))


def test_what_comes_too_late_for_an_operator_is_not_what_the_operator_emits():
    counts = counted(read(), given_uid="counts")
    late = Node(Late(), SCHEMA, (counts,))
    again = counted(kept(late))

    assert places([written(counts, "/a"), written(again, "/b")])[again.uid][1] == ((late.uid,),)


def test_a_sink_is_known_by_its_target_and_a_function_by_the_stream_it_is_given():
    counts = counted(read())
    to_files = written(kept(counts), "/counts")
    to_function = Node(Write(EACH), COUNTS, (kept(counts),))
    found = places([to_files, to_function])

    assert found[to_files.uid] == ("json /counts", ())
    assert found[to_function.uid] == ("", ((counts.uid,),))


def test_several_functions_on_one_stream_need_uids_which_are_told():
    counts = counted(read())
    first = Node(Write(EACH), COUNTS, (counts,))
    second = Node(Write(replace(EACH, description="foreachBatch other")), COUNTS, (kept(counts),))

    with pytest.raises(BuildError) as refused:
        build_plan("views", [first, second], 2)

    told = str(refused.value)
    assert "foreachBatch each and foreachBatch other take the records of one stream" in told
    assert f'.uid("{first.uid}") and .uid("{second.uid}")' in told
    build_plan("views", [first.with_uid("each"), second], 2)
    elsewhere = Node(Write(EACH), SCHEMA, (read(given_uid="others"),))
    build_plan("views", [first, elsewhere], 2)


def test_two_stateless_operators_in_the_same_place_are_fine():
    source = read()
    other = Node(Filter(Literal(pa.scalar(False))), source.schema, (source,))
    plan = build_plan("views", [written(kept(source), "/a"), written(other, "/b")], 2)

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


def test_what_comes_too_late_is_read_in_the_task_that_notices_it_and_is_not_combined_before():
    counts = counted(read())
    late = Node(Late(), SCHEMA, (counts,))
    sinks = [written(counts, "/counts"), written(kept(late), "/late")]
    plan = build_plan("job", sinks, 2)

    [edge] = plan.edges
    assert edge.combines is None
    aggregate, _, noticed, _, _ = plan.tasks[1].operators
    assert aggregate.chained == (1, 2)
    assert (noticed.operator, noticed.schema) == (Late(), SCHEMA)
    assert "what came too late" in plan.explain()
    assert build_plan("job", sinks[:1], 2).edges[0].combines == counts.operator


def test_a_plan_can_be_pickled():
    plan = build_plan("views", page_views(), 2)

    assert pickle.loads(pickle.dumps(plan)).explain() == plan.explain()


# --- several inputs --------------------------------------------------------------------------


def union(*streams, **more):
    return Node(Union(), streams[0].schema, streams, **more)


def connected(first, second, keys=("app_id",), **more):
    return Node(Connect(object, "rules", keys), SCHEMA, (first, second), **more)


def between(plan):
    """The edges in short: from which task to which, on which input, how."""
    return [
        (edge.source_task, edge.target_task, edge.input, edge.partitioning) for edge in plan.edges
    ]


def test_a_union_is_no_task_but_an_edge_from_each_stream_to_what_reads_it():
    left, right = read(given_uid="left"), read(given_uid="right")
    plan = build_plan("views", [written(kept(union(left, kept(right)), given_uid="f"))], 2)

    assert names(plan) == [["Read"], ["Read", "Filter"], ["Filter", "Write"]]
    assert between(plan) == [(0, 2, 0, Forward()), (1, 2, 0, Forward())]
    assert plan.edges[0].name == "left>f"
    assert plan.tasks[2].input_edges == (0, 1)


def test_unions_of_unions_are_flat_and_the_widest_stream_says_how_wide_the_reader_is():
    streams = [read(given_uid=f"s{i}", parallelism=i + 1) for i in range(3)]
    plan = build_plan("views", [written(union(streams[0], union(*streams[1:])))], 1)

    assert plan.tasks[3].parallelism == 3
    assert [each[3] for each in between(plan)] == [Rebalance(), Rebalance(), Forward()]


def test_a_union_that_is_aggregated_is_hashed_from_every_stream():
    plan = build_plan(
        "views", [written(counted(union(read(given_uid="a"), read(given_uid="b"))))], 2
    )

    assert [each[3] for each in between(plan)] == [HashBy(("app_id",))] * 2
    assert all(edge.combines is not None for edge in plan.edges)


def test_a_stream_in_a_union_with_itself_comes_twice_over_edges_of_different_names():
    source = read(given_uid="clicks")
    plan = build_plan("views", [written(kept(union(source, source, source), given_uid="f"))], 2)

    assert [edge.name for edge in plan.edges] == ["clicks>f", "clicks>f#1", "clicks>f#2"]
    assert plan.tasks[0].operators[0].edges == (0, 1, 2)


def test_edges_have_different_names_whatever_the_uids_look_like():
    """Records under way are kept by the name of their edge: two of one name would be mixed up."""
    source = read(given_uid="a#1")
    twice = kept(union(source, source), given_uid="f")
    first = connected(read(given_uid="b"), read(given_uid="b2"), given_uid="c")
    second = kept(union(read(given_uid="b3"), first), given_uid="c/1")
    sinks = [written(twice, given_uid="w1"), written(second, given_uid="w2")]
    plan = build_plan("views", sinks, 2)

    assert len({edge.name for edge in plan.edges}) == len(plan.edges)


def test_a_union_with_a_part_of_itself_keeps_the_two_apart():
    source = read(given_uid="clicks")
    plan = build_plan("views", [written(union(source, kept(source, given_uid="f")))], 2)

    assert names(plan) == [["Read", "Filter"], ["Write"]]
    assert [each[:2] for each in between(plan)] == [(0, 1), (0, 1)]


def test_streams_connected_by_key_are_both_hashed_and_told_apart_by_the_input():
    first, second = read(given_uid="a"), read(given_uid="b", parallelism=1)
    plan = build_plan("views", [written(connected(first, second, given_uid="c"))], 3)

    by_key = HashBy(("app_id",))
    assert between(plan) == [(0, 2, 0, by_key), (1, 2, 1, by_key)]
    assert [edge.name for edge in plan.edges] == ["a>c", "b>c/1"]
    assert plan.tasks[2].parallelism == 3


def test_a_broadcast_stream_goes_to_every_subtask_and_the_other_stays_where_it_is():
    first, second = read(given_uid="a", parallelism=2), read(given_uid="b")
    plan = build_plan("views", [written(connected(first, second, keys=None))], 3)

    assert between(plan) == [(0, 2, 0, Forward()), (1, 2, 1, Broadcast())]
    assert plan.tasks[2].parallelism == 2
    assert plan.edges[1].channels == 6


def test_duplicates_are_dropped_behind_an_exchange_by_their_keys():
    dropped = Node(DropDuplicates(("app_id", "user_id")), SCHEMA, (read(),))
    plan = build_plan("views", [written(dropped)], 3)

    assert names(plan) == [["Read"], ["DropDuplicates", "Write"]]
    assert between(plan) == [(0, 1, 0, HashBy(("app_id", "user_id")))]


def test_a_table_is_looked_up_without_an_exchange_and_travels_with_the_plan():
    table = pa.table({"app": ["a"], "name": ["Chess"]})
    schema = pa.schema([*SCHEMA, *table.schema])
    found = Node(Lookup(table, "left", ("app_id",), ("app",)), schema, (read(),))
    plan = build_plan("views", [written(found)], 3)

    assert names(plan) == [["Read", "Lookup", "Write"]]
    again = pickle.loads(pickle.dumps(plan)).tasks[0].operators[1].operator
    assert again.table == table
    assert "      once at the start: the table" in plan.explain().splitlines()


def test_both_streams_of_an_enrichment_are_hashed_each_by_its_own_keys():
    newest = Enrich("left", ("app_id",), ("app",), None)
    second = Node(Read(CLICKS), SCHEMA.set(1, pa.field("app", pa.string())), given_uid="b")
    enriched = Node(newest, SCHEMA, (read(given_uid="a"), second), given_uid="c")
    plan = build_plan("views", [written(enriched)], 3)

    assert between(plan) == [(0, 2, 0, HashBy(("app_id",))), (1, 2, 1, HashBy(("app",)))]
    assert [edge.name for edge in plan.edges] == ["a>c", "b>c/1"]


def test_a_stream_may_be_connected_with_itself():
    source = read(given_uid="a")
    plan = build_plan("views", [written(connected(source, source, given_uid="c"))], 2)

    assert [edge.name for edge in plan.edges] == ["a>c", "a>c/1"]


def test_both_streams_of_a_connect_may_be_unions():
    a, b, c, d = (read(given_uid=name) for name in "abcd")
    plan = build_plan("views", [written(connected(union(a, b), union(c, d), given_uid="x"))], 2)

    assert [edge.name for edge in plan.edges] == ["a>x", "b>x", "c>x/1", "d>x/1"]
    assert [edge.input for edge in plan.edges] == [0, 0, 1, 1]


# --- cycles ----------------------------------------------------------------------------------


def head(upstream, uid="head", **more):
    return Node(LoopHead(), upstream.schema, (upstream,), uid, **more)


def closed(start, out, back):
    return Node(CloseLoop(start), out.schema, (out, back))


def retried(upstream, uid="head"):
    """Some records go through the body once more."""
    start = head(upstream, uid)
    body = kept(start, given_uid=f"{uid}-body", parallelism=2)
    out, back = kept(body, given_uid=f"{uid}-out"), kept(body, given_uid=f"{uid}-back")
    return closed(start, out, back)


def test_a_cycle_is_an_edge_back_to_the_task_of_its_head():
    plan = build_plan("views", [written(kept(retried(read(given_uid="a")), given_uid="z"))], 2)

    assert names(plan) == [
        ["Read"],
        ["LoopHead"],
        ["Filter", "Filter", "Filter", "Filter", "Write"],
    ]
    assert between(plan) == [
        (0, 1, 0, Forward()),
        (1, 2, 0, Forward()),
        (2, 1, 0, Forward()),
    ]
    assert [edge.is_feedback for edge in plan.edges] == [False, False, True]
    assert [edge.loops for edge in plan.edges] == [(), (1,), (1,)]
    assert plan.edges[2].name == "head-back>head"
    assert plan.tasks[1].input_edges == (0, 2)


def test_a_side_branch_of_a_cycle_is_no_part_of_it():
    start = head(read(given_uid="a"))
    body = kept(start, given_uid="body", parallelism=2)
    aside = counted(body, given_uid="aside")
    sinks = [
        written(closed(start, body, kept(body, given_uid="back")), given_uid="w1"),
        written(aside, given_uid="w2"),
    ]
    plan = build_plan("views", sinks, 2)

    loops = {edge.name: edge.loops for edge in plan.edges}
    assert loops == {"a>head": (), "head>body": (1,), "body>aside": (), "back>head": (1,)}


def test_what_follows_a_cycle_is_as_wide_as_what_leaves_it():
    start = head(read(given_uid="a", parallelism=1))
    out = kept(start, given_uid="out", parallelism=2)
    back = kept(start, given_uid="back", parallelism=4)
    after = kept(closed(start, out, back), given_uid="after")
    plan = build_plan("views", [written(after, given_uid="w1"), written(counted(after))], 3)

    [edge] = [edge for edge in plan.edges if edge.combines is not None]
    assert edge.source_parallelism == plan.tasks[edge.source_task].parallelism == 2


def test_one_cycle_may_follow_another():
    plan = build_plan("views", [written(retried(retried(read(), "one"), "two"))], 2)

    heads = [task.index for task in plan.tasks if "head of a cycle" in task.name]
    assert [edge.loops for edge in plan.edges if edge.is_feedback] == [(each,) for each in heads]
    assert max(len(edge.loops) for edge in plan.edges) == 1


def test_a_cycle_within_a_cycle_is_refused_and_both_are_named():
    start = head(read(), "outer")
    inner = retried(start, "inner")
    whole = closed(start, kept(inner, given_uid="o"), kept(inner, given_uid="b", parallelism=2))

    with pytest.raises(BuildError, match=r"in two cycles \(outer and inner\)"):
        build_plan("views", [written(whole)], 2)


def test_a_cycle_that_nobody_closes_is_refused():
    with pytest.raises(BuildError, match="nothing is sent back to the head of the cycle 'head'"):
        build_plan("views", [written(kept(head(read())))], 2)


def test_a_cycle_that_is_closed_at_another_head_is_refused():
    start, elsewhere = head(read(given_uid="a")), head(read(given_uid="b"), "elsewhere")
    whole = closed(start, kept(start, given_uid="out"), kept(start, given_uid="back"))
    wrong = closed(elsewhere, whole, whole)

    with pytest.raises(BuildError, match="a cycle is closed whose head does not feed"):
        build_plan("views", [written(wrong)], 2)


def test_what_was_never_in_the_cycle_cannot_be_sent_back():
    start = head(read(given_uid="a"))
    back = union(kept(start, given_uid="back"), read(given_uid="stranger"))

    with pytest.raises(BuildError, match="is sent back in a cycle that it does not come from"):
        build_plan("views", [written(closed(start, start, back))], 2)


def test_a_plan_with_all_of_it_explains_itself():
    first = union(read(given_uid="a"), read(given_uid="b", parallelism=1))
    rules = connected(first, read(given_uid="r", parallelism=1), keys=None, given_uid="rules")
    plan = build_plan("views", [written(retried(rules), given_uid="w")], 2)

    assert plan.explain().splitlines() == [
        "views: 2 slots, 128 key groups",
        "task 0 x2: read clicks (10 records, 4 partitions, seed 0)",
        "    read clicks (10 records, 4 partitions, seed 0)  [a]",
        "      --forward--> task 3",
        "task 1 x1: read clicks (10 records, 4 partitions, seed 0)",
        "    read clicks (10 records, 4 partitions, seed 0)  [b]",
        "      --rebalance--> task 3",
        "task 2 x1: read clicks (10 records, 4 partitions, seed 0)",
        "    read clicks (10 records, 4 partitions, seed 0)  [r]",
        "      --broadcast--> task 3",
        "task 3 x2: connect rules",
        "    connect rules  [rules]",
        "      --forward--> task 4",
        "task 4 x2: head of a cycle",
        "    head of a cycle  [head]",
        "      --forward--> task 5",
        "task 5 x2: filter -> filter -> filter -> write noop",
        "    filter  [head-body]",
        "    filter  [head-out]",
        "    filter  [head-back]",
        "      --forward--> task 4 (back)",
        "    write noop  [w]",
    ]


def test_a_connect_by_key_is_explained_with_its_keys():
    plan = build_plan("views", [written(connected(read(given_uid="a"), read(given_uid="b")))], 2)

    assert plan.tasks[2].name == "connect rules by app_id -> write noop"


def test_more_subtasks_of_a_connect_by_key_than_key_groups_are_refused():
    node = connected(read(given_uid="a"), read(given_uid="b"), parallelism=9)

    with pytest.raises(BuildError, match="parallelism 9, but the job has only 8 key groups"):
        build_plan("views", [written(node)], 2, max_parallelism=8)


def test_event_time_comes_on_the_edges_behind_a_watermark_and_on_no_others():
    timed = Node(WithWatermark("event_ts", 0), SCHEMA, (read(),))
    both = Node(Union(), SCHEMA, (kept(timed), read(given_uid="untimed")))
    plan = build_plan("j", [written(counted(both))], slots=2)
    (counts,) = (task for task in plan.tasks if len(task.input_edges) == 2)
    is_timed = {plan.edges[edge].name: edge in plan.timed_edges() for edge in counts.input_edges}
    assert {name.startswith("untimed"): timed for name, timed in is_timed.items()} == {
        True: False,
        False: True,
    }
