"""Stillframe: expressions that are Spark's, natively and in Spark's own evaluator.

    python stillframe_language.py '{"workload": "json_counts", "input": "…", …}'

All files of a directory are read once, exactly once, through the public API, to the sink `noop`:
`json_counts` parses lines of JSON with five fields by `from_json` and counts them by one of these,
`words` counts the words of lines, `decimals` sums prices by app in windows, `distinct` counts the
apps of each window, and `evaluated` counts page views by what only Spark's evaluator computes of
their URLs.

What was counted is read back from the last checkpoint and must be what the source says was read.
"""

import time

STARTED_S = time.monotonic()

import glob  # noqa: E402
import os  # noqa: E402

import language  # noqa: E402
import stillframe_session as ours  # noqa: E402


def main():
    params = ours.params_given()
    if params["workload"] not in language.QUERIES:
        ours.refuse(f"stillframe_language has no workload {params['workload']!r}")
    ours.run_twice(params, STARTED_S, counts, counted_by(params), "update")


def counts(still, params, name, records):
    files = sorted(glob.glob(os.path.join(params["input"], "part-*")))
    path = files[0] if name == "warm-up" else params["input"]
    frame = language.QUERIES[params["workload"]](still.spark.readStream, path)
    return still.stream(frame).uid("count")


def counted_by(params):
    def counted(still, checkpoint):
        state = still.spark.read.format("stillframe").option("operator", "count").load(checkpoint)
        total = state.selectExpr("sum(value.`count(1)`)").first()[0]
        return total // language.COUNTED_EACH.get(params["workload"], 1)

    return counted


if __name__ == "__main__":
    main()
