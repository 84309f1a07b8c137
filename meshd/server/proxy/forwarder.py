"""Forwards requests to the nodes that own their names, and their responses to the client.

Law: the owner verifies the client's signature and makes every decision; the forwarder only finds the
owner. A request that did not start may be retried on another node; a request that may have been executed
is never sent twice. Invariant: a node that receives a forwarded request answers it or replies 421; it
never forwards it again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from meshd.cluster.read_barrier import ReadBarrier
from meshd.cluster.replication.write_forwarding import reject_if_abandoned
from meshd.core.error_mapping import to_s3_error
from meshd.rpc.http_connection import PeerUnreachableError
from meshd.rpc.peer_client import MAP_HEADER, PeerResponse
from meshd.server.proxy.hop_headers import (
    HOP_HEADER,
    Hop,
    is_clock_skew_reply,
    is_damaged_reply,
    is_peer_status,
    is_stale_map_reply,
)
from meshd.server.proxy.response_relay import ResponseRelay
from meshd.server.proxy.upstream_request import UpstreamRequest, upstream_head
from meshd.store.errors import NotReplicatedError
from meshd.telemetry import metrics
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.http_connection import HttpConnection, ResponseHead
    from meshd.rpc.peer_client import PeerClient
    from meshd.server.connection import Connection
    from meshd.server.proxy.hop_headers import HopSigner
    from meshd.server.proxy.upstream_request import PartialBody
    from meshd.server.request import MeshRequest
    from meshd.server.request_trace import RequestTrace
    from meshd.server.response import Reply
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.s3.parse_request import RequestHead

_PATIENCE: Final = 15.0  # seconds until a name that nobody answers for is given up
_HOLD: Final = 64 << 10  # bodies up to here are read before they are sent: they can be sent twice
_SILENCE: Final = 60.0
_PART_SILENCE: Final = 20.0
_LIVENESS_CHECK: Final = 2.0  # seconds without an answer until it is asked whether the node is there at all
_SKEWED: Final = "The clocks of two nodes of this mesh differ by minutes: set them. Nothing was stored."
_CHANGED: Final = "The nodes that hold this name changed; nothing was stored. Try again."
_ALL_DAMAGED: Final = "The object is damaged on every node that holds it; put it again."
_PAUSE: Final = 0.05
_READS: Final = (
    ops.GetObject,
    ops.GetObjectAttributes,
    ops.GetObjectTagging,
    ops.GetObjectAcl,
    ops.ListMembers,
)
_WRITES: Final = (
    ops.PutObject,
    ops.CopyObject,
    ops.DeleteObject,
    ops.PutObjectTagging,
    ops.DeleteObjectTagging,
    ops.PutObjectAcl,
    ops.CreateMultipartUpload,
    ops.UploadPart,
    ops.UploadPartCopy,
    ops.CompleteMultipartUpload,
    ops.AbortMultipartUpload,
    ops.ListParts,
)


class ObjectName(NamedTuple):
    """What a request is about; `reading`: any node that has it may answer."""

    bucket: str
    key: str
    reading: bool


def object_name_of(operation: ops.Operation) -> ObjectName | None:
    """The one name an operation is about; None for those about a bucket, or several names."""
    if isinstance(operation, _READS):
        return ObjectName(operation.bucket, operation.key, reading=True)
    if isinstance(operation, _WRITES):
        return ObjectName(operation.bucket, operation.key, reading=False)
    return None


class AlreadyAnsweredError(Exception):
    """Another node has answered, and the answer is sent."""

    def __init__(self, reply: Reply) -> None:
        super().__init__("another node has answered")
        self.reply = reply


class MisdirectedError(Exception):
    """By the map of this node, version `version`, another node answers for the name."""

    def __init__(self, version: int) -> None:
        super().__init__(f"another node answers by version {version} of the map")
        self.version = version


class _ForwardState:
    """A client's request, and what was heard of it from the nodes that were asked."""

    def __init__(
        self, request: MeshRequest, name: ObjectName, trace: RequestTrace, aim: str, sending: UpstreamRequest
    ) -> None:
        self.request, self.name, self.trace, self.aim, self.sending = request, name, trace, aim, sending
        self.unresponsive: set[str] = set()
        """Nodes that gave no answer: they are asked again once all were."""
        self.damaged: set[str] = set()
        """Nodes on which the object is damaged: they are not asked again."""

    def may_have_executed(self, error: PeerUnreachableError) -> bool:
        """Whether a node that cannot be reached any more may have carried it out, or has what would have to
        be sent again."""
        sending = self.sending
        return sending.body_started or (error.begun and not self.name.reading and not sending.streams)

    def require_resendable(self, refusal: str) -> None:
        """Raises S3Error SlowDown with that text when it cannot be sent again."""
        if self.sending.body_started:
            raise S3Error("SlowDown", refusal)


class Forwarder:
    """Passes requests on. One a process. `buckets` gives this process's revision of the table of buckets."""

    def __init__(
        self,
        mesh: ClusterView,
        peers: PeerClient,
        hops: HopSigner,
        clock: Clock,
        buckets: Callable[[], int],
        body_timeout: float,
    ) -> None:
        self._mesh, self._peers, self._hops, self._clock = mesh, peers, hops, clock
        self._buckets, self._body_timeout = buckets, body_timeout
        self._read_barrier = ReadBarrier(mesh, clock)

    def __repr__(self) -> str:
        return f"<Forwarder of {self._mesh!r}>"

    @property
    def mesh(self) -> ClusterView:
        return self._mesh

    def is_local(self, name: ObjectName) -> bool:
        """Whether this node answers."""
        mesh = self._mesh
        return (
            mesh.is_reader(name.bucket, name.key) if name.reading else mesh.is_primary(name.bucket, name.key)
        )

    # --- asked by another node ------------------------------------------------------------------------

    def hop_of(self, request: MeshRequest) -> Hop | None:
        """What the node says that passed this request on; None for a client's own. Raises S3Error
        AccessDenied."""
        value = request.headers.get(HOP_HEADER)
        if value is None:
            return None
        authorization = request.headers.get("authorization", "")
        return self._hops.verify_hop(value, request.method, request.raw_path, authorization)

    def hop_of_head(self, head: RequestHead) -> Hop | None:
        """`hop_of` of a head that was read here. Raises S3Error AccessDenied."""
        value = head.headers.get(HOP_HEADER)
        if value is None:
            return None
        return self._hops.verify_hop(value, head.method, head.raw_path, head.headers.get("authorization", ""))

    def is_current_with(self, hop: Hop) -> bool:
        """Whether this node knows as much as the one that passed a whole request on."""
        return (
            not hop.aim
            and self._mesh.current_map().version >= hop.map_version
            and self._buckets() >= hop.buckets
        )

    def idle_upstream(
        self, connection: Connection, bucket: str, key: str, head: RequestHead
    ) -> tuple[HttpConnection, bytes] | None:
        """A free connection to a node that answers reads of a name, and the line to be added to the head with
        its end; None when there is none at this moment."""
        for node in self._candidates(ObjectName(bucket, key, reading=True)):
            wire = self._peers.idle_connection(node)
            if wire is not None:
                transport = connection.transport
                tls = None if transport is None else transport.get_extra_info("ssl_object")
                hop = Hop(
                    self._mesh.node_id,
                    self._mesh.current_map().version,
                    self._buckets(),
                    connection.remote,
                    connection.secure,
                    "" if tls is None else (tls.version() or "").removeprefix("TLSv"),
                )
                signed = self._hops.sign_hop(
                    hop, head.method, head.raw_path, head.headers.get("authorization", "")
                )
                return wire, f"{HOP_HEADER}: {signed}\r\n\r\n".encode("utf-8", "surrogateescape")
        return None

    async def catch_up(self, hop: Hop) -> None:
        """Know what the node knew that passed the request on: its map, and its buckets."""
        if hop.map_version > self._mesh.current_map().version:
            await self._mesh.wait_for_newer_map(hop.map_version - 1, 1.0)
        for _ in range(20):
            if self._buckets() >= hop.buckets:
                return
            await asyncio.sleep(_PAUSE)

    async def require_local(self, name: ObjectName, hop: Hop) -> None:
        """Raises MisdirectedError unless this node answers for the name, and has since it was asked; S3Error
        SlowDown when it may not any more, and cannot find out."""
        if self.is_local(name):
            await self.wait_until_current(name, 1.0)
        left = 0 if name.reading else self._mesh.last_absence_version(self._mesh.node_id)
        if not self.is_local(name) or hop.map_version < left:
            raise MisdirectedError(self._mesh.current_map().version)

    async def wait_until_current(self, name: ObjectName, patience: float = 5.0) -> None:
        """Makes sure that the map by which this node answers a read is one it is still in. Raises S3Error
        SlowDown. Writes need no such question: the other owners refuse them."""
        if not name.reading or self._mesh.lease_valid:
            return
        why = await self._read_barrier.wait_until_current(name.bucket, name.key, patience)
        if why:
            raise S3Error(
                "SlowDown",
                f"This node {why}, and what it has of this name may be old. Ask another node, or try again.",
            )

    # --- asked by a client ----------------------------------------------------------------------------

    async def forward_part(self, request: MeshRequest, node: Node, aim: str) -> tuple[int, bytes]:
        """(status, body) of what a node answers to its part of a deletion whose body is held. Raises
        PeerUnreachableError, MisdirectedError; S3Error SlowDown when nobody may wait for it any more."""
        answer = PeerResponse()
        wire = answer.wire = await self._peers.acquire_connection(node)
        try:
            self._require_caller()
            wire.send_request(
                answer, upstream_head(request, self.signed_hop(request, aim)), patience=_PART_SILENCE
            )
            head = await answer.wait_head()
            if is_stale_map_reply(head):
                raise MisdirectedError(int(head.headers[MAP_HEADER]))
            return head.status, await answer.read_body()
        finally:
            answer.close()

    async def forward(
        self,
        request: MeshRequest,
        head: RequestHead,
        name: ObjectName,
        trace: RequestTrace,
        *,
        aim: str = "",
        begun: PartialBody | None = None,
        damaged: bool = False,
    ) -> Reply | None:
        """The answer of the node that answers for a name, sent already; None when it turns out to be this
        one, or when those that hold it have it `damaged`, as this one has. Raises S3Error SlowDown when none
        answers, ConnectionError when the client is gone. `begun`: a body of which a part was read."""
        sending = UpstreamRequest(request, head, self._body_timeout, begun)
        await sending.buffer_small_body(_HOLD)
        errand = _ForwardState(request, name, trace, aim, sending)
        deadline = self._clock.monotonic() + _PATIENCE
        if damaged:
            errand.damaged.add(self._mesh.node_id)
        while True:
            version = self._mesh.current_map().version
            nodes = [node for node in self._candidates(name) if node.node_id not in errand.damaged]
            if errand.damaged and not nodes:
                if damaged:
                    return None
                raise S3Error("InternalError", _ALL_DAMAGED)
            if not aim and any(node.node_id == self._mesh.node_id for node in nodes):
                return None
            left = deadline - self._clock.monotonic()
            if left <= 0:
                raise self._no_owner_error(nodes)
            target = next((node for node in nodes if node.node_id not in errand.unresponsive), None)
            if target is None:
                errand.unresponsive.clear()
                await self._mesh.wait_for_newer_map(version, min(left, 0.5 if nodes else 2.0))
            elif await self._forward_to(target, errand, version, left):
                return sending.reply()

    def _require_caller(self) -> None:
        """Raises S3Error SlowDown when nobody may wait any more for the write that is to be sent next: by the
        map that its hop says, so nothing is waited for in between."""
        try:
            reject_if_abandoned(self._mesh)
        except NotReplicatedError as error:
            raise to_s3_error(error) from error

    async def _forward_to(self, node: Node, errand: _ForwardState, version: int, left: float) -> bool:
        """Whether a node has answered the client. If not, what it said is noted, so that the next is asked.
        `version`: of the map by which it was chosen; `left`: seconds. Raises S3Error SlowDown when none may
        be asked any more."""
        try:
            kept_back = await self._try(node, errand)
        except PeerUnreachableError as error:
            metrics.forwarded.labels("unreachable").inc()
            if errand.may_have_executed(error):
                self._mesh.note_silence(node.node_id)
                raise _unknown_outcome(node) from error
            errand.unresponsive.add(node.node_id)
            await self._mesh.report_suspect(node.node_id, version)
            return False
        if kept_back is None:
            metrics.forwarded.labels("answered").inc()
            return True
        if is_damaged_reply(kept_back):
            metrics.forwarded.labels("damaged").inc()
            errand.damaged.add(node.node_id)
        elif is_clock_skew_reply(kept_back):
            metrics.forwarded.labels("skewed").inc()
            errand.require_resendable(_SKEWED)
            errand.unresponsive.add(node.node_id)
        else:
            metrics.forwarded.labels("misdirected").inc()
            errand.require_resendable(_CHANGED)
            await self._wait_for_newer_map(int(kept_back.headers[MAP_HEADER]), version, left)
        return False

    async def _wait_for_newer_map(self, theirs: int, version: int, left: float) -> None:
        """A node goes by another map than the one it was chosen by: wait for the newer of the two."""
        if theirs > version:
            await self._mesh.wait_for_newer_map(theirs - 1, min(left, 2.0))
        else:
            await asyncio.sleep(_PAUSE)

    def _candidates(self, name: ObjectName) -> Sequence[Node]:
        """Who may answer, the nearest first."""
        route = self._mesh.route_for(name.bucket, name.key)
        if not name.reading:
            return () if route.primary is None else (route.primary,)
        me = self._mesh.own_node
        if me is None or len(route.read_set) < 2:
            return route.read_set
        return sorted(route.read_set, key=lambda node: (node.rack != me.rack, node.zone != me.zone))

    async def _try(self, node: Node, errand: _ForwardState) -> ResponseHead | None:
        """Send it to one node. The head of an answer that says it is not the one; None when it has answered.
        Raises PeerUnreachableError while nothing of an answer went out."""
        request, sending = errand.request, errand.sending
        wire = await self._peers.acquire_connection(node)
        relay = ResponseRelay(request.connection, wire, sending.connection_header, is_peer_status)
        request.connection.on_lost = relay.cancel
        try:
            if not errand.name.reading:
                self._require_caller()
            head = sending.head_bytes(self.signed_hop(request, errand.aim))
            head_only = request.method == "HEAD"
            wire.send_request(relay, head, patience=_SILENCE, head_only=head_only, more=sending.streams)
            return await self._follow(node, wire, relay, sending)
        except asyncio.CancelledError:
            if relay.outcome.cancelled():
                raise ConnectionResetError("the client closed the connection") from None
            relay.cancel()
            raise
        except Exception as error:
            relay.fail(error)
            if relay.head is None:
                raise
            if relay.aborted_by_peer:
                metrics.forwarded.labels("broken").inc()
            raise ConnectionAbortedError(f"an answer under way cannot be finished: {error}") from error
        finally:
            request.connection.on_lost = None
            sending.relay = relay
            errand.trace.sent += relay.sent
            errand.trace.received += sending.received
            sending.received = 0

    async def _follow(
        self, node: Node, wire: HttpConnection, relay: ResponseRelay, sending: UpstreamRequest
    ) -> ResponseHead | None:
        """Until the answer is sent, or none comes."""
        body = asyncio.ensure_future(sending.stream_body(relay, wire)) if sending.streams else None
        waiting: set[asyncio.Future[Any]] = {relay.outcome}
        if body is not None:
            waiting.add(body)
        try:
            while not relay.outcome.done():
                done, _ = await asyncio.wait(
                    waiting, timeout=_LIVENESS_CHECK, return_when=asyncio.FIRST_COMPLETED
                )
                if body is not None and body in done:
                    body.result()  # what is wrong with the client's body is the client's to hear
                    waiting.discard(body)
                if not done and relay.head is None:
                    await self._check_liveness(node, relay)
            return relay.outcome.result()
        finally:
            if body is not None:
                body.cancel()
                await asyncio.gather(body, return_exceptions=True)

    async def _check_liveness(self, node: Node, relay: ResponseRelay) -> None:
        """No answer for a while: is the node there? One that the map has given up is not waited for."""
        version = self._mesh.current_map().version
        await self._mesh.report_suspect(node.node_id, version)
        known = self._mesh.current_map().node(node.node_id)
        if (known is None or known.state in ("away", "down")) and relay.head is None:
            relay.fail(PeerUnreachableError(f"node {node.node_id} went away", begun=True))

    def _no_owner_error(self, nodes: Sequence[Node]) -> S3Error:
        if not nodes:
            return S3Error(
                "SlowDown",
                "No node that has all of this name's writes answers at present; try again.",
                headers={"retry-after": str(self._mesh.retry_after_absence)},
            )
        names = ", ".join(node.node_id for node in nodes)
        return S3Error("SlowDown", f"The nodes that hold this name ({names}) do not answer; try again.")

    def signed_hop(self, request: MeshRequest, aim: str = "") -> str:
        """`x-mesh-hop` for a client's request."""
        transport = request.transport
        tls = None if transport is None else transport.get_extra_info("ssl_object")
        hop = Hop(
            self._mesh.node_id,
            self._mesh.current_map().version,
            self._buckets(),
            request.remote or "",
            request.secure,
            (tls.version() or "").removeprefix("TLSv") if tls is not None else "",
            aim,
        )
        return self._hops.sign_hop(
            hop, request.method, request.raw_path, request.headers.get("authorization", "")
        )


def _unknown_outcome(node: Node) -> S3Error:
    return S3Error(
        "SlowDown",
        f"Node {node.node_id} went away before it answered; the request may have taken place or not. "
        "Try again.",
    )
