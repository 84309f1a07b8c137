"""Writes to a mesh of real daemons with several workers each, while nodes die and stand still."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from tests.support.bounded_wait import await_end
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_REFUSED = ("PreconditionFailed", "ConditionalRequestConflict")


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3, workers=2) as found:
        found["n1"].client().create_bucket(Bucket="writes")
        yield found


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


def _get(client: Any, key: str) -> bytes:
    return bytes(client.get_object(Bucket="writes", Key=key)["Body"].read())


def test_one_of_many_creators_wins_whoever_is_asked(mesh: DaemonCluster) -> None:
    clients = [mesh[node].client() for node in ("n1", "n2", "n3") for _ in range(3)]
    run = secrets.token_hex(4)

    def create(key: str, number: int) -> int | None:
        try:
            clients[number].put_object(Bucket="writes", Key=key, Body=b"%d" % number, IfNoneMatch="*")
        except ClientError as error:
            if error.response["Error"]["Code"] == "PreconditionFailed":
                return None
            raise
        return number

    with ThreadPoolExecutor(len(clients)) as pool:
        for turn in range(6):
            won = [
                n
                for n in pool.map(create, [f"{run}-{turn}"] * len(clients), range(len(clients)))
                if n is not None
            ]
            assert len(won) == 1
            for client in clients[::3]:
                assert _get(client, f"{run}-{turn}") == b"%d" % won[0]


def test_counting_by_conditions_loses_nothing(mesh: DaemonCluster) -> None:
    """Read, add one, write if unchanged: as many as said they did."""
    mesh["n1"].client().put_object(Bucket="writes", Key="count", Body=b"0")

    def count(node: str) -> int:
        client, done = mesh[node].client(), 0
        for _ in range(40):
            found = client.get_object(Bucket="writes", Key="count")
            value = int(found["Body"].read())
            try:
                client.put_object(
                    Bucket="writes", Key="count", Body=b"%d" % (value + 1), IfMatch=found["ETag"]
                )
                done += 1
            except ClientError as error:
                if error.response["Error"]["Code"] not in _REFUSED:
                    raise
        return done

    with ThreadPoolExecutor(6) as pool:
        counted = sum(pool.map(count, ["n1", "n2", "n3"] * 2))
    assert int(_get(mesh["n2"].client(), "count")) == counted > 0


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_what_was_acknowledged_survives_the_decider(mesh: DaemonCluster, how: str) -> None:
    gone, run = "n3", secrets.token_hex(4)
    client = mesh["n2"].client()
    client.put_bucket_versioning(Bucket="writes", VersioningConfiguration={"Status": "Suspended"})
    acknowledged: dict[str, bytes] = {}
    writes = 0
    stop = threading.Event()
    lock = threading.Condition()

    def write(worker: int) -> None:
        nonlocal writes
        own, number = mesh["n2" if worker % 2 else "n1"].client(), 0
        while not stop.wait(0.02):
            number += 1
            key, body = f"{run}-{worker}-{number % 3}", b"%d" % number * (200_000 if number % 7 == 0 else 1)
            try:
                own.put_object(Bucket="writes", Key=key, Body=body)
            except (ClientError, BotoCoreError):
                with lock:
                    acknowledged.pop(key, None)  # it may or may not have taken place
            else:
                with lock:
                    acknowledged[key] = body
                    writes += 1
                    lock.notify()

    def await_writes() -> None:
        """Until so many more were acknowledged."""
        with lock:
            wanted = writes + 40
            assert lock.wait_for(lambda: writes >= wanted, 60), (writes, mesh.output())

    upload = client.create_multipart_upload(
        Bucket="writes", Key=mesh.key_with_primary(gone, "writes", f"{run}-up")
    )
    names = {"Bucket": "writes", "Key": upload["Key"], "UploadId": upload["UploadId"]}
    first = client.upload_part(**names, PartNumber=1, Body=b"1" * (5 << 20))["ETag"]
    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    try:
        await_writes()
        (mesh.kill if how == "killed" else mesh.pause)(gone)
        mesh.await_state(gone, "away")
        await_writes()
    finally:
        stop.set()
        for thread in threads:
            await_end(thread)
    second = client.upload_part(**names, PartNumber=2, Body=b"2" * 10)["ETag"]
    parts = [{"PartNumber": 1, "ETag": first}, {"PartNumber": 2, "ETag": second}]
    client.complete_multipart_upload(**names, MultipartUpload={"Parts": parts})
    assert _get(mesh["n1"].client(), upload["Key"]) == b"1" * (5 << 20) + b"2" * 10
    for reader in (mesh["n1"].client(), mesh["n2"].client()):
        for key, body in acknowledged.items():
            assert _get(reader, key) == body, key
    if how == "killed":
        mesh.up(gone)
    else:
        mesh.resume(gone)
    mesh.await_state(gone, "up")
    back = mesh[gone].client()
    for key, body in acknowledged.items():
        assert _get(back, key) == body, key


def _asked_in_vain(mesh: DaemonCluster, ask: Callable[[Any, Sequence[str]], object]) -> None:
    """`ask` has a request sent to a node that stands still, whose client gives up; what is written over it
    after that holds everywhere when the node is back."""
    gone, run = "n3", secrets.token_hex(4)
    path_style, once = {"addressing_style": "path"}, {"total_max_attempts": 1}
    hasty = Config(connect_timeout=2, read_timeout=1, s3=path_style, retries=once)
    nodes, client = ("n3", "n1", "n2"), mesh["n1"].client()
    names = [mesh.key_with_primary(node, "writes", f"{run}-{number}") for node in nodes for number in (1, 2)]
    impatient = [mesh[gone].client(config=hasty) for _ in names]
    mesh.pause(gone)

    def give_up(number: int) -> None:
        with pytest.raises(HTTPClientError):
            ask(impatient[number], names[number:] + names[:number])

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(give_up, range(len(names))))
    for found in impatient:
        found.close()
    mesh.await_state(gone, "away")
    for name in names:
        client.put_object(Bucket="writes", Key=name, Body=b"new")
    mesh.resume(gone)
    mesh.await_state(gone, "up")
    for node in nodes:
        for name in names:
            assert _get(mesh[node].client(), name) == b"new", (node, name)


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_write_that_a_stopped_node_had_not_read_yet_is_not_carried_out_later(
    mesh: DaemonCluster, size: int
) -> None:
    def put(client: Any, names: Sequence[str]) -> None:
        client.put_object(Bucket="writes", Key=names[0], Body=b"o" * size)

    _asked_in_vain(mesh, put)


def test_a_deletion_of_many_that_a_stopped_node_had_not_read_yet_is_not_carried_out_later(
    mesh: DaemonCluster,
) -> None:
    def delete(client: Any, names: Sequence[str]) -> None:
        client.delete_objects(Bucket="writes", Delete={"Objects": [{"Key": name} for name in names]})

    _asked_in_vain(mesh, delete)


def test_a_node_that_returns_learns_of_all_kinds_of_writes(mesh: DaemonCluster) -> None:
    """Versions, markers, removals, tags, ACLs and parts that were written while it was away."""
    gone, kinds = "n2", f"kinds-{secrets.token_hex(4)}"
    client = mesh["n1"].client()
    client.create_bucket(Bucket=kinds)
    names = {what: mesh.key_with_primary(gone, kinds, what) for what in ("dead", "tag", "acl", "v", "up")}
    for what in ("dead", "tag", "acl"):
        client.put_object(Bucket=kinds, Key=names[what], Body=what.encode())
    upload = {"Bucket": kinds, "Key": names["up"]}
    upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
    parts = [client.upload_part(**upload, PartNumber=1, Body=b"1" * (5 << 20))["ETag"]]
    client.put_bucket_versioning(Bucket=kinds, VersioningConfiguration={"Status": "Enabled"})
    first = client.put_object(Bucket=kinds, Key=names["v"], Body=b"first")["VersionId"]
    second = client.put_object(Bucket=kinds, Key=names["v"], Body=b"second")["VersionId"]
    mesh.kill(gone)
    mesh.await_state(gone, "away")

    client.delete_object(Bucket=kinds, Key=names["dead"], VersionId="null")
    client.put_object_tagging(
        Bucket=kinds, Key=names["tag"], Tagging={"TagSet": [{"Key": "a", "Value": "b"}]}
    )
    client.put_object_acl(Bucket=kinds, Key=names["acl"], ACL="public-read")
    client.delete_object(Bucket=kinds, Key=names["v"], VersionId=first)
    client.delete_object(Bucket=kinds, Key=names["v"])
    parts.append(client.upload_part(**upload, PartNumber=2, Body=b"2" * 10)["ETag"])
    mesh.up(gone)
    mesh.await_state(gone, "up")

    back = mesh[gone].client()
    with pytest.raises(ClientError, match="404"):
        back.head_object(Bucket=kinds, Key=names["dead"])
    assert back.get_object_tagging(Bucket=kinds, Key=names["tag"])["TagSet"] == [{"Key": "a", "Value": "b"}]
    assert len(back.get_object_acl(Bucket=kinds, Key=names["acl"])["Grants"]) == 2
    listed = back.list_object_versions(Bucket=kinds, Prefix=names["v"])
    assert [found["VersionId"] for found in listed["Versions"]] == [second]
    assert [found["IsLatest"] for found in listed["DeleteMarkers"]] == [True]
    done = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(parts, 1)]
    back.complete_multipart_upload(**upload, MultipartUpload={"Parts": done})
    whole = b"1" * (5 << 20) + b"2" * 10
    for node in mesh.nodes.values():
        assert node.client().get_object(Bucket=kinds, Key=names["up"])["Body"].read() == whole
