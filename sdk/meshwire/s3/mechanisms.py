"""How a request is signed: in its headers, in its query, or not at all.

Law: the one place that decides this, from the decoded query, as everything that acts on the query does.
Invariant: a request that is signed in two ways is refused, and so is an x-amz-* parameter in a request that
is not presigned: in a presigned URL it is signed and counts as a header, elsewhere it is neither.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from meshwire.s3.errors import S3Error
from meshwire.s3.queries import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.s3.queries import Query


class Mechanism(Enum):
    """Where a request carries its signature, and of which version it is."""

    ANONYMOUS = "anonymous"
    HEADER_V4 = "header, version 4"
    HEADER_V2 = "header, version 2"
    PRESIGNED_V4 = "query, version 4"
    PRESIGNED_V2 = "query, version 2"

    @property
    def presigned(self) -> bool:
        return self is Mechanism.PRESIGNED_V4 or self is Mechanism.PRESIGNED_V2


_BY_PARAMETER = {
    "X-Amz-Algorithm": Mechanism.PRESIGNED_V4,
    "X-Amz-Credential": Mechanism.PRESIGNED_V4,
    "X-Amz-Signature": Mechanism.PRESIGNED_V4,
    "AWSAccessKeyId": Mechanism.PRESIGNED_V2,
    "Signature": Mechanism.PRESIGNED_V2,
}


def read_mechanism(headers: Mapping[str, str], query: Query) -> Mechanism:
    """How a request with these headers and this query is signed, be the signature good or not.

    Raises S3Error InvalidArgument: two mechanisms; an x-amz-* parameter in a request that is not presigned.
    """
    mechanism, amz = _header_mechanism(headers), ""
    for name in query.values:
        presigned = _BY_PARAMETER.get(name)
        if presigned is None:
            amz = name if name[:6].lower() == "x-amz-" else amz
        elif mechanism is Mechanism.ANONYMOUS:
            mechanism = presigned
        elif mechanism is not presigned:
            raise S3Error("InvalidArgument", _ONE_MECHANISM)
    if amz and not mechanism.presigned:
        message = f"The query parameter {amz[:64]!r} is only allowed in a presigned URL. "
        raise invalid(amz, query.values[amz], message + "Send it as a header, and sign it.")
    return mechanism


_ONE_MECHANISM = (
    "Only one auth mechanism allowed; only the X-Amz-Algorithm query parameter, Signature query string "
    "parameter or the Authorization header should be specified"
)


def _header_mechanism(headers: Mapping[str, str]) -> Mechanism:
    authorization = headers.get("authorization")
    if authorization is None:
        return Mechanism.ANONYMOUS
    return Mechanism.HEADER_V2 if authorization.startswith("AWS ") else Mechanism.HEADER_V4
