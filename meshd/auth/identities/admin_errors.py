"""Errors of the admin API and the checks that raise them; its pages of results and timestamps.

An error's code names the kind of problem, its message says what is wrong and `help` what to do; no error
carries a secret. Pages follow the order of names, so an entry added or removed between two pages neither
repeats nor hides another one.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.control.identities import Key, User


Code = Literal[
    "BadRequest",
    "InvalidPolicy",
    "AccessDenied",
    "NoSuchUser",
    "NoSuchAccessKey",
    "NoSuchPolicy",
    "NoSuchProvider",
    "NoSuchRole",
    "NotFound",
    "MethodNotAllowed",
    "UserExists",
    "AccessKeyExists",
    "UserOwnsBuckets",
    "PolicyInUse",
    "ProviderExists",
    "ProviderInUse",
    "RoleExists",
    "NotChangeableHere",
    "NoSuchNode",
    "NotNow",
    "Unavailable",
]
_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]{0,63}", re.ASCII)
_MAX_TEXT = 256
_MAX_POLICIES = 20


class AdminError(Exception):
    """An error of the admin API. `help` says what to do; `detail` holds plain JSON values for programs."""

    def __init__(
        self, code: Code, message: str, *, help: str = "", detail: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message, self.help, self.detail = message, help, detail or {}

    def __repr__(self) -> str:
        return f"AdminError({self.code}: {self.message})"


def no_such_user(user_id: str) -> AdminError:
    return AdminError(
        "NoSuchUser", f"there is no user {user_id[:80]!r}", help="list the users with `meshd admin user ls`"
    )


def no_such_key(access_key: str) -> AdminError:
    return AdminError(
        "NoSuchAccessKey",
        f"there is no access key {access_key[:80]!r}",
        help="list the keys with `meshd admin key ls`",
    )


def no_such_policy(name: str) -> AdminError:
    return AdminError("NoSuchPolicy", f"there is no policy {name[:80]!r}", help="see `meshd admin policy ls`")


def no_such_provider(name: str) -> AdminError:
    return AdminError(
        "NoSuchProvider",
        f"there is no identity provider {name[:80]!r}",
        help="list them with `meshd admin idp ls`",
    )


def no_such_role(name: str) -> AdminError:
    return AdminError(
        "NoSuchRole", f"there is no role {name[:80]!r}", help="list the roles with `meshd admin role ls`"
    )


def require_admin_user(user: User | None, user_id: str) -> User:
    """Return a user that the admin API created. Raises AdminError NoSuchUser, NotChangeableHere."""
    if user is None:
        raise no_such_user(user_id)
    if user.origin != "admin":
        where = "is the node's own" if user.root else "comes from the users file"
        cure = "" if user.root else "change that file and send the node SIGHUP"
        raise AdminError("NotChangeableHere", f"the user {user_id} {where}", help=cure)
    return user


def require_changeable_key(key: Key | None, access_key: str) -> Key:
    """Return a key that may be changed. Raises AdminError NoSuchAccessKey, NotChangeableHere."""
    if key is None:
        raise no_such_key(access_key)
    if key.origin == "root":
        raise AdminError(
            "NotChangeableHere",
            f"{access_key} is the node's root key",
            help="start the node with another MESHD_ROOT_ACCESS_KEY and MESHD_ROOT_SECRET_KEY",
        )
    return key


def check_name(what: str, name: str) -> None:
    """Raise AdminError BadRequest unless `name` can name a user or a policy."""
    if not _NAME.fullmatch(name):
        raise AdminError(
            "BadRequest", f"{what} has 1 to 64 letters, digits or _.@+- and begins with a letter or digit"
        )


def check_text(**fields: str | None) -> None:
    """Raise AdminError BadRequest unless every field is short and printable on one line."""
    for name, text in fields.items():
        if text is not None and (len(text) > _MAX_TEXT or not text.isprintable()):
            raise AdminError(
                "BadRequest", f"{name} has at most {_MAX_TEXT} characters, all of them printable"
            )


def check_policy_count(policies: tuple[str, ...]) -> tuple[str, ...]:
    """Return `policies` without duplicates. Raises AdminError BadRequest for too many."""
    if len(policies) > _MAX_POLICIES:
        raise AdminError("BadRequest", f"at most {_MAX_POLICIES} policies can be attached")
    return tuple(dict.fromkeys(policies))


MAX_PAGE = 1000

T = TypeVar("T")


class Page(msgspec.Struct, frozen=True):
    """One page of a list. `next` is the value of `after` for the next page; empty on the last page."""

    items: tuple[dict[str, Any], ...]
    next: str = ""


def paginate(entries: Mapping[str, T], after: str, limit: int, show: Callable[[T], dict[str, Any]]) -> Page:
    """Return up to `limit` of the entries after the name `after`; `entries` are sorted."""
    names = [name for name in entries if name > after]
    shown = tuple(show(entries[name]) for name in names[:limit])
    return Page(shown, names[limit - 1] if len(names) > limit else "")


def iso_time(ms: int) -> str:
    """Format milliseconds since 1970 as ISO 8601."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
