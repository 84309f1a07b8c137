"""Answers under way whose disk fails, or lacks bytes: on a mesh they go on from another owner."""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from botocore.exceptions import BotoCoreError

from meshd.config import HttpSettings
from meshd.core.read_source import FailoverRead, GeneratedSource, memory_spans
from meshd.server.http_server import make_server
from meshd.server.response import StreamedReply
from meshd.server.sendfile import send_groups, send_spans
from meshd.store.integrity.verification import drain_damage_reports
from meshd.store.records import NULL, Meta, Span
from meshd.util import failpoints
from meshd.util.clock import SystemClock
from tests.support.archive_files import tar_of
from tests.support.certificates import Authority
from tests.support.mesh_nodes import NodesBeside
from tests.support.server_shutdown import stop_listening

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence
    from pathlib import Path

    from meshd.server.direct_sender import PartialReadError
    from meshd.server.request import MeshRequest
    from meshd.store.records import Extent
    from tests.support.mesh_nodes import Running

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
    drain_damage_reports(lambda extent: True)


def _owners(beside: NodesBeside, key: str) -> list[Running]:
    """Those that hold it, and who does not, last."""
    route = beside.nodes[0].node.mesh.route_for("bench", key)
    rank = {node.node_id: number for number, node in enumerate(route.read_set)}
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
    assert torn in drain_damage_reports(lambda extent: True)
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
    assert drain_damage_reports(lambda extent: True) == [torn]
    assert _read(first, "parts", PartNumber=2) == DATA[::-1]
    assert _read(first, "parts", PartNumber=1) == DATA
    assert drain_damage_reports(lambda extent: True) == [torn]


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
        assert drain_damage_reports(lambda extent: True) == _extents(first, "errors")
    failpoints.configure("web.send.before=error(5):after 1")
    assert _read(third, "errors", Range="bytes=-3000000") == DATA[-3_000_000:]


def test_what_is_sent_in_one_turn(beside: NodesBeside) -> None:
    """An object that seems to be in memory, of which only the beginning can be read: the connection stays."""
    first, _, third = _owners(beside, "turn")
    data, at = DATA[: 700 << 10], 300_000
    third.client().put_object(Bucket="bench", Key="turn", Body=data)
    third.client().put_object(Bucket="bench", Key="turn-whole", Body=data[::-1])
    client = first.client()
    assert client.get_object(Bucket="bench", Key="turn")["Body"].read() == data
    torn = _tear(first, "turn", at=at)
    for _ in range(3):
        assert client.get_object(Bucket="bench", Key="turn")["Body"].read() == data
        assert drain_damage_reports(lambda extent: True) == [torn]
        assert client.get_object(Bucket="bench", Key="turn-whole")["Body"].read() == data[::-1]
    ranged = client.get_object(Bucket="bench", Key="turn", Range="bytes=1000-650000")["Body"].read()
    assert ranged == data[1000:650_001]


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


def _served(tmp_path: Path, handle: Any, *, encrypted: bool) -> None:
    """DATA comes twice over one connection from a server that has requests answered by `handle`."""
    authority = Authority(tmp_path / "tls")
    pair, told = authority.issue(), ssl.create_default_context(cafile=authority.cert)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(pair.cert, pair.key)

    async def run() -> None:
        loop, server = asyncio.get_running_loop(), make_server(handle, SystemClock(), HttpSettings())
        listener = await loop.create_server(server, "127.0.0.1", 0, ssl=served if encrypted else None)
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=told if encrypted else None)
        for _ in range(2):  # the connection goes on, too
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(DATA)) == DATA
        writer.transport.abort()
        await stop_listening(listener)
        await server.shutdown(1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_rest_comes_right_behind_what_was_sent(tmp_path: Path, *, encrypted: bool) -> None:
    """Whoever gives it is asked once, for the bytes behind the last that went out, over TLS too."""
    file, asked = tmp_path / "file", list[int]()
    file.write_bytes(DATA[:TORN])

    async def behind(offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        asked.append(offset)
        for data in (DATA[offset : offset + 10], DATA[offset + 10 :][: length - 10]):
            with memory_spans(data) as spans:
                yield spans

    def rest(torn: PartialReadError) -> FailoverRead:
        return FailoverRead([GeneratedSource(behind)], torn.sent, len(DATA) - torn.sent, resumed=True)

    async def handle(request: MeshRequest) -> StreamedReply:
        with file.open("rb") as found:
            spans = [Span(found.fileno(), 0, len(DATA))]
            keep = await send_spans(request, 200, [("content-length", str(len(DATA)))], spans, 0, rest)
        return StreamedReply(200, keep_alive=keep)

    _served(tmp_path, handle, encrypted=encrypted)
    assert len(asked) == 2
    assert all(0 < sent <= TORN for sent in asked)


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("ends", [0, TORN])
def test_groups_go_on_behind_what_was_sent(tmp_path: Path, ends: int, *, encrypted: bool) -> None:
    """Whoever gives them is told how many bytes of the last one went out, and gives those behind."""
    whole, short, told = tmp_path / "whole", tmp_path / "short", list[int]()
    whole.write_bytes(DATA)
    short.write_bytes(DATA[:ends])

    async def groups() -> AsyncGenerator[list[Span], None]:
        with short.open("rb") as ending, whole.open("rb") as found:
            yield [Span(ending.fileno(), 0, len(DATA))]
            yield [Span(found.fileno(), told[-1], len(DATA) - told[-1])]

    async def handle(request: MeshRequest) -> StreamedReply:
        length = [("content-length", str(len(DATA)))]
        return StreamedReply(
            200, keep_alive=await send_groups(request, 200, length, groups(), 0, told.append)
        )

    _served(tmp_path, handle, encrypted=encrypted)
    assert len(told) == 2
    assert all((sent > 0 or not ends) and sent <= ends for sent in told)
