"""Who is asked for pieces of origins before the origin is, and what of their answers is believed."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from meshd.origins.cache.cache_store import CHUNK_BYTES
from meshd.origins.cache.peer_cache import FETCH_PIECE, PeerCacheClient, PeerCacheRequest
from meshd.origins.client.origin_api import ObjectFacts, OriginDownError
from meshd.rpc.peer_client import PeerUnreachableError
from meshwire.cluster import Node
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

FACTS = ObjectFacts(3, "e1", 7, {"content-type": "a/b"})


@dataclass
class Others:
    """Nodes with what they answer: pieces, or an error. As `Peers`."""

    answers: dict[str, list[Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def open_typed(self, node: Node, _: object, request: PeerCacheRequest) -> AsyncGenerator[Any]:
        self.asked.append(node.node_id)
        FETCH_PIECE.decode_request(*FETCH_PIECE.encode_request(request))

        async def pieces() -> AsyncIterator[bytes]:
            for piece in self.answers.get(node.node_id, []):
                if isinstance(piece, Exception):
                    raise piece
                yield piece

        yield SimpleNamespace(iter_body=pieces)


def borrower(others: Others, homes: str = "abcdef", held: ObjectFacts | None = None) -> PeerCacheClient:
    """Of node `a`; `f` is the owner by the map. Homes answer in an order that begins with the last."""
    nodes = [Node(name, f"http://{name}") for name in homes[::-1]]
    owner = SimpleNamespace(route_of_key=lambda *_: SimpleNamespace(read_set=(Node("f", "http://f"),)))
    mesh = SimpleNamespace(
        node_id="a",
        single_node=False,
        route_for=lambda *_: SimpleNamespace(read_set=nodes),
        bucket_routes=lambda _: owner,
    )
    shelf = SimpleNamespace(cached_facts=lambda *_: held)
    found: Any = PeerCacheClient
    return found(mesh, others, shelf)  # type: ignore[no-any-return]


def bucket(homes: str = "abcdef", *, immutable: bool = False) -> Any:
    origin = SimpleNamespace(homes=tuple(homes), immutable=immutable)
    return SimpleNamespace(name="b", created_ms=1, origin=origin)


def lent(facts: ObjectFacts = FACTS, length: int = 3) -> bytes:
    return msgspec.msgpack.encode((length, facts))


def ask(found: PeerCacheClient, of: Any, etag: str = "e1", number: int = 0) -> bytes | None:
    """The bytes that come."""

    async def run() -> bytes | None:
        reply = await found.fetch_piece(of, "k", number, etag)
        if reply is None:
            return None
        assert reply.offset == number * CHUNK_BYTES
        return b"".join([piece async for piece in reply.pieces])

    return asyncio.run(run())


def test_a_few_homes_the_first_one_and_the_owner_are_asked() -> None:
    others = Others()
    assert ask(borrower(others), bucket()) is None
    assert others.asked == ["f", "e", "d"]  # the owner among them
    others = Others({"b": [lent(), b"ab", b"c"]})
    assert ask(borrower(others, "bcdeg"), bucket("bcdeg")) == b"abc"
    assert others.asked == ["g", "e", "d", "b"]


def test_nobody_is_asked_where_only_the_origin_can_say() -> None:
    others = Others({"b": [lent(), b"abc"]})
    assert ask(borrower(others, ""), bucket("")) is None  # no homes
    assert ask(borrower(others, "ab"), bucket("ab"), etag="") is None  # what is so now?
    assert ask(borrower(others, "ab", ObjectFacts(1, "e0", 1)), bucket("ab")) is None  # it has changed
    assert others.asked == []
    assert ask(borrower(others, "ab"), bucket("ab", immutable=True), etag="") == b"abc"
    assert ask(borrower(others, "ab", FACTS), bucket("ab"), etag="") == b"abc"


@pytest.mark.parametrize(
    "answer", [[lent(ObjectFacts(3, "e2", 7))], [lent(length=2)], [b"\xc1"], [PeerUnreachableError("silent")]]
)
def test_what_is_not_that_piece_is_not_taken_and_who_fails_is_left_alone(answer: list[Any]) -> None:
    others = Others({"b": answer})
    found = borrower(others, "ab")

    async def twice() -> None:
        for _ in range(2):
            assert await found.fetch_piece(bucket("ab"), "k", 0, "e1") is None

    asyncio.run(twice())
    assert others.asked == ["b", "f", "f"]


def test_an_answer_that_is_cut_is_an_origin_that_is_down() -> None:
    others = Others({"b": [lent(), b"a", PeerUnreachableError("reset")]})
    with pytest.raises(OriginDownError, match="b stopped sending"):
        ask(borrower(others, "ab"), bucket("ab"))


def test_asks_are_bounded() -> None:
    for wrong in (
        PeerCacheRequest("b" * 64, 1, "k", 0),
        PeerCacheRequest("b", 1, "k" * 5000, 0),
        PeerCacheRequest("b", 1, "k", -1),
    ):
        with pytest.raises(S3Error, match="malformed peer message"):
            FETCH_PIECE.decode_request(*FETCH_PIECE.encode_request(wrong))
