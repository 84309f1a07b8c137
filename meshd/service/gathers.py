"""Gather: an ordered list of objects, shard members and byte ranges, as one stream.

Law: each item is admitted on its own; what cannot be given is marked, with its reason, and the rest still
comes.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from meshd.assembly.errors import BatchError
from meshd.service.blobs import Blob, as_samples, as_tar
from meshd.service.datasets import invalid
from meshwire.documents import (
    PlanError,
    checked_choice,
    checked_integer,
    checked_object,
    checked_text,
    read_json,
    required,
)
from meshwire.frames import FRAME_VERSION

if TYPE_CHECKING:
    from meshd.service.access import Caller
    from meshd.service.blobs import Outgoing
    from meshd.service.datasets import DatasetService
    from meshd.service.readers import Readers
    from meshd.service.rights import Rights
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record

Format = Literal["samples", "tar"]
MAX_ITEMS = 20_000
_MAX_OFFSET = 1 << 60


@dataclass(frozen=True, slots=True)
class Item:
    """One thing asked for. `span`: (offset, length) in bytes within the object or the member."""

    bucket: str
    key: str
    member: str | None = None
    span: tuple[int, int] | None = None
    tag: Any = None

    @property
    def name(self) -> str:
        return self.key if self.member is None else self.member


class GatherService:
    """One a worker."""

    def __init__(self, store: ObjectStore, datasets: DatasetService, readers: Readers) -> None:
        self._store, self._datasets, self._readers = store, datasets, readers

    def __repr__(self) -> str:
        return "<GatherService>"

    async def gather(self, caller: Caller, body: bytes) -> Outgoing:
        """The stream. Its metadata has `errors`, {item number: code}, and `tags`, as JSON.

        Raises BatchError InvalidPlan for a malformed request; items that fail are marked instead.
        """
        try:
            items, form = _parse(body)
        except PlanError as error:
            raise invalid(error) from error
        blobs = []
        rights: dict[str, Rights] = {}  # by bucket
        for number, item in enumerate(items):
            blobs.append(await self._resolve(caller, item, rights))
            if number % 500 == 499:
                await asyncio.sleep(0)  # other requests get their turn
        if form == "tar":
            return as_tar(self._store, blobs, len(items))
        errors = {str(number): blob.error for number, blob in enumerate(blobs) if blob.error}
        metadata = {"version": FRAME_VERSION, "errors": json.dumps(errors)}
        if any(item.tag is not None for item in items):
            metadata["tags"] = json.dumps([item.tag for item in items])
        return as_samples(self._store, blobs, metadata, len(items))

    async def _resolve(self, caller: Caller, item: Item, rights: dict[str, Rights]) -> Blob:
        try:
            if item.bucket not in rights:
                rights[item.bucket] = self._readers.rights(caller, item.bucket)
            if not rights[item.bucket].allows(item.key):
                return Blob(item.name, 0, error="AccessDenied")
            record = self._store.get(item.bucket, item.key)
            if record is None:
                return Blob(item.name, 0, error=self._readers.missing(caller, item.bucket, item.key))
            offset, size = await self._place(item, record)
        except BatchError as error:
            return Blob(item.name, 0, error=error.code)
        whole = Blob(item.name, size, record, offset)
        if item.span is None:
            return whole
        first, length = item.span
        if first > size or (first == size and length):
            return Blob(item.name, 0, error="InvalidRange")
        return replace(whole, offset=offset + first, length=min(length, size - first))

    async def _place(self, item: Item, record: Record) -> tuple[int, int]:
        """(offset, size) of the object or its member. Raises BatchError NoSuchKey, BadSample."""
        if item.member is None:
            return 0, record.size
        index = await self._datasets.shard_index(item.bucket, item.key, record)
        found = index.find(item.member)
        if found is None:
            raise BatchError("NoSuchKey", f"the tar has no member {item.member[:80]!r}")
        return found


def _parse(body: bytes) -> tuple[list[Item], Format]:
    document = checked_object(read_json(body), "", ("items", "format"))
    form = cast("Format", checked_choice(document.get("format", "samples"), "format", ("samples", "tar")))
    items = required(document, "items", "")
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_ITEMS:
        raise PlanError("items", f"expected a list of 1…{MAX_ITEMS} items")
    return [_parse_item(item, f"items[{number}]") for number, item in enumerate(items)], form


def _parse_item(value: Any, path: str) -> Item:
    document = checked_object(value, path, ("bucket", "key", "member", "range", "tag"))
    member = document.get("member")
    return Item(
        checked_text(required(document, "bucket", path), f"{path}.bucket", at_most=255),
        _checked_key(required(document, "key", path), f"{path}.key"),
        None if member is None else checked_text(member, f"{path}.member", at_most=4096),
        _parse_range(document.get("range"), f"{path}.range"),
        document.get("tag"),
    )


def _checked_key(value: Any, path: str) -> str:
    key = checked_text(value, path, at_most=1024)
    if not 1 <= len(key.encode()) <= 1024:
        raise PlanError(path, "a key has 1…1024 bytes of UTF-8")
    return key


def _parse_range(value: Any, path: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise PlanError(path, "expected [offset, length] in bytes")
    offset, length = (checked_integer(item, f"{path}[{i}]", 0, _MAX_OFFSET) for i, item in enumerate(value))
    return offset, length
