"""The HTTP server of a worker: what it needs, what it serves, how a connection behaves.

Law: aiohttp's low-level server and parser only; no router, no middleware on the S3 path. Paths under `/-/`
and an unsigned `/metrics` belong to a table of native routes, everything else is S3.
"""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from aiohttp import web

from meshd.config import HttpSettings
from meshd.control.interface import ControlError
from meshd.kit.accounts import charge
from meshd.service.authorization.access import Identity
from meshd.service.semantics.translation import translate_control
from meshd.web.authentication import Authenticator, request_context, request_head
from meshd.web.connections import MeshServer
from meshd.web.guarding import Guard
from meshd.web.hosts import Hosts
from meshd.web.hot import HotPath
from meshd.web.incoming import request_factory
from meshd.web.replies import Reply
from meshd.web.s3 import S3Endpoint
from meshd.web.settling import CLIENT_GONE, Trace, settle
from meshd.web.streaming import RequestBody
from meshwire import releases
from meshwire.checksums import BodyDigests
from meshwire.s3.errors import S3Error
from meshwire.sigv4 import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.service.authorization.access import Access
    from meshd.service.authorization.acls import AclService
    from meshd.service.backed.service import BackedService
    from meshd.service.buckets.news import News
    from meshd.service.buckets.service import BucketService
    from meshd.service.buckets.settings import SettingService
    from meshd.service.identities.temporary import Sessions
    from meshd.service.objects.acls import ObjectAclService
    from meshd.service.objects.deleting import Deleter
    from meshd.service.objects.listings import ListingService
    from meshd.service.objects.members import MemberService
    from meshd.service.objects.nearreading import NearReader
    from meshd.service.objects.service import ObjectService
    from meshd.service.objects.sources import FarSources
    from meshd.service.objects.tagging import TaggingService
    from meshd.service.objects.uploads import UploadService
    from meshd.service.remote.continuing import Rest
    from meshd.service.semantics.versions import Versions
    from meshd.service.views.dispatch import ViewReader
    from meshd.telemetry.audit import AuditLog
    from meshd.web.forwarding import Forwarder
    from meshd.web.incoming import MeshRequest
    from meshd.web.peers import PeerGate
    from meshd.web.scattering import Scatterer

log = logging.getLogger(__name__)

NativeHandler = Callable[["MeshRequest", Identity], Awaitable[web.StreamResponse]]
OpenHandler = Callable[["MeshRequest"], Awaitable[web.StreamResponse]]

# One header or request line may hold a long key or token; together they are capped by max_header_bytes.
_MAX_FIELD = 16 << 10
_MAX_HEADERS = 128
_READ_BUFFER = 128 << 10


@dataclass(frozen=True, slots=True)
class WebDeps:
    """What the endpoints are made of; sizes and timeouts come with `http`."""

    access: Access
    sessions: Sessions
    buckets: BucketService
    objects: ObjectService
    uploads: UploadService
    listings: ListingService
    settings: SettingService
    acls: AclService
    views: ViewReader
    members: MemberService
    object_acls: ObjectAclService
    versions: Versions
    deleter: Deleter
    tagging: TaggingService
    clock: Clock
    mesh: Mesh
    still: Callable[[], AbstractContextManager[object]] = nullcontext
    """Within it the control state is looked at once a request (ControlStore.still)."""
    audit: AuditLog | None = None
    http: HttpSettings = field(default_factory=HttpSettings)
    forwarder: Forwarder | None = None
    """Passes on what other nodes answer for; None where there are none."""
    backed: BackedService | None = None
    """Buckets with origins; None where there are none."""
    near: NearReader | None = None
    """Reads through this node's copies what other nodes hold; None where there are none."""
    scatterer: Scatterer | None = None
    far: FarSources | None = None
    rest: Rest | None = None
    """The rest of answers whose bytes end here; None where there are no other nodes."""
    news: News | None = None
    gate: PeerGate | None = None
    """Knows other nodes by their signatures; None where there are none."""


@dataclass(frozen=True, slots=True)
class NativeRoute:
    """Requests of `method` whose path is `prefix`, or lies under it when `prefix` ends in `/`. HEAD goes
    with GET.

    With `auth` the request's signature and its body's digest are verified first and the handler is called
    with (request, identity); without, with the request alone. `request.read()` gives the verified body. The
    first route that fits is taken.
    """

    method: str
    prefix: str
    handler: NativeHandler | OpenHandler
    auth: bool = True
    peer: bool = False
    """Made by `meshd.web.peers.peer_route`: for other nodes, which the route verifies itself."""

    def takes(self, method: str, path: str) -> bool:
        if method != self.method and not (method == "HEAD" and self.method == "GET"):
            return False
        return path == self.prefix or (self.prefix.endswith("/") and path.startswith(self.prefix))


def build_server(deps: WebDeps, native: Sequence[NativeRoute] = (), *, hot: bool = True) -> MeshServer:
    """The server of one worker; call it in a running loop, then `loop.create_server(server, sock=...)`.

    Stop with `server.pre_shutdown()` and `await server.shutdown(timeout)`, after the listening socket is
    closed. Without `hot` every request takes the ordinary way.
    """
    authenticator = Authenticator(deps.sessions, deps.clock, sigv2=deps.http.sigv2)
    dispatcher = Dispatcher(deps, authenticator, native)
    return make_server(
        dispatcher.handle, deps.clock, deps.http, HotPath(deps, authenticator) if hot else None
    )


def make_server(
    handler: OpenHandler, clock: Clock, http: HttpSettings, hot: HotPath | None = None
) -> MeshServer:
    """One that has every request answered by `handler`."""
    return MeshServer(
        handler,
        clock=clock,
        hot=hot,
        guard=Guard(http, _connection_limit(http.max_connections)),
        request_factory=request_factory(),
        keepalive_timeout=http.idle_timeout,
        lingering_time=0,  # `Connection` does it, by other rules
        access_log=None,
        max_line_size=_MAX_FIELD,
        max_field_size=_MAX_FIELD,
        max_headers=_MAX_HEADERS,
        read_bufsize=_READ_BUFFER,
        auto_decompress=False,  # what a client compressed is stored as it is
    )


def _connection_limit(wanted: int) -> int:
    """As many as wanted, and as the limit of open files leaves room for: a quarter of what is free now is
    kept for data files and for connections to other nodes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    free = soft - len(os.listdir("/proc/self/fd"))
    return max(1, min(wanted, free * 3 // 4))


class Dispatcher:
    """Native routes first, S3 for everything else."""

    def __init__(self, deps: WebDeps, authenticator: Authenticator, native: Sequence[NativeRoute]) -> None:
        self._deps, self._authenticator, self._native = deps, authenticator, tuple(native)
        self._s3 = S3Endpoint(deps, authenticator)
        self._hosts = Hosts(deps.http.domains)

    async def handle(self, request: MeshRequest) -> web.StreamResponse:
        target = request.raw_path
        if request.version.major != 1:  # aiohttp reads the line of 0.9 and of 2.0, too, and answers in kind
            return await self._handle_native(request, target.partition("?")[0])
        if self._hosts.bucket_of(request.headers.get("Host", "")):
            return await self._s3.handle(request)  # its keys may have any name
        if target.startswith("/-/") or (target == "/metrics" and "Authorization" not in request.headers):
            return await self._handle_native(request, target.partition("?")[0])
        return await self._s3.handle(request)

    async def _handle_native(self, request: MeshRequest, path: str) -> web.StreamResponse:
        route = next((route for route in self._native if route.takes(request.method, path)), None)
        audit = self._deps.audit if route is None or route.auth else None  # probes and scrapes are no news
        request.trace = trace = Trace(self._deps.clock, audit, request.remote)
        trace.target = path
        try:
            response = await self._native_response(request, path, route)
            if isinstance(response, Reply):
                response.say_when_to_retry(self._deps.mesh)
                await settle(request, response)
                trace.sent += response.body_length
        except BaseException:
            trace.finish(CLIENT_GONE)
            raise
        trace.finish(response.status)
        return response

    async def _native_response(
        self, request: MeshRequest, path: str, route: NativeRoute | None
    ) -> web.StreamResponse:
        """The answer, or the refusal. Raises ConnectionError and CancelledError only: the client is gone."""
        try:
            return await self._call_native(request, path, route)
        except S3Error as error:
            return self._refuse(error, request.trace)
        except ConnectionError:
            raise
        except ControlError as error:
            return self._refuse(translate_control(error), request.trace)
        except Exception:
            log.exception("request %s (%s) failed", request.trace.request_id, request.trace.operation)
            return self._refuse(S3Error("InternalError"), request.trace)

    async def _call_native(
        self, request: MeshRequest, path: str, route: NativeRoute | None
    ) -> web.StreamResponse:
        if request.version.major != 1:
            raise S3Error("BadRequest", "HTTP/1.1 and HTTP/1.0 are spoken here.")
        if route is None:
            known = any(route.takes(route.method, path) for route in self._native)
            raise S3Error("MethodNotAllowed" if known else "NoSuchKey", f"There is nothing at {path[:200]}.")
        request.trace.operation = f"{route.method} {route.prefix}"
        if route.peer:
            request.gate = self._deps.gate
        if not route.auth:
            return await cast("OpenHandler", route.handler)(request)
        identity = await self._verify(request)
        return await cast("NativeHandler", route.handler)(request, identity)

    async def _verify(self, request: MeshRequest) -> Identity:
        """Who signed; the body is read and compared with its signed digest."""
        http = self._deps.http
        head = request_head(request, http.max_header_bytes)
        request.signer = signer = self._authenticator.authenticate(head, request.trace)
        charge(signer.identity.account)
        # Version 2 signs neither the query, which says which rows are meant, nor the body.
        if not isinstance(signer.claim, Claim):
            raise S3Error("AccessDenied", "Sign this request with AWS Signature Version 4 (service s3).")
        request.context = request_context(request, head, signer)
        if request.body_exists:
            body = RequestBody(request, head, signer, http.body_timeout)
            try:
                request.verified_body = await body.whole(BodyDigests(), http.max_xml_bytes)
            finally:
                request.trace.received += body.received
            request.signer = signer = self._authenticator.again(head, signer)
        return signer.identity

    def _refuse(self, error: S3Error, trace: Trace) -> Reply:
        trace.code = error.code
        document = {"error": {"code": error.code, "message": error.message, "request_id": trace.request_id}}
        body = json.dumps(document).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("x-amz-request-id", trace.request_id),
            (releases.HEADER, releases.RELEASE),
        ]
        return Reply(error.status, headers, body, self._deps.clock.now_ms() // 1000)
