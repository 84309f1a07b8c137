"""WindowLookup: from the samples of a window to the reads of each rotational disk of this node.

Law: bytes that other nodes hold, that are in memory, or that are on other kinds of disks are left out; so is
a window whose bytes are in the page cache, as a few of its samples show.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from meshd.batches.read_ahead.extents import plan_reads
from meshd.core.peer_source import SINGLE_NODE
from meshd.core.sample_locations import PinnedObjects
from meshd.transform.source_files import PROC_PREFIX
from meshd.util.page_cache import is_cached, open_for_reading

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from meshd.batches.read_ahead.extents import Reads
    from meshd.batches.read_ahead.read_hints import PackedReads
    from meshd.core.peer_source import PeerSource
    from meshd.core.sample_locations import DecompressedArchives
    from meshd.store.api import ObjectStore
    from meshd.store.disks.disk_type import RotationalDisks
    from meshd.transform.source_files import Piece
    from meshwire.dataset.snapshot import Snapshot

_PROBES: Final = 64  # samples of a window that are probed in the page cache


class DiskReads(msgspec.Struct, frozen=True, eq=False):
    """Reads of one disk. `device`: its `st_dev`; `paths`: the files by number, as `reads` names them;
    `wanted`: bytes of samples that they bring, without the gaps."""

    device: int
    paths: Sequence[str]
    reads: Reads
    wanted: int = 0


class WindowLookup:
    """Looks up windows. `remote`: the bytes that other nodes hold; they read them ahead themselves."""

    def __init__(
        self,
        store: ObjectStore,
        archives: DecompressedArchives,
        disks: RotationalDisks,
        remote: PeerSource = SINGLE_NODE,
    ) -> None:
        self._store, self._archives, self._disks, self._remote = store, archives, disks, remote

    def __repr__(self) -> str:
        return f"<WindowLookup {self._disks!r}>"

    async def reads_of(self, snapshot: Snapshot, samples: npt.NDArray[np.int64]) -> list[DiskReads]:
        """Return the reads that bring these samples into the page cache, one entry for each disk."""
        probes = await self._pieces(snapshot, samples[:: max(1, len(samples) // _PROBES)])
        if await asyncio.to_thread(self._are_cached, probes):
            return []
        return await self.cold_reads(snapshot, samples)

    async def reads_of_rows(self, packed: PackedReads, rows: npt.NDArray[np.int64]) -> list[DiskReads]:
        """Return the reads that bring these packed rows into the page cache, one entry for each disk."""
        probes = await packed.pieces_of(rows[:: max(1, len(rows) // _PROBES)], gap=0)
        if await asyncio.to_thread(self._are_cached, _in_files(probes)):
            return []
        return await asyncio.to_thread(self._by_disk, _in_files(await packed.pieces_of(rows)))

    async def cold_reads(self, snapshot: Snapshot, samples: npt.NDArray[np.int64]) -> list[DiskReads]:
        """Return the reads that these samples need if the page cache is empty, one entry for each disk."""
        pieces = await self._pieces(snapshot, samples)
        return await asyncio.to_thread(self._by_disk, pieces)

    async def _pieces(self, snapshot: Snapshot, samples: npt.NDArray[np.int64]) -> list[Piece]:
        """Return the pieces of files of this node that hold the bytes of these samples."""
        with closing(PinnedObjects(self._store, snapshot, self._archives, self._remote)) as pinned:
            return _in_files(await pinned.find_local_pieces(samples))

    def _device(self, path: str, known: dict[str, int | None]) -> int | None:
        """Return the rotational disk of a file; None for another kind of disk, or if its folder is gone.
        `known`: by folder.

        The file itself is not looked at: where it is cold, that would cost seeks between the reads of the
        window before.
        """
        folder = os.path.dirname(path)
        if folder not in known:
            try:
                device = os.stat(folder).st_dev
            except OSError:
                return None
            known[folder] = device if self._disks.includes(device) else None
        return known[folder]

    def _are_cached(self, pieces: Iterable[Piece]) -> bool:
        """Return whether all of these pieces are cached, or not on a rotational disk (blocking)."""
        known: dict[str, int | None] = {}
        for path, offset, length, *_ in pieces:
            if self._device(path, known) is None:
                continue
            fd = open_for_reading(path)
            if fd < 0:
                continue
            try:
                if not is_cached(fd, offset, length):
                    return False
            finally:
                os.close(fd)
        return True

    def _by_disk(self, pieces: Iterable[Piece]) -> list[DiskReads]:
        """Sort the pieces by disk and plan the reads of each (blocking)."""
        known: dict[str, int | None] = {}
        disks: dict[int, tuple[dict[str, int], list[tuple[int, int, int]]]] = {}
        for path, offset, length, *_ in pieces:
            device = self._device(path, known)
            if device is None or not length:
                continue
            numbers, extents = disks.setdefault(device, ({}, []))
            extents.append((numbers.setdefault(path, len(numbers)), offset, length))
        found = []
        for device, (numbers, extents) in disks.items():
            # By their names, which are numbers in the order of writing, not by their folders.
            paths, table = sorted(numbers, key=os.path.basename), np.array(extents, np.int64)
            in_order = np.empty(len(paths), np.int64)
            in_order[[numbers[path] for path in paths]] = np.arange(len(paths))
            reads = plan_reads(in_order[table[:, 0]], table[:, 1], table[:, 2])
            found.append(DiskReads(device, paths, reads, int(table[:, 2].sum())))
        return found


def _in_files(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces without those of memory."""
    return [piece for piece in pieces if not piece[0].startswith(PROC_PREFIX)]
