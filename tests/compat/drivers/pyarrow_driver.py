"""pyarrow's filesystem (the AWS SDK for C++) and its Parquet data sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from driving import CannotError, Driver, serve
from pyarrow import fs

if TYPE_CHECKING:
    from driving import Endpoint


class Pyarrow(Driver):
    name = "pyarrow"
    missing = {  # noqa: RUF012
        "presign_get": "it signs no URLs",
        "presign_put": "it signs no URLs",
        "put_if_absent": "it has no conditional upload",
        "put_if_match": "it has no conditional upload",
    }

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.fs = fs.S3FileSystem(
            access_key=endpoint.access_key,
            secret_key=endpoint.secret_key,
            region=endpoint.region,
            scheme="https" if endpoint.secure else "http",
            endpoint_override=endpoint.host,
            allow_bucket_creation=True,
            allow_bucket_deletion=True,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
            tls_ca_file_path=endpoint.ca or None,
        )

    def version(self) -> str:
        return str(pa.__version__)

    def make_bucket(self, bucket: str) -> None:
        self.fs.create_dir(bucket)

    def remove_bucket(self, bucket: str) -> None:
        self.fs.delete_dir(bucket)

    def list_buckets(self) -> list[str]:
        return [info.path for info in self.fs.get_file_info(fs.FileSelector(""))]

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        if metadata:
            raise CannotError("it keeps a Content-Type, and no metadata of one's own")
        with self.fs.open_output_stream(f"{bucket}/{key}") as out:
            out.write(Path(path).read_bytes())

    def put_large(self, bucket: str, key: str, path: str) -> None:
        self.put(bucket, key, path)

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        with self.fs.open_output_stream(f"{bucket}/{key}") as out, Path(path).open("rb") as source:
            while piece := source.read(100_001):
                out.write(piece)

    def get(self, bucket: str, key: str, path: str) -> None:
        with self.fs.open_input_stream(f"{bucket}/{key}") as source:
            Path(path).write_bytes(source.read())

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        with self.fs.open_input_file(f"{bucket}/{key}") as source:
            Path(path).write_bytes(source.read_at(end - start, start))

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        with self.fs.open_input_stream(f"{bucket}/{key}") as source:
            kept = {name.decode(): value.decode() for name, value in source.metadata().items()}
        return {
            "size": self.fs.get_file_info(f"{bucket}/{key}").size,
            "etag": kept["ETag"].strip('"'),
            "content_type": kept["Content-Type"],
        }

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        selector = fs.FileSelector(f"{bucket}/{prefix}".rstrip("/"), recursive=not delimiter)
        found = self.fs.get_file_info(selector)
        names = [(info.type, info.path.removeprefix(f"{bucket}/")) for info in found]
        return {
            "keys": [name for kind, name in names if kind == fs.FileType.File],
            "prefixes": [f"{name}/" for kind, name in names if kind == fs.FileType.Directory and delimiter],
        }

    def copy(self, bucket: str, key: str, target: str) -> None:
        self.fs.copy_file(f"{bucket}/{key}", f"{bucket}/{target}")

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        for key in keys:
            self.fs.delete_file(f"{bucket}/{key}")

    def sync_up(self, folder: str, bucket: str, prefix: str) -> int | None:
        fs.copy_files(folder, f"{bucket}/{prefix}", fs.LocalFileSystem(), self.fs)
        return None

    def sync_down(self, bucket: str, prefix: str, folder: str) -> None:
        fs.copy_files(f"{bucket}/{prefix}", folder, self.fs, fs.LocalFileSystem())

    def own_work(self, bucket: str, prefix: str) -> str:
        table = pa.table({"n": range(30_000), "kind": [f"k{n % 3}" for n in range(30_000)]})
        ds.write_dataset(
            table,
            f"{bucket}/{prefix}",
            filesystem=self.fs,
            format="parquet",
            partitioning=ds.partitioning(pa.schema([("kind", pa.string())]), flavor="hive"),
        )
        data = ds.dataset(f"{bucket}/{prefix}", filesystem=self.fs, partitioning="hive")
        got = data.to_table(columns=["n"], filter=(pc.field("kind") == "k1") & (pc.field("n") > 29_000))
        assert sorted(got["n"].to_pylist()) == [n for n in range(29_001, 30_000) if n % 3 == 1]
        pq.write_table(table, f"{bucket}/{prefix}.parquet", filesystem=self.fs, row_group_size=5000)
        one = pq.ParquetFile(self.fs.open_input_file(f"{bucket}/{prefix}.parquet")).read_row_group(3)
        assert one["n"].to_pylist() == list(range(15_000, 20_000))
        return "a partitioned Parquet data set; one row group of a file"


if __name__ == "__main__":
    serve(Pyarrow)
