"""State that travels in messages: how much of it one may hold, and how a start goes in pieces.

Theory of operation
-------------------
With the backend `memory` a snapshot has no files: its bytes are in the acknowledgement, and then in
the checkpoint's metadata. A message has a limit (`wire.MESSAGE_BYTES_MAX`), and so has what one
acknowledgement may hold. A start has none: a subtask that takes over from ten others starts with
the state of all of them. So every file is sent to a slot in an order of its own, ahead of the start
that refers to it. Whatever was acknowledged can therefore be restored, at any parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from stillframe.protocol.manifests import ChannelState, FileHandle, KeyedState, OperatorSnapshot
from stillframe.protocol.messages import StartSlot, TakeFile
from stillframe.protocol.restore import SubtaskState

INLINE_BYTES_MAX = 40 << 20
"""In one acknowledgement: a third more as text, and there is other news in it too."""


def refusal(
    name: str, operators: Sequence[OperatorSnapshot], channels: Sequence[ChannelState]
) -> str | None:
    """Why this cannot be acknowledged by the task of that name; None if it can be."""
    files = [file for operator in operators for file in operator.files()]
    files += [channel.file for channel in channels]
    inline_bytes = sum(file.length_bytes for file in files if file.is_inline)
    if inline_bytes <= INLINE_BYTES_MAX:
        return None
    return (
        f"all states of a subtask of {name} take {inline_bytes} bytes together, more than the"
        f" {INLINE_BYTES_MAX} that stateBackend=memory can keep in an acknowledgement: set"
        " stateBackend=fs or stateBackend=rocksdb"
    )


def in_pieces(start: StartSlot) -> Iterator[TakeFile | StartSlot]:
    """The orders to send for it, the start itself last."""
    held: dict[FileHandle, TakeFile] = {}

    def without(file: FileHandle) -> FileHandle:
        if not file.is_inline:
            return file
        held.setdefault(file, TakeFile(file))
        return replace(file, data=None)

    bare = _with_files(start, without)
    yield from held.values()
    yield bare


def put_together(start: StartSlot, taken: Mapping[FileHandle, FileHandle]) -> StartSlot:
    """The start as it was before it went `in_pieces`."""
    return _with_files(start, lambda file: taken.get(file, file)) if taken else start


def _with_files(start: StartSlot, change: Callable[[FileHandle], FileHandle]) -> StartSlot:
    def keyed(states: Sequence[KeyedState]) -> tuple[KeyedState, ...]:
        return tuple(replace(state, file=change(state.file)) for state in states)

    def part(state: SubtaskState) -> SubtaskState:
        dealt = tuple(
            replace(each, state=replace(each.state, file=change(each.state.file)))
            for each in state.dealt
        )
        kept = replace(state, keyed=keyed(state.keyed), broadcast=keyed(state.broadcast))
        return replace(kept, dealt=dealt)

    def channels(states: Sequence[ChannelState]) -> tuple[ChannelState, ...]:
        return tuple(replace(state, file=change(state.file)) for state in states)

    return replace(
        start,
        state={where: part(state) for where, state in start.state.items()},
        channels={where: channels(states) for where, states in start.channels.items()},
    )
