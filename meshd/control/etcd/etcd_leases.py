"""Leases in etcd. The servers' clocks decide their expiry, never a holder's clock."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from meshd.control.control_api import Lease, LeaseLostError
from meshd.control.etcd.gateway import EtcdError, decoded, encoded, number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.etcd.durability_barrier import DurabilityBarrier
    from meshd.control.etcd.gateway import Gateway


class EtcdLeases:
    """Leases in etcd (blocking: for threads). Their keys are under `PREFIX@leases/`, outside the topics, so
    no copy contains them."""

    def __init__(self, gateway: Gateway, prefix: bytes, barrier: DurabilityBarrier) -> None:
        self._gateway, self._prefix, self._barrier = gateway, prefix[:-1] + b"@leases/", barrier

    def acquire_lease(self, name: str, holder: str, ttl: float) -> Lease | None:
        """See ControlStore.acquire_lease. The TTL is rounded up to whole seconds; etcd may grant more, up to
        one and a half of its election timeouts."""
        granted = self._gateway.call("lease/grant", {"TTL": str(math.ceil(ttl))}, repeatable=True)
        lease_id = granted["ID"]
        version = self._write_key(name, holder, lease_id)
        if version is None:
            self._gateway.call("lease/revoke", {"ID": lease_id}, repeatable=True)
            return None
        return Lease(name, holder, ttl, 0, version)

    def _write_key(self, name: str, holder: str, lease_id: str) -> int | None:
        """Writes the key if it is free or already the holder's; returns its version, or None if another
        holder has it."""
        key = encoded(self._prefix + name.encode())
        value = encoded(json.dumps({"holder": holder, "lease": lease_id}).encode())
        put = {"request_put": {"key": key, "value": value, "lease": lease_id}}
        while True:
            found = self._read(name)
            if found is not None and found[1]["holder"] != holder:
                return None
            version = 0 if found is None else found[0]
            compare = {"target": "MOD", "result": "EQUAL", "key": key, "mod_revision": str(version)}
            answer = self._gateway.call("kv/txn", {"compare": [compare], "success": [put]}, repeatable=False)
            if answer.get("succeeded"):
                self._barrier.await_change(answer)
                if found is not None:
                    self._forget(found[1]["lease"])
                return number(answer["header"].get("revision"))

    def renew_lease(self, lease: Lease) -> Lease:
        """See ControlStore.renew_lease. While etcd accepts no writes, the lease is extended but an error is
        raised."""
        self._keep_alive(lease, self._read(lease.name))
        return lease

    def renew_lease_and_get_version(self, lease: Lease, key: bytes, copied: int) -> tuple[Lease, int]:
        """See ControlStore.renew_lease_and_get_version: one read of both keys, which is linearizable. It
        needs no barrier if all that it shows is known to be on disk: the lease as it was acquired, and the
        key at the version that the copy has (`copied`; 0: none)."""
        keys = [
            {"request_range": {"key": encoded(self._prefix + lease.name.encode())}},
            {"request_range": {"key": encoded(key), "keys_only": True}},
        ]
        while True:
            answer = self._gateway.call("kv/txn", {"success": keys}, repeatable=True)
            held, found = (response["response_range"].get("kvs") or [] for response in answer["responses"])
            shown = [next((number(kv["mod_revision"]) for kv in kvs), 0) for kvs in (held, found)]
            if shown == [lease.version, copied] or self._barrier.is_kept(answer):
                break
        self._keep_alive(lease, next(map(_decoded_key, held), None))
        return lease, shown[1]

    def _keep_alive(self, lease: Lease, found: tuple[int, dict[str, Any]] | None) -> None:
        """Extends a lease whose key was found like this. Raises LeaseLostError."""
        if found is None or found[0] != lease.version:
            raise LeaseLostError(f"the lease {lease.name} is no longer held by {lease.holder}")
        answer = self._gateway.call("lease/keepalive", {"ID": found[1]["lease"]}, repeatable=True)
        if not number((answer.get("result") or {}).get("TTL")):
            raise LeaseLostError(f"the lease {lease.name} has expired")
        self._gateway.check_alarms()

    def release_lease(self, lease: Lease) -> None:
        """See ControlStore.release_lease."""
        found = self._read(lease.name)
        if found is not None and found[0] == lease.version:
            self._forget(found[1]["lease"])

    def lease_holders(self, prefix: str) -> dict[str, str]:
        """See ControlStore.lease_holders."""
        self._gateway.check_alarms()
        start = self._prefix + prefix.encode()
        end = start[:-1] + bytes([start[-1] + 1])
        body = {"key": encoded(start), "range_end": encoded(end)}
        kvs = self._gateway.call("kv/range", body, repeatable=True).get("kvs") or []
        cut = len(self._prefix)
        return {decoded(kv["key"])[cut:].decode(): json.loads(decoded(kv["value"]))["holder"] for kv in kvs}

    def _forget(self, lease_id: str) -> None:
        """Revokes an etcd lease; its key goes with it unless the key belongs to another lease now."""
        try:
            self._gateway.call("lease/revoke", {"ID": lease_id}, repeatable=True)
        except EtcdError as error:
            if "not found" not in str(error):
                raise

    def _read(self, name: str) -> tuple[int, dict[str, Any]] | None:
        """Returns (version, document) of a lease's key."""
        body = {"key": encoded(self._prefix + name.encode())}
        return next(
            map(_decoded_key, self._gateway.call("kv/range", body, repeatable=True).get("kvs") or []), None
        )


def _decoded_key(kv: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    return number(kv["mod_revision"]), json.loads(decoded(kv.get("value")))
