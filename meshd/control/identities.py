"""Identity tables: users, access keys and named policies; one lookup per request.

Law: secrets never appear in a `repr`, a log or an error. `origin` names the source of a user or key:
entries of `root` and `file` are replaced at every start and reload, entries of `admin` by the admin API
alone.
Invariant: a key signs while it is enabled and its user exists; every process sees a change at once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, cast

import msgspec

from meshd.control.cached_topic import CachedTopic
from meshd.control.control_api import VersionConflictError
from meshd.telemetry import logs
from meshwire.iam import Policy, PolicyError, parse_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from meshd.control.control_api import ControlStore

TOPIC = "access"
_log = logging.getLogger("meshd.control")
Origin = Literal["root", "file", "admin"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the topic holds: users, keys and policies, told apart by `type`; `created_ms` since 1970."""

    created_ms: int = 0


class Revocation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which temporary credentials are no more: those of an earlier `round`, and those issued `before` (in
    seconds since 1970). `at_ms`: when that was said last."""

    round: int = 0
    before: int = 0
    at_ms: int = 0


class User(Entry, frozen=True, tag="user"):
    """Somebody who may own buckets. `root` may do everything; `policies` are names, and add rights. `ended`:
    of temporary credentials made with any key of theirs."""

    user_id: str
    display_name: str
    email: str = ""
    root: bool = False
    origin: Origin = "admin"
    policies: tuple[str, ...] = ()
    ended: Revocation = Revocation()


class Key(Entry, frozen=True, tag="key"):
    """A key pair of a user. `policies` are names; with any, the key may do what one of them allows. `ended`:
    of temporary credentials made with it."""

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
    """A policy document under a name; `text` is the JSON as it was put."""

    name: str
    text: str


class Account(NamedTuple):
    """A user and one key of theirs: what the root credentials and a line of the users file say."""

    user: User
    key: Key


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signs with a key that may sign. `policies` are the user's; `bounds` is empty or what the key's
    policies, taken together, make of one."""

    user: User
    key: Key
    policies: tuple[Policy, ...] = ()
    bounds: tuple[Policy, ...] = ()

    @property
    def rounds(self) -> tuple[int, int]:
        """Of temporary credentials of the user and of the key: only those of the present ones are good."""
        return self.user.ended.round, self.key.ended.round

    @property
    def sessions_from(self) -> int:
        """Since when, in seconds since 1970, they must have been issued."""
        return max(self.user.ended.before, self.key.ended.before)


E = TypeVar("E", bound=Entry)


class IdentityTable:
    """Users, keys and policies by name. Reads are dictionary reads."""

    def __init__(self, control: ControlStore) -> None:
        kinds = cast("type[Entry]", User | Key | NamedPolicy)
        self._documents: CachedTopic[Entry] = CachedTopic(control, TOPIC, kinds)
        self._view = _View({}, None)

    def __repr__(self) -> str:
        return f"<IdentityTable {len(self._view.users)} users, {len(self._view.keys)} keys>"

    @property
    def state_token(self) -> object:
        """Of all entries: another object after each change."""
        return self._now()

    def find_signer(self, access_key: str) -> Signer | None:
        """Who signs with a key; None when it is unknown or disabled or its user gone. About a microsecond."""
        return self._now().signer(access_key)

    def find_user(self, user_id: str) -> User | None:
        """The user of an id (an owner of a bucket, say), or None."""
        return self._now().users.get(user_id)

    def list_all(self) -> tuple[User, ...]:
        """Every user, in order of their ids."""
        return tuple(self.users().values())

    def users(self) -> Mapping[str, User]:
        """Users by id, in order."""
        return self._now().users

    def keys(self) -> Mapping[str, Key]:
        """Keys by access key, in order, those that may not sign too."""
        return self._now().keys

    def policies(self) -> Mapping[str, NamedPolicy]:
        """Policies by name, in order."""
        return self._now().policies

    async def update_entry(self, kind: type[E], name: str, decide: Callable[[E | None], E | None]) -> bool:
        """Replace an entry by what `decide` makes of the present one (None: there is none, or remove it),
        durably and atomically against other changes. Whether anything changed. What `decide` raises goes on
        to the caller; it may be called again when another process was quicker.
        """
        place = _place(kind, name)
        while True:
            version = self._documents.version(place)  # read first: an older one only conflicts
            present = cast("E | None", self._documents.current().get(place))
            wanted = decide(present)
            if wanted == present:
                return False
            try:
                if wanted is None:
                    return await self._documents.delete(place, expect=version)
                await self._documents.put(place, wanted, expect=version)
            except VersionConflictError:
                continue
            return True

    async def replace_accounts(
        self, origins: frozenset[Origin], accounts: Iterable[Account], now_ms: int
    ) -> int:
        """Make `accounts` the users and keys of these origins: add, change, remove. Returns how many changed.

        What an administrator set on one that stays is kept: disabled keys stay disabled, policies attached,
        sessions ended.
        A user of another origin stays theirs and only gets the keys.
        """
        accounts = tuple(accounts)
        while True:
            entries = self._now().entries
            wanted = _replacement(entries, origins, accounts, now_ms)
            changes = {place: new for place, new in wanted.items() if entries.get(place) != new}
            try:
                await self._documents.write_many(changes)
            except VersionConflictError:
                continue
            return len(changes)

    def _now(self) -> _View:
        entries = self._documents.current()
        if entries is not self._view.entries:
            self._view = _View(entries, self._view)
            logs.secret_masker.add_secrets(self._view.news)
        return self._view


class _View:
    """The entries of one moment, by kind. `news`: secrets that the view before did not have."""

    __slots__ = ("_signers", "entries", "keys", "news", "parsed", "policies", "users")

    def __init__(self, entries: Mapping[str, Entry], before: _View | None) -> None:
        self.entries = entries
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
        self.news = [key.secret_key for name, key in self.keys.items() if old.get(name) is not key]

    def signer(self, access_key: str) -> Signer | None:
        """Who signs with a key; made when it is first asked for."""
        found = self._signers.get(access_key)
        if found is None:
            key = self.keys.get(access_key)
            user = self.users.get(key.user_id) if key is not None and key.enabled else None
            if key is None or user is None:
                return None
            policies = tuple(self._policy(name) for name in user.policies)
            bounds = (_joined([self._policy(name) for name in key.policies]),) if key.policies else ()
            found = self._signers[access_key] = Signer(user, key, policies, bounds)
        return found

    def _policy(self, name: str) -> Policy:
        return self.parsed.get(name, _NOTHING)


# In the place of a policy that is missing or cannot be read: whatever it said, nothing more is allowed.
_NOTHING = parse_policy(
    '{"Version": "2012-10-17", "Statement": {"Effect": "Deny", "Action": "*", "Resource": "*"}}',
    kind="identity",
)


def _parse(policy: NamedPolicy) -> Policy:
    try:
        return parse_policy(policy.text, kind="identity")
    except PolicyError as error:
        _log.error(
            "a policy cannot be read and refuses everything", extra={"policy": policy.name, "why": error}
        )
        return _NOTHING


def _joined(policies: list[Policy]) -> Policy:
    """One policy that says what these say together."""
    if len(policies) == 1:
        return policies[0]
    statements = tuple(statement for policy in policies for statement in policy.statements)
    return Policy(statements, frozenset().union(*(policy.keys for policy in policies)))


def _place(kind: type[Entry], name: str) -> str:
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
    """What is to become of entries when `accounts` are the ones of `origins`. Users who go come before their
    keys: from then on none of these signs."""
    wanted: dict[str, Entry | None] = {}
    for user, key in accounts:
        user_place, key_place = _place(User, user.user_id), _place(Key, key.access_key)
        if user_place not in wanted:  # the first mention counts
            wanted[user_place] = _user(cast("User | None", entries.get(user_place)), user, now_ms)
        wanted[key_place] = _key(cast("Key | None", entries.get(key_place)), key, now_ms)
    for kind in (User, Key):
        for place, entry in entries.items():
            if isinstance(entry, kind) and entry.origin in origins and place not in wanted:
                wanted[place] = None
    return wanted
