"""Results of sources that are opened again after few changes: the log of changed names replaces the listing.

Law: as that of `meshd.datasets.snapshot_build_cache`. The log names each change since the listing that a
result has, or nothing is known and the source is listed. A result stays if no name of the source changed. A
snapshot of plain objects is updated by the samples that have changed names, and equals the one that would
be built; where it cannot be updated, it is built.
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESULTS_PREFIX
from meshwire.dataset.archive_keys import archive_kind
from meshwire.dataset.fields import sample_key
from meshwire.dataset.update_snapshot import folders_like_samples, update_from_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from meshd.core.document_store import DocumentStore
    from meshd.datasets.snapshot_build_cache import BuildResults
    from meshd.store.api import ObjectStore
    from meshd.store.records import StoreChanges
    from meshwire.dataset.build_snapshot import SnapshotBuild
    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.frame.columns import StringColumn

    Listed = tuple[str, str, int]

_MOST_SAMPLES: Final = 20_000
"""Changed samples from which on the source is listed."""
_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class ListingUpdate:
    """The result of a request at a revision of the store, and its `name` among the kept results: `built`, if
    that is a new snapshot, or else `result`, the answer that was kept."""

    revision: int
    name: str
    result: dict[str, Any]
    built: SnapshotBuild | None = None


class ListingUpdates:
    """Finds out whether the last result of a request still holds, and updates it, for a node that is
    alone."""

    def __init__(self, store: ObjectStore, catalog: DocumentStore, results: BuildResults) -> None:
        self._store, self._catalog, self._results = store, catalog, results

    def __repr__(self) -> str:
        return f"<ListingUpdates over {self._results!r}>"

    async def find(
        self, request: str, source: Source, kind: str, fields: Mapping[str, FieldSpec]
    ) -> ListingUpdate | None:
        """Return the present result of a request, None if the source has to be listed."""
        seen = self._results.last_listing(request)
        result = None if seen is None else self._results.find(seen[1])
        if seen is None or result is None:
            return None
        revision, name = seen
        changes = self._store.changes_since(revision, source.bucket)
        if changes is None:
            return None
        if next(_keys(changes, source.prefix), None) is None:
            return ListingUpdate(changes.revision, name, result)
        if result["kind"] != "objects" or result["skipped"] or kind not in ("objects", "auto"):
            return None
        try:
            snapshot = await self._catalog.snapshot(result["snapshot"])
        except BatchError:
            return None
        wanted = frozenset(ext for spec in fields.values() for ext in spec.ext)
        changed = await asyncio.to_thread(self._changed, snapshot, changes, source, wanted, kind)
        if changed is None:
            return None
        if not changed:
            return ListingUpdate(changes.revision, name, result)
        built = await asyncio.to_thread(update_from_objects, snapshot, changed)
        if built is None:
            return None
        return ListingUpdate(changes.revision, _name_after(name, changed), result, built)

    def _changed(
        self,
        snapshot: Snapshot,
        changes: StoreChanges,
        source: Source,
        wanted: frozenset[str],
        kind: str,
    ) -> dict[str, list[Listed]] | None:
        """Return the objects of each sample with changed names, by its stem (blocking); None if they are too
        many, or among those of other samples."""
        found: dict[str, list[Listed]] = {}
        folders = dict[str, bool]()  # whether a sample has the name of a folder
        for key in self._changed_keys(snapshot, changes, source):
            if kind == "auto" and archive_kind(key) is not None:
                return None
            stem, ext = sample_key(key)
            if ext not in wanted or stem in found:
                continue
            for folder in folders_like_samples(stem):
                if folder not in folders:
                    folders[folder] = self._has_objects(source.bucket, folder, wanted)
                if folders[folder]:
                    return None
            listed = self._listed(source, stem)
            if listed is None or len(found) == _MOST_SAMPLES:
                return None
            found[stem] = listed
        return found

    def _changed_keys(self, snapshot: Snapshot, changes: StoreChanges, source: Source) -> Iterator[str]:
        """Yield the changed names of a source, and all names, earlier ones included, in changed ranges."""
        keys = snapshot.objects.keys
        for first, last in _keys(changes, source.prefix):
            if first == last:
                yield first
                continue
            yield from _between(keys, first, last)
            if self._store.get(source.bucket, first) is not None:
                yield first
            after, more = first, True
            while more:
                page = self._store.list(source.bucket, prefix=source.prefix, after=after, limit=_PAGE)
                for key, _ in page.entries:
                    if key > last:
                        more = False
                        break
                    yield key
                after, more = page.next_after, more and page.truncated

    def _listed(self, source: Source, stem: str) -> list[Listed] | None:
        """Return the objects of a sample; None if objects of other samples are among them."""
        page = self._store.list(source.bucket, prefix=f"{stem}.", limit=_PAGE)
        if page.truncated or any(sample_key(key)[0] != stem for key, _ in page.entries):
            return None
        return [
            (key, record.etag, record.size) for key, record in page.entries if key.startswith(source.prefix)
        ]

    def _has_objects(self, bucket: str, stem: str, wanted: frozenset[str]) -> bool:
        """Whether a sample of this name has objects, or that is not known."""
        page = self._store.list(bucket, prefix=f"{stem}.", delimiter="/", limit=_PAGE)
        return page.truncated or any(sample_key(key)[1] in wanted for key, _ in page.entries)


def _keys(changes: StoreChanges, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the changed keys and ranges with a prefix, each as its first and last key."""
    for key in changes.keys:
        if key.startswith(prefix):
            yield key, key
    for first, last in changes.ranges:
        if last >= prefix and (first < prefix or first.startswith(prefix)):
            yield max(first, prefix), last


def _between(keys: StringColumn, first: str, last: str) -> Iterable[str]:
    """Return those of some keys, which are in order, from one to another."""
    return (keys[number] for number in range(bisect_left(keys, first), bisect_right(keys, last)))


def _name_after(name: str, changed: Mapping[str, Sequence[Listed]]) -> str:
    """Return the name of the result that follows another by these changes."""
    digest = hashlib.sha256(name.encode())
    for stem in sorted(changed):
        digest.update(f"\n{len(stem)} {stem}".encode())
        for key, etag, size in changed[stem]:
            digest.update(f"\n{len(key)} {key} {etag} {size}".encode())
    return f"{RESULTS_PREFIX}{digest.hexdigest()}"
