"""Key pairs: what one looks like, and making new ones.

Law: a secret made here begins with `mss-`, so that logs can mask it wherever it turns up.
"""

from __future__ import annotations

import re
import secrets
import string

_LETTERS = string.ascii_uppercase + string.digits
_ACCESS = re.compile(r"[\w.@=+-]{3,128}", re.ASCII)
_SECRET = re.compile(r"[\x21-\x7e]{8,128}")


def check_keys(access_key: str, secret_key: str) -> None:
    """Raise ValueError, which does not show the secret, unless the pair can sign requests."""
    if not _ACCESS.fullmatch(access_key):
        raise ValueError("an access key has 3 to 128 letters, digits or _.@=+-")
    if not _SECRET.fullmatch(secret_key):
        raise ValueError("a secret key has 8 to 128 printable characters without spaces")


def new_access_key(prefix: str = "MESH") -> str:
    """`prefix` and 16 letters and digits that nobody had before."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(16))


def new_secret_key() -> str:
    """44 characters, 240 random bits."""
    return "mss-" + secrets.token_urlsafe(30)
