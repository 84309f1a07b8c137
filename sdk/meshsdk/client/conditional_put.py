"""A PUT that depends on the present object, and that knows what its own earlier attempt has stored.

Law: the answer of a write may be lost, and a later attempt then meets the object of the first one. A token in
the object's metadata tells it from an object of another writer, which may have the same bytes.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from meshsdk.client.object_info import WRITE_TOKEN_HEADER, read_etag, read_head
from meshsdk.client.request import Request
from meshsdk.errors import MeshError, PreconditionError

if TYPE_CHECKING:
    from meshsdk.client.transport import Transport


def put_if(transport: Transport, request: Request) -> str:
    """Send a PUT with conditions and return the ETag. Raises PreconditionError if they do not hold, unless
    an attempt of this call has stored the present object."""
    token, retries = secrets.token_hex(8), transport.retries
    marked = replace(request, headers={**request.headers, WRITE_TOKEN_HEADER: token})
    try:
        return transport.call(marked, read_etag)
    except PreconditionError:
        if transport.retries != retries:  # also if other threads have repeated theirs: this costs a request
            with suppress(MeshError):  # report the refusal, not that the object cannot be examined
                found = transport.call(Request("HEAD", request.path), read_head)
                if found.headers.get(WRITE_TOKEN_HEADER) == token:
                    return found.etag
        raise
