"""WriteBackRouter: sends write-back and origin deletes of a name to its primary.

The primary executes the request locally; any other node forwards it. A forwarded request is never forwarded
again. Both operations are idempotent: an object at the origin is no longer dirty, and a deleted object stays
deleted. Write-back runs only on the owner of the name; under another map the response is 421, and nothing was
done.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from meshd.cluster.replication.primary_writes import WriteForwarder
from meshd.origins.client.origin_api import OriginDownError, OriginError, OriginMissingError
from meshd.origins.worker_shards import WorkerError, decode_error, encode_error  # noqa: TC001  msgspec reads annotations
from meshd.origins.write_back import IS_FINISHED
from meshd.rpc.peer_client import StaleMapError
from meshd.rpc.peer_rpc import PREFIX, PeerCall, handler
from meshd.store.errors import NotPrimaryError, StoreError
from meshd.store.records import INTERNAL_WRITE, WriteContext
from meshd.telemetry import metrics
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import Bucket
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.worker_shards import WorkerShards
    from meshd.origins.write_back import HandoverQuery
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.util.clock import Clock
    from meshwire.cluster import Node

_TURN: Final = 10.0  # seconds after which a node answers that it is still working
WriteBackAction = Literal["push", "remove"]


class WriteBackRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """push: write the dirty object of a key to its origin. remove: delete the object there."""

    what: WriteBackAction
    bucket: str
    key: str


class WriteBackResult(msgspec.Struct, frozen=True):
    """The result: done, failed, or still going on."""

    failed: WorkerError | None = None
    going: bool = False


WRITE_BACK: Final = PeerCall(
    f"{PREFIX}origins/bring",
    request=WriteBackRequest,
    response=WriteBackResult,
    max_bytes=16 << 10,
    map_wait=1.0,
)


class WriteBackRouter:
    """Routes write-back requests. One instance per process."""

    def __init__(
        self,
        shards: WorkerShards,
        cache_store: CacheStore,
        mesh: ClusterView,
        peers: PeerClient,
        clock: Clock,
    ) -> None:
        self._shards, self._cache_store, self._mesh = shards, cache_store, mesh
        self._forwarder = WriteForwarder(mesh, peers, clock)
        self._tasks = BackgroundTasks("write-back-routing")

    def __repr__(self) -> str:
        return f"<WriteBackRouter {self._mesh.node_id}>"

    async def write_back(self, bucket: Bucket, key: str) -> None:
        """Write the dirty object of a key to its origin; succeeds if nothing is dirty. Raises OriginError,
        StoreError."""
        # No client waits for it: the object was committed before.
        await self._route(bucket, WriteBackRequest("push", bucket.name, key), INTERNAL_WRITE)

    async def delete_at_origin(self, bucket: Bucket, key: str, context: WriteContext) -> None:
        """Delete an object at its origin, and its dirty copy. Raises OriginError, StoreError."""
        await self._route(bucket, WriteBackRequest("remove", bucket.name, key), context)

    async def execute(self, request: WriteBackRequest, context: WriteContext) -> WriteBackResult:
        """Execute a request of another node. If it takes long, return `going`; the work continues, and the
        caller asks again. Raises NotPrimaryError if this node is not the primary of the name."""
        bucket = self._cache_store.backed_bucket(request.bucket)
        if bucket is None:
            return _error_result(
                OriginMissingError(f"there is no bucket {request.bucket[:80]} with an origin")
            )
        doing = self._tasks.spawn(self._result_of_local(bucket, request, context), request.what)
        done, _ = await asyncio.wait((doing,), timeout=_TURN)
        written_back: WriteBackResult | None = doing.result() if done else WriteBackResult(going=True)
        if written_back is None:
            raise _not_primary()
        return written_back

    async def is_finished(self, request: HandoverQuery, version: int) -> bool:
        """Ask the process of the key; see `OriginWriter.is_finished`."""
        bucket = self._cache_store.backed_bucket(request.bucket)
        if bucket is None:
            return True
        try:
            return await self._shards.worker_for(request.bucket, request.key).is_finished(
                bucket, request.key, version
            )
        except OriginDownError:  # that process is being restarted
            return False

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def _route(self, bucket: Bucket, request: WriteBackRequest, context: WriteContext) -> None:
        """Run a request on the primary. A primary that is still working on it is asked again."""

        async def here() -> WriteBackResult:
            self._mesh.reject_if_abandoned(context)
            if not self._mesh.is_primary(request.bucket, request.key):
                raise _not_primary()
            return await self._execute_local(bucket, request, context)

        async def there(node: Node) -> WriteBackResult:
            result = await self._forwarder.send(node, WRITE_BACK, request, context, repeatable=True)
            if not result.going:
                metrics.origin_passed.labels(request.what).inc()
            return result

        result = WriteBackResult(going=True)
        while result.going:
            result = await self._forwarder.run_on_primary(
                request.bucket, request.key, here, there, context, local_time_counts=False
            )
        if result.failed is not None:
            raise decode_error(result.failed)

    async def _execute_local(
        self, bucket: Bucket, request: WriteBackRequest, context: WriteContext
    ) -> WriteBackResult:
        """Raises NotPrimaryError, OriginError, StoreError."""
        fetch_worker = self._shards.worker_for(request.bucket, request.key)
        if request.what == "push":
            await fetch_worker.write_back(bucket, request.key)
        else:
            await fetch_worker.delete_at_origin(bucket, request.key, context)
        return WriteBackResult()

    async def _result_of_local(
        self, bucket: Bucket, request: WriteBackRequest, context: WriteContext
    ) -> WriteBackResult | None:
        """Like `_execute_local`, with errors as results; None if another node is primary."""
        try:
            return await self._execute_local(bucket, request, context)
        except NotPrimaryError:
            return None
        except (OriginError, StoreError) as error:
            return _error_result(error)


def _not_primary() -> NotPrimaryError:
    return NotPrimaryError(
        "another node is the primary of this name now; the origin may or may not have the write; try again"
    )


def _error_result(error: Exception) -> WriteBackResult:
    return WriteBackResult(encode_error(error))


class WriteBackHandlers:
    """Handles the calls of other nodes about write-back. One instance per process."""

    def __init__(self, router: WriteBackRouter, mesh: ClusterView) -> None:
        self._router, self._mesh = router, mesh

    @handler(IS_FINISHED)
    async def is_finished(self, request: HandoverQuery, context: CallContext) -> bool:
        if context.map_version < self._mesh.current_map().version:
            raise StaleMapError(self._mesh.current_map().version)
        return await self._router.is_finished(request, context.map_version)

    @handler(WRITE_BACK)
    async def write_back(self, request: WriteBackRequest, context: CallContext) -> WriteBackResult:
        self._mesh.require_primary(request.bucket, request.key)
        try:
            return await self._router.execute(request, WriteContext(context.node_id, context.map_version))
        except NotPrimaryError as error:
            raise StaleMapError(self._mesh.current_map().version) from error
