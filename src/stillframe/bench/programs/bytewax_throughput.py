"""Bytewax: page views counted by app or by user, on two processes.

The source makes keyed records, a `StatefulBatchLogic` adds up what a key has in a batch and emits
the count once a batch. The keys of Bytewax are strings, so a user's number is one too.
"""

from __future__ import annotations

import json
import sys

import bytewax.operators as op
import bytewax_cluster as ours
from bytewax.dataflow import Dataflow

TABLE_RECORDS = {"strings": 200_000, "integers": 2_000_000}


class CountLogic(ours.CountLogic):
    def on_batch(self, values: list[None]) -> tuple[list[int], bool]:
        self.count += len(values)
        return [self.count], self.RETAIN


def keyed_records(workload: str, keys: int) -> list[tuple[str, None]]:
    """Strings take the upper half of the mixed record number and integers the lower."""
    shift, prefix = (32, "app-") if workload == "strings" else (0, "")
    table = [(f"{prefix}{key}", None) for key in range(keys)]
    mixed = (ours.splitmix64(number) >> shift for number in range(TABLE_RECORDS[workload]))
    return [table[((z & 0xFFFFFFFF) * keys) >> 32] for z in mixed]


def flow_of(params: ours.Params, records: int, tally: ours.Tally) -> Dataflow:
    flow = Dataflow("throughput")
    table = keyed_records(params["workload"], params["keys"])
    source = ours.table_source(params, table, records, tally)
    views = op.input("views", flow, source)
    counts = op.stateful_batch("count", views, lambda resume: CountLogic(resume, tally))
    op.output("discard", counts, ours.DiscardingSink(tally))
    return flow


def main() -> None:
    params = json.loads(sys.argv[1])
    if params["workload"] not in TABLE_RECORDS or params["source"] != "generator":
        ours.refuse("This program counts generated records only: Bytewax reads no Parquet.")
    if params["backend"] != "heap":
        ours.refuse("Bytewax keeps its state on the heap only; it has no RocksDB.")
    ours.run_program(params, __file__, flow_of)


if __name__ == "__main__":
    main()
