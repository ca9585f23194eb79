"""What the programs ask of databases and buckets, to reach them and to check themselves."""

from contextlib import closing

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from obstore.store import S3Store


def connected(params):
    """A connection to the database, of its usual driver; each statement waits for a commit."""
    server = params["server"]
    address, _, database = server["url"].partition("://")[2].partition("/")
    host, _, port = address.partition(":")
    given = {"host": host, "port": int(port), "user": server["user"]}
    if params["workload"] == "postgres_sink":
        import psycopg

        return psycopg.connect(**given, dbname=database, password=server["password"])
    import pymysql

    return pymysql.connect(
        **given, database=database, password=server["password"], local_infile=True
    )


def bucket_of(params):
    server = params["server"]
    return S3Store(
        params["output"],
        config={
            "endpoint": server["url"],
            "access_key_id": server["access_key"],
            "secret_access_key": server["secret_key"],
            "region": "us-east-1",
        },
        client_options={"allow_http": True, "timeout": "300s"},
    )


def number_there(params):
    """How many rows the table or the Parquet files of the bucket have."""
    if params["workload"] == "s3_sink":
        return number_in_bucket(bucket_of(params))
    with closing(connected(params)) as connection, connection.cursor() as cursor:
        cursor.execute(f"select count(*) from {params['output']}")
        return cursor.fetchone()[0]


def number_in_bucket(store):
    names = [each["path"] for batch in obstore.list(store) for each in batch]
    shown = [name for name in names if name.endswith(".parquet") and "/_" not in f"/{name}"]
    return sum(rows_in(store, name) for name in shown)


def rows_in(store, name):
    data = pa.BufferReader(obstore.get(store, name).bytes().to_bytes())
    return pq.read_metadata(data).num_rows
