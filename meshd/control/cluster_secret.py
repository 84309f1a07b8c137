"""Cluster secret: the random secret from which keys for session tokens and peer signatures are derived.

Law: the first process to start creates it; after that it is only read. It never leaves the daemon's
processes.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

from meshd.control.control_api import ABSENT, ControlError, VersionConflictError

if TYPE_CHECKING:
    from meshd.control.control_api import ControlStore

_TOPIC, _KEY = "secrets", "secrets/node"
_BYTES = 32


class ClusterSecret:
    """Derives a key for each purpose from the secret."""

    def __init__(self, control: ControlStore) -> None:
        self._control = control
        self._value = b""

    async def create_if_missing(self) -> None:
        """Creates the secret unless there is one."""
        if _KEY not in self._control.cached_entries(_TOPIC):
            try:
                await self._control.put(_KEY, secrets.token_bytes(_BYTES), expect=ABSENT)
            except VersionConflictError:
                return  # another process or node has created it first

    def derive_key(self, purpose: str) -> bytes:
        """Returns 32 bytes, always the same for a purpose. Raises ControlError before `create_if_missing`."""
        if not self._value:
            entry = self._control.cached_entries(_TOPIC).get(_KEY)
            if entry is None:
                raise ControlError("this node has no secret yet; restart it")
            self._value = entry.value
        return hmac.digest(self._value, purpose.encode(), "sha256")
