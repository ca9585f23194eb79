"""What a command prepares for the session of a job file."""

from __future__ import annotations

import pytest

from stillframe.spark.deployment.environment import roomier


@pytest.mark.parametrize(
    ("master", "given"),
    [
        ("local", ("local[9]", 1)),
        ("local[2]", ("local[10]", 2)),
        ("local[*]", ("local[48]", 16)),
        ("local[4, 3]", ("local[12,3]", 4)),
        ("spark://host:7077", None),
        ("local-cluster[2,1,1024]", None),
        ("yarn", None),
    ],
)
def test_a_local_master_gets_threads_for_more_jobs_and_a_cluster_stays_what_it_is(
    master: str, given: tuple[str, int] | None
) -> None:
    assert roomier(master, processors=16) == given
