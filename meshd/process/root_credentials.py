"""Root credentials: from the environment, or generated on first start and stored in the data directory.

The file has mode 600 and is complete before it gets its name. A generated key pair is shown exactly once.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import msgspec

from meshd.config import ConfigError
from meshd.control.identities import Account, Key, User, check_keys, new_access_key, new_secret_key
from meshd.util.durable_directories import sync_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ACCESS_KEY_ENV, SECRET_KEY_ENV = "MESHD_ROOT_ACCESS_KEY", "MESHD_ROOT_SECRET_KEY"
ROOT_USER = "root"
_FILE = "root-credentials.json"


class RootCredentials(msgspec.Struct, frozen=True):
    """The root key pair; `generated`: by this start."""

    access_key: str
    secret_key: str
    generated: bool = False

    def __repr__(self) -> str:
        return f"RootCredentials(access_key={self.access_key!r}, made={self.generated})"

    def account(self) -> Account:
        """Return the root user with this key."""
        return Account(
            User(user_id=ROOT_USER, display_name=ROOT_USER, root=True, origin="root"),
            Key(access_key=self.access_key, user_id=ROOT_USER, secret_key=self.secret_key, origin="root"),
        )


def root_credentials(data_dir: Path, env: Mapping[str, str]) -> RootCredentials:
    """Return the pair from the environment, else from the file, else a new one that is stored. Raises
    ConfigError."""
    given = env.get(ACCESS_KEY_ENV, ""), env.get(SECRET_KEY_ENV, "")
    if any(given):
        return _from_environment(*given)
    return stored_credentials(data_dir) or generate_credentials(data_dir)


def has_environment_credentials(env: Mapping[str, str]) -> bool:
    """Whether the environment sets the key pair."""
    return bool(env.get(ACCESS_KEY_ENV) or env.get(SECRET_KEY_ENV))


def stored_credentials(data_dir: Path) -> RootCredentials | None:
    """Return the pair in the file, or None without a file. Raises ConfigError."""
    path = data_dir / _FILE
    return _read(path) if path.exists() else None


def _from_environment(access_key: str, secret_key: str) -> RootCredentials:
    try:
        check_keys(access_key, secret_key)
    except ValueError as error:
        raise ConfigError(
            f"{ACCESS_KEY_ENV} and {SECRET_KEY_ENV} must both be set and valid: {error}"
        ) from None
    return RootCredentials(access_key, secret_key)


def _read(path: Path) -> RootCredentials:
    try:
        document = json.loads(path.read_bytes())
        pair = RootCredentials(str(document["access_key"]), str(document["secret_key"]))
        check_keys(pair.access_key, pair.secret_key)
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path} is not a valid key pair file; set {ACCESS_KEY_ENV} and {SECRET_KEY_ENV}, "
            "or remove the file to get a new pair"
        ) from None
    return pair


def generate_credentials(data_dir: Path) -> RootCredentials:
    """Generate a key pair and store it."""
    pair = RootCredentials(new_access_key(), new_secret_key(), generated=True)
    store_credentials(data_dir, pair)
    return pair


def store_credentials(data_dir: Path, pair: RootCredentials) -> None:
    """Store a key pair in the file, durably."""
    path = data_dir / _FILE
    text = json.dumps({"access_key": pair.access_key, "secret_key": pair.secret_key}) + "\n"
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    sync_directory(data_dir)
