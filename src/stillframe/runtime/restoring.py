"""What a checkpoint holds, read back: a file, records under way, and whole copies."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from stillframe.graph.plan import Edge, HashBy, Plan
from stillframe.ids import SubtaskIndex
from stillframe.key_groups import hash_columns, key_group_range, key_groups_of
from stillframe.protocol.manifests import FileHandle, KeyedState
from stillframe.protocol.restore import DealtState, StartingChannels
from stillframe.runtime.outputs import key_columns
from stillframe.state.channel_log import read_run
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.store import Store


def restored_batches(
    store: Store | None,
    plan: Plan,
    edge: Edge,
    target: SubtaskIndex,
    channels: StartingChannels,
) -> dict[SubtaskIndex, list[pa.RecordBatch]]:
    """What was under way to this subtask on this edge, by the sender whose channel it comes in."""
    sources = edge.sources_of(target)
    restored: dict[SubtaskIndex, list[pa.RecordBatch]] = {}
    files: dict[FileHandle, pa.Buffer] = {}
    for state in channels.get((edge.name, target), ()):
        file = state.file
        if file not in files:
            files[file] = read_file(store, file)
        batches = read_run(files[file], state.offset_bytes, state.length_bytes)
        if isinstance(edge.partitioning, HashBy) and edge.target_parallelism > 1:
            batches = list(_own(batches, edge.partitioning, target, edge, plan.max_parallelism))
        # As many senders as there are now; each former one's records stay together.
        source = sources[state.source % len(sources)]
        restored.setdefault(source, []).extend(batches)
    return restored


def read_copy(store: Store | None, copy: KeyedState) -> Iterator[pa.RecordBatch]:
    """All rows of a state of which every subtask has a whole copy."""
    return read_keyed_snapshot(read_file(store, copy.file), copy.key_groups, range(1))


def read_share(store: Store | None, dealt: DealtState) -> Iterator[pa.RecordBatch]:
    """The rows of a share, in their order."""
    first = dealt.first
    for batch in read_copy(store, dealt.state):
        mine = range(first, batch.num_rows, dealt.step)
        if mine:
            yield batch if dealt.step == 1 else batch.take(pa.array(mine, pa.int64()))
        # Where the next one is in the batch that follows.
        first = (first - batch.num_rows) if not mine else mine[-1] + dealt.step - batch.num_rows


def read_file(store: Store | None, file: FileHandle) -> pa.Buffer:
    """What it holds, checked: where the bytes are in the handle, that was done when they came."""
    if file.data is not None:
        return pa.py_buffer(file.data)
    assert store is not None, "there is state to restore but nowhere to read it from"
    return store.read_verified(file.path, file.length_bytes, file.crc32)


def _own(
    batches: list[pa.RecordBatch],
    partitioning: HashBy,
    target: SubtaskIndex,
    edge: Edge,
    max_parallelism: int,
) -> Iterator[pa.RecordBatch]:
    """The rows whose key groups the subtask owns; the parallelism may have changed."""
    owned = key_group_range(target, edge.target_parallelism, max_parallelism)
    for batch in batches:
        groups = key_groups_of(hash_columns(key_columns(batch, partitioning.keys)), max_parallelism)
        mine = batch.filter(pa.array((groups >= owned.start) & (groups < owned.stop)))
        if mine.num_rows:
            yield mine
