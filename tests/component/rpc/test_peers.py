"""Calls between nodes: signed, in checked pieces, with errors that can be told apart."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvloop

from meshd.core.api_errors import BatchError
from meshd.rpc.peer_client import PeerClient, PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import (
    IN_QUERY,
    BodyFramingError,
    FrameDecoder,
    MalformedResponseError,
    NotHereError,
    PeerCall,
    ResponseStream,
    frame_body,
    handler,
    stream_handler,
)
from meshd.server.peer_endpoint import peer_reply, peer_route, peer_routes, stream_reply
from meshd.store.errors import ExhaustedError
from meshd.util.clock import SystemClock
from meshwire.cluster import Node as Member
from meshwire.errors import S3Error
from tests.support.certificates import Authority
from tests.support.mesh_nodes import running_nodes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from meshd.rpc.peer_rpc import (
        CallContext,
    )
    from meshd.server.peer_endpoint import PeerCaller
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply
    from tests.support.mesh_nodes import Running


async def _echo(request: MeshRequest, call: PeerCaller) -> Reply:
    return await stream_reply(request, call.iter_body(request), 0)


async def _early(request: MeshRequest, call: PeerCaller) -> Reply:
    async for piece in call.iter_body(request):
        return peer_reply(piece, 0)
    raise AssertionError("a body")


async def _whole(request: MeshRequest, call: PeerCaller) -> Reply:
    return peer_reply(await call.read_body(request, 1 << 20), 0)


async def _who(request: MeshRequest, call: PeerCaller) -> Reply:
    return peer_reply(f"{call.node_id} {call.map_version} {request.raw_path}".encode(), 0)


async def _stale(request: MeshRequest, call: PeerCaller) -> Reply:
    raise StaleMapError(call.map_version + 1)


async def _refuse(request: MeshRequest, call: PeerCaller) -> Reply:
    raise S3Error("NoSuchKey", "not here")


async def _cut(request: MeshRequest, call: PeerCaller) -> Reply:
    async def some() -> AsyncIterator[bytes]:
        yield b"one"
        raise ValueError("no more")

    return await stream_reply(request, some(), 0)


class Words(msgspec.Struct):
    """What a test asks for."""

    text: str
    times: int = 1


JOIN = PeerCall("/-/peer/test/join", request=Words, response=list[str], max_bytes=100)
SPELL = PeerCall("/-/peer/test/spell", request=Words, response=ResponseStream)
STORE = PeerCall("/-/peer/test/store", request=Words, response=bytes, target=IN_QUERY, max_bytes=None)
EMPTY = PeerCall("/-/peer/test/empty", request=Words, response=type(None), target=IN_QUERY, max_bytes=0)
FAIL = PeerCall("/-/peer/test/fail", request=Words, response=bytes)
FAIL_BATCH = PeerCall("/-/peer/test/fail-batch", request=Words, response=bytes, errors="batch")
NEWER = PeerCall("/-/peer/test/newer", request=bytes, response=int, map_wait=1.0)
_ERRORS: dict[str, Exception] = {
    "here": NotHereError("not this one"),
    "batch": BatchError("NoSuchKey", "no key"),
    "store": ExhaustedError("no memory"),
    "s3": S3Error("SlowDown", "later"),
}


class TypedHandlers:
    @handler(JOIN)
    async def join(self, words: Words, context: CallContext) -> list[str]:
        return [context.node_id, *[words.text] * words.times]

    @stream_handler(SPELL)
    async def spell(self, words: Words, context: CallContext) -> AsyncIterator[bytes]:
        for letter in words.text:
            yield letter.encode()

    @handler(STORE)
    async def store(self, words: Words, context: CallContext) -> bytes:
        return words.text.encode() + b"".join([piece async for piece in context.iter_body()])

    @handler(EMPTY)
    async def empty(self, words: Words, context: CallContext) -> None:
        assert words.text

    @handler(FAIL)
    async def fail(self, words: Words, context: CallContext) -> bytes:
        raise _ERRORS[words.text]

    @handler(FAIL_BATCH)
    async def fail_batch(self, words: Words, context: CallContext) -> bytes:
        raise _ERRORS[words.text]

    @handler(NEWER)
    async def newer(self, _: bytes, context: CallContext) -> int:
        return int(_MESH.version)


class _Mesh:
    """A node that gets a map while a caller of version 9 is waited for."""

    version = 0

    def current_map(self) -> Any:
        return SimpleNamespace(version=self.version)

    async def wait_for_newer_map(self, version: int, patience: float) -> bool:
        assert patience == 1.0
        self.version = version + 1
        return True


_MESH: Any = _Mesh()
_ROUTES = [
    *peer_routes(_MESH, SystemClock(), TypedHandlers()),
    peer_route("POST", "/-/peer/test/echo", _echo),
    peer_route("POST", "/-/peer/test/early", _early),
    peer_route("POST", "/-/peer/test/whole", _whole),
    peer_route("GET", "/-/peer/test/who/", _who),
    peer_route("POST", "/-/peer/test/stale", _stale),
    peer_route("POST", "/-/peer/test/refuse", _refuse),
    peer_route("GET", "/-/peer/test/cut", _cut),
]


def _among(number: int, test: Callable[[list[Running]], Awaitable[None]]) -> None:
    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), number, _ROUTES) as nodes:
            await test(nodes)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as daemons run
        runner.run(run())


def test_a_call_says_who_calls_by_which_map() -> None:
    async def test(nodes: list[Running]) -> None:
        one, two = nodes
        for _ in range(3):
            async with one.peers.call(two.member, "GET", "/-/peer/test/who/a%20b?c=d") as answer:
                version = one.node.mesh.current_map().version
                assert await answer.read_body() == f"n1 {version} /-/peer/test/who/a%20b?c=d".encode()
        assert "1 connections" in repr(one.peers)  # it was kept

    _among(2, test)


@pytest.mark.parametrize("size", [0, 1, 100_000, 9_000_000])
def test_bodies_come_back_as_they_went(size: int) -> None:
    async def test(nodes: list[Running]) -> None:
        one, two = nodes
        body = os.urandom(size)
        async with one.peers.call(two.member, "POST", "/-/peer/test/echo", body=body) as answer:
            assert await answer.read_body() == body

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, size, 70_001):
                yield body[start : start + 70_001]

        for _ in range(2):
            async with one.peers.call(two.member, "POST", "/-/peer/test/echo", body=pieces()) as answer:
                assert await answer.read_body() == body
        assert "1 connections" in repr(one.peers)

    _among(2, test)


def test_a_body_that_goes_on_when_the_answer_is_whole_ends_the_connection() -> None:
    async def test(nodes: list[Running]) -> None:
        one, two = nodes
        ends = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            await ends.wait()
            yield b"two"

        for _ in range(2):
            async with one.peers.call(two.member, "POST", "/-/peer/test/early", body=pieces()) as answer:
                assert await answer.read_body() == b"one"
        ends.set()
        async with one.peers.call(two.member, "GET", "/-/peer/test/who/x") as answer:
            assert (await answer.read_body()).startswith(b"n1 ")

    _among(2, test)


def test_a_body_that_cannot_be_made() -> None:
    async def test(nodes: list[Running]) -> None:
        one, two = nodes

        async def pieces(first: bytes, goes_on: asyncio.Event) -> AsyncIterator[bytes]:
            yield first
            await goes_on.wait()
            raise ValueError("no more")

        now = asyncio.Event()
        now.set()
        with pytest.raises(ValueError, match="no more"):
            async with one.peers.call(two.member, "POST", "/-/peer/test/whole", body=pieces(b"one", now)):
                pass
        then = asyncio.Event()
        async with one.peers.call(
            two.member, "POST", "/-/peer/test/echo", body=pieces(b"one", then)
        ) as answer:
            then.set()
            with pytest.raises(PeerUnreachableError, match="no more"):
                await answer.read_body()

    _among(2, test)


def test_refusals_can_be_told_apart() -> None:
    async def test(nodes: list[Running]) -> None:
        one, two = nodes
        with pytest.raises(StaleMapError) as stale:
            async with one.peers.call(two.member, "POST", "/-/peer/test/stale"):
                pass
        assert stale.value.version == one.node.mesh.current_map().version + 1
        with pytest.raises(PeerRefusedError, match="not here") as refused:
            async with one.peers.call(two.member, "POST", "/-/peer/test/refuse", body=_never()):
                pass
        assert (refused.value.status, refused.value.code) == (404, "NoSuchKey")

    _among(2, test)


async def _never() -> AsyncIterator[bytes]:
    yield b"".join([])
    raise AssertionError("nobody asked for this body")


def test_typed_calls() -> None:
    async def test(nodes: list[Running]) -> None:
        one, two = nodes
        assert await one.peers.call_typed(two.member, JOIN, Words("ä", 2)) == ["n1", "ä", "ä"]
        async with one.peers.open_typed(two.member, SPELL, Words("abc")) as response:
            assert await response.read_body() == b"abc"
        async with one.peers.open_typed(two.member, SPELL, Words("")) as response:
            assert await response.read_body() == b""
        stored = await one.peers.call_typed(two.member, STORE, Words("a b&c", 2), body=b"123")
        assert stored == b"a b&c123"
        await one.peers.call_typed(two.member, EMPTY, Words("x"))
        version = one.node.mesh.current_map().version
        assert await one.peers.call_typed(two.member, NEWER, b"") == version  # it was waited for
        assert "1 connections" in repr(one.peers)

    _among(2, test)


def test_errors_of_typed_calls() -> None:
    async def test(nodes: list[Running]) -> None:
        one, two = nodes

        async def refusal(call: Any, request: Any, **more: Any) -> tuple[int, str, str]:
            with pytest.raises(PeerRefusedError) as refused:
                await one.peers.call_typed(two.member, call, request, **more)
            return refused.value.status, refused.value.code, refused.value.message

        for call in (FAIL, FAIL_BATCH):
            assert await refusal(call, Words("here")) == (409, "NotHere", "not this one")
            assert await refusal(call, Words("batch")) == (404, "NoSuchKey", "no key")
            assert await refusal(call, Words("s3")) == (503, "SlowDown", "later")
        assert (await refusal(FAIL, Words("store")))[:2] == (503, "SlowDown")
        assert (await refusal(FAIL_BATCH, Words("store")))[:2] == (500, "InternalError")
        assert (await refusal(JOIN, Words("x" * 200)))[:2] == (400, "EntityTooLarge")
        assert (await refusal(EMPTY, Words("x"), body=b"1"))[:2] == (400, "EntityTooLarge")
        as_text = PeerCall(JOIN.path, request=str, response=bytes)
        status, code, message = await refusal(as_text, "words")
        assert (status, code) == (400, "InvalidArgument")
        assert message.startswith("malformed peer message: ")
        as_bytes = PeerCall(FAIL_BATCH.path, request=bytes, response=bytes)
        assert (await refusal(as_bytes, b"\xc1"))[:2] == (400, "BadRequest")
        as_number = PeerCall(JOIN.path, request=Words, response=int)
        with pytest.raises(MalformedResponseError, match="malformed peer message from /-/peer/test/join"):
            await one.peers.call_typed(two.member, as_number, Words("x"))

    _among(2, test)


def test_an_answer_that_is_cut_is_an_error() -> None:
    async def test(nodes: list[Running]) -> None:
        one, two = nodes
        async with one.peers.call(two.member, "GET", "/-/peer/test/cut") as answer:
            with pytest.raises(PeerUnreachableError):
                await answer.read_body()

    _among(2, test)


def test_strangers_do_not_get_in() -> None:
    async def test(nodes: list[Running]) -> None:
        one, two = nodes
        stranger = PeerClient("n1", lambda purpose: b"another secret", one.node.clock, lambda: 7)
        with pytest.raises(PeerRefusedError) as refused:
            async with stranger.call(two.member, "GET", "/-/peer/test/who/x"):
                pass
        assert (refused.value.status, refused.value.code) == (403, "SignatureDoesNotMatch")
        await stranger.aclose()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(two.member.endpoint.rpartition(":")[2])
        )
        writer.write(b"GET /-/peer/test/who/x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
        writer.close()

    _among(2, test)


def test_nobody_there_and_nothing_said() -> None:
    async def test(nodes: list[Running]) -> None:
        one = nodes[0]
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            with pytest.raises(PeerUnreachableError, match="silent"):
                async with one.peers.call(
                    Member("n9", f"http://127.0.0.1:{port}"), "GET", "/-/peer/", timeout=0.2
                ):
                    pass
        with pytest.raises(PeerUnreachableError, match="n9") as gone:
            async with one.peers.call(Member("n9", f"http://127.0.0.1:{port}"), "GET", "/-/peer/"):
                pass
        assert not gone.value.begun

    _among(1, test)


def test_a_certificate_that_is_refused_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)

    async def run() -> None:
        peers = PeerClient("n1", lambda purpose: b"secret", SystemClock(), ca=authority.cert)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context)
        node = Member("n2", f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        for pair, why in (
            (authority.issue("old", days=-1), "certificate has expired"),
            (authority.issue("named", ["n2.example"]), "IP address mismatch"),
            (Authority(tmp_path / "other", "Another").issue(), "unable to get local issuer certificate"),
        ):
            context.load_cert_chain(pair.cert, pair.key)
            for _ in range(2):
                with pytest.raises(PeerUnreachableError, match=f"certificate is refused .*{why}"):
                    await peers.acquire_connection(node)
            assert why in await peers.connector.certificate_error(node)
        pair = authority.issue()
        context.load_cert_chain(pair.cert, pair.key)
        assert await peers.connector.certificate_error(node) == ""
        listener.close()
        assert await peers.connector.certificate_error(node) == ""
        await peers.aclose()

    asyncio.run(run())
    assert [record.message for record in caplog.records] == [
        "the certificate of another node is refused"  # once a minute
    ]


def test_broken_pieces_are_noticed() -> None:
    body = frame_body(b"abc" * 100)
    for at in range(len(body)):
        broken = bytearray(body)
        broken[at] ^= 1
        with pytest.raises(BodyFramingError):
            _read(bytes(broken))
    for length in range(len(body)):
        with pytest.raises(BodyFramingError):
            _read(body[:length])


def _read(body: bytes) -> None:
    frames = FrameDecoder()
    frames.feed(body)
    frames.finish()
