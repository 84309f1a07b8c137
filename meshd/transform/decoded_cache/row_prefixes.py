"""Prefixes of one sample, in a transform process: read from the decoded cache, or computed and stored.

Law: the value with which a chain continues is always the one that its steps would have computed, whether it
was read or stored. An unusable entry is reported, and its value is computed. An image whose first op decodes
only what a drawn window needs is cached as a whole, at the reduction of the window: the rows of an entry are
those that the decoder would have produced for the window. A file that cannot be decoded as a whole is not
cached; it is decoded as far as the window needs it, as without the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshd.transform.decoded_cache.entry_format import EntryError, can_keep
from meshd.transform.decoded_cache.messages import (
    KEPT,
    MEASURE,
    MEASURED,
    REFUSED,
    STORED,
    UNSTORED,
    WHOLE_STEPS,
    WINDOWED,
)
from meshd.transform.errors import EMPTY, BadSampleError
from meshd.transform.messages import value_bytes
from meshd.transform.op_types import ImageSize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.transform.decoded_cache.entry_format import EntryHeader
    from meshd.transform.decoded_cache.messages import FieldOrder
    from meshd.transform.decoded_cache.slice_recorder import SliceRecorder
    from meshd.transform.op_chain import Draw, OpChain
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
        self._recorder, self._chain, self._number, self._sample = recorder, chain, number, sample
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
        began = self._recorder.clock.mark()
        window, shrink = self._decoder.choose_window(self._size(), random)
        first, end = self._decoder.needed_rows(window, shrink)
        rows = self._kept_rows(shrink, first, end, began)
        if rows is not None:
            return self._decoder.cut(rows, window, shrink, first)
        return self._decoder.cut(self._decode(window, shrink), window, shrink, 0)

    def keep_window(self, random: KeyedRandom) -> None:
        """Store the image at the reduction of the window that `random` draws, unless it is kept.

        Raises as `draw_window` does; also if the file cannot be decoded as a whole.
        """
        window, shrink = self._decoder.choose_window(self._size(), random)
        if shrink in self._entries:
            return
        table = self._tables.get(shrink)
        if table is None:
            self._decode(window, shrink)
            self.verdict = MEASURED
        elif shrink not in self._wanted or table.segment < 0:
            self.verdict = REFUSED
        else:
            opened, clock = self._open(), self._recorder.clock
            began = clock.mark()
            pixels = self._decoder.decode_whole(opened, shrink)
            self._recorder.add_made(table.table, self._opening + clock.since(began), pixels.nbytes)
            stored = self._recorder.store(table, self._sample, pixels, tuple(opened.size))
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
            files, table = self._recorder.files, self._tables[variant].table
            try:
                self._headers[variant] = files.read_header(
                    self._recorder.path(path), table, self._sample, *place
                )
            except EntryError:
                self._drop(variant)
        return self._headers.get(variant)

    def _drop(self, variant: int) -> None:
        self._recorder.add_damaged(self._tables[variant].table, self._sample)
        del self._entries[variant]

    def _open(self) -> Any:
        """Read the file and its header, once."""
        if self._opened is None:
            data = self._read()
            if not data:
                raise BadSampleError(EMPTY)
            began = self._recorder.clock.mark()
            self._opened, self._source = self._decoder.open(data), len(data)
            self._opening = self._recorder.clock.since(began)
        return self._opened

    def _kept_rows(self, shrink: int, first: int, end: int, began: tuple[float, ...]) -> Any:
        """Return rows of the entry for this reduction, if there is one."""
        header = self._header(shrink)
        if header is None:
            return None
        _, path, offset, _ = self._entries[shrink]
        try:
            rows, size = self._recorder.files.read_rows(self._recorder.path(path), header, offset, first, end)
        except EntryError:
            self._drop(shrink)
            return None
        self._recorder.add_hit(self._tables[shrink].table, self._recorder.clock.since(began), size)
        return rows

    def _decode(self, window: Any, shrink: int) -> Any:
        """Decode the image: whole, if it is to be kept."""
        opened, clock = self._open(), self._recorder.clock
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
            self._recorder.add_made(table.table, seconds, size)
            if keep:
                self._recorder.store(table, self._sample, pixels, tuple(opened.size))
        elif self._sample >= 0 and self._tables.get(shrink) is None:
            digest = self._chain.prefix_digest(1, shrink)
            key = self._number, WINDOWED, shrink, digest
            self._recorder.add_cost(key, seconds, size, self._source)
        return pixels


class RowPrefixes:
    """The prefixes of one sample, by field."""

    __slots__ = ("_kept", "_recorder", "_sample")

    def __init__(
        self, recorder: SliceRecorder, sample: int, kept: Sequence[Sequence[tuple[int, ...]]]
    ) -> None:
        self._recorder, self._sample, self._kept = recorder, sample, kept

    def begin(self, number: int, chain: OpChain, draw: Draw, read: Callable[[], bytes]) -> tuple[Any, int]:
        """Return (value, number of the chain's steps that made it); `read` returns the field's bytes.

        Raises as rendering does.
        """
        order = self._recorder.order_of(number)
        if order.steps == MEASURE:
            return self._measure(number, chain, draw, read)
        if order.steps == WINDOWED and chain.windowed is not None:
            return self._begin_windowed(number, chain, draw, read)
        if order.steps > 0 and order.tables:
            return self._begin_steps(order, number, chain, draw, read)
        return read(), 0

    def keep(self, number: int, chain: OpChain, draw: Draw, read: Callable[[], bytes]) -> int:
        """Store what `begin` would have to compute, unless the cache has it. Returns the verdict.

        Raises as rendering does.
        """
        order = self._recorder.order_of(number)
        if order.steps == MEASURE:
            self._measure(number, chain, draw, read)
            return MEASURED
        kept = self._kept[number] if self._kept else ()
        if order.steps == WINDOWED and chain.windowed is not None:
            if not kept and order.tables:
                return REFUSED
            image = WindowedImage(self._recorder, chain, number, self._sample, self._kept, read)
            chain.keep_windowed(image.keep_window, draw, self._recorder.tally)
            return image.verdict
        if order.steps <= 0 or not order.tables or any(len(place) == 4 for place in kept):
            return KEPT
        if (WHOLE_STEPS,) not in kept:
            return REFUSED
        value = self._make_steps(order, chain, draw, read)
        return STORED if self._recorder.store(order.tables[0], self._sample, value) else UNSTORED

    def _measure(self, number: int, chain: OpChain, draw: Draw, read: Callable[[], bytes]) -> tuple[Any, int]:
        if chain.windowed is not None:
            return self._begin_windowed(number, chain, draw, read)
        value: Any = read()
        source = len(value)
        if self._sample < 0:
            return value, 0
        clock, spent = self._recorder.clock, 0.0
        for steps in range(1, chain.prefix_length + 1):
            began = clock.mark()
            value = chain.run_steps(value, steps - 1, steps, draw, self._recorder.tally)
            spent += clock.since(began)
            if can_keep(value):
                key = number, steps, WHOLE_STEPS, chain.prefix_digest(steps, WHOLE_STEPS)
                self._recorder.add_cost(key, spent, value_bytes(value), source)
        return value, chain.prefix_length

    def _begin_steps(
        self, order: FieldOrder, number: int, chain: OpChain, draw: Draw, read: Callable[[], bytes]
    ) -> tuple[Any, int]:
        table, clock = order.tables[0], self._recorder.clock
        kept = self._kept[number] if self._kept else ()
        for place in kept:
            if len(place) == 4:
                began = clock.mark()
                try:
                    value = self._recorder.files.read_value(
                        self._recorder.path(place[1]), table.table, self._sample, place[2], place[3]
                    )
                except EntryError:
                    self._recorder.add_damaged(table.table, self._sample)
                else:
                    self._recorder.add_hit(table.table, clock.since(began), place[3])
                    return value, order.steps
        value = self._make_steps(order, chain, draw, read)
        if (WHOLE_STEPS,) in kept:
            self._recorder.store(table, self._sample, value)
        return value, order.steps

    def _make_steps(self, order: FieldOrder, chain: OpChain, draw: Draw, read: Callable[[], bytes]) -> Any:
        """Compute the result of the steps that are kept."""
        data, clock = read(), self._recorder.clock
        began = clock.mark()
        value = chain.run_steps(data, 0, order.steps, draw, self._recorder.tally)
        self._recorder.add_made(order.tables[0].table, clock.since(began), value_bytes(value))
        return value

    def _begin_windowed(
        self, number: int, chain: OpChain, draw: Draw, read: Callable[[], bytes]
    ) -> tuple[Any, int]:
        image = WindowedImage(self._recorder, chain, number, self._sample, self._kept, read)
        return chain.run_windowed(image.draw_window, draw, self._recorder.tally), 1
