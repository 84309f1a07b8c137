"""Jobs asked for by hand; what they made, read."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.daemons import Daemon


def start(daemon: Daemon, **document: Any) -> dict[str, Any]:
    answer = daemon.request("POST", "/-/jobs", json.dumps(document).encode())
    assert answer.status == 200, answer.body
    return dict(json.loads(answer.body))


def ended(daemon: Daemon, job: Mapping[str, Any]) -> dict[str, Any]:
    """The job, once it has ended. Raises OSError if the daemon does not say."""
    while True:
        answer = daemon.request("GET", f"/-/jobs/{job['id']}?wait=30")
        if answer.status != 200:
            raise OSError(f"job {job['id']}: {answer.status} {answer.body[:200]!r}")
        found = dict(json.loads(answer.body))
        if found["state"] in ("done", "failed", "cancelled"):
            return found


def done(daemon: Daemon, **document: Any) -> dict[str, Any]:
    job = ended(daemon, start(daemon, **document))
    assert job["state"] == "done", job
    return job


def objects(s3: Any, bucket: str, prefix: str = "") -> dict[str, bytes]:
    """Every object under a prefix, by what follows that in its key."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return {key[len(prefix) :]: s3.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}


def members(*bodies: bytes) -> dict[str, bytes]:
    """The files of tars; none stands twice."""
    found: dict[str, bytes] = {}
    for body in bodies:
        with tarfile.open(fileobj=io.BytesIO(body)) as tar:
            for member in tar:
                assert member.name not in found
                found[member.name] = tar.extractfile(member).read()  # type: ignore[union-attr]
    return found
