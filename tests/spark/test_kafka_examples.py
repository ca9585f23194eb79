"""The worked examples with Kafka, E3 and E4: what their checkpoints hold, to the last number."""

from __future__ import annotations

import pytest
from example_pages import check_shown

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


def test_e3_work_after_checkpoint_100_is_lost_in_a_crash_and_done_again(spark, kafka):
    from e3_page_views_from_kafka import run

    said = []
    before, restored, after = run(spark, kafka.address, said.append)

    assert before == (100, {0: 1000}, {"app1": 50_000, "app2": 10_000})
    assert restored == 100
    assert after == (101, {0: 1100}, {"app1": 50_080, "app2": 10_020})
    check_shown(said)


@pytest.mark.parametrize(
    ("mode", "in_checkpoint_100", "in_the_end"),
    [("exactly-once", 12_005, 12_050), ("at-least-once", 12_050, 12_095)],
)
def test_e4_without_alignment_a_count_is_too_high_by_the_45_that_came_before_the_late_barrier(
    spark, kafka, mode, in_checkpoint_100, in_the_end
):
    from e4_with_and_without_alignment import run

    said = []
    before, restored, after = run(spark, kafka.address, mode, said.append)

    assert before == (100, {0: 10_000, 1: 10_005}, {"app0": 8_000, "app1": in_checkpoint_100})
    assert restored == 100
    assert after == (101, {0: 10_000, 1: 10_200}, {"app0": 8_000, "app1": in_the_end})
    check_shown(said)
