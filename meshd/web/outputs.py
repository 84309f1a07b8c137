"""The doors through which the nodes that run jobs write what this one decides about.

Law: only for names this node decides; else it says by which map another one does (421). Rights and names were
judged by the node that runs the job.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

import msgspec

from meshd.assembly.errors import BatchError
from meshd.net.peers import StaleMapError
from meshd.service.jobs.outputs import OUTPUT, REMOVAL, Parted, Removal, Target
from meshd.service.semantics.translation import translate
from meshd.store.errors import StoreError
from meshd.web.peers import peer_reply, peer_route
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.service.jobs.outputs import OwnOutputs
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerCall
    from meshd.web.server import NativeRoute

_MAX_REMOVAL: Final = 16 << 20
_PATIENCE: Final = 1.0


class OutputDoors:
    """One a process."""

    def __init__(self, own: OwnOutputs, mesh: Mesh, clock: Clock) -> None:
        self._own, self._mesh, self._clock = own, mesh, clock

    def __repr__(self) -> str:
        return f"<OutputDoors of {self._mesh.node_id}>"

    def routes(self) -> list[NativeRoute]:
        """The doors."""
        return [peer_route("POST", OUTPUT, self.write), peer_route("POST", REMOVAL, self.remove)]

    async def write(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        query = dict(parse_qsl(request.raw_path.partition("?")[2], keep_blank_values=True))
        try:
            bucket, key, size = query["bucket"], query["key"], int(query["size"])
        except (KeyError, ValueError) as error:
            raise S3Error("InvalidArgument", "bucket, key and size must be given") from error
        await self._admit(call, bucket, key)
        parted = Parted(call.pieces(request))
        try:
            async with aclosing(parted.pieces()) as pieces:
                await self._own.write(Target(bucket, key, None if size < 0 else size), pieces, parted.facts)
        except StoreError as error:
            raise translate(error) from error
        except BatchError as error:
            raise S3Error(error.code, error.message) from error
        return self._done()

    async def remove(self, request: MeshRequest, call: PeerCall) -> web.StreamResponse:
        body = await call.read(request, _MAX_REMOVAL)
        try:
            asked = msgspec.msgpack.decode(body, type=Removal)
        except msgspec.MsgspecError as error:
            raise S3Error("InvalidArgument", f"what a peer sent says nothing: {error}") from error
        for key in asked.keys:
            await self._admit(call, asked.bucket, key)
        try:
            await self._own.remove(asked.bucket, asked.keys)
        except StoreError as error:
            raise translate(error) from error
        return self._done()

    async def _admit(self, call: PeerCall, bucket: str, key: str) -> None:
        """Raises StaleMapError unless this node decides about a name."""
        if call.map_version > self._mesh.map().version:
            await self._mesh.newer_than(call.map_version - 1, _PATIENCE)
        if not self._mesh.is_decider(bucket, key):
            raise StaleMapError(self._mesh.map().version)

    def _done(self) -> web.StreamResponse:
        return peer_reply(b"", self._clock.now_ms() // 1000)
