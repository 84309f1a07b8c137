"""Read-ahead of shard views: members are read from rotational disks in the order of the disk, before a GET
sends them in the order of the shard.

Law: a hint. It changes what a read costs, never what it returns. A GET loads what it sends; clients that read
shards in order of key, over any number of connections, have the shards that follow loaded in windows, one
ahead of the one that is read. A view has two windows in the page cache at most.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict, deque
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.core.peer_messages import RemoteRecord
from meshd.errors import MeshdError
from meshd.peer_reads.load_window import LoadWindow
from meshd.store.disks.page_loader import places_by_disk
from meshd.store.errors import StoreError
from meshd.util.page_cache import is_cached, open_for_reading
from meshd.views.shards.member_io import all_pieces
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.disks.page_loader import PageLoader
    from meshd.store.records import Record
    from meshd.views.shards.member_io import ShardSource
    from meshwire.formats.shard_encoding import Shard, SourceObject
    from meshwire.views.shard_view import ShardLayout, ShardsView

    ShardRange = tuple[Shard, int, int]

_log = logging.getLogger(__name__)
_MAX_BYTES: Final = 256 << 20
"""Of a window: 1.3 s of a disk, for which the first GET of a window waits."""
_SECONDS: Final = 10.0
"""After which a GET begins, whatever is loaded by then."""
_NEAR: Final = 8
"""How far apart shards may be that are read in order: by so many connections at the same time."""
_VIEWS: Final = 4
_LOOKUPS: Final = 100
"""Members that are looked up before yielding to the event loop."""
_PROBES, _PROBED_BYTES = 4, 1 << 20  # members of a shard that are looked at, and bytes of each


class _Window(NamedTuple):
    """Shards that are loaded together: the positions from `first` up to `stop`. `reads`: position and offset
    of what was read of them."""

    first: int
    stop: int
    load: asyncio.Task[None]
    reads: set[tuple[int, int]]


class _ReadHistory:
    """How a view is read: the positions of the last shards, and the last two windows."""

    def __init__(self, layout: ShardLayout) -> None:
        self.layout = layout
        self.positions: deque[int] = deque(maxlen=_NEAR)
        self.windows: deque[_Window] = deque(maxlen=2)

    def window_for(self, position: int, offset: int) -> _Window | None:
        """Return the window that has this shard. What is read again may have left the page cache: then the
        windows are those of an earlier epoch, and are forgotten."""
        for window in self.windows:
            if window.first <= position < window.stop:
                if (position, offset) in window.reads:
                    self.windows.clear()
                    return None
                window.reads.add((position, offset))
                return window
        return None

    def continues_at(self, position: int) -> bool:
        """Whether one of the last shards was shortly before this one."""
        return any(0 < position - each <= _NEAR for each in self.positions)


class ShardReadAhead:
    """Loads what GETs of shards read. One per worker. `window_bytes`: of one load; 0 if this node has no
    rotational disk."""

    def __init__(self, pages: PageLoader, objects: RemoteObjects, window_bytes: int) -> None:
        self._pages, self._objects = pages, objects
        self.window_bytes = min(_MAX_BYTES, window_bytes)
        self._histories: OrderedDict[ShardsView, _ReadHistory] = OrderedDict()
        self._loads = set[asyncio.Task[None]]()

    def __repr__(self) -> str:
        return f"<ShardReadAhead of {len(self._histories)} views>"

    async def load(
        self,
        view: ShardsView,
        layout: ShardLayout,
        open_source: Callable[[], ShardSource],
        read: ShardRange,
    ) -> None:
        """Load the bytes of a read, at most `window_bytes`. If shards are read in order, begin to load those
        that follow."""
        shard, offset, length = read
        history, position = self._history(view, layout), layout.position_of(shard.key)
        window = history.window_for(position, offset)
        if length <= shard.size <= min(2 * length, self.window_bytes):
            if window is None and history.continues_at(position):
                window = self._begin_window(history, open_source, position)
                window.reads.add((position, offset))
            history.positions.append(position)
        if window is None or shard.size > self.window_bytes:
            loaded = self._spawn([read], open_source)
        else:
            loaded, last = window.load, history.windows[-1]
            if window is last and position >= (last.first + last.stop) // 2 and last.stop < len(layout.keys):
                self._begin_window(history, open_source, last.stop)
        await asyncio.wait([loaded], timeout=_SECONDS)

    async def load_files(self, source: ShardSource, files: Iterable[SourceObject]) -> None:
        """Load these files of a source. Raises S3Error."""
        window, files = LoadWindow(source.store), list(files)
        await source.lookup_remote({file.key for file in files})
        for number, file in enumerate(files):
            if number % _LOOKUPS == _LOOKUPS - 1:
                await asyncio.sleep(0)
            record = source.current_member_object(file)
            if record is not None:
                window.add_range(source.bucket, file.key, record, file.offset, file.size)
        await window.load(self._pages, self._objects)

    def _history(self, view: ShardsView, layout: ShardLayout) -> _ReadHistory:
        history = self._histories.get(view)
        if history is None or history.layout is not layout:
            history = self._histories[view] = _ReadHistory(layout)
        self._histories.move_to_end(view)
        if len(self._histories) > _VIEWS:
            self._histories.popitem(last=False)
        return history

    def _begin_window(
        self, history: _ReadHistory, open_source: Callable[[], ShardSource], first: int
    ) -> _Window:
        """Begin to load a window from this position on, once the window before it is loaded."""
        layout, stop, size = history.layout, first, 0
        reads: list[ShardRange] = []
        while stop < len(layout.keys):
            shard = layout.shards[layout.keys[stop]]
            if reads and size + shard.size > self.window_bytes:
                break
            reads.append((shard, 0, min(shard.size, self.window_bytes)))
            size, stop = size + shard.size, stop + 1
        before = history.windows[-1].load if history.windows else None
        window = _Window(first, stop, self._spawn(reads, open_source, before), set())
        history.windows.append(window)
        return window

    def _spawn(
        self,
        reads: list[ShardRange],
        open_source: Callable[[], ShardSource],
        before: asyncio.Task[None] | None = None,
    ) -> asyncio.Task[None]:
        async def load() -> None:
            try:
                if before is not None:
                    await asyncio.wait([before])
                await self._load(open_source(), reads)
            except Exception:  # the reader of these bytes reports what is wrong with them
                _log.warning("shards of a view could not be read ahead", exc_info=True)

        task = asyncio.get_running_loop().create_task(load())
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return task

    async def _load(self, source: ShardSource, reads: Iterable[ShardRange]) -> None:
        window = LoadWindow(source.store)
        for shard, offset, length in reads:
            if window.is_full:
                break
            with suppress(S3Error, MeshdError):  # the reader of these bytes reports it
                if not await _seems_cached(source, shard, offset, length):
                    await add_shard_places(source, shard, window, offset, length)
        await window.load(self._pages, self._objects)


async def _seems_cached(source: ShardSource, shard: Shard, offset: int, length: int) -> bool:
    """Whether a few of the members that have these bytes are in the page cache. Of those on other nodes, only
    these know. Raises S3Error."""
    pieces = [piece for piece in all_pieces(list(shard.pieces(offset, length))) if piece.object is not None]
    probes: list[tuple[Record, int, int]] = []
    for piece in pieces[:: max(1, len(pieces) // _PROBES)]:
        assert piece.object is not None
        record = await source.require_member_object(piece.object)
        if isinstance(record, RemoteRecord):
            return False
        probes.append((record, piece.offset, min(piece.length, _PROBED_BYTES)))
    return await asyncio.to_thread(_are_cached, source.store, probes)


def _are_cached(store: ObjectStore, ranges: Iterable[tuple[Record, int, int]]) -> bool:
    """Whether these bytes of objects, by offset and length, are in the page cache (blocking)."""
    for record, offset, length in ranges:
        try:
            places = places_by_disk(record, store.locate(record), offset, length)
        except StoreError:
            return False
        for place in chain.from_iterable(places.values()):
            if (fd := open_for_reading(place.path)) < 0:
                return False
            try:
                if not is_cached(fd, place.offset, place.length):
                    return False
            finally:
                os.close(fd)
    return True


async def add_shard_places(
    source: ShardSource, shard: Shard, window: LoadWindow, offset: int, length: int
) -> None:
    """Adds the members that have these bytes of a shard to a window. Raises S3Error."""
    pieces = [piece for piece in all_pieces(list(shard.pieces(offset, length))) if piece.object is not None]
    await source.lookup_remote({piece.object.key for piece in pieces if piece.object is not None})
    for number, piece in enumerate(pieces):
        assert piece.object is not None
        if window.is_full:
            return
        if number % _LOOKUPS == _LOOKUPS - 1:
            await asyncio.sleep(0)
        record = await source.require_member_object(piece.object)
        at, size = (piece.object.offset, piece.object.size) if piece.told else (piece.offset, piece.length)
        window.add_range(source.bucket, piece.object.key, record, at, size)
