"""The worked example with MySQL, E5: how many rows a crash leaves there twice, and where none."""

from __future__ import annotations

import pytest
from database_servers import PASSWORD
from example_pages import check_shown

pytestmark = [pytest.mark.spark, pytest.mark.database]


@pytest.mark.parametrize(("sink", "batches", "duplicates"), [("own", 6, 600), ("mysql", 0, 0)])
def test_e5_batches_that_are_committed_behind_a_checkpoint_are_there_twice_after_a_crash(
    spark, mariadb, monkeypatch, sink, batches, duplicates
):
    import e5_duplicates_in_mysql as example
    import page_view_topics

    for module in (example, page_view_topics):  # as the command line sends its file
        spark.sparkContext.addPyFile(module.__file__)
    monkeypatch.setenv("MYSQL_PWD", PASSWORD)
    said = []
    told = example.run(spark, mariadb.url, "root", sink, said.append)

    assert (told.at_checkpoint.seconds, told.at_checkpoint.rows) == (60, 1200)
    assert (told.batches, told.predicted) == (batches, duplicates)
    assert told.restored == 100
    assert (told.at_next.seconds, told.at_next.rows) == (120, 2400 + duplicates)
    assert told.at_next.duplicates == told.predicted
    check_shown(said)
