"""`foreachBatch` made exactly-once with Spark's own Delta writer.

Delta has no jar for each version of Spark, so this is only told by `tools/spark_versions.py`, which
`make soak` runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from stillframe.testing.fetched import fetched

JOB = Path(__file__).parent / "jobs" / "clicks_to_delta_by_spark.py"
DELTA = "4.4.0"
SPARKS = ("4.0", "4.1", "4.2")
RECORDS = 4_000

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.timeout(700)
def test_an_epoch_that_comes_again_after_a_kill_is_in_sparks_delta_table_once(
    tmp_path: Path,
) -> None:
    minor = pyspark.__version__.rpartition(".")[0]
    if minor not in SPARKS:
        pytest.skip(f"Delta {DELTA} has no jar for PySpark {minor}")
    jars = fetched("io.delta", f"delta-spark_{minor}_2.13", DELTA)
    command = [sys.executable, str(JOB), str(jars), str(tmp_path), str(RECORDS)]
    codes = []
    while 0 not in codes and len(codes) < 3:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        codes.append(ran.returncode)
        assert ran.returncode in (0, -9), ran.stdout[-3000:] + ran.stderr[-3000:]

    assert codes == [-9, 0]
    assert (tmp_path / "failed").exists(), "an epoch came to the second driver twice"
    told = json.loads((tmp_path / "told").read_text())
    assert told["guarantee"] == "exactly-once"
    assert (told["rows"], told["different"]) == (RECORDS, RECORDS)
    assert told["left"] == []
