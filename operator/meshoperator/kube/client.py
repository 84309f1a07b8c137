"""Kubernetes client: takes and returns plain documents, applies them server-side, and watches.

Law: the permission tables equal what the chart grants (a test compares them), and `Kube` refuses every
other call before the API server does. API errors are lightkube's ApiError; a missing object is None.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

import httpx2
from lightkube import ApiError
from lightkube.core.exceptions import LoadResourceError
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.models.meta_v1 import Status
from lightkube.types import CascadeType, PatchType

from meshoperator.resources import GROUP, KINDS, VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from lightkube import AsyncClient

    from meshoperator.cluster_model import Manifest


Resource = tuple[str, str]  # API group, plural (with its subresource)

NAMESPACED: Final[dict[Resource, frozenset[str]]] = {
    (GROUP, "meshclusters"): frozenset({"get", "list", "watch", "patch"}),
    (GROUP, "meshdatasets"): frozenset({"get", "list", "watch", "patch"}),
    (GROUP, "meshviews"): frozenset({"get", "watch", "patch"}),
    (GROUP, "meshloads"): frozenset({"get", "watch", "patch", "delete"}),  # by ttlSecondsAfterFinished
    (GROUP, "meshnodes"): frozenset({"list", "watch", "create", "patch", "delete"}),
    **{
        (GROUP, f"{kind}/status"): frozenset({"patch"})
        for kind in ("meshclusters", "meshnodes", "meshdatasets", "meshloads", "meshviews")
    },
    ("", "configmaps"): frozenset({"get", "list", "watch", "update", "create", "patch", "deletecollection"}),
    ("", "secrets"): frozenset({"get", "create", "patch", "delete", "deletecollection"}),
    ("", "services"): frozenset({"create", "patch"}),
    ("", "pods"): frozenset({"list", "watch", "delete"}),
    ("", "persistentvolumeclaims"): frozenset({"list", "patch", "delete"}),
    ("", "events"): frozenset({"list", "create"}),
    ("apps", "statefulsets"): frozenset({"list", "create", "patch", "delete"}),
    ("coordination.k8s.io", "leases"): frozenset({"get", "create", "update", "deletecollection"}),
    ("policy", "poddisruptionbudgets"): frozenset({"create", "patch"}),
    ("networking.k8s.io", "networkpolicies"): frozenset({"create", "patch", "deletecollection"}),
    ("monitoring.coreos.com", "servicemonitors"): frozenset({"create", "patch", "deletecollection"}),
}
CLUSTER: Final[dict[Resource, frozenset[str]]] = {
    ("", "nodes"): frozenset({"list", "watch", "patch"}),
    ("rbac.authorization.k8s.io", "rolebindings"): frozenset({"create", "patch"}),
    ("rbac.authorization.k8s.io", "clusterroles"): frozenset({"bind"}),  # the daemons' role, by name
    ("", "serviceaccounts"): frozenset({"create", "patch"}),
}


def allowed(verb: str, resource: Resource) -> bool:
    """Return whether the operator may do this in at least one scope."""
    return verb in NAMESPACED.get(resource, ()) or verb in CLUSTER.get(resource, ())


MANAGER: Final = "shardmesh-operator"
_BUILT_IN: Final[dict[str, tuple[str, str, str, bool]]] = {
    "ConfigMap": ("", "v1", "configmaps", True),
    "Secret": ("", "v1", "secrets", True),
    "Service": ("", "v1", "services", True),
    "ServiceAccount": ("", "v1", "serviceaccounts", True),
    "Pod": ("", "v1", "pods", True),
    "PersistentVolumeClaim": ("", "v1", "persistentvolumeclaims", True),
    "Node": ("", "v1", "nodes", False),
    "StatefulSet": ("apps", "v1", "statefulsets", True),
    "PodDisruptionBudget": ("policy", "v1", "poddisruptionbudgets", True),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies", True),
    "RoleBinding": ("rbac.authorization.k8s.io", "v1", "rolebindings", True),
    "ServiceMonitor": ("monitoring.coreos.com", "v1", "servicemonitors", True),
    "Event": ("", "v1", "events", True),
    "Lease": ("coordination.k8s.io", "v1", "leases", True),
}
_PAGE: Final = 500
_METADATA: Final = "application/json;as=PartialObjectMetadata"
_QUIET: Final = 15.0
"""Seconds past its requested end after which a silent watch counts as broken."""
_RECONNECT: Final = 0.2
_ALL: Final = _BUILT_IN | {kind.name: (GROUP, VERSION, kind.plural, True) for kind in KINDS}


class ForbiddenError(PermissionError):
    """The operator's permission tables do not allow a call: a bug in the caller or in the tables."""


class Kube:
    """A client of one API server. `used` collects the calls made so far, as (verb, (group, resource))."""

    def __init__(self, client: AsyncClient) -> None:
        self._client: Any = client  # resource classes are created at run time; types cannot follow
        self.used: set[tuple[str, tuple[str, str]]] = set()
        self._versions: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Kube {len(self.used)} kinds of calls>"

    async def get(self, kind: str, name: str, namespace: str | None = None) -> Manifest | None:
        """Return one object, or None if the object or its API does not exist."""
        self._note("get", kind)
        try:
            return _plain(await self._client.get(self._class(kind), name, namespace=namespace))
        except (ApiError, httpx2.HTTPStatusError) as error:
            _none_if_missing(error)
            return None

    async def read_document(self, path: str) -> Manifest:
        """Return a JSON document of the API server that is not a resource, such as the discovery document of
        its token issuer. Every service account may read that. Raises httpx2.HTTPError."""
        answer = await self._client._client._client.get(path)
        answer.raise_for_status()
        return cast("Manifest", answer.json())

    async def list_all(
        self, kind: str, namespace: str | None = None, labels: Mapping[str, str | None] | None = None
    ) -> list[Manifest]:
        """List all objects, in all namespaces unless one is given. A label with value None matches any
        value."""
        self._note("list", kind)
        where = {} if not _ALL[kind][3] else {"namespace": namespace or "*"}
        found = self._client.list(self._class(kind), labels=dict(labels or {}), chunk_size=_PAGE, **where)
        api = self._api_version(kind)  # lists omit it per item
        return [_plain(each) | {"apiVersion": api, "kind": kind} async for each in found]

    async def pages_of_metadata(
        self, kind: str, namespace: str | None, chosen: Mapping[str, str], page: int
    ) -> AsyncIterator[list[Manifest]]:
        """Yield pages of at most `page` objects, metadata only, chosen by `labelSelector` and
        `fieldSelector`; all namespaces unless one is given. Raises ApiError, with 410 if listing takes so
        long that the continuation token expires."""
        self._note("list", kind)
        path, asked, more = _path(kind, namespace), {**chosen, "limit": str(page)}, ""
        accept = {"accept": f"{_METADATA}List;v=v1;g=meta.k8s.io"}
        while True:
            answer = (
                await self._client._client._client.request(  # lightkube's list always reads whole objects
                    "GET", path, params=asked | ({"continue": more} if more else {}), headers=accept
                )
            )
            self._client._client.raise_for_status(answer)
            found = answer.json()
            yield found["items"] or []  # null, if there are none
            more = found["metadata"].get("continue") or ""
            if not more:
                return

    async def list_events(self, kind: str, name: str, namespace: str) -> list[Manifest]:
        """List the events about one object."""
        self._note("list", "Event")
        about = {"involvedObject.kind": kind, "involvedObject.name": name}
        found = self._client.list(self._class("Event"), namespace=namespace, fields=about)
        return [_plain(each) async for each in found]

    async def apply(self, manifest: Manifest) -> Manifest:
        """Apply a manifest server-side and return the result; fields of other managers are left alone."""
        kind = manifest["kind"]
        self._note("patch", kind)
        self._note("create", kind)
        document = manifest | {"apiVersion": self._api_version(kind)}
        name, namespace = document["metadata"]["name"], document["metadata"].get("namespace")
        try:
            found = await self._client.patch(
                self._class(kind),
                name,
                document,
                namespace=namespace,
                patch_type=PatchType.APPLY,
                field_manager=MANAGER,
                force=True,
            )
        except ApiError as error:
            if error.status.code == 404 and kind == "PodDisruptionBudget" and kind not in self._versions:
                self._versions[kind] = "v1beta1"  # before Kubernetes 1.21
                return await self.apply(manifest)
            raise
        return _plain(found)

    async def apply_if_known(self, manifest: Manifest) -> bool:
        """Apply a manifest if its API exists; return whether it does."""
        try:
            await self.apply(manifest)
        except (ApiError, httpx2.HTTPStatusError) as error:
            _none_if_missing(error)
            return False
        return True

    async def create(self, manifest: Manifest) -> bool:
        """Create an object unless it exists; return whether it was created."""
        self._note("create", manifest["kind"])
        made = self._class(manifest["kind"]).from_dict(manifest)
        try:
            await self._client.create(made, namespace=manifest["metadata"].get("namespace"))
        except ApiError as error:
            if error.status.code == 409:
                return False
            raise
        return True

    async def replace(self, manifest: Manifest) -> bool:
        """Replace the resource version that was read; return False if it changed or was deleted since."""
        self._note("update", manifest["kind"])
        try:
            await self._client.replace(self._class(manifest["kind"]).from_dict(manifest))
        except ApiError as error:
            if error.status.code in (404, 409):
                return False
            raise
        return True

    async def patch(self, kind: str, name: str, namespace: str | None, change: dict[str, Any]) -> None:
        """Merge a change into an object; do nothing if the object does not exist."""
        self._note("patch", kind)
        await self._merge(self._class(kind), name, namespace, change)

    async def set_status(self, kind: str, name: str, namespace: str, status: dict[str, Any]) -> None:
        """Merge fields into an object's status; do nothing if the object does not exist."""
        self._note("patch", kind, "/status")
        await self._merge(self._class(kind).Status, name, namespace, {"status": status})

    async def watch(
        self, kind: str, namespace: str | None, seconds: int, label: str = ""
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield (ADDED, MODIFIED or DELETED, object): first every existing object as ADDED, then each change,
        in all namespaces unless one is given; `label` restricts it to objects that have the label. Reconnects
        every `seconds` where the last watch ended. Raises ApiError, httpx2.HTTPError; the caller then
        starts over, and sees every object again."""
        # From "0" the server's cache sends every object. No version, or bookmarks, would make the server wait
        # for etcd's newest version, which it cannot know where etcd reports no progress.
        asked = {"resourceVersion": "0", "timeoutSeconds": str(seconds)}
        asked |= {"labelSelector": label} if label else {}
        while True:
            async for what, each in self._changes(kind, namespace, asked, "application/json"):
                asked["resourceVersion"] = each["metadata"]["resourceVersion"]
                yield what, each
            await asyncio.sleep(_RECONNECT)

    async def watch_metadata(
        self, kind: str, namespace: str | None, chosen: Mapping[str, str], since: str, seconds: int
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield (ADDED, MODIFIED, DELETED or BOOKMARK, object), metadata only, for the objects chosen by
        `labelSelector` and `fieldSelector`: changes after the version `since`, for so many seconds. "0" also
        yields existing objects. An object that stops matching is reported as DELETED. Raises ApiError
        (410: `since` has expired), httpx2.HTTPError."""
        asked = {**chosen, "resourceVersion": since, "timeoutSeconds": str(seconds)}
        asked["allowWatchBookmarks"] = "true"
        async for found in self._changes(kind, namespace, asked, f"{_METADATA};v=v1;g=meta.k8s.io"):
            yield found

    async def _changes(
        self, kind: str, namespace: str | None, asked: Mapping[str, str], accept: str
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """Run one watch until the server ends it. lightkube's own watch is not used: it decodes whole
        objects, has no read timeout, and splits events at every Unicode line break."""
        self._note("watch", kind)
        async with self._client._client._client.stream(
            "GET",
            _path(kind, namespace),
            params={**asked, "watch": "true"},
            headers={"accept": accept},
            timeout=httpx2.Timeout(30, read=float(asked["timeoutSeconds"]) + _QUIET),
        ) as answer:
            if answer.is_error:
                await answer.aread()
            self._client._client.raise_for_status(answer)
            async for line in _lines(answer.aiter_bytes()):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status: Any = Status.from_dict(event["object"])
                    raise ApiError(status=status)
                yield event["type"], event["object"]

    async def delete_all(self, kind: str, namespace: str, labels: dict[str, str]) -> None:
        """Delete all objects with these labels without reading them; do nothing if the API does not exist."""
        self._note("deletecollection", kind)
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        try:
            await self._client._client.request(  # lightkube's deletecollection takes no selector
                "deletecollection",
                res=self._class(kind),
                namespace=namespace,
                params={"labelSelector": selector, "propagationPolicy": "Background"},
            )
        except (ApiError, httpx2.HTTPStatusError) as error:
            _none_if_missing(error)

    async def delete(
        self, kind: str, name: str, namespace: str | None = None, *, orphans: bool = False
    ) -> bool:
        """Delete an object and return whether it existed. `orphans` keeps its dependents."""
        self._note("delete", kind)
        cascade = CascadeType.ORPHAN if orphans else CascadeType.BACKGROUND
        try:
            await self._client.delete(self._class(kind), name, namespace=namespace, cascade=cascade)
        except ApiError as error:
            _none_if_missing(error)
            return False
        return True

    async def delete_pod(self, name: str, namespace: str, uid: str, *, now: bool = False) -> bool:
        """Delete the pod with this uid, never a successor of the same name; return whether it existed.
        `now` skips the grace period."""
        self._note("delete", "Pod")
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        answer = await self._client._client._client.request(  # lightkube's delete takes no preconditions
            "DELETE",
            f"/api/v1/namespaces/{namespace}/pods/{name}",
            json=options | ({"gracePeriodSeconds": 0} if now else {}),
        )
        if answer.status_code in (404, 409):
            return False
        self._client._client.raise_for_status(answer)
        return True

    async def _merge(self, resource: Any, name: str, namespace: str | None, change: dict[str, Any]) -> None:
        try:
            await self._client.patch(resource, name, change, namespace=namespace, patch_type=PatchType.MERGE)
        except ApiError as error:
            _none_if_missing(error)

    def _note(self, verb: str, kind: str, sub: str = "") -> None:
        group, _, plural, _ = _ALL[kind]
        resource = (group, plural + sub)
        if not allowed(verb, resource):
            raise ForbiddenError(
                f"the permission tables do not allow to {verb} {'/'.join(resource)}; "
                "add it to kube/client.py and to the chart's roles"
            )
        self.used.add((verb, resource))

    def _api_version(self, kind: str) -> str:
        group, version, _, _ = _ALL[kind]
        version = self._versions.get(kind, version)
        return f"{group}/{version}" if group else version

    def _class(self, kind: str) -> Any:
        group, version, plural, namespaced = _ALL[kind]
        return _resource(group, self._versions.get(kind, version), kind, plural, namespaced=namespaced)


@cache
def _resource(group: str, version: str, kind: str, plural: str, *, namespaced: bool) -> Any:
    make = create_namespaced_resource if namespaced else create_global_resource
    try:
        return make(group, version, kind, plural)
    except LoadResourceError as error:  # lightkube allows one class per kind
        raise ForbiddenError(str(error)) from error


def _path(kind: str, namespace: str | None) -> str:
    group, version, plural, _ = _ALL[kind]
    base = f"/apis/{group}/{version}" if group else f"/api/{version}"
    return f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line


def _plain(found: Any) -> Manifest:
    return cast("Manifest", found.to_dict())


def is_missing(error: BaseException) -> bool:
    """Return whether the API server answered 404. For a missing API that is plain text, which lightkube
    does not turn into an ApiError."""
    if isinstance(error, ApiError):
        return bool(error.status.code == 404)
    return isinstance(error, httpx2.HTTPStatusError) and error.response.status_code == 404


def is_expired(error: BaseException) -> bool:
    """Return whether the version that a watch continued from is too old (410), as after a quiet time."""
    return isinstance(error, ApiError) and bool(error.status.code == 410)


def _none_if_missing(error: ApiError | httpx2.HTTPStatusError) -> None:
    if not is_missing(error):
        raise error
