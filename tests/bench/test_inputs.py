"""The Parquet files hold each page view once, and are written once."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from stillframe.bench import inputs
from stillframe.bench.inputs import SCHEMA, bring_into_memory, page_views


def test_the_files_hold_every_page_view_once_and_are_kept(tmp_path):
    directory = page_views(tmp_path, records=10_001, files=4)
    read = pq.read_table(directory)

    assert read.schema.equals(SCHEMA)
    assert read.num_rows == 10_001
    assert len(list(directory.iterdir())) == 4
    sites = {url.split("/")[2] for url in read["url"].to_pylist()}
    assert sites == {f"{app}.example.org" for app in read["app_id"].unique().to_pylist()}

    (directory / "part-00000.parquet").unlink()
    assert page_views(tmp_path, records=10_001, files=4) == directory
    assert len(list(directory.iterdir())) == 3, "it was not written a second time"
    bring_into_memory(directory)


def test_an_interrupted_writing_leaves_nothing_that_is_taken_for_whole(tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(inputs, "views", interrupted)
        with pytest.raises(KeyboardInterrupt):
            page_views(tmp_path, records=10, files=1)
    assert list(tmp_path.iterdir()) == []

    assert pq.read_table(page_views(tmp_path, records=10, files=1)).num_rows == 10
