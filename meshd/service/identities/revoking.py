"""Temporary credentials ended before their time: all of a user's or a key's, or those issued before a time.

Law: nothing is kept of what was issued; what ends it stands with the user or key, which every verification
looks at anyway. Ending all counts *rounds* and compares no clocks; a time is compared with that of the node
that issued. Invariant: what has ended stays so; what is asked for afterwards works at once.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from meshd.control.identities import Ended, Key, User
from meshd.service.identities.errors import AdminError, no_key, no_user
from meshd.service.identities.paging import iso_time

if TYPE_CHECKING:
    from meshd.control.identities import IdentityTable
    from meshd.kit.clock import Clock

_log = logging.getLogger("meshd.admin")


class Revoking:
    """One a worker; all state is the control store's."""

    def __init__(self, table: IdentityTable, clock: Clock) -> None:
        self._table, self._clock = table, clock

    def __repr__(self) -> str:
        return "<Revoking>"

    async def of_user(self, user_id: str, before: str) -> dict[str, Any]:
        """End those made with any key of a user. Raises AdminError NoSuchUser, BadRequest."""
        since, ended = self._since(before), list[Ended]()

        def end(old: User | None) -> User:
            if old is None:
                raise no_user(user_id)
            ended[:] = [self._ended(old.ended, since)]
            return replace(old, ended=ended[0])

        await self._table.change(User, user_id, end)
        _log.warning("sessions of a user revoked", extra={"user": user_id, "before": before or "now"})
        return {"user_id": user_id, **shown(ended[0])}

    async def of_key(self, access_key: str, before: str) -> dict[str, Any]:
        """End those made with a key. Raises AdminError NoSuchAccessKey, BadRequest."""
        since, ended = self._since(before), list[Ended]()

        def end(old: Key | None) -> Key:
            if old is None:
                raise no_key(access_key)
            ended[:] = [self._ended(old.ended, since)]
            return replace(old, ended=ended[0])

        await self._table.change(Key, access_key, end)
        _log.warning("sessions of a key revoked", extra={"key": access_key, "before": before or "now"})
        return {"access_key": access_key, **shown(ended[0])}

    def _ended(self, old: Ended, since: int) -> Ended:
        now = self._clock.now_ms()
        if not since:
            return replace(old, round=old.round + 1, at_ms=now)
        return replace(old, before=max(old.before, since), at_ms=now)

    def _since(self, before: str) -> int:
        """In seconds since 1970; 0 where nothing is said. Raises AdminError BadRequest."""
        if not before:
            return 0
        try:
            when = datetime.fromisoformat(before)
        except ValueError:
            raise AdminError(
                "BadRequest", f"before is a time such as 2026-11-22T03:00:00Z, not {before[:60]!r}"
            ) from None
        seconds = int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())
        if not 0 < seconds <= self._clock.now_ms() // 1000:
            raise AdminError(
                "BadRequest",
                f"before is a time that has been, not {before[:60]}",
                help="leave it out to end all that were issued until now",
            )
        return seconds


def shown(ended: Ended) -> dict[str, Any]:
    """When sessions were revoked last, and, if by a time, up to which."""
    return {
        "sessions_revoked": iso_time(ended.at_ms) if ended.at_ms else "",
        "sessions_before": iso_time(ended.before * 1000) if ended.before else "",
    }
