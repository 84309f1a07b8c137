"""Control store on the Kubernetes API: one resource per key, local copies kept current by watches.

Law: versions are resource versions. `revision` and `cached_entries` read the copy and never wait; a
write is in the copy when it returns. While the API is unreachable the copy stays as it is and writes
fail within seconds. Leases are coordination.k8s.io/v1 Leases. No two clocks are compared: a lease has
expired when this process has seen it unchanged for its whole duration, so a new process waits once for
that long. Time in which the API does not answer does not count: no holder could renew, either.
"""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from meshd.control.control_api import (
    ABSENT,
    UNPINNED,
    ControlError,
    Lease,
    LeaseLostError,
    VersionConflictError,
    check_key,
)
from meshd.control.kubernetes.api_client import (
    AmbiguousError,
    ApiClient,
    ApiStatusError,
    find_api_server,
    pod_namespace,
)
from meshd.control.kubernetes.resource_encoding import (
    OPEN_TOPICS,
    RESOURCES,
    STORE,
    TOPIC,
    decode_resource,
    encode_resource,
    resource_name,
    resource_of,
    topic_label,
)
from meshd.control.kubernetes.watch_cache import WatchCache
from meshd.control.watchers import Watchers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from meshd.config import KubernetesAddress
    from meshd.control.control_api import Change, Versioned, Write
    from meshd.control.kubernetes.resource_encoding import Entry, Resource
    from meshd.util.clock import Clock


NAME: Final = "shardmesh.io/lease"


class KubernetesLeases:
    """Leases as Lease resources of Kubernetes. Blocking: for threads."""

    def __init__(self, api: ApiClient, namespace: str, store: str, clock: Clock) -> None:
        self._api, self._store, self._clock = api, store, clock
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._seen: dict[str, tuple[int, float]] = {}  # name → version, and when it was first seen: `_now`
        self._written: dict[str, dict[str, Any]] = {}  # name → what this process wrote last

    def acquire_lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        """See ControlStore.acquire_lease. Rounds the time up to whole seconds."""
        present = self._read(name)
        if present is None:
            return self._write("POST", self._path, name, holder, ttl, None)
        spec = present.get("spec") or {}
        if spec.get("holderIdentity") not in (holder, None, "") and not self._ran_out(name, present):
            return None
        return self._write("PUT", self._place(name), name, holder, ttl, present)

    def renew_lease(self, lease: Lease) -> Lease:
        """See ControlStore.renew_lease. Also renews an expired lease that nobody else has acquired. One call
        is enough, because the API only replaces the version that this process wrote.
        """
        present, found = self._written.get(lease.name), None
        if present is None or _lease_version(present) != lease.version:
            present = self._read(lease.name)
        if present is not None and _lease_version(present) == lease.version:
            found = self._write("PUT", self._place(lease.name), lease.name, lease.holder, lease.ttl, present)
        if found is None:
            raise LeaseLostError(f"the lease {lease.name} is no longer {lease.holder}'s")
        return found

    def release_lease(self, lease: Lease) -> None:
        """See ControlStore.release_lease."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"resourceVersion": str(lease.version)},
        }
        self._written.pop(lease.name, None)
        try:
            self._api.call("DELETE", self._place(lease.name), options)
        except ApiStatusError as error:
            if error.status not in (404, 409):
                raise

    def lease_holders(self, prefix: str) -> dict[str, str]:
        """See ControlStore.lease_holders. A lease that is seen for the first time counts as held."""
        found = self._api.call("GET", self._path, labelSelector=f"{STORE}={self._store}").get("items") or []
        held = {}
        for item in found:
            name = (item["metadata"].get("annotations") or {}).get(NAME, "")
            holder = (item.get("spec") or {}).get("holderIdentity")
            if name and holder and name.startswith(prefix) and not self._ran_out(name, item):
                held[name] = holder
        return held

    def _ran_out(self, name: str, present: dict[str, Any]) -> bool:
        version, now = _lease_version(present), self._now()
        seen, since = self._seen.get(name, (0, now))
        if seen != version:
            self._seen[name] = (version, now)
            return False
        return now - since >= float(present["spec"].get("leaseDurationSeconds") or 0)

    def _now(self) -> float:
        """Return a clock that stands still while the API does not answer, in seconds."""
        return self._clock.monotonic() - self._api.silence()

    def _write(
        self, method: str, path: str, name: str, holder: str, ttl: float, present: dict[str, Any] | None
    ) -> Lease | None:
        """Return the lease, or None if another process was faster."""
        now_ms, old = self._clock.now_ms(), (present or {}).get("spec") or {}
        now = (
            datetime.fromtimestamp(now_ms / 1000, UTC)
            .isoformat(timespec="microseconds")
            .replace("+00:00", "Z")
        )
        mine = old.get("holderIdentity") == holder
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, math.ceil(ttl)),
            "acquireTime": old["acquireTime"] if mine else now,
            "renewTime": now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (present is not None and not mine),
        }
        metadata: dict[str, Any] = {
            "name": resource_name(self._store, f"leases/{name}"),
            "labels": {STORE: self._store},
        }
        metadata["annotations"] = {NAME: name}
        if present is not None:
            metadata["resourceVersion"] = present["metadata"]["resourceVersion"]
            # even of two writes within a microsecond each is a change
            metadata["annotations"]["shardmesh.io/after"] = present["metadata"]["resourceVersion"]
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        try:
            answer = self._api.call(method, path, body, repeatable=False)
        except ApiStatusError as error:
            if error.status in (404, 409):
                return None
            raise
        self._written[name], version = answer, _lease_version(answer)
        self._seen[name] = (version, self._now())
        return Lease(name, holder, ttl, now_ms + int(ttl * 1000), version)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return self._api.call("GET", self._place(name))
        except ApiStatusError as error:
            if error.status == 404:
                return None
            raise

    def _place(self, name: str) -> str:
        return f"{self._path}/{resource_name(self._store, f'leases/{name}')}"


def _lease_version(document: dict[str, Any]) -> int:
    return int(document["metadata"]["resourceVersion"])


T = TypeVar("T")
_AT_ONCE: Final = 8  # calls of one write_many


class KubernetesControl:
    """The control store `name` in a namespace. Create it after forking; `close` ends its threads and
    connections. Raises ControlError if the first read fails."""

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        name: str,
        clock: Clock,
        *,
        open_topics: frozenset[str] = OPEN_TOPICS,
    ) -> None:
        self._api, self._name, self._open_topics, self.pin = api, name, open_topics, UNPINNED
        self._root = f"/api/v1/namespaces/{namespace}"
        self._closed = False
        self._watchers = Watchers()
        self._leases = KubernetesLeases(api, namespace, name, clock)
        self._mirrors: dict[Resource, WatchCache] = {}
        try:
            for resource in RESOURCES:
                self._mirrors[resource] = WatchCache(api, namespace, resource, name, self._watchers.wake)
        except ControlError:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<KubernetesControl {self._name} {self._mirrors}{' closed' if self._closed else ''}>"

    # --- the copy ---------------------------------------------------------------------------------------

    def revision(self, topic: str) -> int:
        return self._mirror(f"{topic}/").snapshot().topics.get(topic, 0)

    def complete_revision(self, topic: str) -> int:
        return self._mirror(f"{topic}/").snapshot().revision

    @property
    def restores(self) -> int:
        return sum(mirror.snapshot().restores for mirror in self._mirrors.values())

    def pin_revisions(self) -> AbstractContextManager[object]:
        return nullcontext()  # `revision` is a look at a dictionary

    def cached_entries(self, topic: str) -> Mapping[str, Versioned]:
        prefix = f"{topic}/"
        entries = self._mirror(prefix).snapshot().entries
        return {key: entry for key, entry in entries.items() if key.startswith(prefix)}

    def _mirror(self, key: str) -> WatchCache:
        return self._mirrors[resource_of(key, self._open_topics)]

    # --- reading and writing ------------------------------------------------------------------------------

    async def get(self, key: str) -> Versioned | None:
        found = await self._off(lambda: self._read(key))
        return found.value if found else None

    async def get_version(self, key: str) -> int:
        found = await self.get(key)
        return ABSENT if found is None else found.version

    async def list_all(self, prefix: str) -> Mapping[str, Versioned]:
        return await self._off(lambda: self._list(prefix))

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int:
        return await self._off(lambda: self._put(key, bytes(value), expect))

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        return await self._off(lambda: self._delete(key, expect))

    async def write_many(self, writes: Sequence[Write]) -> None:
        for write in writes:
            check_key(write.key)
        for start in range(0, len(writes), _AT_ONCE):
            part = [self._write(write) for write in writes[start : start + _AT_ONCE]]
            for result in await asyncio.gather(*part, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result

    async def _write(self, write: Write) -> None:
        if write.value is None:
            await self.delete(write.key, expect=write.expect)
        else:
            await self.put(write.key, write.value, expect=write.expect)

    def _put(self, key: str, value: bytes, expect: int | None) -> int:
        nonce, resource = uuid.uuid4().hex, resource_of(check_key(key), self._open_topics)
        body = encode_resource(resource, self._name, key, value, nonce, expect or 0)
        try:
            version = self._create(key, body) if expect == ABSENT else self._replace(key, body, expect)
        except ApiStatusError as error:
            if error.status not in (404, 409):
                raise
            raise self._conflict(key, expect or 0) from None
        except AmbiguousError:
            found = self._read(key)
            if found is None or found.nonce != nonce:
                raise
            version = found.value.version
        self._mirrors[resource].await_write(version)
        return version

    def _create(self, key: str, body: dict[str, Any]) -> int:
        return _version(self._api.call("POST", self._folder(key), body, repeatable=False))

    def _replace(self, key: str, body: dict[str, Any], expect: int | None) -> int:
        """Write a key. `expect`: the version to replace; None writes unconditionally."""
        while True:
            try:
                return _version(self._api.call("PUT", self._place(key), body, repeatable=expect is None))
            except ApiStatusError as error:
                if error.status != 404 or expect is not None:
                    raise
            try:
                return self._create(key, body)
            except ApiStatusError as error:
                if error.status != 409:
                    raise

    def _delete(self, key: str, expect: int | None) -> bool:
        while True:
            version = expect
            if version is None:
                found = self._read(key)
                if found is None:
                    return False
                version = found.value.version
            try:
                self._remove(key, version)
            except ApiStatusError as error:
                if error.status not in (404, 409):
                    raise
                if expect is not None:
                    raise self._conflict(key, expect) from None
                continue  # somebody else was quicker
            self._mirror(key).await_deletion(key, version)
            return True

    def _remove(self, key: str, version: int) -> None:
        preconditions = {"resourceVersion": str(version)}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        self._api.call("DELETE", self._place(key), options, repeatable=False)

    def _conflict(self, key: str, expect: int) -> VersionConflictError:
        """Return the error once the local copy has the change that it reports: a retry reads the copy."""
        found, mirror = self._read(key), self._mirror(key)
        if found is not None:
            mirror.await_write(found.value.version)
            return VersionConflictError(key, expect, found.value.version)
        there = mirror.snapshot().entries.get(key)
        if there is not None:
            mirror.await_deletion(key, there.version)
        return VersionConflictError(key, expect, 0)

    def _read(self, key: str) -> Entry | None:
        try:
            document = self._api.call("GET", self._place(key))
        except ApiStatusError as error:
            if error.status == 404:
                return None
            raise
        return decode_resource(resource_of(key, self._open_topics), document)

    def _list(self, prefix: str) -> dict[str, Versioned]:
        topic, slash, _ = prefix.partition("/")
        selector = f"{STORE}={self._name}" + (f",{TOPIC}={topic_label(topic)}" if slash else "")
        resources = (resource_of(prefix, self._open_topics),) if slash else RESOURCES
        found: dict[str, Versioned] = {}
        for resource in resources:
            answer = self._api.call("GET", f"{self._root}/{resource}", labelSelector=selector)
            entries = (decode_resource(resource, item) for item in answer.get("items") or [])
            found |= {each.key: each.value for each in entries if each and each.key.startswith(prefix)}
        return dict(sorted(found.items()))

    def _folder(self, key: str) -> str:
        return f"{self._root}/{resource_of(key, self._open_topics)}"

    def _place(self, key: str) -> str:
        return f"{self._folder(key)}/{resource_name(self._name, key)}"

    async def _off(self, call: Callable[[], T]) -> T:
        if self._closed:
            raise ControlError("the control store is closed")
        return await asyncio.to_thread(call)

    # --- watches and leases -------------------------------------------------------------------------------

    def watch(self, topic: str) -> AsyncGenerator[Change, None]:
        return self._watchers.changes(lambda: self.cached_entries(topic))

    async def acquire_lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        return await self._off(lambda: self._leases.acquire_lease(name, holder, ttl))

    async def renew_lease(self, lease: Lease) -> Lease:
        return await self._off(lambda: self._leases.renew_lease(lease))

    async def renew_lease_and_get_version(self, lease: Lease, key: str) -> tuple[Lease, int]:
        version = await self.get_version(key)
        return await self.renew_lease(lease), version

    async def release_lease(self, lease: Lease) -> None:
        await self._off(lambda: self._leases.release_lease(lease))

    async def lease_holders(self, prefix: str) -> Mapping[str, str]:
        return await self._off(lambda: self._leases.lease_holders(prefix))

    def close(self) -> None:
        self._closed = True
        for mirror in self._mirrors.values():
            mirror.close()
        self._api.close()
        self._watchers.close()


def _version(document: dict[str, Any]) -> int:
    return int(document["metadata"]["resourceVersion"])


__all__ = ["KubernetesControl", "open_kubernetes"]


def open_kubernetes(address: KubernetesAddress, clock: Clock) -> KubernetesControl:
    """Return the store at an address; its default namespace is that of the pod. Raises ControlError."""
    api, namespace = ApiClient(find_api_server(os.environ), clock), address.namespace or pod_namespace()
    return KubernetesControl(api, namespace, address.name, clock)
