"""Registers the cluster's own issuer of service account tokens with meshes whose spec asks for it.

Law: the API server's keys are stored in the mesh as a document, so that daemons need not reach it; they are
compared again and again, because an administrator may replace them. The provider `kubernetes` belongs to the
operator; other providers, and all roles, are the administrator's and are never touched.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

import httpx2
from lightkube import ApiError

from meshoperator.daemon_client import DaemonError, UnreachableError
from meshoperator.resources import MeshClusterSpec, ResourceError, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshoperator.cluster_model import Manifest
    from meshoperator.daemon_client import DaemonClient, MeshAccess
    from meshoperator.kube.client import Kube

_log = logging.getLogger(__name__)
PROVIDER: Final = "kubernetes"
_DISCOVERY: Final = "/.well-known/openid-configuration"
_KEYS: Final = "/openid/v1/jwks"
_PATH: Final = f"/-/admin/idps/{PROVIDER}"
_FAILURES: Final = (ApiError, httpx2.HTTPError, DaemonError, UnreachableError, ResourceError)


class IssuerRegistration:
    """Registers the issuer; one per operator."""

    def __init__(self, kube: Kube, daemons: DaemonClient) -> None:
        self._kube, self._daemons = kube, daemons

    def __repr__(self) -> str:
        return f"<IssuerRegistration {self._daemons!r}>"

    async def register_all(self, namespaces: Sequence[str] = ()) -> int:
        """Register the issuer with every mesh that asks for it; return for how many that failed. Raises
        ApiError."""
        failed = 0
        for namespace in namespaces or (None,):
            for document in await self._kube.list_all("MeshCluster", namespace):
                try:
                    await self._register(document)
                except _FAILURES as error:
                    failed += 1
                    name = document["metadata"]["name"]
                    _log.warning(
                        "the issuer of tokens is not registered with MeshCluster %s: %s", name, error
                    )
        return failed

    async def _register(self, document: Manifest) -> None:
        metadata, spec = document["metadata"], parse(MeshClusterSpec, document["spec"])
        wanted = spec.auth.web_identity
        if wanted is None or metadata.get("deletionTimestamp"):
            return
        issuer = (await self._kube.read_document(_DISCOVERY))["issuer"]
        keys = json.dumps(await self._kube.read_document(_KEYS), sort_keys=True)
        _, access = await self._daemons.locate_mesh(metadata["namespace"], metadata["name"])
        present = await self._present(access)
        if present is not None and present["issuer"] != issuer:
            _log.warning("MeshCluster %s: the issuer is now %s", metadata["name"], issuer)
            await self._daemons.request_json(access, "DELETE", f"{_PATH}?force=true")
            present = None
        changeable = {"audiences": [wanted.audience], "jwks": keys}
        if present is None:
            body = {
                "name": PROVIDER,
                "issuer": issuer,
                "description": "the cluster's service accounts, registered by the operator",
                **changeable,
            }
            await self._daemons.request_json(access, "POST", "/-/admin/idps", body)
        elif {name: present[name] for name in changeable} != changeable:
            await self._daemons.request_json(access, "PATCH", _PATH, changeable)

    async def _present(self, access: MeshAccess) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = await self._daemons.request_json(access, "GET", _PATH)
        except DaemonError as error:
            if error.code == "NoSuchProvider":
                return None
            raise
        return found
