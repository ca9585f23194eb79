"""Stillframe: a user's Python function for every row, and one with state for every row of a key.

    python stillframe_rows.py '{"workload": "rows", "seconds": 20, …}'

A Python UDF makes the site of each url; a `KeyProcessor` by site then reads its value state, adds
one, writes it and yields (site, count). Variant "each-row" reads and writes the state for every
single row, variant "each-call" once for all the rows of a key that a call gets. The sink is `noop`.

Exactly once, through the public API on local Spark. Urls are made of the columns of the source
`clicks` (its apps even) by an expression of the engine.

What was counted is read back from the last checkpoint and must be what the sources say was read.
"""

import time

STARTED_S = time.monotonic()

import stillframe_session as ours  # noqa: E402
from pyspark.sql.functions import udf  # noqa: E402

import stillframe  # noqa: E402

URL = "concat('https://', app_id, '.example.org/p/', id % 1000, '?u=', user_id) AS url"
PARTITIONS_PER_SUBTASK = 2


def site_of(url):
    return url.split("/")[2]


class CountWithEachRow(stillframe.KeyProcessor):
    def open(self, states):
        self.count = states.value("count", "n long")

    def process(self, key, rows):
        for row in rows:
            kept = self.count.get()
            n = 1 if kept is None else kept.n + 1
            self.count.update((n,))
            yield row.site, n


class CountWithEachCall(stillframe.KeyProcessor):
    def open(self, states):
        self.count = states.value("count", "n long")

    def process(self, key, rows):
        kept = self.count.get()
        n = 0 if kept is None else kept.n
        for row in rows:
            n += 1
            yield row.site, n
        self.count.update((n,))


PROCESSORS = {"each-row": CountWithEachRow, "each-call": CountWithEachCall}


def main():
    params = ours.params_given()
    if params["workload"] != "rows" or params["source"] != "generator":
        ours.refuse("stillframe_rows makes its rows itself, and does nothing else")
    if params["variant"] not in PROCESSORS:
        ours.refuse(f"stillframe_rows has no variant {params['variant']!r}")
    ours.run_twice(params, STARTED_S, counts, counted, "append")


def counts(still, params, name, records):
    sites = urls(still, params, records).select(udf(site_of, "string")("url").alias("site"))
    processor = PROCESSORS[params["variant"]]
    return sites.groupBy("site").process(processor, "site string, n long").uid("count")


def urls(still, params, records):
    source = still.readStream.format("clicks").option("records", records).option("skew", 1)
    source = source.option("partitions", PARTITIONS_PER_SUBTASK * params["parallelism"])
    return source.option("apps", params["keys"]).load().selectExpr(URL)


def counted(still, checkpoint):
    """The sum of all counts in the last checkpoint."""
    state = still.spark.read.format("stillframe").option("operator", "count")
    return state.option("state", "count").load(checkpoint).selectExpr("sum(value.n)").first()[0]


if __name__ == "__main__":
    main()
