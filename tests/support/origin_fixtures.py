"""What tests of backed buckets do again and again."""

from __future__ import annotations

import re
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

import meshsdk
from meshsdk.admin import cluster_admin
from tests.support.bounded_wait import await_true
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.support.origin_places import Place


def write_credentials(directory: Path, origin: Place) -> None:
    lines = f"aws_access_key_id={origin.access_key}\naws_secret_access_key={origin.secret_key}\n"
    (directory / "weed").write_text(lines)


def sdk(daemon: Daemon) -> meshsdk.Client:
    return meshsdk.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key)


def bucket(daemon: Daemon, origin: Place, name: str, **options: Any) -> Any:
    """A new bucket that stands for a folder of its name at the origin; a client of the daemon's. One of that
    name, of a try before, goes first."""
    document = {
        "url": f"s3://{origin.bucket}/{name}",
        "endpoint": origin.proxy.endpoint,
        "credentials": "weed",
        **options,
    }
    s3 = daemon.client()
    with sdk(daemon) as client:
        again = client.has_bucket(name)
        if again:
            eventually(lambda: _deleted(s3, name))
        cluster_admin.create_bucket(client.transport, name, document)
    if again:  # a worker may still think that its origin is down
        eventually(lambda: all(_lists(daemon.client(), name) for _ in range(4)))
    return s3


def _lists(s3: Any, name: str) -> bool:
    try:
        s3.list_objects_v2(Bucket=name, Prefix="none")
    except ClientError:
        return False
    return True


def _deleted(s3: Any, name: str) -> bool:
    """False while it has what is not at its origin yet."""
    try:
        s3.delete_bucket(Bucket=name)
    except ClientError as error:
        if error.response["Error"]["Code"] != "BucketNotEmpty":
            raise
        return False
    return True


def put(origin: Place, name: str, key: str, data: bytes, **more: Any) -> None:
    origin.client.put_object(Bucket=origin.bucket, Key=f"{name}/{key}", Body=data, **more)


def read(client: Any, name: str, key: str, **more: Any) -> bytes:
    return bytes(client.get_object(Bucket=name, Key=key, **more)["Body"].read())


def code(call: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(*args, **more)
    return str(caught.value.response["Error"]["Code"])


def until_kept(client: Any, name: str, key: str, origin: Place) -> None:
    """Read until no GET is needed; with a TTL of 0 it is a HEAD a time."""
    for _ in range(100):
        before = len(origin.faults.gets(key))
        read(client, name, key)
        if len(origin.faults.gets(key)) == before:
            return
    raise AssertionError("never cached")


def metric(daemon: Daemon, name: str) -> float:
    """The sum of a metric over its labels."""
    with urllib.request.urlopen(daemon.endpoint + "/metrics") as answer:
        text = str(answer.read().decode())
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
    return sum(float(each) for each in found)


def eventually(true: Any, seconds: float = 60.0, told: Any = lambda: "never") -> None:
    """Wait until it is so; `told` says what is instead."""
    await_true(true, seconds, told=told)


@contextmanager
def small_daemon(
    origin: Place,
    scratch: Path,
    cache: str = "16MiB",
    workers: int = 2,
    fail: str = "",
    more: Sequence[str] = (),
) -> Iterator[Daemon]:
    """A daemon whose cache is small. `fail`: its failpoints; `more`: further flags."""
    credentials = scratch / "credentials"
    credentials.mkdir()
    write_credentials(credentials, origin)
    flags = ["--origin-credentials", str(credentials), "--cache", cache, *more]
    with Daemon.start(workers=workers, args=flags, env={"MESHD_FAILPOINTS": fail}) as daemon:
        yield daemon
        assert "Traceback" not in daemon.output()
