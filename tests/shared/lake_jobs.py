"""Clicks to files or to a table, below one address: what is there, as its own clients tell it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from bucket_files import plan_of

from stillframe.api.sources import Source
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.sink_log import SinkLog
from stillframe.connectors.staged_files import Layout
from stillframe.graph.plan import Plan
from stillframe.options import Options
from stillframe.storage.places import place_of

if TYPE_CHECKING:
    from hdfs_cluster import HdfsCluster

Settings = Mapping[str, str]
"""How a bucket is reached, as Hadoop says it; of HDFS there are none."""


@dataclass(frozen=True)
class ClicksToFiles:
    source: Source
    place: str
    settings: Settings

    def __call__(self, parallelism: int) -> Plan:
        return plan_of(self.source, self.sink(), parallelism)

    def sink(self) -> Any:
        """With several files for each epoch."""
        layout, schema = Layout(rows_max=400), self.source.schema
        return FileSink(f"{self.place}/out", "parquet", schema, layout=layout,
                        settings=self.settings)  # fmt: skip

    @staticmethod
    def commits(request: bytes) -> bool:
        """Whether with this request what was staged begins to show."""
        return puts(request, "/out/") and not puts(request, "/out/_stillframe")

    def named(self, seen: set[str]) -> set[str]:
        """Of the files that are there, those that readers take; none but these may be there."""
        return {name for name in seen if "/_stillframe/receipts/" not in name}


@dataclass(frozen=True)
class ClicksToLoggedFiles(ClicksToFiles):
    def sink(self) -> Any:
        return super().sink().logged(None)

    def named(self, seen: set[str]) -> set[str]:
        sink_log = SinkLog(place_of(self.place, self.settings), f"{self.place}/out")
        sink_log.look()
        return {name for name in seen if name.rpartition("/")[2] in sink_log.files}


@dataclass(frozen=True)
class ClicksToDelta(ClicksToFiles):
    def sink(self) -> Any:
        from stillframe.connectors.delta_table import delta_from_options

        given = self.settings
        storage = {
            "AWS_ENDPOINT_URL": given["fs.s3a.endpoint"],
            "AWS_ACCESS_KEY_ID": given["fs.s3a.access.key"],
            "AWS_SECRET_ACCESS_KEY": given["fs.s3a.secret.key"],
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "max_retries": "2",  # the job's own patience is what is looked at
        }
        if "fs.s3a.session.token" in given:
            storage["AWS_SESSION_TOKEN"] = given["fs.s3a.session.token"]
        options = {f"storage.{name}": text for name, text in storage.items()}
        options |= {"path": f"{self.place}/out", "createTable": "true"}
        return delta_from_options(Options("the sink delta", options), self.source.schema)

    @staticmethod
    def commits(request: bytes) -> bool:
        return puts(request, "/_delta_log/")

    def named(self, seen: set[str]) -> set[str]:
        from deltalake import DeltaTable

        sink = self.sink()
        uris = DeltaTable(sink.path, storage_options=sink.storage_options).file_uris()
        return {uri.removeprefix(f"{self.place}/") for uri in uris}


@dataclass(frozen=True)
class ClicksToIceberg(ClicksToFiles):
    catalog: str

    def sink(self) -> Any:
        from stillframe.connectors.iceberg_table import iceberg_from_options

        given = self.settings
        options = {
            "table": "shop.clicks",
            "createTable": "true",
            "catalog.type": "sql",
            "catalog.uri": f"sqlite:///{self.catalog}",
            "catalog.warehouse": f"{self.place}/out",
            "catalog.s3.endpoint": given["fs.s3a.endpoint"],
            "catalog.s3.access-key-id": given["fs.s3a.access.key"],
            "catalog.s3.secret-access-key": given["fs.s3a.secret.key"],
            "catalog.s3.region": "us-east-1",
        }
        if "fs.s3a.session.token" in given:
            options["catalog.s3.session-token"] = given["fs.s3a.session.token"]
        return iceberg_from_options(Options("the sink iceberg", options), self.source.schema)

    @staticmethod
    def commits(request: bytes) -> bool:
        return puts(request, "/metadata/")

    def named(self, seen: set[str]) -> set[str]:
        sink = self.sink()
        catalog = sink.load_catalog()
        tasks = catalog.load_table(sink.table).scan().plan_files()
        catalog.close()
        return {task.file.file_path.removeprefix(f"{self.place}/") for task in tasks}


def puts(request: bytes, what: str) -> bool:
    first_line = request.split(b"\r\n", 1)[0]
    return first_line.startswith((b"PUT ", b"POST ")) and what.encode() in first_line


# --- What is there ---------------------------------------------------------------------------


class Bucket:
    """As Amazon's own client tells it."""

    def __init__(self, url: str, name: str, key: str, secret: str) -> None:
        self._name = name
        self._given = {
            "endpoint_url": url,
            "aws_access_key_id": key,
            "aws_secret_access_key": secret,
            "region_name": "us-east-1",
        }

    def _client(self) -> Any:
        import boto3

        return closing(boto3.client("s3", **self._given))

    def data_files(self) -> set[str]:
        with self._client() as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._name)
            names = {each["Key"] for page in pages for each in page.get("Contents", ())}
        return {name for name in names if name.endswith(".parquet")}

    def ids(self, name: str) -> list[int]:
        with self._client() as client:
            return _ids(client.get_object(Bucket=self._name, Key=name)["Body"].read())


class Directory:
    """Of HDFS, as `hdfs-native` tells it."""

    def __init__(self, cluster: HdfsCluster, path: str) -> None:
        self._cluster, self._path = cluster, path

    def data_files(self) -> set[str]:
        names = self._cluster.names_below(self._path)
        return {name.removeprefix(f"{self._path}/") for name in names if name.endswith(".parquet")}

    def ids(self, name: str) -> list[int]:
        file = self._cluster.client().read(f"{self._path}/{name}")
        return _ids(file.read_range(0, len(file)))


def _ids(content: bytes) -> list[int]:
    ids: list[int] = pq.read_table(io.BytesIO(content))["id"].to_pylist()
    return ids
