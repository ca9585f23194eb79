"""Another system with transactions that take rows and a mark, and what it may do to a job.

Theory of operation
-------------------
The sink that writes to it is the real one (`connectors/transactional.py`), its files are staged on
the simulated storage; only the system itself is ours. It has rows, the newest mark of each writer,
and for each writer a number that grows with every `begin`: a transaction is done only while the
number it began with is the newest, so whoever began before is shut out.

What goes wrong: it is away for a while, or for one writer only, as if somebody held a lock; a
connection breaks between `begin` and `write`; a transaction is given up, and nothing of it is
there; it is done and the answer gets lost; or it is under way when the client gives up waiting, and
is done seconds later, if nobody has begun since. Between any two requests such a late one may
arrive.

It forgets marks: those whose commit was reported as done, because only then there is a receipt. One
that forgot a mark before would make the job write twice, and nobody could tell: that it remembers
for so long is what we ask of another system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pyarrow as pa

from stillframe.api.sinks import (
    Committer,
    CommitterContext,
    Prepared,
    SinkContext,
    SinkWriter,
    Target,
)
from stillframe.connectors.transactional import (
    StagingWriter,
    TransactionalCommitter,
    TransactionalSink,
)
from stillframe.errors import Unavailable
from stillframe.ids import CheckpointId, Epoch, Mark, Writer
from stillframe.testing.simulation.outside import OnVisible, Row, rows_of
from stillframe.testing.simulation.world import World

_LATE_SECONDS_MAX = 4.0
_BREAKS_MAX = 12
_LATE_CHANCE = 0.3
"""That a transaction under way arrives right at the next request, and not when it likes."""


@dataclass(frozen=True, slots=True)
class Written:
    """A transaction that was done."""

    mark: Mark
    rows: list[Row]


@dataclass(slots=True)
class MarkedOutside:
    """The other system, as one sink sees it."""

    world: World
    random: Random
    """Its own, so that what it does changes nothing else that is drawn."""
    fails: float = 0.0
    """The share of requests in which something breaks."""
    on_visible: OnVisible = lambda writer, rows, prepared_for: None
    prepared_for: Callable[[Mark], CheckpointId] = lambda mark: mark.checkpoint_id
    """What a mark says to those who look on."""
    written: list[Written] = field(default_factory=list)
    marks: dict[Writer, CheckpointId] = field(default_factory=dict)
    noted: list[Mark] = field(default_factory=list)
    """All there have ever been."""
    writers: int = 0
    """How many have been opened."""
    _began: dict[Writer, int] = field(default_factory=dict)
    _under_way: list[tuple[int, Written]] = field(default_factory=list)
    _breaks_left: int = _BREAKS_MAX
    _away_until: float = 0.0
    _locked: tuple[int | None, float] = (None, 0.0)
    """A subtask whose marks nobody gets at, and until when."""
    _reported: set[Mark] = field(default_factory=set)

    # --- what it is asked for ---

    def shut_out(self, writer: Writer) -> int:
        """From now on only a transaction that has the answer is done for this writer."""
        self._let_arrive()
        self._began[writer] = self._began.get(writer, 0) + 1
        return self._began[writer]

    def newest_mark(self, writer: Writer) -> CheckpointId | None:
        self._let_arrive()
        return self.marks.get(writer)

    def check_there(self, writer: Writer | None = None) -> None:
        """Raise what a client sees of a system that it cannot reach."""
        subtask, until = self._locked
        is_locked = writer is not None and writer.subtask == subtask and self.world.now < until
        is_away = not self.world.is_calm and self.world.now < self._away_until
        if is_locked or is_away:
            raise self.random.choice([Unavailable, ConnectionError, TimeoutError])("it is away")

    def perhaps_break(self) -> None:
        if self._breaks():
            raise ConnectionError("the connection is lost")

    def transact(self, began: int, written: Written) -> None:
        """All of it or nothing; a client that gets no answer does not know which."""
        self._let_arrive()
        fate = self.random.choice(["given up", "done", "late"]) if self._breaks() else "answered"
        if fate == "given up":
            raise ConnectionError("the connection is lost")
        if fate == "late":
            self._under_way.append((began, written))
            seconds = self.random.random() * _LATE_SECONDS_MAX
            self.world.after(seconds, lambda: self._arrive(began, written))
            raise TimeoutError("no answer")
        self.do(began, written)
        if fate == "done":
            raise TimeoutError("no answer")

    def do(self, began: int, written: Written) -> None:
        """Rows and mark, unless somebody has begun since."""
        mark = written.mark
        if self._began.get(mark.writer) != began:
            raise ConnectionError(f"{mark.writer} is shut out")
        self.put_rows(written)
        self.put_mark(mark)

    def put_rows(self, written: Written) -> None:
        self.written.append(written)
        self.world.note("written:", written.mark, len(written.rows), "rows")
        writer = written.mark.writer
        prepared_for = self.prepared_for(written.mark)
        self.on_visible(f"{writer.uid}-{writer.subtask}", written.rows, prepared_for)

    def put_mark(self, mark: Mark) -> None:
        self.marks[mark.writer] = mark.checkpoint_id
        self.noted.append(mark)

    def _breaks(self) -> bool:
        """In peace too, as most is committed then; but not for ever."""
        breaks = self._breaks_left > 0 and self.random.random() < self.fails
        self._breaks_left -= breaks
        return breaks

    def _let_arrive(self) -> None:
        for began, written in list(self._under_way):
            if self.random.random() < _LATE_CHANCE:
                self._arrive(began, written)

    def _arrive(self, began: int, written: Written) -> None:
        if (began, written) not in self._under_way:
            return
        self._under_way.remove((began, written))
        if self._began.get(written.mark.writer) == began:
            self.do(began, written)

    # --- what happens to it ---

    def go_away(self, seconds: float) -> None:
        self._away_until = self.world.now + seconds

    def lock(self, subtask: int, seconds: float) -> None:
        self._locked = subtask, self.world.now + seconds

    def on_reported(self, mark: Mark) -> None:
        """The committer says that this is done, so it has noted a receipt."""
        self._reported.add(mark)

    def forget(self) -> None:
        """The marks for which there are receipts; a late transaction is none of them."""
        self.marks = {
            writer: number
            for writer, number in self.marks.items()
            if Mark(writer, number) not in self._reported
        }

    def restart(self) -> None:
        """What was under way is given up."""
        self._under_way.clear()

    # --- for those who look on ---

    def is_reported(self, mark: Mark) -> bool:
        """Whether a committer has said that this is done."""
        return mark in self._reported


@dataclass(frozen=True, eq=False)
class MarkedSink(TransactionalSink):
    """The real sink, over the simulated system; commits in the slots, or at the coordinator."""

    outside: MarkedOutside
    name: str
    at_coordinator: bool

    @property
    def commits_at_coordinator(self) -> bool:  # type: ignore[override]
        return self.at_coordinator

    def open_writer(self, context: SinkContext) -> SinkWriter:
        assert context.staging is not None
        self.outside.writers += 1  # a seed gives the same names again
        token = str(self.outside.writers)
        return StagingWriter(
            context.staging, context, self.check_batch, _WhenAsked(), lambda: token
        )

    def open_committer(self, context: CommitterContext) -> Committer:
        return _ReportingCommitter(self, context)

    def open_target(self) -> Target:
        self.outside.check_there()
        return MarkedTarget(self.outside)

    def describe(self) -> str:
        return self.name


class MarkedTarget(Target):
    """One connection, as the contract wants it: first shut out, then look."""

    def __init__(self, outside: MarkedOutside) -> None:
        self._outside = outside
        self._began = 0

    def begin(self, writer: Writer) -> CheckpointId | None:
        self._outside.check_there(writer)
        self._began = self._outside.shut_out(writer)
        self._outside.perhaps_break()
        return self._outside.newest_mark(writer)

    def write(
        self,
        mark: Mark,
        rows: Iterator[pa.RecordBatch],
        refuse: Callable[[pa.RecordBatch, str], None],
    ) -> None:
        made = [row for batch in rows for row in rows_of(batch)]
        self._outside.transact(self._began, Written(mark, made))


class _ReportingCommitter(TransactionalCommitter):
    def __init__(self, sink: MarkedSink, context: CommitterContext) -> None:
        super().__init__(sink, context)
        self._outside = sink.outside

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        super().commit(epoch, prepared)
        for part in prepared:
            if part.committables:
                self._outside.on_reported(part.mark)


class _WhenAsked(Executor):
    """No thread: what is submitted is done when somebody asks for its result, and then once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return _Asked(lambda: fn(*args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What nobody asked for is dropped."""


class _Asked(Future[Any]):
    def __init__(self, made: Callable[[], Any]) -> None:
        super().__init__()
        self._made = made

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._made())
        return super().result(timeout)
