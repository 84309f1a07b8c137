"""Damage that readers of this process came upon: extents to be looked at again, and put in quarantine.

Law: whoever finds bytes that fail their checksum, or that the device cannot read, says so here and fails;
nothing is waited for. Bounded: of more than `MOST` the scrub finds the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.store.records import Extent, Span

MOST: Final = 10_000
_noticed: Final[dict[Extent, None]] = {}


def notice(extent: Extent) -> None:
    """Its bytes could not be had as they were written (any thread)."""
    if len(_noticed) < MOST:
        _noticed[extent] = None


def notice_behind(spans: Sequence[Span], sent: int) -> None:
    """The bytes behind the first `sent` of these could not be had."""
    for span in spans:
        if sent < span.length:
            if span.extent is not None:
                notice(span.extent)
            return
        sent -= span.length


def take_noticed(wanted: Callable[[Extent], bool]) -> list[Extent]:
    """Those of a store, no longer remembered."""
    found = [extent for extent in list(_noticed) if wanted(extent)]
    for extent in found:
        _noticed.pop(extent, None)
    return found
