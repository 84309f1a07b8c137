"""Keys that are renewed while they are used, in a file: as `credential_process` has them, or as
`meshd admin key add --json` prints them. It is read when it changes.

Law: what was read stays in force until something better is there; no message says a secret. Thread-safe: the
newest credential is one value.
"""

from __future__ import annotations

import json
import os
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
    """`now(clock)` is the credential to sign with."""

    def __init__(self, path: str, first: Credential, clock: Callable[[], float]) -> None:
        self._path, self._credential, self._clock = path, first, clock
        self._seen, self._next = 0.0, 0.0

    def __repr__(self) -> str:
        return f"<RenewedKeys {self._path}>"

    def now(self) -> Credential:
        """The newest."""
        if not self._path:
            return self._credential
        moment = self._clock()
        if moment < self._next:
            return self._credential
        self._next = moment + _LOOK
        try:
            changed = os.stat(self._path).st_mtime
            if changed != self._seen:
                self._credential = read_keys(self._path)
                self._seen = changed
        except (OSError, ConfigurationError):
            pass  # while it is replaced; the old ones are in force until the node says otherwise
        return self._credential
