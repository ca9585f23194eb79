"""The guarantee of a whole job, by the parts that weaken it."""

from dataclasses import dataclass
from itertools import product

import pyarrow as pa
import pytest

from stillframe.api.sinks import Sink, SinkGuarantee
from stillframe.config import JobConfig, job_config
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.generate import ClickSource, RateSource
from stillframe.connectors.parquet import ParquetSource
from stillframe.connectors.socket import SocketSource
from stillframe.connectors.staged import StagedSink
from stillframe.errors import BuildError, StartRefused
from stillframe.graph.expressions import Literal
from stillframe.graph.guarantees import (
    Guarantee,
    best_guarantee_of,
    guarantee_of,
    refuse_weaker,
    weigh,
)
from stillframe.graph.logical import DropDuplicates, Filter, MapInArrow, Node, Read, Write
from stillframe.graph.plan import build_plan

SCHEMA = pa.schema([("value", pa.string())])
FILES = FileSink("/out", "parquet", SCHEMA)
FOREACH_BATCH = StagedSink("/staged", None, SCHEMA, "foreachBatch each")
SOCKET = SocketSource("localhost", 9999)
WORDS = {"exactly-once", "at-least-once", "at-most-once", "none"}


@dataclass(frozen=True)
class OwnSink(Sink):
    """Of somebody who knows what it does and did not say why."""

    guarantee: SinkGuarantee = "exactly-once"

    def open_writer(self, context):
        return DiscardSink().open_writer(context)

    def open_committer(self, context):
        return DiscardSink().open_committer(context)

    def describe(self):
        return "own"


@pytest.mark.parametrize("mode", ["exactly-once", "stop-the-world"])
@pytest.mark.parametrize("source", [ClickSource(), RateSource(), ParquetSource("/in", SCHEMA)])
@pytest.mark.parametrize("sink", [FILES, DiscardSink()])
def test_sources_that_rewind_and_sinks_that_commit_give_exactly_once(mode, source, sink):
    assert weigh([source], [sink], mode) == Guarantee("exactly-once", ())


@pytest.mark.parametrize(
    ("source", "sink", "mode", "word", "because"),
    [
        (SOCKET, FILES, "exactly-once", "at-most-once", "socket localhost:9999 cannot be read"),
        (SOCKET, DiscardSink(), "exactly-once", "at-most-once", "socket localhost:9999 cannot"),
        (ClickSource(), FOREACH_BATCH, "exactly-once", "at-least-once", "foreachBatch each is"),
        (ClickSource(), FILES, "at-least-once", "at-least-once", "checkpointMode is at-least-once"),
        (ClickSource(), FILES, "at-most-once", "at-most-once", "checkpointMode is at-most-once"),
        (ClickSource(), OwnSink("at-least-once"), "exactly-once", "at-least-once", "own may be"),
        (ClickSource(), OwnSink("at-most-once"), "exactly-once", "at-most-once", "own may not be"),
    ],
)
def test_what_weakens_it_is_named(source, sink, mode, word, because):
    guarantee = weigh([source], [sink], mode)

    assert guarantee.word == word
    [reason] = guarantee.reasons
    assert reason.startswith(because)


def test_what_may_lose_and_what_may_double_leave_nothing_together():
    guarantee = weigh([SOCKET], [FOREACH_BATCH], "exactly-once")

    assert guarantee.word == "none"
    assert len(guarantee.reasons) == 2
    assert str(guarantee).startswith("none: socket localhost:9999 cannot be read again")


def test_what_is_never_read_again_cannot_count_again():
    """At-least-once doubles what is replayed, and a socket replays nothing."""
    assert weigh([SOCKET], [FILES], "at-least-once").word == "at-most-once"
    assert weigh([SOCKET, ClickSource()], [FILES], "at-least-once").word == "none"


def test_one_weak_part_among_strong_ones_is_enough():
    assert weigh([ClickSource(), SOCKET], [FILES], "exactly-once").word == "at-most-once"
    assert weigh([ClickSource()], [FILES, FOREACH_BATCH], "exactly-once").word == "at-least-once"


def test_the_same_reason_is_given_once():
    assert len(weigh([SOCKET, SOCKET], [FILES], "exactly-once").reasons) == 1


def planned(*steps, slots=2, parallelism=None):
    """A job of these steps after one source and before one sink."""
    node = Node(Read(ClickSource()), SCHEMA, parallelism=parallelism)
    for step in steps:
        node = Node(step, SCHEMA, (node,))
    return build_plan("job", [Node(Write(FILES), SCHEMA, (node,))], slots)


AT_LEAST_ONCE = job_config(
    {
        "checkpointLocation": "/chk",
        "checkpointInterval": "1 second",
        "checkpointMode": "at-least-once",
    }
)
FILTER = Filter(Literal(pa.scalar(True)))
DISTINCT = DropDuplicates(("value",))


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (planned(), "exactly-once"),
        (planned(FILTER, MapInArrow(iter, "tidy"), FILTER), "exactly-once"),
        (planned(FILTER, DISTINCT), "at-least-once"),
        (planned(FILTER, DISTINCT, slots=1), "exactly-once"),
        (planned(DISTINCT, parallelism=1), "exactly-once"),
        (planned(DISTINCT, DISTINCT, parallelism=1), "at-least-once"),
    ],
    ids=["nothing", "map and filter", "by key", "one slot", "one source", "one source, two keys"],
)
def test_at_least_once_is_exactly_once_where_no_subtask_has_a_second_channel(plan, word):
    guarantee = guarantee_of(plan, AT_LEAST_ONCE)

    assert guarantee.word == word
    assert (word == "exactly-once") == (not guarantee.reasons)


def test_what_is_known_without_a_plan_does_not_refuse_what_a_plan_may_allow():
    operators = [Read(ClickSource()), Write(FILES)]

    assert best_guarantee_of(operators, AT_LEAST_ONCE).word == "exactly-once"
    assert best_guarantee_of([Read(SOCKET)], AT_LEAST_ONCE).word == "at-most-once"


def test_without_checkpoints_there_is_none():
    guarantee = guarantee_of(planned(), JobConfig())

    assert guarantee.word == "none"
    assert "checkpointLocation" in guarantee.reasons[0]


@pytest.mark.parametrize(
    ("sources", "sinks", "mode"),
    list(
        product(
            [[ClickSource()], [SOCKET], [ClickSource(), SOCKET]],
            [[FILES], [FOREACH_BATCH], [DiscardSink()], [OwnSink("at-most-once"), FOREACH_BATCH]],
            ["exactly-once", "at-least-once", "at-most-once", "stop-the-world"],
        )
    ),
)
def test_it_is_exactly_once_if_and_only_if_nothing_speaks_against_it(sources, sinks, mode):
    guarantee = weigh(sources, sinks, mode)

    assert guarantee.word in WORDS
    assert (guarantee.word == "exactly-once") == (not guarantee.reasons)
    weaker = weigh([*sources, SOCKET], [*sinks, FOREACH_BATCH], mode)
    assert weaker.word == "none"
    assert set(guarantee.reasons) <= set(weaker.reasons)


@pytest.mark.parametrize(
    ("required", "word", "is_refused"),
    [
        ("exactly-once", "exactly-once", False),
        ("exactly-once", "at-least-once", True),
        ("exactly-once", "at-most-once", True),
        ("exactly-once", "none", True),
        ("at-least-once", "exactly-once", False),
        ("at-least-once", "at-least-once", False),
        ("at-least-once", "at-most-once", True),
        ("at-least-once", "none", True),
        (None, "none", False),
    ],
)
def test_a_job_that_would_give_less_than_required_is_refused_with_all_reasons(
    required, word, is_refused
):
    guarantee = Guarantee(word, () if word == "exactly-once" else ("the moon is full", "and so on"))
    config = JobConfig(required_guarantee=required)

    if not is_refused:
        refuse_weaker(guarantee, config)
        return
    with pytest.raises(StartRefused, match=f"is {word}: the moon is full; and so on"):
        refuse_weaker(guarantee, config)


def test_the_option_takes_what_can_be_required_and_nothing_else():
    assert job_config({"requireGuarantee": "EXACTLY_ONCE"}).required_guarantee == "exactly-once"
    with pytest.raises(BuildError, match="is one of exactly-once, at-least-once, not 'at-most"):
        job_config({"requireGuarantee": "at-most-once"})
