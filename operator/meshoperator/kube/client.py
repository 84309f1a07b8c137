"""Kubernetes client: documents in and out, server-side apply, and the operator's permission tables.

Law: the tables grant exactly what the chart grants (a test compares them), and `Kube` refuses everything
else before the API server does. Errors of the API are lightkube's ApiError; a missing object is None.
"""

from __future__ import annotations

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
    (GROUP, "meshviews"): frozenset({"get", "list", "watch", "patch"}),
    (GROUP, "meshloads"): frozenset({"get", "list", "watch", "patch", "delete"}),  # they go by themselves
    (GROUP, "meshnodes"): frozenset({"list", "watch", "create", "patch", "delete"}),
    **{
        (GROUP, f"{kind}/status"): frozenset({"patch"})
        for kind in ("meshclusters", "meshnodes", "meshdatasets", "meshloads", "meshviews")
    },
    ("", "configmaps"): frozenset({"get", "list", "update", "create", "patch", "deletecollection"}),
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
    ("rbac.authorization.k8s.io", "clusterroles"): frozenset({"bind"}),  # the daemons', by name
    ("", "serviceaccounts"): frozenset({"create", "patch"}),
}
KOPF: Final[frozenset[tuple[str, Resource]]] = frozenset(
    (verb, resource)
    for resource in (
        *((GROUP, f"mesh{kind}") for kind in ("clusters", "nodes", "datasets", "loads", "views")),
        ("", "nodes"),
    )
    for verb in ("list", "watch")
)
"""Used by kopf itself, not through `kube.Kube`."""


def allowed(verb: str, resource: Resource) -> bool:
    """Whether the operator may do this somewhere."""
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
"""Seconds after which a watch whose end the API server does not tell is taken for broken."""
_ALL: Final = _BUILT_IN | {kind.name: (GROUP, VERSION, kind.plural, True) for kind in KINDS}


class ForbiddenError(PermissionError):
    """The operator's own tables do not allow it: a mistake in the operator, or in the tables."""


class Kube:
    """`used`: what was done so far, as (verb, (group, resource))."""

    def __init__(self, client: AsyncClient) -> None:
        self._client: Any = client  # classes of resources are made here, which types cannot follow
        self.used: set[tuple[str, tuple[str, str]]] = set()
        self._versions: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Kube {len(self.used)} kinds of calls>"

    async def get(self, kind: str, name: str, namespace: str | None = None) -> Manifest | None:
        """One object, None if it is not there, or its API is not."""
        self._note("get", kind)
        try:
            return _plain(await self._client.get(self._class(kind), name, namespace=namespace))
        except (ApiError, httpx2.HTTPStatusError) as error:
            _none_if_missing(error)
            return None

    async def served(self) -> frozenset[str]:
        """Which of our own kinds the API server has definitions of, by plural. Raises ApiError,
        httpx2.HTTPError."""
        answer = await self._client._client._client.request("GET", f"/apis/{GROUP}/{VERSION}")
        if answer.status_code == 404:
            return frozenset()
        self._client._client.raise_for_status(answer)
        return frozenset(each["name"] for each in answer.json()["resources"] if "/" not in each["name"])

    async def list_all(
        self, kind: str, namespace: str | None = None, labels: Mapping[str, str | None] | None = None
    ) -> list[Manifest]:
        """Every object; without a namespace in all of them. A label of None: with any value."""
        self._note("list", kind)
        where = {} if not _ALL[kind][3] else {"namespace": namespace or "*"}
        found = self._client.list(self._class(kind), labels=dict(labels or {}), chunk_size=_PAGE, **where)
        api = self._api_version(kind)  # lists leave it out
        return [_plain(each) | {"apiVersion": api, "kind": kind} async for each in found]

    async def pages_of_metadata(
        self, kind: str, namespace: str | None, chosen: Mapping[str, str], page: int
    ) -> AsyncIterator[list[Manifest]]:
        """Metadata alone of what is chosen (`labelSelector`, `fieldSelector`), at most `page` objects at a
        time; without a namespace in all of them. Raises ApiError; 410 when it takes so long that the API
        server has forgotten where it began."""
        self._note("list", kind)
        path, asked, more = _path(kind, namespace), {**chosen, "limit": str(page)}, ""
        accept = {"accept": f"{_METADATA}List;v=v1;g=meta.k8s.io"}
        while True:
            answer = await self._client._client._client.request(  # lightkube's own call reads whole objects
                "GET", path, params=asked | ({"continue": more} if more else {}), headers=accept
            )
            self._client._client.raise_for_status(answer)
            found = answer.json()
            yield found["items"]
            more = found["metadata"].get("continue") or ""
            if not more:
                return

    async def list_events(self, kind: str, name: str, namespace: str) -> list[Manifest]:
        """About one object."""
        self._note("list", "Event")
        about = {"involvedObject.kind": kind, "involvedObject.name": name}
        found = self._client.list(self._class("Event"), namespace=namespace, fields=about)
        return [_plain(each) async for each in found]

    async def apply(self, manifest: Manifest) -> Manifest:
        """Make it so (server-side apply); fields of others stay theirs."""
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
        """Make it so, where its API is there at all; whether it is."""
        try:
            await self.apply(manifest)
        except (ApiError, httpx2.HTTPStatusError) as error:
            _none_if_missing(error)
            return False
        return True

    async def create(self, manifest: Manifest) -> bool:
        """Make it unless it is there; whether it was made."""
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
        """Write the very version that was read; False when somebody was quicker."""
        self._note("update", manifest["kind"])
        try:
            await self._client.replace(self._class(manifest["kind"]).from_dict(manifest))
        except ApiError as error:
            if error.status.code in (404, 409):
                return False
            raise
        return True

    async def patch(self, kind: str, name: str, namespace: str | None, change: dict[str, Any]) -> None:
        """Merge a change into it; one that is gone is none."""
        self._note("patch", kind)
        await self._merge(self._class(kind), name, namespace, change)

    async def set_status(self, kind: str, name: str, namespace: str, status: dict[str, Any]) -> None:
        """Replace the fields of its status; one that is gone is none."""
        self._note("patch", kind, "/status")
        await self._merge(self._class(kind).Status, name, namespace, {"status": status})

    async def watch(
        self, kind: str, namespace: str | None, label: str, seconds: int
    ) -> AsyncIterator[Manifest]:
        """What has a label, now and as it changes; without a namespace in all of them. Asked anew every so
        many seconds. What is missed shows in the next look. Raises ApiError, httpx2.HTTPError."""
        asked = {"labelSelector": label, "timeoutSeconds": str(seconds)}
        while True:
            async for _, each in self._changes(kind, namespace, asked, "application/json"):
                asked["resourceVersion"] = each["metadata"]["resourceVersion"]
                yield each

    async def watch_metadata(
        self, kind: str, namespace: str | None, chosen: Mapping[str, str], since: str, seconds: int
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """Metadata alone of what is chosen (`labelSelector`, `fieldSelector`), as (ADDED, MODIFIED, DELETED
        or BOOKMARK, object): what happens after the version `since`, for so many seconds; after "0" what
        there is, too. What leaves the choice is told as DELETED. Raises ApiError (410: `since` is
        forgotten), httpx2.HTTPError."""
        asked = {**chosen, "resourceVersion": since, "timeoutSeconds": str(seconds)}
        asked["allowWatchBookmarks"] = "true"
        async for found in self._changes(kind, namespace, asked, f"{_METADATA};v=v1;g=meta.k8s.io"):
            yield found

    async def _changes(
        self, kind: str, namespace: str | None, asked: Mapping[str, str], accept: str
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """One watch, to its end. Not lightkube's: that one reads whole objects, and takes any line break that
        Unicode knows for an event's end."""
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
        """Everything with these labels, without looking at it; nothing, where its API is not there."""
        self._note("deletecollection", kind)
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        try:
            await self._client._client.request(  # lightkube's own call has no selector
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
        """Whether it was there. `orphans`: what belongs to it stays."""
        self._note("delete", kind)
        cascade = CascadeType.ORPHAN if orphans else CascadeType.BACKGROUND
        try:
            await self._client.delete(self._class(kind), name, namespace=namespace, cascade=cascade)
        except ApiError as error:
            _none_if_missing(error)
            return False
        return True

    async def delete_pod(self, name: str, namespace: str, uid: str, *, now: bool = False) -> bool:
        """This very pod, not another of its name; whether it was there. `now`: without waiting for anybody
        to end it."""
        self._note("delete", "Pod")
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        answer = await self._client._client._client.request(  # lightkube's own call takes no preconditions
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
            raise ForbiddenError(f"the operator has no right to {verb} {resource}; see permissions.py")
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
    except LoadResourceError as error:  # lightkube keeps one class a kind
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


def _none_if_missing(error: ApiError | httpx2.HTTPStatusError) -> None:
    """An API that is not there at all is told in plain text, which makes no ApiError."""
    code = error.status.code if isinstance(error, ApiError) else error.response.status_code
    if code != 404:
        raise error
