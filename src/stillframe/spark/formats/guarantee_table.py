"""The tables of docs/guarantees.md: of every source and sink its guarantee, how it keeps it, what
it needs of the other system, and which tests show it.

    python -m stillframe.spark.formats.guarantee_table

prints both, with the formats that installed packages bring.
"""

from __future__ import annotations

from collections.abc import Iterator

from stillframe.api.formats import Format
from stillframe.api.sinks import Sink
from stillframe.api.sources import Source
from stillframe.connectors.frame import FrameSource
from stillframe.connectors.function_sink import FunctionSink
from stillframe.connectors.staged import StagedSink
from stillframe.spark.formats.choosing import Word, chosen_sink, chosen_source, registered
from stillframe.spark.formats.ours import OWN_SINKS, OWN_SOURCES, OwnFormat

_BESIDE: dict[Word, dict[str, OwnFormat]] = {
    "source": {
        "still.stream(df)": OwnFormat(
            kind=FrameSource,
            how="by rows, if the DataFrame's plan is known to repeat itself; otherwise it is copied"
            " into files first",
            needs="a DataFrame that reads the same data again",
            tested_by=("tests/spark/test_frames.py",),
        ),
    },
    "sink": {
        "foreachBatch": OwnFormat(
            kind=StagedSink,
            guarantee=StagedSink.guarantee,
            how="after a failure the last epoch may come again, with the same mark: with"
            " `stillframe.exactly_once(function)`, for one that ignores what it has seen, it is"
            " exactly-once",
            needs="a checkpoint location that driver and executors share",
            tested_by=(
                "tests/connectors/test_staged.py",
                "tests/scenarios/test_epochs_on_the_driver.py",
                "tests/spark/test_exactly_once.py",
            ),
        ),
        "to_function(deliver)": OwnFormat(
            kind=FunctionSink,
            guarantee="at-least-once",
            how="after a failure the same rows may come again with the same key: with"
            " `idempotent=True`, for a function that ignores a key it has seen, it is exactly-once",
            needs="a function that raises when it cannot deliver; for exactly-once, one that"
            " knows a key again",
            tested_by=(
                "tests/connectors/test_function_sink.py",
                "tests/spark/test_brought_formats.py",
            ),
        ),
    },
}
"""What is no format, but an end of a job all the same."""
_HEADS: dict[Word, str] = {
    "source": "| source | can rewind | how | what it needs | tested by |",
    "sink": "| sink | guarantee | how | what it needs | tested by |",
}


def guarantee_table(word: Word, *, with_registered: bool = False) -> list[str]:
    """The lines of the table."""
    own = OWN_SOURCES if word == "source" else OWN_SINKS
    rows = [_row(name, each) for name, each in {**own, **_BESIDE[word]}.items()]
    if with_registered:
        rows += [_row(name, each) for name, each in _registered(word)]
    return [_HEADS[word], "|---|---|---|---|---|", *rows]


def _registered(word: Word) -> Iterator[tuple[str, type[Format]]]:
    choose = chosen_source if word == "source" else chosen_sink
    for name in dict.fromkeys(name for name, _ in registered(word)):
        found = choose(name).of
        assert isinstance(found, type), "a package registers classes"
        yield name, found


def _row(name: str, of: OwnFormat | type[Format]) -> str:
    kind = of.kind if isinstance(of, OwnFormat) else of
    if issubclass(kind, Source):
        word = "yes" if kind.rewindable else "no"
    else:
        assert issubclass(kind, Sink)
        given = of.guarantee if isinstance(of, OwnFormat) else kind.guarantee
        word = given if isinstance(given, str) else "by its options"  # a property, of instances
    tests = ", ".join(f"`{test}`" for test in of.tested_by)
    cells = (f"`{name}`", word, of.how, of.needs, tests)
    return f"| {' | '.join(cell or 'not said' for cell in cells)} |"


if __name__ == "__main__":
    for table in ("source", "sink"):
        print("\n".join(guarantee_table(table, with_registered=True)), end="\n\n")
