"""Named policies: create, replace, remove, attach to users and keys, detach; `roles` attaches them to roles.

A policy is stored only if it parses. A user's policies add permissions; a key's policies limit it. A
user, key or role with an attached policy that no longer exists is refused everything.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from meshd.auth.identities.admin_errors import (
    AdminError,
    check_name,
    check_policy_count,
    iso_time,
    no_such_policy,
    no_such_user,
    paginate,
    require_changeable_key,
)
from meshd.control.identities import Key, NamedPolicy, User
from meshwire.iam import PolicyError, parse_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.auth.identities.admin_errors import Page
    from meshd.control.identities import IdentityTable
    from meshd.control.roles import Role
    from meshd.util.clock import Clock

_MAX_BYTES = 20 << 10
_log = logging.getLogger("meshd.admin")


class PolicyAdmin:
    """Manages policies by name. One instance per worker; all state is in the control store."""

    def __init__(self, table: IdentityTable, clock: Clock) -> None:
        self._table, self._clock = table, clock

    def __repr__(self) -> str:
        return f"<PolicyAdmin {self._table!r}>"

    def list_policies(self, after: str, limit: int) -> Page:
        """List policies in order of their names, without their documents."""
        users, keys, roles = self._holders()
        return paginate(
            self._table.policies(),
            after,
            limit,
            lambda policy: _show(
                policy, users.get(policy.name, []), keys.get(policy.name, []), roles.get(policy.name, [])
            ),
        )

    def get_policy(self, name: str) -> dict[str, Any]:
        """Return a policy with its document. Raises AdminError NoSuchPolicy."""
        policy = self._table.policies().get(name)
        if policy is None:
            raise no_such_policy(name)
        return _show(policy, *self._holders_of(name)) | {"policy": msgspec.Raw(policy.text.encode())}

    async def put_policy(self, name: str, body: bytes) -> tuple[dict[str, Any], bool]:
        """Create or replace a policy. Returns it, and whether it is new. Raises AdminError BadRequest,
        InvalidPolicy."""
        check_name("a policy's name", name)
        text, made = check_policy(body, _MAX_BYTES), False

        def write(old: NamedPolicy | None) -> NamedPolicy:
            nonlocal made
            made = old is None
            return NamedPolicy(
                name=name, text=text, created_ms=self._clock.now_ms() if old is None else old.created_ms
            )

        await self._table.update_entry(NamedPolicy, name, write)
        _log.info("policy put", extra={"policy": name})
        return self.get_policy(name), made

    async def remove_policy(self, name: str, *, force: bool) -> None:
        """Remove a policy. Raises AdminError NoSuchPolicy, PolicyInUse.

        With `force` an attached policy is removed: its users and keys are then refused everything until it is
        detached or created again.
        """
        users, keys, roles = self._holders_of(name)
        if (users or keys or roles) and not force:
            more = f" and {_count(roles, 'role')}" if roles else ""
            raise AdminError(
                "PolicyInUse",
                f"the policy {name} is attached to {_count(users, 'user')} and {_count(keys, 'key')}{more}",
                help="detach it first; with force, these are refused everything until it is detached",
                detail={"users": users, "keys": keys, "roles": roles},
            )

        def drop(old: NamedPolicy | None) -> None:
            if old is None:
                raise no_such_policy(name)

        await self._table.update_entry(NamedPolicy, name, drop)
        _log.info("policy removed", extra={"policy": name, "forced": force})

    async def attach_to_user(self, user_id: str, name: str) -> None:
        """Attach a policy to a user. Raises AdminError NoSuchUser, NoSuchPolicy, NotChangeableHere (root),
        BadRequest (too many policies)."""
        self._check(name)
        await self._table.update_entry(User, user_id, lambda old: _with(_not_of_root(old, user_id), name))
        _log.info("policy attached", extra={"policy": name, "user": user_id})

    async def attach_to_key(self, access_key: str, name: str) -> None:
        """Attach a policy to a key. Raises AdminError NoSuchAccessKey, NoSuchPolicy, NotChangeableHere (a
        root key), BadRequest (too many policies)."""
        self._check(name)
        await self._table.update_entry(
            Key, access_key, lambda old: _with(require_changeable_key(old, access_key), name)
        )
        _log.info("policy attached", extra={"policy": name, "key": access_key})

    async def detach_from_user(self, user_id: str, name: str) -> None:
        """Detach a policy, which need not exist, from a user. Raises AdminError NoSuchUser, NoSuchPolicy (not
        attached)."""
        await self._table.update_entry(User, user_id, lambda old: _without(_not_of_root(old, user_id), name))
        _log.info("policy detached", extra={"policy": name, "user": user_id})

    async def detach_from_key(self, access_key: str, name: str) -> None:
        """Detach a policy, which need not exist, from a key. Raises AdminError NoSuchAccessKey,
        NoSuchPolicy (not attached)."""
        await self._table.update_entry(
            Key, access_key, lambda old: _without(require_changeable_key(old, access_key), name)
        )
        _log.info("policy detached", extra={"policy": name, "key": access_key})

    def _check(self, name: str) -> None:
        if name not in self._table.policies():
            raise no_such_policy(name)

    def _holders(self) -> tuple[dict[str, list[str]], ...]:
        """Return the users, keys and roles that have each policy attached."""
        table = self._table
        return _holders(table.users()), _holders(table.keys()), _holders(table.roles.roles())

    def _holders_of(self, name: str) -> tuple[list[str], ...]:
        return tuple(holders.get(name, []) for holders in self._holders())


def check_policy(body: bytes, limit: int) -> str:
    """Return the text of an identity policy. Raises AdminError InvalidPolicy, which says what is wrong and
    where."""
    if len(body) > limit:
        raise AdminError("InvalidPolicy", f"the policy has {len(body):,} bytes; {limit:,} are allowed")
    try:
        text = body.decode()
        parse_policy(text, kind="identity")
    except UnicodeDecodeError:
        raise AdminError("InvalidPolicy", "the policy is not UTF-8") from None
    except PolicyError as error:
        raise AdminError(
            "InvalidPolicy", str(error), help="docs/policies.md describes the policy language"
        ) from None
    return text


def _holders(
    holders: Mapping[str, User] | Mapping[str, Key] | Mapping[str, Role],
) -> dict[str, list[str]]:
    """Return the users, keys or roles that have a policy attached, by its name."""
    found: dict[str, list[str]] = {}
    for holder, entry in holders.items():
        for name in entry.policies:
            found.setdefault(name, []).append(holder)
    return found


def _show(policy: NamedPolicy, users: list[str], keys: list[str], roles: list[str]) -> dict[str, Any]:
    holders = {"users": users, "keys": keys, "roles": roles}
    return {"name": policy.name, "created": iso_time(policy.created_ms), **holders}


def _with(holder: User | Key, name: str) -> Any:
    return replace(holder, policies=check_policy_count((*holder.policies, name)))


def _without(holder: User | Key, name: str) -> Any:
    if name not in holder.policies:
        raise AdminError("NoSuchPolicy", f"the policy {name[:80]!r} is not attached there")
    return replace(holder, policies=tuple(other for other in holder.policies if other != name))


def _not_of_root(user: User | None, user_id: str) -> User:
    if user is None:
        raise no_such_user(user_id)
    if user.root:
        raise AdminError("NotChangeableHere", "root may do everything; policies are for others")
    return user


def _count(names: list[str], what: str) -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"
