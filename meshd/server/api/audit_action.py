"""Action of the admin API: the last lines of the audit logs of all nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.auth.identities.admin_responses import AdminError
from meshd.cluster.audit_trail import NO_FILE
from meshd.server.api.admin import read_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.cluster.audit_trail import AuditTrail
    from meshd.server.api.admin import Action, ActionResult, Query
    from meshd.server.request import MeshRequest

Names = tuple[str, ...]


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
                help="set audit-log to a path; a log on the standard output is where that is collected",
            )
        raise AdminError("Unavailable", f"this node: {why}")
