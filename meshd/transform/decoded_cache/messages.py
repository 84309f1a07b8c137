"""Messages of the decoded cache, which travel inside the pool's requests and replies.

Tables are numbered by the coordinator. A variant is the reduction at which an image was decoded (1, 2, 4, 8),
or 0 for the result of whole steps.
"""

from __future__ import annotations

from typing import Final

import msgspec

WHOLE_STEPS: Final = 0
"""The variant of results of whole steps."""
PLAIN: Final = 0
"""Number of steps if nothing is kept for a field."""
MEASURE: Final = -2
"""Instead of a number of steps: run the chain as usual and measure what each step costs."""
WINDOWED: Final = -1
"""Instead of a number of steps: the first step's decoded image, before its drawn window is cut."""

KEPT: Final = 0
"""Verdict on a row whose prefixes alone are made: all of them were in the cache, or none is to be."""
STORED: Final = 1
"""Verdict: what was missing has been stored."""
REFUSED: Final = 2
"""Verdict: the order of the slice did not allow it."""
UNSTORED: Final = 3
"""Verdict: a result is too large, or could not be written."""
MEASURED: Final = 4
"""Verdict: it was only measured; the next time, it may be stored."""

KeptPlace = tuple[int, ...]
"""(variant, index into the request's `paths`, offset, length): an entry to read; (variant,): it may be
stored."""


class TableOrder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One table of a field. `segment`: index into the request's `paths` of the file to append to, or -1;
    `capacity`: bytes that the file may grow to."""

    variant: int
    table: int
    segment: int
    capacity: int = 0


class FieldOrder(msgspec.Struct, frozen=True, array_like=True):
    """What to do for a field. `steps`: the number of steps whose result is kept; PLAIN, MEASURE, WINDOWED."""

    steps: int
    tables: tuple[TableOrder, ...] = ()


class StoredEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An entry that was appended. `offset`, `length`: its bytes in the segment of its table."""

    table: int
    sample: int
    offset: int
    length: int


class PrefixCost(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Cost of a possible prefix of a field, as measured: `seconds` for `calls` samples.

    `size`: bytes of their results; `source`: bytes of their files; `digest` names the ops of the prefix.
    """

    field: int
    steps: int
    variant: int
    digest: str
    calls: int
    seconds: float
    size: int
    source: int = 0


class TableUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a slice did with a table. `made`: results computed although a table for them exists.

    Seconds of reading `hits`, of computing, and of writing `stores`; `hit_bytes` were read.
    """

    table: int
    hits: int = 0
    hit_seconds: float = 0.0
    hit_bytes: int = 0
    made: int = 0
    made_seconds: float = 0.0
    made_bytes: int = 0
    stores: int = 0
    store_seconds: float = 0.0


class PrefixReport(msgspec.Struct, frozen=True, array_like=True):
    """The part of a reply about prefixes. `damaged`: (table, sample) of entries that could not be used.

    `full`: an entry could not be written.
    """

    costs: tuple[PrefixCost, ...] = ()
    stored: tuple[StoredEntry, ...] = ()
    uses: tuple[TableUse, ...] = ()
    damaged: tuple[tuple[int, int], ...] = ()
    full: bool = False
