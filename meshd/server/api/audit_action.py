"""Action of the admin API: the last lines of this node's audit log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshd.auth.identities.admin_responses import AdminError
from meshd.server.api.admin import read_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.server.api.admin import Action, ActionResult, Query
    from meshd.server.request import MeshRequest
    from meshd.telemetry.audit_tail import AuditTail

Names = tuple[str, ...]


class AuditAction:
    """Answers `GET /-/admin/audit`. One per worker."""

    def __init__(self, node_id: str, tail: AuditTail) -> None:
        self._node_id, self._tail = node_id, tail

    def __repr__(self) -> str:
        return f"<AuditAction {self._tail!r}>"

    def table(self) -> Mapping[tuple[str, str], tuple[Action, Names]]:
        """Return (method, path) → the action and its query parameters."""
        return {("GET", "audit"): (self._read, ("limit", "containing"))}

    async def _read(self, _: MeshRequest, names: Names, query: Query) -> ActionResult:
        if not self._tail.is_readable:
            raise AdminError(
                "NotFound",
                "this node has no audit log in a file",
                help="set audit-log to a path; a log on the standard output is where that is collected",
            )
        limit, containing = read_limit(query), query.get("containing", "")
        try:
            found = await asyncio.to_thread(self._tail.read, limit, containing)
        except OSError as error:
            raise AdminError("Unavailable", f"the audit log cannot be read: {error.strerror}") from error
        return 200, {"node": self._node_id, "entries": found}
