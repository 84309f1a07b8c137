"""Validity period of an X.509 certificate.

It reads only the dates; OpenSSL validates the certificate when it loads the pair. The library is imported
when the first certificate is read, so a daemon without TLS does not load it.
"""

from __future__ import annotations

from dataclasses import dataclass


class CertificateError(ValueError):
    """The bytes are not an X.509 certificate."""


@dataclass(frozen=True, slots=True)
class CertificateValidity:
    """A validity period; both times are in seconds since the epoch."""

    not_before: int
    not_after: int


def parse_validity(der: bytes) -> CertificateValidity:
    """Return when a DER-encoded certificate begins and ceases to be valid. Raises CertificateError."""
    from cryptography import x509

    try:
        found = x509.load_der_x509_certificate(der)
        dates = found.not_valid_before_utc, found.not_valid_after_utc
    except ValueError as error:
        raise CertificateError(f"not an X.509 certificate: {error}") from error
    return CertificateValidity(*(int(date.timestamp()) for date in dates))
