"""Signing keys and the signatures of chunks.

Law: the secret goes in, a key that is good for one day, region and service comes out, cached. A scope is
signed as the bytes it came as, be they UTF-8 or not.
"""

from __future__ import annotations

import hmac
from functools import lru_cache

from meshwire import percents

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def hmac_sha256(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


@lru_cache(maxsize=1024)
def signing_key(secret_key: str, date: str, region: str, service: str) -> bytes:
    """SigV4's derived key; `date` is YYYYMMDD."""
    key = hmac_sha256(b"AWS4" + secret_key.encode(), date.encode())
    for text in (region, service, "aws4_request"):
        key = hmac_sha256(key, percents.to_bytes(text))
    return key


def chunk_signature(key: bytes, timestamp: str, scope: str, previous: str, data_sha256: str) -> str:
    """Signature of one chunk of STREAMING-AWS4-HMAC-SHA256-PAYLOAD, chained to the `previous` one."""
    text = f"AWS4-HMAC-SHA256-PAYLOAD\n{timestamp}\n{scope}\n{previous}\n{EMPTY_SHA256}\n{data_sha256}"
    return hmac_sha256(key, percents.to_bytes(text)).hex()


def trailer_signature(key: bytes, timestamp: str, scope: str, previous: str, trailers_sha256: str) -> str:
    """Signature of the trailers (`name:value\\n` each) after a signed chunked body."""
    text = f"AWS4-HMAC-SHA256-TRAILER\n{timestamp}\n{scope}\n{previous}\n{trailers_sha256}"
    return hmac_sha256(key, percents.to_bytes(text)).hex()
