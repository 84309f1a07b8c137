"""Prefixes of one sample, in a transform process: read from the decoded cache, or computed and stored.

Law: whatever is read or stored, the value that a chain goes on with is the one that its steps would have
made. An entry that cannot be used is reported, and its value computed.
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
from meshd.transform.decoded_cache.windowed_image import WindowedImage
from meshd.transform.messages import value_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.transform.decoded_cache.messages import FieldOrder
    from meshd.transform.decoded_cache.slice_recorder import SliceRecorder
    from meshd.transform.op_chain import Draw, OpChain


class RowPrefixes:
    """The prefixes of one sample, by field."""

    __slots__ = ("_kept", "_sample", "_slice")

    def __init__(
        self, recorder: SliceRecorder, sample: int, kept: Sequence[Sequence[tuple[int, ...]]]
    ) -> None:
        self._slice, self._sample, self._kept = recorder, sample, kept

    def begin(self, number: int, chain: OpChain, draw: Draw, read: Callable[[], bytes]) -> tuple[Any, int]:
        """Return (value, number of the chain's steps that made it); `read` returns the field's bytes.

        Raises as rendering does.
        """
        order = self._slice.order_of(number)
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
        order = self._slice.order_of(number)
        if order.steps == MEASURE:
            self._measure(number, chain, draw, read)
            return MEASURED
        kept = self._kept[number] if self._kept else ()
        if order.steps == WINDOWED and chain.windowed is not None:
            if not kept and order.tables:
                return REFUSED
            image = WindowedImage(self._slice, chain, number, self._sample, self._kept, read)
            chain.keep_windowed(image.keep_window, draw, self._slice.tally)
            return image.verdict
        if order.steps <= 0 or not order.tables or any(len(place) == 4 for place in kept):
            return KEPT
        if (WHOLE_STEPS,) not in kept:
            return REFUSED
        value = self._make_steps(order, chain, draw, read)
        return STORED if self._slice.store(order.tables[0], self._sample, value) else UNSTORED

    def _measure(self, number: int, chain: OpChain, draw: Draw, read: Callable[[], bytes]) -> tuple[Any, int]:
        if chain.windowed is not None:
            return self._begin_windowed(number, chain, draw, read)
        value: Any = read()
        source = len(value)
        if self._sample < 0:
            return value, 0
        clock, spent = self._slice.clock, 0.0
        for steps in range(1, chain.prefix_length + 1):
            began = clock.mark()
            value = chain.run_steps(value, steps - 1, steps, draw, self._slice.tally)
            spent += clock.since(began)
            if can_keep(value):
                key = number, steps, WHOLE_STEPS, chain.prefix_digest(steps, WHOLE_STEPS)
                self._slice.add_cost(key, spent, value_bytes(value), source)
        return value, chain.prefix_length

    def _begin_steps(
        self, order: FieldOrder, number: int, chain: OpChain, draw: Draw, read: Callable[[], bytes]
    ) -> tuple[Any, int]:
        table, clock = order.tables[0], self._slice.clock
        kept = self._kept[number] if self._kept else ()
        for place in kept:
            if len(place) == 4:
                began = clock.mark()
                try:
                    value = self._slice.files.read_value(
                        self._slice.path(place[1]), table.table, self._sample, place[2], place[3]
                    )
                except EntryError:
                    self._slice.add_damaged(table.table, self._sample)
                else:
                    self._slice.add_hit(table.table, clock.since(began), place[3])
                    return value, order.steps
        value = self._make_steps(order, chain, draw, read)
        if (WHOLE_STEPS,) in kept:
            self._slice.store(table, self._sample, value)
        return value, order.steps

    def _make_steps(self, order: FieldOrder, chain: OpChain, draw: Draw, read: Callable[[], bytes]) -> Any:
        """Compute the result of the steps that are kept."""
        data, clock = read(), self._slice.clock
        began = clock.mark()
        value = chain.run_steps(data, 0, order.steps, draw, self._slice.tally)
        self._slice.add_made(order.tables[0].table, clock.since(began), value_bytes(value))
        return value

    def _begin_windowed(
        self, number: int, chain: OpChain, draw: Draw, read: Callable[[], bytes]
    ) -> tuple[Any, int]:
        image = WindowedImage(self._slice, chain, number, self._sample, self._kept, read)
        return chain.run_windowed(image.draw_window, draw, self._slice.tally), 1
