"""Bytewax: a user's Python function per row, and one with state per key, on two processes.

url -> site by a Python function per row, then keyed by site a `StatefulBatchLogic` that adds one
for every row and emits (site, count) for every row. `stateful_batch` is the operator that all the
other stateful ones of Bytewax are made of, and the fastest of them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import bytewax.operators as op
import bytewax_cluster as ours
from bytewax.dataflow import Dataflow

TABLE_RECORDS = 200_000


def site_of(url: str) -> str:
    return url.split("/")[2]


def keyed_by_site(urls: list[str]) -> list[tuple[str, None]]:
    """What `map` and `key_on` do, in one step; the url itself need not travel any further."""
    return [(site_of(url), None) for url in urls]


class CountLogic(ours.CountLogic):
    def on_batch(self, values: list[None]) -> tuple[list[int], bool]:
        counts = []
        for _value in values:
            self.count += 1
            counts.append(self.count)
        return counts, self.RETAIN


def urls() -> list[str]:
    made = []
    for number in range(TABLE_RECORDS):
        z = ours.splitmix64(number)
        app, user = ((z >> 32) * 1000) >> 32, ((z & 0xFFFFFFFF) * 1_000_000) >> 32
        made.append(f"https://app-{app}.example.org/p/{number % 1000}?u={user}")
    return made


def flow_of(params: ours.Params, records: int, tally: ours.Tally) -> Dataflow:
    flow = Dataflow("rows")
    source = ours.table_source(params, urls(), records, tally)
    lines = op.input("urls", flow, source)
    sites = op.flat_map_batch("site", lines, keyed_by_site)
    counts: Any = op.stateful_batch("count", sites, lambda resume: CountLogic(resume, tally))
    op.output("discard", counts, ours.DiscardingSink(tally))
    return flow


def main() -> None:
    params = json.loads(sys.argv[1])
    if params["workload"] != "rows" or params["source"] != "generator":
        ours.refuse("This program does rows from a generator only: Bytewax reads no Parquet.")
    ours.run_program(params, __file__, flow_of)


if __name__ == "__main__":
    main()
