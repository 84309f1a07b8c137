"""Keys that are renewed while they are used, in a file: as `credential_process` has them, or as
`meshd admin key add --json` prints them. It is read when it changes.

Law: what was read stays in force until something better is there; no message says a secret. Thread-safe: the
newest credential is one value.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from meshsdk.errors import ConfigurationError
from meshwire.sigv4 import Credential

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE: Final = "MESH_CREDENTIALS_FILE"
_AWS: Final = ("AccessKeyId", "SecretAccessKey", "SessionToken")
_OURS: Final = ("access_key", "secret_key", "session_token")
_LOOK: Final = 10.0  # seconds from one look at the file to the next


def read_keys(path: str) -> Credential:
    """What a file says. Raises ConfigurationError."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        names = _OURS if "access_key" in found else _AWS
        token = found.get(names[2]) or None
        return Credential(str(found[names[0]]), str(found[names[1]]), token)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"{VARIABLE}={path} cannot be used ({type(error).__name__}): expected JSON with AccessKeyId, "
            "SecretAccessKey and perhaps SessionToken (meshd admin sts), or access_key and secret_key "
            "(meshd admin key add --json)"
        ) from None


class RenewedKeys:
    """`now()` is the credential to sign with. `path`: "" where it never changes."""

    def __init__(self, path: str, first: Credential, clock: Callable[[], float]) -> None:
        self.path, self._credential, self._clock = path, first, clock
        self._seen, self._next = (0, 0, 0), 0.0
        self._trouble = ""

    def __repr__(self) -> str:
        return f"<RenewedKeys {self.path}>"

    def now(self) -> Credential:
        """The newest; the file is looked at every now and then."""
        if self.path and self._clock() >= self._next:
            self._look()
        return self._credential

    def instead(self, refused: Credential | None) -> Credential | None:
        """What to sign with in place of keys that a node does not take; None where there is nothing else. The
        file is looked at now. `refused`: None where it is not known what was signed with.
        """
        if not self.path:
            return None
        self._look()
        return None if self._credential == refused else self._credential

    def told(self) -> str:
        """What the file is about, for who was refused with what it says; "" without one."""
        if not self.path or self._trouble:
            return self._trouble
        changed = datetime.fromtimestamp(self._seen[0] / 1e9, UTC)
        return (
            f"{VARIABLE}={self.path} has no others: it was last written at {changed:%Y-%m-%d %H:%M:%S} UTC."
        )

    def _look(self) -> None:
        self._next = self._clock() + _LOOK
        try:
            found = os.stat(self.path)
            changed = (found.st_mtime_ns, found.st_ino, found.st_size)
            if changed != self._seen:
                self._credential, self._seen = read_keys(self.path), changed
            self._trouble = ""
        except (
            OSError
        ) as error:  # while it is replaced; the old ones are in force until the node says otherwise
            self._trouble = f"{VARIABLE}={self.path} cannot be read ({type(error).__name__})."
        except ConfigurationError as error:
            self._trouble = f"{error}."
