"""The same loads by hand, without Stillframe: what one would write for a table or a bucket.

    python client_sinks.py '{"workload": "postgres_sink", "server": {…}, "output": "t", …}'

Rows are Arrow batches that are in memory, and a transaction is committed each second.
`postgres_sink` writes them as CSV, with pyarrow, into COPY; `mysql_sink` as lines into a file in
memory, which LOAD DATA LOCAL takes. `s3_sink` puts Parquet files with obstore: with the variant
`bytes` they were made before, with `rows` pyarrow makes them of the batches, a file each second.
"""

import tempfile
from importlib.metadata import version

import client_session as ours
import obstore
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import sink_targets

_PACKAGES = {"postgres_sink": "psycopg", "mysql_sink": "pymysql", "s3_sink": "obstore"}
_PLAIN = pyarrow.csv.WriteOptions(include_header=False)
_TABS = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")


def copied(params, part, begin):
    batches = ours.rows_of(params, part)
    connection = sink_targets.connected(params)
    begin()
    cadence, left = ours.Cadence(params), iter(batches)
    is_over = False
    while not is_over:
        is_over = copied_until_due(connection, params["output"], left, cadence)
        connection.commit()
    return sum(batch.num_rows for batch in batches)


def copied_until_due(connection, table, batches, cadence):
    """Whether there are no more."""
    with connection.cursor() as cursor, cursor.copy(f"copy {table} from stdin (format csv)") as to:
        for batch in batches:
            text = pa.BufferOutputStream()
            pyarrow.csv.write_csv(batch, text, _PLAIN)
            to.write(memoryview(text.getvalue()))
            if cadence.is_due():
                return False
    return True


def loaded(params, part, begin):
    batches = ours.rows_of(params, part)
    connection = sink_targets.connected(params)
    begin()
    cadence = ours.Cadence(params)
    with connection.cursor() as cursor:
        for batch in batches:
            with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
                pyarrow.csv.write_csv(batch, file, _TABS)
                file.flush()
                cursor.execute(
                    f"load data local infile '{file.name}' into table {params['output']}"
                    " character set utf8mb4"
                )
            if cadence.is_due():
                connection.commit()
    connection.commit()
    return sum(batch.num_rows for batch in batches)


def put_bytes(params, part, begin):
    files = [pq.read_table(file) for file in ours.files_of(params, part)]
    made = [as_parquet(table.to_batches()) for table in files]
    store = sink_targets.bucket_of(params)
    begin()
    for number, data in enumerate(made):
        obstore.put(store, f"{part}-{number}.parquet", data)
    return sum(table.num_rows for table in files)


def put_rows(params, part, begin):
    batches = ours.rows_of(params, part)
    store = sink_targets.bucket_of(params)
    begin()
    cadence, gathered, number = ours.Cadence(params), [], 0
    for place, batch in enumerate(batches):
        gathered.append(batch)
        if cadence.is_due() or place == len(batches) - 1:
            obstore.put(store, f"{part}-{number}.parquet", as_parquet(gathered))
            gathered, number = [], number + 1
    return sum(batch.num_rows for batch in batches)


def as_parquet(batches):
    made = pa.BufferOutputStream()
    with pq.ParquetWriter(made, batches[0].schema) as writer:
        writer.write_table(pa.Table.from_batches(batches))
    return made.getvalue().to_pybytes()  # obstore takes no other buffer


def main():
    params = ours.params_given()
    workload = params["workload"]
    put = {"bytes": put_bytes, "rows": put_rows}.get(params["variant"])
    work = {"postgres_sink": copied, "mysql_sink": loaded, "s3_sink": put}[workload]
    done = ours.run_together(params, work)
    ours.tell(params, version(_PACKAGES[workload]), done, sink_targets.number_there(params))


if __name__ == "__main__":
    main()
