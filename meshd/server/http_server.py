"""The HTTP server of a worker: its services, its routes, request dispatch, and graceful shutdown.

There is one route table, no other router and no middleware. Paths under `/-/` and an unsigned `/metrics`
belong to the route table; every other request is S3. On shutdown, a connection ends only after its request
has arrived in full and is answered, or when the grace period is over.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from meshd.auth.identity import Identity
from meshd.config import HttpSettings
from meshd.control.control_api import ControlError
from meshd.core.error_mapping import control_error_to_s3
from meshd.server.connection import MeshServer
from meshd.server.connection_limits import ConnectionLimiter
from meshd.server.request import RequestBody
from meshd.server.request_trace import CLIENT_GONE, RequestTrace, finish_response
from meshd.server.response import Reply
from meshd.server.s3.admission import RequestAdmission
from meshd.server.s3.authentication import Authenticator, VirtualHosts, request_head
from meshd.server.s3.endpoint import S3Endpoint
from meshd.server.s3.fast_path import FastPath
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error
from meshwire.http_values import mesh_headers
from meshwire.sigv4 import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from meshd.auth.acls import AclService
    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identities.sts_sessions import CredentialService
    from meshd.cluster.cluster_view import ClusterView
    from meshd.objects.buckets.service import BucketService, ChangeBroadcast
    from meshd.objects.buckets.settings import SettingService
    from meshd.objects.delete import DeleteService
    from meshd.objects.list_objects import ListingService
    from meshd.objects.multipart_upload import UploadService
    from meshd.objects.object_metadata import ObjectAclService, TaggingService
    from meshd.objects.service import ObjectService
    from meshd.objects.version_lookup import VersionLookup
    from meshd.origins.service import BackedService
    from meshd.peer_reads.resume_read import ResumeRead
    from meshd.reads.archive_members import MemberService
    from meshd.reads.copy_source import RemoteCopySources
    from meshd.reads.near_cache_reader import NearCacheReader
    from meshd.server.peer.endpoint import PeerAuthenticator
    from meshd.server.proxy.fan_out import FanOut
    from meshd.server.proxy.forwarder import Forwarder
    from meshd.server.request import MeshRequest
    from meshd.telemetry.audit_log import AuditLog
    from meshd.util.clock import Clock
    from meshd.views.dispatch import ViewDispatcher


log = logging.getLogger(__name__)

_VERSIONS = ("1.1", "1.0")
SignedHandler = Callable[["MeshRequest", Identity], Awaitable["Reply"]]
UnsignedHandler = Callable[["MeshRequest"], Awaitable["Reply"]]


@dataclass(frozen=True, slots=True)
class ServerServices:
    """The services that the endpoints use; `http` has sizes and timeouts."""

    access: Authorizer
    sessions: CredentialService
    buckets: BucketService
    objects: ObjectService
    uploads: UploadService
    listings: ListingService
    settings: SettingService
    acls: AclService
    views: ViewDispatcher
    members: MemberService
    object_acls: ObjectAclService
    versions: VersionLookup
    deleter: DeleteService
    tagging: TaggingService
    clock: Clock
    mesh: ClusterView
    control_snapshot: Callable[[], AbstractContextManager[object]] = nullcontext
    """Within it, a request reads the control state only once (ControlStore.pin_revisions)."""
    audit: AuditLog | None = None
    http: HttpSettings = field(default_factory=HttpSettings)
    forwarder: Forwarder | None = None
    """Forwards requests to other nodes; None where there are none."""
    backed: BackedService | None = None
    """Buckets with origins; None where there are none."""
    nearby_reader: NearCacheReader | None = None
    """Reads data of other nodes through this node's copies; None where there are none."""
    fan_out: FanOut | None = None
    copy_sources: RemoteCopySources | None = None
    resume_read: ResumeRead | None = None
    """Returns the rest of responses whose local bytes became unreadable; None where there are no other
    nodes."""
    bucket_changes: ChangeBroadcast | None = None
    peer_authenticator: PeerAuthenticator | None = None
    """Authenticates other nodes; None where there are none."""


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A route for requests of `method` whose path is `prefix`, or is under it if `prefix` ends in `/`. HEAD
    matches GET.

    With `auth` the request's signature and its body's digest are verified first, and the handler is called
    with (request, identity); without, with the request alone. `request.read()` returns the verified body. The
    first matching route is used.
    """

    method: str
    prefix: str
    handler: SignedHandler | UnsignedHandler
    auth: bool = True
    peer: bool = False
    """Created by `meshd.server.peer.endpoint.peer_route`: for other nodes, which the route authenticates
    itself."""

    def matches(self, method: str, path: str) -> bool:
        if method != self.method and not (method == "HEAD" and self.method == "GET"):
            return False
        return path == self.prefix or (self.prefix.endswith("/") and path.startswith(self.prefix))


def build_server(deps: ServerServices, native: Sequence[HttpRoute] = (), *, hot: bool = True) -> MeshServer:
    """Return the server of one worker. Call it in a running loop, then `loop.create_server(server,
    sock=...)`.

    Stop it with `server.pre_shutdown()` and `await server.shutdown(timeout)`, after the listening socket is
    closed. `hot` enables the fast path.
    """
    authenticator = Authenticator(deps.sessions, deps.clock, sigv2=deps.http.sigv2)
    admission = RequestAdmission(authenticator, deps.access)
    dispatcher = RequestDispatcher(deps, admission, S3Endpoint(deps, admission, authenticator), native)
    return make_server(dispatcher.handle, deps.clock, deps.http, FastPath(deps, admission) if hot else None)


def make_server(
    handler: UnsignedHandler, clock: Clock, http: HttpSettings, hot: FastPath | None = None
) -> MeshServer:
    """Return a server whose requests are all answered by `handler`."""
    return MeshServer(
        handler,
        clock=clock,
        hot=hot,
        guard=ConnectionLimiter(http, _connection_limit(http.max_connections)),
        keepalive_timeout=http.idle_timeout,
    )


def _connection_limit(wanted: int) -> int:
    """Return the connection limit: `wanted`, or what the limit of open files allows. A quarter of the free
    descriptors is reserved for data files and for connections to other nodes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    free = soft - len(os.listdir("/proc/self/fd"))
    return max(1, min(wanted, free * 3 // 4))


class RequestDispatcher:
    """Dispatches requests to the native routes first, to S3 otherwise."""

    def __init__(
        self,
        deps: ServerServices,
        admission: RequestAdmission,
        s3: S3Endpoint,
        native: Sequence[HttpRoute],
    ) -> None:
        self._deps, self._admission, self._s3, self._native = deps, admission, s3, tuple(native)
        self._hosts = VirtualHosts(deps.http.domains)

    async def handle(self, request: MeshRequest) -> Reply:
        target = request.raw_path
        if request.http_version not in _VERSIONS:  # the parser also accepts a request line of 0.9 and of 2.0
            return await self._handle_native(request, target.partition("?")[0])
        if self._hosts.bucket_of(request.headers.get("host", "")):
            return await self._s3.handle(request)  # its keys may begin with /-/
        if target.startswith("/-/") or (target == "/metrics" and "authorization" not in request.headers):
            return await self._handle_native(request, target.partition("?")[0])
        return await self._s3.handle(request)

    async def _handle_native(self, request: MeshRequest, path: str) -> Reply:
        route = next((route for route in self._native if route.matches(request.method, path)), None)
        # Probes and scrapes are not audited.
        audit = self._deps.audit if route is None or route.auth else None
        request.trace = trace = RequestTrace(self._deps.clock, audit, request.remote)
        trace.target = path
        try:
            response = await self._native_response(request, path, route)
            response.add_retry_after(self._deps.mesh)
            await finish_response(request, response)
            trace.sent += response.body_length
        except BaseException:
            trace.finish(CLIENT_GONE)
            raise
        trace.finish(response.status)
        return response

    async def _native_response(self, request: MeshRequest, path: str, route: HttpRoute | None) -> Reply:
        """Return the response, or an error. Raises only ConnectionError and CancelledError: the client is
        gone."""
        try:
            return await self._call_native(request, path, route)
        except S3Error as error:
            return self._refuse(error, request.trace)
        except ConnectionError:
            raise
        except ControlError as error:
            return self._refuse(control_error_to_s3(error), request.trace)
        except Exception:
            log.exception("request %s (%s) failed", request.trace.request_id, request.trace.operation)
            return self._refuse(S3Error("InternalError"), request.trace)

    async def _call_native(self, request: MeshRequest, path: str, route: HttpRoute | None) -> Reply:
        if request.http_version not in _VERSIONS:
            raise S3Error("BadRequest", "This server supports HTTP/1.1 and HTTP/1.0.")
        if route is None:
            known = any(route.matches(route.method, path) for route in self._native)
            raise S3Error("MethodNotAllowed" if known else "NoSuchKey", f"There is nothing at {path[:200]}.")
        request.trace.operation = f"{route.method} {route.prefix}"
        if route.peer:
            request.gate = self._deps.peer_authenticator
        if not route.auth:
            return await cast("UnsignedHandler", route.handler)(request)
        identity = await self._verify(request)
        return await cast("SignedHandler", route.handler)(request, identity)

    async def _verify(self, request: MeshRequest) -> Identity:
        """Return the signer; the body is read and compared with its signed digest."""
        http = self._deps.http
        head = request_head(request, http.max_header_bytes)
        request.signer, request.context = self._admission.identify(head, request, request.trace)
        signer = request.signer
        # Version 2 signs neither the query, which selects the rows, nor the body.
        if not isinstance(signer.claim, Claim):
            raise S3Error("AccessDenied", "Sign this request with AWS Signature Version 4 (service s3).")
        if request.body_exists:
            body = RequestBody(request, head, signer, http.body_timeout)
            try:
                request.verified_body = await body.whole(BodyDigests(), http.max_xml_bytes)
            finally:
                request.trace.received += body.received
            request.signer = signer = self._admission.readmit(head, None, signer, request.context)
        return signer.identity

    def _refuse(self, error: S3Error, trace: RequestTrace) -> Reply:
        trace.code = error.code
        document = {"error": {"code": error.code, "message": error.message, "request_id": trace.request_id}}
        body = json.dumps(document).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("x-amz-request-id", trace.request_id),
            (mesh_headers.RELEASE_HEADER, mesh_headers.RELEASE),
        ]
        return Reply(error.status, headers, body, self._deps.clock.now_ms() // 1000)


_LOOK_AGAIN = 0.02
_LAST_WORD = 0.5  # seconds for cancelled handlers


async def drain_server(server: MeshServer, clock: Clock, grace: float) -> None:
    """Close idle connections at once and busy ones after their response; after `grace` seconds cut the rest.

    Call it when the listening socket is closed.
    """
    deadline = clock.monotonic() + grace
    while server.connections and clock.monotonic() < deadline:
        for connection in server.connections:
            connection.close_when_idle()
        await asyncio.sleep(_LOOK_AGAIN)
    server.pre_shutdown()
    await server.shutdown(_LAST_WORD)
