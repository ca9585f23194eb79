"""The long story of Kafka on a standalone Spark cluster; only `make soak` has the time for it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from driven_jobs import KILLS, DrivenJob
from kafka_jobs import Views, kill_again_and_again
from spark_cluster import Cluster

JOB = Path(__file__).parent / "jobs" / "views_through_kafka.py"
SHARED = Path(__file__).parents[1] / "shared"

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.kafka, pytest.mark.slow]


@pytest.mark.timeout(300 + 90 * KILLS)
def test_on_a_cluster_kills_of_slots_driver_and_broker_lose_and_double_nothing(
    tmp_path, free_port, kafka
):
    cluster, views = Cluster(tmp_path, free_port), Views(kafka)
    cluster.start_workers()
    topics = (views.topic, views.out, views.counts, views.windows)
    command = [*cluster.submitting(), str(JOB), str(tmp_path), kafka.address, *topics]
    environment = {**cluster.environment, "PYTHONPATH": str(SHARED)}
    try:
        with closing(DrivenJob(tmp_path, "views", command, **environment)) as job:
            kill_again_and_again(job, views)
    finally:
        cluster.stop()
