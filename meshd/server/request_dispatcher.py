"""Dispatch of requests: to the native routes under `/-/` (JSON APIs, probes, calls of other nodes), or to S3.

Paths under `/-/` and an unsigned `/metrics` belong to the native routes, a form posted to `/` to STS; every
other request is S3. There is one route table, no other router and no middleware. A route says who may call
it; its handler gets the verified caller.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Protocol, cast

from meshd.control.control_api import ControlError
from meshd.core.api_errors import control_error_to_s3
from meshd.server.api.sts_query import is_sts_request
from meshd.server.request import RequestTrace, request_head
from meshd.server.request_body import RequestBody
from meshd.server.response import Reply, send_reply
from meshd.telemetry import tracing
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error
from meshwire.http_values import mesh_headers
from meshwire.sigv4 import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.auth.identity import Identity
    from meshd.cluster.cluster_view import ClusterView
    from meshd.config import HttpSettings
    from meshd.server.http_route import HttpRoute, OpenHandler, SignedHandler
    from meshd.server.peer_endpoint import PeerAuthenticator, PeerHandler
    from meshd.server.request import MeshRequest
    from meshd.server.s3.request_auth import RequestAdmission, VirtualHosts
    from meshd.telemetry.audit_log import AuditLog
    from meshd.util.clock import Clock


log = logging.getLogger(__name__)
HTTP_VERSIONS = ("1.1", "1.0")


class NativeRoutes:
    """Answers the requests that belong to `routes`, or to none. `peers` authenticates other nodes; None where
    there are none. One per process."""

    def __init__(
        self,
        routes: Sequence[HttpRoute],
        admission: RequestAdmission,
        peers: PeerAuthenticator | None,
        mesh: ClusterView,
        clock: Clock,
        audit: AuditLog | None,
        http: HttpSettings,
    ) -> None:
        self._routes, self._admission, self._peers = tuple(routes), admission, peers
        self._mesh, self._clock, self._audit, self._http = mesh, clock, audit, http

    async def answer(self, request: MeshRequest, path: str) -> Reply:
        """Answer a request to `path`, its target without the query."""
        route = next((route for route in self._routes if route.matches(request.method, path)), None)
        # Probes and scrapes are not audited.
        audit = self._audit if route is None or route.access == "signed" else None
        # No trace begins with the work of other nodes, probes and scrapes.
        root = route is None or route.access == "signed"
        span = tracing.start_request(request.headers, self._clock.monotonic(), root=root)
        request.trace = trace = RequestTrace(self._clock, audit, request.remote, span)
        trace.target = path
        tracing.enter(span)
        return await send_reply(request, trace, self._response(request, path, route), self._mesh)

    async def respond(self, request: MeshRequest, path: str) -> Reply:
        """Return the response to a signed request that has no connection: nothing is sent, counted or
        audited."""
        route = next((route for route in self._routes if route.matches(request.method, path)), None)
        request.trace = RequestTrace(self._clock, None, request.remote)
        request.trace.target = path
        reply = await self._response(request, path, route)
        request.trace.suspend()
        return reply

    async def _response(self, request: MeshRequest, path: str, route: HttpRoute | None) -> Reply:
        """Return the response, or an error. Raises only ConnectionError and CancelledError: the client is
        gone."""
        try:
            return await self._call(request, path, route)
        except S3Error as error:
            return self._refuse(error, request.trace)
        except ConnectionError:
            raise
        except ControlError as error:
            return self._refuse(control_error_to_s3(error), request.trace)
        except Exception:
            log.exception("request %s (%s) failed", request.trace.request_id, request.trace.operation)
            return self._refuse(S3Error("InternalError"), request.trace)

    async def _call(self, request: MeshRequest, path: str, route: HttpRoute | None) -> Reply:
        if request.http_version not in HTTP_VERSIONS:
            raise S3Error("BadRequest", "This server supports HTTP/1.1 and HTTP/1.0.")
        if route is None:
            known = any(route.matches(route.method, path) for route in self._routes)
            raise S3Error("MethodNotAllowed" if known else "NoSuchKey", f"There is nothing at {path[:200]}.")
        request.trace.operation = f"{route.method} {route.prefix}"
        if route.access == "peer":
            if self._peers is None:
                raise S3Error("AccessDenied", "This node belongs to no cluster.")
            return await self._peers.answer(request, cast("PeerHandler", route.handler))
        if route.access == "open":
            return await cast("OpenHandler", route.handler)(request)
        identity = await self._verify(request)
        return await cast("SignedHandler", route.handler)(request, identity)

    async def _verify(self, request: MeshRequest) -> Identity:
        """Return the signer; the body is read and compared with its signed digest."""
        http = self._http
        head = request_head(request, http.max_header_bytes)
        signer, request.context = self._admission.identify(head, request, request.trace)
        # Version 2 signs neither the query, which selects the rows, nor the body.
        if not isinstance(signer.claim, Claim):
            raise S3Error("AccessDenied", "Sign this request with AWS Signature Version 4 (service s3).")
        if request.body_exists:
            body = RequestBody(request, head, http.body_timeout, signer.claim, signer.verified)
            try:
                request.verified_body = await body.whole(BodyDigests(), http.max_xml_bytes)
            finally:
                request.trace.received += body.received
            signer = self._admission.readmit(head, None, signer, request.context)
        request.claim = signer.claim
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
        return Reply(error.status, headers, body, self._clock.now_ms() // 1000)


class ConsolePages(Protocol):
    """Answers what a browser requests of the console; see `meshd.server.console.endpoint.ConsoleEndpoint`."""

    def is_address_of(self, request: MeshRequest) -> bool:
        """Whether a request outside `/-/console` leads to the console."""

    async def handle(self, request: MeshRequest, dispatch: OpenHandler) -> Reply:
        """Answer one request; `dispatch` answers what was signed for a session."""


class RequestDispatcher:
    """Dispatches requests to the native routes, to `sts`, to the `console`, or to `s3`, the S3 endpoint."""

    def __init__(
        self,
        s3: OpenHandler,
        native: NativeRoutes,
        sts: OpenHandler | None,
        hosts: VirtualHosts,
        console: ConsolePages | None = None,
    ) -> None:
        self._s3, self._native, self._sts, self._hosts, self._console = s3, native, sts, hosts, console

    async def handle(self, request: MeshRequest) -> Reply:
        target = request.raw_path
        # The parser also accepts a request line of 0.9 and of 2.0.
        if request.http_version not in HTTP_VERSIONS:
            return await self._native.answer(request, target.partition("?")[0])
        if self._hosts.bucket_of(request.headers.get("host", "")):
            return await self._s3(request)  # its keys may begin with /-/
        if self._console is not None and (
            target.startswith("/-/console") or self._console.is_address_of(request)
        ):
            return await self._console.handle(request, self.handle)
        if target.startswith("/-/") or (target == "/metrics" and "authorization" not in request.headers):
            return await self._native.answer(request, target.partition("?")[0])
        if self._sts is not None and is_sts_request(request):
            return await self._sts(request)
        return await self._s3(request)
