"""What the operator may do, and so what the chart grants it: not more, not less (a test compares).

Law: `kube.Kube` refuses, here and not only at the API server, what is not in these tables.
"""

from __future__ import annotations

from typing import Final

from meshoperator.resources import GROUP

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
