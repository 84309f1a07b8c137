"""Pages of an origin that lists in order: where they begin, whatever a client asks for."""

from __future__ import annotations

import asyncio

import pytest
from obstore.store import MemoryStore

from meshd.origins.client.obstore_origin import ObstoreOrigin
from meshd.origins.client.origin_api import OriginKeyError

KEYS = sorted(
    ["0", "00", "1", "d/.x", "d/..x", "d/0", "d/00", "d/1", "d.x", "d-", "d0", "\ue000", "\uff00/0"]
)


def _origin() -> ObstoreOrigin:
    store = MemoryStore()
    for key in KEYS:
        store.put(key, b"x")
    return ObstoreOrigin("b", store, sorted_pages=True)


def _listed(prefix: str, after: str, limit: int = 1000) -> list[str]:
    found = asyncio.run(_origin().list(prefix, "", after, limit))
    return [entry.key for entry in found.entries]


@pytest.mark.parametrize(
    "prefix", ["", "0", "00", "1", "d", "d/", "d/0", "d/.", "d/..", "e/0", "\ue000", "\uff00/0"]
)
def test_a_prefix_of_any_end(prefix: str) -> None:
    assert _listed(prefix, "") == [key for key in KEYS if key.startswith(prefix)]


@pytest.mark.parametrize(
    "after", ["d", "d/", "d/0", "d/0/", "d//x", "/", "d/./x", "d/../x", "\x01", "d/\x01", "z"]
)
def test_behind_what_is_no_key(after: str) -> None:
    assert _listed("", after) == [key for key in KEYS if key > after]


@pytest.mark.parametrize("prefix", ["d//0", "/d", "./d", "d/../"])
def test_below_what_origins_cannot_be_asked_for(prefix: str) -> None:
    with pytest.raises(OriginKeyError):
        _listed(prefix, "")
