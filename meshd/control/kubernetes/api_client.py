"""Kubernetes API client over HTTP/1.1: server discovery, credentials, calls and watches.

Law: credentials are read again for every use, because pod tokens rotate hourly, and are never logged. A
call that was not sent, or was rejected unread (429), is retried until the deadline; a call that may
have been executed raises AmbiguousError unless it is safe to repeat. Blocking: for threads.

Source: Kubernetes' documentation, "API concepts" (watch, bookmarks, 410 Gone, resource versions).
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import tempfile
import threading
from base64 import b64decode
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlencode, urlsplit

from meshd.control.control_api import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from meshd.util.clock import Clock


_POD: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """`path`: before every path, where the server is behind another. `tls`: None for plain HTTP."""

    host: str
    port: int
    path: str = ""
    tls: ssl.SSLContext | None = None
    token: Callable[[], str] = field(default=lambda: "", repr=False)


def find_api_server(environ: Mapping[str, str]) -> ApiServer:
    """Where this process's API server is: the pod's own, else what KUBECONFIG names. Raises ControlError."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return _of_pod(environ)
    path = Path(environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    if not path.exists():
        raise ControlError(
            f"no Kubernetes API: not in a pod (KUBERNETES_SERVICE_HOST is not set), and there is no {path}"
        )
    return server_from_kubeconfig(path)


def pod_namespace() -> str:
    """The pod's. Raises ControlError outside of one."""
    try:
        return (_POD / "namespace").read_text().strip()
    except OSError:
        raise ControlError("name the namespace: kubernetes://NAMESPACE/NAME (this is not a pod)") from None


def _of_pod(environ: Mapping[str, str]) -> ApiServer:
    token = _POD / "token"
    if not token.exists():
        raise ControlError(f"{token} is missing: the pod needs a token of its ServiceAccount")
    host = environ["KUBERNETES_SERVICE_HOST"].strip("[]")
    tls = ssl.create_default_context(cafile=str(_POD / "ca.crt"))
    return ApiServer(host, int(environ.get("KUBERNETES_SERVICE_PORT", "443")), tls=tls, token=_reading(token))


def server_from_kubeconfig(path: Path) -> ApiServer:
    """The server of a file's current context. Raises ControlError."""
    import yaml  # pods have no such file

    try:
        document = yaml.safe_load(path.read_text())
        context = _named(document, "contexts", document["current-context"])["context"]
        cluster = _named(document, "clusters", context["cluster"])["cluster"]
        user = _named(document, "users", context["user"])["user"]
        parts = urlsplit(cluster["server"])
        tls = _tls(cluster, user, path.parent) if parts.scheme == "https" else None
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ControlError(
            f"the kubeconfig {path} cannot be used: {type(error).__name__}: {error}"
        ) from error
    if "exec" in user or "auth-provider" in user:
        raise ControlError(
            f"the kubeconfig {path} runs a program to log in; use one with a token or certificate"
        )
    port = parts.port or (443 if tls else 80)
    return ApiServer(parts.hostname or "", port, parts.path.rstrip("/"), tls, _token(user, path.parent))


def _named(document: Any, what: str, name: str) -> Any:
    found = next((each for each in document[what] if each["name"] == name), None)
    if found is None:
        raise ValueError(f"no {name!r} among the {what}")
    return found


def _token(user: Mapping[str, str], base: Path) -> Callable[[], str]:
    if "tokenFile" in user:
        return _reading(base / user["tokenFile"])
    token = user.get("token", "")
    return lambda: token


def _reading(path: Path) -> Callable[[], str]:
    return lambda: path.read_text().strip()


def _tls(cluster: Mapping[str, Any], user: Mapping[str, str], base: Path) -> ssl.SSLContext:
    if cluster.get("insecure-skip-tls-verify"):
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    elif "certificate-authority-data" in cluster:
        data = b64decode(cluster["certificate-authority-data"]).decode()
        tls = ssl.create_default_context(cadata=data)
    else:
        file = cluster.get("certificate-authority")
        tls = ssl.create_default_context(cafile=str(base / file) if file else None)
    if "client-certificate-data" in user:
        pair = b64decode(user["client-certificate-data"]) + b"\n" + b64decode(user["client-key-data"])
        with tempfile.NamedTemporaryFile() as both:  # ssl reads pairs from files only
            both.write(pair)
            both.flush()
            tls.load_cert_chain(both.name)
    elif "client-certificate" in user:
        tls.load_cert_chain(base / user["client-certificate"], base / user["client-key"])
    return tls


_CONNECT_SECONDS: Final = 2.0
_MOST_BYTES: Final = 256 << 20  # of one answer
_PAUSE: Final = 0.1
_AGAIN: Final = (429, 503)


class KubernetesError(ControlError):
    """The API refuses, or does not answer in time."""


class AmbiguousError(KubernetesError):
    """The call may have happened or not: no answer came."""


class ApiStatusError(KubernetesError):
    """The API's answer, when it is not what was asked for. `status`: as in HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the Kubernetes API answers {status}: {message[:400]}{_HINTS.get(status, '')}")
        self.status = status


_HINTS: Final[dict[int, str]] = {
    401: "; the token is not, or no longer, valid",
    403: "; the Role that the chart makes for the daemons grants what they need",
}


class _NotNowError(Exception):
    """No answer. `sent`: it may have happened all the same."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.why, self.sent = why, sent


class ApiClient:
    """Calls to one API server; `close` ends its connections, and watches under way."""

    def __init__(self, server: ApiServer, clock: Clock, *, deadline: float = 5.0) -> None:
        self._server, self._clock, self._deadline = server, clock, deadline
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._streams: set[http.client.HTTPConnection] = set()
        self._closed = False
        self._answered = clock.monotonic()
        self._silent_since: float | None = None
        self._silence = 0.0  # of earlier times

    def __repr__(self) -> str:
        return f"<ApiClient of {self._server.host}:{self._server.port}>"

    def silence(self) -> float:
        """Return for how many seconds in all the API has not answered since this process started."""
        with self._lock:
            since = self._silent_since
            return self._silence + (0.0 if since is None else self._clock.monotonic() - since)

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        repeatable: bool = True,
        **query: str,
    ) -> dict[str, Any]:
        """The document that is answered. Raises RefusedError, AmbiguousError, KubernetesError."""
        began, pause = self._clock.monotonic(), threading.Event()
        tries = 0
        while True:
            tries += 1
            began_try = self._clock.monotonic()
            try:
                return self._once(method, _target(path, query), body)
            except _NotNowError as error:
                self._note_silence(began_try)
                if error.sent and not repeatable:
                    raise AmbiguousError(
                        f"the Kubernetes API did not say whether it did what it was asked ({error.why}); "
                        "look before you ask again"
                    ) from None
                late = self._clock.monotonic() - began >= self._deadline or tries > self._deadline / _PAUSE
                if late or self._closed:
                    raise KubernetesError(
                        f"the Kubernetes API does not answer ({error.why}); is it running, and reachable "
                        "from here?"
                    ) from None
            pause.wait(_PAUSE)

    def watch(self, path: str, idle: float, **query: str) -> Iterator[dict[str, Any]]:
        """Events until the server ends them or is silent for `idle` seconds (then they just end). Raises
        RefusedError, KubernetesError when it cannot begin."""
        connection, began = self._connection(idle), self._clock.monotonic()
        try:
            _connect(connection)
            with self._lock:  # `close` ends what is here; a socket is replaced while TLS is set up
                if self._closed:
                    return
                self._streams.add(connection)
            response = self._begin(connection, "GET", _target(path, query | {"watch": "1"}), None)
            if response.status != 200:
                _document(response.status, response.read(_MOST_BYTES))
            self._note_answer()
            yield from _events(response)
        except _NotNowError as error:
            self._note_silence(began)
            raise KubernetesError(f"the Kubernetes API does not answer ({error.why})") from None
        except (OSError, http.client.HTTPException) as error:
            raise KubernetesError(f"the Kubernetes API does not answer ({error})") from None
        finally:
            self._streams.discard(connection)
            connection.close()

    def close(self) -> None:
        """Idempotent. A watch that another thread reads ends soon."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        for connection in tuple(self._streams):
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _once(self, method: str, target: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        with self._lock:
            connection = self._idle.pop() if self._idle else self._connection(self._deadline)
        fresh = connection.sock is None
        try:
            _connect(connection)
            response = self._begin(connection, method, target, body)
            data = response.read(_MOST_BYTES)
        except _NotNowError:
            connection.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if not fresh and isinstance(error, (http.client.RemoteDisconnected, BrokenPipeError)):
                return self._once(method, target, body)  # a kept connection that had ended while it was idle
            raise _NotNowError(f"{type(error).__name__}: {error}", sent=True) from None
        with self._lock:
            keep = not self._closed and not response.will_close
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
        if response.status < 500 and response.status not in _AGAIN:
            self._note_answer()
        return _document(response.status, data)

    def _note_silence(self, began: float) -> None:
        """Note that a call which began then got no answer."""
        with self._lock:
            if self._silent_since is None:
                self._silent_since = max(began, self._answered)

    def _note_answer(self) -> None:
        with self._lock:
            self._answered = self._clock.monotonic()
            if self._silent_since is not None:
                self._silence += self._answered - self._silent_since
                self._silent_since = None

    def _begin(
        self, connection: http.client.HTTPConnection, method: str, target: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        headers = {"Accept": "application/json", "User-Agent": "meshd"}
        try:
            token = self._server.token()
        except OSError as error:
            raise _NotNowError(f"the token cannot be read: {error}", sent=False) from None
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, self._server.path + target, data, headers)
        return connection.getresponse()

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        host, port, tls = self._server.host, self._server.port, self._server.tls
        if tls is None:
            return http.client.HTTPConnection(host, port, timeout=timeout)
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=tls)


def _target(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _connect(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        return
    patience, connection.timeout = connection.timeout, _CONNECT_SECONDS
    try:
        connection.connect()
    except OSError as error:
        raise _NotNowError(str(error), sent=False) from None
    finally:
        connection.timeout = patience
    sock = cast("socket.socket", connection.sock)
    sock.settimeout(patience)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _document(status: int, data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = {"message": data[:200].decode(errors="replace")}
    if 200 <= status < 300 and isinstance(document, dict):
        return document
    message = str(document.get("message", "")) if isinstance(document, dict) else ""
    if status in _AGAIN:  # turned away before anything was done
        raise _NotNowError(f"{status} {message}", sent=status != 429)
    if status >= 500:
        raise _NotNowError(f"{status} {message}", sent=True)
    raise ApiStatusError(status, message)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """A line, an event. Ends quietly when nothing comes, or the connection does."""
    while True:
        try:
            line = response.readline()
            event = json.loads(line) if line.strip() else None
        except (OSError, http.client.HTTPException, ValueError):
            return
        if event is None:
            return
        yield event
