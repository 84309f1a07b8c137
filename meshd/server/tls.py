"""TLS for the HTTP endpoint: loads a certificate and its key, and reloads them when the files change.

A pair is checked as a whole before it is used; a bad pair changes nothing and is logged once. Open
connections keep the pair they began with; only new handshakes use a new pair.
Of a certificate it reads only the dates; OpenSSL validates it when it loads the pair. The library for that is
imported with the first certificate, so a daemon without TLS does not load it.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from meshd.config import ConfigError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.util.clock import Clock


_GOODBYE = 2.0  # seconds for a client to confirm the end of the connection
_BEGIN_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_log = logging.getLogger("meshd.tls")


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files: the certificate with its chain, and its private key. May be one file."""

    cert: Path
    key: Path

    def fingerprint(self) -> tuple[tuple[int, ...], ...]:
        """Return a value that changes when either file does, however it is replaced. Raises OSError."""
        found = [os.stat(path) for path in (self.cert, self.key)]
        return tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in found)


class ServerTls:
    """The pair in use. `context` is given to the listener once; handshakes use the latest pair.

    Create it before processes are forked, so that session tickets of one process are valid for all.
    """

    def __init__(self, files: TlsFiles, clock: Clock) -> None:
        """Load the pair. Raises ConfigError."""
        self._files, self._clock, self._lock = files, clock, threading.Lock()
        self._marks = _marks(files)
        self._latest = _load(files)
        self._tell_validity()
        self.context = self._latest
        self.context.sni_callback = self._choose

    def __repr__(self) -> str:
        return f"<ServerTls {self._files.cert}>"

    def reload_if_changed(self, *, anyway: bool = False) -> bool:
        """Load the pair if its files changed since the last check (or `anyway`); return whether there is a
        new one. A bad pair is logged once and checked again when it changes. Thread-safe."""
        with self._lock:
            return self._refresh(anyway)

    def _refresh(self, anyway: bool) -> bool:
        try:
            marks = self._files.fingerprint()
        except OSError:  # it is being replaced; if it stays missing, the old pair serves
            return False
        if marks == self._marks and not anyway:
            return False
        self._marks = marks
        try:
            self._latest = _load(self._files)
        except ConfigError as error:
            _log.error("TLS pair not reloaded; the old one stays in use", extra={"why": str(error)})
            return False
        _log.info("TLS pair reloaded", extra={"cert": str(self._files.cert)})
        self._tell_validity()
        return True

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Select the latest pair. OpenSSL calls this at the start of every handshake, with or without a
        server name."""
        del name, context
        if self._latest is not self.context:
            connection.context = self._latest

    def _tell_validity(self) -> None:
        now, dates = self._clock.now_ms() // 1000, _dates(self._files.cert)
        if dates is None:
            return
        metrics.tls_not_after.set(dates.not_after)
        if not dates.not_before <= now <= dates.not_after:
            what = "has expired" if now > dates.not_after else "is not valid yet"
            _log.warning(
                "the TLS certificate %s: clients will refuse it", what, extra=_log_fields(self._files)
            )


def _log_fields(files: TlsFiles) -> dict[str, str]:
    return {"cert": str(files.cert)}


def _marks(files: TlsFiles) -> tuple[tuple[int, ...], ...]:
    _text("tls-cert", files.cert)
    _text("tls-key", files.key)
    return files.fingerprint()


def _load(files: TlsFiles) -> ssl.SSLContext:
    """Return a server's context with this pair. Raises ConfigError that names the file and what is wrong."""
    if _CERTIFICATE.search(_text("tls-cert", files.cert)) is None:
        raise ConfigError(f"tls-cert: {files.cert} holds no PEM certificate (-----BEGIN CERTIFICATE-----)")
    if _BEGIN_KEY.search(_text("tls-key", files.key)) is None:
        raise ConfigError(f"tls-key: {files.key} holds no PEM private key (-----BEGIN PRIVATE KEY-----)")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])

    def refuse_password() -> NoReturn:
        raise ConfigError(
            f"tls-key: {files.key} is encrypted; provide a key without a password, as from "
            f"`openssl pkey -in {files.key.name} -out plain.pem`, readable by this user alone"
        )

    try:
        context.load_cert_chain(files.cert, files.key, refuse_password)
    except ssl.SSLError as error:
        raise ConfigError(_explain(files, error)) from None
    return context


def _explain(files: TlsFiles, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH" or error.reason == "KEY_TYPE_MISMATCH":
        return (
            f"tls-key: the key in {files.key} does not belong to the certificate in {files.cert}; "
            "give the two files of one pair (the server's own certificate comes first in its file)"
        )
    return f"tls-cert, tls-key: {files.cert} and {files.key} cannot be used: {error.reason or error}"


def _text(setting: str, path: Path) -> str:
    try:
        return path.read_text("latin-1")
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from None


def _dates(path: Path) -> CertificateValidity | None:
    match = _CERTIFICATE.search(_text("tls-cert", path))
    try:
        return None if match is None else parse_validity(ssl.PEM_cert_to_DER_cert(match[0]))
    except (CertificateError, ValueError):
        return None


def tls_listen_options(tls: ServerTls | None, patience: float) -> dict[str, Any]:
    """Return the TLS options of `loop.create_server`; a handshake gets `patience` seconds."""
    if tls is None:
        return {}
    return {
        "ssl": tls.context,
        "ssl_handshake_timeout": patience,
        "ssl_shutdown_timeout": _GOODBYE,
    }


class CertificateError(ValueError):
    """The bytes are not an X.509 certificate."""


class CertificateValidity(msgspec.Struct, frozen=True):
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
