"""Document administration: list, show and remove plans and snapshots.

A caller sees a document if it may read all buckets the document was made from, and may remove it if it
may delete everything in them; buckets created later under the same names do not count. A document that
another one refers to cannot be removed first. A removal is in force on every node, reachable or not,
when the response is sent.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

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

    from meshd.auth.authorizer import Authorizer, Caller
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
"""Used since so long ago: somebody may be at it."""


@dataclass(frozen=True, slots=True)
class _DocumentSummary:
    """What a document says of itself. `source`: as a person knows it; `snapshot`: its own hash, or a plan's
    snapshot."""

    snapshot: str
    buckets: tuple[str, ...]
    told: dict[str, Any]


class DocumentAdmin:
    """One a worker. `naming`: all that names documents, each with its text; `days`: see DocumentKeeper;
    `recorded`: whether a snapshot was registered for the buckets that have these names now."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        census: DocumentInventory,
        removals: DeletedDocumentTable,
        access: Authorizer,
        naming: Callable[[], Iterable[tuple[str, str]]],
        clock: Clock,
        days: int,
        recorded: Callable[[str, tuple[str, ...]], Awaitable[bool]],
    ) -> None:
        self._store, self._catalog, self._census, self._removals = store, catalog, census, removals
        self._access, self._naming = access, naming
        self._clock, self._days, self._recorded = clock, days, recorded

    def __repr__(self) -> str:
        return "<KeptDocuments>"

    async def list_documents(self, caller: Caller, kind: Kind, after: str, limit: int) -> dict[str, Any]:
        """A page of those the caller may see, in order of their hashes."""
        seen = await self._census.collect([f"{kind}/"])
        names = sorted(key for key in seen.held if key > f"{kind}/{after}" and not self._catalog.is_gone(key))
        names_them = await asyncio.to_thread(self._references)
        found: list[dict[str, Any]] = []
        for key in names:
            if len(found) == limit:
                return self._page(kind, found, seen, found[-1]["hash"])
            what = await self._what(key)
            if what is not None and await self._sees(caller, what):
                found.append(self._row(key, seen.held[key], what, names_them.get(digest_of(key), [])))
        return self._page(kind, found, seen, "")

    def _page(
        self, kind: Kind, rows: list[dict[str, Any]], seen: MeshInventory, after: str
    ) -> dict[str, Any]:
        return {kind: rows, "next": after, "days": self._days, "silent": list(seen.silent)}

    async def get_document(self, caller: Caller, kind: Kind, digest: str) -> dict[str, Any]:
        """One of them. Raises BatchError NoSuchPlan, NoSuchSnapshot, Gone, AccessDenied."""
        key, what = await self._found(caller, kind, digest)
        seen = await self._census.collect([key])
        names_it = (await asyncio.to_thread(self._references)).get(digest, [])
        return {**self._row(key, seen.held[key], what, names_it), "silent": list(seen.silent)}

    async def remove_document(
        self, caller: Caller, kind: Kind, digest: str, *, force: bool
    ) -> dict[str, Any]:
        """Remove one, on every node; `force`: also one that was used lately.

        Raises BatchError NoSuchPlan, NoSuchSnapshot, Gone, AccessDenied, InUse, Busy.
        """
        key, what = await self._found(caller, kind, digest)
        self._require(caller, what)
        names_it = (await asyncio.to_thread(self._references)).get(digest, [])
        if names_it:
            raise BatchError(
                "InUse",
                f"the {kind[:-1]} {digest} is named by {_first_names(names_it)}",
                help="remove that first; what nobody uses goes by itself",
                detail={"kept_by": names_it},
            )
        seen = await self._census.collect([key])
        self._check_unused(kind, digest, seen.held.get(key), force=force)
        try:
            await self._removals.add([key], self._clock.now_ms(), "asked", by=caller.identity.user_id)
        except ControlError as error:
            raise busy(f"it cannot be removed now: {error}") from error
        return {"removed": digest, "kind": kind[:-1], "silent": list(seen.silent)}

    def _check_unused(self, kind: Kind, digest: str, held: DocumentUsage | None, *, force: bool) -> None:
        """Raises BatchError InUse."""
        used = 0 if held is None else held.used * MINUTE_MS
        if not force and used > self._clock.now_ms() - _RECENT_MS:
            raise BatchError(
                "InUse",
                f"the {kind[:-1]} {digest} was used within the last day: a job may be at it",
                help="wait for the job's end, or remove it all the same with force",
                detail={"used_ms": used},
            )

    # --- what there is ------------------------------------------------------------------------------------

    async def _found(self, caller: Caller, kind: Kind, digest: str) -> tuple[str, _DocumentSummary]:
        key = f"{kind}/{digest}"
        await self._catalog.ensure_local(key)
        what = await self._what(key)
        if what is None or not self._may(caller, what, "s3:GetObject"):
            raise BatchError(
                "AccessDenied",
                f"this key may not read what the {kind[:-1]} {digest} is made of",
                help="use the key of its bucket's owner, or root's",
            )
        if not await self._is_of_current_buckets(caller, what):
            raise unknown_document(key)
        return key, what

    async def _what(self, key: str) -> _DocumentSummary | None:
        """None when it is not here and cannot be had."""
        try:
            await self._catalog.ensure_local_copies([key])
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
        """By hash (blocking)."""
        found: dict[str, list[str]] = {}
        for name, held in self._texts():
            for digest in held:
                found.setdefault(digest, []).append(name)
        return found

    def _texts(self) -> Iterator[tuple[str, set[str]]]:
        for name, text in self._naming():
            yield name, hashes_in(text)
        for key in self._census.list_local("plans/"):
            record = None if self._catalog.is_gone(key) else self._store.get(RESERVED_BUCKET, key)
            if record is not None:
                yield f"plan {digest_of(key)}", hashes_in(self._store.read_range(record, 0, record.size))

    def _row(
        self, key: str, held: DocumentUsage, what: _DocumentSummary, names_it: list[str]
    ) -> dict[str, Any]:
        last = held.minute * MINUTE_MS
        stays = bool(names_it) or not self._days
        return {
            "hash": digest_of(key),
            **what.told,
            "bytes": held.size,
            "nodes": held.nodes,
            "used_ms": last,
            "expires_ms": None if stays else last + self._days * 86_400_000,
            "kept_by": names_it,
        }

    # --- who may ------------------------------------------------------------------------------------------

    async def _sees(self, caller: Caller, what: _DocumentSummary) -> bool:
        if not self._may(caller, what, "s3:GetObject"):
            return False
        try:
            return await self._is_of_current_buckets(caller, what)
        except BatchError:  # another node may know, and does not answer
            return False

    async def _is_of_current_buckets(self, caller: Caller, what: _DocumentSummary) -> bool:
        """Whether it was made of the buckets that have these names now; root sees others', too. Raises
        BatchError Busy."""
        return caller.identity.root or await self._recorded(what.snapshot, what.buckets)

    def _may(self, caller: Caller, what: _DocumentSummary, action: str) -> bool:
        """Whether the caller may do that to whatever is in every bucket. Where one is gone, root may."""
        identity = caller.identity
        try:
            for bucket in what.buckets:
                self._access.require_prefix(caller, action, bucket)
        except S3Error as error:
            return error.code == "NoSuchBucket" and identity.root
        return True

    def _require(self, caller: Caller, what: _DocumentSummary) -> None:
        if not self._may(caller, what, "s3:DeleteObject"):
            raise BatchError(
                "AccessDenied",
                f"it takes s3:DeleteObject on all of {', '.join(what.buckets)[:200]} to remove what is of it",
                help="use the key of the bucket's owner, or root's",
            )


def _first_names(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _summarize_plan(document: bytes) -> _DocumentSummary:
    value: Mapping[str, Any] = json.loads(document)
    buckets = (value["bucket"], *value.get("others", ()))
    told = {"snapshot": value["snapshot"], "buckets": list(buckets), "samples": value["samples"]}
    told["ops"] = [op["op"] for op in value["spec"].get("ops", ())]
    return _DocumentSummary(value["snapshot"], buckets, told)


def _summarize_snapshot(digest: str, head: bytes) -> _DocumentSummary | None:
    try:
        said = parse_frame_header(head).metadata
        others = read_json(said["others"].encode()) if "others" in said else []
    except (FrameError, PlanError):
        return None
    buckets = (said["bucket"], *others)
    told = {"source": said["source"], "kind": said["kind"], "buckets": list(buckets)}
    return _DocumentSummary(digest, buckets, told)
