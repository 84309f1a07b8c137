"""Validity period of an X.509 certificate, read from its DER encoding.

Law: parses only the fields before the dates (RFC 5280 §4.1); OpenSSL validates everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

_SEQUENCE, _UTC_TIME, _GENERALIZED_TIME, _VERSION = 0x30, 0x17, 0x18, 0xA0


class CertificateError(ValueError):
    """Not an X.509 certificate."""


@dataclass(frozen=True, slots=True)
class CertificateValidity:
    """Both in seconds since the epoch."""

    not_before: int
    not_after: int


def parse_validity(der: bytes) -> CertificateValidity:
    """When a certificate begins and ceases to be valid. Raises CertificateError."""
    try:
        certificate, _ = _value(der, 0, _SEQUENCE)
        body, _ = _value(certificate, 0, _SEQUENCE)
        at = 0
        if body[0] == _VERSION:
            at = _skip(body, at)
        for _ in ("serial number", "signature algorithm", "issuer"):
            at = _skip(body, at)
        dates, _ = _value(body, at, _SEQUENCE)
        return CertificateValidity(_time(dates, 0), _time(dates, _skip(dates, 0)))
    except (IndexError, ValueError) as error:
        raise CertificateError("not an X.509 certificate") from error


def _value(data: bytes, at: int, tag: int) -> tuple[bytes, int]:
    """(content, where the next one begins) of the element at `at`, which must have this tag."""
    if data[at] != tag:
        raise CertificateError(f"expected the tag {tag:#x}, found {data[at]:#x}")
    start, end = _bounds(data, at)
    return data[start:end], end


def _skip(data: bytes, at: int) -> int:
    return _bounds(data, at)[1]


def _bounds(data: bytes, at: int) -> tuple[int, int]:
    """Where the content of an element begins and ends; a length beyond 127 says how many bytes it has."""
    length, start = data[at + 1], at + 2
    if length > 0x7F:
        width = length & 0x7F
        length, start = int.from_bytes(data[start : start + width]), start + width
    if start + length > len(data):
        raise CertificateError("it ends too early")
    return start, start + length


def _time(data: bytes, at: int) -> int:
    tag = data[at]
    text = _value(data, at, tag)[0].decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise CertificateError("a date of an unknown form")
    return int(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp())
