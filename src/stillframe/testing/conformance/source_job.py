"""A job with one source that things happen to, one after the other.

Rules of this file
------------------
1. Readers are opened and polled by the code that does it in a slot, splits are dealt by
   `protocol/restore` and `protocol/enumeration`, and what a checkpoint keeps of them goes through
   its JSON and back.
2. A row counts from when it was polled. A restart forgets what was counted after its checkpoint.
3. A method without an underscore is a step, as in `sink_job.py`.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from stillframe.api.sources import (
    BlockingReader,
    Source,
    SourceContext,
    SourceReader,
    Split,
    SplitEnumerator,
)
from stillframe.ids import CheckpointId, SubtaskIndex
from stillframe.json_values import JsonObject
from stillframe.protocol.enumeration import Assign, Enumeration, EnumeratorState
from stillframe.protocol.manifests import Manifest
from stillframe.runtime.building import opened_reader
from stillframe.runtime.reading import splits_of
from stillframe.runtime.source_operator import Reading
from stillframe.testing.conformance.checkpoints import UID, dealt, stored
from stillframe.testing.conformance.promises import Broken, Diary, keeping, named
from stillframe.testing.conformance.truth import ENDS, READS, Polling, Rows, Truth, some

SPLITS = (
    "splits() has every split given to the reader, those not yet begun too; one that has ended may"
    " be left out if there is an enumerator"
)
JSON = "a position, and an enumerator's state, is JSON that reads back as it was"
FORWARD = (
    "a split's position only goes forward, and goes_back knows that: of two that a reader had, the"
    " later one does not lie before the other"
)
SIZE = "a position does not grow with what was read: it is in every checkpoint"
HANDED_OUT = "a position that was handed out is not changed: make a new dict"
FINDS_AGAIN = (
    "an enumerator is a function of its state: opened with that of a checkpoint, it finds again"
    " what was found after it"
)
FINDS_ONCE = "an enumerator does not answer a split again that its state knows"
OPEN = (
    "open_splits has every split that may still give records, and polled_split where they are from"
)
LOST = "every row comes, whatever fails"
REPEATED = "no row comes twice: what was polled before a checkpoint does not come after it"
EXPECTED = "a source that is read from its beginning to its end gives every row, and no others"
CLOSES = "close gives everything back, and read ends soon after interrupt"

_RETAINED = 3
_CLOSE_SECONDS_MAX = 2.0
_STEP_SECONDS_MAX = 0.1
_SETTLE_SECONDS_MAX = 2.0
_POLLS_MAX = 2_000
_POSITION_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class Slot:
    """One reader, as its subtask has it."""

    reader: SourceReader
    reading: Reading
    given: set[str]
    ended: bool = False
    opened: frozenset[str] | None = None


@dataclass(slots=True)
class Kept:
    """What a checkpoint keeps, and what had been counted then."""

    checkpoint_id: CheckpointId
    manifest: Manifest
    enumerator: EnumeratorState
    counted: Rows
    ids: frozenset[str]
    handed_out: list[tuple[Split, str]] = field(default_factory=list)


class SourceJob:
    """`eased` names the adversities that are spared (`sources.py` says which there are)."""

    def __init__(
        self,
        source: Source,
        truth: Truth,
        more: Callable[[Source], None] | None,
        diary: Diary,
        eased: frozenset[str],
    ) -> None:
        self._source: Source = pickle.loads(pickle.dumps(source))
        self._truth = truth
        self._more = more
        self._diary = diary
        self._eased = eased
        self._polling = Polling(source)
        self._interval = source.discovery_interval_seconds
        self._counted: Rows = Counter()
        self._ids: set[str] = set()
        """Of the splits that this job has been given, as far as it remembers."""
        self._ever: dict[str, Split] = {}
        self._checkpoints = 0
        self._in_flight: list[Kept] = []
        self._completed: list[Kept] = []
        self._sizes: dict[str, int] = {}
        self._slots: list[Slot] = []
        self._zombies: list[Slot] = []
        self._all: list[Slot] = []
        self._enumerator: SplitEnumerator | None = None
        self._enumeration: Enumeration | None = None
        with keeping(READS, "splits and open without any"):
            self._lets_go = _lets_go(self._source, self._polling.context(0, 1))
            first = source.splits(2)
        self._know(first)
        self._first: list[JsonObject] = [
            {"id": each.id, "position": _as_json(each.position)} for each in first
        ]
        self._start(2)

    def check(self) -> None:
        """Nothing of what was counted came twice."""
        repeated = self._truth.repeated(self._ids, self._counted)
        if repeated:
            raise Broken(REPEATED, some(repeated))

    def settle(self) -> None:
        """Nothing fails any more: what is left to read comes."""
        for _ in range(2):
            self.discover()
        self._diary.tell("what is left is read")
        for slot in self._slots:
            for _ in range(_POLLS_MAX):
                if slot.ended or not self._truth.missing(slot.given, self._counted):
                    break
                if not self._poll(slot, _SETTLE_SECONDS_MAX):
                    break
        self.check()
        missing = self._truth.missing(self._ids, self._counted)
        if missing:
            raise Broken(LOST, f"{some(missing)} did not come")
        self._end(closes=True)

    def compare(self, expected: Sequence[Hashable]) -> None:
        """What was counted in the end is what somebody knows to be there."""
        if self._counted != Counter(expected):
            missing, more = Counter(expected) - self._counted, self._counted - Counter(expected)
            seen = f"{some(missing)} never came" if missing else f"{some(more)} came and are not"
            raise Broken(EXPECTED, seen, is_plain=True)

    def close(self) -> None:
        for slot in self._all:
            with suppress(Exception):
                slot.reader.close()

    # --- attempts

    def restart(self, more: int, back: int, closes: int) -> None:
        """Another attempt, of the newest checkpoint or one before it, with 1 subtask and `more`."""
        if "restart" in self._eased:
            return
        parallelism = len(self._slots) if "rescale" in self._eased else 1 + more
        self._end(closes=bool(closes))
        older = self._completed[: len(self._completed) - back]
        if back and older and "older" not in self._eased and not self._lets_go:
            self._completed = older
        self._start(parallelism)

    def _start(self, parallelism: int) -> None:
        kept = self._completed[-1] if self._completed else None
        from_ = f"checkpoint {kept.checkpoint_id}" if kept else "the beginning"
        self._diary.tell(f"an attempt begins with {parallelism} subtask(s), from {from_}")
        self._counted = Counter(kept.counted) if kept else Counter()
        self._in_flight = []
        self._slots = []
        source = self._source
        if "copies" not in self._eased:
            source = pickle.loads(pickle.dumps(source))
        manifest = kept.manifest if kept else None
        for index, state in enumerate(dealt(parallelism, manifest, self._first)):
            self._open(source, index, parallelism, splits_of(state.items))
        if self._interval is not None:
            known = kept.enumerator if kept else EnumeratorState()
            self._ids = set(kept.ids) if kept else {str(each["id"]) for each in self._first}
            held = [slot.given for slot in self._slots]
            self._enumeration = Enumeration(self._interval, known, held)
            with keeping(FINDS_AGAIN, "open_enumerator"):
                self._enumerator = self._source.open_enumerator(known.state)
            self._carry_out(self._enumeration.on_running())
        if kept is not None:
            self._tell_complete(kept)

    def _open(self, source: Source, index: int, parallelism: int, splits: Sequence[Split]) -> None:
        context = self._polling.context(index, parallelism)
        with keeping(READS, "open"):
            reader = opened_reader(self._polling.wake, source, splits, context)
            awaits = self._interval is not None
            reading = Reading(
                UID,
                SubtaskIndex(index),
                reader,
                name=source.describe(),
                awaits_splits=awaits,
                goes_back=partial(_never_back, source),
            )
        slot = Slot(reader, reading, {split.id for split in splits})
        self._slots.append(slot)
        self._all.append(slot)
        slot.opened = reader.open_splits()

    def _end(self, closes: bool) -> None:
        how = "are closed" if closes else "are given up"
        self._diary.tell(f"the readers {how}")
        if not closes:
            self._zombies = self._slots
        for slot in self._slots if closes else ():
            began = time.monotonic()
            with keeping(CLOSES, "close"):
                slot.reader.close()
            if time.monotonic() - began > _CLOSE_SECONDS_MAX:
                seen = f"close took {time.monotonic() - began:.1f} s"
                raise Broken(CLOSES, seen, is_plain=True)
        if self._enumerator is not None:
            with keeping(CLOSES, "the enumerator's close"):
                self._enumerator.close()

    # --- reading

    def poll(self, subtask: int, times: int) -> None:
        slot = self._slots[subtask % len(self._slots)]
        for _ in range(1 + times):
            self._diary.tell(f"subtask {self._slots.index(slot)} is polled")
            self._diary.add(_answer(self._poll(slot, _STEP_SECONDS_MAX)))

    def _poll(self, slot: Slot, seconds_max: float) -> list[Hashable] | None:
        with keeping(READS, "poll"):
            rows = self._polling.next(slot.reader, seconds_max)
        if rows and slot.ended:
            raise Broken(ENDS, f"then {len(rows)} row(s) came", is_plain=True)
        slot.ended = rows == []
        self._counted.update(rows or ())
        if rows:
            self._check_open(slot)
        slot.opened = slot.reader.open_splits()
        return rows

    def _check_open(self, slot: Slot) -> None:
        of = slot.reader.polled_split()
        if slot.opened is not None and of not in slot.opened and not slot.reader.reads_in_turn:
            seen = f"rows came from {of!r}, and {sorted(slot.opened)} were said to be open"
            raise Broken(OPEN, seen, is_plain=True)

    def zombie_polls(self, subtask: int) -> None:
        """A reader of an older attempt goes on; nobody looks at what it gives."""
        if self._zombies and "zombies" not in self._eased:
            self._diary.tell("a reader that was given up is polled")
            slot = self._zombies[subtask % len(self._zombies)]
            with suppress(Exception):
                self._polling.next(slot.reader, _STEP_SECONDS_MAX)

    # --- checkpoints

    def trigger(self) -> None:
        self._checkpoints += 1
        checkpoint_id = CheckpointId(self._checkpoints)
        self._diary.tell(f"checkpoint {checkpoint_id} begins: splits() is asked for")
        handed_out = []
        snapshots = []
        for slot in self._slots:
            with keeping(READS, "splits"):
                splits = slot.reader.splits()
            self._check_splits(slot, splits)
            handed_out += [(split, json.dumps(split.position)) for split in splits]
            with keeping(JSON, "splits"):
                part = slot.reading.snapshot(checkpoint_id)()
            snapshots.append(slot.reading.described(checkpoint_id, part))
        state = self._enumeration.snapshot() if self._enumeration else EnumeratorState()
        kept = Kept(
            checkpoint_id,
            stored(checkpoint_id, snapshots),
            EnumeratorState.from_json(_as_json(state.to_json())),
            Counter(self._counted),
            frozenset(self._ids),
            handed_out,
        )
        self._in_flight = [*self._in_flight, kept][-_RETAINED:]

    def _check_splits(self, slot: Slot, splits: Sequence[Split]) -> None:
        ids = [split.id for split in splits]
        if len(set(ids)) < len(ids) or not set(ids) <= slot.given:
            seen = f"it answered {sorted(ids)}, and was given {sorted(slot.given)}"
            raise Broken(SPLITS, seen, is_plain=True)
        left_out = slot.given - set(ids)
        unread = [each for each in left_out if self._truth.missing([each], self._counted)]
        if left_out and (unread or self._interval is None):
            seen = f"{named(sorted(unread or left_out))} is left out"
            raise Broken(SPLITS, seen, is_plain=True)
        for split in splits:
            size = len(json.dumps(_as_json(split.position)))
            least = self._sizes.setdefault(split.id, size)
            if size > 3 * least + 256 or size > _POSITION_BYTES_MAX:
                seen = f"that of {split.id} was {least} bytes and is {size}"
                raise Broken(SIZE, seen, is_plain=True)

    def complete(self, which: int) -> None:
        if self._in_flight:
            kept = self._in_flight[which % len(self._in_flight)]
            self._diary.tell(f"checkpoint {kept.checkpoint_id} is complete")
            for split, text in kept.handed_out:
                if json.dumps(split.position) != text:
                    raise Broken(HANDED_OUT, f"{text} has become {split.position}", is_plain=True)
            self._in_flight = [
                each for each in self._in_flight if each.checkpoint_id > kept.checkpoint_id
            ]
            self._completed = [*self._completed, kept][-_RETAINED:]
            self._tell_complete(kept)

    def _tell_complete(self, kept: Kept) -> None:
        if "completion" in self._eased:
            return
        with keeping(READS, "on_checkpoint_complete"):
            for slot in self._slots:
                slot.reading.completed(kept.checkpoint_id)
            if self._enumerator is not None:
                parts = kept.manifest.snapshots_of(UID)
                splits = splits_of([item for part in parts for item in part.items])
                state = kept.enumerator.state
                self._enumerator.on_checkpoint_complete(kept.checkpoint_id, state, splits)

    def abort(self, which: int) -> None:
        if self._in_flight:
            kept = self._in_flight.pop(which % len(self._in_flight))
            self._diary.tell(f"checkpoint {kept.checkpoint_id} is aborted")
            for slot in self._slots:
                slot.reading.aborted(kept.checkpoint_id)

    def whole_checkpoint(self) -> None:
        self.trigger()
        self.complete(-1)

    def two_in_flight(self, subtask: int) -> None:
        """The next checkpoint begins, with records in between, before this one is complete."""
        self.trigger()
        self.poll(subtask, 0)
        self.trigger()
        self.complete(-2)

    # --- splits that come

    def grow(self) -> None:
        if self._more is not None:
            self._diary.tell("there is more to find")
            self._more(self._source)

    def discover(self) -> None:
        if self._enumeration is not None:
            self._carry_out(self._enumeration.on_time(math.inf))

    def _ask(self) -> None:
        assert self._enumerator is not None
        assert self._enumeration is not None
        with keeping(FINDS_AGAIN, "discover"):
            found = self._enumerator.discover()
        ids = [split.id for split in found.splits]
        self._diary.tell(f"the enumerator finds {named(sorted(ids)) or 'nothing'}")
        again = sorted(self._ids & set(ids))
        if again:
            raise Broken(FINDS_ONCE, f"{named(again)} was found again", is_plain=True)
        self._know(found.splits)
        not_again = sorted(set(self._ever) - self._ids)
        if not_again:
            raise Broken(FINDS_AGAIN, f"{named(not_again)} was not found again", is_plain=True)
        state = EnumeratorState(_as_json(found.state), found.is_last)
        splits: list[JsonObject] = [
            {"id": each.id, "position": _as_json(each.position)} for each in found.splits
        ]
        self._carry_out(self._enumeration.on_discovered(splits, state, 0.0))

    def _carry_out(self, instructions: Sequence[object]) -> None:
        for each in instructions:
            if isinstance(each, Assign):
                slot, splits = self._slots[each.subtask], splits_of(each.splits)
                slot.given |= {split.id for split in splits}
                slot.ended = slot.ended and not splits
                with keeping(READS, "add_splits"):
                    slot.reading.on_splits(splits, each.is_last, each.stops)
                slot.opened = slot.reader.open_splits()
            else:
                self._ask()

    def _know(self, splits: Sequence[Split]) -> None:
        with keeping(READS, "reading once from the beginning"):
            self._truth.learn(splits)
        self._ids |= {split.id for split in splits}
        self._ever |= {split.id: split for split in splits}


def _never_back(source: Source, position: JsonObject, later: JsonObject) -> bool:
    with keeping(FORWARD, "goes_back"):
        goes_back = source.goes_back(position, later)
    if goes_back:
        raise Broken(FORWARD, f"it was {position}, then {later}, which is before", is_plain=True)
    return False


def _as_json(value: JsonObject) -> JsonObject:
    try:
        read: JsonObject = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise Broken(JSON, f"{value!r:.200} is not ({error})", is_plain=True) from error
    if read != value:
        raise Broken(JSON, f"{value!r:.200} reads back as {read!r:.200}", is_plain=True)
    return read


def _lets_go(source: Source, context: SourceContext) -> bool:
    """Whether its readers are told what they may forget: then there is no way back before it."""
    reader = source.open((), context)
    reader.close()
    plain = (SourceReader.on_checkpoint_complete, BlockingReader.on_checkpoint_complete)
    return type(reader).on_checkpoint_complete not in plain


def _answer(rows: list[Hashable] | None) -> str:
    if rows is None:
        return "nothing yet"
    return f"{len(rows)} row(s)" if rows else "the end"
