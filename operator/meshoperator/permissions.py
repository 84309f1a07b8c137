"""What the operator may do, and so what the chart grants it: not more, not less (a test compares).

Law: `kube.Kube` refuses, here and not only at the API server, what is not in these tables.
"""

from __future__ import annotations

from typing import Final

from meshoperator.resources import GROUP

Resource = tuple[str, str]  # API group, plural (with its subresource)

NAMESPACED: Final[dict[Resource, frozenset[str]]] = {
    **{
        (GROUP, kind): frozenset({"get", "list", "watch", "patch"})
        for kind in ("meshclusters", "meshdatasets", "meshviews")
    },
    (GROUP, "meshloads"): frozenset({"get", "list", "watch", "patch", "delete"}),  # they go by themselves
    (GROUP, "meshnodes"): frozenset({"get", "list", "watch", "create", "patch", "delete"}),
    **{
        (GROUP, f"{kind}/status"): frozenset({"patch"})
        for kind in ("meshclusters", "meshnodes", "meshdatasets", "meshloads", "meshviews")
    },
    ("", "configmaps"): frozenset({"get", "list", "update", "create", "patch", "delete", "deletecollection"}),
    ("", "secrets"): frozenset({"get", "create", "patch", "delete", "deletecollection"}),
    ("", "services"): frozenset({"create", "patch", "delete"}),
    ("", "pods"): frozenset({"list", "watch", "delete"}),
    ("", "persistentvolumeclaims"): frozenset({"list", "delete"}),
    ("", "events"): frozenset({"create"}),
    ("apps", "statefulsets"): frozenset({"list", "create", "patch", "delete"}),
    ("coordination.k8s.io", "leases"): frozenset({"get", "create", "update", "deletecollection"}),
    ("policy", "poddisruptionbudgets"): frozenset({"create", "patch", "delete"}),
    ("networking.k8s.io", "networkpolicies"): frozenset({"create", "patch", "delete"}),
    ("monitoring.coreos.com", "servicemonitors"): frozenset({"create", "patch", "delete"}),
}
CLUSTER: Final[dict[Resource, frozenset[str]]] = {
    ("", "nodes"): frozenset({"list", "watch", "patch"}),
    ("", "namespaces"): frozenset({"list", "watch"}),  # kopf's, to see new ones
    ("apiextensions.k8s.io", "customresourcedefinitions"): frozenset({"list", "watch"}),  # kopf's
    ("rbac.authorization.k8s.io", "rolebindings"): frozenset({"create", "patch"}),
    ("rbac.authorization.k8s.io", "clusterroles"): frozenset({"bind"}),  # the daemons', by name
    ("", "serviceaccounts"): frozenset({"create", "patch"}),
}
KOPF: Final[frozenset[tuple[str, Resource]]] = frozenset(
    {
        (verb, (GROUP, kind))
        for kind in ("meshclusters", "meshdatasets", "meshloads", "meshviews")
        for verb in ("list", "watch", "patch")
    }
    | {("create", ("", "events"))}
    | {
        (verb, resource)
        for resource in (("", "namespaces"), ("apiextensions.k8s.io", "customresourcedefinitions"))
        for verb in ("list", "watch")
    }
)
"""Used by kopf itself, not through `kube.Kube`."""


def allowed(verb: str, resource: Resource) -> bool:
    """Whether the operator may do this somewhere."""
    return verb in NAMESPACED.get(resource, ()) or verb in CLUSTER.get(resource, ())
