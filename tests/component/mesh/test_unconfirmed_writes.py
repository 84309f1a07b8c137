"""Writes that their primary has committed and no other owner has, and what a client may rely on."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from meshd.store.records import Meta
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.mesh_nodes import decider_of, with_clients

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tests.support.mesh_nodes import Running

BUCKET = "bench"
NAME = {"Bucket": BUCKET, "Key": "k"}
_PART = b"p" * 1000


def _code(doing: Callable[[], Any]) -> str:
    """The code of the error that a call raises; "" without one."""
    try:
        doing()
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


# requests to an upload whose end no other owner has --------------------------------------------------

REQUESTS: dict[str, Callable[[Any, dict[str, str], str], Any]] = {
    "abort": lambda client, upload, tag: client.abort_multipart_upload(**upload),
    "a part": lambda client, upload, tag: client.upload_part(**upload, PartNumber=2, Body=_PART),
    "a copied part": lambda client, upload, tag: client.upload_part_copy(
        **upload, PartNumber=2, CopySource={"Bucket": BUCKET, "Key": "source"}
    ),
    "complete": lambda client, upload, tag: client.complete_multipart_upload(
        **upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": tag}]}
    ),
}


@pytest.mark.parametrize("asked", ["the primary", "the other owner"])
@pytest.mark.parametrize("ended", ["aborted", "completed"])
@pytest.mark.parametrize("request_", REQUESTS)
def test_who_is_told_that_an_upload_has_ended_may_rely_on_it(request_: str, ended: str, asked: str) -> None:
    """A client that repeats a request without an answer is told so, and then the primary may be lost."""

    def test(clients: list[Any], nodes: list[Running]) -> None:
        primary = decider_of(nodes, BUCKET, "k")
        other = next(one for one in nodes if one is not primary)
        client = clients[nodes.index(primary if asked == "the primary" else other)]
        client.put_object(Bucket=BUCKET, Key="source", Body=b"source")
        upload = {**NAME, "UploadId": client.create_multipart_upload(**NAME)["UploadId"]}
        tag = client.upload_part(**upload, PartNumber=1, Body=_PART)["ETag"]
        here, there = primary.node.store, other.node.store
        begun = here.get_upload(BUCKET, "k", upload["UploadId"])
        assert begun is not None
        parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
        if ended == "aborted":
            _on_loop(primary, here.abort_upload(begun))
        else:
            client.complete_multipart_upload(**upload, MultipartUpload=parts)
            whole = here.get(BUCKET, "k")
            assert whole is not None
            again = {**NAME, "UploadId": client.create_multipart_upload(**NAME)["UploadId"]}
            tag = client.upload_part(**again, PartNumber=1, Body=_PART)["ETag"]
            begun = here.get_upload(BUCKET, "k", again["UploadId"])
            assert begun is not None
            meta = Meta(whole.etag, parts=whole.parts)
            _on_loop(primary, here.complete_upload(begun, (1,), meta, etags=(tag.strip('"'),)))
            upload = again
        assert there.get_upload(BUCKET, "k", upload["UploadId"]) is not None
        told = _code(lambda: REQUESTS[request_](client, upload, tag))
        repeated = request_ == "complete" and ended == "completed"
        assert told == ("" if repeated else "NoSuchUpload")
        assert there.get_upload(BUCKET, "k", upload["UploadId"]) is None
        assert (there.get(BUCKET, "k") is not None) == (ended == "completed")

    with_clients(2, test)


def _on_loop(node: Running, doing: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(doing, node.loop).result(60)


# writes that a death has cut off ---------------------------------------------------------------------

_BODY = b"b" * 3000


def _parts(client: Any, upload: dict[str, str]) -> list[int] | None:
    try:
        return [each["PartNumber"] for each in client.list_parts(**upload).get("Parts", ())]
    except ClientError:
        return None


def _digest(client: Any, name: dict[str, str]) -> tuple[str, str, Any] | None:
    try:
        found = client.get_object(**name)
        tags = client.get_object_tagging(**name)["TagSet"]
    except ClientError:  # absent, or deleted between the two requests
        return None
    return found["ETag"], found.get("VersionId", ""), tags


def test_what_a_power_cut_has_cut_off_is_at_all_owners_soon() -> None:
    """Both nodes are back before a lease is missed, so the map says nothing of it."""
    with DaemonCluster.start(2, lease=90.0) as mesh:
        with closing(mesh["n1"].client()) as client:
            for bucket in (BUCKET, "versioned"):
                client.create_bucket(Bucket=bucket)
            enabled = {"Status": "Enabled"}
            client.put_bucket_versioning(Bucket="versioned", VersioningConfiguration=enabled)
            keys = {
                what: mesh.key_with_primary("n1", BUCKET, what)
                for what in ("new", "replaced", "deleted", "tagged", "aborted", "completed", "part")
            }
            names = {what: {"Bucket": BUCKET, "Key": key} for what, key in keys.items()}
            for what in ("new", "replaced", "deleted", "tagged"):
                client.put_object(**names[what], Body=b"old")
            client.delete_object(**names["new"])  # once handed over, a name waits for no former primary
            uploads = {
                what: {**names[what], "UploadId": client.create_multipart_upload(**names[what])["UploadId"]}
                for what in ("aborted", "completed", "part")
            }
            for upload in uploads.values():
                tag = client.upload_part(**upload, PartNumber=1, Body=_BODY)["ETag"]
            versioned = {
                what: {"Bucket": "versioned", "Key": mesh.key_with_primary("n1", "versioned", what)}
                for what in ("version", "marker", "gone")
            }
            for each in versioned.values():
                last = client.put_object(**each, Body=b"old")["VersionId"]  # that of "gone" in the end
        parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
        writes: list[Callable[[Any], Any]] = [
            lambda client: client.put_object(**names["new"], Body=_BODY),
            lambda client: client.put_object(**names["replaced"], Body=_BODY),
            lambda client: client.delete_object(**names["deleted"]),
            lambda client: client.put_object_tagging(
                **names["tagged"], Tagging={"TagSet": [{"Key": "a", "Value": "b"}]}
            ),
            lambda client: client.abort_multipart_upload(**uploads["aborted"]),
            lambda client: client.complete_multipart_upload(**uploads["completed"], MultipartUpload=parts),
            lambda client: client.upload_part(**uploads["part"], PartNumber=2, Body=_BODY),
            lambda client: client.put_object(**versioned["version"], Body=_BODY),
            lambda client: client.delete_object(**versioned["marker"]),
            lambda client: client.delete_object(**versioned["gone"], VersionId=last),
        ]

        def seen(node_id: str) -> list[Any]:
            config = Config(retries={"total_max_attempts": 1}, read_timeout=10)
            with closing(mesh[node_id].client(config=config)) as client:
                plain = ("new", "replaced", "deleted", "tagged", "completed")
                return [
                    *(_digest(client, names[what]) for what in plain),
                    *(_digest(client, name) for name in versioned.values()),
                    *(_parts(client, upload) for upload in uploads.values()),
                ]

        before, turned = seen("n2"), [node.turned for node in mesh.map_of("n1").nodes]
        mesh.kill("n2")
        threads = [threading.Thread(target=_unanswered, args=(mesh, write)) for write in writes]
        for thread in threads:
            thread.start()
        await_true(
            lambda: not _equal(seen("n1"), before),
            60,
            told=lambda: f"not all were committed: {_equal(seen('n1'), before)}\n{mesh.output()}",
        )
        mesh.kill("n1")
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        mesh.start_all()
        assert [node.turned for node in mesh.map_of("n1").nodes] == turned, "the map knows of it"
        was = seen("n1")
        assert not _equal(was, before)
        await_true(
            lambda: seen("n2") == was,
            60,
            told=lambda: f"{was}\n{seen('n2')}\n{mesh.output()}",
        )
        assert seen("n1") == was


def _equal(one: list[Any], other: list[Any]) -> list[int]:
    return [at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] == pair[1]]


def _unanswered(mesh: DaemonCluster, write: Callable[[Any], Any]) -> None:
    config = Config(retries={"total_max_attempts": 1}, read_timeout=60)
    with closing(mesh["n1"].client(config=config)) as client, suppress(ClientError, BotoCoreError):
        write(client)
