"""Differences of two snapshots: objects added, removed or replaced; and the objects of one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwire.dataset.paged_snapshot import PagedSnapshot

if TYPE_CHECKING:
    from meshwire.dataset.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object of a snapshot. `page`: SHA-256 of its page, in hex, and `samples` of it; None if the snapshot
    has no pages. `bytes`: of the samples on the page, else of the object."""

    url: str
    etag: str
    bytes: int
    samples: int | None
    page: str | None

    def document(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {name: getattr(self, name) for name in ("url", "etag", "bytes", "samples", "page")}


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """What changed from one snapshot to another, each in order of key; `replaced`: before and after. `same`:
    the number of objects that both have with equal content."""

    added: tuple[ListedObject, ...]
    removed: tuple[ListedObject, ...]
    replaced: tuple[tuple[ListedObject, ListedObject], ...]
    same: int


def listed_objects(snapshot: Snapshot) -> list[ListedObject]:
    """Return the objects of a snapshot in its order. Opens no page."""
    objects = snapshot.objects
    rows = zip(objects.keys, objects.etags, objects.sizes.tolist(), strict=True)
    found = []
    for number, (key, etag, size) in enumerate(rows):
        url = f"s3://{objects.bucket_of(number)}/{key}"
        if isinstance(snapshot, PagedSnapshot):
            page = snapshot.facts(number)
            found.append(ListedObject(url, etag, sum(page.totals), page.samples, page.digest.hex()))
        else:
            found.append(ListedObject(url, etag, size, None, None))
    return found


def diff_snapshots(before: Snapshot, after: Snapshot) -> SnapshotDiff:
    """Compare two snapshots by their objects' ETags, of which their pages are functions."""
    old = {each.url: each for each in listed_objects(before)}
    new = {each.url: each for each in listed_objects(after)}
    both = [(old[url], each) for url, each in new.items() if url in old]
    replaced = tuple(pair for pair in both if pair[0].etag != pair[1].etag)
    return SnapshotDiff(
        tuple(each for url, each in new.items() if url not in old),
        tuple(each for url, each in old.items() if url not in new),
        replaced,
        len(both) - len(replaced),
    )
