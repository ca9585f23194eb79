"""What an attempt begins with, and how state is cut for the plan that restores it."""

from collections import Counter
from dataclasses import replace

import pytest

from stillframe.key_groups import key_group_range
from stillframe.protocol.joblog import CompletedCheckpoint, JobRecord
from stillframe.protocol.manifests import (
    ChannelState,
    FileHandle,
    KeyedState,
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
    PendingCommit,
)
from stillframe.protocol.restore import (
    EdgeDescription,
    GroupsReached,
    Refuse,
    RestoreFrom,
    StartFromBeginning,
    SubtaskState,
    choose_restore,
    starting_channels,
    starting_state,
)


def kept(checkpoint_id):
    return CompletedCheckpoint(checkpoint_id, checkpoint_id, 1, 0, 0)


RECORD = JobRecord(9, "checkpoint-completed", 1, checkpoints=(kept(3), kept(5), kept(6)))


def choose(wanted=None, damaged=(), sinks_commit=True, record=RECORD, **asked):
    return choose_restore(record, wanted, dict.fromkeys(damaged, "torn"), sinks_commit, **asked)


def test_a_job_that_never_ran_starts_from_the_beginning():
    assert choose(record=None) == StartFromBeginning()
    assert choose(record=JobRecord(1, "attempt-started", 1)) == StartFromBeginning()


def test_the_newest_completed_checkpoint_is_restored():
    assert choose() == RestoreFrom(kept(6))


def test_the_one_a_person_asks_for_is_restored():
    assert choose(wanted=3) == RestoreFrom(kept(3))


def test_what_is_not_retained_cannot_be_asked_for():
    assert choose(wanted=4) == Refuse("checkpoint 4 is not retained; there are: 3, 5, 6")
    assert choose(wanted=4, record=None) == Refuse("checkpoint 4 is not retained; there are: none")


def test_a_damaged_one_that_was_asked_for_is_refused():
    refused = choose(wanted=5, damaged=[5])
    assert isinstance(refused, Refuse)
    assert refused.reason.startswith(
        "checkpoint 5 is damaged: torn; start with option restoreFrom="
    )
    refused = choose(wanted=5, damaged=[3, 5, 6])
    assert isinstance(refused, Refuse)
    assert refused.reason.endswith("start with option fresh=true to start from the beginning")


def test_a_damaged_one_is_stepped_over_if_no_sink_may_have_shown_it():
    assert choose(damaged=[6], sinks_commit=False) == RestoreFrom(kept(5))
    assert choose(damaged=[5, 6], sinks_commit=False) == RestoreFrom(kept(3))


def test_a_damaged_one_that_may_have_been_shown_is_refused_and_the_way_out_is_named():
    refused = choose(damaged=[6])

    assert isinstance(refused, Refuse)
    assert "checkpoint 6 is damaged (torn)" in refused.reason
    assert "restoreFrom=5" in refused.reason


def test_the_way_out_is_never_a_checkpoint_known_to_be_damaged():
    assert "restoreFrom=3" in choose(damaged=[5, 6]).reason
    assert "no older checkpoint" in choose(damaged=[3, 5, 6]).reason


def test_if_all_are_damaged_the_job_does_not_silently_begin_anew():
    assert isinstance(choose(damaged=[3, 5, 6], sinks_commit=False), Refuse)


def test_a_cancelled_job_without_checkpoints_is_not_started_unasked():
    gone = JobRecord(9, "ended", 1, outcome="cancelled")

    refused = choose(record=gone)

    assert isinstance(refused, Refuse)
    assert "it was cancelled and its checkpoints deleted" in refused.reason
    assert "fresh=true" in refused.reason
    assert "restoreFrom" in refused.reason
    assert isinstance(choose(wanted=6, record=gone), Refuse)


def test_a_cancelled_job_goes_on_from_what_it_has_kept():
    assert choose(record=replace(RECORD, outcome="cancelled")) == RestoreFrom(kept(6))


def test_a_person_may_have_any_job_begin_anew():
    for outcome in ("running", "finished", "failed", "cancelled"):
        record = replace(RECORD, outcome=outcome)
        assert choose(record=record, fresh=True) == StartFromBeginning(is_anew=True)
    assert choose(record=None, fresh=True) == StartFromBeginning(), "there is nothing to leave"
    assert choose(damaged=[3, 5, 6], fresh=True) == StartFromBeginning(is_anew=True)


def test_a_snapshot_from_elsewhere_is_for_jobs_without_checkpoints_and_cancelled_ones():
    assert choose(record=None, from_elsewhere="sp") == StartFromBeginning()
    assert choose(record=replace(RECORD, checkpoints=()), from_elsewhere="sp") == (
        StartFromBeginning()
    )
    cancelled = replace(RECORD, outcome="cancelled")
    assert choose(record=cancelled, from_elsewhere="sp") == StartFromBeginning(is_anew=True)
    gone = replace(cancelled, checkpoints=())
    assert choose(record=gone, from_elsewhere="sp") == StartFromBeginning(is_anew=True)


def test_a_snapshot_from_elsewhere_is_not_passed_over_by_a_job_with_checkpoints_of_its_own():
    for outcome in ("running", "finished", "failed"):
        refused = choose(record=replace(RECORD, outcome=outcome), from_elsewhere="sp")

        assert isinstance(refused, Refuse)
        assert "it has checkpoint 6 of its own, so it does not start from sp" in refused.reason
        assert "fresh=true (stillframe run --fresh)" in refused.reason
    assert choose(from_elsewhere="sp", fresh=True) == StartFromBeginning(is_anew=True)


# --- cutting ---------------------------------------------------------------------------------


def operator(uid, parallelism):
    return OperatorDescription(uid, "aggregate", uid, parallelism)


def manifest(snapshots, max_parallelism=16, operators=(), channels=()):
    return Manifest(
        job="views",
        attempt=1,
        checkpoint_id=6,
        epoch=5,
        kind="checkpoint",
        triggered_at_ms=0,
        completed_at_ms=0,
        max_parallelism=max_parallelism,
        operators=tuple(operators),
        snapshots=tuple(snapshots),
        timings=(),
        channels=tuple(channels),
    )


def keyed(path, groups):
    return KeyedState("aggregates", FileHandle(path, 1, 1), tuple(groups), 1, "")


def split(name, position=0):
    return {"id": name, "position": {"next": position}}


def test_from_the_beginning_splits_are_dealt_out_and_nothing_else_is_there():
    splits = {"read": [split(name) for name in "abcde"]}

    state = starting_state([operator("read", 2), operator("count", 1)], 16, None, splits)

    assert [item["id"] for item in state["read", 0].items] == ["a", "c", "e"]
    assert [item["id"] for item in state["read", 1].items] == ["b", "d"]
    assert state["count", 0] == SubtaskState()


def test_event_time_is_that_of_the_subtask_that_was_furthest_behind():
    times = [30, 10, None, 20]
    old = [OperatorSnapshot("count", s, watermark_us=time) for s, time in enumerate(times)]

    state = starting_state([operator("count", 2)], 16, manifest(old), {})

    assert [state["count", subtask].watermark_us for subtask in range(2)] == [10, 10]
    assert state["count", 0].reached == (GroupsReached(0, 4, 30),)
    assert state["count", 1].reached == (GroupsReached(12, 16, 20),)


def test_key_groups_that_had_come_further_before_a_restore_are_known_through_the_next():
    old = [
        OperatorSnapshot("count", 0, watermark_us=10, reached=(GroupsReached(6, 8, 30),)),
        OperatorSnapshot("count", 1, watermark_us=20, reached=(GroupsReached(8, 12, 40),)),
    ]
    old = [OperatorSnapshot.from_json(each.to_json()) for each in old]

    state = starting_state([operator("count", 1)], 16, manifest(old), {})

    assert state["count", 0].watermark_us == 10
    assert state["count", 0].reached == (
        GroupsReached(6, 8, 30), GroupsReached(8, 16, 20), GroupsReached(8, 12, 40),
    )  # fmt: skip


def test_where_no_subtask_knew_the_time_nobody_does():
    state = starting_state([operator("count", 1)], 16, manifest([OperatorSnapshot("count", 0)]), {})

    assert state["count", 0] == SubtaskState()


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5, 16])
def test_every_key_group_finds_its_file_at_any_parallelism(parallelism):
    old = [
        OperatorSnapshot("count", s, keyed=(keyed(f"part-{s}", key_group_range(s, 3, 16)),))
        for s in range(3)
    ]

    state = starting_state([operator("count", parallelism)], 16, manifest(old), {})

    for subtask in range(parallelism):
        readable = {g for part in state["count", subtask].keyed for g in part.key_groups}
        assert set(key_group_range(subtask, parallelism, 16)) <= readable


def test_a_subtask_gets_no_file_of_which_it_owns_nothing():
    old = [
        OperatorSnapshot("count", s, keyed=(keyed(f"part-{s}", key_group_range(s, 2, 16)),))
        for s in range(2)
    ]

    state = starting_state([operator("count", 2)], 16, manifest(old), {})

    assert [part.file.path for part in state["count", 0].keyed] == ["part-0"]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7])
def test_splits_and_commits_are_dealt_out_each_once_at_any_parallelism(parallelism):
    old = [
        OperatorSnapshot("read", 0, items=(split("a", 1), split("c", 3))),
        OperatorSnapshot("read", 1, items=(split("b", 2),)),
        OperatorSnapshot(
            "write", 0, commits=(PendingCommit(6, {"f": 1}), PendingCommit(5, {"f": 2}))
        ),
        OperatorSnapshot("write", 1, commits=(PendingCommit(6, {"f": 3}),)),
    ]
    operators = [operator("read", parallelism), operator("write", parallelism)]

    state = starting_state(operators, 16, manifest(old), {"read": [split("z")]})

    dealt = [item["id"] for s in range(parallelism) for item in state["read", s].items]
    assert Counter(dealt) == Counter("abc"), "a source the checkpoint knows does not begin anew"
    files = [c.committable["f"] for s in range(parallelism) for c in state["write", s].commits]
    assert Counter(files) == Counter([1, 2, 3])


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_the_commits_of_a_former_subtask_stay_together_and_in_order(parallelism):
    """Found by the simulator: dealt out one by one, a newer count showed before an older."""
    old = [
        OperatorSnapshot(
            "write", s, commits=(PendingCommit(5, {"f": (s, 5)}), PendingCommit(6, {"f": (s, 6)}))
        )
        for s in range(4)
    ]

    state = starting_state([operator("write", parallelism)], 16, manifest(old), {})

    for subtask in range(parallelism):
        files = [commit.committable["f"] for commit in state["write", subtask].commits]
        former = [s for s in range(4) if s % parallelism == subtask]
        assert files == [(s, n) for s in former for n in (5, 6)]


def test_a_new_source_begins_at_its_beginning_beside_restored_state():
    old = [OperatorSnapshot("read", 0, items=(split("a", 9),))]
    operators = [operator("read", 1), operator("more", 1)]

    state = starting_state(operators, 16, manifest(old), {"more": [split("new")]})

    assert state["read", 0].items == (split("a", 9),)
    assert state["more", 0].items == (split("new"),)


def test_a_subtasks_state_survives_the_way_to_its_slot():
    state = SubtaskState((keyed("p", [1, 2]),), (split("a"),), (PendingCommit(6, {"f": 1}),))

    assert SubtaskState.from_json(state.to_json()) == state


def test_a_whole_copy_goes_to_every_subtask_at_any_parallelism():
    old = [OperatorSnapshot("rules", s, broadcast=(keyed(f"copy-{s}", [0]),)) for s in range(2)]

    state = starting_state([operator("rules", 5)], 16, manifest(old), {})

    paths = [state["rules", s].broadcast[0].file.path for s in range(5)]
    assert paths == ["copy-0", "copy-1", "copy-0", "copy-1", "copy-0"]


def test_an_operator_has_finished_only_if_all_its_former_subtasks_had():
    old = [
        OperatorSnapshot("some", 0, finished=True),
        OperatorSnapshot("some", 1),
        OperatorSnapshot("all", 0, finished=True),
        OperatorSnapshot("all", 1, finished=True),
    ]
    state = starting_state([operator("some", 2), operator("all", 3)], 16, manifest(old), {})

    assert [state["some", s].finished for s in range(2)] == [False, False]
    assert [state["all", s].finished for s in range(3)] == [True] * 3


# --- records under way -----------------------------------------------------------------------


def under_way(source, target, side="input", edge="a>b"):
    file = FileHandle(f"{edge}-{source}-{target}-{side}", 10, 1)
    return ChannelState(edge, source, target, side, file, 0, 10, 1)


def placed(kind, former, now, channels):
    """Which channel states each subtask gets, where `former` subtasks were and `now` are."""
    described = manifest([], operators=[operator("b", former)], channels=channels)
    starting = starting_channels([EdgeDescription("a>b", kind, "b", now)], described)
    return [[*starting.get(("a>b", target), ())] for target in range(now)]


def all_pairs(sources, targets):
    return [under_way(s, t) for s in range(sources) for t in range(targets)]


@pytest.mark.parametrize("kind", ["forward", "rebalance", "broadcast", "hash"])
def test_at_the_same_parallelism_records_stay_with_their_receiver(kind):
    got = placed(kind, 3, 3, all_pairs(2, 3))

    assert got == [[under_way(0, target), under_way(1, target)] for target in range(3)]


@pytest.mark.parametrize("now", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["forward", "rebalance"])
def test_records_that_anyone_may_get_go_to_exactly_one_subtask(kind, now):
    channels = all_pairs(2, 3)
    got = placed(kind, 3, now, channels)

    assert Counter(state for part in got for state in part) == Counter(channels)


@pytest.mark.parametrize("now", [1, 2, 5])
def test_hashed_records_are_offered_to_all_when_the_parallelism_changes(now):
    channels = all_pairs(2, 3)

    assert placed("hash", 3, now, channels) == [channels] * now


@pytest.mark.parametrize("now", [1, 2, 3, 4, 7])
def test_a_subtask_gets_what_was_under_way_to_the_copy_that_it_starts_with(now):
    channels = all_pairs(2, 3)
    got = placed("broadcast", 3, now, channels)

    for subtask in range(now):
        assert got[subtask] == [under_way(0, subtask % 3), under_way(1, subtask % 3)]


def test_what_had_reached_the_receiver_comes_before_what_had_not():
    """The two parts are told by different subtasks, in any order."""
    channels = [
        under_way(1, 0, "output"),
        under_way(0, 0, "output"),
        under_way(1, 0, "input"),
        under_way(0, 0, "input"),
    ]

    assert placed("rebalance", 1, 1, channels) == [
        [
            under_way(0, 0, "input"),
            under_way(0, 0, "output"),
            under_way(1, 0, "input"),
            under_way(1, 0, "output"),
        ]
    ]


def test_several_runs_of_one_channel_keep_their_order():
    def run(offset_bytes):
        return ChannelState("a>b", 0, 0, "input", FileHandle("f", 99, 1), offset_bytes, 10, 1)

    runs = [run(0), run(10), run(5)]

    assert placed("rebalance", 1, 1, runs) == [runs]


def test_without_a_checkpoint_or_records_under_way_there_is_nothing_to_place():
    assert starting_channels([], None) == {}
    assert starting_channels([], manifest([])) == {}


# --- state without keys


def without_keys(path, rows, how, name="held"):
    return KeyedState(name, FileHandle(path, 0, 0), (0,), rows, "", how)


def rows_of_shares(state, rows_in):
    return [
        row
        for share in state.dealt
        for row in rows_in[share.state.file.path][share.first :: share.step]
    ]


def test_dealt_rows_are_each_in_one_subtask_through_any_number_of_subtasks():
    """2 -> 3 -> 1 -> 4 -> 4 -> 2, with lists of uneven lengths."""
    lists = [list(range(7)), list(range(7, 9))]
    for parallelism in (3, 1, 4, 4, 2):
        files = {f"{subtask}.arrow": rows for subtask, rows in enumerate(lists)}
        snapshots = [
            OperatorSnapshot(
                "f",
                subtask,
                broadcast=(without_keys(f"{subtask}.arrow", len(rows), "dealt"),) if rows else (),
            )
            for subtask, rows in enumerate(lists)
        ]
        state = starting_state([operator("f", parallelism)], 16, manifest(snapshots[::-1]), {})
        dealt = [rows_of_shares(state["f", subtask], files) for subtask in range(parallelism)]
        if parallelism == len(lists):
            assert dealt == lists
        else:
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
        lists = dealt
        assert Counter(row for rows in lists for row in rows) == Counter(range(9))


@pytest.mark.parametrize("parallelism", [1, 2, 3, 4])
def test_of_united_rows_every_subtask_gets_all_and_of_copies_one(parallelism):
    snapshots = [
        OperatorSnapshot(
            "f",
            subtask,
            broadcast=(
                without_keys(f"u{subtask}.arrow", 2, "united", "all"),
                without_keys(f"c{subtask}.arrow", 2, "copied", "rules"),
            ),
        )
        for subtask in range(2)
    ]

    state = starting_state([operator("f", parallelism)], 16, manifest(snapshots), {})

    for subtask in range(parallelism):
        paths = [each.file.path for each in state["f", subtask].broadcast]
        assert sorted(paths) == sorted(["u0.arrow", "u1.arrow", f"c{subtask % 2}.arrow"])
        assert state["f", subtask].dealt == ()


def test_a_share_survives_the_way_to_its_slot():
    snapshots = [OperatorSnapshot("f", 0, broadcast=(without_keys("0.arrow", 5, "dealt"),))]
    state = starting_state([operator("f", 3)], 16, manifest(snapshots), {})["f", 1]

    assert state.dealt[0].first == 1
    assert SubtaskState.from_json(state.to_json()) == state
