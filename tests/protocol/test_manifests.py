"""The metadata of a checkpoint: goes through JSON unchanged, and tells when it was altered."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillframe.errors import DataError, SnapshotDamaged, StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.protocol.documents import encode_document
from stillframe.protocol.manifests import (
    ChannelState,
    DiskFile,
    DiskState,
    FileHandle,
    KeyedState,
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
    PendingCommit,
    Place,
    SubtaskTimings,
    decode_manifest,
    encode_manifest,
)

COUNT = OperatorSnapshot(
    uid=OperatorUid("count"),
    subtask=SubtaskIndex(1),
    keyed=(
        KeyedState(
            name="counts",
            file=FileHandle("chk-7/count-1-2-counts.arrow", 4711, 0xDEADBEEF),
            key_groups=(64, 65, 127),
            rows=1000,
            schema="app_id: string, count: int64",
        ),
    ),
)
SOURCE = OperatorSnapshot(
    uid=OperatorUid("clicks"),
    subtask=SubtaskIndex(0),
    items=({"id": "part-0", "position": {"row": 17, "done": False, "rate": 0.1}},),
    finished=True,
    ended=True,
)
SINK = OperatorSnapshot(
    uid=OperatorUid("out"),
    subtask=SubtaskIndex(0),
    commits=(PendingCommit(CheckpointId(6), {"files": ["a", "b"], "名": None}),),
)
RULES = OperatorSnapshot(
    uid=OperatorUid("rules"),
    subtask=SubtaskIndex(1),
    broadcast=(KeyedState("function", FileHandle("shared/2/rules-1-7.arrow", 10, 1), (0,), 3, ""),),
)
WINDOWS = OperatorSnapshot(OperatorUid("windows"), SubtaskIndex(0), watermark_us=-17)
DATABASE = OperatorSnapshot(
    OperatorUid("count"),
    SubtaskIndex(1),
    disk=DiskState(64, 128, (DiskFile("000007.sst", FileHandle("shared/1/c-1-7.sst-3.db", 9, 2)),)),
)
CHANNEL = ChannelState(
    edge="clicks>count",
    source=SubtaskIndex(0),
    target=SubtaskIndex(1),
    side="output",
    file=FileHandle("shared/2/clicks-0-channels-7.arrow", 500, 2),
    offset_bytes=200,
    length_bytes=300,
    rows=12,
)
TIMINGS = SubtaskTimings(
    0.5, 1.25, 0.1, 30.0, 4711, 9000, 0, 50, task="clicks → count", subtask=SubtaskIndex(0)
)
MANIFEST = Manifest(
    job="page-views",
    attempt=Attempt(2),
    checkpoint_id=CheckpointId(7),
    epoch=Epoch(4),
    kind="checkpoint",
    triggered_at_ms=1_700_000_000_000,
    completed_at_ms=1_700_000_000_041,
    max_parallelism=128,
    operators=(
        OperatorDescription(OperatorUid("clicks"), "read", "read clicks", 1),
        OperatorDescription(
            OperatorUid("count"),
            "aggregate",
            "count by app_id",
            2,
            Place("by app_id", ((OperatorUid("clicks"),),)),
        ),
    ),
    snapshots=(SOURCE, COUNT, SINK),
    timings=(TIMINGS,),
)


def altered(**changes: Any) -> bytes:
    document = json.loads(encode_manifest(MANIFEST))
    document.update(changes)
    return json.dumps(document).encode()


def test_a_manifest_survives_its_own_encoding() -> None:
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST


@pytest.mark.parametrize(
    "part",
    [COUNT, SOURCE, SINK, RULES, WINDOWS, DATABASE, TIMINGS, CHANNEL],
    ids=lambda part: type(part).__name__,
)
def test_a_part_travels_in_an_acknowledgement(
    part: OperatorSnapshot | SubtaskTimings | ChannelState,
) -> None:
    assert type(part).from_json(json.loads(json.dumps(part.to_json()))) == part


def test_the_same_manifest_gives_the_same_bytes_whatever_the_order_of_its_objects() -> None:
    def with_position(position: dict[str, int]) -> bytes:
        source = dataclasses.replace(SOURCE, items=({"id": "0", "position": position},))
        return encode_manifest(dataclasses.replace(MANIFEST, snapshots=(source,)))

    assert with_position({"a": 1, "b": 2}) == with_position({"b": 2, "a": 1})


def test_people_can_read_the_metadata() -> None:
    text = encode_manifest(MANIFEST).decode()

    assert '"名"' in text
    assert '\n  "job":"page-views",\n' in text
    lines = [line.strip() for line in text.splitlines()]
    parts = [line for line in lines if '"subtask":' in line and '"items":' in line]
    assert len(parts) == len(MANIFEST.snapshots), "each on a line of its own"
    assert json.loads(text)["body"]["job"] == "page-views"


def test_the_manifest_knows_its_files_and_their_size() -> None:
    assert MANIFEST.files() == (COUNT.keyed[0].file,)
    assert MANIFEST.state_bytes() == 4711
    assert MANIFEST.snapshots_of(OperatorUid("out")) == (SINK,)


def test_whole_copies_and_records_under_way_count_among_the_files_each_once() -> None:
    other = dataclasses.replace(CHANNEL, side="input", offset_bytes=0, length_bytes=200)
    manifest = dataclasses.replace(MANIFEST, snapshots=(COUNT, RULES), channels=(CHANNEL, other))

    assert manifest.files() == (COUNT.keyed[0].file, RULES.broadcast[0].file, CHANNEL.file)
    assert manifest.state_bytes() == 4711 + 10 + 500
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_a_channel_has_two_ends_and_no_other() -> None:
    with pytest.raises(ValueError, match="side 'middle'"):
        ChannelState.from_json({**CHANNEL.to_json(), "side": "middle"})


@given(st.integers(0, len(encode_manifest(MANIFEST)) - 3))
def test_torn_metadata_is_damaged(length: int) -> None:
    with pytest.raises(SnapshotDamaged, match="is damaged"):
        decode_manifest(encode_manifest(MANIFEST)[:length])


@given(st.integers(0, len(encode_manifest(MANIFEST)) - 1), st.integers(1, 255))
def test_an_altered_byte_never_goes_unnoticed(position: int, flip: int) -> None:
    """Only where it does not change the meaning (white space) may the file still be read."""
    data = bytearray(encode_manifest(MANIFEST))
    data[position] ^= flip
    with suppress(StorageError):
        assert decode_manifest(bytes(data)) == MANIFEST


def test_an_altered_value_is_told_with_both_checksums() -> None:
    body = json.loads(encode_manifest(MANIFEST))["body"]
    body["epoch"] = 5

    with pytest.raises(
        SnapshotDamaged, match=r"chk-7/_metadata is damaged: .*checksum \w+ where \w+"
    ):
        decode_manifest(altered(body=body), "chk-7/_metadata")


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"[]", b"null", b"{}", b'{"format_version": "1"}']
)
def test_what_is_not_metadata_is_damaged(data: bytes) -> None:
    with pytest.raises(SnapshotDamaged, match="chk-7/_metadata is damaged"):
        decode_manifest(data, "chk-7/_metadata")


@pytest.mark.parametrize("position", [b"NaN", b"1e999", rb'"\ud800"', b"[" * 100_000])
def test_values_that_were_never_written_are_damage(position: bytes) -> None:
    with pytest.raises(SnapshotDamaged, match="is damaged"):
        decode_manifest(encode_manifest(MANIFEST).replace(b"0.1,", position + b",", 1))


def test_a_newer_format_is_refused_with_both_versions_and_is_not_called_damaged() -> None:
    with pytest.raises(StorageError, match=r"format version 6, but .* up to 5") as raised:
        decode_manifest(altered(format_version=6))

    assert not isinstance(raised.value, SnapshotDamaged)


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}, "\ud800"])
def test_a_position_that_json_cannot_keep_is_refused_when_written(value: Any) -> None:
    source = dataclasses.replace(SOURCE, items=({"id": "0", "position": {"at": value}},))

    with pytest.raises(DataError, match="checkpoint 7 of job 'page-views' cannot be written"):
        encode_manifest(dataclasses.replace(MANIFEST, snapshots=(source,)))


def test_an_altered_format_version_is_damage() -> None:
    with pytest.raises(SnapshotDamaged, match="checksum"):
        decode_manifest(altered(format_version=0))


VERSION_1 = """
{
 "format_version": 1,
 "crc32": 2666714099,
 "body": {
  "attempt": 2,
  "checkpoint_id": 7,
  "completed_at_ms": 1700000000041,
  "epoch": 4,
  "job": "page-views",
  "kind": "checkpoint",
  "max_parallelism": 128,
  "operators": [
   {"kind": "aggregate", "name": "count by app_id", "parallelism": 2, "uid": "count"}
  ],
  "snapshots": [
   {
    "commits": [],
    "finished": true,
    "items": [{"id": "part-0", "position": {"row": 17}}],
    "keyed": [],
    "subtask": 0,
    "uid": "clicks"
   },
   {
    "commits": [],
    "finished": false,
    "items": [],
    "keyed": [
     {
      "file": {"crc32": 3735928559, "length_bytes": 4711, "path": "chk-7/count-1-2-counts.arrow"},
      "key_groups": [64, 127],
      "name": "counts",
      "rows": 1000,
      "schema": "app_id string"
     }
    ],
    "subtask": 1,
    "uid": "count"
   },
   {
    "commits": [{"checkpoint_id": 6, "committable": {"file": "a"}}],
    "finished": false,
    "items": [],
    "keyed": [],
    "subtask": 0,
    "uid": "out"
   }
  ],
  "timings": [
   {
    "alignment_ms": 1.25,
    "async_ms": 30.0,
    "bytes_written": 4711,
    "in_flight_bytes": 0,
    "start_delay_ms": 0.5,
    "state_bytes": 9000,
    "subtask": 0,
    "sync_ms": 0.1,
    "task": "clicks"
   }
  ],
  "triggered_at_ms": 1700000000000
 }
}
"""


def test_metadata_of_the_first_version_is_still_read() -> None:
    manifest = decode_manifest(VERSION_1.encode())

    assert (manifest.format_version, manifest.checkpoint_id, manifest.epoch) == (1, 7, 4)
    clicks, count, out = manifest.snapshots
    assert (clicks.finished, clicks.items) == (True, ({"id": "part-0", "position": {"row": 17}},))
    assert count.keyed[0].file.path == "chk-7/count-1-2-counts.arrow"
    assert out.commits == (PendingCommit(CheckpointId(6), {"file": "a"}),)
    assert (manifest.channels, manifest.enumerators) == ((), {})
    assert [snapshot.broadcast for snapshot in manifest.snapshots] == [()] * 3


def test_metadata_of_the_second_version_is_still_read() -> None:
    body = json.loads(encode_manifest(MANIFEST))["body"]

    manifest = decode_manifest(encode_document(body, 2, "the metadata"))

    assert manifest == dataclasses.replace(MANIFEST, format_version=2)


def test_damage_in_metadata_of_the_first_version_is_seen() -> None:
    with pytest.raises(SnapshotDamaged, match="checksum"):
        decode_manifest(VERSION_1.replace('"row": 17', '"row": 18').encode())


# --- state in the metadata itself ------------------------------------------------------------

HELD = FileHandle("shared/2/count-1-aggregates-7.arrow", 6, 0xB837163B, b"counts")


def holding(file: FileHandle) -> Manifest:
    count = dataclasses.replace(COUNT, keyed=(dataclasses.replace(COUNT.keyed[0], file=file),))
    return dataclasses.replace(MANIFEST, snapshots=(SOURCE, count, RULES), channels=(CHANNEL,))


def test_state_in_the_metadata_comes_back_with_it() -> None:
    manifest = decode_manifest(encode_manifest(holding(HELD)))

    assert manifest == holding(HELD)
    assert manifest.snapshots[1].keyed[0].file.data == b"counts"
    assert manifest.snapshots[2].broadcast[0].file.data is None


def test_state_in_the_metadata_is_state_and_no_file() -> None:
    manifest = holding(HELD)

    assert manifest.files() == (RULES.broadcast[0].file, CHANNEL.file)
    assert manifest.state_bytes() == 6 + 10 + 500


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            dataclasses.replace(HELD, data=b"counTs"),
            "holds of shared/2/count-1.* 6 bytes and check",
        ),
        (dataclasses.replace(HELD, data=b"count"), "has 5 bytes and .* where 6 and b837163b were"),
    ],
    ids=["altered", "torn"],
)
def test_state_in_the_metadata_that_is_not_what_was_written_is_damage(
    file: FileHandle, said: str
) -> None:
    with pytest.raises(SnapshotDamaged, match=said):
        decode_manifest(encode_manifest(holding(file)))


@pytest.mark.parametrize("data", ["*", "abc", 7, None])
def test_state_in_the_metadata_that_is_not_base_64_is_damage(data: Any) -> None:
    with pytest.raises(ValueError, match=r"base64|padding|data"):
        FileHandle.from_json({**HELD.to_json(), "data": data})


def test_a_handle_does_not_show_what_it_holds() -> None:
    assert "counts'" not in repr(HELD)


@pytest.mark.parametrize("how", ["copied", "dealt", "united"])
def test_how_state_without_keys_is_shared_out_is_kept_and_an_older_one_is_a_copy(how):
    state = dataclasses.replace(RULES.broadcast[0], redistribution=how)

    assert KeyedState.from_json(state.to_json()) == state
    without = {name: value for name, value in state.to_json().items() if name != "how"}
    assert KeyedState.from_json(without).redistribution == "copied"
    with pytest.raises(ValueError, match="how 'thrown'"):
        KeyedState.from_json({**without, "how": "thrown"})
