"""Windows of a job's sources: which files are loaded together, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from meshd.jobs.source_loader import OutputCursor, SourceLoader
from meshd.store.records import Location

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.jobs.job_kind import JobServices
    from meshd.jobs.source_reader import SourceReader
    from meshwire.jobs.job_plan import JobPlan


class Pages:
    """Notes the windows; each takes a moment."""

    def __init__(self) -> None:
        self.windows: list[list[str]] = []
        self.far: list[int] = []
        self.complete = 0

    async def load_window(self, disks: Mapping[int, Sequence[Location]]) -> None:
        self.windows.append([place.path for places in disks.values() for place in places])
        await asyncio.sleep(0.01)
        self.complete += 1

    async def load_parts(self, parts: Sequence[int]) -> None:
        self.far += parts


class Reader:
    """Source n is the file n, on disk n % 2; those from `end` on are on other nodes."""

    def __init__(self, end: int = 1000) -> None:
        self.end = end

    def far_part(self, source: int, offset: int, length: int) -> int:
        return source

    def places(self, source: int, offset: int, length: int) -> dict[int, list[Location]]:
        return {} if source >= self.end else {source % 2: [Location(str(source), offset, length, 0)]}


def loader_of(sizes: list[int], window: int, firsts: list[int]) -> tuple[SourceLoader, Pages, Any, Any]:
    count, pages = len(sizes), Pages()
    plan = SimpleNamespace(
        source=np.arange(count), offset=np.zeros(count, int), size=np.array(sizes), firsts=np.array(firsts)
    )
    objects = SimpleNamespace(single_node=False, load_parts=pages.load_parts)
    tools = SimpleNamespace(pages=pages, window_bytes=window, objects=objects)
    loader = SourceLoader(cast("JobServices", tools), cast("JobPlan", plan))
    return loader, pages, cast("SourceReader", Reader()), plan


def loaded(pages: Pages) -> list[list[int]]:
    return [sorted(map(int, window)) for window in pages.windows]


def test_a_window_has_files_of_several_outputs_and_is_loaded_once() -> None:
    async def scenario() -> None:
        loader, pages, reader, plan = loader_of([10] * 12, 50, [0, 3, 6, 9, 12])
        one, other = (OutputCursor(loader, reader, plan, output) for output in (0, 1))
        await asyncio.gather(one.advance(30), other.advance(10))
        assert loaded(pages) == [[0, 1, 2, 3, 4]]
        assert pages.complete == 1  # the second writer waited for it, too
        await other.advance(20)
        assert loaded(pages)[1:] == [[5, 6, 7, 8, 9]]
        await OutputCursor(loader, reader, plan, 3).advance(30)
        assert loaded(pages)[2:] == [[10, 11]]

    asyncio.run(scenario())


def test_files_that_are_larger_than_a_window_or_empty() -> None:
    async def scenario() -> None:
        loader, pages, reader, plan = loader_of([0, 100, 0, 5, 5], 50, [0, 5])
        cursor = OutputCursor(loader, reader, plan, 0)
        await cursor.advance(60)
        await cursor.advance(50)
        assert loaded(pages) == [[1], [3, 4]]

    asyncio.run(scenario())


def test_a_writer_that_is_ahead_ends_the_window_of_the_one_behind() -> None:
    async def scenario() -> None:
        loader, pages, reader, plan = loader_of([10] * 8, 40, [0, 4, 8])
        await OutputCursor(loader, reader, plan, 1).advance(10)
        await OutputCursor(loader, reader, plan, 0).advance(40)
        assert loaded(pages) == [[4, 5, 6, 7], [0, 1, 2, 3]]
        await loader.load(reader, 3)
        assert len(pages.windows) == 2

    asyncio.run(scenario())


def test_without_rotational_disks_nothing_is_loaded() -> None:
    async def scenario() -> None:
        loader, pages, reader, plan = loader_of([10] * 4, 0, [0, 4])
        await OutputCursor(loader, reader, plan, 0).advance(40)
        assert not pages.windows

    asyncio.run(scenario())


def test_other_nodes_load_what_is_not_here() -> None:
    async def scenario() -> None:
        loader, pages, _, plan = loader_of([10, 0, 10, 10, 0, 10], 100, [0, 6])
        await OutputCursor(loader, cast("SourceReader", Reader(3)), plan, 0).advance(40)
        assert loaded(pages) == [[0, 2]] or loaded(pages) == [[0, 1, 2]]
        assert pages.far == [3, 5]

    asyncio.run(scenario())
