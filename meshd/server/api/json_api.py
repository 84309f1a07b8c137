"""JsonApi: what the endpoints under `/-/` share: queries, error documents, JSON replies, bounded concurrency.

Every error is `{"error": {code, message, request_id, detail, help}}`. Unknown query parameters are refused,
because a typing error must not change what a request returns.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from meshd.auth.identity import NO_CONTEXT, Caller
from meshd.core.api_errors import BatchError, busy, to_batch_error
from meshd.server.response import Reply, map_headers
from meshd.store.errors import StoreError
from meshd.util.tenant_limits import Admission, AdmissionRejectedError
from meshwire.frame.tensor_frame import FrameError
from meshwire.http_values import mesh_headers
from meshwire.strict_json import PlanError, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshd.auth.identity import Identity
    from meshd.cluster.cluster_view import ClusterView
    from meshd.core.api_errors import Code
    from meshd.server.local_handover import LocalFrameService
    from meshd.server.request import MeshRequest, RequestTrace
    from meshd.server.response import Header
    from meshd.util.clock import Clock

_log = logging.getLogger(__name__)
MAX_CONCURRENT_REQUESTS = 32
"""Requests that one worker handles concurrently if each holds a thread or much memory."""
_MAX_PARAMETERS = 64
_HASH = re.compile(r"[0-9a-f]{64}")
STATUS: Mapping[Code, int] = {
    "BadRequest": 400,
    "InvalidPlan": 400,
    "UnknownOp": 400,
    "AccessDenied": 403,
    "NoSuchBucket": 404,
    "NoSuchSnapshot": 404,
    "NoSuchPlan": 404,
    "NoSuchKey": 404,
    "NoSuchView": 404,
    "NoSuchJob": 404,
    "MethodNotAllowed": 405,
    "SnapshotChanged": 409,
    "ViewExists": 409,
    "BucketExists": 409,
    "CredentialsMissing": 400,
    "InUse": 409,
    "Gone": 410,
    "UnknownOpBuild": 410,
    "NoSuchAsset": 410,
    "TooLarge": 413,
    "NotOwner": 421,
    "BadSample": 422,
    "Busy": 503,
    "OpFailed": 500,
    "CorruptData": 500,
    "InternalError": 500,
    "NotImplemented": 501,
}

Handler = Callable[["MeshRequest", "Identity"], Awaitable["Reply"]]


class JsonApi:
    """Makes the replies of the endpoints of a worker, and bounds what they do at a time, by account. In a
    cluster, replies tell the version of the map of `mesh`; they also tell where the `frame_service` for local
    handover is."""

    def __init__(
        self, clock: Clock, mesh: ClusterView | None = None, frame_service: LocalFrameService | None = None
    ) -> None:
        self._clock, self._mesh, self.frame_service = clock, mesh, frame_service
        self._works = Admission(MAX_CONCURRENT_REQUESTS)

    def __repr__(self) -> str:
        return f"<JsonApi {self._works!r}>"

    def limit_concurrency(self, handler: Handler) -> Handler:
        """Bound the concurrency of a handler that holds a thread or much memory. Beyond the bound callers get
        Busy, except those who have less than an even share."""

        @wraps(handler)
        async def bound(request: MeshRequest, identity: Identity) -> Reply:
            with hold_capacity(self._works, identity, 1, "requests of this kind"):
                return await handler(request, identity)

        return bound

    def handle_errors(self, handler: Handler) -> Handler:
        """Turn the errors of a handler into the protocol's documents."""

        @wraps(handler)
        async def guard(request: MeshRequest, identity: Identity) -> Reply:
            refuse = partial(self._refusal, request.trace)
            if request.method == "HEAD":
                return refuse(BatchError("MethodNotAllowed", "HEAD is not supported here; use GET"))
            try:
                return await handler(request, identity)
            except BatchError as error:
                return refuse(error)
            except PlanError as error:
                return refuse(BatchError("BadRequest", str(error), detail={"path": error.path}))
            except FrameError as error:
                return refuse(BatchError("BadRequest", str(error)))
            except StoreError as error:
                return refuse(to_batch_error(error))

        return guard

    def now(self) -> int:
        """Seconds since the epoch."""
        return self._clock.now_ms() // 1000

    def reply_json(self, document: Any) -> Reply:
        """Return a JSON reply."""
        return self.reply("application/json", json.dumps(document).encode())

    def reply(self, content_type: str, body: bytes) -> Reply:
        """Return a reply of any type of content."""
        return self._reply(200, content_type, body)

    def _reply(self, status: int, content_type: str, body: bytes, *more: Header) -> Reply:
        headers = [*entity_headers(content_type, len(body)), *self.location_headers(), *more]
        return Reply(status, headers, body, self.now())

    def location_headers(self) -> list[Header]:
        """Return the headers that tell the SDK the cluster map's version, and jobs on this host where to get
        frames."""
        headers = [] if self._mesh is None else map_headers(self._mesh)
        return headers if self.frame_service is None else [*headers, self.frame_service.location_header]

    def _refusal(self, trace: RequestTrace, error: BatchError) -> Reply:
        trace.code, request_id = error.code, trace.request_id
        document = {
            "code": error.code,
            "message": error.message,
            "request_id": request_id,
            "detail": error.detail,
            "help": error.help,
        }
        if error.code == "InternalError":
            _log.error("%s (request %s)", error.message, request_id)
        more: list[Header] = [
            ("x-amz-request-id", request_id),
            (mesh_headers.RELEASE_HEADER, mesh_headers.RELEASE),
        ]
        if error.retry_after is not None:
            more.append(("Retry-After", str(error.retry_after)))
        body = json.dumps({"error": document}).encode()
        return self._reply(STATUS[error.code], "application/json", body, *more)


@contextmanager
def hold_capacity(room: Admission, identity: Identity, units: int, what: str) -> Iterator[None]:
    """Hold capacity while a request is answered. Raises BatchError Busy."""
    try:
        room.admit(identity.account, units)
    except AdmissionRejectedError as error:
        raise busy(f"this process of the node is handling too many {what}") from error
    try:
        yield
    finally:
        room.release(identity.account, units)


def caller_of(request: MeshRequest, identity: Identity) -> Caller:
    """Return the caller: the identity and the request's context."""
    return Caller(identity, request.context or NO_CONTEXT)


def parse_query(request: MeshRequest, known: tuple[str, ...]) -> dict[str, str]:
    """Return the query without its signature. Raises BatchError BadRequest for an unknown parameter."""
    raw = request.raw_path.partition("?")[2]
    if raw.count("&") > _MAX_PARAMETERS:
        raise BatchError("BadRequest", f"more than {_MAX_PARAMETERS} query parameters")
    given = parse_qsl(raw, keep_blank_values=True)
    pairs = [pair for pair in given if not pair[0].lower().startswith("x-amz-")]
    query = dict(pairs)
    if len(query) != len(pairs):
        raise BatchError("BadRequest", "a query parameter is given twice")
    for name in query:
        if name not in known:
            raise BatchError("BadRequest", f"unknown query parameter {name[:80]!r}{suggestion(name, known)}")
    return query


def hash_path(request: MeshRequest, prefix: str, *counts: int) -> tuple[str, ...]:
    """Return the parts of the path after `prefix`, of which there are one of `counts`; the first one is a
    hash. Raises BatchError NoSuchKey, BadRequest.
    """
    parts = tuple(request.raw_path.partition("?")[0].removeprefix(prefix).split("/"))
    if len(parts) not in counts:
        raise BatchError("NoSuchKey", f"there is nothing at {request.raw_path[:200]}")
    if not _HASH.fullmatch(parts[0]):
        raise BatchError("BadRequest", f"{parts[0][:80]!r} is not a hash of 64 lower-case hex digits")
    return parts


def check_last_part(request: MeshRequest, given: str, *known: str) -> None:
    """Raise BatchError NoSuchKey unless the last part of a path is a known one."""
    if given not in known:
        raise BatchError("NoSuchKey", f"there is nothing at {request.path[:200]}")


def entity_headers(content_type: str, size: int) -> list[Header]:
    """Return the headers that describe a body."""
    return [("Content-Type", content_type), ("Content-Length", str(size))]
