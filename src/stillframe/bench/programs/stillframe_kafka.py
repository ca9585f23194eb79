"""Stillframe: page views from Kafka counted by app, Kafka's raw values, and rows to Kafka.

    python stillframe_kafka.py '{"workload": "kafka_counts", "brokers": "127.0.0.1:9092", …}'

All that is in a topic is read, one partition for each slot, exactly once, through the public API.
`kafka_counts` reads values as JSON of five fields and counts them by app; `kafka_values` hands the
values as they are to the sink `noop`; `kafka_sink` reads urls from Parquet and writes them there,
where all of them must be visible to a reader with `read_committed`.
"""

import time

STARTED_S = time.monotonic()

import kafka_topics  # noqa: E402
import stillframe_session as ours  # noqa: E402

FIELDS = "app_id string, user_id long, url string, at long, referrer string"


def main():
    params = ours.params_given()
    build, counted, output_mode = {
        "kafka_counts": (counts, counted_in_state, "update"),
        "kafka_values": (values, number_in_topic(params), "append"),
        "kafka_sink": (urls, ours.added_to(number_written(params)), "append"),
    }[params["workload"]]
    sink = None
    if params["workload"] == "kafka_sink":
        sink = {"format": "kafka", "topic": params["output"], **brokers(params)}
    ours.run_twice(params, STARTED_S, build, counted, output_mode, sink)


def brokers(params):
    return {"kafka.bootstrap.servers": params["brokers"]}


def source(still, params, name):
    reader = still.readStream.format("kafka").options(**brokers(params))
    return reader.option("subscribe", topic_of(params, name)).option("startingOffsets", "earliest")


def topic_of(params, name):
    return params["warmup_input" if name == "warm-up" else "input"]


def counts(still, params, name, records):
    views = source(still, params, name).option("valueFormat", "json").schema(FIELDS).load()
    return views.groupBy("app_id").count().uid("count")


def values(still, params, name, records):
    return source(still, params, name).load().select("value")


def urls(still, params, name, records):
    return ours.page_view_files(still, params, name).selectExpr("url AS value")


def counted_in_state(still, checkpoint):
    state = still.spark.read.format("stillframe").option("operator", "count").load(checkpoint)
    return state.selectExpr("sum(value.`count(1)`)").first()[0]


def number_in_topic(params):
    """Values are counted by the source: it must have read as many as there are."""

    def number(still, checkpoint):
        name = checkpoint.rpartition("/")[2]
        return kafka_topics.number_of_offsets(params["brokers"], topic_of(params, name))

    return number


def number_written(params):
    return lambda: kafka_topics.number_visible(params["brokers"], params["output"])


if __name__ == "__main__":
    main()
