"""HTTP client of a mesh's daemons: signed JSON requests as root.

Law: every call is idempotent and none is retried here. No secret appears in an error or a log.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp

from meshoperator.cluster_model import Cluster
from meshoperator.resources import MeshClusterSpec, parse
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshoperator.kube.client import Kube

_PATIENCE: Final = aiohttp.ClientTimeout(total=30, sock_connect=4)
_REGION: Final = "us-east-1"
_LONGEST: Final = 300
_FIGURES: Final = 30.0
_ANSWER: Final = ("up", "draining", "joining", "returning")


class DaemonError(Exception):
    """A daemon rejected a request; `code` is for programs, the text is its message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message[:_LONGEST] or code)
        self.status, self.code = status, code


class UnreachableError(Exception):
    """No daemon answers."""


class NoMeshError(UnreachableError):
    """The MeshCluster does not exist, so there are no daemons to wait for."""


@dataclass(frozen=True, slots=True)
class MeshAccess:
    """Endpoint and keys of a mesh. `authority`: PEM of its certificate's CA; empty: the system's CAs."""

    endpoint: str
    access_key: str
    secret_key: str
    authority: str = ""

    def __repr__(self) -> str:
        return f"<MeshAccess {self.endpoint}>"


class DaemonClient:
    """Finds meshes by their MeshCluster and sends requests. `endpoint` returns a cluster's URL (by default
    its Service's)."""

    def __init__(
        self, kube: Kube, now: Callable[[], float], endpoint: Callable[[Cluster], str] | None = None
    ) -> None:
        self._kube, self._now = kube, now
        self._endpoint = endpoint or (lambda cluster: cluster.endpoint)
        self._session: aiohttp.ClientSession | None = None
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._metrics: dict[str, tuple[float, str]] = {}

    def __repr__(self) -> str:
        return f"<DaemonClient {'open' if self._session else 'closed'}>"

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def locate_mesh(self, namespace: str, name: str) -> tuple[Cluster, MeshAccess]:
        """Return a MeshCluster and how to reach it. Raises NoMeshError if it does not exist, UnreachableError
        if its keys do not exist yet."""
        document = await self._kube.get("MeshCluster", name, namespace)
        if document is None:
            raise NoMeshError(f"MeshCluster {name!r} does not exist in namespace {namespace}")
        spec = parse(MeshClusterSpec, document["spec"])
        cluster = Cluster(name, namespace, document["metadata"]["uid"], spec)
        keys = await self._secret(cluster.root_secret, namespace)
        if not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= keys.keys():
            raise UnreachableError(f"Secret {cluster.root_secret!r} with root's keys does not exist yet")
        authority = ""
        if spec.s3.tls is not None:
            authority = (await self._secret(spec.s3.tls.secret_ref.name, namespace)).get("ca.crt", "")
        pair = keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"]
        return cluster, MeshAccess(self._endpoint(cluster), *pair, authority)

    async def _secret(self, name: str, namespace: str) -> dict[str, str]:
        found = await self._kube.get("Secret", name, namespace)
        data = (found or {}).get("data") or {}
        return {key: base64.b64decode(value).decode("utf-8", "replace") for key, value in data.items()}

    async def request_json(
        self, access: MeshAccess, method: str, target: str, document: Mapping[str, Any] | bytes | None = None
    ) -> Any:
        """Send one signed request; return the response's JSON, or None without JSON. Raises DaemonError,
        UnreachableError."""
        body = b""
        if document is not None:
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
        path, _, query = target.partition("?")
        headers = {"host": urlsplit(access.endpoint).netloc}
        headers |= sign(
            RequestHead(method, path, query, headers),
            Credential(access.access_key, access.secret_key),
            region=_REGION,
            timestamp=int(self._now()),
            payload_hash=hashlib.sha256(body).hexdigest(),
        )
        try:
            return await self._send(access, method, target, headers, body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"{access.endpoint} does not answer: {type(error).__name__}"
            raise UnreachableError(why) from error

    async def access_daemons(self, access: MeshAccess) -> list[MeshAccess]:
        """Return access to each daemon that answers; a request through it concerns that daemon alone. Raises
        DaemonError, UnreachableError."""
        answer = await self.request_json(access, "GET", "/-/map")
        try:
            found = [(each["endpoint"], each["state"]) for each in answer["map"]["nodes"]]
        except (TypeError, KeyError):
            raise DaemonError(200, "NoMap", f"{access.endpoint} does not answer as a daemon does") from None
        if len(found) == 1:
            return [access]
        return [replace(access, endpoint=endpoint) for endpoint, state in found if state in _ANSWER]

    async def read_metrics(self, access: MeshAccess) -> str:
        """Return a daemon's metrics, cached for half a minute. Raises DaemonError, UnreachableError."""
        known = self._metrics.get(access.endpoint)
        if known is not None and self._now() - known[0] < _FIGURES:
            return known[1]
        try:
            status, data = await self._exchange(access, "GET", "/metrics", {}, b"")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"{access.endpoint} does not answer: {type(error).__name__}") from error
        if status != 200:
            raise DaemonError(status, str(status), f"{access.endpoint} returns no metrics")
        self._metrics = {
            name: told for name, told in self._metrics.items() if self._now() - told[0] < _FIGURES
        }
        self._metrics[access.endpoint] = self._now(), data.decode("utf-8", "replace")
        return self._metrics[access.endpoint][1]

    async def _send(
        self, access: MeshAccess, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Any:
        status, data = await self._exchange(access, method, target, headers, body)
        found = _json(data)
        if status < 300:
            if found is None and data.strip() not in (b"", b"null"):
                raise DaemonError(status, "NotJson", f"{access.endpoint} does not answer as a daemon does")
            return found
        details = found.get("error", {}) if isinstance(found, dict) else {}
        message = f"{details.get('message', '')} {details.get('help') or ''}".strip()
        raise DaemonError(status, details.get("code", str(status)), message)

    async def _exchange(
        self, access: MeshAccess, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_PATIENCE, auto_decompress=False)
        where, context = _encoded_url(access.endpoint + target), await self._context(access)
        async with self._session.request(
            method, where, data=body, headers=headers, ssl=context, allow_redirects=False
        ) as answer:
            return answer.status, await answer.read()

    async def _context(self, access: MeshAccess) -> ssl.SSLContext | bool:
        if not access.authority:
            return True
        known = self._contexts.get(access.authority)
        if known is None:
            known = await asyncio.to_thread(ssl.create_default_context, cadata=access.authority)
            self._contexts = {access.authority: known}
        return known


def _encoded_url(url: str) -> Any:
    from yarl import URL  # keeps the URL exactly as signed

    return URL(url, encoded=True)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data) if data else None
    except ValueError:
        return None
