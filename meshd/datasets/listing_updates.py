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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESULTS_PREFIX
from meshd.peer_reads.remote_objects import BlockingObjects
from meshwire.dataset.archive_paths import archive_kind
from meshwire.dataset.build_snapshot import synonyms
from meshwire.dataset.fields import sample_key
from meshwire.dataset.update_snapshot import folders_like_samples, update_from_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from meshd.core.document_store import DocumentStore
    from meshd.datasets.snapshot_build_cache import BuildResults
    from meshd.peer_reads.changed_names import MeshRevision
    from meshd.peer_reads.remote_objects import ObjectNames, RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import StoreChanges
    from meshwire.dataset.build_snapshot import SnapshotBuild
    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.frame.columns import StringColumn

    Listed = tuple[str, str, int]

_MOST_SAMPLES: Final = 20_000
"""Changed samples from which on the source is listed."""
_MOST_REMOTE: Final = 1000
"""The same in a mesh, where each is looked up by calls to all primaries; or a tenth of the objects."""
_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class ListingUpdate:
    """The result of a request at a revision of the names of its bucket, and its `name` among the kept
    results: `built`, if that is a new snapshot, or else `result`, the answer that was kept."""

    revision: int | MeshRevision
    name: str
    result: dict[str, Any]
    built: SnapshotBuild | None = None


class ListingUpdates:
    """Finds out whether the last result of a request still holds, and updates it: by the log of this node's
    store, or in a mesh by those of all primaries."""

    def __init__(
        self, store: ObjectStore, catalog: DocumentStore, results: BuildResults, objects: RemoteObjects
    ) -> None:
        self._store, self._catalog, self._results, self._objects = store, catalog, results, objects

    def __repr__(self) -> str:
        return f"<ListingUpdates over {self._results!r}>"

    async def find(
        self, request: str, source: Source, kind: str, fields: Mapping[str, FieldSpec], began: object
    ) -> tuple[object, ListingUpdate | None]:
        """Return the present revision of the names of a bucket, and the present result of a request, None if
        the source has to be listed. `began`: the revision, if this node is alone."""
        changes: StoreChanges | None = None
        if isinstance(began, int):
            alone = self._results.last_listing(request)
            result = None if alone is None else self._results.find(alone[1])
            if alone is None or result is None:
                return began, None
            name, changes = alone[1], self._store.changes_since(alone[0], source.bucket)
            update = await self._update_after(changes, name, result, source, kind, fields)
            return began, update
        seen = self._results.last_mesh_listing(request)
        told = await self._objects.changes_since(source.bucket, source.prefix, seen and seen[0])
        if told is None:
            return began, None
        revision, changes = told
        result = None if seen is None else self._results.find(seen[1])
        if seen is None or result is None:
            return revision, None
        update = await self._update_after(changes, seen[1], result, source, kind, fields)
        return revision, None if update is None else replace(update, revision=revision)

    async def _update_after(
        self,
        changes: StoreChanges | None,
        name: str,
        result: dict[str, Any],
        source: Source,
        kind: str,
        fields: Mapping[str, FieldSpec],
    ) -> ListingUpdate | None:
        """Return the result of a request after some changes, None if the source has to be listed. `name`,
        `result`: those before."""
        if changes is None:
            return None
        if next(_keys(changes, source.prefix), None) is None:
            return ListingUpdate(changes.revision, name, result)
        if result["kind"] != "objects" or kind not in ("objects", "auto"):
            return None
        if result["skipped"] or result.get("examples"):  # of what is left out, the listing alone tells
            return None
        try:
            snapshot = await self._catalog.snapshot(result["snapshot"])
        except BatchError:
            return None
        wanted = frozenset(ext for spec in fields.values() for ext in spec.ext)
        names = self._objects.blocking_names(source.bucket)
        remote = isinstance(names, BlockingObjects)
        most = min(_MOST_REMOTE, len(snapshot.objects) // 10 + 10) if remote else _MOST_SAMPLES
        search = _ChangedSamples(names, snapshot, source, wanted, kind, most)
        try:
            changed = await asyncio.to_thread(search.find, changes)
        except BatchError:  # a node does not answer, which the listing reports
            return None
        if changed is None:
            return None
        if not changed:
            return ListingUpdate(changes.revision, name, result)
        built = await asyncio.to_thread(update_from_objects, snapshot, changed)
        if built is None:
            return None
        return ListingUpdate(changes.revision, _name_after(name, changed), result, built)


class _ChangedSamples:
    """Finds the objects of samples with changed names (blocking). `names`: of the node, or of the mesh;
    `wanted`: extensions of the fields; `most`: samples from which on the source is listed. Its methods raise
    BatchError Busy if nodes do not answer."""

    def __init__(
        self,
        names: ObjectNames,
        snapshot: Snapshot,
        source: Source,
        wanted: frozenset[str],
        kind: str,
        most: int,
    ) -> None:
        self._names, self._snapshot, self._source = names, snapshot, source
        self._wanted, self._kind, self._most = wanted, kind, most
        self._synonyms = frozenset(synonyms(wanted))

    def find(self, changes: StoreChanges) -> dict[str, list[Listed]] | None:
        """Return the objects of each sample with changed names, by its stem; None if they are too many, or
        among those of other samples, or what is left out may have changed."""
        found: dict[str, list[Listed]] = {}
        folders = dict[str, bool]()  # whether a sample has the name of a folder
        for key in self._changed_keys(changes):
            if self._kind == "auto" and archive_kind(key) is not None:
                return None
            stem, ext = sample_key(key)
            if ext in self._synonyms:
                return None
            if ext not in self._wanted or stem in found:
                continue
            for folder in folders_like_samples(stem):
                if folder not in folders:
                    folders[folder] = self._has_objects(folder)
                if folders[folder]:
                    return None
            listed = self._objects_of_sample(stem)
            if listed is None or len(found) == self._most:
                return None
            found[stem] = listed
        return found

    def _changed_keys(self, changes: StoreChanges) -> Iterator[str]:
        """Yield the changed names of a source, and all names, earlier ones included, in changed ranges."""
        keys, bucket, prefix = self._snapshot.objects.keys, self._source.bucket, self._source.prefix
        for first, last in _keys(changes, prefix):
            if first == last:
                yield first
                continue
            yield from _between(keys, first, last)
            if self._names.get(bucket, first) is not None:
                yield first
            after, more = first, True
            while more:
                page = self._names.list(bucket, prefix=prefix, after=after, limit=_PAGE)
                for key, _ in page.entries:
                    if key > last:
                        more = False
                        break
                    yield key
                after, more = page.next_after, more and page.truncated

    def _objects_of_sample(self, stem: str) -> list[Listed] | None:
        """Return the objects of a sample; None if objects of other samples are among them."""
        page = self._names.list(self._source.bucket, prefix=f"{stem}.", limit=_PAGE)
        if page.truncated or any(sample_key(key)[0] != stem for key, _ in page.entries):
            return None
        return [
            (key, record.etag, record.size)
            for key, record in page.entries
            if key.startswith(self._source.prefix)
        ]

    def _has_objects(self, stem: str) -> bool:
        """Whether a sample of this name has objects, or that is not known."""
        delimiter = "" if isinstance(self._names, BlockingObjects) else "/"
        page = self._names.list(self._source.bucket, prefix=f"{stem}.", delimiter=delimiter, limit=_PAGE)
        found = (key for key, _ in page.entries if sample_key(key)[0] == stem)
        return page.truncated or any(sample_key(key)[1] in self._wanted for key in found)


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
