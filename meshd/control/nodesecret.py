"""The secret from which this mesh derives what it must recognise later: session tokens, say.

Law: made once, whoever comes first, and then only read; it never leaves the processes of the daemon.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

from meshd.control.interface import ABSENT, ControlError, VersionConflictError

if TYPE_CHECKING:
    from meshd.control.interface import ControlStore

_TOPIC, _KEY = "secrets", "secrets/node"
_BYTES = 32


class NodeSecret:
    """Keys derived from the secret, one for each purpose."""

    def __init__(self, control: ControlStore) -> None:
        self._control = control
        self._value = b""

    def __repr__(self) -> str:
        return "<NodeSecret>"

    async def ensure(self) -> None:
        """Make the secret unless there is one already."""
        if _KEY not in self._control.peek(_TOPIC):
            try:
                await self._control.put(_KEY, secrets.token_bytes(_BYTES), expect=ABSENT)
            except VersionConflictError:
                return  # another process or node was quicker: its secret counts

    def derive(self, purpose: str) -> bytes:
        """32 bytes, always the same for a purpose. Raises ControlError before `ensure`."""
        if not self._value:
            entry = self._control.peek(_TOPIC).get(_KEY)
            if entry is None:
                raise ControlError("this node has no secret yet; restart it")
            self._value = entry.value
        return hmac.digest(self._value, purpose.encode(), "sha256")
