"""A storage plug-in for tests: a volume for each claim that has none; it grows, and goes, with its claim."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightkube import ApiError
from lightkube.resources.core_v1 import PersistentVolume, PersistentVolumeClaim
from lightkube.types import PatchType

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Provisioning:
    """Of one namespace; `place`: where volumes lie."""

    def __init__(self, client: Any, place: Path, namespace: str) -> None:
        self._client, self._place, self._namespace = client, place, namespace
        self._volumes: dict[str, str] = {}  # of claims, by their uid

    def run(self) -> None:
        """One look at all claims."""
        claims = {each.metadata.name: each for each in self._client.list(PersistentVolumeClaim)}
        for uid, name in list(self._volumes.items()):
            if uid not in {claim.metadata.uid for claim in claims.values()}:
                with _unless(404):
                    self._client.delete(PersistentVolume, f"pv-{uid}")
                shutil.rmtree(self._place / "volumes" / name, ignore_errors=True)
                self._sync()
                del self._volumes[uid]
        for claim in claims.values():
            if claim.status.phase == "Pending" and claim.metadata.uid not in self._volumes:
                self._make(claim)
            elif claim.status.phase == "Bound" and claim.status.capacity != claim.spec.resources.requests:
                self._enlarge(claim)

    def _make(self, claim: Any) -> None:
        with _unless(409):  # of a try before
            self._client.create(_volume(claim, self._namespace))
        (self._place / "volumes" / claim.metadata.name).mkdir(parents=True, exist_ok=True)
        self._sync()
        self._volumes[claim.metadata.uid] = claim.metadata.name

    def _sync(self) -> None:
        """A power cut takes no volume, and brings none back."""
        place = os.open(self._place / "volumes", os.O_RDONLY)
        os.fsync(place)
        os.close(place)

    def _enlarge(self, claim: Any) -> None:
        size = dict(claim.spec.resources.requests)
        volume, change = {"spec": {"capacity": size}}, {"status": {"capacity": size}}
        merge = PatchType.MERGE
        self._client.patch(PersistentVolume, f"pv-{claim.metadata.uid}", volume, patch_type=merge)
        self._client.patch(PersistentVolumeClaim.Status, claim.metadata.name, change, patch_type=merge)


@contextmanager
def _unless(code: int) -> Iterator[None]:
    """What the API refuses with this code has been done before."""
    try:
        yield
    except ApiError as error:
        if error.status.code != code:
            raise


def _volume(claim: Any, namespace: str) -> Any:
    name, uid = claim.metadata.name, claim.metadata.uid
    spec = {
        "capacity": claim.spec.resources.requests,
        "accessModes": claim.spec.accessModes,
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": namespace, "name": name, "uid": uid},
        "hostPath": {"path": f"/volumes/{name}"},
        "storageClassName": claim.spec.storageClassName or "",
    }
    return PersistentVolume.from_dict({"metadata": {"name": f"pv-{uid}"}, "spec": spec})
