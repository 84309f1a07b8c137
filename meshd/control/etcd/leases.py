"""Leases as etcd's own: a key that goes when its lease is not renewed.

Law: the servers' clocks decide, never a holder's. Invariant: while a `Lease` is not expired by etcd's count,
nobody else has one of its name.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from meshd.control.etcd.gateway import EtcdError, decoded, encoded, number
from meshd.control.interface import Lease, LeaseLostError

if TYPE_CHECKING:
    from meshd.control.etcd.gateway import Gateway


class EtcdLeases:
    """Blocking: for threads. Kept beside the topics, under `PREFIX@leases/`, and so in nobody's copy."""

    def __init__(self, gateway: Gateway, prefix: bytes) -> None:
        self._gateway, self._prefix = gateway, prefix[:-1] + b"@leases/"

    def acquire(self, name: str, holder: str, ttl: float) -> Lease | None:
        """See ControlStore.acquire. Seconds are rounded up to whole ones; etcd grants at least about two."""
        granted = self._gateway.call("lease/grant", {"TTL": str(math.ceil(ttl))}, repeatable=True)
        lease_id = granted["ID"]
        version = self._take(name, holder, lease_id)
        if version is None:
            self._gateway.call("lease/revoke", {"ID": lease_id}, repeatable=True)
            return None
        return Lease(name, holder, ttl, 0, version)

    def _take(self, name: str, holder: str, lease_id: str) -> int | None:
        """Write the key if it is free, or the holder's own; its version, None if it is somebody else's."""
        key = encoded(self._prefix + name.encode())
        value = encoded(json.dumps({"holder": holder, "lease": lease_id}).encode())
        put = {"request_put": {"key": key, "value": value, "lease": lease_id}}
        while True:
            kept = self._read(name)
            if kept is not None and kept[1]["holder"] != holder:
                return None
            version = 0 if kept is None else kept[0]
            compare = {"target": "MOD", "result": "EQUAL", "key": key, "mod_revision": str(version)}
            answer = self._gateway.call("kv/txn", {"compare": [compare], "success": [put]}, repeatable=False)
            if answer.get("succeeded"):
                if kept is not None:
                    self._forget(kept[1]["lease"])
                return number(answer["header"].get("revision"))

    def renew(self, lease: Lease) -> Lease:
        """See ControlStore.renew. It is prolonged, and an error all the same, while etcd takes no writes."""
        kept = self._read(lease.name)
        if kept is None or kept[0] != lease.version:
            raise LeaseLostError(f"the lease {lease.name} is no longer {lease.holder}'s")
        answer = self._gateway.call("lease/keepalive", {"ID": kept[1]["lease"]}, repeatable=True)
        if not number((answer.get("result") or {}).get("TTL")):
            raise LeaseLostError(f"the lease {lease.name} ran out")
        self._gateway.check_alarms()
        return lease

    def release(self, lease: Lease) -> None:
        """See ControlStore.release."""
        kept = self._read(lease.name)
        if kept is not None and kept[0] == lease.version:
            self._forget(kept[1]["lease"])

    def held(self, prefix: str) -> dict[str, str]:
        """See ControlStore.leases."""
        self._gateway.check_alarms()
        start = self._prefix + prefix.encode()
        end = start[:-1] + bytes([start[-1] + 1])
        body = {"key": encoded(start), "range_end": encoded(end)}
        kvs = self._gateway.call("kv/range", body, repeatable=True).get("kvs") or []
        cut = len(self._prefix)
        return {decoded(kv["key"])[cut:].decode(): json.loads(decoded(kv["value"]))["holder"] for kv in kvs}

    def _forget(self, lease_id: str) -> None:
        """End a lease; its key goes with it, unless another lease has it by now."""
        try:
            self._gateway.call("lease/revoke", {"ID": lease_id}, repeatable=True)
        except EtcdError as error:
            if "not found" not in str(error):
                raise

    def _read(self, name: str) -> tuple[int, dict[str, Any]] | None:
        """(version, document) of a lease's key."""
        body = {"key": encoded(self._prefix + name.encode())}
        for kv in self._gateway.call("kv/range", body, repeatable=True).get("kvs") or []:
            return number(kv["mod_revision"]), json.loads(decoded(kv.get("value")))
        return None
