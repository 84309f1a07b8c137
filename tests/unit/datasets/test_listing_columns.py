"""Listings of plain objects in columns: their order over several nodes, and what an object costs."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from meshd.core.api_errors import BatchError
from meshd.core.listing_columns import ListingColumns
from meshd.datasets.snapshot_build_cache import result_name
from meshd.datasets.snapshot_capacity import LISTED_BYTES, SnapshotCapacity
from meshd.datasets.source_listings import SourceListings
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields, parse_source

if TYPE_CHECKING:
    from meshd.core.listing_columns import KeyFilter

FIELDS = parse_fields({"image": "jpg", "label": {"class": "prefix"}})
OBJECTS = 40_000
PAGE = 1000


def listed(objects: list[tuple[str, str, int]]) -> ListingColumns:
    columns = ListingColumns()
    for at in range(0, len(objects), PAGE):
        columns.extend(objects[at : at + PAGE])
    return columns


def test_listings_of_several_nodes_are_merged_in_order_of_utf8() -> None:
    names = sorted(f"{folder}/{number}" for folder in ("a", "é", "～", "𝄞", "a.b") for number in range(700))
    objects = [(name, f"e{number}", number << 33) for number, name in enumerate(names)]
    merged = ListingColumns.merged([listed(objects[first::3]) for first in range(3)])
    assert list(merged) == objects
    assert [key.encode() for key, *_ in merged] == sorted(key.encode() for key, *_ in objects)
    assert len(merged) == len(objects)
    assert list(ListingColumns.merged([listed(objects)])) == objects
    assert (
        list(ListingColumns.merged([ListingColumns(), listed(objects[:5]), ListingColumns()])) == objects[:5]
    )


def _page(first: int) -> list[tuple[str, str, int]]:
    numbers = range(first, first + PAGE)
    return [(f"class-{number // 1000:03}/{number:09}.jpg", f"{number:032x}", 100_000) for number in numbers]


def test_an_object_takes_a_bounded_number_of_bytes_while_it_is_listed_and_built() -> None:
    """Objects of Python for each of them, a record or a key in a dictionary, take 300 to 1,500 bytes more."""
    build_from_objects(_page(0), source="s3://many", fields=FIELDS)  # what is imported and cached at first
    tracemalloc.start()
    try:
        columns = ListingColumns()
        for first in range(0, OBJECTS, PAGE):
            columns.extend(_page(first))
        result_name("request", columns)
        built = build_from_objects(columns, source="s3://many", fields=FIELDS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert built.snapshot.samples == OBJECTS
    assert peak / OBJECTS < 500


def test_a_source_that_does_not_fit_into_memory_is_refused_while_it_is_listed() -> None:
    capacity = SnapshotCapacity(lambda: 2 * 1000 * LISTED_BYTES)
    capacity.require_room_to_list(1000, "s3://b/")
    with pytest.raises(
        BatchError, match=r"s3://b/ has at least 1001 objects; .* is enough for 1000"
    ) as refused:
        capacity.require_room_to_list(1001, "s3://b/")
    assert refused.value.code == "TooLarge"
    SnapshotCapacity().require_room_to_list(1 << 40, "")


def test_a_listing_that_begins_again_counts_its_objects_again() -> None:
    """As in a mesh whose map changes meanwhile: the pages that came before are listed once more."""

    class Mesh:
        async def list_columns(self, bucket: str, prefix: str, plain: KeyFilter) -> Any:
            for _ in range(4):
                plain.begin()
                assert plain.accepts(["a.jpg"] * 600)
            return ListingColumns(), None

    mesh: Any = Mesh()
    listings = SourceListings(mesh, mesh, SnapshotCapacity(lambda: 2 * 1000 * LISTED_BYTES))
    found, _ = asyncio.run(listings.objects(parse_source("s3://b/"), "objects"))
    assert isinstance(found, ListingColumns)
