"""Interface of the control store: versioned keys, conditional writes, watches and leases.

Law: keys are `topic/name`. Versions rise with every write and are never reused, except after a restore
from a backup, which `restores` counts. `get`, `put`, `delete` and `list_all` ask the engine and are
linearizable; `revision` and `cached_entries` answer from this process's copy without waiting and serve
the hot paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from meshd.errors import MeshdError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence
    from contextlib import AbstractContextManager

ABSENT: Final = 0
"""As `expect`: the key must not exist. Real versions are above it."""
MAX_KEY_BYTES: Final = 480
MESH_ID: Final = "mesh/id"
"""The key that says whose store it is. Written once: where it is another, so is the store."""


class ControlError(MeshdError):
    """The control store cannot do what was asked (bad key, full, unreachable)."""


class VersionConflictError(ControlError):
    """The key is not at the expected version. Read it again, decide again."""

    def __init__(self, key: str, expected: int, found: int) -> None:
        super().__init__(f"{key} is at version {found}, not {expected}; read it again before changing it")
        self.key, self.expected, self.found = key, expected, found


class LeaseLostError(ControlError):
    """The lease ran out or was taken; its holder must stop what it did under it."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A value and the version of the write that made it."""

    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Write:
    """What is to become of a key: None deletes it. `expect` as in `ControlStore.put`."""

    key: str
    value: bytes | None
    expect: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One key's new state; `entry` is None when the key was deleted."""

    key: str
    entry: Versioned | None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to act as `name` until `expires_ms` (engine's wall clock), proved by `version`."""

    name: str
    holder: str
    ttl: float
    expires_ms: int
    version: int


class ControlStore(Protocol):
    """See the module's docstring. All methods may raise ControlError."""

    def revision(self, topic: str) -> int:
        """Version of the newest write under `topic/` known here; 0 if none. A microsecond; never waits. Who
        remembers what was there by its revision remembers `restores` with it.
        """

    @property
    def restores(self) -> int:
        """How often this process saw that the store was put back from a backup. A microsecond."""

    def pin_revisions(self) -> AbstractContextManager[object]:
        """Within it, in this thread, `revision` looks once a topic and then says the same. Nothing may wait
        inside: for one request's questions, answered in one go."""

    def cached_entries(self, topic: str) -> Mapping[str, Versioned]:
        """Every key under `topic/` as this process knows it; at least as new as `revision` said before."""

    async def get(self, key: str) -> Versioned | None:
        """The key's value, or None."""

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int:
        """Write durably; returns the new version.

        `expect`: None writes always, ABSENT creates, a version replaces exactly that one; otherwise
        VersionConflictError. When this is cancelled the write may or may not have happened.
        """

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        """Remove durably; False if it was not there (with `expect`: VersionConflictError)."""

    async def write_many(self, writes: Sequence[Write]) -> None:
        """Many keys at the cost of one, durably. When it raises VersionConflictError, some of them may be
        written; an engine that can writes all or none. Keys written together may have one version.
        """

    async def list_all(self, prefix: str) -> Mapping[str, Versioned]:
        """Every key that starts with `prefix`, in key order."""

    def watch(self, topic: str) -> AsyncGenerator[Change, None]:
        """First every present key, then changes as they happen. States between two looks may be skipped, the
        last never is. Close it (`aclosing`) when done."""

    async def acquire_lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        """Take the lease `name` for `ttl` seconds; None while another holder has it. The holder may take its
        own again, which makes earlier copies of it void."""

    async def renew_lease(self, lease: Lease) -> Lease:
        """Another `ttl` seconds from now. Raises LeaseLostError."""

    async def release_lease(self, lease: Lease) -> None:
        """Give it up early. A lease that is lost already is no error."""

    async def lease_holders(self, prefix: str) -> Mapping[str, str]:
        """Who holds the leases whose names start with `prefix`, by name, as the engine has it now."""

    def close(self) -> None:
        """Release the engine. Watches end. Idempotent."""


def check_key(key: str) -> str:
    """`key` itself if it is `topic/name` and short enough. Raises ControlError."""
    topic, slash, name = key.partition("/")
    if not topic or not slash or not name or "\0" in key or len(key.encode()) > MAX_KEY_BYTES:
        raise ControlError(
            f"control keys are `topic/name` of at most {MAX_KEY_BYTES} bytes, not {key[:80]!r}"
        )
    return key


def check_version(key: str, expected: int | None, found: int) -> None:
    """Raise VersionConflictError unless `found` is what was expected."""
    if expected is not None and expected != found:
        raise VersionConflictError(key, expected, found)
