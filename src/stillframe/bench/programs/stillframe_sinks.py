"""Stillframe: page views from Parquet to a table of PostgreSQL or MySQL, or as Parquet to a bucket.

    python stillframe_sinks.py '{"workload": "postgres_sink", "server": {…}, "output": "t", …}'

All rows of the files, exactly once, through the public API, with a checkpoint each second. The
target must have them all in the end.
"""

import time

STARTED_S = time.monotonic()

import sink_targets  # noqa: E402
import stillframe_session as ours  # noqa: E402


def main():
    params = ours.params_given()
    sink = into_bucket(params) if params["workload"] == "s3_sink" else into_table(params)
    ours.run_twice(params, STARTED_S, views, ours.added_to(number_there(params)), "append", sink)


def views(still, params, name, records):
    return ours.page_view_files(still, params, name)


def into_table(params):
    server = params["server"]
    return {
        "format": "jdbc",
        "url": f"jdbc:{server['url']}",
        "dbtable": params["output"],
        "user": server["user"],
        "password": server["password"],
    }


def into_bucket(params):
    server = params["server"]
    return {
        "format": "parquet",
        "path": f"s3://{params['output']}/views",
        "fs.s3a.endpoint": server["url"],
        "fs.s3a.access.key": server["access_key"],
        "fs.s3a.secret.key": server["secret_key"],
        "fs.s3a.endpoint.region": "us-east-1",
    }


def number_there(params):
    return lambda: sink_targets.number_there(params)


if __name__ == "__main__":
    main()
