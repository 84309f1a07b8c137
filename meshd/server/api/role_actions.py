"""Actions of the admin API on identity providers and roles (`/-/admin/idps`, `/-/admin/roles`), and on the
audit logs of all nodes (`/-/admin/audit`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.auth.identities.admin_errors import AdminError
from meshd.auth.identities.roles import NewProvider, NewRole, ProviderChange, RoleChange
from meshd.cluster.scatter_gather import NO_FILE
from meshd.server.api.admin import listed, read_document, read_flag, read_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.auth.identities.roles import RoleAdmin
    from meshd.auth.identities.sts_sessions import SessionRevocation
    from meshd.cluster.scatter_gather import AuditTrail
    from meshd.server.api.admin import Action, ActionResult, Query
    from meshd.server.request import MeshRequest


Names = tuple[str, ...]


class RoleActions:
    """The actions. One instance per worker; stateless."""

    def __init__(self, roles: RoleAdmin, revocation: SessionRevocation) -> None:
        self._roles, self._revocation = roles, revocation

    def __repr__(self) -> str:
        return f"<RoleActions {self._roles!r}>"

    def table(self) -> Mapping[tuple[str, str], tuple[Action, Names]]:
        """Return (method, path where * stands for one name) → the action and its query parameters."""
        return {
            ("GET", "idps"): (self._list_providers, ("after", "limit")),
            ("POST", "idps"): (self._add_provider, ()),
            ("GET", "idps/*"): (self._provider, ()),
            ("PATCH", "idps/*"): (self._change_provider, ()),
            ("DELETE", "idps/*"): (self._remove_provider, ("force",)),
            ("GET", "idps/*/keys"): (self._provider_keys, ()),
            ("GET", "roles"): (self._list_roles, ("after", "limit")),
            ("POST", "roles"): (self._add_role, ()),
            ("GET", "roles/*"): (self._role, ()),
            ("PATCH", "roles/*"): (self._change_role, ()),
            ("DELETE", "roles/*"): (self._remove_role, ()),
            ("PUT", "roles/*/policies/*"): (self._attach, ()),
            ("DELETE", "roles/*/policies/*"): (self._detach, ()),
            ("DELETE", "roles/*/sessions"): (self._revoke, ("before",)),
        }

    async def _list_providers(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 200, listed("idps", self._roles.list_providers(query.get("after", ""), read_limit(query)))

    async def _add_provider(self, request: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 201, await self._roles.add_provider(await read_document(request, NewProvider))

    async def _provider(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 200, self._roles.get_provider(names[0])

    async def _change_provider(self, request: MeshRequest, names: Names, query: Query) -> ActionResult:
        change = await read_document(request, ProviderChange)
        return 200, await self._roles.change_provider(names[0], change)

    async def _remove_provider(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        await self._roles.remove_provider(names[0], force=read_flag(query, "force"))
        return 200, {"removed": names[0]}

    async def _provider_keys(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 200, await self._roles.fetch_keys(names[0])

    async def _list_roles(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 200, listed("roles", self._roles.list_roles(query.get("after", ""), read_limit(query)))

    async def _add_role(self, request: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 201, await self._roles.add_role(await read_document(request, NewRole))

    async def _role(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 200, self._roles.get_role(names[0])

    async def _change_role(self, request: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 200, await self._roles.change_role(names[0], await read_document(request, RoleChange))

    async def _remove_role(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        await self._roles.remove_role(names[0])
        return 200, {"removed": names[0]}

    async def _attach(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 200, await self._roles.attach_policy(*names)

    async def _detach(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 200, await self._roles.detach_policy(*names)

    async def _revoke(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        return 200, await self._revocation.revoke_role(names[0], query.get("before", ""))


class AuditAction:
    """Answers `GET /-/admin/audit`. One per worker."""

    def __init__(self, trail: AuditTrail) -> None:
        self._trail = trail

    def __repr__(self) -> str:
        return f"<AuditAction {self._trail!r}>"

    def table(self) -> Mapping[tuple[str, str], tuple[Action, Names]]:
        """Return (method, path) → the action and its query parameters."""
        return {("GET", "audit"): (self._read, ("limit", "containing"))}

    async def _read(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        found = await self._trail.of_all_nodes(read_limit(query), query.get("containing", ""))
        if found["entries"] or not (why := found["missing"].get(found["node"])):
            return 200, found
        if why == NO_FILE:
            raise AdminError(
                "NotFound",
                "this node has no audit log in a file",
                help="set audit-log to a path; a log on standard output is wherever that output is collected",
            )
        raise AdminError("Unavailable", f"this node: {why}")
