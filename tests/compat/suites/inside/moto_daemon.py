"""A pytest plugin (`-p moto_daemon`) for suites that start moto, a simulation of S3: they get the daemon.

What the suites use of moto is a server at a port of theirs, which begins empty, and `POST /moto-api/reset`,
which empties it. Here the server is the daemon at MESHD_ENDPOINT, and both empty the daemon.
Nothing else of the suites is changed: module variables that hold the address are given the daemon's.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import boto3
import moto.moto_server.threaded_moto_server as moto_server
import requests
from botocore.config import Config

ENDPOINT = os.environ["MESHD_ENDPOINT"]
_NAMES = ("endpoint_uri", "endpoint_url")
_MOTO_AT = "http://127.0.0.1:555"  # 5555, 5556
_post = requests.post


class DaemonServer:
    """In place of moto's ThreadedMotoServer; takes the same arguments."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def start(self) -> None:
        empty()

    def stop(self) -> None:
        empty()


def empty() -> None:
    """Remove all buckets, with all versions and unfinished uploads."""
    config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
    s3 = boto3.client("s3", endpoint_url=ENDPOINT, region_name="us-east-1", config=config)
    try:
        for bucket in s3.list_buckets()["Buckets"]:
            _remove(s3, bucket["Name"])
    finally:
        s3.close()


def _remove(s3: Any, bucket: str) -> None:
    for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket):
        for upload in page.get("Uploads", []):
            s3.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=bucket):
        versions = [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
        if versions:
            names = [{"Key": version["Key"], "VersionId": version["VersionId"]} for version in versions]
            s3.delete_objects(Bucket=bucket, Delete={"Objects": names, "Quiet": True})
    s3.delete_bucket(Bucket=bucket)


def _post_or_empty(url: str, *arguments: Any, **options: Any) -> Any:
    if url.endswith("/moto-api/reset"):
        return empty()
    return _post(url, *arguments, **options)


def pytest_collection_modifyitems() -> None:
    for module in list(sys.modules.values()):
        for name in _NAMES:
            if str(vars(module).get(name)).startswith(_MOTO_AT):
                setattr(module, name, ENDPOINT)


moto_server.ThreadedMotoServer = DaemonServer
vars(requests)["post"] = _post_or_empty
