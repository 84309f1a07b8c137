"""A new certificate while requests run: nobody is interrupted, and a bad pair changes nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from meshd.config import ConfigError
from meshd.server.tls import CertificateError, ServerTls, TlsFiles, parse_validity
from tests.support.certificates import Authority
from tests.support.daemons import Daemon
from tests.support.manual_clock import ManualClock
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
BUCKET = "reloading"


def wait_until(condition: Callable[[], Any], timeout: float = 60.0) -> None:
    """Ask again and again: what is awaited happens in another process."""
    pause = threading.Event()
    for _ in range(int(timeout / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("what was awaited did not happen")


def served(daemon: Daemon) -> bytes:
    """The certificate that a new handshake gets, in DER."""
    where = urlsplit(daemon.endpoint)
    context = ssl.create_default_context(cafile=daemon.ca_cert)
    with (
        socket.create_connection((where.hostname, where.port), timeout=60) as sock,
        context.wrap_socket(sock, server_hostname=where.hostname) as secured,
    ):
        certificate = secured.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate


def told_expiry(daemon: Daemon) -> float:
    """What the metrics say of it."""
    with closing(daemon.connect()) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    found = re.search(r"^meshd_tls_not_after_seconds (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_new_pair_is_taken_and_nobody_is_interrupted() -> None:
    with Daemon.start(tls=True, workers=2) as daemon:
        assert daemon.authority is not None
        client = daemon.client()
        client.create_bucket(Bucket=BUCKET)
        body = os.urandom(16 * MIB)
        client.put_object(Bucket=BUCKET, Key="k", Body=body)
        wire = Wire(daemon.endpoint, daemon.access_key, daemon.secret_key, daemon.ca_cert)
        slow = wire.connect(receive_buffer=65536)
        slow.sendall(wire.head("GET", f"/{BUCKET}/k"))
        began = slow.recv(4096)
        before = served(daemon)
        daemon.authority.issue()  # over the files of the old one
        wait_until(lambda: served(daemon) != before)
        wait_until(lambda: daemon.output().count("TLS pair reloaded") >= 2)
        assert told_expiry(daemon) == parse_validity(served(daemon)).not_after
        assert client.get_object(Bucket=BUCKET, Key="k")["Body"].read() == body  # on its old connection
        while len(began) < len(body) or not began.endswith(body[-100:]):
            piece = slow.recv(1 << 20)
            assert piece
            began += piece
        assert began.endswith(body)
        wire.close()
        client.close()


def test_a_bad_pair_is_logged_and_the_old_one_kept() -> None:
    with Daemon.start(tls=True) as daemon:
        assert daemon.pair is not None
        before = served(daemon)
        good = daemon.pair.key.read_bytes()
        daemon.pair.key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
        wait_until(lambda: "TLS pair not reloaded" in daemon.output())
        assert served(daemon) == before
        daemon.signal_child("worker-0")  # its successor finds the bad files, and still serves
        wait_until(lambda: daemon.output().count("TLS pair not reloaded") >= 2)
        assert served(daemon) == before
        daemon.pair.key.write_bytes(good)
        wait_until(lambda: "TLS pair reloaded" in daemon.output())
        assert served(daemon) == before


def test_hangups_read_it_again() -> None:
    with Daemon.start(tls=True, args=["--audit-log", "-"]) as daemon:
        os.kill(daemon.pid, signal.SIGHUP)
        wait_until(lambda: "TLS pair reloaded" in daemon.output())
        assert daemon.request("GET", "/").status == 200


def make(folder: Path) -> tuple[Authority, TlsFiles]:
    authority = Authority(folder)
    pair = authority.issue()
    return authority, TlsFiles(pair.cert, pair.key)


def test_what_counts_as_a_change(tmp_path: Path) -> None:
    authority, files = make(tmp_path)
    tls = ServerTls(files, ManualClock())
    assert not tls.reload_if_changed()
    authority.issue()
    assert tls.reload_if_changed()
    assert not tls.reload_if_changed()
    moved = files.cert.rename(tmp_path / "moved")
    assert not tls.reload_if_changed()  # gone for a moment, while it is replaced
    os.symlink(moved, files.cert)
    assert tls.reload_if_changed()  # back under its name, as a mounted secret changes
    authority.issue("next")
    os.unlink(files.cert)
    os.symlink(tmp_path / "next.pem", files.cert)
    assert not tls.reload_if_changed()  # the key of the new one is still to come
    os.replace(tmp_path / "next.key", files.key)
    assert tls.reload_if_changed()


def test_a_key_with_a_password_is_no_question_on_the_terminal(tmp_path: Path) -> None:
    _, files = make(tmp_path)
    files.key.write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\n"
        "MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAgW9rT5TLgnPwICCAAw\n"
        "-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    with pytest.raises(ConfigError, match="tls"):
        ServerTls(files, ManualClock())


@pytest.mark.parametrize("days", [30, -3, 365 * 40])
def test_validity(tmp_path: Path, days: int) -> None:
    """UTCTime to 2049, GeneralizedTime from then on; Python's own reader is the oracle."""
    pair = Authority(tmp_path).issue(days=days)
    found = parse_validity(ssl.PEM_cert_to_DER_cert(pair.cert.read_text()))
    known = ssl._ssl._test_decode_cert(str(pair.cert))  # type: ignore[attr-defined]  # what getpeercert shows
    assert found.not_after == ssl.cert_time_to_seconds(known["notAfter"])
    assert found.not_before == ssl.cert_time_to_seconds(known["notBefore"])


def test_what_is_no_certificate(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue()
    der = ssl.PEM_cert_to_DER_cert(pair.cert.read_text())
    for broken in (b"", b"\x30", der[:40], b"\x31" + der[1:], bytes(200)):
        with pytest.raises(CertificateError):
            parse_validity(broken)
