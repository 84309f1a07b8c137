"""Kubernetes API client over HTTP/1.1: server discovery, credentials, calls and watches.

Law: credentials are read again for every use, because pod tokens rotate hourly, and are never logged. A
call that was not sent, or was rejected unread (429), is retried until the deadline; a call that may
have been executed raises AmbiguousError unless it is safe to repeat. Blocking: for threads.

Source: Kubernetes' documentation, "API concepts" (watch, bookmarks, 410 Gone, resource versions).
"""

from __future__ import annotations

import http.client
import json
import ssl
import tempfile
import threading
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

from meshd.control.control_api import ControlError
from meshd.control.http_connections import HttpConnections, NoAnswerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from meshd.util.clock import Clock


_POD: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API is served. `path`: prefix of every path behind a proxy; `tls`: None for plain HTTP."""

    host: str
    port: int
    path: str = ""
    tls: ssl.SSLContext | None = None
    token: Callable[[], str] = field(default=lambda: "", repr=False)


def find_api_server(environ: Mapping[str, str]) -> ApiServer:
    """Return the API server to use: the pod's own, else the one in KUBECONFIG. Raises ControlError."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return _of_pod(environ)
    path = Path(environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    if not path.exists():
        raise ControlError(
            f"no Kubernetes API: not in a pod (KUBERNETES_SERVICE_HOST is not set), and there is no {path}"
        )
    return server_from_kubeconfig(path)


def pod_namespace() -> str:
    """Return the namespace of this pod. Raises ControlError outside a pod."""
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
    """Return the server of the current context of a kubeconfig. Raises ControlError."""
    import yaml  # pods have no such file

    try:
        document = yaml.safe_load(path.read_text())
        context = _entry_named(document, "contexts", document["current-context"])["context"]
        cluster = _entry_named(document, "clusters", context["cluster"])["cluster"]
        user = _entry_named(document, "users", context["user"])["user"]
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


def _entry_named(document: Any, what: str, name: str) -> Any:
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


_MOST_BYTES: Final = 256 << 20  # of one answer
_PAUSE: Final = 0.1
_AGAIN: Final = (429, 503)


class KubernetesError(ControlError):
    """The API rejects a call, or does not answer in time."""


class AmbiguousError(KubernetesError):
    """The call may or may not have been executed: no response arrived."""


class ApiStatusError(KubernetesError):
    """The API answered with an error. `status`: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the Kubernetes API answers {status}: {message[:400]}{_HINTS.get(status, '')}")
        self.status = status


_HINTS: Final[dict[int, str]] = {
    401: "; the token is not, or no longer, valid",
    403: "; the Role that the chart makes for the daemons grants what they need",
}


class ApiClient:
    """Calls to one API server; `close` ends its connections and the watches in progress."""

    def __init__(self, server: ApiServer, clock: Clock, *, deadline: float = 5.0) -> None:
        self._server, self._clock, self._deadline = server, clock, deadline
        self._connections = HttpConnections(
            server.host, server.port, timeout=deadline, max_bytes=_MOST_BYTES, tls=server.tls
        )
        self._lock = threading.Lock()
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
        """Return the answered document. Raises ApiStatusError, AmbiguousError, KubernetesError."""
        began, pause = self._clock.monotonic(), threading.Event()
        tries = 0
        while True:
            tries += 1
            began_try = self._clock.monotonic()
            try:
                return self._once(method, _target(path, query), body)
            except NoAnswerError as error:
                self._note_silence(began_try)
                if error.sent and not repeatable:
                    raise AmbiguousError(
                        f"the Kubernetes API did not confirm whether it executed the call ({error.why}); "
                        "check the state before repeating it"
                    ) from None
                late = self._clock.monotonic() - began >= self._deadline or tries > self._deadline / _PAUSE
                if late or self._connections.closed:
                    raise KubernetesError(
                        f"the Kubernetes API does not answer ({error.why}); is it running, and reachable "
                        "from here?"
                    ) from None
            pause.wait(_PAUSE)

    def watch(self, path: str, idle: float, **query: str) -> Iterator[dict[str, Any]]:
        """Yield events until the server ends the watch or is silent for `idle` seconds.

        Raises ApiStatusError, KubernetesError if the watch cannot begin.
        """
        began = self._clock.monotonic()
        target = self._server.path + _target(path, query | {"watch": "1"})
        try:
            headers = self._headers()
            with self._connections.stream("GET", target, None, headers, idle) as response:
                if response is None:
                    return
                if response.status != 200:
                    _document(response.status, response.read(_MOST_BYTES))
                self._note_answer()
                yield from _events(response)
        except NoAnswerError as error:
            self._note_silence(began)
            raise KubernetesError(f"the Kubernetes API does not answer ({error.why})") from None
        except (OSError, http.client.HTTPException) as error:
            raise KubernetesError(f"the Kubernetes API does not answer ({error})") from None

    def close(self) -> None:
        """Closes the connections. Idempotent. A watch that another thread reads ends soon."""
        self._connections.close()

    def _once(self, method: str, target: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        headers, data = self._headers(), None
        if body is not None:
            headers["Content-Type"], data = "application/json", json.dumps(body).encode()
        status, answer = self._connections.request(method, self._server.path + target, data, headers)
        if status < 500 and status not in _AGAIN:
            self._note_answer()
        return _document(status, answer)

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

    def _headers(self) -> dict[str, str]:
        """Return the headers of every request. Raises NoAnswerError."""
        headers = {"Accept": "application/json", "User-Agent": "meshd"}
        try:
            token = self._server.token()
        except OSError as error:
            raise NoAnswerError(f"the token cannot be read: {error}", sent=False) from None
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return headers


def _target(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _document(status: int, data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = {"message": data[:200].decode(errors="replace")}
    if 200 <= status < 300 and isinstance(document, dict):
        return document
    message = str(document.get("message", "")) if isinstance(document, dict) else ""
    if status in _AGAIN:  # rejected before anything was done
        raise NoAnswerError(f"{status} {message}", sent=status != 429)
    if status >= 500:
        raise NoAnswerError(f"{status} {message}", sent=True)
    raise ApiStatusError(status, message)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield one event per line; stop without an error at a timeout, or when the connection ends."""
    while True:
        try:
            line = response.readline()
            event = json.loads(line) if line.strip() else None
        except (OSError, http.client.HTTPException, ValueError):
            return
        if event is None:
            return
        yield event
