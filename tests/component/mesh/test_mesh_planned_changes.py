"""While nothing breaks, nobody is refused: writes of all kinds that are under way while nodes join, leave and
weigh otherwise. Real daemons, a real etcd.

Law: what is asked once takes place once: a condition is judged by who decides in the end, a bucket with
versions gets one, an upload is completed once.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from meshd.util.clock import SystemClock
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign
from tests.support.bounded_wait import await_end
from tests.support.daemon_cluster import DaemonCluster
from tests.support.origin_fixtures import eventually
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.daemons import Daemon

require_etcd()

pytestmark = pytest.mark.timeout(300)
"""Three changes, for each of which `Mesh.await_map` waits for a minute."""
PLAIN, VERSIONED = "planned", "planned-versions"
THROUGH, BACK = "planned-through", "planned-back"
"""Buckets with an origin: one folder each, which all nodes have."""
ONCE = {"if-none-match": "*"}
NAMES = 10
PAUSE = 0.2  # seconds between two rounds of a client: the nodes need the cores, too
SIZES = (5000, 300_000)
_clock = SystemClock()


@pytest.fixture
def mesh() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3, args=("--down-after", "60"), lease=4.0) as three:
        client = three["n1"].client()
        for bucket in (PLAIN, VERSIONED):
            client.create_bucket(Bucket=bucket)
        client.put_bucket_versioning(Bucket=VERSIONED, VersioningConfiguration={"Status": "Enabled"})
        yield three


class Held:
    """A request of which half of the body has gone."""

    def __init__(self, node: Daemon, target: str, body: bytes, **headers: str) -> None:
        path, _, query = target.partition("?")
        said = {"host": urlsplit(node.endpoint).netloc} | headers
        said |= sign(
            RequestHead("PUT", path, query, said),
            Credential(node.access_key, node.secret_key),
            region="us-east-1",
            timestamp=_clock.now_ms() // 1000,
            payload_hash=hashlib.sha256(body).hexdigest(),
        )
        self.target, self._connection = target, node.connect()
        self._connection.putrequest("PUT", target, skip_host=True, skip_accept_encoding=True)
        for name, value in (said | {"content-length": str(len(body))}).items():
            self._connection.putheader(name, value)
        self._connection.endheaders()
        self._connection.send(body[: len(body) // 2])
        self._rest = body[len(body) // 2 :]

    def end(self) -> dict[str, str]:
        """The headers of its answer, which must be a success."""
        self._connection.send(self._rest)
        answer = self._connection.getresponse()
        said = answer.read()
        self._connection.close()
        assert answer.status == 200, (self.target, answer.status, said)
        return {name.lower(): value for name, value in answer.getheaders()}


class Busy:
    """A client that does all kinds of writes, each of which must succeed."""

    def __init__(self, mesh: DaemonCluster, round_of: Callable[[Any, str], None] | None = None) -> None:
        self._mesh, self._stop = mesh, threading.Event()
        self._round = round_of or plain_round
        self._thread = threading.Thread(target=self._run)
        self.refused: list[str] = []
        self.rounds = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        await_end(self._thread)

    def _run(self) -> None:
        clients = [self._mesh[node_id].client() for node_id in ("n1", "n2", "n3")]
        while not self._stop.wait(PAUSE):
            self.rounds += 1
            try:
                self._round(clients[self.rounds % 3], f"busy/{secrets.token_hex(6)}")
            except (ClientError, BotoCoreError) as error:
                self.refused.append(str(error))


def plain_round(client: Any, key: str) -> None:
    name = {"Bucket": PLAIN, "Key": key}
    etag = client.put_object(**name, Body=b"one", IfNoneMatch="*")["ETag"]
    client.put_object(**name, Body=b"two", IfMatch=etag)
    client.put_object_tagging(**name, Tagging={"TagSet": [{"Key": "a", "Value": "b"}]})
    client.copy_object(Bucket=PLAIN, Key=f"{key}-copy", CopySource=name)
    upload = client.create_multipart_upload(**name)["UploadId"]
    part = client.upload_part(**name, UploadId=upload, PartNumber=1, Body=b"three")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    client.complete_multipart_upload(**name, UploadId=upload, MultipartUpload=parts)
    client.copy_object(Bucket=PLAIN, Key=f"{key}-copy", CopySource=name)
    assert client.get_object(Bucket=PLAIN, Key=f"{key}-copy")["Body"].read() == b"three"
    assert client.get_object(**name)["Body"].read() == b"three"
    client.delete_object(**name)
    gone = client.delete_objects(Bucket=PLAIN, Delete={"Objects": [{"Key": key}, {"Key": f"{key}-copy"}]})
    if "Errors" in gone:
        raise BotoCoreError(msg=str(gone))


def backed_round(client: Any, key: str) -> None:
    client.put_object(Bucket=THROUGH, Key=f"{key}-source", Body=b"one")
    source = {"Bucket": THROUGH, "Key": f"{key}-source"}
    for bucket in (THROUGH, BACK):
        name = {"Bucket": bucket, "Key": key}
        client.put_object(**name, Body=b"two")
        upload = client.create_multipart_upload(**name)["UploadId"]
        part = client.upload_part(**name, UploadId=upload, PartNumber=1, Body=b"three")
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        client.complete_multipart_upload(**name, UploadId=upload, MultipartUpload=parts)
        client.copy_object(Bucket=bucket, Key=f"{key}-copy", CopySource=source)
        assert client.get_object(**name)["Body"].read() == b"three"
        assert client.get_object(Bucket=bucket, Key=f"{key}-copy")["Body"].read() == b"one"
        client.delete_object(**name)
        gone = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": f"{key}-copy"}]})
        if "Errors" in gone:
            raise BotoCoreError(msg=str(gone))
    client.delete_object(**source)


@contextmanager
def held(mesh: DaemonCluster) -> Iterator[None]:
    """Writes that are begun before and end after it: all of them take place, each once."""
    run, client = secrets.token_hex(4), mesh["n1"].client()
    nodes = [node for node in mesh.nodes.values() if node.running]
    begun: list[tuple[str, bytes, Held, str, Held, Held]] = []
    for number in range(NAMES):
        key, body = f"{run}/{number}", os.urandom(SIZES[number % 2])
        node = nodes[number % len(nodes)]
        upload = client.create_multipart_upload(Bucket=PLAIN, Key=f"{key}-up")["UploadId"]
        begun.append(
            (
                key,
                body,
                Held(node, f"/{PLAIN}/{key}", body, **ONCE),
                upload,
                Held(node, f"/{PLAIN}/{key}-up?partNumber=1&uploadId={upload}", body),
                Held(node, f"/{VERSIONED}/{key}", body),
            )
        )
    yield
    for key, body, once, upload, part, version in begun:
        once.end()
        parts = {"Parts": [{"PartNumber": 1, "ETag": part.end()["etag"]}]}
        client.complete_multipart_upload(
            Bucket=PLAIN, Key=f"{key}-up", UploadId=upload, MultipartUpload=parts
        )
        made = version.end()["x-amz-version-id"]
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=PLAIN, Key=key, Body=b"again", IfNoneMatch="*")
        for asked in mesh.nodes.values():
            for bucket, name in ((PLAIN, key), (PLAIN, f"{key}-up"), (VERSIONED, key)):
                assert asked.request("GET", f"/{bucket}/{name}").body == body
        versions = client.list_object_versions(Bucket=VERSIONED, Prefix=key + "").get("Versions", [])
        assert [each["VersionId"] for each in versions if each["Key"] == key] == [made]


def change(mesh: DaemonCluster, node_id: str, action: str, **more: Any) -> None:
    body = json.dumps({"action": action, **more}).encode()
    answer = mesh["n1"].request("POST", f"/-/cluster/nodes/{node_id}", body)
    assert answer.status == 200, answer.body


def await_settled(mesh: DaemonCluster, share: str, *, has: bool) -> None:
    """Until nothing moves, and a node has a share or has none."""
    mesh.await_map(
        lambda found: (
            not found.is_rebalancing and any(each.node_id == share for each in found.current_shares) == has
        )
    )


def test_writes_under_way_take_place_once_while_nodes_join_leave_and_weigh_otherwise(
    mesh: DaemonCluster,
) -> None:
    with Busy(mesh) as busy:
        with held(mesh):
            mesh.add("n4")
            await_settled(mesh, "n4", has=True)
        with held(mesh):
            change(mesh, "n4", "drain")
            change(mesh, "n1", "reweigh", weight=3)
            await_settled(mesh, "n4", has=False)
        with held(mesh):
            change(mesh, "n4", "undrain")
            change(mesh, "n1", "reweigh", weight=1)
            await_settled(mesh, "n4", has=True)
    assert busy.refused == []
    assert busy.rounds > 10
    assert sum(mesh.metric(node_id, "meshd_replication_writes_forwarded_total") for node_id in mesh.nodes) > 0


@contextmanager
def held_before_origins(mesh: DaemonCluster, places: dict[str, Path]) -> Iterator[None]:
    """As `held`, of buckets with origins: what was answered is at the origin, or comes there (`back`)."""
    run, client = secrets.token_hex(4), mesh["n1"].client()
    nodes = [node for node in mesh.nodes.values() if node.running]
    begun: list[tuple[str, str, bytes, Held, str, Held]] = []
    for number in range(NAMES):
        bucket, key, body = (THROUGH, BACK)[number % 2], f"{run}-{number}", os.urandom(SIZES[number // 2 % 2])
        node = nodes[number // 2 % len(nodes)]
        upload = client.create_multipart_upload(Bucket=bucket, Key=f"{key}-up")["UploadId"]
        part = Held(node, f"/{bucket}/{key}-up?partNumber=1&uploadId={upload}", body)
        begun.append((bucket, key, body, Held(node, f"/{bucket}/{key}", body), upload, part))
    yield
    for bucket, key, body, whole, upload, part in begun:
        whole.end()
        parts = {"Parts": [{"PartNumber": 1, "ETag": part.end()["etag"]}]}
        client.complete_multipart_upload(
            Bucket=bucket, Key=f"{key}-up", UploadId=upload, MultipartUpload=parts
        )
        for name in (key, f"{key}-up"):
            if bucket == THROUGH:
                assert (places[bucket] / name).read_bytes() == body
            for asked in mesh.nodes.values():
                assert asked.request("GET", f"/{bucket}/{name}").body == body
    for bucket, key, body, *_ in begun:
        for name in (key, f"{key}-up"):
            eventually(lambda file=places[bucket] / name, body=body: _holds(file, body))
            client.delete_object(Bucket=bucket, Key=name)
            assert not (places[bucket] / name).exists()


def _holds(file: Path, body: bytes) -> bool:
    return file.exists() and file.read_bytes() == body


def test_writes_to_buckets_with_origins_under_way_take_place_once(
    mesh: DaemonCluster, tmp_path: Path
) -> None:
    places = {THROUGH: tmp_path / "through", BACK: tmp_path / "back"}
    for bucket, place in places.items():
        place.mkdir()
        about = {"url": f"file://{place}", "write": bucket.removeprefix("planned-")}
        answer = mesh["n1"].request("PUT", f"/-/buckets/{bucket}", json.dumps(about).encode())
        assert answer.status == 200, answer.body
    with Busy(mesh, backed_round) as busy:
        with held_before_origins(mesh, places):
            mesh.add("n4")
            await_settled(mesh, "n4", has=True)
        with held_before_origins(mesh, places):
            change(mesh, "n4", "drain")
            change(mesh, "n1", "reweigh", weight=3)
            await_settled(mesh, "n4", has=False)
        with held_before_origins(mesh, places):
            change(mesh, "n4", "undrain")
            change(mesh, "n1", "reweigh", weight=1)
            await_settled(mesh, "n4", has=True)
    assert busy.refused == []
    assert busy.rounds > 5
    assert sum(mesh.metric(node_id, "meshd_replication_writes_forwarded_total") for node_id in mesh.nodes) > 0
    assert sum(mesh.metric(node_id, "meshd_origin_passed_total") for node_id in mesh.nodes) > 0
    eventually(lambda: not [file for place in places.values() for file in place.iterdir() if file.is_file()])
