"""What coordinator and slots tell each other survives the way."""

import json
from dataclasses import replace

import pytest

from stillframe.errors import Blame, StillframeError
from stillframe.protocol.manifests import (
    ChannelState,
    FileHandle,
    KeyedState,
    OperatorSnapshot,
    PendingCommit,
    SubtaskTimings,
)
from stillframe.protocol.messages import (
    AbortCheckpoint,
    Acknowledged,
    AssignSplits,
    CaughtUp,
    Committed,
    CompleteCheckpoint,
    Declined,
    Drained,
    EndSlot,
    Failed,
    Progress,
    Running,
    SourceLag,
    StartSlot,
    StillThere,
    TakeFile,
    TriggerCheckpoint,
    message_to_json,
    order_from_json,
    report_from_json,
)
from stillframe.protocol.restore import SubtaskState
from stillframe.protocol.snapshots import EventTimes

KEYED = KeyedState("aggregates", FileHandle("chk-3/a.arrow", 10, 4_000_000_000), (0, 5), 7, "x")
COMMIT = PendingCommit(3, {"file": "ä"})
STATE = SubtaskState(
    keyed=(KEYED,), items=({"id": "a", "position": {"next": 1}},), commits=(COMMIT,)
)
SNAPSHOT = OperatorSnapshot("count", 1, keyed=(KEYED,), items=({"id": "a"},), commits=(COMMIT,))
COPY = SubtaskState(broadcast=(KEYED,), finished=True, ended=True)
RULES = OperatorSnapshot("rules", 0, broadcast=(KEYED,), finished=True)
UNDER_WAY = ChannelState("a>b", 0, 1, "output", FileHandle("shared/1/c", 30, 5), 10, 20, 3)
TIMINGS = SubtaskTimings(1.5, 0.0, 2.0, 30.25, 10, 10, 0, task="read -> count", subtask=1)
TIMES = EventTimes("time", 3, -5, 1_700_000_000_000_000, 2.5)
BLAME = Blame(
    "function f", "ValueError", True, "job.py:3 in f", "Traceback …", "map_1", "record 2", row="2"
)

ORDERS = [
    StartSlot({0: ("host-a", 1), 1: ("host-b", 2)}, {("count", 1): STATE}, 3, 2),
    StartSlot({}, {}, None, None),
    StartSlot({}, {("rules", 0): COPY}, 3, 2, {("a>b", 0): (UNDER_WAY,), ("a>b", 1): ()}),
    TakeFile(FileHandle("shared/1/c", 5, 907060870, b"hello")),
    TriggerCheckpoint(4, 1_700_000_000_000),
    TriggerCheckpoint(4, 1_700_000_000_000, alignment_timeout_ms=0),
    CompleteCheckpoint(4, 3),
    AbortCheckpoint(4),
    AssignSplits("clicks", 1, ({"id": "a", "position": {"next": 0}},), False),
    AssignSplits("clicks", 0, (), True),
    AssignSplits("clicks", 0, (), True, stops=True),
    EndSlot(),
    StillThere(),
    StillThere((0, 2)),
]
REPORTS = [
    Running(),
    Acknowledged(0, 1, 4, (SNAPSHOT,), TIMINGS),
    Acknowledged(0, 1, 4, (SNAPSHOT, RULES), TIMINGS, (UNDER_WAY,)),
    Acknowledged(0, 1, 4, (SNAPSHOT,), replace(TIMINGS, records_read=9, event_times=(TIMES,))),
    Declined(4, "no space left"),
    Committed(1, 0, 4),
    Drained(1, 0),
    CaughtUp(1, 0),
    Progress(1_000_000, 5),
    Progress(1_000_000, 5, 17),
    Progress(1_000_000, 5, records_malformed=3),
    Progress(1, 1, lags=(SourceLag("views", "kafka", 3, 1.5), SourceLag("apps", "files", 1, None))),
    Failed("function f raised ValueError", "permanent"),
    Failed("function f raised ValueError", "other", "map", 1, BLAME),
]


def over_the_wire(message):
    return json.loads(json.dumps(message_to_json(message)))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_arrives_as_it_was_sent(order):
    assert order_from_json(over_the_wire(order)) == order


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_arrives_as_it_was_sent(report):
    assert report_from_json(over_the_wire(report)) == report


@pytest.mark.parametrize("message", [{}, {"type": "Dance"}, {"type": 1}, {"type": "Committed"}])
def test_what_is_not_understood_asks_for_equal_versions(message):
    for read in (order_from_json, report_from_json):
        with pytest.raises(StillframeError, match="same version of stillframe"):
            read(message)


def test_an_order_is_no_report():
    with pytest.raises(StillframeError):
        report_from_json(message_to_json(EndSlot()))


def test_a_failure_has_one_of_the_known_causes():
    with pytest.raises(StillframeError, match="bad luck"):
        report_from_json({"type": "Failed", "reason": "x", "cause": "bad luck"})


def test_an_acknowledgement_knows_every_file_it_needs_once():
    part = Acknowledged(0, 1, 4, (SNAPSHOT, RULES), TIMINGS, (UNDER_WAY, UNDER_WAY))

    assert part.files() == (KEYED.file, UNDER_WAY.file)


def test_what_an_acknowledgement_holds_itself_is_no_file_it_needs():
    small = replace(KEYED, file=FileHandle("shared/1/c", 5, 907060870, b"hello"))
    under_way = replace(UNDER_WAY, file=small.file)
    part = Acknowledged(
        0, 1, 4, (SNAPSHOT, replace(RULES, broadcast=(small,))), TIMINGS, (under_way,)
    )

    assert part.files() == (KEYED.file,)
    [_, rules] = report_from_json(over_the_wire(part)).operators
    assert rules.broadcast[0].file.data == b"hello"
