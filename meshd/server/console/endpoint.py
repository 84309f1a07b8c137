"""The console's endpoint: the page, its files and sessions, and what it requests with its session.

Cookies are HttpOnly and SameSite=Strict and belong to the paths of the console. A request that does anything
must carry the session's token in a header (`x-mesh-console`), which no form, image or link of another page
can send, and must not come from another origin. Only downloads are links: their responses are attachments.
"""

from __future__ import annotations

import hmac
import logging
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote, urlsplit

import msgspec

from meshd.control.control_api import ControlError
from meshd.core.api_errors import control_error_to_s3
from meshd.server.console.event_stream import EventStreams
from meshd.server.console.oidc_sign_in import COOKIE_SECONDS
from meshd.server.console.signed_request import SessionSigner
from meshd.server.console.static_files import CONFINEMENT, NOT_BUILT, StaticFiles
from meshd.server.request import RequestTrace, request_head
from meshd.server.request_body import RequestBody
from meshd.server.response import Reply, send_reply
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from meshd.auth.identities.console_sessions import ConsoleSession, ConsoleSessions
    from meshd.server.console.oidc_sign_in import OidcSignIn
    from meshd.server.http_route import OpenHandler
    from meshd.server.request import MeshRequest
    from meshd.server.request_dispatcher import NativeRoutes
    from meshd.server.response import Header
    from meshd.server.services import ServerServices

log = logging.getLogger(__name__)

PREFIX: Final = "/-/console"
_OIDC: Final = f"{PREFIX}/oidc/"
_API, _DOWNLOAD, _ASSETS = f"{PREFIX}/api/", f"{PREFIX}/download/", f"{PREFIX}/assets/"
CSRF_HEADER: Final = "x-mesh-console"
_METHODS: Final = ("GET", "HEAD", "POST", "PATCH", "DELETE")
_MAX_SIGN_IN: Final = 16 << 10
_SHORT: Final[tuple[Header, ...]] = (("Cache-Control", "no-store"), *CONFINEMENT)


class SignIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /-/console/session`. `session_token` belongs to temporary credentials."""

    access_key: str
    secret_key: str
    session_token: str = ""

    def __repr__(self) -> str:
        return f"SignIn({self.access_key!r})"


class ConsoleEndpoint:
    """Answers the requests under `/-/console`. One per process."""

    def __init__(
        self,
        deps: ServerServices,
        sessions: ConsoleSessions,
        native: NativeRoutes,
    ) -> None:
        self._deps, self._sessions = deps, sessions
        self._files = StaticFiles()
        self._signer = SessionSigner(deps.clock, deps.http, deps.region)
        self._streams = EventStreams(sessions, self._signer, native.respond, deps.clock)

    def __repr__(self) -> str:
        return f"<ConsoleEndpoint {self._streams!r}>"

    def is_address_of(self, request: MeshRequest) -> bool:
        """Whether a browser opens `/`, or `/console`, which leads to the page unless a bucket has that name.

        S3 answers an unsigned `/` with an error; no client of S3 asks for HTML.
        """
        path = request.raw_path.partition("?")[0]
        return (
            (request.raw_path == "/" or path in ("/console", "/console/"))
            and request.method == "GET"
            and "text/html" in request.headers.get("accept", "")
            and "authorization" not in request.headers
            and (path == "/" or self._deps.bucket_table.get("console") is None)
        )

    async def handle(self, request: MeshRequest, dispatch: OpenHandler) -> Reply:
        """Answer one request; `dispatch` answers what was signed for a session."""
        target = request.raw_path
        if target.startswith((_API, _DOWNLOAD)):
            try:
                await self._sign(request)
            except S3Error as error:
                return await self._send(request, _raise(error))
            return await dispatch(request)
        return await self._send(request, self._answer(request))

    async def _send(self, request: MeshRequest, making: Awaitable[Reply]) -> Reply:
        path = request.raw_path.partition("?")[0]
        # Sign-ins and the requests of a session are audited; files and pages are not.
        signs_in = path in (f"{PREFIX}/session", f"{_OIDC}callback")
        audit = self._deps.audit if signs_in else None
        trace = RequestTrace(self._deps.clock, audit, request.remote)
        trace.operation = _operation(request.method, path)
        trace.target, request.trace = path, trace
        return await send_reply(request, trace, self._reply(request, making), self._deps.mesh)

    async def _reply(self, request: MeshRequest, making: Awaitable[Reply]) -> Reply:
        """Return the response, or an error. Raises only ConnectionError and CancelledError: the client is
        gone."""
        try:
            return await making
        except S3Error as error:
            return self._refuse(request, error)
        except ConnectionError:
            raise
        except ControlError as error:
            return self._refuse(request, control_error_to_s3(error))
        except Exception:
            log.exception("request %s (%s) failed", request.trace.request_id, request.trace.operation)
            if request.response_started:
                raise
            return self._refuse(request, S3Error("InternalError"))

    async def _answer(self, request: MeshRequest) -> Reply:
        path, method = request.raw_path.partition("?")[0], request.method
        if path.startswith(_ASSETS) and method in ("GET", "HEAD"):
            return self._asset(request, path.removeprefix(_ASSETS))
        if path == f"{PREFIX}/" and method in ("GET", "HEAD"):
            return self._page()
        if path in (PREFIX, "/", "/console", "/console/") and method in ("GET", "HEAD"):
            return self._reply_with(302, b"", ("Location", f"{PREFIX}/"))
        if path == f"{PREFIX}/session":
            return await self._session(request)
        if path.startswith(_OIDC) and method == "GET" and self._deps.console_oidc is not None:
            return await self._oidc(request, path.removeprefix(_OIDC), self._deps.console_oidc)
        if path == f"{PREFIX}/events" and method == "GET":
            cookie = self._cookie(request)
            self._check_page(request, self._sessions.open(cookie))
            return await self._streams.send(request, cookie)
        raise S3Error("NoSuchKey", f"There is nothing at {path[:200]}. The console is at {PREFIX}/.")

    # --- files ----------------------------------------------------------------------------------------------

    def _page(self) -> Reply:
        page = self._files.page()
        if page is None:
            return self._reply_with(503, NOT_BUILT.encode(), ("Content-Type", "text/plain; charset=utf-8"))
        body, headers = page
        return self._reply_with(200, body, *headers, ("Cache-Control", "no-store"))

    def _asset(self, request: MeshRequest, name: str) -> Reply:
        found = self._files.find(name)
        if found is None:
            raise S3Error(
                "NoSuchKey",
                f"The console has no file {name[:100]}. Reload the page: the node may have been upgraded.",
            )
        headers: list[Header] = [
            ("Content-Type", found.content_type),
            ("Cache-Control", "public, max-age=31536000, immutable"),  # the name contains a digest
            ("Vary", "Accept-Encoding"),
            *CONFINEMENT,
        ]
        if "gzip" in request.headers.get("accept-encoding", ""):
            return self._reply_with(200, found.compressed, *headers, ("Content-Encoding", "gzip"))
        return self._reply_with(200, found.plain, *headers)

    # --- sessions -------------------------------------------------------------------------------------------

    async def _session(self, request: MeshRequest) -> Reply:
        """GET: who is signed in; POST: sign in; PATCH: renew; DELETE: sign out."""
        if request.method == "POST":
            return await self._sign_in(request)
        cookie = self._cookie(request)
        session = self._sessions.open(cookie)
        request.trace.identity, request.trace.access_key = session.identity, session.identity.access_key
        if request.method == "GET":
            self._check_origin(request)
            return self._describe_session(session)
        self._check_page(request, session)
        if request.method == "PATCH":
            renewed = self._sessions.renew(cookie)
            return self._describe_session(self._sessions.open(renewed), self._set_cookie(request, renewed))
        if request.method == "DELETE":
            return self._reply_with(204, b"", self._set_cookie(request, ""), *_SHORT)
        raise S3Error("MethodNotAllowed")

    async def _sign_in(self, request: MeshRequest) -> Reply:
        self._check_origin(request)
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise S3Error(
                "InvalidArgument", "To sign in, send a JSON document with Content-Type: application/json."
            )
        http = self._deps.http
        body = RequestBody(request, request_head(request, http.max_header_bytes), http.body_timeout)
        data = await body.whole(BodyDigests(), _MAX_SIGN_IN)
        try:
            wanted = msgspec.json.decode(data, type=SignIn)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise S3Error(
                "InvalidArgument", "To sign in, send a JSON object with access_key and secret_key."
            ) from error
        trace = request.trace
        trace.access_key = wanted.access_key[:128]
        cookie = self._sessions.sign_in(wanted.access_key, wanted.secret_key, wanted.session_token)
        session = self._sessions.open(cookie)
        trace.identity = session.identity
        return self._describe_session(session, self._set_cookie(request, cookie))

    def _describe_session(self, session: ConsoleSession, *more: Header) -> Reply:
        identity = session.identity
        document = {
            "user_id": identity.user_id,
            "display_name": identity.display_name,
            "access_key": identity.access_key,
            "root": identity.root,
            "csrf": session.csrf,
            "expires": session.expires,
            "node": self._deps.mesh.node_id,
            "single_node": self._deps.mesh.single_node,
            "grafana": self._deps.http.console_grafana,
        }
        kind = ("Content-Type", "application/json")
        return self._reply_with(200, msgspec.json.encode(document), kind, *_SHORT, *more)

    async def _oidc(self, request: MeshRequest, what: str, oidc: OidcSignIn) -> Reply:
        """`begin`: send the browser to the identity provider; `callback`: it comes back from there.

        The cookie of a sign-in is SameSite=Lax, since the browser comes back from another site.
        """
        host, scheme = request.headers.get("host", ""), "https" if request.secure else "http"
        name, callback = f"{self._cookie_name(request)}-oidc", f"{scheme}://{host}{_OIDC}callback"
        secure = "; Secure" if request.secure else ""
        attributes = f"Path={_OIDC}; HttpOnly; SameSite=Lax{secure}"
        if what == "begin":
            target, cookie = await oidc.begin(callback)
            kept = ("Set-Cookie", f"{name}={cookie}; Max-Age={COOKIE_SECONDS}; {attributes}")
            return self._reply_with(302, b"", ("Location", target), kept, *_SHORT)
        if what == "":  # a page checks whether this sign-in is enabled
            return self._reply_with(204, b"", *_SHORT)
        if what != "callback":
            raise S3Error("NoSuchKey", f"There is nothing here. Sign in at {PREFIX}/.")
        query = request.raw_path.partition("?")[2]
        cookie = await oidc.finish(query, _cookie_value(request, name), callback)
        identity = self._sessions.open(cookie).identity
        request.trace.identity, request.trace.access_key = identity, identity.access_key
        ended = ("Set-Cookie", f"{name}=; Max-Age=0; {attributes}")
        kept = self._set_cookie(request, cookie)
        return self._reply_with(302, b"", ("Location", f"{PREFIX}/"), ended, kept, *_SHORT)

    @staticmethod
    def _cookie_name(request: MeshRequest) -> str:
        # Browsers share cookies between the ports of a host, which may be nodes of several meshes.
        port = request.headers.get("host", "").rpartition(":")[2]
        return f"mesh-console-{port if port.isdigit() else 'default'}"

    def _set_cookie(self, request: MeshRequest, value: str) -> Header:
        ended = "" if value else "; Max-Age=0"
        secure = "; Secure" if request.secure else ""
        return (
            "Set-Cookie",
            f"{self._cookie_name(request)}={value}; Path={PREFIX}; HttpOnly; SameSite=Strict{secure}{ended}",
        )

    def _cookie(self, request: MeshRequest) -> str:
        value = _cookie_value(request, self._cookie_name(request))
        if not value:
            raise S3Error("AccessDenied", "Sign in first.")
        return value

    def _check_page(self, request: MeshRequest, session: ConsoleSession) -> None:
        """Raise S3Error AccessDenied unless a page of the console sent the request."""
        self._check_origin(request)
        token = request.headers.get(CSRF_HEADER, "")
        if not hmac.compare_digest(token.encode(errors="replace"), session.csrf.encode()):
            raise S3Error(
                "AccessDenied", "The request lacks the token of this session. Reload the page of the console."
            )

    @staticmethod
    def _check_origin(request: MeshRequest) -> None:
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
        try:
            foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host", "")
        except ValueError:  # not a URL
            foreign = True
        if foreign or site not in ("same-origin", "none"):
            raise S3Error("AccessDenied", "Requests from other sites are not accepted here.")

    # --- requests of a session ------------------------------------------------------------------------------

    async def _sign(self, request: MeshRequest) -> None:
        """Rewrite the request as one signed with the key of its session. Raises S3Error."""
        session = self._sessions.open(self._cookie(request))
        if request.raw_path.startswith(_API):
            self._check_page(request, session)
            await self._signer.sign(request, "/" + request.raw_path.removeprefix(_API), session)
            return
        self._check_origin(request)
        if request.method not in ("GET", "HEAD"):
            raise S3Error("MethodNotAllowed")
        await self._signer.sign(request, _as_attachment(request.raw_path.removeprefix(_DOWNLOAD)), session)

    def _refuse(self, request: MeshRequest, error: S3Error) -> Reply:
        request.trace.code = error.code
        more = tuple(error.headers.items())
        if request.raw_path.startswith(_OIDC):  # the browser shows it, not the page
            text = ("Content-Type", "text/plain; charset=utf-8")
            return self._reply_with(error.status, f"{error.message}\n".encode(), text, *_SHORT, *more)
        document = {"error": {"code": error.code, "message": error.message}}
        kind = ("Content-Type", "application/json")
        return self._reply_with(error.status, msgspec.json.encode(document), kind, *_SHORT, *more)

    def _reply_with(self, status: int, body: bytes, *headers: Header) -> Reply:
        length = ("Content-Length", str(len(body)))
        return Reply(status, [*headers, length], body, self._deps.clock.now_ms() // 1000)


def _cookie_value(request: MeshRequest, name: str) -> str:
    """Return the value of a cookie, or "". Not with `http.cookies`, which parses none of the cookies if one
    violates RFC 6265 (`a[0]=1`): a browser sends those of all programs on this host."""
    for pair in request.headers.get("cookie", "").split(";"):
        found, _, value = pair.strip().partition("=")
        if found == name:
            return value
    return ""


async def _raise(error: S3Error) -> Reply:
    raise error


def _operation(method: str, path: str) -> str:
    """Return the operation of a request for metrics: one of a fixed set, whatever clients send."""
    named = (f"{PREFIX}/", f"{PREFIX}/session", f"{PREFIX}/events", f"{_OIDC}begin", f"{_OIDC}callback")
    below = (each for each in (_ASSETS, _API, _DOWNLOAD) if path.startswith(each))
    place = path if path in named else next(below, PREFIX)
    return f"{method if method in _METHODS else 'OTHER'} {place}"


def _as_attachment(target: str) -> str:
    """Return the target of an object as a download: a browser saves it, whatever its type, and never shows
    it."""
    path, _, query = target.partition("?")
    name = unquote(path.rstrip("/").rpartition("/")[2]) or "object"
    asked = [part for part in query.split("&") if part.startswith("versionId=")]
    disposition = quote(f"attachment; filename*=UTF-8''{quote(name, safe='')}", safe="")
    asked += [
        f"response-content-disposition={disposition}",
        "response-content-type=application%2Foctet-stream",
    ]
    return f"/{path}?{'&'.join(asked)}"
