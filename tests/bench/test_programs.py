"""Stillframe's own programs run, on real Spark, and count every record."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from stillframe.bench.catalogue import benchmarks
from stillframe.bench.engines import Engines
from stillframe.cli.bench import measure
from stillframe.cli.lines import Lines


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_the_throughput_program_runs_from_the_command_to_the_report(tmp_path):
    views = benchmarks()["views"]
    ours = views.trials[0]
    params = {**ours.params, "seconds": 1, "warmup_records": 200_000}
    tiny = replace(ours, params=params, seconds_max=500.0)
    said = io.StringIO()

    results = measure(
        [replace(views, trials=(tiny,))],
        1,
        tmp_path,
        Engines(tmp_path / "home"),
        Lines(as_json=False, out=said),
    )

    (run,) = results.runs
    assert run.status == "measured", run.reason
    result = run.result
    assert result["counted"] == result["records"] > 10_000
    assert result["records_per_second"] == pytest.approx(
        result["records"] / result["seconds"], 0.01
    )
    assert result["warm_up"]["records"] == 200_000
    assert result["startup_s"] > 0
    assert "records/s" in said.getvalue()
    assert "| Stillframe |" in (tmp_path / "results.md").read_text()
