"""Daemons that listen on IPv6, on IPv4, and on both with one socket."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

import meshsdk as mesh
from meshd.config.settings import HttpSettings
from meshd.process.listen_sockets import bind_http
from meshd.process.local_etcd import reserve_port
from meshsdk import ops
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FAMILIES = ("127.0.0.1", "[::1]")


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="module")
def both(audit: Path) -> Iterator[Daemon]:
    """A daemon that listens on `[::]`."""
    args = ["--listen", f"[::]:{reserve_port()}", "--audit-log", str(audit)]
    with Daemon.start(args=args) as daemon:
        yield daemon


def at(daemon: Daemon, host: str) -> str:
    """The daemon's URL by another of its addresses."""
    return f"http://{host}:{urlsplit(daemon.endpoint).port}"


def test_its_url_is_one_that_every_machine_has(both: Daemon) -> None:
    assert urlsplit(both.endpoint).hostname == "127.0.0.1", "some machines have no [::1]"
    port = urlsplit(both.endpoint).port
    with (
        closing(socket.socket(socket.AF_INET6, socket.SOCK_STREAM)) as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("::", port))


def test_without_ipv6_every_address_is_one_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """`PreferDualStack` is for every cluster, whatever its nodes have."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with closing(bind_http(HttpSettings(host="::", port=0))) as sock:
        assert (sock.family, sock.getsockname()[0]) == (socket.AF_INET, "0.0.0.0")


@pytest.mark.parametrize("host", FAMILIES)
def test_boto3_and_the_sdk_use_it_by_either_family(both: Daemon, host: str) -> None:
    bucket = f"family-{len(host)}"
    client = both.client(endpoint_url=at(both, host))
    client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="a b/ü", Body=b"1" * 70_000)
    assert client.get_object(Bucket=bucket, Key="a b/ü")["Body"].read() == b"1" * 70_000
    signed = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "a b/ü"})
    assert urlsplit(signed).netloc == urlsplit(at(both, host)).netloc
    url = urlsplit(signed)
    with closing(socket.create_connection((str(url.hostname), url.port), timeout=60)) as sock:
        sock.settimeout(60)
        head = f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n\r\n"
        sock.sendall(head.encode())
        assert sock.recv(12) == b"HTTP/1.1 200"
    keys: dict[str, Any] = {"access_key": both.access_key, "secret_key": both.secret_key}
    with mesh.connect(at(both, host), **keys) as sdk:
        sdk.put(bucket, "x", b"2")
        assert sdk.get(bucket, "x") == b"2"
        assert sdk.put_many(bucket, [(f"t/{n}.json", b'{"n": %d}' % n) for n in range(20)]) == 20


def epoch(endpoint: str, keys: dict[str, Any], bucket: str) -> list[int]:
    """The labels of an epoch of the bucket's samples."""
    with mesh.connect(endpoint, **keys) as client:
        samples = mesh.open(f"s3://{bucket}/", fields={"n": "cls"}, client=client).map(ops.int_label("n"))
        with mesh.Loader(samples, 4) as loader:
            return sorted(int(label) for batch in loader for label in batch["n"])


@pytest.mark.parametrize("host", FAMILIES)
def test_samples_are_read_by_either_family(both: Daemon, host: str) -> None:
    client, bucket = both.client(), f"samples-{len(host)}"
    client.create_bucket(Bucket=bucket)
    for number in range(12):
        client.put_object(Bucket=bucket, Key=f"{number:02}.cls", Body=b"%d" % number)
    keys: dict[str, Any] = {"access_key": both.access_key, "secret_key": both.secret_key}
    assert epoch(at(both, host), keys, bucket) == [*range(12)]


def test_policies_name_ipv4_clients_of_such_a_socket_as_usual(both: Daemon, audit: Path) -> None:
    client = both.client()
    client.create_bucket(Bucket="ranges")
    client.put_object(Bucket="ranges", Key="k", Body=b"1")

    def allow(operator: str, source: str) -> None:
        statement = {
            "Effect": "Allow",
            "Principal": "*",
            "Action": "s3:GetObject",
            "Resource": "arn:aws:s3:::ranges/*",
            "Condition": {operator: {"aws:SourceIp": source}},
        }
        policy = {"Version": "2012-10-17", "Statement": [statement]}
        client.put_bucket_policy(Bucket="ranges", Policy=json.dumps(policy))

    def reads(host: str) -> int:
        where = urlsplit(at(both, host))
        with closing(socket.create_connection((str(where.hostname), where.port), timeout=60)) as sock:
            sock.settimeout(60)
            sock.sendall(f"GET /ranges/k HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
            return int(sock.recv(12)[9:])

    for operator, source, allowed in (
        ("IpAddress", "127.0.0.0/8", (200, 403)),
        ("IpAddress", "::1/128", (403, 200)),
        ("StringEquals", "127.0.0.1", (200, 403)),
        ("IpAddress", "::ffff:127.0.0.1", (403, 403)),
    ):
        allow(operator, source)
        assert tuple(map(reads, FAMILIES)) == allowed, (operator, source)

    def remotes() -> set[str]:
        told = [json.loads(line) for line in audit.read_text().splitlines()]
        return {each["remote"] for each in told if each.get("bucket") == "ranges"}

    await_true(lambda: remotes() == {"127.0.0.1", "::1"}, 10)


def test_a_mesh_of_ipv6_alone() -> None:
    cluster = DaemonCluster(3)
    for node in cluster.nodes.values():
        node.host = "::1"
    with closing(cluster):
        cluster.etcd.__enter__()
        cluster.start_all()
        assert {urlsplit(each).hostname for each in cluster.endpoints.values()} == {"::1"}
        client = cluster["n1"].client()
        client.create_bucket(
            Bucket="numbers",
        )
        bodies = {f"{number}.cls": b"%d" % number for number in range(40)}
        for key, body in bodies.items():
            client.put_object(Bucket="numbers", Key=key, Body=body)
        for node in cluster.nodes.values():
            other = node.client()
            assert {
                key: other.get_object(Bucket="numbers", Key=key)["Body"].read() for key in bodies
            } == bodies
        keys: dict[str, Any] = {"access_key": cluster.access_key, "secret_key": cluster.secret_key}
        assert epoch(cluster.endpoints["n2"], keys, "numbers") == [*range(40)]
        cluster.kill("n3")
        with pytest.raises(ClientError, match="NoSuchKey"):
            client.get_object(Bucket="numbers", Key="none")
        assert client.get_object(Bucket="numbers", Key="1.cls")["Body"].read() == bodies["1.cls"]
