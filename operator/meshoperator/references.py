"""Secrets that a MeshCluster names: whether they are there, with the keys that daemons need.

Law: looked at before anything is made or replaced; otherwise a roll-out would end a daemon that cannot come
back. Their contents are looked at for nothing else, and told to nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshoperator.resources import ResourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshoperator.kube import Kube
    from meshoperator.meshes import Cluster
    from meshoperator.resources import MeshClusterSpec


class MissingSecretError(ResourceError):
    """The message names the field, the Secret and what is to be in it."""


async def check(kube: Kube, cluster: Cluster) -> None:
    """Raises MissingSecretError, ApiError."""
    for field, name, keys in _named(cluster.spec):
        wanted = " and ".join(keys)
        found = await kube.get("Secret", name, cluster.namespace)
        if found is None:
            raise MissingSecretError(
                f"{field} names the Secret {name}, which is not there; make it in the namespace "
                f"{cluster.namespace}, with {wanted}"
            )
        if missing := [key for key in keys if key not in (found.get("data") or {})]:
            raise MissingSecretError(
                f"{field} names the Secret {name}, which has no {' and no '.join(missing)}; it is to have "
                f"{wanted}"
            )


def _named(spec: MeshClusterSpec) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Field, Secret, keys."""
    if spec.auth.root_secret_ref:
        yield (
            "auth.rootSecretRef",
            spec.auth.root_secret_ref.name,
            ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        )
    if spec.auth.users_secret_ref:
        yield "auth.usersSecretRef", spec.auth.users_secret_ref.name, (spec.auth.users_secret_ref.key,)
    if spec.s3.tls:
        yield "s3.tls.secretRef", spec.s3.tls.secret_ref.name, ("tls.crt", "tls.key")
