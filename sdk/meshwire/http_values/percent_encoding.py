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
    """Return the bytes of received text: servers pass undecodable header and target bytes as lone
    surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise PercentError("not UTF-8") from None


def decode(text: str) -> str:
    """Percent-decode `text`, leaving `+` alone. Raises PercentError."""
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
    """Encode like SigV4's UriEncode: everything but unreserved characters (and `safe`), in upper-case
    hexadecimal. Raises PercentError for text that does not stand for bytes."""
    return quote_from_bytes(to_bytes(text), safe=safe)


def encode_path(raw_path: str) -> str:
    """Decode `raw_path` and encode it as SigV4's UriEncode would, keeping `/`. Raises PercentError."""
    return quote_from_bytes(unquote_to_bytes(to_bytes(raw_path)), safe="/")


def split_query(raw_query: str) -> list[tuple[str, str]]:
    """Return (name, value) of each parameter in order, decoded, with `+` as a space. Raises PercentError."""
    parameters = []
    for piece in raw_query.split("&"):
        if piece:
            name, _, value = piece.partition("=")
            parameters.append((_decode_query(name), _decode_query(value)))
    return parameters


def _decode_query(text: str) -> str:
    return decode(text.replace("+", " ") if "+" in text else text)
