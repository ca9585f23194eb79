"""What is measured of expressions: natively, and in Spark's own evaluator."""

from __future__ import annotations

from stillframe.bench.trials import RATE, Benchmark, More, Workload, faster, trial_of

_LANGUAGE: tuple[tuple[str, Workload, str, int, float], ...] = (
    ("json", "json_counts", "Lines of JSON with five fields, from_json, counted by key", 12, 3),
    ("words", "words", "Word count of text files, eight words a line", 12, 3),
    ("decimals", "decimals", "Decimals summed by key in windows of a minute", 8, 3),
    ("distinct", "distinct", "Different apps in windows of a minute, counted exactly", 8, 1),
    ("evaluator", "evaluated", "Keys that only Spark's evaluator computes, counted", 4, 0.5),
)
"""Names, workloads, titles, millions of records, and how much faster than Spark."""


def benchmarks() -> list[Benchmark]:
    """All of them, in the order they are run in."""
    spark = "Spark Structured Streaming"
    made = []
    for name, workload, title, millions, times in _LANGUAGE:
        of: More = {"source": "files", "input_records": millions * 1_000_000, "is_quick": True}
        trials = (
            trial_of("Stillframe", "stillframe", workload, **of),
            trial_of(spark, "spark", workload, backend="rocksdb", **of),
        )
        targets = (faster(spark, times, spark),)
        made.append(Benchmark(f"language-{name}", title, RATE, trials, targets))
    return made
