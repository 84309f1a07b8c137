"""boto3: client and transfer manager."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError
from driving import PART, Driver, OneWay, serve

if TYPE_CHECKING:
    from driving import Endpoint


class Boto3(Driver):
    name = "boto3"
    checksums = ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.s3 = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint.url,
            aws_access_key_id=endpoint.access_key,
            aws_secret_access_key=endpoint.secret_key,
            region_name=endpoint.region,
            verify=endpoint.ca or None,
            # One attempt, as a retry would hide a fault; the rest is as it comes.
            config=Config(retries={"total_max_attempts": 1}),
        )
        self.parts = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART)

    def version(self) -> str:
        return str(boto3.__version__)

    def make_bucket(self, bucket: str) -> None:
        self.s3.create_bucket(Bucket=bucket)

    def remove_bucket(self, bucket: str) -> None:
        self.s3.delete_bucket(Bucket=bucket)

    def list_buckets(self) -> list[str]:
        return [entry["Name"] for entry in self.s3.list_buckets()["Buckets"]]

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        extra: dict[str, Any] = {"Metadata": metadata or {}}
        extra |= {"ContentType": content_type} if content_type else {}
        extra |= {"ChecksumAlgorithm": checksum} if checksum else {}
        with Path(path).open("rb") as file:
            self.s3.put_object(Bucket=bucket, Key=key, Body=file, **extra)

    def put_large(self, bucket: str, key: str, path: str) -> None:
        self.s3.upload_file(path, bucket, key, Config=self.parts)

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        with OneWay(path) as stream:
            self.s3.upload_fileobj(stream, bucket, key, Config=self.parts)

    def get(self, bucket: str, key: str, path: str) -> None:
        self.s3.download_file(bucket, key, path)

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        got = self.s3.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        Path(path).write_bytes(got["Body"].read())

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        head = self.s3.head_object(Bucket=bucket, Key=key)
        return {
            "size": head["ContentLength"],
            "metadata": head["Metadata"],
            "content_type": head["ContentType"],
            "etag": head["ETag"].strip('"'),
        }

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        pages = list(
            self.s3.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=prefix, Delimiter=delimiter, PaginationConfig={"PageSize": 400}
            )
        )
        return {
            "keys": [entry["Key"] for page in pages for entry in page.get("Contents", [])],
            "prefixes": [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", [])],
        }

    def copy(self, bucket: str, key: str, target: str) -> None:
        self.s3.copy({"Bucket": bucket, "Key": key}, bucket, target, Config=self.parts)

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        gone = self.s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys]})
        assert not gone.get("Errors"), gone["Errors"]

    def presign_get(self, bucket: str, key: str) -> str:
        return str(self.s3.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key}))

    def presign_put(self, bucket: str, key: str) -> str:
        return str(self.s3.generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": key}))

    def presign_part(self, bucket: str, key: str, upload: str, number: int) -> str:
        part = {"Bucket": bucket, "Key": key, "UploadId": upload, "PartNumber": number}
        return str(self.s3.generate_presigned_url("upload_part", Params=part))

    def put_if_absent(self, bucket: str, key: str, path: str) -> bool:
        return self._conditional(bucket, key, path, IfNoneMatch="*")

    def put_if_match(self, bucket: str, key: str, path: str, etag: str) -> bool:
        return self._conditional(bucket, key, path, IfMatch=etag)

    def _conditional(self, bucket: str, key: str, path: str, **condition: str) -> bool:
        try:
            self.s3.put_object(Bucket=bucket, Key=key, Body=Path(path).read_bytes(), **condition)
        except ClientError as error:
            if error.response["Error"]["Code"] != "PreconditionFailed":
                raise
            return False
        return True


if __name__ == "__main__":
    serve(Boto3)
