"""Users file: a YAML list of {user_id, display_name, email, access_key, secret_key}.

The file is read completely or not at all. Every error names the line; an error never contains a secret.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import yaml

from meshd.config import ConfigError
from meshd.control.identities import Account, Key, User, check_keys
from meshd.control.roles import ROLE_PREFIX
from meshd.process.root_credentials import ROOT_USER

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_REQUIRED = ("user_id", "access_key", "secret_key")
_FIELDS = (*_REQUIRED, "display_name", "email")
_MAX_BYTES = 8 << 20
_MAX_USER_ID = 256


def read_users(path: Path, reserved: Iterable[str] = ()) -> tuple[Account, ...]:
    """Read the users of a file. `reserved` access keys may not appear. Raises ConfigError with file and
    line."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the users file {path}: {error.strerror}") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"the users file {path} is larger than {_MAX_BYTES >> 20} MiB")
    return parse_users(text, reserved, where=f"users file {path}")


def parse_users(text: bytes, reserved: Iterable[str] = (), *, where: str = "users") -> tuple[Account, ...]:
    """Parse the users of a YAML text. Raises ConfigError that begins with `where` and the line."""
    try:
        return _users(text, frozenset(reserved))
    except _LineError as complaint:
        raise ConfigError(f"{where}, {complaint}") from None


class _LineError(Exception):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(f"line {line + 1}: {text}")


def _users(text: bytes, reserved: frozenset[str]) -> tuple[Account, ...]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        # The parser's own text quotes the line, which may hold a secret.
        raise _LineError(mark.line if mark else 0, "not valid YAML") from None
    if root is None:
        return ()
    if not isinstance(root, yaml.SequenceNode):
        raise _LineError(root.start_mark.line, "expected a list of users: `- user_id: ann` and so on")
    seen = dict.fromkeys(reserved, "the root user's")
    users = []
    for item in root.value:
        account, line = _account(item), item.start_mark.line
        access_key = account.key.access_key
        if access_key in seen:
            raise _LineError(line, f"access_key {access_key} is already {seen[access_key]}")
        seen[access_key] = f"taken on line {line + 1}"
        users.append(account)
    return tuple(users)


def _account(item: yaml.Node) -> Account:
    line = item.start_mark.line
    if not isinstance(item, yaml.MappingNode):
        raise _LineError(line, f"expected a user with {', '.join(_FIELDS)}")
    fields = _fields(item)
    missing = [name for name in _REQUIRED if not fields.get(name)]
    if missing:
        raise _LineError(line, f"the user has no {', '.join(missing)}")
    try:
        check_keys(fields["access_key"], fields["secret_key"])
    except ValueError as error:
        raise _LineError(line, str(error)) from None
    user_id = fields["user_id"]
    if user_id == ROOT_USER:
        raise _LineError(line, f"user_id {ROOT_USER} is reserved for the node's root user; choose another")
    if user_id.startswith(ROLE_PREFIX):
        raise _LineError(line, f"user_id {user_id[:80]}: {ROLE_PREFIX}NAME stands for a role; choose another")
    if len(user_id.encode()) > _MAX_USER_ID or not user_id.isprintable():
        raise _LineError(line, f"a user_id has at most {_MAX_USER_ID} bytes, all of them printable")
    name, email = fields.get("display_name") or user_id, fields.get("email", "")
    return Account(
        User(user_id=user_id, display_name=name, email=email, origin="file"),
        Key(
            access_key=fields["access_key"],
            user_id=user_id,
            secret_key=fields["secret_key"],
            origin="file",
        ),
    )


def _fields(item: yaml.MappingNode) -> dict[str, str]:
    fields: dict[str, str] = {}
    for key, value in item.value:
        line, name = key.start_mark.line, str(key.value)
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(_FIELDS)}"
            raise _LineError(line, f"unknown field {name[:40]!r}; {hint}")
        if name in fields:
            raise _LineError(line, f"{name} is given twice")
        if not isinstance(value, yaml.ScalarNode):
            raise _LineError(line, f"{name} must be a plain value")
        fields[name] = value.value
    return fields
