"""Leader election by a Lease.

Law: the leader renewed within `TTL` by its own clock, and starts no pass after that. Another holder's Lease
has expired once this process has seen it unchanged for its whole duration; clocks of two machines are never
compared. A pass that is still running then does no harm: maps change by compare-and-swap, pods are deleted
by uid.

The Lease belongs to the leader's pod: Kubernetes deletes it after the pod, unless another pod holds it by
then. So `helm uninstall` leaves none.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

import httpx2
from lightkube import ApiError

from meshoperator import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshoperator.cluster_model import Manifest
    from meshoperator.kube.client import Kube

_log = logging.getLogger(__name__)
TTL: Final = 15.0
_STEP: Final = 3.0


class LeaderElection:
    """`leads` is set while this process is the leader. `stamp` returns the time as Kubernetes writes it,
    `monotonic` returns seconds. `pod`: name and uid of this process's pod, if it runs in one."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        holder: str,
        *,
        stamp: Callable[[], str],
        monotonic: Callable[[], float],
        pod: tuple[str, str] | None = None,
    ) -> None:
        self._kube, self._namespace, self._name, self._holder = kube, namespace, name, holder
        self._owners = [{"apiVersion": "v1", "kind": "Pod", "name": pod[0], "uid": pod[1]}] if pod else []
        self._stamp, self._monotonic = stamp, monotonic
        self._seen: tuple[str, float] = ("", 0.0)
        self._renewed = float("-inf")
        self.leads = asyncio.Event()

    def __repr__(self) -> str:
        return f"<LeaderElection of {self._holder}{', leads' if self.leads.is_set() else ''}>"

    async def run_election(self) -> None:
        """Acquire the Lease when it is free, renew it, and stop leading if that fails for too long;
        endless."""
        while True:
            try:
                async with asyncio.timeout(_STEP):
                    if await self.renew_or_acquire():
                        self._renewed = self._monotonic()
                    else:
                        self._renewed = float("-inf")
            except (ApiError, httpx2.HTTPError, OSError, TimeoutError) as error:
                _log.warning(
                    "the Lease %s can be neither acquired nor renewed: %s",
                    self._name,
                    str(error) or "no answer in time",
                )
            self._tell(self._monotonic() < self._renewed + TTL - 2 * _STEP)
            await asyncio.sleep(_STEP)

    async def renew_or_acquire(self) -> bool:
        """Renew or acquire the Lease; return whether it is held now."""
        asked = self._monotonic()
        document = await self._kube.get("Lease", self._name, self._namespace)
        if document is None:
            return await self._kube.create(self._mine({"name": self._name, "namespace": self._namespace}, 0))
        spec, metadata = document.get("spec") or {}, document["metadata"]
        holder, version = spec.get("holderIdentity") or "", str(metadata.get("resourceVersion"))
        if version != self._seen[0]:
            self._seen = (version, asked)
        ttl = float(spec.get("leaseDurationSeconds") or TTL)
        if holder not in ("", self._holder) and asked < self._seen[1] + ttl:
            return False
        changes = int(spec.get("leaseTransitions") or 0) + (holder != self._holder)
        kept = {key: metadata[key] for key in ("name", "namespace", "resourceVersion")}
        return await self._kube.replace(self._mine(kept, changes))

    async def release(self) -> None:
        """Release the Lease, so that another operator can lead at once."""
        document = await self._kube.get("Lease", self._name, self._namespace)
        if document is None or (document.get("spec") or {}).get("holderIdentity") != self._holder:
            return
        self._tell(False)
        document["spec"]["holderIdentity"] = ""
        await self._kube.replace(document)

    def _mine(self, metadata: dict[str, Any], changes: int) -> Manifest:
        now = self._stamp()
        spec = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": int(TTL),
            "renewTime": now.replace("Z", ".000000Z"),
            "leaseTransitions": changes,
        }
        metadata["ownerReferences"] = self._owners
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}

    def _tell(self, leads: bool) -> None:
        if leads != self.leads.is_set():
            _log.warning("%s %s", self._holder, "leads" if leads else "no longer leads")
        if leads:
            self.leads.set()
        else:
            self.leads.clear()
            metrics.forget_clusters()
        metrics.leading.set(leads)
