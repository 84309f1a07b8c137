"""Control store on etcd: a local copy that a watch keeps current, writes and leases through the gateway.

Law: versions are etcd revisions. `revision` and `cached_entries` read the copy and never wait; a write
is in the copy when it returns. While etcd is unreachable the copy stays as it is and writes fail within
seconds. Leases are etcd's own: the servers' clocks decide their expiry, never a holder's clock.
Invariant: the copy is the prefix at one revision, and revisions only rise; a restore from a backup
starts a new history, which the copy follows. A store without the cluster's id counts as unreachable.
Invariant: what the copy has, and what a read or a write returns, is on etcd's disk; see `durability_barrier`.

Each process of each node gets everything that is watched, so the reports of nodes, which change often, are
not: they are outside the copy (UNWATCHED), and readers fetch them with `get` and `list_all`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from meshd.control.control_api import (
    MESH_ID,
    UNPINNED,
    ControlError,
    VersionConflictError,
    Versioned,
    check_key,
)
from meshd.control.etcd.durability_barrier import DurabilityBarrier
from meshd.control.etcd.etcd_leases import EtcdLeases
from meshd.control.etcd.gateway import EtcdError, decoded, encoded, number
from meshd.control.watchers import Watchers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from meshd.control.control_api import Change, Lease, Write
    from meshd.control.etcd.gateway import Gateway


class LocalCopy(NamedTuple):
    """All keys under the prefix at `revision`, in order. `topics`: the revision of each topic's newest
    change; `restores`: how many histories preceded this one."""

    entries: Mapping[str, Versioned]
    topics: Mapping[str, int]
    revision: int
    restores: int = 0

    def after_reread(self, entries: Mapping[str, Versioned], revision: int) -> LocalCopy:
        """Returns the copy that follows this one if `entries` are all keys at `revision`."""
        topics = dict(self.topics)
        for key, entry in entries.items():
            topic = topic_of(key)
            topics[topic] = max(topics.get(topic, 0), entry.version)
        for key in self.entries.keys() - entries.keys():  # deleted at some revision up to this one
            topics[topic_of(key)] = revision
        restores = self.restores
        # A different history: anything may have changed without a trace, so every topic counts as changed.
        if not self._came_before(entries, revision):
            restores, topics = restores + 1, dict.fromkeys(topics, revision)
        return LocalCopy(dict(sorted(entries.items())), topics, revision, restores)

    def _came_before(self, entries: Mapping[str, Versioned], revision: int) -> bool:
        """Returns True if this copy belongs to the history that has `entries` at `revision`: each entry that
        is not newer than this copy is in it."""
        return self.revision <= revision and all(
            entry.version > self.revision or self.entries.get(key) == entry for key, entry in entries.items()
        )


def topic_of(key: str) -> str:
    """Returns the part of a key before the first slash."""
    return key.partition("/")[0]


T = TypeVar("T")
_log = logging.getLogger(__name__)
_IDLE: Final = 10.0  # seconds without a message after which a watch is restarted
_PAUSE: Final = 0.5
_PATIENCE: Final = 5.0  # seconds for this process's own write to arrive through the watch
_TXN_WRITES: Final = 100  # etcd accepts 128 in one transaction
UNWATCHED: Final = frozenset({"moves", "scrubs"})
"""Topics that the copy does not have. Earlier releases watch them; what those wrote is read, too."""
_FOREIGN: Final = (
    "etcd was emptied or belongs to another mesh: nothing is read from it or written to it; restore this "
    "mesh's control store from its backup"
)


class EtcdControl:
    """A ControlStore under `prefix` (ending in `/`) of an etcd cluster. Raises ControlError if it cannot be
    read at the start. Create it after forking; `close` ends its thread and the gateway."""

    def __init__(self, gateway: Gateway, prefix: str = "/shardmesh/") -> None:
        self._gateway, self._prefix, self.pin = gateway, prefix.encode(), UNPINNED
        self._end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        self._reports = self._prefix[:-1] + b"@reports/"
        self._closed = self._lost = self._stream_broken = self._foreign = False
        self._changed = threading.Condition()
        self._watchers = Watchers()
        self._barrier = DurabilityBarrier(gateway, self._prefix)
        self._leases = EtcdLeases(gateway, self._prefix, self._barrier)
        try:
            self._copy = self._load(LocalCopy({}, {}, 0))
        except ControlError:
            gateway.close()
            raise
        self._thread = threading.Thread(target=self._follow, name="etcd-watch", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<EtcdControl {self._gateway!r} at {self._copy.revision}{' closed' if self._closed else ''}>"

    # --- the copy ---------------------------------------------------------------------------------------

    def revision(self, topic: str) -> int:
        return self._copy.topics.get(topic, 0)

    def complete_revision(self, topic: str) -> int:
        return self._copy.revision

    @property
    def restores(self) -> int:
        return self._copy.restores

    def pin_revisions(self) -> AbstractContextManager[object]:
        return nullcontext()  # `revision` is a dictionary look-up

    def cached_entries(self, topic: str) -> Mapping[str, Versioned]:
        prefix = f"{topic}/"
        return {key: entry for key, entry in self._copy.entries.items() if key.startswith(prefix)}

    def _load(self, before: LocalCopy) -> LocalCopy:
        """Reads everything, at the start and when the watch has fallen too far behind or ended."""
        self._barrier.forget_version()
        answer = self._range(self._prefix, self._end)
        self._barrier.learn_version()
        return before.after_reread(dict(self._entries_of(answer)), number(answer["header"].get("revision")))

    def _follow(self) -> None:
        """The thread: watches, and reads again what the watch missed."""
        while not self._closed:
            quiet = False
            try:
                quiet = self._watch()
                self._lost = False
            except EtcdError as error:
                level = logging.DEBUG if self._lost or self._closed else logging.WARNING
                _log.log(
                    level, "the control store is unreachable: %s; reads and writes of data continue", error
                )
                self._lost = True
            except Exception:
                _log.exception("the watch of the control store failed and will be restarted")
            if not self._closed and not quiet:
                threading.Event().wait(_PAUSE)

    def _watch(self) -> bool:
        """Watches for changes. Returns True if it ended because nothing happened: the next watch must begin
        at once, because writers wait for their own writes to arrive."""
        if self._stream_broken:
            self._reload_after_break()
        self._stream_broken = True
        wanted = {
            "key": encoded(self._prefix),
            "range_end": encoded(self._end),
            "start_revision": str(self._copy.revision + 1),
        }
        for message in self._gateway.stream("watch", {"create_request": wanted}, _IDLE):
            if not message:  # idle timeout: nothing was missed
                self._stream_broken = False
                return True
            if self._closed or message.get("canceled"):  # etcd has compacted revisions that this watch needs
                return False
            if message.get("events") and not self._barrier.is_kept(message):
                raise EtcdError("etcd has restarted or has another leader")
            self._apply(message)
        return False

    def _reload_after_break(self) -> None:
        """Reads everything after a broken watch. The copy never goes back, unless etcd was restored from a
        backup: then revisions continue from the backup's, and a watch for a later one would wait forever."""
        before = self._copy
        copy = self._load(before)
        self._check_mesh(copy.entries)
        restored = copy.restores > before.restores
        if restored:
            revisions = {"revision": copy.revision, "before": before.revision}
            _log.error("etcd was restored from a backup: later changes are lost", extra=revisions)
        if restored or copy.revision >= self._copy.revision:
            self._install(copy)

    def _apply(self, message: Mapping[str, Any]) -> None:
        events = message.get("events") or []
        revision = max([number(event["kv"]["mod_revision"]) for event in events], default=0)
        with self._changed:  # another thread may have reloaded the copy meanwhile
            before = self._copy
            if revision <= before.revision:
                return
            entries, topics = dict(before.entries), dict(before.topics)
            for event in events:
                key, at = self._name(event["kv"]), number(event["kv"]["mod_revision"])
                topics[topic_of(key)] = at
                if event.get("type") == "DELETE":
                    entries.pop(key, None)
                else:
                    entries[key] = Versioned(decoded(event["kv"].get("value")), at)
            self._check_mesh(entries)
            if entries.keys() - before.entries.keys():
                entries = dict(sorted(entries.items()))
            self._install(before._replace(entries=entries, topics=topics, revision=revision))

    def _check_mesh(self, entries: Mapping[str, Versioned]) -> None:
        """Raises EtcdError if these entries do not have the mesh id of the copy."""
        mine, theirs = self._copy.entries.get(MESH_ID), entries.get(MESH_ID)
        self._foreign = mine is not None and (theirs is None or theirs.value != mine.value)
        if self._foreign:
            raise EtcdError(_FOREIGN)

    def _install(self, copy: LocalCopy) -> None:
        with self._changed:
            self._copy = copy
            self._changed.notify_all()
        self._watchers.wake()

    def _wait_for_revision(self, revision: int) -> None:
        """Waits until the copy has the write at `revision`."""
        with self._changed:
            if self._changed.wait_for(lambda: self._copy.revision >= revision or self._closed, _PATIENCE):
                return
        self._reload_if_newer()

    def _reload_if_newer(self) -> None:
        copy = self._load(self._copy)
        with self._changed:
            if copy.revision > self._copy.revision:
                self._install(copy)

    # --- reading and writing ------------------------------------------------------------------------------

    async def get(self, key: str) -> Versioned | None:
        answer = await self._in_thread(lambda: self._range(self._key(key)))
        return next((entry for _, entry in self._entries_of(answer)), None)

    async def get_version(self, key: str) -> int:
        answer = await self._in_thread(lambda: self._range(self._key(key), keys_only=True))
        return next((entry.version for _, entry in self._entries_of(answer)), 0)

    async def list_all(self, prefix: str) -> Mapping[str, Versioned]:
        start = self._place_of(prefix) + prefix.encode()
        end = start[:-1] + bytes([start[-1] + 1])
        found = dict(self._entries_of(await self._in_thread(lambda: self._range(start, end))))
        earlier = self.cached_entries(topic_of(prefix)) if topic_of(prefix) in UNWATCHED else {}
        return {key: entry for key, entry in earlier.items() if key.startswith(prefix)} | found

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int:
        name = self._key(key)
        put = {"request_put": {"key": encoded(name), "value": encoded(bytes(value))}}
        changes = [put, *self._removal_of_earlier(key)]
        version = await self._in_thread(lambda: self._change(changes, {key: expect}))
        assert version is not None, "a put always changes something"
        return version

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        name = self._key(key)
        gone = {"request_delete_range": {"key": encoded(name), "prev_kv": True}}
        changes = [gone, *self._removal_of_earlier(key)]
        return await self._in_thread(lambda: self._change(changes, {key: expect})) is not None

    def _removal_of_earlier(self, key: str) -> list[Any]:
        """Returns the deletion of what an earlier release wrote for an unwatched key."""
        if key not in self._copy.entries or topic_of(key) not in UNWATCHED:
            return []
        return [{"request_delete_range": {"key": encoded(self._prefix + key.encode())}}]

    async def write_many(self, writes: Sequence[Write]) -> None:
        for write in writes:
            check_key(write.key)
        for start in range(0, len(writes), _TXN_WRITES):
            part = writes[start : start + _TXN_WRITES]
            requests = [
                {"request_delete_range": {"key": encoded(self._key(write.key))}}
                if write.value is None
                else {
                    "request_put": {
                        "key": encoded(self._key(write.key)),
                        "value": encoded(bytes(write.value)),
                    }
                }
                for write in part
            ]
            await self._in_thread(
                partial(self._change, requests, {write.key: write.expect for write in part})
            )

    def _change(self, requests: list[Any], expects: Mapping[str, int | None]) -> int | None:
        """Performs the writes; returns the revision at which something changed, once the copy has it; None if
        nothing did."""
        answer = self._txn(requests, expects)
        self._barrier.await_change(answer)
        responses = answer.get("responses") or []
        if not any(
            "response_put" in r or number(r["response_delete_range"].get("deleted")) for r in responses
        ):
            return None
        revision = number(answer["header"].get("revision"))
        if not all(topic_of(key) in UNWATCHED for key in expects):
            self._wait_for_revision(revision)
        return revision

    def _txn(self, requests: list[Any], expects: Mapping[str, int | None]) -> dict[str, Any]:
        """Performs all requests if every key is at its expected version. Raises VersionConflictError."""
        conditions = {key: expect for key, expect in expects.items() if expect is not None}
        compare = [
            {
                "target": "MOD",
                "result": "EQUAL",
                "key": encoded(self._key(key)),
                "mod_revision": str(expect),
            }
            for key, expect in conditions.items()
        ]
        look = [{"request_range": {"key": encoded(self._key(key))}} for key in conditions]
        body = {"compare": compare, "success": requests, "failure": look}
        answer = self._gateway.call("kv/txn", body, repeatable=not conditions)
        if not answer.get("succeeded"):
            self._raise_conflict(conditions, answer)
        return answer

    def _raise_conflict(self, conditions: Mapping[str, int], answer: Mapping[str, Any]) -> None:
        self._catch_up(conditions, answer)
        for (key, expect), response in zip(conditions.items(), answer.get("responses") or [], strict=False):
            found = next((entry.version for _, entry in self._entries_of(response["response_range"])), 0)
            if found != expect:
                raise VersionConflictError(key, expect, found)
        raise EtcdError("etcd rejected a conditional write although every version matches")

    def _catch_up(self, conditions: Mapping[str, int], answer: Mapping[str, Any]) -> None:
        """Waits until the copy has the state that caused a conflict, because a retry reads the copy."""
        if all(topic_of(key) in UNWATCHED for key in conditions):
            return
        versions: dict[str, int] = {}
        for response in answer.get("responses") or []:
            versions |= {key: entry.version for key, entry in self._entries_of(response["response_range"])}
        self._wait_for_revision(max(versions.values(), default=0))
        if any(key in self._copy.entries for key in conditions if key not in versions):
            self._reload_if_newer()

    def _range(self, start: bytes, end: bytes = b"", *, keys_only: bool = False) -> dict[str, Any]:
        body = {"key": encoded(start), "keys_only": keys_only} | ({"range_end": encoded(end)} if end else {})
        while True:
            answer = self._gateway.call("kv/range", body, repeatable=True)
            if self._barrier.is_kept(answer):
                return answer

    def _entries_of(self, answer: Mapping[str, Any]) -> list[tuple[str, Versioned]]:
        return [
            (self._name(kv), Versioned(decoded(kv.get("value")), number(kv["mod_revision"])))
            for kv in answer.get("kvs") or []
        ]

    def _name(self, kv: Mapping[str, Any]) -> str:
        return decoded(kv["key"]).removeprefix(self._prefix).removeprefix(self._reports).decode()

    def _key(self, key: str) -> bytes:
        return self._place_of(key) + check_key(key).encode()

    def _place_of(self, key: str) -> bytes:
        return self._reports if topic_of(key) in UNWATCHED else self._prefix

    async def _in_thread(self, call: Callable[[], T]) -> T:
        if self._closed:
            raise ControlError("the control store is closed")
        if self._foreign:
            raise EtcdError(_FOREIGN)
        return await asyncio.to_thread(call)

    # --- watches and leases -------------------------------------------------------------------------------

    def watch(self, topic: str) -> AsyncGenerator[Change, None]:
        return self._watchers.changes(lambda: self.cached_entries(topic))

    async def acquire_lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        return await self._in_thread(lambda: self._leases.acquire_lease(name, holder, ttl))

    async def renew_lease(self, lease: Lease) -> Lease:
        return await self._in_thread(lambda: self._leases.renew_lease(lease))

    async def renew_lease_and_get_version(self, lease: Lease, key: str) -> tuple[Lease, int]:
        entry = self._copy.entries.get(key)
        copied, place = 0 if entry is None else entry.version, self._key(key)
        return await self._in_thread(lambda: self._leases.renew_lease_and_get_version(lease, place, copied))

    async def release_lease(self, lease: Lease) -> None:
        await self._in_thread(lambda: self._leases.release_lease(lease))

    async def lease_holders(self, prefix: str) -> Mapping[str, str]:
        return await self._in_thread(lambda: self._leases.lease_holders(prefix))

    def close(self) -> None:
        self._closed = True
        self._gateway.close()
        with self._changed:
            self._changed.notify_all()
        self._watchers.close()
