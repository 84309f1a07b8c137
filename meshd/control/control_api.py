"""Interface of the control store: versioned keys, conditional writes, watches and leases.

Law: keys are `topic/name`. Versions rise with every write and are never reused, except after a restore
from a backup, which `restores` counts. `get`, `put`, `delete` and `list_all` ask the engine and are
linearizable; `revision` and `cached_entries` answer from this process's copy without waiting and serve
the hot paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from meshd.errors import MeshdError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence
    from contextlib import AbstractContextManager

ABSENT: Final = 0
"""As `expect`: the key must not exist. Real versions are higher."""
MAX_KEY_BYTES: Final = 480
MESH_ID: Final = "mesh/id"
"""The key that identifies the mesh a store belongs to. Written once; another value means another store."""


class ControlError(MeshdError):
    """The control store cannot do what was requested (bad key, full, unreachable)."""


class VersionConflictError(ControlError):
    """The key is not at the expected version. Read it again before changing it."""

    def __init__(self, key: str, expected: int, found: int) -> None:
        super().__init__(f"{key} is at version {found}, not {expected}; read it again before changing it")
        self.key, self.expected, self.found = key, expected, found


class LeaseLostError(ControlError):
    """The lease expired or was taken over; its holder must stop what it did under it."""


class Versioned(msgspec.Struct, frozen=True):
    """A value and the version of the write that stored it."""

    value: bytes
    version: int


class Write(msgspec.Struct, frozen=True):
    """A write of one key; the value None deletes it. `expect` as in `ControlStore.put`."""

    key: str
    value: bytes | None
    expect: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A key's new state; `entry` is None if the key was deleted."""

    key: str
    entry: Versioned | None


class Lease(msgspec.Struct, frozen=True):
    """The right to act as `name` until `expires_ms` (the engine's wall clock), proven by `version`."""

    name: str
    holder: str
    ttl: float
    expires_ms: int
    version: int


class RevisionPin:
    """The state that `ControlStore.pin_revisions` has fixed. `known`: inside the block an object that is the
    same one as long as nothing is written; None outside it, and with engines whose `revision` is a look at a
    dictionary. It holds for `thread` alone."""

    __slots__ = ("known", "thread")

    def __init__(self) -> None:
        self.known: dict[str, int] | None = None
        self.thread = 0


UNPINNED: Final = RevisionPin()
"""The pin of engines that need none."""


class ControlStore(Protocol):
    """A versioned key-value store with watches and leases; see the module. All methods may raise
    ControlError."""

    def revision(self, topic: str) -> int:
        """Returns the version of the newest known write under `topic/`; 0 if none. Takes a microsecond; never
        waits. A cache that is keyed by revision must also compare `restores`."""

    def complete_revision(self, topic: str) -> int:
        """Returns a version up to which this process knows all writes under `topic/`; at least `revision`. It
        tells whether the process knows what another knows, by that one's `revision`: a process that started
        after a deletion has no entry of the deletion's version. Takes a microsecond; never waits."""

    @property
    def restores(self) -> int:
        """How often this process saw the store restored from a backup. Takes a microsecond."""

    @property
    def pin(self) -> RevisionPin:
        """What `pin_revisions` has fixed at present. An attribute, for it is looked at often."""

    def pin_revisions(self) -> AbstractContextManager[object]:
        """Inside the block, in this thread, `revision` reads each topic once and then repeats the answer. The
        block must not wait: it is meant for the look-ups of one request."""

    def cached_entries(self, topic: str) -> Mapping[str, Versioned]:
        """Returns every key under `topic/` that this process knows, at least as new as `revision` returned
        before."""

    async def get(self, key: str) -> Versioned | None:
        """Returns the key's value, or None."""

    async def get_version(self, key: str) -> int:
        """Returns the key's version, or ABSENT; engines that can do not transfer its value."""

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int:
        """Writes a value durably; returns the new version.

        `expect`: None always writes, ABSENT creates, a version replaces exactly that one; otherwise raises
        VersionConflictError. A cancelled write may or may not have happened.
        """

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        """Removes a key durably; returns False if it did not exist (with `expect`: VersionConflictError)."""

    async def write_many(self, writes: Sequence[Write]) -> None:
        """Writes many keys for the cost of one, durably. When it raises VersionConflictError, some may be
        written; engines that can write all or none. Keys written together may have the same version."""

    async def list_all(self, prefix: str) -> Mapping[str, Versioned]:
        """Returns every key that starts with `prefix`, in key order."""

    def watch(self, topic: str) -> AsyncGenerator[Change, None]:
        """Yields every existing key first, then changes as they happen. Intermediate states may be skipped,
        the last one never is. Close it (`aclosing`) when done."""

    async def acquire_lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        """Acquires the lease `name` for `ttl` seconds; returns None while another holder has it. A holder may
        acquire its own lease again, which voids earlier copies of it."""

    async def renew_lease(self, lease: Lease) -> Lease:
        """Extends the lease to `ttl` seconds from now. Raises LeaseLostError."""

    async def renew_lease_and_get_version(self, lease: Lease, key: str) -> tuple[Lease, int]:
        """As `get_version` of the key and then `renew_lease`, for fewer calls where the engine can. All nodes
        do it several times in each lease."""

    async def release_lease(self, lease: Lease) -> None:
        """Releases the lease early. Releasing a lost lease is not an error."""

    async def lease_holders(self, prefix: str) -> Mapping[str, str]:
        """Returns the current holders of leases whose names start with `prefix`, by name, according to the
        engine."""

    def close(self) -> None:
        """Releases the engine. Watches end. Idempotent."""


def check_key(key: str) -> str:
    """Returns `key` if it is `topic/name` and short enough. Raises ControlError."""
    topic, slash, name = key.partition("/")
    if not topic or not slash or not name or "\0" in key or len(key.encode()) > MAX_KEY_BYTES:
        raise ControlError(
            f"control keys have the form `topic/name` with at most {MAX_KEY_BYTES} bytes, not {key[:80]!r}"
        )
    return key


def check_version(key: str, expected: int | None, found: int) -> None:
    """Raises VersionConflictError unless `found` is the expected version."""
    if expected is not None and expected != found:
        raise VersionConflictError(key, expected, found)
