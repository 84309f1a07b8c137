"""Signed requests over pooled connections, with retries and failover.

Law: every request here is idempotent (reads, whole-object writes, content-addressed POSTs), so a retry
is safe; a request that is not passes `idempotent=False`.
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
    "The node is of release {theirs}, this SDK of {ours}: if one of them does not know that yet, upgrade it."
)
_STRANGER = (
    "Is that a meshd? It calls itself {name}. Datasets and loaders need one: set MESH_ENDPOINT, which goes "
    "before AWS_ENDPOINT_URL."
)


@dataclass(frozen=True, slots=True)
class Request:
    """One question. `path` and `query` are percent-encoded already, header names lower-case.

    `sha256` is the body's hex digest; None leaves the payload out of the signature (large bodies carry a
    checksum header instead). `toward`: the id of the node that is asked first, where the mesh has it;
    `meets`: the address by which assemblers are chosen.
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
    """A request with a small JSON body."""
    body = json.dumps(document, separators=(",", ":")).encode()
    digest = hashlib.sha256(body).hexdigest()
    return Request(method, path, query, {"content-type": "application/json"}, body, digest)


class Signer:
    """Turns requests into bytes for the wire. `clock` gives seconds since the epoch."""

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
        """The signed head; the body follows it unchanged."""
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
    """The keys of settings, renewed where they are in a file."""
    credential = Credential(settings.access_key, settings.secret_key, settings.session_token)
    return RenewableKeys(settings.credentials_file, credential, clock)


class EndpointClient:
    """The way to one endpoint."""

    def __init__(self, settings: Settings, endpoint: Endpoint, keys: RenewableKeys) -> None:
        self.endpoint = endpoint
        self.pool = Pool(endpoint, settings.timeout)
        self.signer = Signer(settings, endpoint=endpoint, keys=keys)

    def send(self, connection: Connection, request: Request) -> None:
        """Sends a signed question."""
        head = self.signer.head(request)
        # A small body rides in the segment of its head.
        connection.send([head + bytes(request.body)] if len(request.body) <= _SMALL else [head, request.body])

    def hand_back(self, connection: Connection, response: Response | None) -> None:
        """To the pool, if its answer was read to the end."""
        if response is not None and response.reusable:
            self.pool.release(connection)
        else:
            connection.close()


class Transport:
    """A client's way to its endpoint and the nodes behind it: pools, signers, patience. Thread-safe; pickles
    without its sockets. `watch`: is told how far long work of a node is, 0…1, each time it says so."""

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
        """The way to an endpoint."""
        found = self._lines.get(endpoint)
        if found is None:
            found = self._lines.setdefault(endpoint, EndpointClient(self.settings, endpoint, self.keys))
        return found

    def _ask_map(self, endpoint: Endpoint) -> bytes:
        """Without patience: another node knows the map as well."""
        settings = replace(self.settings, timeout=min(self.settings.timeout, PRESENCE))
        line = EndpointClient(settings, endpoint, self.keys)
        try:
            return self._exchange(line, Request("GET", "/-/map"), lambda response: response.read())
        finally:
            line.pool.clear()

    def answers(self, endpoint: Endpoint) -> bool:
        """Whether a node says that it is there, be it that it refuses to say more."""
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
        """What `consume` makes of a good answer; its body must be read within `consume`. `begun`: where the
        question was sent already.

        Raises ServerError (a refusal), DeadlineError (unavailable for too long), ConnectError (only when
        the request is not idempotent). `consume` may run again if the answer breaks off.
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
        """A connection on which the question was sent, for `call` or `open` to receive its answer later; None
        when that did not work, and they may try."""
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
        """A good answer whose body is still to be read, and what to call when done with it. Retries the head
        only. `begun`: where the question was sent already.
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
        """Sleeps."""
        self._sleep(seconds)

    def text(self, request: Request) -> bytes:
        """The whole body of a good answer."""
        return self.call(request, lambda response: response.read())

    def json(self, request: Request, deadline: float | None = None, begun: Connection | None = None) -> Any:
        """The JSON body of a good answer; raises MeshError when it is none."""
        body = self.call(request, lambda response: response.read(), deadline, begun)
        try:
            return json.loads(body)
        except ValueError as error:
            raise MeshError(
                f"{request.method} {request.path} did not answer with JSON: "
                f"is {self.settings.endpoint} a meshd?"
            ) from error

    def close(self) -> None:
        """Closes the idle connections; the transport stays usable."""
        for line in list(self._lines.values()):
            line.pool.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.settings,)


class RequestAttempts:
    """One question until it is answered: whom it was put to, and when it is put again. Another node at once,
    where one is left; else after a while."""

    def __init__(self, transport: Transport, request: Request, deadline: float | None) -> None:
        self._transport, self._request = transport, request
        self._patience = Patience(BackOff(transport.settings.deadline if deadline is None else deadline))
        self._tried: set[Endpoint] = set()
        self._refused: Credential | None = None
        self._last: Endpoint | None = None

    def next_endpoint(self, endpoint: Endpoint | None = None) -> EndpointClient:
        """The way to whom is asked now; `endpoint` where that is settled."""
        self._last = endpoint or self._transport.router.choose_endpoint(self._request, self._tried)
        return self._transport.endpoint_client(self._last)

    def wait_for_answer(self, connection: Connection) -> None:
        """Until an answer begins. Raises ConnectError where none is to be had any more."""
        timeout = self._transport.settings.timeout
        left = self._patience.ends - time.monotonic()
        limit = silence(timeout, self._patience.policy.deadline, left)
        if limit < timeout and self._request.idempotent:
            there = partial(self._transport.answers, connection.endpoint)
            await_answer(connection, limit, timeout, there)

    def handle_failure(self, error: MeshError) -> None:
        """Waits as long as it takes before somebody is asked again; raises the error, or DeadlineError, when
        nobody is to be."""
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
    """Notes whose answer failed in `tried`; whether another node is to be asked at once. Of a node that has
    another time than this machine, a wrong one perhaps: all are asked once."""
    if endpoint is None or not (isinstance(error, ConnectError) or _is_skewed(error)):
        return False
    tried.add(endpoint)
    router.directory.mark_failed(endpoint)
    if router.directory.map is not None or len(router.directory.configured) > 1:
        router.directory.refresh()
    return router.has_untried(request, tried)


def replacement_keys(keys: RenewableKeys, error: ServerError, refused: Credential | None) -> Credential:
    """The keys to ask with again at once, as they were renewed meanwhile; else raises the error. `refused`:
    those of the last time, if this question was asked again before."""
    found = keys.replacement(refused)
    if found is None:
        raise error.saying(told) if (told := keys.expiry_hint()) else error
    return found


def _is_skewed(error: MeshError) -> bool:
    return isinstance(error, ServerError) and error.code == "RequestTimeTooSkewed"


def parsed(reader: Callable[[bytes], T], body: bytes) -> T:
    """A document of S3's; raises ServerError when it is none, or tells of a failure after a good status."""
    try:
        return reader(body)
    except S3Error as error:
        raise server_error(error.status, error.code, error.message) from error


def read_error(response: Response, request: Request) -> MeshError:
    """The error an answer of status ≥ 300 stands for; reads its body. S3's XML and our JSON are both
    understood. Who refuses what only a meshd can do, and is none by its looks, is asked whether it is one.
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
    """What to say of a refusal by a node of another release; "" where that cannot be the reason."""
    if response.status not in _UNKNOWN:
        return ""
    from meshwire.http_values.mesh_headers import RELEASE, RELEASE_HEADER  # only who is refused asks

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
    from meshwire.s3.xml_documents import parse_error  # only a refused request pays for the XML readers

    try:
        error = parse_error(body)
    except (S3Error, ValueError):
        text = body[:200].decode("utf-8", "replace").strip()
        if text[:5].lower() in ("<!doc", "<html"):
            text = f"the answer is a page of HTML: {' '.join(_TAG.sub(' ', text).split())}"
        code = _bare_code(status)
        return server_error(status, code, text, request_id=request_id, advice=advice, retry_after=after)
    return server_error(
        status, error.code, error.message, request_id=request_id, advice=advice, retry_after=after
    )


def _bare_code(status: int) -> str:
    """A HEAD's refusal has no body: the status is all there is."""
    return {404: "NotFound", 403: "Forbidden", 304: "NotModified", 412: "PreconditionFailed"}.get(status, "")


def _retry_after(text: str | None) -> float | None:
    """Seconds of a Retry-After header in either form (RFC 9110 §10.2.3), at most an hour."""
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
