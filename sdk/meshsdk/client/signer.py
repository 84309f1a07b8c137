"""Signer: signs the requests of a client and encodes their heads, with keys that may be renewed.

Law: the code that signs is the code by which nodes verify (`meshwire.sigv4`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from meshsdk.client.settings import RenewableKeys
from meshsdk.client.web_identity import WebIdentityKeys
from meshwire.s3.request_head import RequestHead
from meshwire.sigv4 import UNSIGNED_PAYLOAD, Credential, sign

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.request import Request
    from meshsdk.client.settings import Endpoint, Settings


class Signer:
    """Signs requests and encodes their heads. `clock` returns seconds since the epoch."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        endpoint: Endpoint | None = None,
        keys: RenewableKeys | None = None,
    ) -> None:
        self._authority = (endpoint or settings.endpoint).authority
        self._region = settings.region
        self._keys = keys or keys_of(settings, clock)
        self._clock = clock

    def head(self, request: Request) -> bytes:
        """Return the signed request head as bytes; the body follows it unchanged on the wire."""
        headers = {"host": self._authority, **request.headers}
        if request.body or request.method in ("PUT", "POST"):
            headers["content-length"] = str(len(request.body))
        unsigned = RequestHead(request.method, request.path, request.query, headers)
        headers |= sign(
            unsigned,
            self._keys.current(),
            region=self._region,
            timestamp=int(self._clock()),
            payload_hash=request.sha256 or UNSIGNED_PAYLOAD,
        )
        target = f"{request.path}?{request.query}" if request.query else request.path
        lines = [f"{request.method} {target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("utf-8")


def keys_of(settings: Settings, clock: Callable[[], float] = time.time) -> RenewableKeys:
    """Return the credentials of the settings; those from a file are re-read when it changes, those of a web
    identity are exchanged and renewed."""
    if settings.web_identity is not None:
        return WebIdentityKeys(settings, settings.web_identity, clock)
    credential = Credential(settings.access_key, settings.secret_key, settings.session_token)
    return RenewableKeys(settings.credentials_file, credential, clock)
