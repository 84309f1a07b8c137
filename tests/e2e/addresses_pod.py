"""Runs in a pod: S3 at each URL of its arguments, whose hosts are addresses, with the SDK and, if the image
has it, boto3: objects, presigned URLs, a policy that names this pod's own address. Prints one line of JSON:
by URL, what was not as it should be."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import socket
import sys
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import meshsdk as mesh

BUCKET, BODY = "addresses", b"by address" * 1000


def by_sdk(url: str) -> list[str]:
    """Write, read and list with the SDK."""
    with mesh.connect(url) as client:
        client.create_bucket(BUCKET)
        client.put(BUCKET, "sdk", BODY)
        same = bytes(client.get(BUCKET, "sdk")) == BODY
        listed = "sdk" in [each.key for each in client.list(BUCKET)]
    return [*(["SDK: other bytes"] if not same else []), *(["SDK: not listed"] if not listed else [])]


def by_boto3(url: str) -> list[str]:
    """Write, read and list with boto3, its bucket in the path and, as far as it does so, in the host; then by
    presigned URLs; then without keys, by a policy with the address that the daemon sees."""
    import boto3
    from botocore.config import Config

    wrong = []
    for style in ("path", "virtual", "auto"):
        config = Config(s3={"addressing_style": style}, signature_version="s3v4")
        s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=config)
        s3.put_object(Bucket=BUCKET, Key=style, Body=BODY)
        if s3.get_object(Bucket=BUCKET, Key=style)["Body"].read() != BODY:
            wrong.append(f"boto3, {style}: other bytes")
        if style not in [each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET)["Contents"]]:
            wrong.append(f"boto3, {style}: not listed")
        where = {"Bucket": BUCKET, "Key": f"{style}-presigned"}
        put, get = (s3.generate_presigned_url(each, Params=where) for each in ("put_object", "get_object"))
        seen = status(put, method="PUT", data=BODY), status(get)
        if seen != (200, 200):
            wrong.append(f"presigned, {style}: {seen}")
    own = own_address(url)
    for network, expected in ((own, 200), (neighbour(own), 403)):
        s3.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy(network)))
        if (seen_ := status(f"{url}/{BUCKET}/path")) != expected:
            wrong.append(f"aws:SourceIp {network}, from {own}: {seen_}, not {expected}")
    s3.delete_bucket_policy(Bucket=BUCKET)
    return wrong


def policy(address: str) -> dict[str, Any]:
    """Return the policy that allows everybody at an address to read."""
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:GetObject",
        "Resource": f"arn:aws:s3:::{BUCKET}/*",
        "Condition": {"IpAddress": {"aws:SourceIp": address}},
    }
    return {"Version": "2012-10-17", "Statement": [statement]}


def own_address(url: str) -> str:
    """Return the address from which this pod connects to a URL."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=20) as sock:
        return str(sock.getsockname()[0])


def neighbour(address: str) -> str:
    """Return another address of the same family."""
    return str(ipaddress.ip_address(int(ipaddress.ip_address(address)) ^ 1))


def status(url: str, **how: Any) -> int:
    """Return the status of a request."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, **how), timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def main() -> None:
    found = {}
    for url in sys.argv[1:]:
        found[url] = by_sdk(url)
        if importlib.util.find_spec("boto3"):
            found[url] += by_boto3(url)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
