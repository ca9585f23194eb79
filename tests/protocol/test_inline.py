"""State that travels in messages: every file is sent, none twice, and no message is too long."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from stillframe.ids import CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.protocol.inline import INLINE_BYTES_MAX, in_pieces, put_together, refusal
from stillframe.protocol.manifests import ChannelState, FileHandle, KeyedState, OperatorSnapshot
from stillframe.protocol.messages import (
    Order,
    StartSlot,
    TakeFile,
    message_to_json,
    order_from_json,
)
from stillframe.protocol.restore import DealtState, SubtaskState
from stillframe.wire import MESSAGE_BYTES_MAX

COUNT, RULES = OperatorUid("count"), OperatorUid("rules")
FIRST, SECOND = SubtaskIndex(0), SubtaskIndex(1)


def inline(name: str, data: bytes) -> FileHandle:
    return FileHandle(f"shared/1/{name}-7.arrow", len(data), zlib.crc32(data), data)


def keyed(file: FileHandle) -> KeyedState:
    return KeyedState("aggregates", file, (0,), 1, "")


def channel(file: FileHandle) -> ChannelState:
    return ChannelState("a>b", FIRST, SECOND, "input", file, 0, file.length_bytes, 1)


ON_DISK = FileHandle("shared/1/count-1-aggregates-6.arrow", 12, 3)
COUNTS, MORE_COUNTS = inline("count-0", b"counts"), inline("count-1", b"more counts")
TOLD, UNDER_WAY = inline("rules-0", b"rules"), inline("a-0", b"records")
DEALT = inline("rules-1", b"shares")
START = StartSlot(
    peers={},
    state={
        (COUNT, FIRST): SubtaskState(keyed=(keyed(COUNTS), keyed(ON_DISK), keyed(MORE_COUNTS))),
        (RULES, FIRST): SubtaskState(broadcast=(keyed(TOLD),), items=({"id": "a"},)),
        (RULES, SECOND): SubtaskState(dealt=(DealtState(keyed(DEALT), 0, 2),)),
    },
    restored_checkpoint=CheckpointId(7),
    restored_epoch=Epoch(4),
    channels={("a>b", FIRST): (channel(UNDER_WAY),), ("a>b", SECOND): (channel(UNDER_WAY),)},
)


def contents(start: StartSlot) -> list[tuple[str, bytes | None]]:
    parts = list(start.state.values())
    states = [each for part in parts for each in (*part.keyed, *part.broadcast)]
    states += [each.state for part in parts for each in part.dealt]
    files = [each.file for each in states]
    files += [each.file for states in start.channels.values() for each in states]
    return [(file.path, file.data) for file in files]


def sent(order: Order) -> Order:
    return order_from_json(json.loads(json.dumps(message_to_json(order))))


def received(orders: list[Any]) -> StartSlot:
    *files, start = map(sent, orders)
    return put_together(start, {each.file: each.file for each in files})


def test_a_start_in_pieces_is_whole_again_at_the_slot() -> None:
    start = received(list(in_pieces(START)))

    assert start == START
    assert contents(start) == contents(START)


def test_every_file_goes_ahead_of_the_start_and_once() -> None:
    *files, start = in_pieces(START)

    assert [order.file.data for order in files if isinstance(order, TakeFile)] == [
        b"counts",
        b"more counts",
        b"rules",
        b"shares",
        b"records",
    ]
    assert isinstance(start, StartSlot)
    assert all(data is None for _, data in contents(start))


def test_a_start_without_any_goes_as_it_is() -> None:
    start = StartSlot({}, {(COUNT, FIRST): SubtaskState(keyed=(keyed(ON_DISK),))})

    assert list(in_pieces(start)) == [start]
    assert put_together(start, {}) == start


def test_what_is_acknowledged_at_once_fits_into_a_message_with_room_to_spare() -> None:
    as_text = len(base64.b64encode(bytes(3))) * INLINE_BYTES_MAX // 3

    assert as_text < MESSAGE_BYTES_MAX - (8 << 20)


def test_more_than_fits_into_a_message_is_refused_with_what_to_do() -> None:
    half = FileHandle("shared/1/a-0-x-7.arrow", INLINE_BYTES_MAX // 2, 0, b"")
    rest = FileHandle("shared/1/b-0-x-7.arrow", INLINE_BYTES_MAX // 2 + 1, 0, b"")
    operators = [OperatorSnapshot(COUNT, FIRST, keyed=(keyed(half),))]

    assert refusal("count", operators, [channel(half)]) is None
    assert refusal("count", operators, [channel(rest)]) == (
        "all states of a subtask of count take 41943041 bytes together, more than the 41943040 that"
        " stateBackend=memory can keep in an acknowledgement: set stateBackend=fs or"
        " stateBackend=rocksdb"
    )


def test_files_of_any_length_may_be_acknowledged() -> None:
    long = FileHandle("shared/1/a-0-x-7.arrow", INLINE_BYTES_MAX * 9, 0)

    assert refusal("count", [OperatorSnapshot(COUNT, FIRST, keyed=(keyed(long),))], []) is None
