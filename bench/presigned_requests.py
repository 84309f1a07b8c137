"""Pre-signed S3 requests as raw HTTP/1.1 heads, ready for a load generator to send.

Signed by botocore, not by the project's own signer, so that a mistake shared by signer and verifier would
show.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

REGION = "us-east-1"
UNSIGNED = "UNSIGNED-PAYLOAD"
EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Account:
    """The key pair that a server under test knows."""

    access_key: str
    secret_key: str


class _FixedPayload(S3SigV4Auth):  # type: ignore[misc]  # botocore ships no types
    def __init__(self, account: Account, payload_hash: str) -> None:
        super().__init__(Credentials(account.access_key, account.secret_key), "s3", REGION)
        self._payload_hash = payload_hash

    def payload(self, request: AWSRequest) -> str:
        """The hash given, whatever the body: it is sent by the generator, not from here."""
        return self._payload_hash


@dataclass(frozen=True, slots=True)
class Request:
    """One request before signing; `query` is in the order it is sent."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    length: int | None = None
    payload_hash: str = EMPTY

    @property
    def target(self) -> str:
        """Path and query as sent."""
        path = quote(self.path, safe="/-_.~")
        return f"{path}?{urlencode(self.query, quote_via=quote)}" if self.query else path


def headers(request: Request, host: str, account: Account | None) -> dict[str, str]:
    """All headers of the request, with the signature unless account is None."""
    plain = {"Host": host}
    if request.length is not None:
        plain["Content-Length"] = str(request.length)
    if account is None:
        return plain
    signed = AWSRequest(request.method, f"http://{host}{request.target}")
    _FixedPayload(account, request.payload_hash).add_auth(signed)
    return {**plain, **dict(signed.headers.items())}


def head(request: Request, host: str, account: Account | None) -> bytes:
    """The request's bytes up to and with the empty line."""
    lines = [f"{name}: {value}" for name, value in headers(request, host, account).items()]
    return "\r\n".join([f"{request.method} {request.target} HTTP/1.1", *lines, "", ""]).encode()
