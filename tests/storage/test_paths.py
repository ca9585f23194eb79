"""Names of things on disk: readable, safe, and never two for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillframe.errors import BuildError
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SlotIndex, SubtaskIndex
from stillframe.storage import paths
from stillframe.storage.store import canonical_address

CHECKPOINT = CheckpointId(7)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


def state_path(uid: str, subtask: int, attempt: int, state: str) -> str:
    return paths.state_path(
        CHECKPOINT, OperatorUid(uid), SubtaskIndex(subtask), Attempt(attempt), state
    )


def test_the_layout_is_the_documented_one() -> None:
    assert paths.job_directory("page-views") == "page-views"
    assert paths.metadata_path(CHECKPOINT, Attempt(2)) == "chk-7-2/_metadata"
    assert state_path("count-views", 3, 2, "counts") == "shared/2/count-views-3-counts-7.arrow"
    assert paths.log_path(12) == "log/00000000000000000012"


def test_a_job_keeps_its_id_as_long_as_its_place_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("chk")
    known = paths.job_id(str(tmp_path / "chk"), "counts")
    ways = ("chk", "./chk//", "link", f"file:{tmp_path}/chk", f"file://localhost{tmp_path}/chk/")
    assert {paths.job_id(way, "counts") for way in ways} == {known}
    others = [(None, "counts"), ("chk", "other"), ("chk2", "counts"), ("s3://chk", "counts")]
    assert known not in {paths.job_id(*other) for other in others}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3a://bucket//a/b/", "s3://bucket/a/b"),
        ("S3://bucket/a%20b?c#d", "s3://bucket/a%20b?c#d"),
        ("hdfs://host:9000/a//b/", "hdfs://host:9000/a/b"),
        ("hdfs:///a", "hdfs:///a"),
    ],
)
def test_a_url_is_never_taken_for_a_path(written: str, meant: str) -> None:
    assert canonical_address(written) == meant
    assert canonical_address(meant) == meant


def test_a_name_is_quoted_where_a_file_system_would_stumble() -> None:
    assert paths.quoted_name("clicks/day 1", "job name") == "clicks%2Fday%201"
    assert paths.quoted_name("..", "job name") == "%2E."
    assert paths.quoted_name("页面浏览", "job name") == "页面浏览"


@pytest.mark.parametrize("name", ["", "x" * 101, "\ud800"])
def test_a_name_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(BuildError, match="job name"):
        paths.job_directory(name)


def test_a_uid_with_numbers_at_its_end_does_not_meet_another() -> None:
    assert state_path("a-1", 2, 3, "x") != state_path("a", 1, 2, "3-x")


@given(st.lists(st.tuples(names, st.integers(0, 20), st.integers(1, 20), names), max_size=6))
def test_different_states_never_share_a_file(states: list[tuple[str, int, int, str]]) -> None:
    assert len({state_path(*state) for state in states}) == len(set(states))


@given(names)
def test_a_quoted_name_is_one_visible_part_of_a_path(name: str) -> None:
    quoted = paths.quoted_name(name, "uid")

    assert "/" not in quoted
    assert "\0" not in quoted
    assert not quoted.startswith(".")


def test_directories_and_entries_are_known_by_their_names() -> None:
    assert paths.checkpoint_of("chk-12-3") == (12, 3)
    assert [paths.attempt_of(name) for name in ("3", "03", "x", "")] == [3, None, None, None]
    foreign = ("chk-", "chk-x-1", "log", "chk-01-1", "chk-12", "chk-1-2-3")
    assert [paths.checkpoint_of(name) for name in foreign] == [None] * 6
    assert paths.sequence_of("00000000000000000012") == 12
    assert [paths.sequence_of(name) for name in ("12", ".tmp-1", "x" * 20)] == [None] * 3


def test_the_names_of_a_history_are_in_the_order_of_what_they_tell() -> None:
    told = [
        [paths.checkpoint_history_path(CheckpointId(n), Attempt(1)) for n in (2, 9, 10, 110)],
        [paths.failure_history_path(Attempt(a), n) for a, n in ((2, 9), (2, 10), (10, 1))],
        [
            paths.attempt_history_path(Attempt(9), "begun"),
            paths.attempt_history_path(Attempt(9), "ended"),
            paths.attempt_history_path(Attempt(9), "phases"),
            paths.attempt_history_path(Attempt(10), "begun"),
        ],
        [paths.read_history_path(Attempt(a), SlotIndex(n)) for a, n in ((2, 9), (2, 10), (10, 1))],
        [paths.rolled_history_path(CheckpointId(n), Attempt(1)) for n in (100, 1_100)],
    ]
    assert told == [sorted(each) for each in told]
    places = {path.rpartition("/")[0] for each in told for path in each}
    assert places == set(paths.HISTORY_DIRECTORIES)
    assert all(paths.is_history_file(path.rpartition("/")[2]) for each in told for path in each)
    shown = [paths.numbers_in_history(*path.rpartition("/")[::2]) for each in told for path in each]
    assert shown[3:5] == [(110, 1), (None, 2)]
    assert shown[-3:] == [(None, 10), (100, 1), (1_100, 1)]
    assert paths.numbers_in_history("history/checkpoints", f"{1:020d}-begun.json") is None
    foreign = (".tmp-1", "notes.txt", f"{1:020d}.json", f"{1:020d}-x.json", f"{1:020d}-1.json.bak")
    assert not any(map(paths.is_history_file, foreign))


@given(names, st.integers(0, 20), names, st.integers(1, 10**9), st.integers(1, 10**9))
def test_a_shared_file_tells_for_which_checkpoint_of_which_attempt_it_was_written(
    uid: str, subtask: int, state: str, checkpoint_id: int, attempt: int
) -> None:
    path = paths.state_path(
        CheckpointId(checkpoint_id),
        OperatorUid(uid),
        SubtaskIndex(subtask),
        Attempt(attempt),
        state,
    )

    assert paths.is_shared(path)
    assert paths.number_of_file(path) == checkpoint_id
    assert paths.attempt_of(path.split("/")[1]) == attempt


def test_other_files_are_not_taken_for_shared_ones() -> None:
    others = ("chk-7-2/count-0-counts.arrow", "chk-7-2/_metadata", "log/00000000000000000012")
    assert [paths.number_of_file(path) for path in others] == [None] * 3
    assert not any(paths.is_shared(path) for path in others)


@given(names, st.integers(0, 20), st.integers(1, 20), names)
def test_a_state_is_known_by_the_path_of_its_file(
    uid: str, subtask: int, attempt: int, state: str
) -> None:
    assert paths.state_of_path(state_path(uid, subtask, attempt, state)) == (uid, subtask, state)


@pytest.mark.parametrize("path", ["chk-7-2/_metadata", "shared/2/x.arrow", "shared/2/a-1-b-7.db"])
def test_other_files_are_of_no_state(path: str) -> None:
    assert paths.state_of_path(path) is None
