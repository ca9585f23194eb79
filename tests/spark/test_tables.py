"""Delta and Iceberg tables on Spark, by the words of Spark's writer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stillframe.errors import BuildError, StartRefused

if TYPE_CHECKING:
    from stillframe.spark.session import Still
    from stillframe.spark.writer import StreamWriter

pytestmark = pytest.mark.spark


def writer(still: Still, place: Path, name: str) -> StreamWriter:
    clicks = still.readStream.format("clicks").option("records", 2_000).load()
    stream = clicks.select("id", "app_id")
    location = {"checkpointLocation": str(place / "chk"), "checkpointInterval": "1 second"}
    return stream.writeStream.queryName(name).options(**location)


def catalog_options(place: Path) -> dict[str, str]:
    return {
        "catalog.type": "sql",
        "catalog.uri": f"sqlite:///{place}/catalog.db",
        "catalog.warehouse": f"file://{place}/lake",
    }


def test_a_stream_goes_to_an_iceberg_table_by_its_name(still: Still, tmp_path: Path) -> None:
    from pyiceberg.catalog import load_catalog

    options = catalog_options(tmp_path)
    query = writer(still, tmp_path, "named").toTable(
        "shop.clicks", format="iceberg", partitionBy="app_id", **options
    )

    assert query.awaitTermination(120)
    assert query.guarantee().word == "exactly-once"
    plain = {name.removeprefix("catalog."): value for name, value in options.items()}
    catalog = load_catalog("default", **plain)
    table = catalog.load_table("shop.clicks")
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(2_000))
    assert [field.name for field in table.spec().fields] == ["app_id"]
    catalog.close()


def test_a_stream_goes_to_a_delta_table_by_its_path(still: Still, tmp_path: Path) -> None:
    from deltalake import DeltaTable

    place = tmp_path / "lake"
    query = writer(still, tmp_path, "by path").partitionBy("app_id").toTable(f"delta.`{place}`")

    assert query.awaitTermination(120)
    table = DeltaTable(str(place))
    assert sorted(table.to_pyarrow_table()["id"].to_pylist()) == list(range(2_000))
    assert table.metadata().partition_columns == ["app_id"]


def test_what_is_wrong_is_told_before_any_slot_runs(still: Still, tmp_path: Path) -> None:
    write = writer(still, tmp_path, "wrong")
    with pytest.raises(StartRefused, match=r"there is no Delta table .*/nowhere: create it"):
        write.format("delta").start(str(tmp_path / "nowhere"))
    with pytest.raises(BuildError, match=r"toTable\('clicks'\) needs .format\('iceberg'\)"):
        write.toTable("clicks", format="delta")
    with pytest.raises(BuildError, match=r"toTable\('clicks'\) needs .format\('iceberg'\)"):
        writer(still, tmp_path, "wrong").toTable("clicks", format="console")
    with pytest.raises(BuildError, match="the sink noop has no files that partitionBy could"):
        writer(still, tmp_path, "wrong").format("noop").start(partitionBy="app_id")
    with pytest.raises(BuildError, match=r"name a table with its namespace, as shop\.views"):
        writer(still, tmp_path, "wrong").toTable("clicks", format="iceberg")
