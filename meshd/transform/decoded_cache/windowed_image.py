"""An image whose first op decodes only what a drawn window needs: kept as the whole image, at the reduction
of the window.

Law: the rows of an entry are those that the decoder would have made for the window. A file that cannot be
decoded as a whole is not kept; it is decoded as far as the window needs it, as without the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshd.transform.decoded_cache.entry_format import EntryError
from meshd.transform.decoded_cache.messages import KEPT, MEASURED, REFUSED, STORED, UNSTORED, WINDOWED
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import ImageSize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.transform.decoded_cache.entry_format import EntryHeader
    from meshd.transform.decoded_cache.slice_recorder import SliceRecorder
    from meshd.transform.op_chain import OpChain
    from meshwire.plan.keyed_random import KeyedRandom


class WindowedImage:
    """The image of one field of a sample; `read` returns the bytes of its file."""

    def __init__(
        self,
        recorder: SliceRecorder,
        chain: OpChain,
        number: int,
        sample: int,
        kept: Sequence[Sequence[tuple[int, ...]]],
        read: Callable[[], bytes],
    ) -> None:
        assert chain.windowed is not None
        self._slice, self._chain, self._number, self._sample = recorder, chain, number, sample
        self._decoder, self._read = chain.windowed, read
        self._tables = {table.variant: table for table in recorder.order_of(number).tables}
        places = kept[number] if kept else ()
        self._entries = {place[0]: place for place in places if len(place) == 4}
        self._wanted = {place[0] for place in places if len(place) == 1}
        self._headers: dict[int, EntryHeader] = {}
        self._opened: Any = None
        self._opening, self._source = 0.0, 0
        self.verdict = KEPT
        """What `keep_window` did."""

    def draw_window(self, random: KeyedRandom) -> Any:
        """Return the window that `random` draws. Raises BadSampleError, and what `read` raises."""
        began = self._slice.clock.mark()
        window, shrink = self._decoder.choose_window(self._size(), random)
        first, end = self._decoder.needed_rows(window, shrink)
        rows = self._kept_rows(shrink, first, end, began)
        if rows is not None:
            return self._decoder.cut(rows, window, shrink, first)
        return self._decoder.cut(self._decoded(window, shrink), window, shrink, 0)

    def keep_window(self, random: KeyedRandom) -> None:
        """Store the image at the reduction of the window that `random` draws, unless it is kept.

        Raises as `draw_window` does; also if the file cannot be decoded as a whole.
        """
        window, shrink = self._decoder.choose_window(self._size(), random)
        if shrink in self._entries:
            return
        table = self._tables.get(shrink)
        if table is None:
            self._decoded(window, shrink)
            self.verdict = MEASURED
        elif shrink not in self._wanted or table.segment < 0:
            self.verdict = REFUSED
        else:
            opened, clock = self._open(), self._slice.clock
            began = clock.mark()
            pixels = self._decoder.decode_whole(opened, shrink)
            self._slice.add_made(table.table, self._opening + clock.since(began), pixels.nbytes)
            stored = self._slice.store(table, self._sample, pixels, tuple(opened.size))
            self.verdict = STORED if stored else UNSTORED

    def _size(self) -> ImageSize:
        for variant in list(self._entries):
            header = self._header(variant)
            if header is not None:
                return ImageSize(*header.image)
        size: ImageSize = self._open().size
        return size

    def _header(self, variant: int) -> EntryHeader | None:
        """Return the header of an entry, if it can be used."""
        if variant not in self._headers and variant in self._entries:
            _, path, *place = self._entries[variant]
            files, table = self._slice.files, self._tables[variant].table
            try:
                self._headers[variant] = files.read_header(
                    self._slice.path(path), table, self._sample, *place
                )
            except EntryError:
                self._drop(variant)
        return self._headers.get(variant)

    def _drop(self, variant: int) -> None:
        self._slice.add_damaged(self._tables[variant].table, self._sample)
        del self._entries[variant]

    def _open(self) -> Any:
        """Read the file and its header, once."""
        if self._opened is None:
            data = self._read()
            began = self._slice.clock.mark()
            self._opened, self._source = self._decoder.open(data), len(data)
            self._opening = self._slice.clock.since(began)
        return self._opened

    def _kept_rows(self, shrink: int, first: int, end: int, began: tuple[float, ...]) -> Any:
        """Return rows of the entry for this reduction, if there is one."""
        header = self._header(shrink)
        if header is None:
            return None
        _, path, offset, _ = self._entries[shrink]
        try:
            rows, size = self._slice.files.read_rows(self._slice.path(path), header, offset, first, end)
        except EntryError:
            self._drop(shrink)
            return None
        self._slice.add_hit(self._tables[shrink].table, self._slice.clock.since(began), size)
        return rows

    def _decoded(self, window: Any, shrink: int) -> Any:
        """Decode the image: whole, if it is to be kept."""
        opened, clock = self._open(), self._slice.clock
        began, table = clock.mark(), self._tables.get(shrink)
        pixels = None
        if table is not None and shrink in self._wanted and table.segment >= 0:
            try:
                pixels = self._decoder.decode_whole(opened, shrink)
            except BadSampleError:
                table = None
        keep = pixels is not None
        if pixels is None:
            pixels = self._decoder.decode_window(opened, window, shrink)
        seconds = self._opening + clock.since(began)
        whole_rows = -(-opened.size.height // shrink)
        size = pixels[:1].nbytes * whole_rows
        if table is not None:
            self._slice.add_made(table.table, seconds, size)
            if keep:
                self._slice.store(table, self._sample, pixels, tuple(opened.size))
        elif self._sample >= 0 and self._tables.get(shrink) is None:
            digest = self._chain.prefix_digest(1, shrink)
            key = self._number, WINDOWED, shrink, digest
            self._slice.add_cost(key, seconds, size, self._source)
        return pixels
