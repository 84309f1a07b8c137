"""Controller of MeshViews: pushes the module, and creates, replaces and removes the view.

Law: a view of the same name that differs from the spec is replaced or removed only if the status records
that this MeshView created it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from meshoperator.controllers.base_controller import LATER, SOON, BaseController
from meshoperator.daemon_client import DaemonError, UnreachableError
from meshoperator.resources import MeshViewSpec, ResourceError, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshoperator.cluster_model import Manifest
    from meshoperator.daemon_client import MeshAccess

_RESULTS: Final = re.compile(r"^meshd_view_results_total\{([^}]*)\} (\S+)", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_SyncResult = tuple[dict[str, Any] | None, float | None]


def view_results(metrics: str, view: str) -> Iterator[tuple[str, float]]:
    """Yield (result, count) for a view from a daemon's metrics."""
    for labels, value in _RESULTS.findall(metrics):
        named = dict(_LABEL.findall(labels))
        if named.get("view") == view:
            yield named.get("result", ""), float(value)


def _view_request(spec: MeshViewSpec, default_name: str) -> dict[str, Any]:
    """Return the body of `POST /-/views`."""
    return {"bucket": spec.bucket, "name": spec.name or default_name, "view": spec.document()}


class ViewController(BaseController):
    """Reconciles MeshViews."""

    kind: ClassVar[str] = "MeshView"

    async def sync(self, document: Manifest) -> _SyncResult:
        try:
            return await self._run_pass(document)
        except UnreachableError as error:
            return self._status_fields(document, None, "NoMesh", str(error)), SOON
        except (ResourceError, DaemonError) as error:
            reason = error.code if isinstance(error, DaemonError) else "SpecRefused"
            await self.record_new_error(document, "ViewRefused", str(error))
            rest = SOON if reason == "NoSuchBucket" else LATER
            return self._status_fields(document, False, reason, str(error)), rest

    async def finalize(self, document: Manifest) -> None:
        metadata, spec = document["metadata"], parse(MeshViewSpec, document["spec"])
        if spec.deletion_policy == "Retain":
            return
        _, access = await self._daemons.locate_mesh(metadata["namespace"], spec.cluster_ref)
        recorded = (document.get("status") or {}).get("address")
        if recorded:
            await self._remove(access, recorded)
        wanted = _view_request(spec, metadata["name"])
        address = f"{wanted['bucket']}--{wanted['name']}"
        # An operator that was killed right after it created the view did not record the address.
        if address != recorded and await self._exists_as(access, address, wanted):
            await self._remove(access, address)

    async def _run_pass(self, document: Manifest) -> _SyncResult:
        metadata, spec = document["metadata"], parse(MeshViewSpec, document["spec"])
        _, access = await self._daemons.locate_mesh(metadata["namespace"], spec.cluster_ref)
        builds = await self._push_module(metadata["namespace"], spec, access)
        wanted = _view_request(spec, metadata["name"])
        address = (document.get("status") or {}).get("address")
        try:
            view = await self._daemons.request_json(access, "POST", "/-/views", wanted)
        except DaemonError as error:
            if error.code != "ViewExists" or address != f"{spec.bucket}--{wanted['name']}":
                raise
            await self._remove(access, address)
            await self._recorder.record_event(
                document, "ViewReplaced", "its spec changed: the view was created again"
            )
            view = await self._daemons.request_json(access, "POST", "/-/views", wanted)
        if not address:
            await self._recorder.record_event(document, "ViewMade", f"s3://{view['name']} is readable")
        elif address != view["name"]:
            await self._remove(access, address)
            renamed = f"its name changed; s3://{view['name']} replaces s3://{address}"
            await self._recorder.record_event(document, "ViewReplaced", renamed)
        ops = [each for each in view["view"].get("ops") or () if each.get("version")]
        builds = {each["op"]: each["version"] for each in ops} | builds
        status = self._status_fields(document, True, "Ready", f"s3://{view['name']} is readable")
        status |= {
            "address": view["name"],
            "hitPercent": await self._hit_percent(access, view["name"]),
            "opBuilds": [{"op": op[:1024], "build": str(build)} for op, build in sorted(builds.items())][:64],
        }
        return status, LATER

    async def _hit_percent(self, access: MeshAccess, view: str) -> int | None:
        """Return the percentage of results that were served from cache since the daemons started; None if
        nothing was read or a daemon does not answer."""
        hits = total = 0.0
        try:
            for each in await self._daemons.access_daemons(access):
                for result, count in view_results(await self._daemons.read_metrics(each), view):
                    total += count
                    hits += count if result == "hit" else 0
        except (DaemonError, UnreachableError):
            return None
        return int(100 * hits / total) if total else None

    async def _push_module(self, namespace: str, spec: MeshViewSpec, access: MeshAccess) -> dict[str, str]:
        """Push the view's module; return its build by name. Pushing the same module changes nothing."""
        if spec.module is None:
            return {}
        name = spec.module.config_map_ref.name
        found = await self._kube.get("ConfigMap", name, namespace)
        files = (found or {}).get("data") or {}
        source = next((text for file, text in sorted(files.items()) if file.endswith(".py")), None)
        if source is None:
            raise ResourceError(f"module: ConfigMap {name!r} does not exist or has no file that ends in .py")
        target = f"/-/modules?name={quote(spec.module.name, safe='')}"
        pushed = await self._daemons.request_json(access, "POST", target, source.encode())
        return {spec.module.name: pushed["version"]}

    async def _exists_as(self, access: MeshAccess, address: str, wanted: dict[str, Any]) -> bool:
        """Return whether the view exists and is the one that `wanted` describes. The POST checks that: it
        changes nothing if they are the same, and fails if they differ."""
        try:
            await self._daemons.request_json(access, "GET", f"/-/views/{quote(address, safe='')}")
            await self._daemons.request_json(access, "POST", "/-/views", wanted)
        except DaemonError as error:
            if error.status >= 500:
                raise
            return False
        return True

    async def _remove(self, access: MeshAccess, address: str) -> None:
        try:
            await self._daemons.request_json(access, "DELETE", f"/{quote(address, safe='')}")
        except DaemonError as error:
            if error.status != 404:
                raise

    def _status_fields(
        self, document: Manifest, ready: bool | None, reason: str, message: str
    ) -> dict[str, Any]:
        status: dict[str, Any] = {
            "observedGeneration": document["metadata"].get("generation"),
            "conditions": self.conditions(document, [("Ready", ready, reason, message)]),
        }
        return status if ready is None else status | {"ready": ready}
