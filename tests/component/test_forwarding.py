"""Any node answers for any name: what it does not hold itself, it has another node answer."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from tests.component.mesh_nodes import running_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.component.mesh_nodes import Running


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

    asyncio.run(run())


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
