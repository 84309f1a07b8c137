"""Admin API over signed JSON: users, keys, policies, log level; `/-/sts` and `/-/whoami`.

A handler parses, calls the service and answers. Only root may call `/-/admin/`; every signed caller may call
the other two. Every error is `{"error": {code, message, request_id, detail, help}}`. Unknown query parameters
and fields are refused, because a typing error must not widen anybody's rights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec

from meshd.auth.identities.admin_errors import MAX_PAGE, AdminError, iso_time
from meshd.auth.identities.sts_sessions import SessionRequest
from meshd.auth.identities.users import KeyChange, NewKey, NewUser, UserChange
from meshd.control.control_api import ControlError
from meshd.server.api.log_level import LevelDuration
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import Operation, describe_as, operation
from meshd.server.response import Reply
from meshwire.sigv4 import STREAMING_PAYLOADS, UNSIGNED_PAYLOAD, Claim

if TYPE_CHECKING:
    from meshd.auth.identities.admin_errors import Code, Page
    from meshd.auth.identities.named_policies import PolicyAdmin
    from meshd.auth.identities.sts_sessions import CredentialService, SessionRevocation
    from meshd.auth.identities.users import IdentityAdmin
    from meshd.auth.identity import Identity
    from meshd.server.api.log_level import LogLevelService
    from meshd.server.request import MeshRequest
    from meshd.server.response import Header
    from meshd.util.clock import Clock


STATUS: Mapping[Code, int] = {
    "BadRequest": 400,
    "InvalidPolicy": 400,
    "AccessDenied": 403,
    "NoSuchUser": 404,
    "NoSuchAccessKey": 404,
    "NoSuchPolicy": 404,
    "NoSuchProvider": 404,
    "NoSuchRole": 404,
    "NotFound": 404,
    "MethodNotAllowed": 405,
    "UserExists": 409,
    "AccessKeyExists": 409,
    "UserOwnsBuckets": 409,
    "PolicyInUse": 409,
    "ProviderExists": 409,
    "ProviderInUse": 409,
    "RoleExists": 409,
    "NotChangeableHere": 409,
    "NoSuchNode": 404,
    "NotNow": 409,
    "Unavailable": 503,
}
_PREFIX = "/-/admin/"
_LIMIT = 100

T = TypeVar("T")
Query = Mapping[str, str]
ActionResult = tuple[int, object]
Action = Callable[["MeshRequest", tuple[str, ...], Query], Awaitable[ActionResult]]


class AdminEndpoint:
    """The admin API. One instance per worker; stateless."""

    def __init__(
        self,
        identities: IdentityAdmin,
        policies: PolicyAdmin,
        revocation: SessionRevocation,
        log_level: LogLevelService,
        clock: Clock,
        more: Mapping[tuple[str, str], tuple[Action, tuple[str, ...]]],
    ) -> None:
        """`more`: further actions, in the form of the table."""
        self._identities, self._policies, self._clock = identities, policies, clock
        self._revocation, self._log_level = revocation, log_level
        # (method, path where * stands for one name, query parameters)
        self._table: Mapping[tuple[str, str], tuple[Action, tuple[str, ...]]] = {
            ("GET", "users"): (self._list_users, ("after", "limit")),
            ("POST", "users"): (self._add_user, ()),
            ("GET", "users/*"): (self._user, ()),
            ("PATCH", "users/*"): (self._change_user, ()),
            ("DELETE", "users/*"): (self._remove_user, ("force",)),
            ("PUT", "users/*/policies/*"): (self._attach_to_user, ()),
            ("DELETE", "users/*/policies/*"): (self._detach_from_user, ()),
            ("DELETE", "users/*/sessions"): (self._revoke_of_user, ("before",)),
            ("GET", "keys"): (self._list_keys, ("after", "limit", "user")),
            ("POST", "keys"): (self._add_key, ()),
            ("GET", "keys/*"): (self._key, ()),
            ("PATCH", "keys/*"): (self._change_key, ()),
            ("DELETE", "keys/*"): (self._remove_key, ()),
            ("PUT", "keys/*/policies/*"): (self._attach_to_key, ()),
            ("DELETE", "keys/*/policies/*"): (self._detach_from_key, ()),
            ("DELETE", "keys/*/sessions"): (self._revoke_of_key, ("before",)),
            ("GET", "policies"): (self._list_policies, ("after", "limit")),
            ("GET", "policies/*"): (self._policy, ()),
            ("PUT", "policies/*"): (self._put_policy, ()),
            ("DELETE", "policies/*"): (self._remove_policy, ("force",)),
            ("GET", "log-level"): (self._level, ()),
            ("PUT", "log-level/*"): (self._change_level, ()),
            ("DELETE", "log-level"): (self._reset_level, ()),
            **more,
        }

    def routes(self) -> list[HttpRoute]:
        """Return the routes; all of them require a signature."""
        methods = sorted({method for method, _ in self._table})
        return [
            HttpRoute(method, _PREFIX, describe_as(partial(self._administer), self._operations(method)))
            for method in methods
        ]

    def _operations(self, method: str) -> tuple[Operation, ...]:
        """Describe the actions of the table."""
        accepts: Literal["json"] | None = "json" if method in ("POST", "PUT", "PATCH") else None
        return tuple(
            Operation(
                _PREFIX + _path_pattern(place),
                action.__name__.strip("_").replace("_", " ").capitalize(),
                known,
                accepts=accepts,
                status=201 if method == "POST" else 200,
            )
            for (other, place), (action, known) in self._table.items()
            if other == method
        )

    async def _administer(self, request: MeshRequest, identity: Identity) -> Reply:
        try:
            check_root(identity)
            check_fully_signed(request)
            action, names, query = self._find(request)
            status, document = await action(request, names, query)
        except AdminError as error:
            return admin_error_reply(request, error, self._now())
        except ControlError as error:
            return admin_error_reply(request, AdminError("Unavailable", str(error)), self._now())
        return json_reply(status, document, self._now())

    def _find(self, request: MeshRequest) -> tuple[Action, tuple[str, ...], Query]:
        path, _, raw_query = request.raw_path.partition("?")
        parts = [unquote(part) for part in path.removeprefix(_PREFIX).rstrip("/").split("/")]
        place = "/".join("*" if number % 2 else part for number, part in enumerate(parts))
        found = self._table.get((request.method, place))
        if found is None:
            methods = [method for method, other in self._table if other == place]
            if methods:
                raise AdminError("MethodNotAllowed", f"{path[:200]} supports {', '.join(methods)}")
            raise AdminError(
                "NotFound", f"there is nothing at {path[:200]}", help="docs/access.md lists the paths"
            )
        action, known = found
        return action, tuple(parts[1::2]), _query(raw_query, known)

    # --- users --------------------------------------------------------------------------------------

    async def _list_users(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, listed("users", self._identities.list_users(query.get("after", ""), read_limit(query)))

    async def _add_user(self, request: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 201, await self._identities.add_user(await _read(request, NewUser))

    async def _user(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, self._identities.get_user(names[0])

    async def _change_user(self, request: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, await self._identities.change_user(names[0], await _read(request, UserChange))

    async def _remove_user(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        await self._identities.remove_user(names[0], force=read_flag(query, "force"))
        return 200, {"removed": names[0]}

    async def _attach_to_user(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        await self._policies.attach_to_user(*names)
        return 200, self._identities.get_user(names[0])

    async def _detach_from_user(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        await self._policies.detach_from_user(*names)
        return 200, self._identities.get_user(names[0])

    async def _revoke_of_user(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, await self._revocation.revoke_user(names[0], query.get("before", ""))

    # --- keys ---------------------------------------------------------------------------------------

    async def _list_keys(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        found = self._identities.list_keys(query.get("user", ""), query.get("after", ""), read_limit(query))
        return 200, listed("keys", found)

    async def _add_key(self, request: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 201, await self._identities.add_key(await _read(request, NewKey))

    async def _key(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, self._identities.get_key(names[0])

    async def _change_key(self, request: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, await self._identities.change_key(names[0], await _read(request, KeyChange))

    async def _remove_key(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        await self._identities.remove_key(names[0])
        return 200, {"removed": names[0]}

    async def _attach_to_key(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        await self._policies.attach_to_key(*names)
        return 200, self._identities.get_key(names[0])

    async def _detach_from_key(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        await self._policies.detach_from_key(*names)
        return 200, self._identities.get_key(names[0])

    async def _revoke_of_key(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, await self._revocation.revoke_key(names[0], query.get("before", ""))

    # --- policies -----------------------------------------------------------------------------------

    async def _list_policies(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, listed(
            "policies", self._policies.list_policies(query.get("after", ""), read_limit(query))
        )

    async def _policy(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, self._policies.get_policy(names[0])

    async def _put_policy(self, request: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        shown, made = await self._policies.put_policy(names[0], await request.read())
        return 201 if made else 200, shown

    async def _remove_policy(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        await self._policies.remove_policy(names[0], force=read_flag(query, "force"))
        return 200, {"removed": names[0]}

    # --- this node ----------------------------------------------------------------------------------

    async def _level(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, self._log_level.current_level()

    async def _change_level(self, request: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, self._log_level.set_level(names[0], await _read(request, LevelDuration))

    async def _reset_level(self, _: MeshRequest, names: tuple[str, ...], query: Query) -> ActionResult:
        return 200, self._log_level.reset_level()

    def _now(self) -> int:
        return self._clock.now_ms() // 1000


def _path_pattern(place: str) -> str:
    """Return a path with a name in braces for each `*`: `users/*` is `users/{user}`."""
    parts = place.split("/")
    for number in range(1, len(parts), 2):
        parts[number] = f"{{{_SINGULAR.get(parts[number - 1], parts[number - 1].rstrip('s'))}}}"
    return "/".join(parts)


_SINGULAR = {"policies": "policy", "log-level": "level"}


def check_root(identity: Identity) -> None:
    if not identity.root or identity.session is not None:
        what = "temporary credentials may not" if identity.session else "only root may"
        raise AdminError("AccessDenied", f"{what} use the admin API", help="sign with the node's root key")


def check_fully_signed(request: MeshRequest) -> None:
    """Raise AdminError unless the signature is in the headers and covers query and body.

    A presigned URL may be passed on to others, and parts can be added to a request with signature version 2.
    """
    claim = request.claim
    if not isinstance(claim, Claim) or claim.presigned:
        raise AdminError(
            "AccessDenied", "presigned URLs are not accepted here; sign the headers with signature version 4"
        )
    if request.body_exists and claim.payload_hash in (UNSIGNED_PAYLOAD, *STREAMING_PAYLOADS):
        raise AdminError("AccessDenied", "sign the body too: x-amz-content-sha256 must be its digest")


def json_reply(status: int, document: object, now: int) -> Reply:
    """Return a JSON reply that no cache may store, since it may contain a secret."""
    body = msgspec.json.encode(document)
    headers: list[Header] = [
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
    ]
    return Reply(status, headers, body, now)


def admin_error_reply(request: MeshRequest, error: AdminError, now: int) -> Reply:
    """Render `error` in the shape of the native protocol."""
    request.trace.code = error.code
    document = {
        "code": error.code,
        "message": error.message,
        "request_id": request.trace.request_id,
        "detail": error.detail,
        "help": error.help,
    }
    return json_reply(STATUS[error.code], {"error": document}, now)


async def read_document(request: MeshRequest, kind: type[T]) -> T:
    """Decode the request's JSON body. Raises AdminError BadRequest, which names the place and quotes no
    value."""
    body = await request.read()
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AdminError("BadRequest", f"the body is not valid: {error}") from None


_read = read_document


def listed(name: str, found: Page) -> dict[str, Any]:
    """Return the document of a page; its entries are under `name`."""
    return {name: found.items, "next": found.next}


def _query(raw: str, known: tuple[str, ...]) -> Query:
    pairs = [pair for pair in parse_qsl(raw, keep_blank_values=True) if not pair[0].startswith("X-Amz-")]
    query = dict(pairs)
    if len(query) != len(pairs):
        raise AdminError("BadRequest", "a query parameter is given twice")
    for name in query:
        if name not in known:
            raise AdminError(
                "BadRequest",
                f"unknown query parameter {name[:80]!r}; known parameters: {', '.join(known) or 'none'}",
            )
    return query


def read_limit(query: Query) -> int:
    """Return how many entries a page has. Raises AdminError BadRequest."""
    text = query.get("limit", str(_LIMIT))
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MAX_PAGE):
        raise AdminError("BadRequest", f"limit must be a number from 1 to {MAX_PAGE}")
    return int(text)


def read_flag(query: Query, name: str) -> bool:
    """Return a parameter that is true or false. Raises AdminError BadRequest."""
    text = query.get(name, "false")
    if text not in ("true", "false"):
        raise AdminError("BadRequest", f"{name} must be true or false")
    return text == "true"


class StsEndpoint:
    """Issues temporary credentials and answers whoami. One instance per worker; stateless."""

    def __init__(self, sessions: CredentialService, clock: Clock) -> None:
        self._sessions, self._clock = sessions, clock

    def routes(self) -> list[HttpRoute]:
        """Return the routes; both require a signature."""
        return [
            HttpRoute("POST", "/-/sts", self._sts),
            HttpRoute("GET", "/-/whoami", self._whoami),
        ]

    @operation("/-/sts", "Temporary credentials", accepts="json")
    async def _sts(self, request: MeshRequest, identity: Identity) -> Reply:
        try:
            check_fully_signed(request)
            wanted = await read_document(request, SessionRequest)
            document = self._sessions.issue(identity, wanted)
        except AdminError as error:
            return admin_error_reply(request, error, self._now())
        return json_reply(200, document, self._now())

    @operation("/-/whoami", "Who signed the request")
    async def _whoami(self, request: MeshRequest, identity: Identity) -> Reply:
        if request.method == "HEAD":
            return admin_error_reply(request, AdminError("MethodNotAllowed", "use GET"), self._now())
        session = identity.session
        document = {
            "user_id": identity.user_id,
            "arn": identity.arn,
            "display_name": identity.display_name,
            "access_key": identity.access_key,
            "root": identity.root,
            "bound": bool(identity.bounds),
            "temporary": session is not None,
        }
        if session is not None:
            document |= {
                "name": session.name,
                "made_with": session.parent,
                "expiration": iso_time(session.expires * 1000),
            }
            if session.role:
                document |= {"role": session.role, "subject": session.subject}
        return json_reply(200, document, self._now())

    def _now(self) -> int:
        return self._clock.now_ms() // 1000
