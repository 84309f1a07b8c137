"""Headers between nodes: the signed `x-mesh-hop` of a forwarded request, map version and status replies.

Law: a hop carries only facts that the receiving node cannot know (client address, TLS), signed with a
key of the cluster. It grants no rights: the receiving node authenticates and authorizes the client from
the client's own signature. An S3 client never gets 421 (RFC 9110 §15.5.20). A single node sends none of
these headers. Invariant: a forwarded request is never forwarded again.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshd.cluster.clock_skew import MAX_SKEW
from meshd.rpc.peer_client import MAP_HEADER
from meshd.server.response import Reply
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.http_connection import ResponseHead
    from meshd.server.response import Header
    from meshd.util.clock import Clock


HOP_HEADER: Final = "x-mesh-hop"
_PURPOSE: Final = "hops"
_FIELDS: Final = 9
_INVALID_HOP = "This request says that a node of this mesh passed it on, and none of them did."


@dataclass(frozen=True, slots=True)
class Hop:
    """`sender`: the node that was asked, going by `map_version`; `buckets` is its revision of that table.
    `remote`, `secure` and `tls` are the client's connection. `aim` is what of the request is wanted: all of
    it (empty), or a part (`members`, `keys`)."""

    sender: str
    map_version: int
    buckets: int
    remote: str
    secure: bool
    tls: str = ""
    aim: str = ""

    @property
    def transport(self) -> None:
        """It has none of its own here; `request_context` reads connections and hops alike."""
        return


class ClockSkewError(S3Error):
    """The sender's clock and this node's differ by minutes: nobody knows whose is right."""

    def __init__(self) -> None:
        super().__init__("AccessDenied", "The clocks of two nodes of this mesh differ by minutes: set them.")


class HopSigner:
    """Writes and reads them. One a process; `derive` is `NodeSecret.derive`."""

    def __init__(self, derive: Callable[[str], bytes], clock: Clock) -> None:
        self._derive, self._clock = derive, clock
        self._key = b""

    def __repr__(self) -> str:
        return "<Hops>"

    def sign_hop(self, hop: Hop, method: str, target: str, authorization: str) -> str:
        """The header's value, for this one request."""
        secure = "1" if hop.secure else "0"
        fields = (hop.sender, str(hop.map_version), str(hop.buckets), hop.remote, secure, hop.tls, hop.aim)
        text = ",".join((*fields, str(self._clock.now_ms())))
        return f"{text},{self._mac(text, method, target, authorization)}"

    def verify_hop(self, value: str, method: str, target: str, authorization: str) -> Hop:
        """Raises S3Error AccessDenied, SkewedError."""
        text, _, mac = value.rpartition(",")
        fields = text.split(",")
        if len(fields) != _FIELDS - 1:
            raise S3Error("AccessDenied", _INVALID_HOP)
        expected = self._mac(text, method, target, authorization)
        if not hmac.compare_digest(expected.encode(), mac.encode("utf-8", "surrogateescape")):
            raise S3Error("AccessDenied", _INVALID_HOP)
        sender, version, buckets, remote, secure, tls, aim, sent = fields
        if abs(self._clock.now_ms() - int(sent)) > 1000 * MAX_SKEW:  # a request's way included
            raise ClockSkewError
        return Hop(sender, int(version), int(buckets), remote, secure == "1", tls, aim)

    def _mac(self, text: str, method: str, target: str, authorization: str) -> str:
        if not self._key:
            self._key = self._derive(_PURPOSE)
        said = f"{text}\n{method}\n{target}\n{authorization}".encode("utf-8", "surrogateescape")
        return hmac.digest(self._key, said, "sha256").hex()


DAMAGED_HEADER: Final = "x-mesh-damaged"
SKEWED_HEADER: Final = "x-mesh-skewed"


class LocalDamageError(Exception):
    """The bytes that were asked for cannot be had as they were written on this node; nothing was sent.
    `told`: what a client hears if no other node has them."""

    def __init__(self, told: S3Error) -> None:
        super().__init__("damaged on this node")
        self.client_error = told


def map_headers(mesh: ClusterView) -> list[Header]:
    """What tells the SDK that there are more nodes."""
    return [] if mesh.single_node else [(MAP_HEADER, str(mesh.current_map().version))]


def stale_map_reply(version: int, now: int) -> Reply:
    """421: this node goes by version `version` of the map."""
    message = f"this node goes by version {version} of the cluster map"
    return _status_reply(421, "MisdirectedRequest", message, MAP_HEADER, str(version), now)


def damaged_reply(now: int) -> Reply:
    """503: what this node has of it is damaged."""
    message = "what this node has of it is damaged; ask another one that holds it"
    return _status_reply(503, "Damaged", message, DAMAGED_HEADER, "1", now)


def clock_skew_reply(now: int) -> Reply:
    """503: this node's clock and that of the node that asked differ by minutes."""
    message = "the clocks of two nodes of this mesh differ by minutes: set them"
    return _status_reply(503, "Skewed", message, SKEWED_HEADER, "1", now)


def _status_reply(status: int, code: str, message: str, header: str, value: str, now: int) -> Reply:
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    headers = [("Content-Type", "application/json"), (header, value), ("Content-Length", str(len(body)))]
    return Reply(status, headers, body, now)


def is_stale_map_reply(head: ResponseHead) -> bool:
    """Whether a node says that it goes by another map."""
    return head.status == 421 and head.headers.get(MAP_HEADER, "").isdigit()


def is_damaged_reply(head: ResponseHead) -> bool:
    """Whether a node says that its copy is damaged."""
    return head.status == 503 and DAMAGED_HEADER in head.headers


def is_clock_skew_reply(head: ResponseHead) -> bool:
    """Whether a node says that it has another time."""
    return head.status == 503 and SKEWED_HEADER in head.headers


def is_peer_status(head: ResponseHead) -> bool:
    """Whether an answer is for the node that asked, and not for its client."""
    return is_stale_map_reply(head) or is_damaged_reply(head) or is_clock_skew_reply(head)
