"""Listings of a mesh: complete, in order, page by page, from whichever node they are asked."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from botocore.exceptions import ClientError

from tests.support.mesh_nodes import running_nodes
from tests.support.server_shutdown import stop_listening

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.mesh_nodes import Running

_KEYS = (
    [f"{a}/{b}/{c}" for a in "abc" for b in range(4) for c in range(3)]
    + [f"k{i}" for i in range(30)]
    + ["ü", "z/"]
)


def _among(number: int, test: Callable[[list[Any], list[Running]], None]) -> None:
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


def _lines(pages: Any, *kinds: tuple[str, str]) -> list[Any]:
    return [entry[name] for page in pages for kind, name in kinds for entry in page.get(kind, [])]


def _names(client: Any, operation: str, size: int, **asked: Any) -> tuple[list[str], list[str]]:
    paging = {"PageSize": size}
    pages = list(client.get_paginator(operation).paginate(Bucket="bench", PaginationConfig=paging, **asked))
    for page in pages:
        assert len(page.get("Contents", [])) + len(page.get("CommonPrefixes", [])) <= size
    for page in pages[:-1]:
        assert page["IsTruncated"]
    assert not pages[-1]["IsTruncated"]
    assert pages[-1].get("Contents") or pages[-1].get("CommonPrefixes") or len(pages) == 1
    return _lines(pages, ("Contents", "Key")), _lines(pages, ("CommonPrefixes", "Prefix"))


def test_objects() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        chance = random.Random(5)
        for key in _KEYS:
            chance.choice(clients).put_object(Bucket="bench", Key=key, Body=b"x")
        ordered = sorted(_KEYS, key=str.encode)
        for client in clients:
            for operation in ("list_objects_v2", "list_objects"):
                for size in (1000, 7, 1):
                    assert _names(client, operation, size) == (ordered, [])
                    keys, prefixes = _names(client, operation, size, Delimiter="/")
                    assert keys == [key for key in ordered if "/" not in key]
                    assert prefixes == ["a/", "b/", "c/", "z/"]
                    assert _names(client, operation, size, Delimiter="/", Prefix="b/")[1] == [
                        f"b/{n}/" for n in range(4)
                    ]
            first = client.list_objects_v2(Bucket="bench", MaxKeys=3, StartAfter="k1")
            assert [entry["Key"] for entry in first["Contents"]] == [k for k in ordered if k > "k1"][:3]
            assert client.list_objects_v2(Bucket="bench", Prefix="nothing")["KeyCount"] == 0
            assert client.list_objects_v2(Bucket="bench", MaxKeys=0)["KeyCount"] == 0

    _among(3, test)


def test_versions_and_uploads() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        chance = random.Random(6)
        enabled = {"Status": "Enabled"}
        clients[1].put_bucket_versioning(Bucket="bench", VersioningConfiguration=enabled)
        made: list[tuple[str, str]] = []
        begun: list[tuple[str, str]] = []
        for key in ["a", "b/1", "b/2", "c", "d", "e", "f"]:
            versions = [
                chance.choice(clients).put_object(Bucket="bench", Key=key, Body=b"x") for _ in range(3)
            ]
            versions.append(chance.choice(clients).delete_object(Bucket="bench", Key=key))
            made += [(key, version["VersionId"]) for version in reversed(versions)]
            begun += [
                (key, chance.choice(clients).create_multipart_upload(Bucket="bench", Key=key)["UploadId"])
                for _ in range(2)
            ]
        for client in clients:
            for size in (1000, 5, 1):
                found: list[tuple[str, str]] = []
                marker: dict[str, str] = {}
                while True:
                    page = client.list_object_versions(Bucket="bench", MaxKeys=size, **marker)
                    both = [*page.get("DeleteMarkers", []), *page.get("Versions", [])]
                    found += [(entry["Key"], entry["VersionId"]) for entry in both]
                    if not page["IsTruncated"]:
                        break
                    marker = {
                        "KeyMarker": page["NextKeyMarker"],
                        "VersionIdMarker": page["NextVersionIdMarker"],
                    }
                assert sorted(found) == sorted(made)
                paging = {"PageSize": size}
                pages = client.get_paginator("list_multipart_uploads").paginate(
                    Bucket="bench", PaginationConfig=paging
                )
                assert [(u["Key"], u["UploadId"]) for page in pages for u in page.get("Uploads", [])] == begun
            rolled = client.list_object_versions(Bucket="bench", Delimiter="/")
            assert [entry["Prefix"] for entry in rolled["CommonPrefixes"]] == ["b/"]
        with pytest.raises(ClientError, match="BucketNotEmpty"):
            clients[0].delete_bucket(Bucket="bench")

    _among(3, test)


def test_a_node_that_does_not_answer_makes_no_list_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshd.peer_reads.listing._LISTING_TIMEOUT_S", 1.0)

    def test(clients: list[Any], nodes: list[Running]) -> None:
        for number in range(20):
            clients[0].put_object(Bucket="bench", Key=f"k{number}", Body=b"x")

        async def cut() -> None:
            await stop_listening(nodes[2].listener)
            await nodes[2].server.shutdown(0.1)

        asyncio.run_coroutine_threadsafe(cut(), nodes[0].loop).result(60)
        with pytest.raises(ClientError, match="SlowDown"):
            clients[0].list_objects_v2(Bucket="bench")

    _among(3, test)
