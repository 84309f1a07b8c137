"""Hops: the name that a request concerns, by which its node is chosen, the signed `x-mesh-hop` header of a
forwarded request, its verification, and the refusals of a hop.

A hop carries only facts that the receiving node cannot know (client address, TLS), signed with a key of the
cluster. It grants no rights: the receiving node authenticates and authorizes the client from the client's own
signature. A node that receives a forwarded request answers it or replies 421; it never forwards it again. An
S3 client never gets 421 (RFC 9110 §15.5.20). A single node sends none of these headers.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from meshd.cluster.clock_skew import MAX_SKEW
from meshd.cluster.read_barrier import ReadBarrier
from meshd.core.api_errors import to_s3_error
from meshd.rpc.peer_client import MAP_HEADER
from meshd.server.response import Reply
from meshd.store.errors import QuarantinedError
from meshwire.errors import S3Error
from meshwire.http_values.mesh_headers import DAMAGED_HEADER, FINAL_DAMAGE, FORWARDED_TRACE_HEADER
from meshwire.s3 import operations as ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.control_api import ControlStore
    from meshd.rpc.http_connection import ResponseHead
    from meshd.server.request import MeshRequest
    from meshd.store.errors import StoreError
    from meshd.telemetry.tracing import Span
    from meshd.util.clock import Clock
    from meshwire.s3.parse_request import RequestHead


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
    """The name that a request concerns; `reading`: any node of its read set may answer."""

    bucket: str
    key: str
    reading: bool


def object_name_of(operation: ops.Operation) -> ObjectName | None:
    """Return the single name that an operation concerns; None for buckets and for several names."""
    if isinstance(operation, _READS):
        return ObjectName(operation.bucket, operation.key, reading=True)
    if isinstance(operation, _WRITES):
        return ObjectName(operation.bucket, operation.key, reading=False)
    return None


def may_answer(mesh: ClusterView, name: ObjectName) -> bool:
    """Whether this node may answer for a name."""
    return mesh.is_reader(name.bucket, name.key) if name.reading else mesh.is_primary(name.bucket, name.key)


class MisdirectedError(Exception):
    """By the map of this node, version `version`, another node is responsible for the name."""

    def __init__(self, version: int) -> None:
        super().__init__(f"another node is responsible by version {version} of the map")
        self.version = version


HOP_HEADER: Final = "x-mesh-hop"
_PURPOSE: Final = "hops"
_FIELDS: Final = 9
_PAUSE: Final = 0.05
_INVALID_HOP = "The x-mesh-hop header of this request was not signed by a node of this mesh."


class Hop(msgspec.Struct, frozen=True):
    """`sender` is the node that the client asked; `map_version` and `buckets` are its versions of the map and
    the bucket table. `remote`, `secure` and `tls` describe the client's connection. `aim` is the wanted part
    of the request: all of it (empty), `members` or `keys`."""

    sender: str
    map_version: int
    buckets: int
    remote: str
    secure: bool
    tls: str = ""
    aim: str = ""


class ClockSkewError(S3Error):
    """The clocks of the sender and of this node differ by minutes; which one is right is unknown."""

    def __init__(self) -> None:
        super().__init__(
            "AccessDenied", "The clocks of two nodes of this mesh differ by minutes: set the clocks."
        )


class HopSigner:
    """Signs and verifies hops. One instance per process; `derive` is `ClusterSecret.derive_key`."""

    def __init__(self, derive: Callable[[str], bytes], clock: Clock) -> None:
        self._derive, self._clock = derive, clock
        self._key = b""

    def sign_hop(self, hop: Hop, method: str, target: str, authorization: str) -> str:
        """Return the header's value for this one request."""
        secure = "1" if hop.secure else "0"
        fields = (hop.sender, str(hop.map_version), str(hop.buckets), hop.remote, secure, hop.tls, hop.aim)
        text = ",".join((*fields, str(self._clock.now_ms())))
        return f"{text},{self._mac(text, method, target, authorization)}"

    def verify_hop(self, value: str, method: str, target: str, authorization: str) -> Hop:
        """Verify a header and return its hop. Raises S3Error AccessDenied, ClockSkewError."""
        text, _, mac = value.rpartition(",")
        fields = text.split(",")
        if len(fields) != _FIELDS - 1:
            raise S3Error("AccessDenied", _INVALID_HOP)
        expected = self._mac(text, method, target, authorization)
        if not hmac.compare_digest(expected.encode(), mac.encode("utf-8", "surrogateescape")):
            raise S3Error("AccessDenied", _INVALID_HOP)
        sender, version, buckets, remote, secure, tls, aim, sent = fields
        if abs(self._clock.now_ms() - int(sent)) > 1000 * MAX_SKEW:  # including the request's travel time
            raise ClockSkewError
        return Hop(sender, int(version), int(buckets), remote, secure == "1", tls, aim)

    def _mac(self, text: str, method: str, target: str, authorization: str) -> str:
        if not self._key:
            self._key = self._derive(_PURPOSE)
        said = f"{text}\n{method}\n{target}\n{authorization}".encode("utf-8", "surrogateescape")
        return hmac.digest(self._key, said, "sha256").hex()


def forwarded_trace(span: Span | None) -> bytes:
    """Return the header line that makes the other node's work part of a trace; empty if there is none."""
    return b"" if span is None else f"{FORWARDED_TRACE_HEADER}: {span.to_header()}\r\n".encode()


class BucketRevisions:
    """This process's revisions of the bucket table."""

    def __init__(self, control: ControlStore) -> None:
        self._control = control

    def __repr__(self) -> str:
        return f"<BucketRevisions: {self.newest()} of {self.complete()}>"

    def newest(self) -> int:
        """Return that of the newest known change."""
        return self._control.revision("buckets")

    def complete(self) -> int:
        """Return that up to which all changes are known."""
        return self._control.complete_revision("buckets")


class HopReceiver:
    """Receives the requests that other nodes forward. One instance per process."""

    def __init__(self, mesh: ClusterView, hops: HopSigner, clock: Clock, buckets: BucketRevisions) -> None:
        self._mesh, self._hops, self._buckets = mesh, hops, buckets
        self._read_barrier = ReadBarrier(mesh, clock)

    def hop_of(self, request: MeshRequest) -> Hop | None:
        """Return the hop that a forwarding node added; None for a request that came from a client. Raises
        S3Error AccessDenied."""
        value = request.headers.get(HOP_HEADER)
        if value is None:
            return None
        authorization = request.headers.get("authorization", "")
        return self._hops.verify_hop(value, request.method, request.raw_path, authorization)

    def hop_of_head(self, head: RequestHead) -> Hop | None:
        """Like `hop_of`, for a parsed head. Raises S3Error AccessDenied."""
        value = head.headers.get(HOP_HEADER)
        if value is None:
            return None
        return self._hops.verify_hop(value, head.method, head.raw_path, head.headers.get("authorization", ""))

    def is_current_with(self, hop: Hop) -> bool:
        """Whether this node is up to date with the node that forwarded a whole request."""
        return (
            not hop.aim
            and self._mesh.current_map().version >= hop.map_version
            and self._buckets.complete() >= hop.buckets
        )

    async def catch_up(self, hop: Hop) -> None:
        """Wait for the map and the bucket table of the forwarding node."""
        if hop.map_version > self._mesh.current_map().version:
            await self._mesh.wait_for_newer_map(hop.map_version - 1, 1.0)
        for _ in range(20):
            if self._buckets.complete() >= hop.buckets:
                return
            await asyncio.sleep(_PAUSE)

    async def require_local(self, name: ObjectName, hop: Hop) -> None:
        """Raise MisdirectedError unless this node is responsible for the name, and was since the request was
        routed; S3Error SlowDown if it may not be any more and cannot find out."""
        if may_answer(self._mesh, name):
            await self.wait_until_current(name, 1.0)
        left = 0 if name.reading else self._mesh.last_absence_version(self._mesh.node_id)
        if not may_answer(self._mesh, name) or hop.map_version < left:
            raise MisdirectedError(self._mesh.current_map().version)

    async def wait_until_current(self, name: ObjectName, patience: float = 5.0) -> None:
        """Make sure that the map by which this node answers a read is current. Raises S3Error SlowDown.
        Writes need no such check: the other owners refuse them."""
        if not name.reading or self._mesh.lease_valid:
            return
        why = await self._read_barrier.wait_until_current(name.bucket, name.key, patience)
        if why:
            raise S3Error(
                "SlowDown",
                f"This node {why}, so its data of this name may be outdated. Ask another node, or try again.",
            )


SKEWED_HEADER: Final = "x-mesh-skewed"


class LocalDamageError(Exception):
    """The requested bytes of the object `name` are unreadable on this node, and nothing was sent.
    `client_error`: the client's error if no other node has them; `final`: reading them again cannot help."""

    def __init__(self, why: StoreError, name: str) -> None:
        super().__init__("damaged on this node")
        self.client_error = to_s3_error(why, name)
        self.final = isinstance(why, QuarantinedError)

    def client_error_of_only_copy(self) -> S3Error:
        """Return the client's error where there are no other nodes."""
        return with_final_damage(self.client_error) if self.final else self.client_error


def with_final_damage(error: S3Error) -> S3Error:
    """Return the error with a header that says that trying again cannot help."""
    return S3Error(error.code, error.message, headers={DAMAGED_HEADER: FINAL_DAMAGE})


def stale_map_reply(version: int, now: int) -> Reply:
    """Return 421: this node uses version `version` of the map."""
    message = f"this node uses version {version} of the cluster map"
    return _status_reply(421, "MisdirectedRequest", message, MAP_HEADER, str(version), now)


def damaged_reply(now: int, *, final: bool) -> Reply:
    """Return 503: this node's copy is damaged; `final`: reading it again cannot help."""
    message = "this node's copy is damaged; ask another node that stores it"
    return _status_reply(503, "Damaged", message, DAMAGED_HEADER, FINAL_DAMAGE if final else "1", now)


def clock_skew_reply(now: int) -> Reply:
    """Return 503: the clocks of this node and the sender differ by minutes."""
    message = "the clocks of two nodes of this mesh differ by minutes: set the clocks"
    return _status_reply(503, "Skewed", message, SKEWED_HEADER, "1", now)


def _status_reply(status: int, code: str, message: str, header: str, value: str, now: int) -> Reply:
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    headers = [("Content-Type", "application/json"), (header, value), ("Content-Length", str(len(body)))]
    return Reply(status, headers, body, now)


def is_stale_map_reply(head: ResponseHead) -> bool:
    """Whether a node reports that it uses another map."""
    return head.status == 421 and head.headers.get(MAP_HEADER, "").isdigit()


def is_damaged_reply(head: ResponseHead) -> bool:
    """Whether a node reports that its copy is damaged."""
    return head.status == 503 and DAMAGED_HEADER in head.headers


def is_clock_skew_reply(head: ResponseHead) -> bool:
    """Whether a node reports a clock skew."""
    return head.status == 503 and SKEWED_HEADER in head.headers


def is_peer_status(head: ResponseHead) -> bool:
    """Whether a response is meant for the forwarding node, not for its client."""
    return is_stale_map_reply(head) or is_damaged_reply(head) or is_clock_skew_reply(head)
