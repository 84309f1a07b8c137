"""Fans out requests that concern several owners: DeleteObjects, and keys that may name archive members.

Each node that owns some of the keys gets the client's own request, verifies it and deletes its keys; the
results are merged here. A key that may name an archive member is looked up on every possible owner, then
routed by what it names.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from meshd.cluster.replication.primary_writes import WriteNotTakenError
from meshd.core.api_errors import to_s3_error
from meshd.rpc.peer_client import MAP_HEADER, PeerResponse, StaleMapError
from meshd.server.proxy.hops import MisdirectedError, ObjectName, is_clock_skew_reply, is_stale_map_reply
from meshd.server.proxy.upstream_request import upstream_head
from meshd.store.errors import NotReplicatedError
from meshwire.dataset.archive_paths import MEMBER_SEPARATOR, member_paths
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from meshwire.s3 import xml_documents
from meshwire.s3.result_types import DeleteFailure, DeleteResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.peer_reads.listing import MergedListings
    from meshd.reads.copy_source import RemoteCopySources
    from meshd.rpc.peer_client import PeerClient
    from meshd.server.proxy.forwarder import Forwarder
    from meshd.server.proxy.hops import Hop
    from meshd.server.request import MeshRequest
    from meshd.store.records import WriteContext
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.s3.result_types import DeletedKey
    from meshwire.s3.xml_documents import DeleteKey, DeleteRequest

AIM_KEYS: Final = "keys"
"""`Hop.aim` of a DeleteObjects: the receiving node handles the keys of which it is the primary."""
AIM_MEMBERS: Final = "members"
"""`Hop.aim` of a listing that leads into an archive."""
_PATIENCE: Final = 15.0
_PART_SILENCE: Final = 20.0
_UNAVAILABLE: Final = ("SlowDown", "ServiceUnavailable", "InternalError", "InsufficientStorage")
"""Codes of errors of one node, of which the keys of others know nothing."""


class FanOut:
    """Fans requests out. One instance per process."""

    def __init__(
        self,
        forwarder: Forwarder,
        far: RemoteCopySources,
        merged: MergedListings,
        mesh: ClusterView,
        peers: PeerClient,
        clock: Clock,
    ) -> None:
        self._forwarder, self._far, self._merged = forwarder, far, merged
        self._mesh, self._peers, self._clock = mesh, peers, clock

    def __repr__(self) -> str:
        return f"<FanOut of {self._mesh!r}>"

    # --- names that may be members --------------------------------------------------------------------

    async def resolve_members(self, operation: ops.Operation) -> ops.Operation:
        """Resolve archive members as `MemberService` does, wherever the archive is. Raises S3Error
        SlowDown."""
        if (
            isinstance(operation, ops.GetObject)
            and MEMBER_SEPARATOR in operation.key
            and operation.member is None
        ):
            found = await self._member(operation.bucket, operation.key)
            return operation if found is None else replace(operation, key=found[0], member=found[1])
        if (
            isinstance(operation, ops.CopyObject | ops.UploadPartCopy)
            and MEMBER_SEPARATOR in operation.source.key
        ):
            source = operation.source
            found = await self._member(source.bucket, source.key)
            if found is not None:
                return replace(operation, source=replace(source, key=found[0], member=found[1]))
        return operation

    async def _member(self, bucket: str, key: str) -> tuple[str, str] | None:
        paths = [path for path in member_paths(key) if path.member]
        if not paths or await self._far.has_versions(bucket, key):
            return None
        for path in paths:
            if await self._far.has_versions(bucket, path.key):
                return path
        return None

    async def archive_of(self, operation: ops.ListObjects) -> ObjectName | None:
        """Return the archive that a listing leads into; None for any other listing. Raises S3Error
        SlowDown."""
        paths = member_paths(operation.prefix)
        if not paths:
            return None
        page = await self._merged.list_entries(operation.bucket, prefix=operation.prefix, limit=1)
        if page.entries:
            return None
        for path in paths:
            if await self._far.has_versions(operation.bucket, path.key):
                return ObjectName(operation.bucket, path.key, reading=True)
        return None

    # --- deletions --------------------------------------------------------------------------------------

    def local_keys(self, bucket: str, asked: DeleteRequest, hop: Hop) -> DeleteRequest:
        """Return the keys of which this node is the primary, by the map of the calling node. Raises
        MisdirectedError."""
        version = self._mesh.current_map().version
        if version != hop.map_version:
            raise MisdirectedError(version)
        keys = tuple(entry for entry in asked.keys if self._mesh.is_primary(bucket, entry.key))
        return asked._replace(keys=keys)

    async def delete_keys(
        self,
        request: MeshRequest,
        operation: ops.DeleteObjects,
        asked: DeleteRequest,
        here: Callable[[DeleteRequest], Awaitable[DeleteResult]],
        context: WriteContext,
    ) -> DeleteResult:
        """Delete the keys on their primaries; `here` deletes this node's own. Keys whose primary does not
        answer or cannot delete them are failures of their own. Raises S3Error SlowDown if none can be deleted
        now."""
        deadline = self._clock.monotonic() + _PATIENCE
        left = asked.keys
        results: list[DeleteResult] = []
        refused: list[tuple[Sequence[DeleteKey], S3Error]] = []
        while left:
            version = self._mesh.current_map().version
            again: list[DeleteKey] = []
            groups, nodes = self._group_by_node(operation.bucket, left)
            asking = [
                self._part(request, nodes[node_id], keys, here, asked, context)
                for node_id, keys in groups.items()
            ]
            for keys, result in await asyncio.gather(*asking):
                if result is None:
                    again += keys
                elif isinstance(result, S3Error):
                    refused.append((keys, result))
                else:
                    results.append(result)
            left = tuple(again)
            if left:
                if self._clock.monotonic() > deadline:
                    said = f"No primary answers for {len(left)} of these keys; try again."
                    refused.append((left, S3Error("SlowDown", said)))
                    break
                await self._mesh.wait_for_newer_map(version, 0.5)
        if refused and not results:  # clients repeat the whole request
            raise refused[0][1]
        return _merge_results(asked, [*results, *(_failures(*each) for each in refused)])

    def _group_by_node(
        self, bucket: str, keys: Sequence[DeleteKey]
    ) -> tuple[dict[str, list[DeleteKey]], dict[str, Node | None]]:
        groups: dict[str, list[DeleteKey]] = defaultdict(list)
        nodes: dict[str, Node | None] = {}
        for entry in keys:
            owner = self._mesh.route_for(bucket, entry.key).primary
            node_id = "" if owner is None else owner.node_id
            groups[node_id].append(entry)
            nodes[node_id] = owner
        return groups, nodes

    async def _part(
        self,
        request: MeshRequest,
        node: Node | None,
        keys: list[DeleteKey],
        here: Callable[[DeleteRequest], Awaitable[DeleteResult]],
        asked: DeleteRequest,
        context: WriteContext,
    ) -> tuple[list[DeleteKey], DeleteResult | S3Error | None]:
        """Delete the keys of one node; the result is None if they must be tried again, and the error if the
        node cannot delete them now."""
        if node is None:
            return keys, None
        try:
            if node.node_id == self._mesh.node_id:
                return keys, await here(asked._replace(keys=tuple(keys)))
            return keys, await self._remote_part(request, node, context)
        except S3Error as error:
            if error.code not in _UNAVAILABLE:
                raise
            return keys, error

    async def _remote_part(
        self, request: MeshRequest, node: Node, context: WriteContext
    ) -> DeleteResult | None:
        """Have another node delete its keys; None if they must be tried again. Raises S3Error."""
        try:
            status, body = await self._forwarder.writes.attempt(
                node, partial(self._send_part, request, node, context), context
            )
        except WriteNotTakenError:
            return None
        except NotReplicatedError as error:
            raise to_s3_error(error) from error
        if status != 200:
            raise S3Error(
                "SlowDown", f"Node {node.node_id} could not delete its keys: {_error_text(status, body)}"
            )
        return xml_documents.parse_delete_result(body)

    async def _send_part(self, request: MeshRequest, node: Node, context: WriteContext) -> tuple[int, bytes]:
        """Send a node its part of a deletion whose body is buffered; return (status, body). Raises S3Error
        SlowDown if the clocks differ, and as `WriteForwarder.attempt`."""
        answer = PeerResponse()
        wire = answer.wire = await self._peers.acquire_connection(node)
        try:
            # Again: the connection may have taken its time.
            self._mesh.reject_if_abandoned(context)
            head = upstream_head(request, self._forwarder.signed_hop(request, AIM_KEYS))
            wire.send_request(answer, head, patience=_PART_SILENCE)
            received = await answer.wait_head()
            if is_stale_map_reply(received):
                raise StaleMapError(int(received.headers[MAP_HEADER]))
            if is_clock_skew_reply(received):
                skew = self._forwarder.describe_skew(node, received)
                raise S3Error("SlowDown", f"Node {node.node_id} could not delete its keys: {skew}.")
            return received.status, await answer.read_body()
        finally:
            answer.close()


def _failures(keys: Sequence[DeleteKey], error: S3Error) -> DeleteResult:
    """Return the result of keys that could not be deleted."""
    failures = [DeleteFailure(entry.key, error.code, error.message, entry.version or "") for entry in keys]
    return DeleteResult((), tuple(failures))


def _error_text(status: int, body: bytes) -> str:
    """Return what a node's error document says."""
    try:
        return xml_documents.parse_error(body).message
    except S3Error:
        return f"it answered {status}; try again."


def _merge_results(asked: DeleteRequest, results: Sequence[DeleteResult]) -> DeleteResult:
    """Merge the results, in the order of the requested keys."""
    deleted: dict[tuple[str, str], DeletedKey] = {}
    failed: dict[tuple[str, str], DeleteFailure] = {}
    for result in results:
        deleted |= {(entry.key, entry.version): entry for entry in result.deleted}
        failed |= {(entry.key, entry.version): entry for entry in result.failures}
    order = [(entry.key, entry.version or "") for entry in asked.keys]
    return DeleteResult(
        tuple(deleted[place] for place in order if place in deleted),
        tuple(failed[place] for place in order if place in failed),
    )
