"""Document administration: list, show and remove plans and snapshots.

A caller sees a document if it may read all buckets the document was made from, and may remove it if it
may delete everything in them; buckets created later under the same names do not count. A document that
another one refers to cannot be removed first. A removal is in force on every node, reachable or not,
when the response is sent.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from meshd.control.control_api import ControlError
from meshd.core.api_errors import BatchError, busy
from meshd.core.document_store import RESERVED_BUCKET, unknown_document
from meshd.documents.gc_policy import digest_of, hashes_in
from meshd.documents.inventory import MINUTE_MS
from meshwire.errors import S3Error
from meshwire.frame.tensor_frame import FrameError, header_size, parse_frame_header
from meshwire.strict_json import PlanError, read_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identity import Caller
    from meshd.control.deleted_documents import DeletedDocumentTable
    from meshd.core.document_store import DocumentStore
    from meshd.documents.gc_policy import DocumentUsage
    from meshd.documents.inventory import DocumentInventory, MeshInventory
    from meshd.store.api import ObjectStore
    from meshd.util.clock import Clock

Kind = Literal["plans", "snapshots"]
KINDS: Final[tuple[Kind, ...]] = ("plans", "snapshots")
MAX_PAGE: Final = 1000
_RECENT_MS: Final = 86_400_000
"""Documents used more recently than this may still be in use."""


class _DocumentSummary(msgspec.Struct, frozen=True):
    """What a document says about itself. `description`: its description for users; `snapshot`: its own hash,
    or the hash of a plan's snapshot."""

    snapshot: str
    buckets: tuple[str, ...]
    description: dict[str, Any]


class DocumentAdmin:
    """Lists, shows and removes documents for callers. One per worker. `references`: everything that names
    documents, each with its text; `days`: see DocumentCollector; `recorded`: whether a snapshot was
    registered for the buckets that now have these names; `announce`: returns when the other nodes know what
    this process knows."""

    def __init__(
        self,
        store: ObjectStore,
        documents: DocumentStore,
        inventory: DocumentInventory,
        deleted: DeletedDocumentTable,
        access: Authorizer,
        references: Callable[[], Iterable[tuple[str, str]]],
        clock: Clock,
        days: int,
        recorded: Callable[[str, tuple[str, ...]], Awaitable[bool]],
        announce: Callable[[], Awaitable[None]],
    ) -> None:
        self._store, self._documents, self._inventory, self._deleted = store, documents, inventory, deleted
        self._access, self._list_references = access, references
        self._clock, self._days, self._recorded = clock, days, recorded
        self._announce = announce

    async def list_documents(self, caller: Caller, kind: Kind, after: str, limit: int) -> dict[str, Any]:
        """Returns a page of the documents that the caller may see, in order of their hashes."""
        seen = await self._inventory.collect([f"{kind}/"])
        names = sorted(
            key for key in seen.held if key > f"{kind}/{after}" and not self._documents.is_gone(key)
        )
        referrers = await asyncio.to_thread(self._references)
        found: list[dict[str, Any]] = []
        for key in names:
            if len(found) == limit:
                return self._page(kind, found, seen, found[-1]["hash"])
            summary = await self._summary(key)
            if summary is not None and await self._may_see(caller, summary):
                found.append(self._row(key, seen.held[key], summary, referrers.get(digest_of(key), [])))
        return self._page(kind, found, seen, "")

    def _page(
        self, kind: Kind, rows: list[dict[str, Any]], seen: MeshInventory, after: str
    ) -> dict[str, Any]:
        return {kind: rows, "next": after, "days": self._days, "silent": list(seen.silent)}

    async def get_document(self, caller: Caller, kind: Kind, digest: str) -> dict[str, Any]:
        """Returns one document. Raises BatchError NoSuchPlan, NoSuchSnapshot, Gone, AccessDenied."""
        key, summary = await self._require_document(caller, kind, digest)
        seen = await self._inventory.collect([key])
        referrers = (await asyncio.to_thread(self._references)).get(digest, [])
        return {**self._row(key, seen.held[key], summary, referrers), "silent": list(seen.silent)}

    async def remove_document(
        self, caller: Caller, kind: Kind, digest: str, *, force: bool
    ) -> dict[str, Any]:
        """Removes a document on every node; `force`: even if it was used recently.

        Raises BatchError NoSuchPlan, NoSuchSnapshot, Gone, AccessDenied, InUse, Busy.
        """
        key, summary = await self._require_document(caller, kind, digest)
        self._require(caller, summary)
        referrers = (await asyncio.to_thread(self._references)).get(digest, [])
        if referrers:
            raise BatchError(
                "InUse",
                f"the {kind[:-1]} {digest} is used by {_first_names(referrers)}",
                help="remove that first; unused documents are removed automatically",
                detail={"kept_by": referrers},
            )
        seen = await self._inventory.collect([key])
        self._check_unused(kind, digest, seen.held.get(key), force=force)
        try:
            await self._deleted.add([key], self._clock.now_ms(), "asked", by=caller.identity.user_id)
        except ControlError as error:
            raise busy(f"the document cannot be removed now: {error}") from error
        await self._announce()  # else a node that has not heard of it would take the document for present
        return {"removed": digest, "kind": kind[:-1], "silent": list(seen.silent)}

    def _check_unused(self, kind: Kind, digest: str, held: DocumentUsage | None, *, force: bool) -> None:
        """Raises BatchError InUse if the document was used recently."""
        used = 0 if held is None else held.used * MINUTE_MS
        if not force and used > self._clock.now_ms() - _RECENT_MS:
            raise BatchError(
                "InUse",
                f"the {kind[:-1]} {digest} was used within the last day: a job may still be using it",
                help="wait for the job to end, or remove it anyway with force",
                detail={"used_ms": used},
            )

    # --- documents ----------------------------------------------------------------------------------------

    async def _require_document(
        self, caller: Caller, kind: Kind, digest: str
    ) -> tuple[str, _DocumentSummary]:
        key = f"{kind}/{digest}"
        await self._documents.ensure_local(key)
        summary = await self._summary(key)
        if summary is None or not self._is_allowed(caller, summary, "s3:GetObject"):
            raise BatchError(
                "AccessDenied",
                f"this key may not read everything that the {kind[:-1]} {digest} was made from",
                help="use the key of its bucket's owner, or root's",
            )
        if not await self._is_of_current_buckets(caller, summary):
            raise unknown_document(key)
        return key, summary

    async def _summary(self, key: str) -> _DocumentSummary | None:
        """Returns a document's summary; None if it is not here and cannot be fetched."""
        try:
            await self._documents.ensure_local_copies([key])
        except BatchError:
            return None
        return await asyncio.to_thread(self._read, key)

    def _read(self, key: str) -> _DocumentSummary | None:
        record = self._store.get(RESERVED_BUCKET, key)
        if record is None:
            return None
        if key.startswith("plans/"):
            return _summarize_plan(self._store.read_range(record, 0, record.size))
        head = header_size(self._store.read_range(record, 0, min(8, record.size)))
        return _summarize_snapshot(digest_of(key), self._store.read_range(record, 0, min(head, record.size)))

    def _references(self) -> dict[str, list[str]]:
        """Returns the names that refer to each hash (blocking)."""
        found: dict[str, list[str]] = {}
        for name, held in self._texts():
            for digest in held:
                found.setdefault(digest, []).append(name)
        return found

    def _texts(self) -> Iterator[tuple[str, set[str]]]:
        for name, text in self._list_references():
            yield name, hashes_in(text)
        for key in self._inventory.list_local("plans/"):
            record = None if self._documents.is_gone(key) else self._store.get(RESERVED_BUCKET, key)
            if record is not None:
                yield f"plan {digest_of(key)}", hashes_in(self._store.read_range(record, 0, record.size))

    def _row(
        self, key: str, held: DocumentUsage, summary: _DocumentSummary, referrers: list[str]
    ) -> dict[str, Any]:
        last = held.minute * MINUTE_MS
        stays = bool(referrers) or not self._days
        return {
            "hash": digest_of(key),
            **summary.description,
            "bytes": held.size,
            "nodes": held.nodes,
            "used_ms": last,
            "expires_ms": None if stays else last + self._days * 86_400_000,
            "kept_by": referrers,
        }

    # --- permissions --------------------------------------------------------------------------------------

    async def _may_see(self, caller: Caller, summary: _DocumentSummary) -> bool:
        if not self._is_allowed(caller, summary, "s3:GetObject"):
            return False
        try:
            return await self._is_of_current_buckets(caller, summary)
        except BatchError:  # another node may know but does not answer
            return False

    async def _is_of_current_buckets(self, caller: Caller, summary: _DocumentSummary) -> bool:
        """Returns True if the document was made from the buckets that now have these names; root also sees
        others. Raises BatchError Busy."""
        return caller.identity.root or await self._recorded(summary.snapshot, summary.buckets)

    def _is_allowed(self, caller: Caller, summary: _DocumentSummary, action: str) -> bool:
        """Returns True if the caller may perform `action` on everything in each bucket. If a bucket no longer
        exists, only root may."""
        identity = caller.identity
        try:
            for bucket in summary.buckets:
                self._access.require_prefix(caller, action, bucket)
        except S3Error as error:
            return error.code == "NoSuchBucket" and identity.root
        return True

    def _require(self, caller: Caller, summary: _DocumentSummary) -> None:
        if not self._is_allowed(caller, summary, "s3:DeleteObject"):
            raise BatchError(
                "AccessDenied",
                f"removing it requires s3:DeleteObject on all of {', '.join(summary.buckets)[:200]}",
                help="use the key of the bucket's owner, or root's",
            )


def _first_names(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _summarize_plan(document: bytes) -> _DocumentSummary:
    value: Mapping[str, Any] = json.loads(document)
    buckets = (value["bucket"], *value.get("others", ()))
    description = {"snapshot": value["snapshot"], "buckets": list(buckets), "samples": value["samples"]}
    description["ops"] = [op["op"] for op in value["spec"].get("ops", ())]
    return _DocumentSummary(value["snapshot"], buckets, description)


def _summarize_snapshot(digest: str, head: bytes) -> _DocumentSummary | None:
    try:
        said = parse_frame_header(head).metadata
        others = read_json(said["others"].encode()) if "others" in said else []
    except (FrameError, PlanError):
        return None
    buckets = (said["bucket"], *others)
    description = {"source": said["source"], "kind": said["kind"], "buckets": list(buckets)}
    return _DocumentSummary(digest, buckets, description)
