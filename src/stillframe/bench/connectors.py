"""What is measured of connectors, each with a server of its own: Kafka, databases, a bucket."""

from __future__ import annotations

from stillframe.bench.trials import P99, RATE, Benchmark, More, Target, faster, trial_of

_KAFKA_RECORDS = 6_000_000
_KAFKA_VALUES = 24_000_000
"""Of fewer, the job's beginning and end would be more than a few hundredths of the time."""
_DATABASE_RECORDS = {"postgres": 12_000_000, "mysql": 2_000_000}
_S3_RECORDS = 36_000_000
_LINK_BYTES_PER_SECOND = 64_000_000

GROUPS = {
    "kafka": ("kafka-counts", "kafka-values", "kafka-sink", "kafka-latency"),
    "sinks": ("postgres-sink", "mysql-sink", "s3-sink", "s3-link"),
    "language": (
        "language-json",
        "language-words",
        "language-decimals",
        "language-distinct",
        "language-evaluator",
    ),
}
"""Benchmarks that one name asks for."""


def benchmarks() -> tuple[Benchmark, ...]:
    """All of them, in the order they are run in."""
    return (
        _kafka_counts(),
        _kafka_values(),
        _kafka_sink(),
        _kafka_latency(),
        _database_sink("postgres", "PostgreSQL", "COPY by hand"),
        _database_sink("mysql", "MySQL", "LOAD DATA by hand"),
        _s3_sink(),
        _s3_link(),
    )


def _kafka_counts() -> Benchmark:
    of: More = {"source": "kafka", "input_records": _KAFKA_RECORDS, "is_quick": True}
    spark, flink = "Spark Structured Streaming", "Flink KafkaSource"
    return Benchmark(
        "kafka-counts",
        "Kafka to a count by key: JSON of five fields, one partition for each slot",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "kafka_counts", **of),
            trial_of(spark, "spark", "kafka_counts", backend="rocksdb", **of),
            trial_of(flink, "flink", "kafka_counts", "datastream", **of),
        ),
        (
            faster("Spark's Kafka source", 3, spark),
            faster("Flink's KafkaSource with a JSON row format", 1, flink),
        ),
    )


def _kafka_values() -> Benchmark:
    of: More = {"source": "kafka", "input_records": _KAFKA_VALUES, "is_quick": True}
    bare = "Consumer.consume alone"
    return Benchmark(
        "kafka-values",
        "Kafka's raw values",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "kafka_values", **of),
            trial_of(bare, "client", "kafka_values", **of),
        ),
        (faster(bare, 0.8, bare),),
    )


def _kafka_sink() -> Benchmark:
    of: More = {"source": "parquet", "input_records": _KAFKA_RECORDS, "is_quick": True}
    bare = "Producer alone, in transactions"
    return Benchmark(
        "kafka-sink",
        "Rows to Kafka, exactly once",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "kafka_sink", **of),
            trial_of(bare, "client", "kafka_sink", **of),
        ),
        (faster("a bare transactional producer of the same rows", 0.6, bare),),
    )


_VISIBLE_EACH_MS = 200


def _kafka_latency() -> Benchmark:
    label = f"Stillframe, 10,000/s, a checkpoint every {_VISIBLE_EACH_MS} ms"
    at: More = {"rate": 10_000, "checkpoint_interval_ms": _VISIBLE_EACH_MS, "is_quick": True}
    return Benchmark(
        "kafka-latency",
        "Kafka to Kafka, exactly once: from produced to visible at read_committed",
        P99,
        (trial_of(label, "stillframe", "kafka_latency", **at),),
        (
            Target(
                "p99 at 10,000 records/s, within the interval and 100 ms",
                P99,
                label,
                at_most=_VISIBLE_EACH_MS + 100,
            ),
        ),
        "percentiles",
    )


def _database_sink(name: str, product: str, by_hand: str) -> Benchmark:
    of: More = {"source": "parquet", "input_records": _DATABASE_RECORDS[name]}
    workload, spark = f"{name}_sink", "Spark's JDBC writer"
    return Benchmark(
        f"{name}-sink",
        f"Rows to {product}, exactly once",
        RATE,
        (
            trial_of("Stillframe", "stillframe", workload, is_quick=True, **of),
            trial_of(by_hand, "client", workload, is_quick=True, **of),
            trial_of(spark, "spark", workload, is_quick=True, **of),
            trial_of(f"{spark}, its driver rewrites batches", "spark", workload, "rewritten", **of),
        ),
        (
            faster(f"{by_hand} of the same rows", 0.85, by_hand),
            faster(f"{spark} with its usual settings", 5, spark),
        ),
    )


def _s3_sink() -> Benchmark:
    of: More = {"source": "parquet", "input_records": _S3_RECORDS, "is_quick": True}
    bare, by_hand = "obstore alone, the same bytes", "pyarrow and obstore by hand"
    return Benchmark(
        "s3-sink",
        "Parquet to S3, exactly once",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "s3_sink", **of),
            trial_of(bare, "client", "s3_sink", "bytes", **of),
            trial_of(by_hand, "client", "s3_sink", "rows", **of),
        ),
        (faster("the bare upload of the same bytes", 0.8, bare),),
    )


def _s3_link() -> Benchmark:
    of: More = {
        "source": "parquet",
        "input_records": _S3_RECORDS,
        "link_bytes_per_second": _LINK_BYTES_PER_SECOND,
    }
    bare = "obstore alone, the same bytes"
    return Benchmark(
        "s3-link",
        f"Parquet to S3, exactly once, over a link of {_LINK_BYTES_PER_SECOND // 1_000_000} MB/s",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "s3_sink", **of),
            trial_of(bare, "client", "s3_sink", "bytes", **of),
        ),
        (faster("the bare upload of the same bytes", 0.8, bare),),
    )
