"""Signed requests over pooled connections, with retries and failover.

Law: requests are idempotent (reads, whole-object writes, content-addressed POSTs), so a retry is safe; a
request that is not idempotent says so with `idempotent=False` and is not retried.
Invariant: a connection returns to the pool only after its response was read to the end.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from meshsdk.client.http_connection import Pool
from meshsdk.client.local_handover import LocalHandover
from meshsdk.client.retry import PRESENCE, BackOff, Patience, await_answer, progress_of, silence
from meshsdk.client.routing import MAP_HEADER, ClusterDirectory, Router
from meshsdk.client.settings import RenewableKeys
from meshsdk.errors import ConnectError, MeshError, ServerError, server_error
from meshwire.errors import S3Error
from meshwire.http_values.mesh_headers import LOCAL_HANDOVER_HEADER as LOCAL
from meshwire.s3.request_head import RequestHead
from meshwire.sigv4 import Credential, sign

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshsdk.client.http_connection import Buffer, Connection, Response
    from meshsdk.client.settings import Endpoint, Settings

T = TypeVar("T")
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
UNSIGNED = "UNSIGNED-PAYLOAD"
_MAX_ERROR_BODY = 1 << 20
_SMALL = 16 << 10
_TAG = re.compile("<[^>]*>?")
_REFUSALS = frozenset({400, 403, 404, 405, 501})
_UNKNOWN = frozenset({400, 404, 405, 410, 501})
_UNEQUAL = (
    "The node is of release {theirs}, this SDK of {ours}: if the older one lacks this feature, upgrade it."
)
_STRANGER = (
    "The endpoint does not seem to be a meshd: its Server header says {name}. Datasets and loaders need a "
    "meshd: set MESH_ENDPOINT, which takes precedence over AWS_ENDPOINT_URL."
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a node. `path` and `query` are already percent-encoded, header names lower-case.

    Attributes:
        sha256: hex digest of the body; None leaves the payload unsigned (large bodies carry a checksum header
            instead).
        toward: the id of the node to try first, if the mesh has it.
        meets: the frame address whose hash chooses the node that assembles the frame.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Buffer = b""
    sha256: str | None = EMPTY_SHA256
    idempotent: bool = True
    toward: str = ""
    meets: str = ""


def json_request(method: str, path: str, document: Any, query: str = "") -> Request:
    """Return a request with a small JSON body."""
    body = json.dumps(document, separators=(",", ":")).encode()
    digest = hashlib.sha256(body).hexdigest()
    return Request(method, path, query, {"content-type": "application/json"}, body, digest)


class Signer:
    """Signs requests and encodes their heads. `clock` returns seconds since the epoch."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        endpoint: Endpoint | None = None,
        keys: RenewableKeys | None = None,
    ) -> None:
        self._authority = (endpoint or settings.endpoint).authority
        self._region = settings.region
        self._keys = keys or keys_of(settings, clock)
        self._clock = clock

    def head(self, request: Request) -> bytes:
        """Return the signed request head as bytes; the body follows it unchanged on the wire."""
        headers = {"host": self._authority, **request.headers}
        if request.body or request.method in ("PUT", "POST"):
            headers["content-length"] = str(len(request.body))
        unsigned = RequestHead(request.method, request.path, request.query, headers)
        headers |= sign(
            unsigned,
            self._keys.current(),
            region=self._region,
            timestamp=int(self._clock()),
            payload_hash=request.sha256 or UNSIGNED,
        )
        target = f"{request.path}?{request.query}" if request.query else request.path
        lines = [f"{request.method} {target} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("utf-8")


def keys_of(settings: Settings, clock: Callable[[], float] = time.time) -> RenewableKeys:
    """Return the credentials of the settings; those from a file are re-read when it changes."""
    credential = Credential(settings.access_key, settings.secret_key, settings.session_token)
    return RenewableKeys(settings.credentials_file, credential, clock)


class EndpointClient:
    """The connection pool and signer for one endpoint."""

    def __init__(self, settings: Settings, endpoint: Endpoint, keys: RenewableKeys) -> None:
        self.endpoint = endpoint
        self.pool = Pool(endpoint, settings.timeout)
        self.signer = Signer(settings, endpoint=endpoint, keys=keys)

    def send(self, connection: Connection, request: Request) -> None:
        """Sign and send a request."""
        head = self.signer.head(request)
        # A small body shares the TCP segment of its head.
        connection.send([head + bytes(request.body)] if len(request.body) <= _SMALL else [head, request.body])

    def hand_back(self, connection: Connection, response: Response | None) -> None:
        """Return a connection to the pool if its response was read to the end; else close it."""
        if response is not None and response.reusable:
            self.pool.release(connection)
        else:
            connection.close()


class Transport:
    """Sends a client's requests to its endpoints and the nodes behind them: pools, signing, retries.

    Thread-safe; pickles without its sockets. `on_progress`, if set, is called with the progress (0…1) of a
    long operation each time a node reports it.
    """

    def __init__(self, settings: Settings, sleep: Callable[[float], None] = time.sleep) -> None:
        self.settings = settings
        self.keys = keys_of(settings)
        self._lines: dict[Endpoint, EndpointClient] = {}
        first = self.endpoint_client(settings.endpoint)
        self.pool, self.signer = first.pool, first.signer
        self.router = Router(ClusterDirectory(settings.endpoints, self._ask_map))
        self.local_handover = LocalHandover()
        self.retries = 0
        self.on_progress: Callable[[float], None] | None = None
        self._sleep = sleep

    def endpoint_client(self, endpoint: Endpoint) -> EndpointClient:
        """Return the client of an endpoint, created on first use."""
        found = self._lines.get(endpoint)
        if found is None:
            found = self._lines.setdefault(endpoint, EndpointClient(self.settings, endpoint, self.keys))
        return found

    def _ask_map(self, endpoint: Endpoint) -> bytes:
        """Request the map with a short timeout and no retry: other nodes know it as well."""
        settings = replace(self.settings, timeout=min(self.settings.timeout, PRESENCE))
        line = EndpointClient(settings, endpoint, self.keys)
        try:
            return self._exchange(line, Request("GET", "/-/map"), lambda response: response.read())
        finally:
            line.pool.clear()

    def answers(self, endpoint: Endpoint) -> bool:
        """Return whether a node is alive; a refusal counts as an answer."""
        try:
            self._ask_map(endpoint)
        except ConnectError:
            return False
        except MeshError:
            return True
        return True

    def call(
        self,
        request: Request,
        consume: Callable[[Response], T],
        deadline: float | None = None,
        begun: Connection | None = None,
    ) -> T:
        """Send a request, with retries, and return `consume(response)` of a successful response.

        `consume` must read the body, and may run again if the response breaks off. `begun`: the connection on
        which the request was already sent (see `begin`).

        Raises ServerError if the server refuses, DeadlineError if it is unavailable for too long, and
        ConnectError only for a request that is not idempotent.
        """
        asking = RequestAttempts(self, request, deadline)
        while True:
            line, connection = asking.next_endpoint(None if begun is None else begun.endpoint), begun
            begun = None
            try:
                return self._exchange(line, request, consume, connection, asking)
            except MeshError as error:
                asking.handle_failure(error)

    def begin(self, request: Request) -> Connection | None:
        """Send a request now; `call` or `open` receives the response later on the returned connection.

        Returns None if sending failed; `call` and `open` then send it themselves.
        """
        line, connection = self.endpoint_client(self.router.choose_endpoint(request, set())), None
        try:
            connection = line.pool.acquire()
            line.send(connection, request)
        except ConnectError:
            self.router.directory.mark_failed(line.endpoint)
            if connection is not None:
                connection.close()
            return None
        return connection

    def open(
        self, request: Request, deadline: float | None = None, begun: Connection | None = None
    ) -> tuple[Response, Callable[[], None]]:
        """Send a request and return a successful response with its body unread, and a function to release it.

        Call the function when done with the response. Only the head is retried. `begun`: the connection on
        which the request was already sent. Raises the errors of `call`.
        """
        asking = RequestAttempts(self, request, deadline)
        while True:
            line = asking.next_endpoint(None if begun is None else begun.endpoint)
            connection = None
            response = None
            try:
                if begun is not None:
                    connection, begun = begun, None
                else:
                    connection = line.pool.acquire()
                    line.send(connection, request)
                asking.wait_for_answer(connection)
                response = self._received(line, connection, request)
                if response.status >= 300:
                    raise read_error(response, request)
            except MeshError as error:
                if connection is not None:
                    line.hand_back(connection, response)
                asking.handle_failure(error)
            else:
                return response, partial(line.hand_back, connection, response)

    def _exchange(
        self,
        line: EndpointClient,
        request: Request,
        consume: Callable[[Response], T],
        begun: Connection | None = None,
        asking: RequestAttempts | None = None,
    ) -> T:
        connection = line.pool.acquire() if begun is None else begun
        response = None
        try:
            if begun is None:
                line.send(connection, request)
            if asking is not None:
                asking.wait_for_answer(connection)
            response = self._received(line, connection, request)
            if response.status >= 300:
                raise read_error(response, request)
            return consume(response)
        finally:
            line.hand_back(connection, response)

    def _received(self, line: EndpointClient, connection: Connection, request: Request) -> Response:
        response = connection.receive(bodiless=request.method == "HEAD")
        directory = self.router.directory
        directory.mark_working(line.endpoint)
        if MAP_HEADER in response.headers:
            directory.record_version(response.headers[MAP_HEADER])
        self.local_handover.record_directory(line.endpoint, response.headers.get(LOCAL, ""))
        return response

    def wait(self, seconds: float) -> None:
        """Sleep; tests replace the sleep function."""
        self._sleep(seconds)

    def text(self, request: Request) -> bytes:
        """Return the whole body of a successful response."""
        return self.call(request, lambda response: response.read())

    def json(self, request: Request, deadline: float | None = None, begun: Connection | None = None) -> Any:
        """Return the parsed JSON body of a successful response. Raises MeshError if it is not JSON."""
        body = self.call(request, lambda response: response.read(), deadline, begun)
        try:
            return json.loads(body)
        except ValueError as error:
            raise MeshError(
                f"the response to {request.method} {request.path} is not JSON: "
                f"check that {self.settings.endpoint} is a meshd"
            ) from error

    def close(self) -> None:
        """Close the idle connections; the transport stays usable."""
        for line in list(self._lines.values()):
            line.pool.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.settings,)


class RequestAttempts:
    """The attempts of one request: which endpoints were tried, and when to try the next.

    After a failure the next untried node is tried at once; when none is left, all are tried again after a
    wait.
    """

    def __init__(self, transport: Transport, request: Request, deadline: float | None) -> None:
        self._transport, self._request = transport, request
        self._patience = Patience(BackOff(transport.settings.deadline if deadline is None else deadline))
        self._tried: set[Endpoint] = set()
        self._refused: Credential | None = None
        self._last: Endpoint | None = None

    def next_endpoint(self, endpoint: Endpoint | None = None) -> EndpointClient:
        """Return the client of the endpoint to try now: `endpoint` if given, else the router's choice."""
        self._last = endpoint or self._transport.router.choose_endpoint(self._request, self._tried)
        return self._transport.endpoint_client(self._last)

    def wait_for_answer(self, connection: Connection) -> None:
        """Wait until a response begins. Raises ConnectError if the node is dead or the timeout passes."""
        timeout = self._transport.settings.timeout
        left = self._patience.ends - time.monotonic()
        limit = silence(timeout, self._patience.policy.deadline, left)
        if limit < timeout and self._request.idempotent:
            there = partial(self._transport.answers, connection.endpoint)
            await_answer(connection, limit, timeout, there)

    def handle_failure(self, error: MeshError) -> None:
        """Wait until the next attempt is due; raise the error, or DeadlineError, if there must be none."""
        if isinstance(error, ServerError) and error.blames_keys:
            self._refused = replacement_keys(self._transport.keys, error, self._refused)
            self._transport.retries += 1
            return
        if not (self._request.idempotent or _is_skewed(error)):
            raise error
        again = mark_failed(self._transport.router, self._request, self._tried, self._last, error)
        wait = 0.0 if again else self._patience.delay(error, time.monotonic())
        self._transport.retries += 1
        done = progress_of(error)
        if done is not None and self._transport.on_progress is not None:
            self._transport.on_progress(done)
        if not again:
            self._tried.clear()
            self._transport.wait(wait)


def mark_failed(
    router: Router, request: Request, tried: set[Endpoint], endpoint: Endpoint | None, error: MeshError
) -> bool:
    """Record a failed endpoint in `tried`, and return whether to try another node at once.

    A refusal because of clock skew counts as such a failure: the node's clock may be the wrong one, so every
    node is tried once.
    """
    if endpoint is None or not (isinstance(error, ConnectError) or _is_skewed(error)):
        return False
    tried.add(endpoint)
    router.directory.mark_failed(endpoint)
    if router.directory.map is not None or len(router.directory.configured) > 1:
        router.directory.refresh()
    return router.has_untried(request, tried)


def replacement_keys(keys: RenewableKeys, error: ServerError, refused: Credential | None) -> Credential:
    """Return renewed keys for an immediate retry; raise the error if there are none.

    `refused`: the keys that this function returned for the last retry of the same request, if any.
    """
    found = keys.replacement(refused)
    if found is None:
        raise error.saying(told) if (told := keys.expiry_hint()) else error
    return found


def _is_skewed(error: MeshError) -> bool:
    return isinstance(error, ServerError) and error.code == "RequestTimeTooSkewed"


def parsed(reader: Callable[[bytes], T], body: bytes) -> T:
    """Parse an S3 document. Raises ServerError if it is invalid, or an error despite a success status."""
    try:
        return reader(body)
    except S3Error as error:
        raise server_error(error.status, error.code, error.message) from error


def read_error(response: Response, request: Request) -> MeshError:
    """Return the error for a response of status ≥ 300, whose body (S3's XML or our JSON) it reads.

    If a request that only a meshd can serve was refused by a server that does not call itself meshd, the
    message says so.
    """
    body = response.read(_MAX_ERROR_BODY)
    after = _retry_after(response.headers.get("retry-after"))
    if body[:1] == b"{":
        error = _json_error(response.status, body, after)
        return error.saying(told) if (told := _other_release(response)) else error
    name = response.headers.get("server", "")
    strange = request.path.startswith("/-/") and response.status in _REFUSALS and not name.startswith("meshd")
    advice = _STRANGER.format(name=name or "no name") if strange else ""
    return _xml_error(response.status, body, after, response.headers.get("x-amz-request-id", ""), advice)


def _other_release(response: Response) -> str:
    """Return a hint for a refusal by a node of another release; "" if that cannot be the reason."""
    if response.status not in _UNKNOWN:
        return ""
    from meshwire.http_values.mesh_headers import RELEASE, RELEASE_HEADER  # needed for refusals only

    theirs = response.headers.get(RELEASE_HEADER, RELEASE)[:40]
    return "" if theirs == RELEASE else _UNEQUAL.format(theirs=theirs, ours=RELEASE)


def _json_error(status: int, body: bytes, after: float | None) -> ServerError:
    try:
        error = json.loads(body)["error"]
        detail = error.get("detail") or {}
        return server_error(
            status,
            str(error.get("code", "")),
            str(error.get("message", "")),
            request_id=str(error.get("request_id", "")),
            detail=detail if isinstance(detail, dict) else {},
            advice=str(error.get("help") or ""),
            retry_after=after,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return server_error(status, "", body[:200].decode("utf-8", "replace"), retry_after=after)


def _xml_error(status: int, body: bytes, after: float | None, request_id: str, advice: str) -> MeshError:
    from meshwire.s3.xml_documents import parse_error  # only refused requests pay for the XML parsers

    try:
        error = parse_error(body)
    except (S3Error, ValueError):
        text = body[:200].decode("utf-8", "replace").strip()
        if text[:5].lower() in ("<!doc", "<html"):
            text = f"the server answered with an HTML page: {' '.join(_TAG.sub(' ', text).split())}"
        code = _bare_code(status)
        return server_error(status, code, text, request_id=request_id, advice=advice, retry_after=after)
    return server_error(
        status, error.code, error.message, request_id=request_id, advice=advice, retry_after=after
    )


def _bare_code(status: int) -> str:
    """Return the error code of a response without a body, such as the refusal of a HEAD."""
    return {404: "NotFound", 403: "Forbidden", 304: "NotModified", 412: "PreconditionFailed"}.get(status, "")


def _retry_after(text: str | None) -> float | None:
    """Parse a Retry-After header in either form (RFC 9110 §10.2.3) into seconds, capped at one hour."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), 3600.0)
