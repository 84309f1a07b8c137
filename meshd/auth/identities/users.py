"""Users and access keys: created, changed and removed by the admin API.

Only root reaches this module; the endpoint checks that. Users from the users file and the root key are
changed in the file and the environment, not here. A secret key appears once, in the response that
created it. A refused change leaves everything as it was.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict, replace

from meshd.auth.identities.admin_errors import (
    MAX_PAGE,
    AdminError,
    check_name,
    check_policy_count,
    check_text,
    iso_time,
    no_such_key,
    no_such_policy,
    no_such_user,
    paginate,
    require_admin_user,
    require_changeable_key,
)
from meshd.auth.identities.sts_sessions import revocation_fields
from meshd.control.identities import Key, User, check_keys, new_access_key, new_secret_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.auth.identities.admin_errors import Page
    from meshd.control.buckets import BucketTable
    from meshd.control.identities import Entry, IdentityTable, KeyLastUsed
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.admin")


class NewUser(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /-/admin/users`."""

    user_id: str
    display_name: str = ""
    email: str = ""
    policies: tuple[str, ...] = ()


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /-/admin/keys`. Without a key pair in it, the node generates one."""

    user_id: str
    name: str = ""
    access_key: str = ""
    secret_key: str = ""
    policies: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"NewKey(user_id={self.user_id!r}, access_key={self.access_key!r})"


class UserChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PATCH /-/admin/users/ID`; None leaves a field as it is."""

    display_name: str | None = None
    email: str | None = None


class KeyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PATCH /-/admin/keys/ACCESS_KEY`; None leaves a field as it is."""

    enabled: bool | None = None
    name: str | None = None


class IdentityAdmin:
    """Manages users and keys. One instance per worker; all state is in the control store."""

    def __init__(self, table: IdentityTable, use: KeyLastUsed, buckets: BucketTable, clock: Clock) -> None:
        self._table, self._use, self._buckets, self._clock = table, use, buckets, clock

    def __repr__(self) -> str:
        return f"<IdentityAdmin {self._table!r}>"

    # --- users --------------------------------------------------------------------------------------

    def list_users(self, after: str, limit: int) -> Page:
        """List users in order of their ids."""
        return paginate(self._table.users(), after, limit, _show_user)

    def get_user(self, user_id: str) -> dict[str, Any]:
        """Return a user with their keys and buckets. Raises AdminError NoSuchUser."""
        user = self._table.find_user(user_id)
        if user is None:
            raise no_such_user(user_id)
        keys = [self._show_key(key) for key in self._keys_of(user_id)]
        buckets = [bucket.name for bucket in self._buckets.list_all(user_id)]
        return _show_user(user) | {"keys": keys, "buckets": buckets}

    async def add_user(self, new: NewUser) -> dict[str, Any]:
        """Create a user without keys. Raises AdminError BadRequest, NoSuchPolicy, UserExists."""
        check_name("user_id", new.user_id)
        check_text(display_name=new.display_name, email=new.email)
        user = User(
            user_id=new.user_id,
            display_name=new.display_name or new.user_id,
            email=new.email,
            policies=self._known(new.policies),
            created_ms=self._clock.now_ms(),
        )
        if self._table.find_user(new.user_id) is None:
            await self._drop_keys(new.user_id)  # keys of an earlier user of that name must not work again

        def create(old: User | None) -> User:
            if old is not None:
                raise AdminError("UserExists", f"the user {new.user_id} exists already")
            return user

        await self._table.update_entry(User, new.user_id, create)
        _log.info("user created", extra={"user": new.user_id})
        return self.get_user(new.user_id)

    async def change_user(self, user_id: str, change: UserChange) -> dict[str, Any]:
        """Change a user's display name or e-mail. Raises AdminError NoSuchUser, NotChangeableHere,
        BadRequest."""
        check_text(display_name=change.display_name, email=change.email)
        wanted = {name: value for name, value in asdict(change).items() if value is not None}
        await self._table.update_entry(
            User, user_id, lambda old: replace(require_admin_user(old, user_id), **wanted)
        )
        return self.get_user(user_id)

    async def remove_user(self, user_id: str, *, force: bool) -> None:
        """Remove a user and all their keys. Raises AdminError NoSuchUser, NotChangeableHere, UserOwnsBuckets
        (unless forced: the buckets then stay, and root can use them).
        """
        require_admin_user(self._table.find_user(user_id), user_id)
        owned = [bucket.name for bucket in self._buckets.list_all(user_id)]
        if owned and not force:
            some = ", ".join(owned[:5]) + (", …" if len(owned) > 5 else "")
            raise AdminError(
                "UserOwnsBuckets",
                f"{user_id} owns {len(owned)} bucket{'s' if len(owned) > 1 else ''}: {some}",
                help="remove the buckets first, or use force: the buckets then stay, and root can use them",
                detail={"buckets": owned[:MAX_PAGE]},
            )

        def remove(old: User | None) -> None:
            require_admin_user(old, user_id)

        # The user first: this invalidates all the keys at once.
        await self._table.update_entry(User, user_id, remove)
        await self._drop_keys(user_id)
        _log.info("user removed", extra={"user": user_id})

    # --- keys ---------------------------------------------------------------------------------------

    def list_keys(self, user_id: str, after: str, limit: int) -> Page:
        """List keys, of one user if `user_id` is given, in order. Raises AdminError NoSuchUser."""
        if user_id and self._table.find_user(user_id) is None:
            raise no_such_user(user_id)
        keys = {name: key for name, key in self._table.keys().items() if user_id in ("", key.user_id)}
        return paginate(keys, after, limit, self._show_key)

    def get_key(self, access_key: str) -> dict[str, Any]:
        """Return a key without its secret. Raises AdminError NoSuchAccessKey."""
        key = self._table.keys().get(access_key)
        if key is None:
            raise no_such_key(access_key)
        return self._show_key(key)

    async def add_key(self, new: NewKey) -> dict[str, Any]:
        """Create a key; only this response shows its secret. Raises AdminError BadRequest, NoSuchUser,
        NoSuchPolicy, AccessKeyExists.
        """
        access_key, secret_key = _pair(new)
        check_text(name=new.name)
        if self._table.find_user(new.user_id) is None:
            raise no_such_user(new.user_id)
        key = Key(
            access_key=access_key,
            user_id=new.user_id,
            secret_key=secret_key,
            name=new.name,
            policies=self._known(new.policies),
            created_ms=self._clock.now_ms(),
        )

        def create(old: Key | None) -> Key:
            if old is not None:
                raise AdminError("AccessKeyExists", f"the access key {access_key} is taken; choose another")
            return key

        await self._table.update_entry(Key, access_key, create)
        _log.info("key created", extra={"user": new.user_id, "key": access_key})
        return self._show_key(key) | {"secret_key": secret_key}

    async def change_key(self, access_key: str, change: KeyChange) -> dict[str, Any]:
        """Enable, disable or rename a key. Raises AdminError NoSuchAccessKey, NotChangeableHere,
        BadRequest."""
        check_text(name=change.name)
        wanted = {name: value for name, value in asdict(change).items() if value is not None}
        await self._table.update_entry(
            Key, access_key, lambda old: replace(require_changeable_key(old, access_key), **wanted)
        )
        _log.info("key changed", extra={"key": access_key, "enabled": change.enabled})
        return self.get_key(access_key)

    async def remove_key(self, access_key: str) -> None:
        """Remove a key. Raises AdminError NoSuchAccessKey, NotChangeableHere."""

        def remove(old: Key | None) -> None:
            if require_changeable_key(old, access_key).origin == "file":
                raise AdminError(
                    "NotChangeableHere",
                    f"the key {access_key} comes from the users file",
                    help="remove it from that file and send the node SIGHUP, or disable it here",
                )

        await self._table.update_entry(Key, access_key, remove)
        await self._use.forget(access_key)
        _log.info("key removed", extra={"key": access_key})

    # --- both ---------------------------------------------------------------------------------------

    def _keys_of(self, user_id: str) -> list[Key]:
        return [key for key in self._table.keys().values() if key.user_id == user_id]

    async def _drop_keys(self, user_id: str) -> None:
        for key in self._keys_of(user_id):
            await self._table.update_entry(Key, key.access_key, _nothing)
            await self._use.forget(key.access_key)

    def _known(self, policies: Iterable[str]) -> tuple[str, ...]:
        policies = tuple(policies)
        for name in policies:
            if name not in self._table.policies():
                raise no_such_policy(name)
        return check_policy_count(policies)

    def _show_key(self, key: Key) -> dict[str, Any]:
        return {
            "access_key": key.access_key,
            "user_id": key.user_id,
            "name": key.name,
            "enabled": key.enabled,
            "works": self._table.find_signer(key.access_key) is not None,
            "origin": key.origin,
            "policies": key.policies,
            "created": iso_time(key.created_ms),
            "last_used": iso_time(used) if (used := self._use.last_used_ms(key.access_key)) else "",
            **revocation_fields(key.ended),
        }


def _show_user(user: User) -> dict[str, Any]:
    return {
        "user_id": user.user_id,
        "display_name": user.display_name,
        "email": user.email,
        "origin": user.origin,
        "policies": user.policies,
        "created": iso_time(user.created_ms),
        **revocation_fields(user.ended),
    }


def _pair(new: NewKey) -> tuple[str, str]:
    """Return the caller's own key pair, or a new one. Raises AdminError BadRequest."""
    if bool(new.access_key) != bool(new.secret_key):
        raise AdminError("BadRequest", "give both access_key and secret_key, or neither")
    if not new.access_key:
        return new_access_key(), new_secret_key()
    try:
        check_keys(new.access_key, new.secret_key)
    except ValueError as error:
        raise AdminError("BadRequest", str(error)) from None
    return new.access_key, new.secret_key


def _nothing(_: Entry | None) -> None:
    return None
