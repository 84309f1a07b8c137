"""Whole listings of an origin: the same names however they are cut, few requests, no endless ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import obstore
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import LocalStore, MemoryStore

from meshd.origins.client import whole_listing
from meshd.origins.client.obstore_origin import ObstoreOrigin
from meshd.origins.client.origin_api import OriginDownError, OriginRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FOLDERS, FILES = 40, 60
segments = st.text(st.sampled_from("a-./0é\ue000"), min_size=1, max_size=3).filter(
    lambda text: not {"", ".", ".."} & set(text.split("/"))
)
names = st.lists(segments, min_size=1, max_size=4).map("/".join)


def origin_of(keys: Sequence[str], *, ranged: bool = True) -> ObstoreOrigin:
    store = MemoryStore()
    for key in keys:
        store.put(key, b"x")
    return ObstoreOrigin("b", store, sorted_pages=True, ranged=ranged)


def listed(origin: ObstoreOrigin, prefix: str = "") -> list[str]:
    return [entry.key for entry in asyncio.run(origin.list_all(prefix))]


class Counted:
    """Counts the listings that are begun, in place of obstore."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[str | None, str | None]] = []
        self.levels: list[str | None] = []
        begin, level = obstore.list, obstore.list_with_delimiter_async

        def list_names(store: Any, prefix: str | None, **options: Any) -> Any:
            self.begun.append((prefix, options.get("offset")))
            return begin(store, prefix, **options)

        def list_level(store: Any, prefix: str | None) -> Any:
            self.levels.append(prefix)
            return level(store, prefix)

        monkeypatch.setattr(obstore, "list", list_names)
        monkeypatch.setattr(obstore, "list_with_delimiter_async", list_level)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.sets(names, max_size=40), prefix=st.one_of(st.just(""), names), page=st.integers(1, 8))
def test_the_names_are_those_of_one_listing(
    monkeypatch: pytest.MonkeyPatch, keys: set[str], prefix: str, page: int
) -> None:
    files = sorted(key for key in keys if not any(other.startswith(f"{key}/") for other in keys))
    monkeypatch.setattr(whole_listing, "PAGE", page)
    expected = [key for key in files if key.startswith(prefix)]
    for ranged in (True, False):
        assert listed(origin_of(files, ranged=ranged), prefix) == expected


def test_folders_are_listed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_listing, "PAGE", 100)
    keys = sorted(f"d/{folder:03}/{file:03}" for folder in range(FOLDERS) for file in range(FILES))
    counted = Counted(monkeypatch)
    assert listed(origin_of(keys), "d/") == keys
    assert counted.levels == ["d"]
    assert 16 <= len(counted.begun) <= 34
    assert len(set(counted.begun)) >= len(counted.begun) - 1


def test_few_folders_are_cut_further_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_listing, "PAGE", 100)
    folders = [f"{top}/{folder:03}" for top in "ab" for folder in range(20)]
    keys = sorted(f"{folder}/{file:03}" for folder in folders for file in range(20))
    counted = Counted(monkeypatch)
    assert listed(origin_of(keys)) == keys
    assert counted.levels[0] is None
    assert sorted(filter(None, counted.levels)) == ["a", "b"]
    assert len(counted.begun) > 16


def test_one_response_or_one_folder_is_listed_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    few = [f"{number // 3:03}/{number:03}" for number in range(999)]
    assert listed(origin_of(few)) == few
    assert len(counted.begun) == 1
    flat = [f"d/{number:05}" for number in range(2500)]
    assert listed(origin_of(flat), "d/") == flat
    assert not counted.levels
    assert len(counted.begun) == 3  # the first names, and all of them


def test_names_before_and_after_the_prefix_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    keys = ["c/1", "d/0", "d/a1", "d/a2", "d/b1", "e/1"]
    assert listed(origin_of(keys), "d/a") == ["d/a1", "d/a2"]
    [(folder, offset)] = counted.begun
    assert folder == "d"
    assert offset is not None
    assert "d/0" < offset < "d/a"
    assert listed(origin_of(keys), "x") == []


def test_names_out_of_order_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Repeated:
        def __init__(self) -> None:
            self.page = [{"path": "a", "size": 1, "e_tag": "x"}, {"path": "b", "size": 1, "e_tag": "x"}]

        async def __anext__(self) -> Any:
            return self.page

        def __aiter__(self) -> Any:
            return self

    monkeypatch.setattr(whole_listing, "PAGE", 2)
    monkeypatch.setattr(obstore, "list", lambda *_, **__: Repeated())
    with pytest.raises(OriginDownError, match="out of order: 'a' after 'b'"):
        listed(origin_of([]))


def test_a_response_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def __anext__(self) -> Any:
            await asyncio.Event().wait()

        def __aiter__(self) -> Any:
            return self

    monkeypatch.setattr(whole_listing, "RESPONSE_SECONDS", 0.05)
    monkeypatch.setattr(obstore, "list", lambda *_, **__: Silent())
    with pytest.raises(OriginDownError, match="did not finish a listing"):
        listed(origin_of([]))


def test_folders_of_this_machine_and_web_servers(tmp_path: Path) -> None:
    for key in ("b/2", "a", "b/1", "c-d/x"):
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(b"x")
    folder = ObstoreOrigin("b", LocalStore(tmp_path), sorted_pages=False, plain=True)
    assert listed(folder) == ["a", "b/1", "b/2", "c-d/x"]
    assert listed(folder, "b/") == ["b/1", "b/2"]
    with pytest.raises(OriginRefusedError, match="cannot be listed"):
        listed(ObstoreOrigin("b", MemoryStore(), sorted_pages=False, listed=False))
