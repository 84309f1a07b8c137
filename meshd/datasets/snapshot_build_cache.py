"""Results of snapshot builds, kept by what they were built from: an unchanged source is not built again.

Law: a snapshot is a pure function of its source, kind, fields, options and listing (keys, ETags, sizes); a
result is named by the hash of all of these. It answers a request whose own listing has that hash, or one
before which nothing was written since a listing that had it, or nothing that changes it (see
`meshd.datasets.listing_updates`): never one of other content.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.core.document_store import RESULTS_PREFIX
from meshd.peer_reads.changed_names import MeshRevision
from meshd.store.errors import StoreError
from meshwire.dataset.fields import fields_document
from meshwire.strict_json import canonical_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshd.core.document_store import DocumentStore
    from meshwire.dataset.fields import FieldSpec, Source

_FORM: Final = 6
"""Raise it if equal listings give other snapshots than before."""
_FORM_WITHOUT_PAGES: Final = 1
"""Of snapshots that all releases read."""
_NOTES: Final = ("notes", 1)
"""Kept with each result: raise it if a build tells more of what it leaves out than before. The source is then
listed once more, and its snapshot stays the same."""
_REMEMBERED: Final = 1024


def request_name(
    source: Source, kind: str, fields: Mapping[str, FieldSpec], options: object, *, paged: bool = True
) -> str:
    """Return a name for what a client asked for, whatever the source holds. `paged`: whether snapshots may
    have pages."""
    asked = [
        _FORM if paged else _FORM_WITHOUT_PAGES,
        str(source),
        kind,
        fields_document(fields),
        repr(options),
    ]
    return hashlib.sha256(canonical_json(asked)).hexdigest()


def result_name(request: str, listing: Iterable[tuple[str, str, int]]) -> str:
    """Return the key of the result of a request for a source with this listing: (key, ETag, size) of each
    object. About 0.5 µs an object."""
    digest = hashlib.sha256(request.encode())
    for key, etag, size in listing:
        digest.update(f"\n{len(key)} {key} {etag} {size}".encode())
    return f"{RESULTS_PREFIX}{digest.hexdigest()}"


class BuildResults:
    """The results that this node keeps, for a worker."""

    def __init__(self, catalog: DocumentStore) -> None:
        self._catalog = catalog
        self._unchanged: OrderedDict[str, tuple[object, str]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<BuildResults, {len(self._unchanged)} requests remembered>"

    def find_unchanged(self, request: str, revision: object) -> dict[str, Any] | None:
        """Return the result of the last listing for a request, if that was at this revision of the store."""
        seen: tuple[object, str] | None = self._unchanged.get(request)
        if (seen is None or seen[0] != revision) and isinstance(revision, int):
            seen = self._kept_listing(request)  # by another process, or before a restart
        return self.find(seen[1]) if seen is not None and seen[0] == revision else None

    def last_listing(self, request: str) -> tuple[int, str] | None:
        """Return the revision of the store and the name of the result of the last listing for a request, made
        by any process of the node."""
        kept, seen = self._kept_listing(request), self._unchanged.get(request)
        if seen is None or not isinstance(seen[0], int) or (kept is not None and kept[0] > seen[0]):
            return kept
        return seen[0], seen[1]

    def last_mesh_listing(self, request: str) -> tuple[MeshRevision, str] | None:
        """Return the revision of the bucket's names, in a mesh, and the name of the result of the last
        listing for a request, made by any process of the node."""
        document = self._catalog.read_intact(_listing_name(request, MESH))
        if document is None:
            return None
        try:
            kept = json.loads(document)
            return msgspec.convert(kept["revision"], MeshRevision), str(kept["name"])
        except (ValueError, KeyError, msgspec.ValidationError):  # another release wrote it
            return None

    def _kept_listing(self, request: str) -> tuple[int, str] | None:
        document = self._catalog.read_intact(_listing_name(request))
        if document is None:
            return None
        kept = json.loads(document)
        return int(kept["revision"]), str(kept["name"])

    def find(self, name: str) -> dict[str, Any] | None:
        """Return a result whose snapshot this node still has, unless an earlier release, which told less of
        what was left out, wrote it."""
        document = self._catalog.read_intact(name)
        if document is None:
            return None
        result: dict[str, Any] = json.loads(document)
        if result.pop(_NOTES[0], 0) != _NOTES[1]:
            return None
        return result if self._catalog.has_document(f"snapshots/{result['snapshot']}") else None

    async def record_listing(self, request: str, revision: object, name: str) -> None:
        """Note which result the listing for a request has; `revision`: of the store, before it was listed."""
        told = revision if isinstance(revision, int | MeshRevision) else None
        if told is not None and self._unchanged.get(request) != (revision, name):
            kept = json.dumps({"revision": msgspec.to_builtins(told), "name": name}).encode()
            where = MESH if isinstance(told, MeshRevision) else ""
            with suppress(StoreError):  # a full disk: other processes list the source once more
                await self._catalog.write_document(_listing_name(request, where), kept)
        self._unchanged[request] = revision, name
        self._unchanged.move_to_end(request)
        if len(self._unchanged) > _REMEMBERED:
            self._unchanged.popitem(last=False)

    async def add(self, request: str, name: str, result: Mapping[str, Any]) -> None:
        """Keep the answer to a request, which is the last one to it."""
        document = json.dumps({**result, _NOTES[0]: _NOTES[1]}).encode()
        await self._catalog.write_document(name, document)
        await self._catalog.write_document(_last(request), document)

    def last_snapshot(self, request: str) -> bytes | None:
        """Return the document of the snapshot that a request had last, whatever its source held then; None if
        samples were left out, because only the pages say which."""
        found = self.find(_last(request))
        if found is None or found["skipped"]:
            return None
        return self._catalog.read_document(f"snapshots/{found['snapshot']}")


MESH: Final = "mesh-"
"""Of listings in a mesh, whose revisions earlier releases cannot read."""


def _listing_name(request: str, where: str = "") -> str:
    return f"{RESULTS_PREFIX}listed-{where}{request}"


def _last(request: str) -> str:
    return f"{RESULTS_PREFIX}last-{request}"
