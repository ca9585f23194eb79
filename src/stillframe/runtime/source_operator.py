"""A source as an operator: polled by its task, its splits are its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from stillframe.api.sources import EndOfData, NothingYet, Polled, SourceReader, Split
from stillframe.errors import UserCodeError
from stillframe.ids import CheckpointId, OperatorUid, SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.manifests import OperatorSnapshot
from stillframe.protocol.messages import SourceLag
from stillframe.protocol.positions import split_flaw
from stillframe.protocol.split_times import OpenSplits
from stillframe.runtime.operators import Background, StatefulOperator
from stillframe.runtime.reading import AheadReader, ReaderAtWork
from stillframe.storage.store import Store
from stillframe.user_code import calling, fail, shown

_SPLITS_SECONDS = 1.0
"""Between two looks at a reader that waits for splits; their coming wakes the loop anyway."""

GoesBack = Callable[[JsonObject, JsonObject], bool]


def _never(position: JsonObject, later: JsonObject) -> bool:
    return False


class Reading(StatefulOperator):
    """A source: it is polled by its task, and its splits are its state.

    Where the source has an enumerator it does not end before it was told that no split will come.
    """

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        reader: SourceReader,
        *,
        name: str = "",
        awaits_splits: bool = False,
        was_ended: bool = False,
        goes_back: GoesBack = _never,
    ) -> None:
        self.uid = uid
        self._of = name
        self._name = f"source {name}"
        self._subtask = subtask
        self.times_of: Callable[[str], JsonObject] = lambda split: {}
        """How far event time has come for a split, by the operators that look at it."""
        self._reader = reader
        self._awaits_splits = awaits_splits
        self._has_read_all = False
        self.was_ended = was_ended
        """Whether it was told to end, whatever there is left to read."""
        self._goes_back = goes_back
        self._restored = reader.splits()
        # Of ended ones too, which the reader may have dropped: an order may come twice.
        self._known = {split.id for split in self._restored}
        self._checked = {split.id: split.position for split in self._restored}
        """Positions that were found good, as they were then."""
        self._in_checkpoints: dict[CheckpointId, Sequence[Split]] = {}
        """The splits as they are in checkpoints that are under way."""

    def poll(self) -> Polled:
        try:
            polled = self._reader.poll()
        except (Exception, SystemExit) as error:
            fail(self._name, error, self._positions_in_words(), operator=self.uid)
        self._has_read_all = isinstance(polled, EndOfData)
        if self._awaits_splits and self._has_read_all:
            return NothingYet(_SPLITS_SECONDS)
        return polled

    def _positions_in_words(self) -> str:
        splits = [f"split {split.id!r} at {split.position}" for split in self._reader.splits()]
        return shown(f"behind {', '.join(splits) or 'no split'}")

    def polled_in_words(self) -> str:
        """Where the batch that was polled last is from."""
        of = self._reader.polled_split()
        if of is None:
            return shown(f"of a batch that ends at {self._positions_in_words()}")
        ends = [split.position for split in self._reader.splits() if split.id == of]
        return shown(f"of split {of!r}{f' in a batch that ends at {ends[0]}' if ends else ''}")

    @property
    def has_nothing_to_read(self) -> bool:
        """Whether it awaits splits and has read all it has."""
        return self._awaits_splits and self._has_read_all

    @property
    def reader_at_work(self) -> ReaderAtWork | None:
        """What a reader with a thread of its own is doing there."""
        return self._reader.at_work() if isinstance(self._reader, AheadReader) else None

    def open_splits(self, polled: bool, listened_seconds: float) -> OpenSplits | None:
        """What is read from now, if the reader tells; `polled`: the last poll answered a batch."""
        ids = self._reader.open_splits()
        if ids is None:
            return None
        return OpenSplits(
            ids,
            self._reader.polled_split() if polled else None,
            None if self._reader.reads_in_turn else listened_seconds,
        )

    def polled_split(self) -> str | None:
        return self._reader.polled_split()

    @property
    def records_malformed(self) -> int:
        return self._reader.records_malformed()

    @property
    def awaits(self) -> str | None:
        """What the reader waits for, if it says so."""
        awaited = self._reader.awaits()
        return None if awaited is None else f"{self._name} waits: {awaited}"

    @property
    def lag(self) -> SourceLag | None:
        """How far the reader is behind, if it tells."""
        lag = self._reader.lag()
        return None if lag is None else SourceLag(self.uid, self._of, lag.records, lag.seconds)

    def on_splits(self, splits: Sequence[Split], is_last: bool, stops: bool = False) -> None:
        """More splits to read, and whether they are the last, perhaps only for now; those it knows
        are passed over."""
        added = [split for split in splits if split.id not in self._known]
        self._known.update(split.id for split in added)
        with calling(self._name, operator=self.uid):
            if added:
                self._reader.add_splits(added)
            if is_last and self._awaits_splits:
                self._awaits_splits = False
                self._reader.no_more_splits(until_now=stops)

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        return (batch,)

    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        splits = self._reader.splits()
        self._refuse_bad(splits)
        if savepoint is None:  # of which nobody is told
            self._in_checkpoints[checkpoint_id] = splits
        part = OperatorSnapshot(
            self.uid,
            self._subtask,
            items=tuple(map(self._item, splits)),
            ended=self.was_ended,
        )
        return lambda: part

    def _refuse_bad(self, splits: Sequence[Split]) -> None:
        """Here, where the source can be named, and before anything goes on its way."""
        [(split_id, times)] = Counter(split.id for split in splits).most_common(1) or [("", 0)]
        if times > 1:
            raise UserCodeError(
                f"{self._name} has {times} splits with the id {split_id!r}: give each its own"
            )
        for split in splits:
            checked = self._checked.get(split.id)
            if split.position is checked:
                continue
            flaw = split_flaw(split.id, split.position)
            if flaw is None and checked is not None and self._goes_back(checked, split.position):
                flaw = (
                    f"split {split.id!r} went back from {shown(checked)} to"
                    f" {shown(split.position)}: its reader would give records twice; let positions"
                    " only go forward"
                )
            if flaw is not None:
                raise UserCodeError(f"{self._name}: {flaw}")
            self._checked[split.id] = split.position

    def _item(self, split: Split) -> JsonObject:
        times = self.times_of(split.id)
        timed: JsonObject = {"times": times} if times else {}
        return {"id": split.id, "position": split.position, **timed}

    def described(self, checkpoint_id: CheckpointId, written: OperatorSnapshot) -> OperatorSnapshot:
        return written

    def completed(self, checkpoint_id: CheckpointId) -> None:
        # Of the one that the attempt was restored from there was no snapshot here.
        splits = self._in_checkpoints.get(checkpoint_id, self._restored)
        for each in [each for each in self._in_checkpoints if each <= checkpoint_id]:
            del self._in_checkpoints[each]
        with calling(self._name, f"checkpoint {checkpoint_id}", operator=self.uid):
            self._reader.on_checkpoint_complete(checkpoint_id, splits)

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._in_checkpoints.pop(checkpoint_id, None)

    def close(self) -> None:
        self._reader.close()
