"""Access to a mesh, as its MeshCluster describes it: the endpoint, keys and users, and who may connect."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from meshoperator.resources.spec_types import (
    SET,
    Annotations,
    Labels,
    Part,
    Reference,
    ResourceName,
    Rule,
    SecretKey,
)


class Tls(Part, frozen=True, kw_only=True):
    """Serve https with this Secret of type kubernetes.io/tls."""

    secret_ref: Annotated[Reference, Meta(description="Holds `tls.crt` and `tls.key`.")]


class S3Endpoint(Part, frozen=True, kw_only=True):
    """Endpoint for clients."""

    rules: ClassVar = (
        Rule(
            "!has(self.externalTrafficPolicy) || self.serviceType != 'ClusterIP'",
            "externalTrafficPolicy needs serviceType NodePort or LoadBalancer",
        ),
        Rule(
            "!has(self.ipFamilies) || size(self.ipFamilies) == 0 || has(self.ipFamilyPolicy)",
            "ipFamilies needs ipFamilyPolicy",
        ),
    )

    port: Annotated[int, Meta(ge=1, le=65535, description="Port of the Service and of every daemon.")] = 9000
    service_type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"], Meta(description="Type of the Service.")
    ] = "ClusterIP"
    service_annotations: Annotated[
        Annotations,
        Meta(description="Annotations of the Service, such as a cloud's settings of its load balancer."),
    ] = {}
    external_traffic_policy: (
        Annotated[
            Literal["Cluster", "Local"],
            Meta(
                description="Local: connections from outside go to daemons on the node that they reach, with "
                "the client's address; other nodes do not answer. Default: Kubernetes' (Cluster)."
            ),
        ]
        | None
    ) = None
    traffic_distribution: (
        Annotated[
            Literal["PreferClose", "PreferSameZone", "PreferSameNode"],
            Meta(
                description="Which daemons clients in the cluster reach first. PreferClose needs "
                "Kubernetes 1.31, the others 1.34. Default: any."
            ),
        ]
        | None
    ) = None
    ip_family_policy: (
        Annotated[
            Literal["SingleStack", "PreferDualStack", "RequireDualStack"],
            Meta(
                description="IPv4, IPv6 or both, for the Services; if set, daemons listen on addresses of "
                "both, as they always do in a cluster whose first family is IPv6. A change rolls them. "
                "Default: one family, the cluster's first."
            ),
        ]
        | None
    ) = None
    ip_families: Annotated[
        tuple[Literal["IPv4", "IPv6"], ...],
        Meta(
            max_length=2,
            description="Of the Services, in order: the first is that of the only address, or of the first. "
            "It cannot be changed later. Default: the cluster's.",
        ),
    ] = ()
    domains: Annotated[
        tuple[ResourceName, ...],
        Meta(max_length=16, description="Domains whose subdomains are bucket names.", extra_json_schema=SET),
    ] = ()
    tls: Annotated[Tls, Meta(description="Default: plain HTTP.")] | None = None


class WebIdentity(Part, frozen=True, kw_only=True):
    """Tokens of service accounts, which pods exchange for keys of a role."""

    audience: Annotated[
        str, Meta(min_length=1, max_length=255, description="Audience that pods' tokens must have.")
    ] = "shardmesh.io"
    token_seconds: Annotated[
        int, Meta(ge=600, le=86_400, description="Lifetime of the tokens that the webhook projects.")
    ] = 3600


class Auth(Part, frozen=True, kw_only=True):
    """Keys and users."""

    root_secret_ref: (
        Annotated[
            Reference,
            Meta(
                description="Secret with root's AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Default: the "
                "operator creates `CLUSTER-root`."
            ),
        ]
        | None
    ) = None
    users_secret_ref: (
        Annotated[SecretKey, Meta(description="Users file, as for `meshd serve --users`.")] | None
    ) = None
    web_identity: (
        Annotated[
            WebIdentity,
            Meta(
                description="Register the cluster's issuer of service account tokens with the mesh, as the "
                "identity provider `kubernetes`; `{}` takes the defaults. Default: it is not registered."
            ),
        ]
        | None
    ) = None


class NetworkPolicy(Part, frozen=True, kw_only=True):
    """Who may connect to the daemons."""

    enabled: Annotated[bool, Meta(description="Create a NetworkPolicy.")] = True
    from_namespaces: Annotated[
        Labels,
        Meta(
            description="Namespaces with these labels may reach the S3 port; the mesh's daemons and the "
            "operator always may. Empty: all."
        ),
    ] = {}
