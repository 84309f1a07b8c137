"""Any node answers for any name: what it does not hold itself, it has another node answer."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import tarfile
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from botocore.exceptions import ClientError

from meshd.control.cluster_map_store import ClusterMapStore
from meshd.reads.copy_source import FIND_SOURCE, READ_SOURCE
from meshd.rpc.peer_client import PeerClient
from meshwire.cluster import routes
from tests.support.mesh_nodes import NodesBeside, everybody, running_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.store.api import ObjectStore
    from meshwire.cluster import Node as Member
    from tests.support.mesh_nodes import Running


def _among(number: int, test: Callable[[list[Any], list[Running]], None]) -> None:
    """Runs `test` in a thread, with a client of each of `number` nodes, which share a bucket `bench`."""

    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), number) as nodes:
            clients = [node.client() for node in nodes]
            await asyncio.to_thread(clients[0].create_bucket, Bucket="bench")
            try:
                await asyncio.to_thread(test, clients, nodes)
            finally:
                for client in clients:
                    client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as daemons run
        runner.run(run())


def _body(client: Any, key: str, **more: Any) -> bytes:
    return bytes(client.get_object(Bucket="bench", Key=key, **more)["Body"].read())


@pytest.mark.parametrize("size", [0, 10, 70_000, 3_000_000])
def test_every_node_answers_for_every_name(size: int) -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        body = os.urandom(size)
        for number in range(6):
            key = f"key {number}"
            put = clients[number % 3].put_object(Bucket="bench", Key=key, Body=body, Metadata={"a": "b"})
            for client in clients:
                assert _body(client, key) == body
                head = client.head_object(Bucket="bench", Key=key)
                assert (head["ETag"], head["ContentLength"]) == (put["ETag"], size)
                assert head["Metadata"] == {"a": "b"}
                if size:
                    assert _body(client, key, Range="bytes=3-") == body[3:]
        held = [len(node.node.store.list("bench").entries) for node in nodes]
        assert sum(held) == 6  # one copy of each, wherever it was put
        assert min(held) < 6

    _among(3, test)


def test_refusals_come_through() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        for number in range(4):
            key = f"key {number}"
            clients[0].put_object(Bucket="bench", Key=key, Body=b"x")
            for client in clients:
                with pytest.raises(ClientError) as missing:
                    client.get_object(Bucket="bench", Key=f"no {key}")
                assert missing.value.response["Error"]["Code"] == "NoSuchKey"
                with pytest.raises(ClientError) as there:
                    client.put_object(Bucket="bench", Key=key, Body=b"y" * 100_000, IfNoneMatch="*")
                assert there.value.response["Error"]["Code"] == "PreconditionFailed"
                assert there.value.response["Error"]["Condition"] == "If-None-Match"
                with pytest.raises(ClientError) as nowhere:
                    client.put_object(Bucket="other", Key=key, Body=b"y")
                assert nowhere.value.response["Error"]["Code"] == "NoSuchBucket"

    _among(3, test)


def test_uploads_of_many_parts() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        part = os.urandom(5 << 20)
        for number in range(3):
            key = f"upload {number}"
            upload = clients[0].create_multipart_upload(Bucket="bench", Key=key)["UploadId"]
            parts = []
            for at, client in enumerate(clients, 1):
                done = client.upload_part(Bucket="bench", Key=key, UploadId=upload, PartNumber=at, Body=part)
                parts.append({"PartNumber": at, "ETag": done["ETag"]})
            listed = clients[1].list_parts(Bucket="bench", Key=key, UploadId=upload)["Parts"]
            assert [one["PartNumber"] for one in listed] == [1, 2, 3]
            clients[2].complete_multipart_upload(
                Bucket="bench", Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
            )
            for client in clients:
                assert _body(client, key) == part * 3
                client.put_object_tagging(
                    Bucket="bench", Key=key, Tagging={"TagSet": [{"Key": "k", "Value": "v"}]}
                )
                assert client.get_object_tagging(Bucket="bench", Key=key)["TagSet"][0]["Value"] == "v"
            clients[number].delete_object(Bucket="bench", Key=key)
            with pytest.raises(ClientError):
                clients[0].head_object(Bucket="bench", Key=key)

    _among(3, test)


def _keys(client: Any) -> list[str]:
    return [entry["Key"] for entry in client.list_objects_v2(Bucket="bench").get("Contents", [])]


def test_many_are_deleted_at_once() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        for client in clients:
            names = [f"key {number}" for number in range(30)]
            for name in names:
                client.put_object(Bucket="bench", Key=name, Body=b"x")
            objects = [{"Key": name} for name in [*names[:20], "nothing"]]
            done = client.delete_objects(Bucket="bench", Delete={"Objects": objects})
            assert [entry["Key"] for entry in done["Deleted"]] == [*names[:20], "nothing"]
            assert "Errors" not in done
            assert _keys(client) == sorted(names[20:])
            objects = [{"Key": name, "ETag": "0" * 32} for name in names[20:25]]
            objects += [{"Key": name} for name in names[25:]]
            done = client.delete_objects(Bucket="bench", Delete={"Objects": objects, "Quiet": True})
            assert "Deleted" not in done
            assert [entry["Key"] for entry in done["Errors"]] == names[20:25]
            assert _keys(client) == names[20:25]

    _among(3, test)


def test_copies_of_what_other_nodes_hold() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        body = os.urandom(6 << 20)
        made = clients[0].put_object(
            Bucket="bench", Key="source", Body=body, Metadata={"a": "b"}, Tagging="t=u", ContentType="image/x"
        )
        source = {"Bucket": "bench", "Key": "source"}
        for number in range(8):
            client, key = clients[number % 3], f"copy {number}"
            copied = client.copy_object(Bucket="bench", Key=key, CopySource=source)["CopyObjectResult"]
            assert copied["ETag"] == made["ETag"]
            head = client.head_object(Bucket="bench", Key=key)
            assert (head["Metadata"], head["ContentType"]) == ({"a": "b"}, "image/x")
            assert _body(client, key) == body
            assert client.get_object_tagging(Bucket="bench", Key=key)["TagSet"] == [
                {"Key": "t", "Value": "u"}
            ]
            with pytest.raises(ClientError, match="NoSuchKey"):
                client.copy_object(Bucket="bench", Key=key, CopySource=source | {"Key": "none"})
            with pytest.raises(ClientError, match="PreconditionFailed"):
                client.copy_object(Bucket="bench", Key=key, CopySource=source, CopySourceIfMatch="x")
            upload = client.create_multipart_upload(Bucket="bench", Key=key)["UploadId"]
            part = client.upload_part_copy(
                Bucket="bench",
                Key=key,
                UploadId=upload,
                PartNumber=1,
                CopySource=source,
                CopySourceRange="bytes=5-5500000",
            )["CopyPartResult"]
            parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
            client.complete_multipart_upload(Bucket="bench", Key=key, UploadId=upload, MultipartUpload=parts)
            assert _body(client, key) == body[5:5500001]

    _among(3, test)


@pytest.mark.parametrize(
    ("door", "now", "part"),
    [
        (FIND_SOURCE.path, 0, False),
        (FIND_SOURCE.path, 2, True),
        (READ_SOURCE.path, 0, True),
        (READ_SOURCE.path, 2, False),
    ],
)
def test_a_source_that_moves_while_it_is_asked_for_is_copied(
    door: str, now: int, part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From whoever holds it then: a third node, or the one that makes the copy."""
    body = os.urandom(70_000)
    with NodesBeside(3) as beside:
        nodes, client = beside.nodes, beside.nodes[0].client()
        before = nodes[0].node.mesh.current_map()
        after = replace(everybody([nodes[0].member, nodes[2].member], 1), version=before.version + 1)
        source = next(
            key
            for key in (f"source-{number}" for number in itertools.count())
            if [routes(each, 1).route_of_key("bench", key).read_set[0].node_id for each in (before, after)]
            == [nodes[1].member.node_id, nodes[now].member.node_id]
        )
        target = beside.key_of(0, "target")
        client.put_object(Bucket="bench", Key=source, Body=body)
        beside.run(_carried(nodes[1].node.store, nodes[now].node.store, source))
        asked, call = list[str](), PeerClient.call

        @asynccontextmanager
        async def called(peers: PeerClient, node: Member, method: str, path: str, **more: Any) -> Any:
            if path == door:
                asked.append(node.node_id)
                await ClusterMapStore(nodes[0].node.control).update_map(lambda _: after)
            async with call(peers, node, method, path, **more) as answer:
                yield answer

        monkeypatch.setattr(PeerClient, "call", called)
        copied = {"Bucket": "bench", "Key": target, "CopySource": {"Bucket": "bench", "Key": source}}
        if part:
            upload = client.create_multipart_upload(Bucket="bench", Key=target)["UploadId"]
            made = client.upload_part_copy(**copied, UploadId=upload, PartNumber=1)["CopyPartResult"]
            parts = {"Parts": [{"PartNumber": 1, "ETag": made["ETag"]}]}
            client.complete_multipart_upload(
                Bucket="bench", Key=target, UploadId=upload, MultipartUpload=parts
            )
        else:
            client.copy_object(**copied)
        assert asked[0] == nodes[1].member.node_id
        assert _body(client, target) == body
        client.close()


async def _carried(giver: ObjectStore, taker: ObjectStore, key: str) -> None:
    """As movement does it before the map changes."""
    record = giver.get("bench", key)
    assert record is not None
    writer = taker.replica_writer("bench", key, size=record.size)
    await writer.write(giver.read_range(record, 0, record.size))
    await writer.commit_at_stamp(record)


def test_members_of_archives() -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in ("one.txt", "two.txt"):
            info = tarfile.TarInfo(name)
            info.size = len(name)
            archive.addfile(info, io.BytesIO(name.encode()))

    def test(clients: list[Any], nodes: list[Running]) -> None:
        for number in range(4):
            key = f"archive {number}.tar"
            clients[0].put_object(Bucket="bench", Key=key, Body=content.getvalue())
            for client in clients:
                assert _body(client, f"{key}/-/one.txt") == b"one.txt"
                listed = client.list_objects_v2(Bucket="bench", Prefix=f"{key}/-/")["Contents"]
                assert [entry["Key"] for entry in listed] == [f"{key}/-/one.txt", f"{key}/-/two.txt"]
                with pytest.raises(ClientError, match="NoSuchKey"):
                    _body(client, f"{key}/-/three.txt")
                client.copy_object(
                    Bucket="bench", Key="copy", CopySource={"Bucket": "bench", "Key": f"{key}/-/two.txt"}
                )
                assert _body(client, "copy") == b"two.txt"
            clients[1].put_object(Bucket="bench", Key=f"{key}/-/one.txt", Body=b"stored")
            for client in clients:
                assert _body(client, f"{key}/-/one.txt") == b"stored"

    _among(3, test)


def test_forms() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        for number in range(8):
            client, key, body = clients[number % 3], f"form {number}", os.urandom(300_000 * (number % 3))
            form = client.generate_presigned_post("bench", key)
            boundary = "xxxx"
            fields = "".join(
                f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
                for name, value in form["fields"].items()
            )
            fields += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
            data = fields.encode() + body + f"\r\n--{boundary}--\r\n".encode()
            request = urllib.request.Request(
                form["url"],
                data,
                {"Content-Type": f"multipart/form-data; boundary={boundary}"},
            )
            with urllib.request.urlopen(request) as answer:
                assert answer.status == 204
                assert answer.headers["Location"].startswith(form["url"])
            for other in clients:
                assert _body(other, key) == body
            url = client.generate_presigned_url("get_object", {"Bucket": "bench", "Key": key})
            with urllib.request.urlopen(url) as answer:
                assert answer.read() == body

    _among(3, test)


def test_buckets() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        for number in range(3):
            clients[number].create_bucket(Bucket="other")
            clients[number - 1].put_object(Bucket="other", Key=f"k{number}", Body=b"x")
            clients[number - 2].create_multipart_upload(Bucket="other", Key=f"u{number}")
            for client in clients:
                with pytest.raises(ClientError, match="BucketNotEmpty"):
                    client.delete_bucket(Bucket="other")
            clients[number].delete_object(Bucket="other", Key=f"k{number}")
            clients[number - 1].delete_bucket(Bucket="other")
            assert all(node.node.store.is_empty("other") for node in nodes)
            with pytest.raises(ClientError, match="NoSuchBucket"):
                clients[number - 2].put_object(Bucket="other", Key="k", Body=b"x")

    _among(3, test)


def test_anyone_may_ask_any_node() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        for number in range(6):
            clients[0].put_object(Bucket="bench", Key=f"k{number}", Body=b"x", ACL="public-read")
            clients[0].put_object(Bucket="bench", Key=f"p{number}", Body=b"x")
            for node in nodes:
                with urllib.request.urlopen(f"{node.member.endpoint}/bench/k{number}") as answer:
                    assert answer.read() == b"x"
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    urllib.request.urlopen(f"{node.member.endpoint}/bench/p{number}")

    _among(3, test)
