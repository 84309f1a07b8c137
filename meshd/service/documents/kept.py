"""What a mesh keeps of plans and snapshots, for people: listed, looked at, removed before their time.

Law: whoever may read all of a document's buckets, which are those it was made of and not others that have
their names now, sees it; whoever may delete all that is in them may remove it. What something names stays:
whoever removes a thing first removes what is made of it. Invariant: a removal counts on every node, away or
not, when it is answered.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from meshd.assembly.catalog import RESERVED_BUCKET, unknown_document
from meshd.assembly.errors import BatchError, busy
from meshd.control.interface import ControlError
from meshd.service.documents.retention import digest_of, named_in
from meshd.service.documents.uses import MINUTE_MS
from meshwire.documents import PlanError, read_json
from meshwire.frames import FrameError, header_size, parse_header
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from meshd.assembly.catalog import Catalog
    from meshd.control.removals import RemovalTable
    from meshd.kit.clock import Clock
    from meshd.service.authorization.access import Access, Caller
    from meshd.service.documents.census import Census, Everywhere
    from meshd.service.documents.retention import Held
    from meshd.store.interface import ObjectStore

Kind = Literal["plans", "snapshots"]
KINDS: Final[tuple[Kind, ...]] = ("plans", "snapshots")
MAX_PAGE: Final = 1000
_RECENT_MS: Final = 86_400_000
"""Used since so long ago: somebody may be at it."""


@dataclass(frozen=True, slots=True)
class _What:
    """What a document says of itself. `source`: as a person knows it; `snapshot`: its own hash, or a plan's
    snapshot."""

    snapshot: str
    buckets: tuple[str, ...]
    told: dict[str, Any]


class KeptDocuments:
    """One a worker. `naming`: all that names documents, each with its text; `days`: see DocumentKeeper;
    `recorded`: whether a snapshot was registered for the buckets that have these names now."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: Catalog,
        census: Census,
        removals: RemovalTable,
        access: Access,
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

    async def list_all(self, caller: Caller, kind: Kind, after: str, limit: int) -> dict[str, Any]:
        """A page of those the caller may see, in order of their hashes."""
        seen = await self._census.everywhere([f"{kind}/"])
        names = sorted(key for key in seen.held if key > f"{kind}/{after}" and not self._catalog.is_gone(key))
        names_them = await asyncio.to_thread(self._who_names)
        found: list[dict[str, Any]] = []
        for key in names:
            if len(found) == limit:
                return self._page(kind, found, seen, found[-1]["hash"])
            what = await self._what(key)
            if what is not None and await self._sees(caller, what):
                found.append(self._row(key, seen.held[key], what, names_them.get(digest_of(key), [])))
        return self._page(kind, found, seen, "")

    def _page(self, kind: Kind, rows: list[dict[str, Any]], seen: Everywhere, after: str) -> dict[str, Any]:
        return {kind: rows, "next": after, "days": self._days, "silent": list(seen.silent)}

    async def show(self, caller: Caller, kind: Kind, digest: str) -> dict[str, Any]:
        """One of them. Raises BatchError NoSuchPlan, NoSuchSnapshot, Gone, AccessDenied."""
        key, what = await self._found(caller, kind, digest)
        seen = await self._census.everywhere([key])
        names_it = (await asyncio.to_thread(self._who_names)).get(digest, [])
        return {**self._row(key, seen.held[key], what, names_it), "silent": list(seen.silent)}

    async def remove(self, caller: Caller, kind: Kind, digest: str, *, force: bool) -> dict[str, Any]:
        """Remove one, on every node; `force`: also one that was used lately.

        Raises BatchError NoSuchPlan, NoSuchSnapshot, Gone, AccessDenied, InUse, Busy.
        """
        key, what = await self._found(caller, kind, digest)
        self._require(caller, what)
        names_it = (await asyncio.to_thread(self._who_names)).get(digest, [])
        if names_it:
            raise BatchError(
                "InUse",
                f"the {kind[:-1]} {digest} is named by {_some(names_it)}",
                help="remove that first; what nobody uses goes by itself",
                detail={"kept_by": names_it},
            )
        seen = await self._census.everywhere([key])
        self._check_unused(kind, digest, seen.held.get(key), force=force)
        try:
            await self._removals.add([key], self._clock.now_ms(), "asked", by=caller.identity.user_id)
        except ControlError as error:
            raise busy(f"it cannot be removed now: {error}") from error
        return {"removed": digest, "kind": kind[:-1], "silent": list(seen.silent)}

    def _check_unused(self, kind: Kind, digest: str, held: Held | None, *, force: bool) -> None:
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

    async def _found(self, caller: Caller, kind: Kind, digest: str) -> tuple[str, _What]:
        key = f"{kind}/{digest}"
        await self._catalog.look(key)
        what = await self._what(key)
        if what is None or not self._may(caller, what, "s3:GetObject"):
            raise BatchError(
                "AccessDenied",
                f"this key may not read what the {kind[:-1]} {digest} is made of",
                help="use the key of its bucket's owner, or root's",
            )
        if not await self._is_of_present(caller, what):
            raise unknown_document(key)
        return key, what

    async def _what(self, key: str) -> _What | None:
        """None when it is not here and cannot be had."""
        try:
            await self._catalog.ensure([key])
        except BatchError:
            return None
        return await asyncio.to_thread(self._read, key)

    def _read(self, key: str) -> _What | None:
        record = self._store.get(RESERVED_BUCKET, key)
        if record is None:
            return None
        if key.startswith("plans/"):
            return _of_plan(self._store.read(record, 0, record.size))
        head = header_size(self._store.read(record, 0, min(8, record.size)))
        return _of_snapshot(digest_of(key), self._store.read(record, 0, min(head, record.size)))

    def _who_names(self) -> dict[str, list[str]]:
        """By hash (blocking)."""
        found: dict[str, list[str]] = {}
        for name, held in self._texts():
            for digest in held:
                found.setdefault(digest, []).append(name)
        return found

    def _texts(self) -> Iterator[tuple[str, set[str]]]:
        for name, text in self._naming():
            yield name, named_in(text)
        for key in self._census.here("plans/"):
            record = None if self._catalog.is_gone(key) else self._store.get(RESERVED_BUCKET, key)
            if record is not None:
                yield f"plan {digest_of(key)}", named_in(self._store.read(record, 0, record.size))

    def _row(self, key: str, held: Held, what: _What, names_it: list[str]) -> dict[str, Any]:
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

    async def _sees(self, caller: Caller, what: _What) -> bool:
        if not self._may(caller, what, "s3:GetObject"):
            return False
        try:
            return await self._is_of_present(caller, what)
        except BatchError:  # another node may know, and does not answer
            return False

    async def _is_of_present(self, caller: Caller, what: _What) -> bool:
        """Whether it was made of the buckets that have these names now; root sees others', too. Raises
        BatchError Busy."""
        return caller.identity.root or await self._recorded(what.snapshot, what.buckets)

    def _may(self, caller: Caller, what: _What, action: str) -> bool:
        """Whether the caller may do that to whatever is in every bucket. Where one is gone, root may."""
        identity = caller.identity
        try:
            for bucket in what.buckets:
                self._access.require_all(caller, action, bucket)
        except S3Error as error:
            return error.code == "NoSuchBucket" and identity.root
        return True

    def _require(self, caller: Caller, what: _What) -> None:
        if not self._may(caller, what, "s3:DeleteObject"):
            raise BatchError(
                "AccessDenied",
                f"it takes s3:DeleteObject on all of {', '.join(what.buckets)[:200]} to remove what is of it",
                help="use the key of the bucket's owner, or root's",
            )


def _some(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _of_plan(document: bytes) -> _What:
    value: Mapping[str, Any] = json.loads(document)
    buckets = (value["bucket"], *value.get("others", ()))
    told = {"snapshot": value["snapshot"], "buckets": list(buckets), "samples": value["samples"]}
    told["ops"] = [op["op"] for op in value["spec"].get("ops", ())]
    return _What(value["snapshot"], buckets, told)


def _of_snapshot(digest: str, head: bytes) -> _What | None:
    try:
        said = parse_header(head).metadata
        others = read_json(said["others"].encode()) if "others" in said else []
    except (FrameError, PlanError):
        return None
    buckets = (said["bucket"], *others)
    told = {"source": said["source"], "kind": said["kind"], "buckets": list(buckets)}
    return _What(digest, buckets, told)
