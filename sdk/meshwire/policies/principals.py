"""The principals of a bucket policy, in every form its writers use.

Law: a user is named by id, bare or in an ARN whose account is not looked at; roles and groups do not exist
here and are refused. Invariant: services and federated users may be named, and are nobody here.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_principal.html
"""

from __future__ import annotations

from typing import Any

from meshwire.documents import checked_object, shown
from meshwire.policies.errors import PolicyError
from meshwire.policies.statements import Principals
from meshwire.policies.texts import texts

_KINDS = ("AWS", "CanonicalUser", "Federated", "Service")
_ARN = "arn:aws:iam::"


def user_arn(user: str) -> str:
    """How a user is named where an ARN is asked for."""
    return f"{_ARN}:user/{user}"


def read_principals(value: Any, path: str) -> Principals:
    """Raises PolicyError."""
    if value == "*":
        return Principals(everyone=True)
    if isinstance(value, str):
        raise PolicyError(path, f'expected "*" or {{"AWS": "{user_arn("ann")}"}}, got {shown(value)}')
    document = checked_object(value, path, _KINDS)
    if not document:
        raise PolicyError(path, "it names nobody")
    everyone, users = False, set()
    for kind, listed in document.items():
        place = f"{path}.{kind}"
        for name in texts(listed, place):
            if kind in {"Federated", "Service"}:
                continue
            if name == "*" and kind == "AWS":
                everyone = True
            else:
                users.add(_user(name, place))
    return Principals(everyone, frozenset(users))


def _user(name: str, path: str) -> str:
    """The user id in an ARN, or what is a user id itself."""
    if "*" in name or "?" in name:
        raise PolicyError(path, f'{shown(name)}: "*" stands alone for everyone, never within a name')
    if not name.startswith("arn:"):
        return name
    account, _, resource = name.removeprefix(_ARN).partition(":")
    kind, slash, user = resource.partition("/")
    if name.startswith(_ARN) and kind == "user" and slash and user:
        return user
    if name.startswith(_ARN) and resource == "root" and account:
        return account
    raise PolicyError(path, f"{shown(name)} is no user here; write {user_arn('USER_ID')} or the user's id")
