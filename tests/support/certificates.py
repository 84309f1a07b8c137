"""Certificates for tests: a private authority and server certificates that it signs.

Law: never for production; keys stay in the folder they are written to. Needs the `cryptography` package.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMES = ("localhost", "*.localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """A self-signed authority; `cert` is what clients must trust."""

    def __init__(self, folder: Path, name: str = "Tests of Shardmesh") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(name)
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(self._name, self._name, self._key, 3650).add_extension(constraints, critical=True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.cert = folder / "ca.pem"
        self.cert.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def __repr__(self) -> str:
        return f"<Authority {self.cert}>"

    def issue(
        self,
        stem: str = "server",
        names: Sequence[str] = NAMES,
        *,
        days: int = 30,
        key: CertificatePair | None = None,
    ) -> CertificatePair:
        """A certificate for these host names and addresses in `STEM.pem`, its key in `STEM.key`; with fewer
        than 0 days it has expired. `key` may name a pair whose key is used again."""
        private = ec.generate_private_key(ec.SECP256R1()) if key is None else _read_key(key.key)
        alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(_common_name(names[0]), self._name, private, days)
            .add_extension(alternatives, critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = CertificatePair(self._folder / f"{stem}.pem", self._folder / f"{stem}.key")
        _replace(pair.cert, certificate.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        pem = serialization.Encoding.PEM
        _replace(pair.key, private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
        return pair


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    until = datetime.now(UTC) + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), until) - timedelta(days=1))
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _replace(path: Path, data: bytes) -> None:
    """Whole or not at all, as a careful operator does it."""
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_bytes(data)
    os.replace(new, path)
