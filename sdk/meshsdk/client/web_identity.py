"""Keys from a web identity: the token in a file is exchanged at the mesh's STS, and the keys are renewed.

Law: the token's file is read for every exchange, since the kubelet replaces it. Keys are renewed well before
they expire, by a thread of its own: until then nobody waits for the STS. Thread-safe; at most one exchange
runs at a time.
Invariant: neither an error nor a `repr` shows a token or a secret.
"""

from __future__ import annotations

import threading
from datetime import datetime
from typing import TYPE_CHECKING, Final

from meshsdk.client.fork_safe_lock import ForkSafeLock
from meshsdk.client.http_connection import Connection
from meshsdk.client.settings import WEB_IDENTITY_VARIABLES, RenewableKeys
from meshsdk.errors import AccessError, ConfigurationError, ConnectError, MeshError
from meshwire.sigv4 import Credential
from meshwire.sts_query import (
    FORM_TYPE,
    MAX_FORM_BYTES,
    StsError,
    parse_assumed_role,
    parse_sts_error,
    web_identity_form,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.settings import Endpoint, Settings, WebIdentity
    from meshwire.sts_query import AssumedRole

_TIMEOUT: Final = 15.0  # seconds of silence; a node may wait for its identity provider
_EARLY: Final = (
    600.0  # seconds before the expiry at which keys are renewed, but at most a third of their life
)
_PAUSE: Final = 10.0  # seconds between two attempts while the old keys are valid
_FRESH: Final = 2.0  # seconds
_BUSY: Final = frozenset(
    {"IDPCommunicationError", "ServiceUnavailable", "InternalFailure", "InvalidResponse"}
)


class WebIdentityKeys(RenewableKeys):
    """The credential of a role, exchanged for the token in a file at first use, and renewed."""

    def __init__(self, settings: Settings, identity: WebIdentity, clock: Callable[[], float]) -> None:
        super().__init__("", Credential("", ""), clock)
        self._identity, self._connect_timeout = identity, settings.connect_timeout
        self._endpoints = (identity.endpoint,) if identity.endpoint else settings.endpoints
        self._exchanged = float("-inf")
        self._expires = self._renew_at = 0.0
        self._lock = ForkSafeLock()

    def __repr__(self) -> str:
        return f"<WebIdentityKeys of {self._identity.role_arn}>"

    def current(self) -> Credential:
        """Return the credential: a new one if there is none that is valid. Starts its renewal if that is due.

        Raises ConnectError, AccessError, ConfigurationError (the token's file).
        """
        now = self._clock()
        if now >= self._expires:
            with self._lock:
                if self._clock() >= self._expires:
                    self._exchange()
        elif now >= self._renew_at and self._lock.acquire(blocking=False):
            try:
                threading.Thread(target=self._renew, name="mesh-keys", daemon=True).start()
            except RuntimeError:  # no more threads, or the interpreter exits
                self._lock.release()
        return self._credential

    def replacement(self, refused: Credential | None) -> Credential | None:
        """Exchange the token again after a refusal; None if the keys are new already."""
        with self._lock:
            if refused is not None and self._credential == refused:
                return None
            if self._clock() < self._exchanged + _FRESH:  # by another thread, for the same reason
                return self._credential
            try:
                self._exchange()
            except MeshError as error:
                self._trouble = f"{error}"
                return None
        return self._credential

    def expiry_hint(self) -> str:
        """Return why there are no newer keys."""
        return self._trouble

    def _renew(self) -> None:
        """Exchange the token; the caller has acquired the lock. After a failure the keys stay in use."""
        try:
            if self._clock() >= self._renew_at:
                self._exchange()
        except MeshError as error:
            self._trouble = f"{error}"
            self._renew_at = self._clock() + _PAUSE
        finally:
            self._lock.release()

    def _exchange(self) -> None:
        token = read_token(self._identity.token_file)
        form = web_identity_form(self._identity.role_arn, self._identity.session_name, token)
        answer = self._ask(form)
        now = self._exchanged = self._clock()
        try:
            expires = datetime.fromisoformat(answer.expiration).timestamp()
        except ValueError:
            raise ConnectError(
                "the STS answered with an invalid expiration; check AWS_ENDPOINT_URL"
            ) from None
        self._credential = Credential(answer.access_key, answer.secret_key, answer.session_token)
        self._renew_at = expires - min(_EARLY, (expires - now) / 3)
        self._expires = expires  # last: other threads then use the credential without the lock
        self._trouble = ""

    def _ask(self, form: bytes) -> AssumedRole:
        """Return the answer of the first endpoint that has one."""
        failure: MeshError | None = None
        for endpoint in self._endpoints:
            try:
                return exchange_at(endpoint, form, self._connect_timeout)
            except ConnectError as error:
                failure = error
        assert failure is not None
        raise failure


def exchange_at(endpoint: Endpoint, form: bytes, connect_timeout: float) -> AssumedRole:
    """Send a form to one endpoint and return its answer. Raises ConnectError if another attempt may help,
    otherwise AccessError."""
    head = (
        f"POST / HTTP/1.1\r\nhost: {endpoint.authority}\r\ncontent-type: {FORM_TYPE}\r\n"
        f"content-length: {len(form)}\r\nconnection: close\r\n\r\n"
    )
    connection = Connection(endpoint, _TIMEOUT, connect_timeout)
    try:
        connection.send([head.encode("ascii") + form])
        response = connection.receive()
        body = response.read(MAX_FORM_BYTES)
        status = response.status
    finally:
        connection.close()
    try:
        if status == 200:
            return parse_assumed_role(body)
        raise parse_sts_error(body, status)
    except StsError as error:
        message = f"{endpoint}: the web identity token was not exchanged: {error.message} ({error.code})"
        if error.code in _BUSY:
            raise ConnectError(message) from None
        raise AccessError(message, status=status, code=error.code) from None


def read_token(path: str) -> str:
    """Return the token in a file. Raises ConfigurationError."""
    try:
        with open(path, encoding="ascii") as file:
            token = file.read(MAX_FORM_BYTES).strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{WEB_IDENTITY_VARIABLES[1]}={path} cannot be read ({type(error).__name__}): "
            "it must be a file with a token"
        ) from None
    if not token:
        raise ConfigurationError(f"{WEB_IDENTITY_VARIABLES[1]}={path} is empty: it must have a token")
    return token
