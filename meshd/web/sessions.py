"""`POST /-/sts` and `GET /-/whoami`: temporary credentials, and who the server takes the caller for.

Law: for every signed caller; what is asked for in a body must be signed with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.service.identities.errors import AdminError
from meshd.service.identities.paging import iso_time
from meshd.service.identities.temporary import SessionRequest
from meshd.web.admin import check_signed_whole, json_reply, read_document, refusal
from meshd.web.server import NativeRoute

if TYPE_CHECKING:
    from aiohttp import web

    from meshd.kit.clock import Clock
    from meshd.service.authorization.access import Identity
    from meshd.service.identities.temporary import Sessions
    from meshd.web.incoming import MeshRequest


class SessionEndpoint:
    """One a worker; holds no state of its own."""

    def __init__(self, sessions: Sessions, clock: Clock) -> None:
        self._sessions, self._clock = sessions, clock

    def __repr__(self) -> str:
        return "<SessionEndpoint>"

    def routes(self) -> list[NativeRoute]:
        """Both of them signed."""
        return [
            NativeRoute("POST", "/-/sts", self._sts),
            NativeRoute("GET", "/-/whoami", self._whoami),
        ]

    async def _sts(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        try:
            check_signed_whole(request)
            wanted = await read_document(request, SessionRequest)
            document = self._sessions.make(identity, wanted)
        except AdminError as error:
            return refusal(request, error, self._now())
        return json_reply(200, document, self._now())

    async def _whoami(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        if request.method == "HEAD":
            return refusal(request, AdminError("MethodNotAllowed", "use GET"), self._now())
        session = identity.session
        document = {
            "user_id": identity.user_id,
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
        return json_reply(200, document, self._now())

    def _now(self) -> int:
        return self._clock.now_ms() // 1000
