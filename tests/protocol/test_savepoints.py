"""Manifests taken out of their job: moved, cut, changed, and begun from."""

from __future__ import annotations

from dataclasses import replace

from stillframe.protocol.manifests import (
    ChannelState,
    FileHandle,
    KeyedState,
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
    PendingCommit,
)
from stillframe.protocol.savepoints import (
    as_beginning,
    as_savepoint,
    keeps_something,
    prepared_output,
    with_files_moved,
    with_state,
    with_uids,
    without_operators,
    without_prepared,
    without_state,
)


def handle(path: str, data: bytes | None = None) -> FileHandle:
    return FileHandle(path, 3, 7, data)


def keyed(name: str, path: str) -> KeyedState:
    return KeyedState(name, handle(path), (0, 1), 2, "k string")


def operator(uid: str) -> OperatorDescription:
    return OperatorDescription(uid, "aggregate", f"the {uid}", 2)


def channel(edge: str) -> ChannelState:
    return ChannelState(edge, 0, 0, "input", handle("shared/channels"), 0, 3, 1)


CHECKPOINT = Manifest(
    job="views",
    attempt=3,
    checkpoint_id=9,
    epoch=8,
    kind="checkpoint",
    triggered_at_ms=0,
    completed_at_ms=1,
    max_parallelism=16,
    operators=tuple(map(operator, ["read", "count", "write"])),
    snapshots=(
        OperatorSnapshot("read", 0, items=({"id": "a", "position": 5},), finished=True, ended=True),
        OperatorSnapshot("count", 0, keyed=(keyed("sums", "shared/c0"), keyed("more", "m0"))),
        OperatorSnapshot("count", 1, keyed=(keyed("sums", "shared/c1"),), watermark_us=4),
        OperatorSnapshot("write", 0, commits=(PendingCommit(9, {"f": 1}),)),
    ),
    channels=(channel("read>count"), channel("count>write/1#2"), channel("read>counting")),
    enumerators={"read": {"state": {}}},
)


def moved(file: FileHandle) -> FileHandle:
    return replace(file, path=f"elsewhere/{file.path}")


def test_every_file_is_moved_and_what_is_in_the_metadata_stays():
    inline = KeyedState("small", handle("name", b"abc"), (3,), 1, "k string")
    also = OperatorSnapshot("count", 2, keyed=(inline,), broadcast=(keyed("all", "b"),))
    manifest = replace(CHECKPOINT, snapshots=(*CHECKPOINT.snapshots, also))

    there = with_files_moved(manifest, moved)

    paths = {file.path for file in there.files()}
    assert paths == {f"elsewhere/{file.path}" for file in manifest.files()}
    assert there.snapshots[-1].keyed == (inline,)


def test_a_savepoint_has_nothing_to_commit_and_nothing_that_is_over():
    savepoint = as_savepoint(CHECKPOINT)

    assert savepoint.kind == "savepoint"
    assert not any(snapshot.commits or snapshot.finished for snapshot in savepoint.snapshots)
    assert savepoint.snapshots_of("read")[0].items == ({"id": "a", "position": 5},)
    assert savepoint.enumerators == CHECKPOINT.enumerators


def test_a_job_that_begins_from_a_savepoint_has_no_checkpoint_yet():
    begun = as_beginning(as_savepoint(CHECKPOINT), moved)

    assert begun.checkpoint_id == 0
    assert {file.path for file in begun.files()} == {
        f"elsewhere/{file.path}" for file in CHECKPOINT.files()
    }


def test_a_state_is_replaced_in_every_subtask_and_the_rest_stays():
    parts = [(keyed("sums", "new0"),), ()]

    changed = with_state(CHECKPOINT, operator("count"), "sums", parts, -1)

    first, second = changed.snapshots_of("count")
    assert {state.name: state.file.path for state in first.keyed} == {"more": "m0", "sums": "new0"}
    assert second.keyed == ()
    assert second.watermark_us == 4, "how far event time had come is not forgotten"
    assert [each.uid for each in changed.operators].count("count") == 1


def test_a_new_operator_comes_with_a_part_for_each_subtask():
    parts = [(keyed("sums", "new0"),), (), (keyed("sums", "new2"),)]

    changed = with_state(CHECKPOINT, operator("new"), "sums", parts, -5)

    assert [each.subtask for each in changed.snapshots_of("new")] == [0, 1, 2]
    assert [each.watermark_us for each in changed.snapshots_of("new")] == [-5, -5, -5]
    assert operator("new") in changed.operators


def test_a_state_that_is_left_out_is_in_no_subtask():
    cut = without_state(CHECKPOINT, "count", "sums")

    assert [[s.name for s in each.keyed] for each in cut.snapshots_of("count")] == [["more"], []]


def test_an_operator_goes_with_all_that_was_under_way_from_and_to_it():
    cut = without_operators(CHECKPOINT, {"count"})

    assert [each.uid for each in cut.operators] == ["read", "write"]
    assert {each.uid for each in cut.snapshots} == {"read", "write"}
    assert [each.edge for each in cut.channels] == ["read>counting"]


def test_a_source_goes_with_its_enumerator():
    assert without_operators(CHECKPOINT, {"read"}).enumerators == {}


def test_only_operators_that_hold_something_are_missed():
    empty = replace(CHECKPOINT, snapshots=(*CHECKPOINT.snapshots, OperatorSnapshot("map", 0)))

    assert [uid for uid in ("read", "count", "write", "map") if keeps_something(empty, uid)] == [
        "read",
        "count",
    ]


def test_a_new_uid_is_taken_over_everywhere_and_two_may_change_places():
    moved = with_uids(CHECKPOINT, {"read": "read", "count": "write", "write": "count"})

    assert [each.uid for each in moved.operators] == ["read", "write", "count"]
    assert [each.uid for each in moved.snapshots] == ["read", "write", "write", "count"]
    assert [each.edge for each in moved.channels] == [
        "read>write",
        "write>count/1#2",
        "read>counting",
    ]
    assert with_uids(CHECKPOINT, {"read": "clicks"}).enumerators.keys() == {"clicks"}


def test_what_has_no_new_uid_is_left_out_where_another_one_takes_its_own():
    moved = with_uids(CHECKPOINT, {"read": "read", "count": "write"})

    assert [each.uid for each in moved.snapshots] == ["read", "write", "write"]


def test_what_was_prepared_is_counted_by_sink_with_epoch_and_rows():
    snapshots = (
        OperatorSnapshot("write", 0, commits=(PendingCommit(9, {"rows": 3}),)),
        OperatorSnapshot("write", 1, commits=(PendingCommit(8, {"rows": 4}),)),
        OperatorSnapshot("count", 0, commits=(PendingCommit(9, {"f": 1}),)),
    )
    checkpoint = replace(CHECKPOINT, snapshots=snapshots)

    [write, count] = prepared_output(checkpoint, {})
    assert (write.key, count.key) == ("write:8:7", "count:8:unknown")
    assert str(write) == "7 rows of epoch 8 that the sink 'the write' (write)"
    assert [each.uid for each in prepared_output(checkpoint, {"write": 8})] == ["count"]
    left = without_prepared(checkpoint, {"write"})
    assert [each.uid for each in prepared_output(left, {})] == ["count"]
