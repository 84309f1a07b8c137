"""Percent-encoding (RFC 3986 §2.1) and query strings, as in S3.

Law: decoding is strict: a broken escape or invalid UTF-8 is an error, never a replacement character.
"""

from __future__ import annotations

import re
from urllib.parse import quote_from_bytes, unquote_to_bytes

_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


class PercentError(ValueError):
    """A broken escape, or bytes that are not UTF-8."""


def to_bytes(text: str) -> bytes:
    """The bytes of text as received: servers hand on undecodable header and target bytes as lone
    surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise PercentError("not UTF-8") from None


def decode(text: str) -> str:
    """Percent-decoded `text`, `+` left alone. Raises PercentError."""
    if "%" not in text:
        if text.isascii():
            return text
    elif _BROKEN_ESCAPE.search(text):
        raise PercentError("broken percent escape")
    try:
        return unquote_to_bytes(to_bytes(text)).decode()
    except UnicodeDecodeError:
        raise PercentError("not UTF-8") from None


def encode(text: str, *, safe: str = "") -> str:
    """SigV4's UriEncode: everything but unreserved characters (and `safe`), upper-case hexadecimal. Raises
    PercentError for text that never was bytes."""
    return quote_from_bytes(to_bytes(text), safe=safe)


def encode_path(raw_path: str) -> str:
    """`raw_path` decoded and encoded again as SigV4's UriEncode would, `/` kept. Raises PercentError."""
    return quote_from_bytes(unquote_to_bytes(to_bytes(raw_path)), safe="/")


def split_query(raw_query: str) -> list[tuple[str, str]]:
    """(name, value) of each parameter in order, decoded, `+` as a space. Raises PercentError."""
    parameters = []
    for piece in raw_query.split("&"):
        if piece:
            name, _, value = piece.partition("=")
            parameters.append((_decode_query(name), _decode_query(value)))
    return parameters


def _decode_query(text: str) -> str:
    return decode(text.replace("+", " ") if "+" in text else text)
