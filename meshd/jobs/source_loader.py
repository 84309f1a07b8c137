"""Source loader: reads the sources of a job's plan into the page cache, in the order of the disks.

A job writes its outputs in the order of its plan, which is not that of the disks. So a window of files, of as
many outputs as fit into it, is loaded before the first of them is read.

Other nodes load what this one does not hold.

Law: only bytes on rotational disks are loaded; the page cache that a window takes is bounded,
and so are its files. Each file is loaded once, for the writer of the job that comes to it first. What cannot
be loaded is left to the reader, which reports it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from meshd.core.peer_source import ObjectRange
    from meshd.jobs.job_kind import JobServices
    from meshd.jobs.source_reader import SourceReader
    from meshd.store.records import Location
    from meshwire.jobs.job_plan import JobPlan

WINDOW_FILES: Final = 32_768


class SourceLoader:
    """Loads the sources of one run of a job. Shared by its writers."""

    def __init__(self, tools: JobServices, plan: JobPlan) -> None:
        self._tools, self._window_bytes, self._plan = tools, tools.window_bytes, plan
        self._loaded = np.zeros(len(plan.size), np.bool_)
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<SourceLoader, {int(self._loaded.sum())} of {self._loaded.size} files loaded>"

    async def load(self, reader: SourceReader, file: int) -> None:
        """Have a file of the plan loaded: with those after it, or by the call that loads it already."""
        if not self._window_bytes or self._loaded[file]:
            return
        async with self._turn:
            if self._loaded[file]:
                return
            end = self._window_end(file)
            here, far = await asyncio.to_thread(self._places, reader, file, end)
            await asyncio.gather(self._tools.pages.load_window(here), self._tools.objects.load_parts(far))
            self._loaded[file:end] = True

    def _window_end(self, first: int) -> int:
        """Return the end of the window that begins with a file: the first file that is loaded, or does not
        fit."""
        sizes = np.cumsum(self._plan.size[first : first + WINDOW_FILES])
        fitting = int(np.searchsorted(sizes, self._window_bytes, "right"))
        loaded = np.flatnonzero(self._loaded[first : first + max(1, fitting)])
        return first + (int(loaded[0]) if loaded.size else max(1, fitting))

    def _places(
        self, reader: SourceReader, first: int, end: int
    ) -> tuple[dict[int, list[Location]], list[ObjectRange]]:
        """Return where the files are on this node, by disk, and the names of the others (blocking)."""
        plan, most = self._plan, self._window_bytes
        here: dict[int, list[Location]] = defaultdict(list)
        far: list[ObjectRange] = []
        cut = slice(first, end)
        columns = (plan.source[cut].tolist(), plan.offset[cut].tolist(), plan.size[cut].tolist())
        for source, offset, size in zip(*columns, strict=True):
            there = reader.places(source, offset, min(size, most))
            if size and not there:
                far.append(reader.far_part(source, offset, min(size, most)))
            for disk, places in there.items():
                here[disk] += places
        return here, [] if self._tools.objects.single_node else far


class OutputCursor:
    """Where a writer is in the files of one output."""

    def __init__(self, loader: SourceLoader, reader: SourceReader, plan: JobPlan, output: int) -> None:
        self._loader, self._reader, self._plan = loader, reader, plan
        self._file, self._inside = int(plan.firsts[output]), 0

    def __repr__(self) -> str:
        return f"<OutputCursor at byte {self._inside} of file {self._file}>"

    async def advance(self, length: int) -> None:
        """Have the next `length` bytes of the output's files loaded."""
        while length:
            left = int(self._plan.size[self._file]) - self._inside
            if left:
                await self._loader.load(self._reader, self._file)
            taken = min(length, left)
            length -= taken
            self._inside += taken
            if taken == left:
                self._file, self._inside = self._file + 1, 0
