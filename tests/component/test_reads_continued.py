"""Answers under way whose disk fails, or lacks bytes: on a mesh they go on from another owner."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import BotoCoreError

from meshd.kit import failpoints
from meshd.store.noticing import take_noticed
from meshd.store.records import NULL, Meta
from tests.archive_making import tar_of
from tests.component.mesh_nodes import NodesBeside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.records import Extent
    from tests.component.mesh_nodes import Running

MIB = 1 << 20
DATA = os.urandom(5 * MIB + 321)
TORN = 2 * MIB + 77
"""Here the files of a node end."""


@pytest.fixture(scope="module")
def beside() -> Iterator[NodesBeside]:
    with NodesBeside(3, copies=2) as found:
        found.nodes[0].client().put_bucket_versioning(
            Bucket="bench", VersioningConfiguration={"Status": "Enabled"}
        )
        yield found


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    yield
    failpoints.configure("")
    take_noticed(lambda extent: True)


def _owners(beside: NodesBeside, key: str) -> list[Running]:
    """Those that hold it, and who does not, last."""
    route = beside.nodes[0].node.mesh.route("bench", key)
    rank = {node.node_id: number for number, node in enumerate(route.readers)}
    return sorted(beside.nodes, key=lambda one: rank.get(one.node.mesh.node_id, len(rank)))


def _extents(node: Running, key: str, version: str = "") -> list[Extent]:
    store = node.node.store
    record = store.get_version("bench", key, version) if version else store.get("bench", key)
    assert record is not None
    return list(record.extents)


def _tear(node: Running, key: str, version: str = "", at: int = TORN) -> Extent:
    """A node's file with byte `at` of an object ends there."""
    for extent in _extents(node, key, version):
        if at < extent.length:
            path = node.node.store._disks.path(extent.disk, extent.file)
            os.truncate(path, extent.offset + at)
            return extent
        at -= extent.length
    raise AssertionError("the object is shorter")


def _read(node: Running, key: str, **how: Any) -> bytes:
    body: bytes = node.client().get_object(Bucket="bench", Key=key, **how)["Body"].read()
    return body


def test_a_file_that_ends_early(beside: NodesBeside) -> None:
    first, second, third = _owners(beside, "short")
    put = third.client().put_object(Bucket="bench", Key="short", Body=DATA)
    later = third.client().put_object(Bucket="bench", Key="short", Body=DATA[::-1])
    torn = _tear(first, "short", put["VersionId"])
    for node in (first, third):
        assert _read(node, "short", VersionId=put["VersionId"]) == DATA
    assert torn in take_noticed(lambda extent: True)
    assert (
        _read(first, "short", VersionId=put["VersionId"], Range=f"bytes=1000-{TORN + 5}")
        == (DATA[1000 : TORN + 6])
    )
    _tear(first, "short", later["VersionId"])
    assert _read(first, "short") == DATA[::-1]
    assert second.node.store.get("bench", "short") is not None


def test_a_part_and_a_whole_of_several(beside: NodesBeside) -> None:
    first, _, third = _owners(beside, "parts")
    client, parts = third.client(), []
    upload = {
        "Bucket": "bench", "Key": "parts",
        "UploadId": client.create_multipart_upload(Bucket="bench", Key="parts")["UploadId"],
    }  # fmt: skip
    for number, body in enumerate((DATA, DATA[::-1], DATA[:MIB]), start=1):
        etag = client.upload_part(**upload, PartNumber=number, Body=body)["ETag"]
        parts.append({"PartNumber": number, "ETag": etag})
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    torn = _tear(first, "parts", at=len(DATA) + TORN)
    assert _read(first, "parts") == DATA + DATA[::-1] + DATA[:MIB]
    assert take_noticed(lambda extent: True) == [torn]
    assert _read(first, "parts", PartNumber=2) == DATA[::-1]
    assert _read(first, "parts", PartNumber=1) == DATA
    assert take_noticed(lambda extent: True) == [torn]


def test_a_member_of_an_archive(beside: NodesBeside) -> None:
    first, _, third = _owners(beside, "a.tar")
    third.client().put_object(Bucket="bench", Key="a.tar", Body=tar_of({"small": b"s", "large": DATA}))
    assert _read(first, "a.tar/-/large") == DATA
    _tear(first, "a.tar")
    assert _read(first, "a.tar/-/large") == DATA


def test_a_device_that_gives_errors(beside: NodesBeside) -> None:
    first, _, third = _owners(beside, "errors")
    third.client().put_object(Bucket="bench", Key="errors", Body=DATA)
    for windows in (0, 1, 3):
        failpoints.configure(f"web.send.before=error(5):after {windows}")
        assert _read(first, "errors") == DATA
        assert take_noticed(lambda extent: True) == _extents(first, "errors")
    failpoints.configure("web.send.before=error(5):after 1")
    assert _read(third, "errors", Range="bytes=-3000000") == DATA[-3_000_000:]


def test_what_nobody_has_is_cut(beside: NodesBeside) -> None:
    first, second, third = _owners(beside, "nobody")
    third.client().put_object(Bucket="bench", Key="nobody", Body=DATA)
    _tear(first, "nobody")
    _tear(second, "nobody", at=TORN + MIB)  # what this one gives before it ends is not the rest
    for node in (first, third):
        body = node.client().get_object(Bucket="bench", Key="nobody")["Body"]
        with pytest.raises(BotoCoreError):
            body.read()


def test_other_bytes_never_come(beside: NodesBeside) -> None:
    """What the other owner has under the version is another content, or nothing."""
    first, second, third = _owners(beside, "other")
    third.client().put_object(Bucket="bench", Key="other", Body=DATA)
    record = first.node.store.get("bench", "other")
    assert record is not None

    async def replace() -> None:
        await second.node.store.delete_version("bench", "other", record.version or NULL)
        writer = second.node.store.writer("bench", "other", size=len(DATA))
        await writer.write(DATA[::-1])
        await writer.commit(Meta(etag=hashlib.md5(DATA[::-1]).hexdigest()))

    beside.run(replace())
    _tear(first, "other")
    body = first.client().get_object(Bucket="bench", Key="other")["Body"]
    with pytest.raises(BotoCoreError):
        body.read()
