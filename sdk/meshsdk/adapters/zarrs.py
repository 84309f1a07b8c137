"""The store as a zarr-python store: arrays and groups below a prefix.

Law: one key is one object; one range is one request, many ranges are one gather. Calls block in threads, so
zarr's event loop stays free.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from meshsdk.client.request import get_request
from meshsdk.client.s3_client import connect
from meshsdk.datasets.fields import check_source
from meshsdk.errors import NotFoundError, PreconditionError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from meshsdk.client.s3_client import Client

    Range: TypeAlias = RangeByteRequest | OffsetByteRequest | SuffixByteRequest | None


class MeshStore(Store):
    """A zarr store: `zarr.open_group(MeshStore("s3://bucket/prefix"))`. `client` defaults to
    `meshsdk.connect()`."""

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(self, url: str, client: Client | None = None, *, read_only: bool = False) -> None:
        super().__init__(read_only=read_only)
        self.url = check_source(url)
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        self.bucket, self.prefix = bucket, prefix
        self.client = client or connect()

    def with_read_only(self, read_only: bool = False) -> MeshStore:
        return MeshStore(self.url, self.client, read_only=read_only)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshStore):
            return False
        mine, theirs = self.client.settings, other.client.settings
        return (other.url, other.read_only, theirs) == (self.url, self.read_only, mine)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"MeshStore({self.url!r}, {self.client!r})"

    def _key(self, key: str) -> str:
        return f"{self.prefix}{key}"

    # --- reading ----------------------------------------------------------------------------------

    async def get(self, key: str, prototype: Any, byte_range: Range = None) -> Any:
        try:
            body = await asyncio.to_thread(self._read, key, byte_range)
        except NotFoundError:
            return None
        return prototype.buffer.from_bytes(body)

    def _read(self, key: str, wanted: Range) -> bytes:
        name = self._key(key)
        match wanted:
            case RangeByteRequest(start, end):
                return self.client.get(self.bucket, name, offset=start, length=end - start)
            case OffsetByteRequest(offset):
                return self.client.get(self.bucket, name, offset=offset)
            case SuffixByteRequest(suffix):
                request = get_request(self.bucket, name, 0, None, None)
                request = replace(request, headers={"range": f"bytes=-{suffix}"})
                return self.client.transport.call(request, lambda response: response.read(1 << 40))
            case None:
                return self.client.get(self.bucket, name)
        raise ValueError(f"Unexpected byte_range, got {wanted!r}.")  # the wording of zarr's own stores

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Range]]) -> list[Any]:
        return await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges))

    async def exists(self, key: str) -> bool:
        try:
            await asyncio.to_thread(self.client.head, self.bucket, self._key(key))
        except NotFoundError:
            return False
        return True

    async def getsize(self, key: str) -> int:
        try:
            return (await asyncio.to_thread(self.client.head, self.bucket, self._key(key))).size
        except NotFoundError as error:
            raise FileNotFoundError(key) from error

    # --- writing ----------------------------------------------------------------------------------

    async def set(self, key: str, value: Any) -> None:
        self._check_writable()
        await asyncio.to_thread(self.client.put, self.bucket, self._key(key), value.to_bytes())

    async def set_if_not_exists(self, key: str, value: Any) -> None:
        self._check_writable()
        try:
            await asyncio.to_thread(
                self.client.put, self.bucket, self._key(key), value.to_bytes(), if_absent=True
            )
        except PreconditionError:
            return

    async def delete(self, key: str) -> None:
        self._check_writable()
        await asyncio.to_thread(self.client.delete, self.bucket, self._key(key))

    async def delete_dir(self, prefix: str) -> None:
        self._check_writable()
        below = self._key(prefix.rstrip("/") + "/" if prefix else "")
        names = await asyncio.to_thread(self._below, below)
        failed = await asyncio.to_thread(self.client.delete_many, self.bucket, names)
        if failed:
            raise PermissionError(f"s3://{self.bucket}/{failed[0].key}: {failed[0].message}")

    # --- listing ----------------------------------------------------------------------------------

    def _below(self, prefix: str) -> list[str]:
        return [entry.key for entry in self.client.list(self.bucket, prefix)]

    async def list(self) -> AsyncIterator[str]:
        async for name in self.list_prefix(""):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for name in await asyncio.to_thread(self._below, self._key(prefix)):
            yield name.removeprefix(self.prefix)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        below = self._key(prefix.rstrip("/") + "/" if prefix else "")
        for name in await asyncio.to_thread(lambda: list(self._children(below))):
            yield name

    def _children(self, prefix: str) -> Iterator[str]:
        for page in self.client.pages(self.bucket, prefix, delimiter="/"):
            for common in page.common_prefixes:
                yield common.removeprefix(prefix).rstrip("/")
            for entry in page.entries:
                yield entry.key.removeprefix(prefix)
