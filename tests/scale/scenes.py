"""Nodes with a great deal of one thing: each scene fills a daemon, asks it, kills it, starts it again."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.bulk_fill import stock
from bench.presigned_requests import Account
from tests.scale.costly import costly_requests, crowd
from tests.scale.costly_data import fill
from tests.scale.pipeline import Target
from tests.scale.table import private_memory
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.scale.costly import Costly
    from tests.scale.counts import Counts
    from tests.scale.table import Table

_BUCKET = "scale"
_PART = 5 << 20

Scene = Callable[["Path", "Counts", "Table"], None]


@contextmanager
def _daemon(folder: Path, table: Table, scene: str) -> Iterator[Daemon]:
    with Daemon.start(folder / "data", workers=2) as daemon:
        table.memory(scene, "memory, empty", daemon)
        yield daemon


def _target(daemon: Daemon) -> Target:
    port = int(daemon.endpoint.rpartition(":")[2])
    return Target("meshd", port, Account(daemon.access_key, daemon.secret_key))


def _start_again(daemon: Daemon, table: Table, scene: str) -> None:
    """kill -9, then the time until it serves."""
    daemon.kill()
    with table.seconds(scene, "start after kill -9"):
        daemon.up(timeout=600)
    table.memory(scene, "memory after the start", daemon)


def _pages(client: Any, name: str, field: str, **words: Any) -> int:
    return sum(len(page.get(field, ())) for page in client.get_paginator(name).paginate(**words))


def keys(folder: Path, counts: Counts, table: Table) -> None:
    """One bucket of very many keys."""
    with _daemon(folder, table, "keys") as daemon:
        client = daemon.client()
        client.create_bucket(Bucket=_BUCKET)
        names = [f"/{_BUCKET}/photos/{number:08d}.jpg" for number in range(counts.keys)]
        with table.seconds("keys", f"PUT of {counts.keys:,} empty objects, 24 connections"):
            stock(_target(daemon).as_server(), names, lambda done: print(f"{done:,} keys", file=sys.stderr))
        table.memory("keys", "memory, filled", daemon)
        _ask_keys(client, counts, table)
        _start_again(daemon, table, "keys")
        _ask_keys(client, counts, table, " after the start")
        assert daemon.stop() == 0
        _rebuild(folder, counts, table)
        daemon.up(timeout=600)
        assert _pages(client, "list_objects_v2", "Contents", Bucket=_BUCKET) == counts.keys


def _ask_keys(client: Any, counts: Counts, table: Table, when: str = "") -> None:
    last = f"photos/{counts.keys - 1:08d}.jpg"
    table.median_ms(
        "keys", f"HEAD of the last key{when}", lambda: client.head_object(Bucket=_BUCKET, Key=last)
    )
    table.median_ms("keys", f"first page of 1,000{when}", lambda: client.list_objects_v2(Bucket=_BUCKET))
    table.median_ms(
        "keys",
        f"delimiter over all keys{when}",
        lambda: client.list_objects_v2(Bucket=_BUCKET, Delimiter="/"),
    )
    if when:
        return
    with table.seconds("keys", "listing of all, page by page, boto3"):
        assert _pages(client, "list_objects_v2", "Contents", Bucket=_BUCKET) == counts.keys


def _rebuild(folder: Path, counts: Counts, table: Table) -> None:
    index = sum(file.stat().st_blocks * 512 for file in (folder / "data" / "index").rglob("*"))
    table.add("keys", "index on disk, a key", index / counts.keys, "bytes")
    with table.seconds("keys", "meshd fsck"):
        _fsck(folder)
    with table.seconds("keys", "meshd fsck --rebuild"):
        _fsck(folder, "--rebuild")


def _fsck(folder: Path, *flags: str) -> None:
    words = (sys.executable, "-m", "meshd", "fsck", "--data-dir", str(folder / "data"), *flags)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=3600)


def buckets(folder: Path, counts: Counts, table: Table) -> None:
    """One user with very many buckets."""
    with _daemon(folder, table, "buckets") as daemon:
        client = daemon.client()
        names = [f"bucket-{number:06d}" for number in range(counts.buckets)]
        made = table.seconds("buckets", f"{counts.buckets:,} buckets made, 8 connections")
        with made, ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: client.create_bucket(Bucket=name), names))
        name = f"bucket-{counts.buckets - 1:06d}"
        client.put_object(Bucket=name, Key="k", Body=b"x" * 10_240)
        _ask_buckets(client, name, counts, table)
        table.memory("buckets", "memory, filled", daemon)
        _start_again(daemon, table, "buckets")
        _ask_buckets(client, name, counts, table, " after the start")


def _ask_buckets(client: Any, name: str, counts: Counts, table: Table, when: str = "") -> None:
    table.median_ms(
        "buckets", f"GET 10 KiB{when}", lambda: client.get_object(Bucket=name, Key="k")["Body"].read()
    )
    table.median_ms("buckets", f"ListBuckets{when}", client.list_buckets, times=5)
    assert len(client.list_buckets()["Buckets"]) == counts.buckets


def parts(folder: Path, counts: Counts, table: Table) -> None:
    """One upload of as many parts as S3 allows, of the least size that it allows."""
    with _daemon(folder, table, "parts") as daemon:
        client = daemon.client()
        client.create_bucket(Bucket=_BUCKET)
        upload = client.create_multipart_upload(Bucket=_BUCKET, Key="k")["UploadId"]
        body, seen = os.urandom(_PART), list[int]()
        etag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
        about = {"Bucket": _BUCKET, "Key": "k", "UploadId": upload}

        def put(number: int) -> None:
            assert client.upload_part(**about, PartNumber=number, Body=body)["ETag"] == etag
            if number % 500 == 0:
                seen.append(private_memory(daemon))

        uploaded = table.seconds("parts", f"{counts.parts:,} parts of 5 MiB, 4 connections")
        with uploaded, ThreadPoolExecutor(4) as pool:
            list(pool.map(put, range(1, counts.parts + 1)))
        table.add("parts", "most memory meanwhile", max(seen, default=0) / 2**20, "MiB")
        assert _pages(client, "list_parts", "Parts", **about) == counts.parts
        table.median_ms("parts", "page of 1,000 parts", lambda: client.list_parts(**about), times=5)
        chosen = [{"PartNumber": number, "ETag": etag} for number in range(1, counts.parts + 1)]
        with table.seconds("parts", "CompleteMultipartUpload"):
            client.complete_multipart_upload(**about, MultipartUpload={"Parts": chosen})
        _ask_parts(client, body, counts, table)
        _start_again(daemon, table, "parts")
        _ask_parts(client, body, counts, table, " after the start")


def _ask_parts(client: Any, body: bytes, counts: Counts, table: Table, when: str = "") -> None:
    at = (counts.parts - 1) * _PART - 1000
    ranged = {"Bucket": _BUCKET, "Key": "k", "Range": f"bytes={at}-{at + 1999}"}
    assert client.get_object(**ranged)["Body"].read() == body[-1000:] + body[:1000]
    table.median_ms("parts", f"HEAD{when}", lambda: client.head_object(Bucket=_BUCKET, Key="k"))
    table.median_ms(
        "parts", f"GET of 2,000 bytes across two parts{when}", lambda: client.get_object(**ranged)
    )


def versions(folder: Path, counts: Counts, table: Table) -> None:
    """One key of very many versions."""
    with _daemon(folder, table, "versions") as daemon:
        client = daemon.client()
        client.create_bucket(Bucket=_BUCKET)
        client.put_bucket_versioning(Bucket=_BUCKET, VersioningConfiguration={"Status": "Enabled"})
        with table.seconds("versions", f"{counts.versions:,} versions of one key, 24 connections"):
            stock(_target(daemon).as_server(), [f"/{_BUCKET}/k"] * counts.versions, lambda done: None)
        client.put_object(Bucket=_BUCKET, Key="k", Body=b"x" * 10_240)
        table.memory("versions", "memory, filled", daemon)
        _ask_versions(client, counts, table)
        _start_again(daemon, table, "versions")
        _ask_versions(client, counts, table, " after the start")


def _ask_versions(client: Any, counts: Counts, table: Table, when: str = "") -> None:
    same = {"Bucket": _BUCKET, "Key": "k"}
    table.median_ms(
        "versions", f"GET 10 KiB of the newest{when}", lambda: client.get_object(**same)["Body"].read()
    )
    table.median_ms("versions", f"ListObjectsV2{when}", lambda: client.list_objects_v2(Bucket=_BUCKET))
    table.median_ms(
        "versions",
        f"page of 1,000 versions{when}",
        lambda: client.list_object_versions(Bucket=_BUCKET),
        times=5,
    )
    if when:
        found = client.get_paginator("list_object_versions").paginate(Bucket=_BUCKET)
        assert sum(len(page.get("Versions", ())) for page in found) == counts.versions + 1
        return
    with table.seconds("versions", "listing of all versions, page by page, boto3"):
        assert _pages(client, "list_object_versions", "Versions", Bucket=_BUCKET) == counts.versions + 1


def clients(folder: Path, counts: Counts, table: Table) -> None:
    """Connections that each ask for the most expensive allowed thing, and one that reads a small object."""
    with _daemon(folder, table, "clients") as daemon:
        client = daemon.client()
        client.create_bucket(Bucket=_BUCKET)
        client.put_object(Bucket=_BUCKET, Key="small", Body=b"x" * 10_240)
        _measure_beside(daemon, "nobody", None, counts, table)
        fill(daemon, _BUCKET)
        for name, costly in costly_requests(daemon, _BUCKET).items():
            _measure_beside(daemon, name, costly, counts, table)
        table.memory("clients", "memory afterwards", daemon)
        assert "Traceback" not in daemon.output()


def _measure_beside(daemon: Daemon, name: str, costly: Costly | None, counts: Counts, table: Table) -> None:
    client, peak = daemon.client(), list[int]()

    def small() -> None:
        client.get_object(Bucket=_BUCKET, Key="small")["Body"].read()
        peak.append(private_memory(daemon))

    if costly is None:
        table.median_ms("clients", f"GET 10 KiB beside {name}", small)
        return
    with crowd(daemon, costly, counts.clients) as answers:
        table.median_ms("clients", f"GET 10 KiB beside {counts.clients} × {name}", small, times=counts.reads)
    table.add("clients", f"most memory beside {counts.clients} × {name}", max(peak) / 2**20, "MiB")
    for status, count in sorted(answers.items()):
        table.add("clients", f"answers with {status} to {name}", count, "")
    assert answers.get(200), f"nobody was answered: {name}: {answers}"


SCENES: dict[str, Scene] = {
    "keys": keys,
    "buckets": buckets,
    "versions": versions,
    "parts": parts,
    "clients": clients,
}
