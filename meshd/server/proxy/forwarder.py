"""Forwards requests to the nodes that own their names, and their responses to the client.

The owner verifies the client's signature and makes every decision; the forwarder only finds the owner.
Everything the client signed is sent unchanged; connection headers are not forwarded (RFC 9110 §7.6.1). A
request is sent again, or to another node, only while it cannot have been executed and no part of its body has
been sent.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Any, Final

from meshd.cluster.replication.primary_writes import WriteForwarder
from meshd.core.api_errors import to_s3_error
from meshd.rpc.http_connection import PeerUnreachableError
from meshd.rpc.peer_client import MAP_HEADER
from meshd.rpc.peer_clock import describe_skew
from meshd.rpc.peer_connector import CONNECT_TIMEOUT
from meshd.server.proxy.hops import (
    HOP_HEADER,
    Hop,
    HopReceiver,
    ObjectName,
    is_clock_skew_reply,
    is_damaged_reply,
    is_peer_status,
    with_final_damage,
)
from meshd.server.proxy.response_relay import ResponseRelay
from meshd.server.proxy.upstream_request import UpstreamRequest
from meshd.store.errors import NotReplicatedError
from meshd.telemetry import metrics, tracing
from meshwire.errors import S3Error
from meshwire.http_values.mesh_headers import DAMAGED_HEADER, FINAL_DAMAGE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.http_connection import HttpConnection, ResponseHead
    from meshd.rpc.peer_client import PeerClient
    from meshd.server.proxy.hops import BucketRevisions, HopSigner, LocalDamageError
    from meshd.server.proxy.upstream_request import PartialBody
    from meshd.server.request import MeshRequest, RequestOrigin, RequestTrace
    from meshd.server.response import Reply
    from meshd.store.records import WriteContext
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.s3.parse_request import RequestHead

_PATIENCE: Final = 15.0
"""Seconds without an answering owner before a request fails."""
_RESTART: Final = 300.0
"""Seconds within which a machine that restarts is back. If a map has given names no owner for that long,
requests for them fail at once. Before, they wait: the usual S3 clients try two times more, a second later."""
_HOLD: Final = 64 << 10  # smaller bodies are buffered before they are sent, so they can be resent
_SILENCE: Final = 60.0
_LIVENESS_CHECK: Final = 2.0  # seconds without a response before the node's liveness is checked
_READ_CHECK: Final = 1.0
"""The same for a read that another node can answer; also the seconds for which the check is waited for."""
_READ_CONNECT: Final = 1.5
"""Seconds for a connection for such a read: long enough for a second SYN."""
_CHANGED: Final = "The owners of this name changed; nothing was stored. Try again."
_ALL_DAMAGED: Final = "The object is damaged on every node that stores it; upload it again."
_PAUSE: Final = 0.05


class AlreadyAnsweredError(Exception):
    """Another node has answered, and its response has been sent."""

    def __init__(self, reply: Reply) -> None:
        super().__init__("another node has answered")
        self.reply = reply


class _ForwardState:
    """A client's request, and what is known from the nodes that were tried."""

    def __init__(
        self,
        request: MeshRequest,
        name: ObjectName,
        trace: RequestTrace,
        aim: str,
        sending: UpstreamRequest,
        context: WriteContext,
    ) -> None:
        self.request, self.name, self.trace, self.aim, self.sending = request, name, trace, aim, sending
        self.context = context
        self.unresponsive: set[str] = set()
        """Nodes that did not answer: they are tried again after all others."""
        self.skewed: dict[str, str] = {}
        """Nodes that refused the request because their clocks differ, and what is known of the clocks."""
        self.skewed_again: set[str] = set()
        """Those that refused it a second time: one refusal may be of a request that was sent long ago."""
        self.damaged: set[str] = set()
        """Nodes on which the object is damaged: they are not tried again."""
        self.final_damage = True
        """Whether reading it there again cannot help."""
        self.has_alternative = False
        """Whether this is a read that another node than the one being tried can answer."""

    def may_have_executed(self, error: PeerUnreachableError) -> bool:
        """Whether a node that became unreachable may have executed the request, or has parts of a body that
        cannot be sent again."""
        sending = self.sending
        return sending.body_started or (error.begun and not self.name.reading and not sending.streams)

    def require_resendable(self, refusal: str) -> None:
        """Raise S3Error SlowDown with the text `refusal` if the request cannot be sent again."""
        if self.sending.body_started:
            raise S3Error("SlowDown", refusal)


class Forwarder:
    """Forwards requests. One instance per process."""

    def __init__(
        self,
        mesh: ClusterView,
        peers: PeerClient,
        hops: HopSigner,
        clock: Clock,
        buckets: BucketRevisions,
        body_timeout: float,
    ) -> None:
        self._mesh, self._peers, self._hops, self._clock = mesh, peers, hops, clock
        self._buckets, self._body_timeout = buckets, body_timeout
        self._map_seen = (0, 0.0)
        """The newest version of the map that a request was forwarded by, and since when."""
        self.receiver = HopReceiver(mesh, hops, clock, buckets)
        self.writes = WriteForwarder(mesh, peers, clock)

    def __repr__(self) -> str:
        return f"<Forwarder of {self._mesh!r}>"

    def idle_upstream(
        self, origin: RequestOrigin, bucket: str, key: str, head: RequestHead
    ) -> tuple[HttpConnection, bytes, Node] | None:
        """Return an idle connection to a node that may answer reads of a name, the header line that completes
        the head, and the node; None if there is none at this moment."""
        for node in self._candidates(ObjectName(bucket, key, reading=True)):
            if self._mesh.is_suspect(node.node_id):
                continue
            wire = self._peers.idle_connection(node)
            if wire is not None:
                signed = self._hops.sign_hop(
                    self._hop_from(origin), head.method, head.raw_path, head.headers.get("authorization", "")
                )
                return wire, f"{HOP_HEADER}: {signed}\r\n\r\n".encode("utf-8", "surrogateescape"), node
        return None

    def suspect(self, node: Node) -> None:
        """Have a node probed that was silent; meanwhile reads prefer other nodes."""
        self._mesh.start_probe(node.node_id, self._mesh.current_map().version)

    async def forward(
        self,
        request: MeshRequest,
        head: RequestHead,
        name: ObjectName,
        trace: RequestTrace,
        context: WriteContext,
        *,
        aim: str = "",
        begun: PartialBody | None = None,
        damaged: LocalDamageError | None = None,
    ) -> Reply | None:
        """Send a request to a node that is responsible for its name and relay the response. Returns None if
        this node turns out to be responsible. Raises S3Error SlowDown if no node answers, InternalError if
        all copies are damaged, ConnectionError if the client is gone. `context` counts for writes only.
        `begun`: a body of which a part was read; `damaged`: why this node's own copy cannot be read."""
        sending = UpstreamRequest(request, head, self._body_timeout, begun)
        await sending.buffer_small_body(_HOLD)
        forward_state = _ForwardState(request, name, trace, aim, sending, context)
        deadline = self._clock.monotonic() + _PATIENCE
        if damaged is not None:
            forward_state.damaged.add(self._mesh.node_id)
            forward_state.final_damage = damaged.final
        while True:
            version = self._mesh.current_map().version
            owner_expected_until = self._observe_map(version)
            nodes = [node for node in self._candidates(name) if node.node_id not in forward_state.damaged]
            if forward_state.damaged and not nodes:
                told = S3Error("InternalError", _ALL_DAMAGED) if damaged is None else damaged.client_error
                final = forward_state.final_damage and self._mesh.all_nodes_complete()
                raise with_final_damage(told) if final else told
            if not aim and any(node.node_id == self._mesh.node_id for node in nodes):
                return None
            left = (deadline if nodes else min(deadline, owner_expected_until)) - self._clock.monotonic()
            if left <= 0:
                raise self._no_owner_error(nodes, forward_state.skewed)
            if nodes and forward_state.skewed_again.issuperset(node.node_id for node in nodes):
                raise self._no_owner_error(nodes, forward_state.skewed)
            untried = [node for node in nodes if node.node_id not in forward_state.unresponsive]
            target = untried[0] if untried else None
            forward_state.has_alternative = name.reading and len(untried) > 1
            if target is None:
                forward_state.unresponsive.clear()
                await self._mesh.wait_for_newer_map(version, min(left, 0.5 if nodes else 2.0))
            elif await self._forward_to(target, forward_state, version, left):
                return sending.reply()

    def _observe_map(self, version: int) -> float:
        """Record the map of a request; return until when the owners of a name that has none by this map are
        waited for: one that was marked away lately may be restarting. A map that may be outdated says
        nothing of them."""
        if version != self._map_seen[0]:
            self._map_seen = (version, self._clock.monotonic())
        return self._map_seen[1] + _RESTART if self._mesh.lease_valid else inf

    def _require_caller(self, context: WriteContext) -> None:
        """Raise S3Error SlowDown if the caller of the write has given up. Call it directly before sending,
        without an await in between, since the hop carries the same map version."""
        try:
            self._mesh.reject_if_abandoned(context)
        except NotReplicatedError as error:
            raise to_s3_error(error) from error

    async def _forward_to(self, node: Node, forward_state: _ForwardState, version: int, left: float) -> bool:
        """Try one node; return whether it answered the client. If not, its status is recorded, so that the
        next node is tried. `version` is that of the map by which it was chosen; `left` is in seconds. Raises
        S3Error SlowDown if no further node may be tried."""
        try:
            with tracing.stage("forward", "client", {"server.address": node.node_id}):
                kept_back = await self._try(node, forward_state)
        except PeerUnreachableError as error:
            metrics.forwarded.labels("unreachable").inc()
            if forward_state.may_have_executed(error):
                self._mesh.note_silence(node.node_id)
                raise _unknown_outcome(node) from error
            forward_state.unresponsive.add(node.node_id)
            await self._mesh.report_suspect(
                node.node_id, version, 0.0 if forward_state.has_alternative else None
            )
            return False
        if kept_back is None:
            metrics.forwarded.labels("answered").inc()
            return True
        if is_damaged_reply(kept_back):
            metrics.forwarded.labels("damaged").inc()
            forward_state.damaged.add(node.node_id)
            forward_state.final_damage &= kept_back.headers[DAMAGED_HEADER] == FINAL_DAMAGE
        elif is_clock_skew_reply(kept_back):
            if node.node_id in forward_state.skewed:
                forward_state.skewed_again.add(node.node_id)
            skew = forward_state.skewed[node.node_id] = self.describe_skew(node, kept_back)
            forward_state.require_resendable(f"The request was refused, and nothing was stored: {skew}.")
            forward_state.unresponsive.add(node.node_id)
        else:
            metrics.forwarded.labels("misdirected").inc()
            forward_state.require_resendable(_CHANGED)
            await self._wait_for_newer_map(int(kept_back.headers[MAP_HEADER]), version, left)
        return False

    async def _wait_for_newer_map(self, theirs: int, version: int, left: float) -> None:
        """Wait for the newer of two maps when a node uses another map than this one."""
        if theirs > version:
            await self._mesh.wait_for_newer_map(theirs - 1, min(left, 2.0))
        else:
            await asyncio.sleep(_PAUSE)

    def _candidates(self, name: ObjectName) -> Sequence[Node]:
        """Return the nodes that may answer, the nearest first, and last those that are being probed."""
        route = self._mesh.route_for(name.bucket, name.key)
        if not name.reading:
            return () if route.primary is None else (route.primary,)
        if len(route.read_set) < 2:
            return route.read_set
        mesh, me = self._mesh, self._mesh.own_node
        rack, zone = (None, None) if me is None else (me.rack, me.zone)
        return sorted(
            route.read_set,
            key=lambda node: (mesh.is_suspect(node.node_id), node.rack != rack, node.zone != zone),
        )

    async def _try(self, node: Node, forward_state: _ForwardState) -> ResponseHead | None:
        """Send the request to one node. Returns None if it has answered, otherwise the head of its status
        response. Raises PeerUnreachableError if nothing of a response was sent to the client."""
        request, sending = forward_state.request, forward_state.sending
        wire = await self._peers.acquire_connection(
            node, _READ_CONNECT if forward_state.has_alternative else CONNECT_TIMEOUT
        )
        relay = ResponseRelay(request.connection, wire, sending.connection_header, is_peer_status)
        request.connection.on_lost = relay.cancel
        try:
            if not forward_state.name.reading:
                self._require_caller(forward_state.context)
            head = sending.head_bytes(self.signed_hop(request, forward_state.aim))
            head_only = request.method == "HEAD"
            wire.send_request(relay, head, patience=_SILENCE, head_only=head_only, more=sending.streams)
            return await self._follow(node, wire, relay, forward_state)
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
            raise ConnectionAbortedError(f"a response in progress cannot be finished: {error}") from error
        finally:
            request.connection.on_lost = None
            sending.relay = relay
            forward_state.trace.sent += relay.sent
            forward_state.trace.received += sending.received
            sending.received = 0

    async def _follow(
        self, node: Node, wire: HttpConnection, relay: ResponseRelay, forward_state: _ForwardState
    ) -> ResponseHead | None:
        """Wait until the response is sent, or none comes."""
        sending, has_alternative = forward_state.sending, forward_state.has_alternative
        body = asyncio.ensure_future(sending.stream_body(relay, wire)) if sending.streams else None
        waiting: set[asyncio.Future[Any]] = {relay.outcome}
        if body is not None:
            waiting.add(body)
        try:
            while not relay.outcome.done():
                done, _ = await asyncio.wait(
                    waiting,
                    timeout=_READ_CHECK if has_alternative else _LIVENESS_CHECK,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if body is not None and body in done:
                    body.result()  # an error in the client's body is reported to the client
                    waiting.discard(body)
                if not done and relay.head is None:
                    await self._check_liveness(node, relay, has_alternative=has_alternative)
            return relay.outcome.result()
        finally:
            if body is not None:
                body.cancel()
                await asyncio.gather(body, return_exceptions=True)

    async def _check_liveness(self, node: Node, relay: ResponseRelay, *, has_alternative: bool) -> None:
        """Check whether a silent node is alive; one that the map marks as away or down is given up, and if
        another node can answer, one that is silent to the check: no lease has to end for a read."""
        version = self._mesh.current_map().version
        await self._mesh.report_suspect(node.node_id, version, _READ_CHECK if has_alternative else None)
        known = self._mesh.current_map().node(node.node_id)
        gone = known is None or known.state in ("away", "down")
        silent = has_alternative and self._mesh.is_suspect(node.node_id)
        if (gone or silent) and relay.head is None:
            relay.fail(PeerUnreachableError(f"node {node.node_id} is not available any more", begun=True))

    def describe_skew(self, node: Node, head: ResponseHead) -> str:
        """Return how the clock of a node differs that refused a forwarded request for that; count it."""
        metrics.forwarded.labels("skewed").inc()
        return describe_skew(node.node_id, self._mesh.node_id, head.headers, self._clock.now_ms())

    def _no_owner_error(self, nodes: Sequence[Node], skewed: Mapping[str, str]) -> S3Error:
        if not nodes:
            return S3Error(
                "SlowDown",
                "No node that has all writes of this name answers at present; try again.",
                headers={"retry-after": str(self._mesh.retry_after_absence)},
            )
        skew = next((skewed[node.node_id] for node in nodes if node.node_id in skewed), "")
        if skew:
            return S3Error("SlowDown", f"No node that stores this name takes the request: {skew}.")
        names = ", ".join(node.node_id for node in nodes)
        return S3Error("SlowDown", f"The nodes that store this name ({names}) do not answer; try again.")

    def signed_hop(self, request: MeshRequest, aim: str = "") -> str:
        """Return the value of `x-mesh-hop` for a client's request."""
        return self._hops.sign_hop(
            self._hop_from(request, aim),
            request.method,
            request.raw_path,
            request.headers.get("authorization", ""),
        )

    def _hop_from(self, origin: RequestOrigin, aim: str = "") -> Hop:
        return Hop(
            self._mesh.node_id,
            self._mesh.current_map().version,
            self._buckets.newest(),
            origin.remote or "",
            origin.secure,
            origin.tls,
            aim,
        )


def _unknown_outcome(node: Node) -> S3Error:
    return S3Error(
        "SlowDown",
        f"Node {node.node_id} disconnected before it answered; the request may or may not have been "
        "executed. Try again.",
    )
