"""Embedded control store: one node's control state in LMDB, shared by its processes. The default engine.

Law: a write is on disk when it returns, and its version is the LMDB transaction number. Lookups take no
lock. Every topic's newest version is stored with the keys, so a cache notices a change in a
microsecond. Leases are documents under `leases/`: a conditional write decides the holder, the machine's
clock the expiry.
Invariant: one environment per process, opened after the fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
import threading
from typing import TYPE_CHECKING, Any, Final, Self

import lmdb
import msgspec

from meshd.control.control_api import (
    ABSENT,
    ControlError,
    Lease,
    LeaseLostError,
    RevisionPin,
    VersionConflictError,
    Versioned,
    check_key,
    check_version,
)
from meshd.control.watchers import differences
from meshd.util.durable_directories import make_directory, sync_directory
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from meshd.control.control_api import Change, ControlStore, Write
    from meshd.util.clock import Clock


_MODIFIED: Final = 2  # IN_MODIFY
_libc = ctypes.CDLL(None, use_errno=True)


class FileChanges:
    """Calls `changed` on the event loop after each write to a file, while the block runs. Raises OSError if
    the machine cannot say so: it has too many watches, or is not Linux."""

    def __init__(self, path: Path, changed: Callable[[], None]) -> None:
        self._changed, self._loop = changed, asyncio.get_running_loop()
        try:
            self._fd = _check(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        except AttributeError as error:
            raise OSError("no inotify here") from error
        try:
            _check(_libc.inotify_add_watch(self._fd, os.fsencode(path), _MODIFIED))
        except OSError:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        self._loop.add_reader(self._fd, self._on_readable)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _on_readable(self) -> None:
        os.read(self._fd, 65536)
        self._changed()


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class _Holding(msgspec.Struct, frozen=True):
    holder: str
    expires_ms: int


_decode = msgspec.json.Decoder(_Holding).decode


class ClockLeases:
    """Leases for a ControlStore, built on its keys and values."""

    def __init__(self, store: ControlStore, clock: Clock) -> None:
        self._store, self._clock = store, clock

    async def acquire_lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        """See ControlStore.acquire_lease."""
        current = await self._store.get(_key(name))
        if current is not None:
            held = _decode(current.value)
            if held.holder != holder and held.expires_ms > self._clock.now_ms():
                return None
        try:
            return await self._write(name, holder, ttl, current.version if current else ABSENT)
        except VersionConflictError:
            return None  # another process has acquired it

    async def renew_lease(self, lease: Lease) -> Lease:
        """See ControlStore.renew_lease. An expired lease is still renewed unless another holder has taken
        it."""
        try:
            return await self._write(lease.name, lease.holder, lease.ttl, lease.version)
        except VersionConflictError:
            raise LeaseLostError(f"the lease {lease.name} is no longer held by {lease.holder}") from None

    async def release_lease(self, lease: Lease) -> None:
        """See ControlStore.release_lease."""
        try:
            await self._store.delete(_key(lease.name), expect=lease.version)
        except VersionConflictError:
            return

    async def lease_holders(self, prefix: str) -> dict[str, str]:
        """See ControlStore.lease_holders."""
        now, cut = self._clock.now_ms(), len(_key(""))
        held = {
            key[cut:]: _decode(entry.value)
            for key, entry in (await self._store.list_all(_key(prefix))).items()
        }
        return {name: holding.holder for name, holding in held.items() if holding.expires_ms > now}

    async def _write(self, name: str, holder: str, ttl: float, expect: int) -> Lease:
        expires = self._clock.now_ms() + int(ttl * 1000)
        value = msgspec.json.encode(_Holding(holder, expires))
        version = await self._store.put(_key(name), value, expect=expect)
        return Lease(name, holder, ttl, expires, version)


def _key(name: str) -> str:
    return f"leases/{name}"


_MAP_BYTES = 1 << 30  # address space; ten million small documents
_VERSION = struct.Struct(">Q")
_POLL = 0.1  # seconds until a watch sees another process's write where the kernel does not tell of writes
_LAST_LOOK = 2.0  # the same where it does: against a write of which it did not tell


class _PinnedRevisions(RevisionPin):
    """See ControlStore.pin_revisions. One thread at a time uses it; other threads read the revisions
    themselves. All of them are read in one transaction, and only if there was a write since the last time."""

    __slots__ = ("_env", "_latest", "_topics", "_txn", "version")

    def __init__(self, env: lmdb.Environment, topics: Any) -> None:
        super().__init__()
        self._env, self._topics = env, topics
        self.version = -1
        self._latest: dict[str, int] = {}
        self._txn: Any = None

    def __enter__(self) -> None:
        self._txn = txn = self._env.begin(db=self._topics)
        if (version := txn.id()) != self.version:
            self.version, self._latest = version, {}
        self.known, self.thread = self._latest, threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self.known = None
        self._txn.abort()

    def read(self, topic: str) -> int:
        """Returns a revision that is not known yet."""
        found = self._latest[topic] = _revision(self._txn.get(topic.encode()))
        return found


def _revision(value: bytes | None) -> int:
    return 0 if value is None else int(_VERSION.unpack(value)[0])


class EmbeddedControl:
    """A ControlStore in `directory`, which is created if missing. Raises ControlError."""

    restores = 0  # a backup is restored only while no process has the store open

    def __init__(self, directory: Path, clock: Clock, *, poll: float = _POLL) -> None:
        make_directory(directory, 0o700)
        is_new = not (directory / "data.mdb").exists()
        try:
            self._env = lmdb.open(
                str(directory), map_size=_MAP_BYTES, max_dbs=4, max_readers=1024, mode=0o600
            )
            self._env.reader_check()  # frees reader slots of killed processes
            self._entries = self._env.open_db(b"entries")
            self._topics = self._env.open_db(b"topics")
            if is_new:  # or a power cut takes the file's name, and all that is in it
                sync_directory(directory)
        except lmdb.Error as error:
            raise ControlError(f"cannot open the control store in {directory}: {error}") from error
        self._directory, self._poll, self._closed = directory, poll, False
        self.pin = _PinnedRevisions(self._env, self._topics)
        self._written = asyncio.Event()
        self._writing = threading.Lock()
        self._leases = ClockLeases(self, clock)

    def __repr__(self) -> str:
        return f"<EmbeddedControl {self._directory}{' closed' if self._closed else ''}>"

    def pin_revisions(self) -> _PinnedRevisions:
        return self.pin

    def revision(self, topic: str) -> int:
        known = self.pin.known
        if known is None or self.pin.thread != threading.get_ident():
            return self._read_revision(topic)
        found = known.get(topic)
        return self.pin.read(topic) if found is None else found

    def complete_revision(self, topic: str) -> int:
        return self.revision(topic)  # a deletion has one, too, for every process

    def _read_revision(self, topic: str) -> int:
        with self._env.begin(db=self._topics) as txn:
            return _revision(txn.get(topic.encode()))

    def cached_entries(self, topic: str) -> Mapping[str, Versioned]:
        return self._scan(f"{topic}/")

    async def get(self, key: str) -> Versioned | None:
        self._check_open()
        name = check_key(key).encode()
        with self._env.begin(db=self._entries) as txn:
            found = txn.get(name)
        return None if found is None else _unpack(found)

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int:
        version = await self._write(lambda txn: self._put(txn, check_key(key), bytes(value), expect))
        self._wake()
        return version

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        version = await self._write(lambda txn: self._delete(txn, check_key(key), expect))
        self._wake()
        return version > 0

    async def write_many(self, writes: Sequence[Write]) -> None:
        await self._write(lambda txn: self._put_many(txn, writes))
        self._wake()

    async def get_version(self, key: str) -> int:
        found = await self.get(key)
        return ABSENT if found is None else found.version

    async def list_all(self, prefix: str) -> Mapping[str, Versioned]:
        self._check_open()
        return self._scan(prefix)

    async def watch(self, topic: str) -> AsyncGenerator[Change, None]:
        seen: Mapping[str, Versioned] = {}
        at, patience = -1, self._poll
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(FileChanges(self._directory / "data.mdb", self._wake))
                patience = _LAST_LOOK
            seconds = patience
            while not self._closed:
                written = self._written
                revision = self.revision(topic)
                if revision != at:
                    now = self.cached_entries(topic)
                    for change in differences(seen, now):
                        yield change
                    seen, at = now, revision
                # The kernel tells of a commit before readers see it: LMDB publishes its number after that.
                seconds = self._poll if await _wait_for_write(written, seconds) else patience

    async def acquire_lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        return await self._leases.acquire_lease(name, holder, ttl)

    async def renew_lease(self, lease: Lease) -> Lease:
        return await self._leases.renew_lease(lease)

    async def renew_lease_and_get_version(self, lease: Lease, key: str) -> tuple[Lease, int]:
        version = await self.get_version(key)
        return await self.renew_lease(lease), version

    async def release_lease(self, lease: Lease) -> None:
        await self._leases.release_lease(lease)

    async def lease_holders(self, prefix: str) -> Mapping[str, str]:
        return await self._leases.lease_holders(prefix)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._written.set()
            with self._writing:  # closing under a running transaction would crash the process
                self._env.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ControlError("the control store is closed")

    def _wake(self) -> None:
        self._written.set()
        self._written = asyncio.Event()

    def _scan(self, prefix: str) -> Mapping[str, Versioned]:
        start, found = prefix.encode(), {}
        with self._env.begin(db=self._entries) as txn, txn.cursor() as cursor:
            if cursor.set_range(start):
                for key, value in cursor:
                    if not key.startswith(start):
                        break
                    found[key.decode()] = _unpack(value)
        return found

    async def _write(self, change: Callable[[lmdb.Transaction], int]) -> int:
        """Runs a write transaction in a thread, because it waits for other processes and for the disk."""
        self._check_open()
        return await asyncio.to_thread(self._commit, change)

    def _commit(self, change: Callable[[lmdb.Transaction], int]) -> int:
        try:
            with self._writing, self._env.begin(db=self._entries, write=True) as txn:
                return change(txn)
        except lmdb.MapFullError as error:
            raise ControlError(
                f"the control store {self._directory} is full; delete unused buckets, users or jobs"
            ) from error
        except lmdb.Error as error:
            raise ControlError(f"the control store {self._directory} cannot be written: {error}") from error

    def _put(self, txn: lmdb.Transaction, key: str, value: bytes, expect: int | None) -> int:
        check_version(key, expect, _version_of(txn, key))
        version = self._bump_version(txn, key)
        txn.put(key.encode(), _VERSION.pack(version) + value)
        return version

    def _delete(self, txn: lmdb.Transaction, key: str, expect: int | None) -> int:
        found = _version_of(txn, key)
        check_version(key, expect, found)
        if not found:
            return 0
        txn.delete(key.encode())
        return self._bump_version(txn, key)

    def _put_many(self, txn: lmdb.Transaction, writes: Sequence[Write]) -> int:
        """Writes all or none: an exception aborts the transaction."""
        for write in writes:
            key = check_key(write.key)
            if write.value is None:
                self._delete(txn, key, write.expect)
            else:
                self._put(txn, key, bytes(write.value), write.expect)
        return len(writes)

    def _bump_version(self, txn: lmdb.Transaction, key: str) -> int:
        version = int(txn.id())
        txn.put(key.partition("/")[0].encode(), _VERSION.pack(version), db=self._topics)
        return version


def _version_of(txn: lmdb.Transaction, key: str) -> int:
    found = txn.get(key.encode())
    return 0 if found is None else _unpack(bytes(found)).version


def _unpack(stored: bytes) -> Versioned:
    return Versioned(bytes(stored[_VERSION.size :]), int(_VERSION.unpack_from(stored)[0]))


async def _wait_for_write(event: asyncio.Event, seconds: float) -> bool:
    """Wait for at most so many seconds; return whether the event is set."""
    # Not wait_for: in Python 3.11 it loses a cancellation that coincides with the event.
    with contextlib.suppress(TimeoutError):
        async with timeout(seconds):
            await event.wait()
    return event.is_set()
