"""Identity tables: users, access keys, named policies and, from `roles`, roles; generation and use of keys.

Law: secrets never appear in a `repr`, a log or an error. `origin` names the source of a user or key:
entries of `root` and `file` are replaced at every start and reload, entries of `admin` by the admin API
alone.
Invariant: a key signs while it is enabled and its user exists; every process sees a change at once. A
lookup costs about a microsecond. A generated secret begins with `mss-`, so that logs can mask it. Recording
a use adds to a set in memory; the control store is written at most once per key and hour.
"""

from __future__ import annotations

import logging
import re
import secrets
import string
from threading import get_ident
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, cast

import msgspec

from meshd.control.cached_topic import CachedTopic
from meshd.control.control_api import VersionConflictError
from meshd.control.roles import ROLE_PREFIX, Revocation, RoleTable
from meshd.telemetry import logs
from meshwire.iam import Policy, PolicyError, parse_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from meshd.control.control_api import ControlStore
    from meshd.control.roles import Role

TOPIC = "access"
_log = logging.getLogger("meshd.control")
Origin = Literal["root", "file", "admin"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An entry of the topic: a user, key or policy, distinguished by `type`; `created_ms` since 1970."""

    created_ms: int = 0


class User(Entry, frozen=True, tag="user"):
    """A user, who may own buckets. `root` may do everything; `policies` are names and grant rights. `ended`:
    revocation of temporary credentials made with any of the user's keys."""

    user_id: str
    display_name: str
    email: str = ""
    root: bool = False
    origin: Origin = "admin"
    policies: tuple[str, ...] = ()
    ended: Revocation = Revocation()


class Key(Entry, frozen=True, tag="key"):
    """A key pair of a user. `policies` are names; if there are any, the key may do only what one of them
    allows. `ended`: revocation of temporary credentials made with the key."""

    access_key: str
    user_id: str
    secret_key: str
    name: str = ""
    enabled: bool = True
    origin: Origin = "admin"
    policies: tuple[str, ...] = ()
    ended: Revocation = Revocation()

    def __repr__(self) -> str:
        return f"Key(access_key={self.access_key!r}, user_id={self.user_id!r}, enabled={self.enabled})"


class NamedPolicy(Entry, frozen=True, tag="policy"):
    """A named policy document; `text` is the JSON as it was put."""

    name: str
    text: str


class Account(NamedTuple):
    """A user and one of their keys, as given by the root credentials or a line of the users file."""

    user: User
    key: Key


class Signer(msgspec.Struct, frozen=True):
    """The identity behind a key that may sign. `policies` are the user's; `bounds` is empty, or the key's
    policies merged into one."""

    user: User
    key: Key
    policies: tuple[Policy, ...] = ()
    bounds: tuple[Policy, ...] = ()

    @property
    def rounds(self) -> tuple[int, int]:
        """The current rounds of the user's and the key's temporary credentials; only credentials of these
        rounds are valid."""
        return self.user.ended.round, self.key.ended.round

    @property
    def sessions_from(self) -> int:
        """The time, in seconds since 1970, from which on temporary credentials must have been issued."""
        return max(self.user.ended.before, self.key.ended.before)


E = TypeVar("E", bound=Entry)


_decode_entry = msgspec.json.Decoder(cast("type[Entry]", User | Key | NamedPolicy)).decode


class IdentityTable:
    """Users, keys and policies by name. Reads are dictionary reads."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, TOPIC, _decode_entry)
        self.roles = RoleTable(control)
        self._control, self._known = control, cast("object", None)
        self._view = _View({}, {}, None)

    def __repr__(self) -> str:
        return f"<IdentityTable {len(self._view.users)} users, {len(self._view.keys)} keys>"

    @property
    def state_token(self) -> object:
        """An object that changes with every change of an entry."""
        return self._current_view()

    def find_signer(self, access_key: str) -> Signer | None:
        """Returns who signs with a key; None if it is unknown or disabled, or its user does not exist. Takes
        about a microsecond."""
        return self._current_view().signer(access_key)

    def find_principal(self, name: str) -> Signer | None:
        """Returns what temporary credentials derive from: a key that may sign, or a role by `role/NAME`,
        which is like a user whose only key cannot sign; None if it is not valid."""
        if name.startswith(ROLE_PREFIX):
            return self._current_view().role(name)
        return self.find_signer(name)

    def find_user(self, user_id: str) -> User | None:
        """Returns the user with this id (such as the owner of a bucket), or None."""
        return self._current_view().users.get(user_id)

    def list_all(self) -> tuple[User, ...]:
        """Returns every user in order of id."""
        return tuple(self.users().values())

    def users(self) -> Mapping[str, User]:
        """Returns users by id, in order."""
        return self._current_view().users

    def keys(self) -> Mapping[str, Key]:
        """Returns keys by access key, in order, including those that may not sign."""
        return self._current_view().keys

    def policies(self) -> Mapping[str, NamedPolicy]:
        """Returns policies by name, in order."""
        return self._current_view().policies

    def principal_names(self) -> Container[str]:
        """Returns the names that uses are recorded under: access keys, and roles as `role/NAME`."""
        view = self._current_view()
        return view.keys.keys() | {ROLE_PREFIX + name for name in view.roles}

    async def update_entry(self, kind: type[E], name: str, decide: Callable[[E | None], E | None]) -> bool:
        """Replaces an entry by what `decide` returns for the current one; see `CachedTopic.update`."""
        return await self._documents.update(
            _entry_name(kind, name), cast("Callable[[Entry | None], Entry | None]", decide)
        )

    async def replace_accounts(
        self, origins: frozenset[Origin], accounts: Iterable[Account], now_ms: int
    ) -> int:
        """Makes `accounts` the users and keys of these origins: adds, changes and removes entries. Returns
        how many changed.

        Settings of an administrator on an entry that stays are kept: disabled keys stay disabled, policies
        attached, sessions revoked. A user of another origin keeps it and only receives the keys.
        """
        accounts = tuple(accounts)
        while True:
            entries = self._current_view().entries
            wanted = _replacement(entries, origins, accounts, now_ms)
            changes = {place: new for place, new in wanted.items() if entries.get(place) != new}
            try:
                await self._documents.write_many(changes)
            except VersionConflictError:
                continue
            return len(changes)

    def _current_view(self) -> _View:
        pin = self._control.pin
        known = pin.known
        if known is not None:
            if pin.thread != get_ident():
                known = None
            elif known is self._known:
                return self._view
        entries, roles = self._documents.current(), self.roles.roles()
        if entries is not self._view.entries or roles is not self._view.roles:
            self._known = None  # see CachedTopic.current
            self._view = _View(entries, roles, self._view)
            logs.secret_masker.add_secrets(self._view.new_secrets)
        self._known = known
        return self._view


class _View:
    """The entries at one time, by kind. `new_secrets`: secrets that the previous view did not have."""

    __slots__ = ("_signers", "entries", "keys", "new_secrets", "parsed", "policies", "roles", "users")

    def __init__(self, entries: Mapping[str, Entry], roles: Mapping[str, Role], before: _View | None) -> None:
        self.entries, self.roles = entries, roles
        ordered = [entries[place] for place in sorted(entries)]
        self.users = {entry.user_id: entry for entry in ordered if isinstance(entry, User)}
        self.keys = {entry.access_key: entry for entry in ordered if isinstance(entry, Key)}
        self.policies = {entry.name: entry for entry in ordered if isinstance(entry, NamedPolicy)}
        self._signers: dict[str, Signer] = {}
        known = before.policies if before else {}
        self.parsed: dict[str, Policy] = {
            name: before.parsed[name] if before and known.get(name) is policy else _parse(policy)
            for name, policy in self.policies.items()
        }
        old = before.keys if before else {}
        self.new_secrets = [key.secret_key for name, key in self.keys.items() if old.get(name) is not key]

    def signer(self, access_key: str) -> Signer | None:
        """Returns who signs with a key; computed at the first request."""
        found = self._signers.get(access_key)
        if found is None:
            key = self.keys.get(access_key)
            user = self.users.get(key.user_id) if key is not None and key.enabled else None
            if key is None or user is None:
                return None
            policies = tuple(self._policy(name) for name in user.policies)
            bounds = (_merge_policies([self._policy(name) for name in key.policies]),) if key.policies else ()
            found = self._signers[access_key] = Signer(user, key, policies, bounds)
        return found

    def role(self, name: str) -> Signer | None:
        """Returns the signer of a role's sessions. The role's policies grant its rights and bound them, so
        that it may do nothing else."""
        found = self._signers.get(name)
        if found is None:
            role = self.roles.get(name.removeprefix(ROLE_PREFIX))
            if role is None:
                return None
            user = User(
                user_id=name,
                display_name=name,
                policies=role.policies,
                ended=role.ended,
                created_ms=role.created_ms,
            )
            key = Key(access_key=name, user_id=name, secret_key=role.seed, policies=role.policies)
            policies = [self._policy(each) for each in role.policies] or [_NOTHING]
            found = Signer(user, key, tuple(policies), (_merge_policies(policies),))
            self._signers[name] = found
        return found

    def _policy(self, name: str) -> Policy:
        return self.parsed.get(name, _NOTHING)


# Stands for a policy that is missing or cannot be parsed: it denies everything, so no rights are gained.
_NOTHING = parse_policy(
    '{"Version": "2012-10-17", "Statement": {"Effect": "Deny", "Action": "*", "Resource": "*"}}',
    kind="identity",
)


def _parse(policy: NamedPolicy) -> Policy:
    try:
        return parse_policy(policy.text, kind="identity")
    except PolicyError as error:
        _log.error("cannot parse a policy: it denies everything", extra={"policy": policy.name, "why": error})
        return _NOTHING


def _merge_policies(policies: list[Policy]) -> Policy:
    """Merges policies into one that grants and denies what they do together."""
    if len(policies) == 1:
        return policies[0]
    statements = tuple(statement for policy in policies for statement in policy.statements)
    return Policy(statements, frozenset().union(*(policy.keys for policy in policies)))


def _entry_name(kind: type[Entry], name: str) -> str:
    return f"{kind.__struct_config__.tag}/{name}"


def _user(old: User | None, new: User, now_ms: int) -> User:
    if old is None or (new.root and not old.root):
        return msgspec.structs.replace(new, created_ms=now_ms)
    if old.origin == "admin":
        return old
    return msgspec.structs.replace(new, created_ms=old.created_ms, policies=old.policies, ended=old.ended)


def _key(old: Key | None, new: Key, now_ms: int) -> Key:
    if old is None or old.user_id != new.user_id:
        return msgspec.structs.replace(new, created_ms=now_ms)
    if new.origin == "root":
        return msgspec.structs.replace(new, created_ms=old.created_ms, ended=old.ended)
    return msgspec.structs.replace(
        new,
        created_ms=old.created_ms,
        name=old.name,
        enabled=old.enabled,
        policies=old.policies,
        ended=old.ended,
    )


def _replacement(
    entries: Mapping[str, Entry], origins: frozenset[Origin], accounts: tuple[Account, ...], now_ms: int
) -> dict[str, Entry | None]:
    """Returns the new entries when `accounts` are those of `origins`. Removed users come before their keys,
    so that none of these signs from then on."""
    wanted: dict[str, Entry | None] = {}
    for user, key in accounts:
        user_place, key_place = _entry_name(User, user.user_id), _entry_name(Key, key.access_key)
        if user_place not in wanted:  # the first mention counts
            wanted[user_place] = _user(cast("User | None", entries.get(user_place)), user, now_ms)
        wanted[key_place] = _key(cast("Key | None", entries.get(key_place)), key, now_ms)
    for kind in (User, Key):
        for place, entry in entries.items():
            if isinstance(entry, kind) and entry.origin in origins and place not in wanted:
                wanted[place] = None
    return wanted


_LETTERS = string.ascii_uppercase + string.digits
_ACCESS = re.compile(r"[\w.@=+-]{3,128}", re.ASCII)
_SECRET = re.compile(r"[\x21-\x7e]{8,128}")


def check_keys(access_key: str, secret_key: str) -> None:
    """Raises ValueError, without showing the secret, unless the pair can sign requests."""
    if not _ACCESS.fullmatch(access_key):
        raise ValueError("an access key has 3 to 128 letters, digits or _.@=+-")
    if not _SECRET.fullmatch(secret_key):
        raise ValueError("a secret key has 8 to 128 printable characters without spaces")


def new_access_key(prefix: str = "MESH") -> str:
    """Returns a new key: `prefix` and 16 random letters and digits."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(16))


def new_secret_key() -> str:
    """Returns a new secret of 44 characters with 240 random bits."""
    return "mss-" + secrets.token_urlsafe(30)


_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000


class _Use(msgspec.Struct, frozen=True):
    used_ms: int


_decode_use = msgspec.json.Decoder(_Use).decode


class KeyLastUsed:
    """Records uses in this process, and knows those that any process has saved."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, "keyuse", _decode_use)
        self._noted: set[str] = set()

    def __repr__(self) -> str:
        return f"<KeyLastUsed, {len(self._noted)} to save>"

    def record_use(self, access_key: str) -> None:
        """Records that a request was signed with this key."""
        self._noted.add(access_key)

    def last_used_ms(self, access_key: str) -> int:
        """Returns milliseconds since 1970; 0 if no use was saved."""
        found = self._documents.current().get(access_key)
        return 0 if found is None else found.used_ms

    async def save(self, now_ms: int, known: Container[str]) -> None:
        """Saves the uses recorded since the last call, at most one per key and hour. Removes entries of keys
        that are not `known` and were not used for a day."""
        noted, self._noted = self._noted, set()
        for access_key in noted:
            if now_ms - self.last_used_ms(access_key) >= _HOUR_MS:
                await self._documents.put(access_key, _Use(now_ms))
        for access_key, use in list(self._documents.current().items()):
            if access_key not in known and now_ms - use.used_ms > _DAY_MS:
                await self._documents.delete(access_key)

    async def forget(self, access_key: str) -> None:
        """Removes what is recorded of a deleted key."""
        await self._documents.delete(access_key)
