"""Leases as Kubernetes has them (coordination.k8s.io/v1).

Law: no two clocks are compared. A lease has run out when this process has seen it unchanged for its whole
duration, by its own clock; so whoever comes new waits once for that long.
Invariant: who writes the Lease at the version it read holds it.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from meshd.control.interface import Lease, LeaseLostError
from meshd.control.kubernetes.api import RefusedError
from meshd.control.kubernetes.objects import STORE, named

if TYPE_CHECKING:
    from meshd.control.kubernetes.api import Api
    from meshd.kit.clock import Clock

NAME: Final = "shardmesh.io/lease"


class KubernetesLeases:
    """Blocking: for threads."""

    def __init__(self, api: Api, namespace: str, store: str, clock: Clock) -> None:
        self._api, self._store, self._clock = api, store, clock
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._seen: dict[str, tuple[int, float]] = {}  # name → version, and when it was first seen here

    def acquire(self, name: str, holder: str, ttl: float) -> Lease | None:
        """See ControlStore.acquire. Seconds are rounded up to whole ones."""
        present = self._read(name)
        if present is None:
            return self._write("POST", self._path, name, holder, ttl, None)
        spec = present.get("spec") or {}
        if spec.get("holderIdentity") not in (holder, None, "") and not self._ran_out(name, present):
            return None
        return self._write("PUT", self._place(name), name, holder, ttl, present)

    def renew(self, lease: Lease) -> Lease:
        """See ControlStore.renew. One that ran out but that nobody took is still renewed."""
        present = self._read(lease.name)
        found = None
        if present is not None and _version(present) == lease.version:
            found = self._write("PUT", self._place(lease.name), lease.name, lease.holder, lease.ttl, present)
        if found is None:
            raise LeaseLostError(f"the lease {lease.name} is no longer {lease.holder}'s")
        return found

    def release(self, lease: Lease) -> None:
        """See ControlStore.release."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"resourceVersion": str(lease.version)},
        }
        try:
            self._api.call("DELETE", self._place(lease.name), options)
        except RefusedError as error:
            if error.status not in (404, 409):
                raise

    def held(self, prefix: str) -> dict[str, str]:
        """See ControlStore.leases. One that is seen for the first time counts as held."""
        found = self._api.call("GET", self._path, labelSelector=f"{STORE}={self._store}").get("items") or []
        held = {}
        for item in found:
            name = (item["metadata"].get("annotations") or {}).get(NAME, "")
            holder = (item.get("spec") or {}).get("holderIdentity")
            if name and holder and name.startswith(prefix) and not self._ran_out(name, item):
                held[name] = holder
        return held

    def _ran_out(self, name: str, present: dict[str, Any]) -> bool:
        version, now = _version(present), self._clock.monotonic()
        seen, since = self._seen.get(name, (0, now))
        if seen != version:
            self._seen[name] = (version, now)
            return False
        return now - since >= float(present["spec"].get("leaseDurationSeconds") or 0)

    def _write(
        self, method: str, path: str, name: str, holder: str, ttl: float, present: dict[str, Any] | None
    ) -> Lease | None:
        """The lease, None when somebody else was quicker."""
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
            "name": named(self._store, f"leases/{name}"),
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
        except RefusedError as error:
            if error.status in (404, 409):
                return None
            raise
        version = _version(answer)
        self._seen[name] = (version, self._clock.monotonic())
        return Lease(name, holder, ttl, now_ms + int(ttl * 1000), version)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return self._api.call("GET", self._place(name))
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def _place(self, name: str) -> str:
        return f"{self._path}/{named(self._store, f'leases/{name}')}"


def _version(document: dict[str, Any]) -> int:
    return int(document["metadata"]["resourceVersion"])
