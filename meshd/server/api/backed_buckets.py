"""Bucket API: buckets with origins, replication factors or quotas (`/-/buckets`), and cache residency.

A handler parses, calls the service and answers JSON. Root only: an origin is a location that this node reads
with its own credentials. A change is answered when the other nodes know of it, as in the S3 API.
`DELETE /-/residence/BUCKET` evicts only data that is cached from an origin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from meshd.core.api_errors import BatchError
from meshd.objects.buckets.decoded_quota import FIELD
from meshd.server.api import reply_types
from meshd.server.api.json_api import parse_query
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import operation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.auth.identity import Identity
    from meshd.objects.buckets.decoded_quota import DecodedQuotas
    from meshd.objects.buckets.replication_factor import ReplicationFactors
    from meshd.origins.admin import BackedAdmin
    from meshd.origins.cache.residency import CacheResidency
    from meshd.server.api.json_api import JsonApi
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply


_BUCKETS_PREFIX = "/-/buckets/"


class BackedBucketEndpoint:
    """The bucket API. One instance per worker. `announce`: returns when the other nodes know the buckets that
    this process knows."""

    def __init__(
        self,
        admin: BackedAdmin,
        counts: ReplicationFactors,
        quotas: DecodedQuotas,
        announce: Callable[[], Awaitable[None]],
        api: JsonApi,
    ) -> None:
        self._admin, self._counts, self._api = admin, counts, api
        self._quotas, self._announce = quotas, announce

    def routes(self) -> list[HttpRoute]:
        guarded = self._api.handle_errors
        return [
            HttpRoute("GET", "/-/buckets", guarded(self.list_all)),
            HttpRoute("GET", _BUCKETS_PREFIX, guarded(self.show)),
            HttpRoute("PUT", _BUCKETS_PREFIX, guarded(self.create)),
            HttpRoute("PATCH", _BUCKETS_PREFIX, guarded(self.change)),
        ]

    @operation("/-/buckets", "Buckets with an origin, a replication factor or a quota")
    async def list_all(self, request: MeshRequest, identity: Identity) -> Reply:
        parse_query(request, ())
        found = [*self._admin.list_all(identity), *self._counts.list_buckets(identity)]
        listed = {bucket["name"] for bucket in found}
        found += [
            self._owner(name).show(identity, name) for name in self._quotas.buckets() if name not in listed
        ]
        shown = map(self._quotas.added, sorted(found, key=lambda bucket: bucket["name"]))
        return self._api.reply_json({"buckets": list(shown)})

    def _owner(self, name: str) -> BackedAdmin | ReplicationFactors:
        return self._admin if self._counts.is_backed(name) else self._counts

    @operation("/-/buckets/{bucket}", "Such a bucket")
    async def show(self, request: MeshRequest, identity: Identity) -> Reply:
        parse_query(request, ())
        name = _bucket_name(request)
        return self._api.reply_json(self._quotas.added(self._owner(name).show(identity, name)))

    @operation("/-/buckets/{bucket}", "Create such a bucket", accepts="json")
    async def create(self, request: MeshRequest, identity: Identity) -> Reply:
        parse_query(request, ())
        document = _document(await request.read())
        owner = self._admin if "url" in document else self._counts
        created = await owner.create(identity, _bucket_name(request), document)
        await self._announce()
        return self._api.reply_json(created)

    @operation("/-/buckets/{bucket}", "Change such a bucket", accepts="json")
    async def change(self, request: MeshRequest, identity: Identity) -> Reply:
        parse_query(request, ())
        document, name = _document(await request.read()), _bucket_name(request)
        if FIELD in document:
            await self._quotas.change(identity, name, document.pop(FIELD))
            if not document:
                await self._announce()
                return self._api.reply_json(self._quotas.added(self._owner(name).show(identity, name)))
        owner = self._counts if "copies" in document else self._admin
        changed = await owner.change(identity, name, document)
        await self._announce()
        return self._api.reply_json(self._quotas.added(changed))


def _bucket_name(request: MeshRequest) -> str:
    return unquote(request.raw_path.partition("?")[0].removeprefix(_BUCKETS_PREFIX))


def _document(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BatchError("BadRequest", f"the body must be a JSON object: {error}") from None


_RESIDENCE_PREFIX = "/-/residence/"


class CacheResidencyEndpoint:
    """The residency API. One instance per worker."""

    def __init__(self, residence: CacheResidency, api: JsonApi) -> None:
        self._residence, self._api = residence, api

    def routes(self) -> list[HttpRoute]:
        guarded = self._api.handle_errors
        return [
            HttpRoute("GET", _RESIDENCE_PREFIX, guarded(self.count)),
            HttpRoute("DELETE", _RESIDENCE_PREFIX, guarded(self.evict)),
        ]

    @operation("/-/residence/", "What the node stores")
    @operation(
        "/-/residence/{bucket}",
        "Objects of a bucket on this node",
        query=("prefix",),
        reply=reply_types.Residence,
    )
    async def count(self, request: MeshRequest, identity: Identity) -> Reply:
        """Answer `?prefix=PREFIX`; without a bucket, the usage of the whole node."""
        if not _resident_bucket(request):
            return self._api.reply_json(await self._residence.node_usage(identity))
        prefix = parse_query(request, ("prefix",)).get("prefix", "")
        return self._api.reply_json(
            await self._residence.count_bucket(identity, _resident_bucket(request), prefix)
        )

    @operation("/-/residence/{bucket}", "Evict what is cached from an origin", query=("prefix",))
    async def evict(self, request: MeshRequest, identity: Identity) -> Reply:
        prefix = parse_query(request, ("prefix",)).get("prefix", "")
        return self._api.reply_json(
            await self._residence.evict_cached(identity, _resident_bucket(request), prefix)
        )


def _resident_bucket(request: MeshRequest) -> str:
    return unquote(request.raw_path.partition("?")[0].removeprefix(_RESIDENCE_PREFIX))
