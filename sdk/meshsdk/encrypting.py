"""TLS of a connection to an https endpoint.

Law: certificates are always checked, against the endpoint's own bundle or the system's. Invariant: what
asking again cannot change (an unknown authority, a wrong name, no TLS there) is a ConfigurationError.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    import socket

    from meshsdk.settings import Endpoint

_EXPIRED: Final = 10  # X509_V_ERR_CERT_HAS_EXPIRED
_RENEW: Final = (
    "It ran out at the node: put a new pair where its --tls-cert and --tls-key point; no restart is needed. "
    "Other nodes answer meanwhile"
)
_BELIEVE: Final = (
    "Give the certificate of the authority that made it with --ca-cert or MESH_CA_BUNDLE, or use the name it "
    "was made for"
)
# `ssl` is imported where it is needed: a plain endpoint does not pay for it.


def wrap_tls(sock: socket.socket, endpoint: Endpoint) -> socket.socket:
    """`sock`, connected already, after the handshake. Raises ConfigurationError, OSError."""
    import ssl

    try:
        wrapped: socket.socket = _context(endpoint.ca_bundle).wrap_socket(sock, server_hostname=endpoint.host)
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message.rstrip(".")
        advice = _RENEW if error.verify_code == _EXPIRED else _BELIEVE
        raise ConfigurationError(f"{endpoint}: its certificate is not believed: {why}. {advice}") from error
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            raise ConfigurationError(f"{endpoint} does not speak TLS: is it http:// there?") from None
        raise
    return wrapped


def wants_more(error: OSError) -> bool:
    """Whether a non-blocking read found nothing of the application's."""
    import ssl

    return isinstance(error, ssl.SSLWantReadError)


@cache
def _context(bundle: str) -> Any:
    """One a process and bundle: reading the authorities takes milliseconds."""
    import ssl

    try:
        return ssl.create_default_context(cafile=bundle or None)
    except FileNotFoundError as error:
        raise ConfigurationError(f"the CA bundle {bundle} is not there") from error
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"the CA bundle {bundle} cannot be used: {error}") from error
