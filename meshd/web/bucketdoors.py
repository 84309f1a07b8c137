"""What other nodes tell this one of buckets: that there is news, and that one is gone.

Law: answered when this process knows as much as the caller, and not before, for a little while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from meshd.service.buckets.news import HEARD
from meshd.service.buckets.service import DROP
from meshd.web.peers import peer_reply, peer_route
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.kit.clock import Clock
    from meshd.service.buckets.news import News
    from meshd.service.buckets.service import BucketService
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

_MOST = 4 << 10
T = TypeVar("T")


def bucket_routes(buckets: BucketService, news: News, clock: Clock) -> list[NativeRoute]:
    """The doors."""

    async def heard(request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        await news.hear(_read(await call.read(request, _MOST), dict[str, int]))
        return peer_reply(b"", clock.now_ms() // 1000)

    async def drop(request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        await buckets.drop_uploads(_read(await call.read(request, _MOST), str))
        return peer_reply(b"", clock.now_ms() // 1000)

    return [peer_route("POST", HEARD, heard), peer_route("POST", DROP, drop)]


def _read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise S3Error("BadRequest", f"this is asked for otherwise: {error}") from error
