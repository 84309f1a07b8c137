"""Sockets to an endpoint: TCP options, timeouts, and TLS with verified certificates.

Law: plain sockets block and use kernel timeouts; certificates are always verified. `ssl` is imported on use,
so that clients of a plain endpoint do not pay for it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from meshsdk.client.settings import Endpoint

_WANTED_RCVBUF = 4 << 20
_ADDRESS_TIMEOUT: Final = 1.0
"""Seconds for each address of a name but the last: of two families, perhaps only one is routed."""
_families: dict[str, int] = {}
"""The family by which a name with several addresses was reached last."""
_EXPIRED: Final = 10  # X509_V_ERR_CERT_HAS_EXPIRED
_RENEW: Final = (
    "The node's certificate has expired: replace the files that its --tls-cert and --tls-key name; no "
    "restart is needed. Until then, use another node"
)
_BELIEVE: Final = (
    "Pass the certificate of the authority that issued it with --ca-cert or MESH_CA_BUNDLE, or use the host "
    "name it was issued for"
)


def open_socket(endpoint: Endpoint, timeout: float, connect_timeout: float) -> socket.socket:
    """Return a socket that is connected to an endpoint; timeouts are in seconds.

    Raises OSError, and ConfigurationError for a certificate that does not verify or a server without TLS.
    """
    sock = _connect(endpoint.host, endpoint.port, connect_timeout)
    try:
        sock.settimeout(timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _set_peer_timeout(sock, timeout)
        if size := _receive_buffer():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        if endpoint.scheme == "https":
            return _wrap_tls(sock, endpoint)
        sock.settimeout(None)
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    except BaseException:
        sock.close()
        raise
    return sock


def _set_peer_timeout(sock: socket.socket, timeout: float) -> None:
    """Have the kernel close a connection whose peer has not acknowledged anything for `timeout` seconds.

    SO_RCVTIMEO does not suffice: it restarts with each signal that this process handles.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: unknown on this platform
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(timeout / 2)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(timeout / 8)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout * 1000)))


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    """Return a connected TCP socket. Raises OSError.

    Loopback connections use Reno from the start: loopback loses nothing, and the pacing of a congestion
    control such as BBR costs more than all the copying.
    """
    if not (host == "::1" or host.removeprefix("::ffff:").startswith("127.")):
        return _connected_to_name(host, port, timeout)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: unknown on this platform
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        sock.settimeout(timeout)
        sock.connect((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _connected_to_name(host: str, port: int, timeout: float) -> socket.socket:
    """Return a socket that is connected to the first address of a host that accepts the connection.

    Raises OSError of the last.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = list(dict.fromkeys((info[0], str(info[4][0])) for info in infos))
    if len(found) > 1:
        found.sort(key=lambda each: each[0] != _families.get(host))
    for family, address in found[:-1]:
        with contextlib.suppress(OSError):
            sock = socket.create_connection((address, port), timeout=min(timeout / 2, _ADDRESS_TIMEOUT))
            _families[host] = family
            return sock
    family, address = found[-1]
    sock = socket.create_connection((address, port), timeout=timeout)
    if len(found) > 1:
        _families[host] = family
    return sock


@cache
def _receive_buffer() -> int:
    """Return the SO_RCVBUF to set, in bytes; 0 to leave the buffer to the kernel.

    Setting it turns off the kernel's automatic growth, so this must not end in a smaller window: the result
    is 0 if the kernel grows the buffer beyond what it lets us set.
    """
    try:
        with open("/proc/sys/net/core/rmem_max") as file:
            allowed = int(file.read())
        with open("/proc/sys/net/ipv4/tcp_rmem") as file:
            grown = int(file.read().split()[2])
    except (OSError, ValueError, IndexError):
        return 0
    wanted = min(_WANTED_RCVBUF, allowed)
    return wanted if wanted >= min(grown, _WANTED_RCVBUF) else 0


def _wrap_tls(sock: socket.socket, endpoint: Endpoint) -> socket.socket:
    """Return the connected `sock` wrapped in TLS, after the handshake.

    Raises ConfigurationError for a certificate that does not verify or a server without TLS, else OSError.
    """
    import ssl

    try:
        wrapped: socket.socket = _context(endpoint.ca_bundle).wrap_socket(sock, server_hostname=endpoint.host)
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message.rstrip(".")
        advice = _RENEW if error.verify_code == _EXPIRED else _BELIEVE
        raise ConfigurationError(f"{endpoint}: certificate verification failed: {why}. {advice}") from error
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            raise ConfigurationError(
                f"{endpoint} does not speak TLS: use http://, or check the port"
            ) from None
        raise
    return wrapped


@cache
def _context(bundle: str) -> Any:
    """Return the TLS context for a CA bundle, cached because loading the authorities takes milliseconds."""
    import ssl

    try:
        return ssl.create_default_context(cafile=bundle or None)
    except FileNotFoundError as error:
        raise ConfigurationError(f"the CA bundle {bundle} does not exist") from error
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"the CA bundle {bundle} cannot be used: {error}") from error


def is_incomplete_record(error: OSError) -> bool:
    """Return whether a non-blocking TLS read failed because no application data has arrived yet."""
    import ssl

    return isinstance(error, ssl.SSLWantReadError)
