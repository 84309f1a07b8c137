"""Continuation tokens: opaque to clients, the last name of a page to us.

Invariant: `read(write(name)) == name` for every name; anything else is refused.
"""

from __future__ import annotations

import base64
import binascii

_VERSION = b"1"


class TokenError(ValueError):
    """Not a token of ours."""


def write(after: str) -> str:
    return base64.urlsafe_b64encode(_VERSION + after.encode()).decode()


def read(token: str) -> str:
    """The name a token stands for. Raises TokenError."""
    try:
        raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        after = raw[1:].decode()
    except (binascii.Error, UnicodeError):
        raise TokenError(token) from None
    if raw[:1] != _VERSION or write(after) != token:
        raise TokenError(token)
    return after
