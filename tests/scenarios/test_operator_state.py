"""State without keys on plain processes: through a kill, and from 2 subtasks to 3, 1 and 4."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe import StreamFunction, SubtaskStates
from stillframe.cli.main import main
from stillframe.connectors.file_sink import FileSink
from stillframe.coordinator.history import AttemptStarted
from stillframe.graph.logical import Node, ProcessStream, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.testing.sources import ScriptedSource, Wait

SCHEMA = pa.schema([("id", pa.int64())])
SAID = pa.schema([("what", pa.string()), ("n", pa.int64())])
PARTS = 5
ROWS = 1_000


class Holds(StreamFunction):
    """Says every record at the end, how many it has taken, and how often its job was restored."""

    def open(self, states: SubtaskStates) -> None:
        self.held = states.list("held", "id long")
        self.counts = states.union_list("counts", "subtask int, n long")
        self.opened = states.broadcast("opened", "what string", "n long")
        before = self.counts.get()
        mine = (row for row in before if row.subtask % states.parallelism == states.subtask)
        self.count, self.subtask = sum(row.n for row in mine), states.subtask
        seen = self.opened.get(("job",))
        self.opened.put(("job",), (0 if seen is None else seen.n + 1,))
        self._keep()

    def process(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        self.held.extend((each,) for each in batch["id"].to_pylist())
        self.count += batch.num_rows
        self._keep()
        return []

    def finish(self) -> Iterator[pa.RecordBatch]:
        rows = [("held", row.id) for row in self.held.get()]
        rows += [("count", self.count), ("opened", self.opened.get(("job",)).n)]
        yield pa.record_batch([pa.array(part) for part in zip(*rows, strict=True)], schema=SAID)

    def _keep(self) -> None:
        self.counts.put([(self.subtask, self.count)])


def ids(split, part):
    first = (split * PARTS + part) * ROWS
    return range(first, first + ROWS)


def parts(split, gates):
    """A thousand records, a pause until the gate is open, and so on."""
    for part in range(PARTS):
        for at in range(0, ROWS, 100):
            yield pa.record_batch([list(ids(split, part))[at : at + 100]], schema=SCHEMA)
        if part < len(gates):
            yield Wait(gates[part])


def plan_of(page_views, source, parallelism, *, is_chained):
    read = Node(Read(source), SCHEMA, given_uid="read", parallelism=None if is_chained else 2)
    own = None if is_chained else parallelism
    held = Node(ProcessStream(Holds, "holds"), SAID, (read,), given_uid="hold", parallelism=own)
    sink = FileSink(str(page_views.home / "said"), "parquet", SAID)
    write = Node(Write(sink), SAID, (held,), given_uid="write")
    return build_plan("holding", [write], max(2, parallelism) if own else parallelism)


def check_what_is_told(page_views, capsys):
    """Lists as a whole, and of copies one."""
    directory = f"{page_views.location}/holding"
    assert main(["inspect", directory, "--json", "--rows", "2"]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    (operator,) = [each for each in job["checkpoints"][-1]["operators"] if each["uid"] == "hold"]
    told = {state["name"]: state for state in operator["states"]}
    assert {name: state["rows"] for name, state in told.items()} == {
        "held": 2 * ROWS,
        "counts": 2,
        "opened": 1,
    }
    assert told["opened"]["sample"] == [
        {"__user_key": "{'what': 'job'}", "__value": "{'n': 0}"},
    ]


@pytest.mark.parametrize(("is_chained", "backend"), [(True, "fs"), (False, "memory")])
def test_lists_unions_and_copies_are_exact_through_a_kill_and_2_3_1_4_subtasks(
    page_views, capsys, is_chained, backend
):
    gates = [page_views.gate(f"gate-{number}") for number in range(PARTS - 1)]
    source = ScriptedSource(SCHEMA, tuple(tuple(parts(split, gates)) for split in range(2)))
    restores = 0
    for number, parallelism in enumerate((2, 3, 1, 4)):
        plan = plan_of(page_views, source, parallelism, is_chained=is_chained)
        running = page_views.start(plan, stateBackend=backend)
        if number:
            assert running.wait(AttemptStarted).restored_from is not None
            gates[number - 1].open()
            restores += 1
        running.wait_for_records(2 * ROWS)
        running.next_checkpoint()
        if parallelism == 3:
            running.kill(slot=0, attempt=running.wait(AttemptStarted).attempt)
            assert running.wait(AttemptStarted, number=2).restored_from is not None
            running.next_checkpoint()
            restores += 1
        if number < 3:
            running.query.stop()
        if number == 0:
            check_what_is_told(page_views, capsys)
    gates[-1].open()
    running.finish()

    rows = pq.read_table(page_views.home / "said").to_pylist()
    held = Counter(row["n"] for row in rows if row["what"] == "held")
    assert held == Counter(each for s in range(2) for p in range(PARTS) for each in ids(s, p))
    assert sum(row["n"] for row in rows if row["what"] == "count") == 2 * PARTS * ROWS
    last = [row["n"] for row in rows if row["what"] == "opened"]
    assert max(last) == restores
    if not is_chained:  # where a source has nothing to read, its subtask ends before the others
        assert last == [restores] * 4
