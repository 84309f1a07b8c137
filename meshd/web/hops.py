"""What one node tells another about a client whose request it passes on: `x-mesh-hop`.

Law: facts that only the node asked can know (the client's address, its TLS), signed with a key of the mesh;
no rights come with them: who the client is and what it may do the answering node finds out for itself, from
the client's own signature. Invariant: a request that was passed on is never passed on again.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshd.cluster.clocks import MAX_SKEW
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.kit.clock import Clock

HOP_HEADER: Final = "x-mesh-hop"
_PURPOSE: Final = "hops"
_FIELDS: Final = 9
_WRONG = "This request says that a node of this mesh passed it on, and none of them did."


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


class SkewedError(S3Error):
    """The sender's clock and this node's differ by minutes: nobody knows whose is right."""

    def __init__(self) -> None:
        super().__init__("AccessDenied", "The clocks of two nodes of this mesh differ by minutes: set them.")


class Hops:
    """Writes and reads them. One a process; `derive` is `NodeSecret.derive`."""

    def __init__(self, derive: Callable[[str], bytes], clock: Clock) -> None:
        self._derive, self._clock = derive, clock
        self._key = b""

    def __repr__(self) -> str:
        return "<Hops>"

    def write(self, hop: Hop, method: str, target: str, authorization: str) -> str:
        """The header's value, for this one request."""
        secure = "1" if hop.secure else "0"
        fields = (hop.sender, str(hop.map_version), str(hop.buckets), hop.remote, secure, hop.tls, hop.aim)
        text = ",".join((*fields, str(self._clock.now_ms())))
        return f"{text},{self._mac(text, method, target, authorization)}"

    def read(self, value: str, method: str, target: str, authorization: str) -> Hop:
        """Raises S3Error AccessDenied, SkewedError."""
        text, _, mac = value.rpartition(",")
        fields = text.split(",")
        if len(fields) != _FIELDS - 1:
            raise S3Error("AccessDenied", _WRONG)
        expected = self._mac(text, method, target, authorization)
        if not hmac.compare_digest(expected.encode(), mac.encode("utf-8", "surrogateescape")):
            raise S3Error("AccessDenied", _WRONG)
        sender, version, buckets, remote, secure, tls, aim, sent = fields
        if abs(self._clock.now_ms() - int(sent)) > 1000 * MAX_SKEW:  # a request's way included
            raise SkewedError
        return Hop(sender, int(version), int(buckets), remote, secure == "1", tls, aim)

    def _mac(self, text: str, method: str, target: str, authorization: str) -> str:
        if not self._key:
            self._key = self._derive(_PURPOSE)
        said = f"{text}\n{method}\n{target}\n{authorization}".encode("utf-8", "surrogateescape")
        return hmac.digest(self._key, said, "sha256").hex()
